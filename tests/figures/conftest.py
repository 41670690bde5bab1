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

from lab.corpora.lookup import prepare_lookup
from lab.figures.subject import Subject
from lab.methods import PonderConfig, configure
from lab.train import LabConfig, train
from tokenizer import Tokenizer
from train import preset_settings


def train_all(folder):
    """PonderLM-3 and vanilla on one text, one of them on another, three on lookups."""
    shape = PonderConfig(257, 32, 64, 1, 2, head_dim=16, block_size=16, ponder_steps=2, refinements=(1, 1))
    config = LabConfig("tiny", data=str(folder / "text.txt"), out=str(folder / "out"), steps=1, device="cpu")
    config = replace(config, learning_rate=1e-2, eval_windows=8, precision="float32")
    text = "the quick brown fox jumps over the lazy dog, <b>é</b> of a kind.\n" * 200
    (folder / "text.txt").write_text(text, encoding="utf-8")
    (folder / "other.txt").write_text(text.replace("lazy", "busy"), encoding="utf-8")
    prepare_lookup(folder / "data/lookup", lines=200)
    other = replace(config, data=str(folder / "other.txt"))
    asked = replace(config, data=str(folder / "data/lookup"), steps=2, batch_size=2)
    lines = {"vocab_size": 532, "block_size": 64}
    zeros = lines | {"router_offset": (0.0, 0.0, 0.0)}
    for method, name, settings, changes in (
        ("ponderlm3", "ponder", replace(config, steps=20), {}),
        ("vanilla", "plain", replace(config, steps=20), {}),
        ("ponderlm3", "tau", replace(config, steps=2, tau=0.97), {}),  # w_2 is 0.95 at the start
        ("ponderlm3", "other", other, {}),
        ("ponderlm3", "lookup-0", asked, zeros),
        ("ponderlm3", "lookup-1", replace(asked, seed=1), zeros),
        ("vanilla", "lookup-plain", asked, lines),
    ):
        train(replace(settings, name=name), configure(shape, method, **changes))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of the runs. Tests only read there: they copy a run to write into it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "trained-for-figures"
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
        return Subject(Path("run"), model, Tokenizer.named("bytes"), rows, tau)

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
    profile = f"user-data-dir={tmp_path_factory.mktemp('profile')}"
    for flag in ("headless=new", "window-size=1000,900", "no-sandbox", "disable-gpu", profile):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    driver.set_script_timeout(20)
    yield driver
    driver.quit()


@pytest.fixture
def make_run(tmp_path):
    """Write a finished run with this loss and these steps: only what is read of one."""

    def make(
        name, loss, steps, seed=0, method="ponderlm3", batch_size=8, init_from=None, machine="", **shape
    ):
        config, model = preset_settings("tiny")
        model = configure(model, method, **shape)
        config = LabConfig(**asdict(config) | dict(seed=seed, steps=100, batch_size=batch_size))
        config.init_from = init_from
        run = tmp_path / name
        run.mkdir()
        corpus = dict(name="text", train_tokens=1, val_tokens=1, sha256="", val_sha256="", tokenizer="")
        settings = {"config": asdict(config), "model": asdict(model), "corpus": corpus}
        (run / "train.json").write_text(json.dumps(settings))
        (run / "config.json").write_text(json.dumps({"format": "ponderlm-3", **asdict(model)}))
        (run / "model.safetensors").touch()
        ways = enumerate(("hard", "fixed", "trained"))
        results = {way: {"loss": loss + i / 8, "steps": steps, "stopped": [0.5, 0.5]} for i, way in ways}
        began = {"step": 0, "machine": machine, "threads": 1, "torch": "2.13", "precision": "float32"}
        log = [began] if machine else []  # older runs did not say it
        log.append({"step": 1, "tokens_per_second": 100})
        (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
        (run / "results.json").write_text(json.dumps(results | {"R": 2, "unigram_entropy": 3.0}))
        return str(run)

    return make
