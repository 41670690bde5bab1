"""Tiny runs, trained once for all tests of this folder and all workers; and random models."""

import contextlib
import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from analysis.measuring import Subject
from baselines import configure
from corpus.lookup import prepare_lookup
from corpus.tokenizers import Tokenizer
from model import PonderConfig
from train import train
from training.config import PRESETS, TrainConfig


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Commands write data/ and out/ into the current folder: not into this one."""
    monkeypatch.chdir(tmp_path)


def train_all(folder):
    """PonderLM-3, vanilla and PonderLM-2 on one text, one of them on another, three on lookups."""
    model = PonderConfig(257, 32, 64, 1, 2, head_dim=16, block_size=16, ponder_steps=2)
    config = TrainConfig(preset="tiny", data=str(folder / "text.txt"), model=model)
    config = replace(config, steps=1, learning_rate=1e-2, eval_windows=8, precision="float32")
    config = replace(config, device="cpu", out=str(folder / "out"))
    text = "the quick brown fox jumps over the lazy dog, <b>é</b> of a kind.\n" * 200
    (folder / "text.txt").write_text(text, encoding="utf-8")
    (folder / "other.txt").write_text(text.replace("lazy", "busy"), encoding="utf-8")
    prepare_lookup(folder / "data/lookup", lines=200)
    other = replace(config, data=str(folder / "other.txt"))
    asked = replace(config, data=str(folder / "data/lookup"), steps=2, batch_size=2)
    zeros = {"router_offset": (0.0, 0.0, 0.0), "block_size": 64}
    for method, name, settings, changes in (
        ("ponderlm3", "ponder", replace(config, steps=20), {}),
        ("vanilla", "plain", replace(config, steps=20), {}),
        ("ponderlm2", "ponderlm2", config, {}),
        ("ponderlm3", "tau", replace(config, steps=2, tau=0.97), {}),  # w_2 is 0.95 at the start
        ("ponderlm3", "other", other, {}),
        ("ponderlm3", "lookup-0", asked, zeros),
        ("ponderlm3", "lookup-1", replace(asked, seed=1), zeros),
        ("vanilla", "lookup-plain", asked, {"block_size": 64}),
    ):
        train(replace(settings, name=name, model=configure(model, method, **changes)))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of the runs. Tests only read there: they copy a run to write into it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "trained-for-analysis"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            folder.mkdir()
            with contextlib.chdir(folder):
                train_all(folder)
            (folder / "done").touch()
    return folder / "out"


@pytest.fixture
def subject():
    """A model on random windows; small_model's vocabulary is taken for bytes."""

    def make(model, windows=3, T=8, tau=0.3, V=31):
        rows = torch.randint(V, (windows, T + 1), generator=torch.Generator().manual_seed(1))
        return Subject(Path("run"), model, Tokenizer.bytes(), None, rows, tau)

    return make


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """Headless Chromium."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    flags = "headless=new window-size=1000,900 no-sandbox disable-gpu "
    flags += f"user-data-dir={tmp_path_factory.mktemp('profile')}"
    for flag in flags.split():
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    driver.set_script_timeout(20)
    yield driver
    driver.quit()


SCORES = ("hard", "fixed", "trained", "permuted")


@pytest.fixture
def make_run(tmp_path):
    """Write a finished run with this loss and these steps: only what analyze.py reads of one."""

    def make(name, loss, steps, seed=0, method="ponderlm3", batch_size=8, **shape):
        model = configure(PRESETS["tiny"].model, method, **shape)
        config = replace(PRESETS["tiny"], seed=seed, model=model, steps=100, batch_size=batch_size)
        run = tmp_path / name
        run.mkdir()
        corpus = {"name": "text", "train_tokens": 1, "val_tokens": 1, "sha256": ""}
        corpus |= {"val_sha256": "", "tokenizer": ""}
        (run / "train.json").write_text(json.dumps({"config": asdict(config), "corpus": corpus}))
        (run / "config.json").write_text(json.dumps({"format": "ponderlm-3", **asdict(model)}))
        (run / "model.safetensors").touch()
        depths = {key: [] for key in ("truncated", "weight", "alone", "stopped")}
        results = {
            key: {"loss": loss + i / 8, "steps": steps} | depths for i, key in enumerate(SCORES)
        }
        results |= {"chosen": None, "R": 2, "unigram_entropy": 3.0}
        (run / "results.json").write_text(json.dumps(results))
        log = [{"step": s, "ce": float(s)} for s in range(5, 101, 5)] + [{"step": 100, "val": 1}]
        (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
        return str(run)

    return make
