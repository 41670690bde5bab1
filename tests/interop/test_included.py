"""The model that comes with the code: models/shakespeare."""

import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from conftest import ROOT

from interop import INCLUDED, load
from training.config import TrainConfig, read_run
from training.runs import Results, Scores, read_results

TEXT = b"""\
ROMEO:
The sun, the sun, the sun! and then the zephyr,
And then the sun again.

JULIET:
What's that to me?"""


def test_its_loss_is_as_stated():
    """Catches weights that are other ones than those described, or are read as others: the loss of
    a text, with all steps and with early exit, to 1e-3, and its steps, to 0.02."""
    model, idx = load(INCLUDED), torch.tensor([list(TEXT)])
    of_text = (INCLUDED / "README.md").read_text("utf-8").split("explainer begins")[1]
    stated = re.findall(r"\| `--tau (\S+)` \| (\S+) \| (\S+) \|", of_text)
    assert len(stated) == 2
    for tau, loss, steps in stated:
        with torch.no_grad():
            out = model(idx[:, :-1], idx[:, 1:], tau=float(tau))
        assert out.loss.item() == pytest.approx(float(loss), abs=1e-3)
        assert out.steps.float().mean().item() == pytest.approx(float(steps), abs=0.02)
    assert (INCLUDED / "model.safetensors").stat().st_size < 1.5e6


def test_its_files_are_those_of_a_run():
    """Catches a setting or a score of today's runs that its files lack, and a page whose losses and
    steps are others than those of results.json."""
    _, config, _ = read_run(INCLUDED)
    written = json.loads((INCLUDED / "train.json").read_text("utf-8"))["config"]
    assert written.keys() == {f.name for f in fields(TrainConfig)}
    results = read_results(INCLUDED)
    assert results.keys() == Results.__annotations__.keys()
    assert all(results[name].keys() == Scores.__annotations__.keys() for name in ("fixed", "hard"))
    page = (INCLUDED / "README.md").read_text("utf-8").split("explainer begins")[0]
    stated = re.findall(r"\| `--tau (\S+)`.* \| (\S+) \| (\S+) \|", page)
    stated = {tau: (loss, steps) for tau, loss, steps in stated}
    for tau, scores in (("5e-3", results["hard"]), ("auto", results["chosen"])):
        assert stated[tau] == (f"{scores['loss']:.4f}", f"{scores['steps']:.2f}")
    assert config.tau == 5e-3 and results["chosen"]["tau"] == 0.3


def test_sample_without_a_run(tmp_path):
    """Catches a first `python sample.py` in a fresh clone that has nothing to say."""
    command = [sys.executable, str(ROOT / "sample.py"), "--max-new-tokens", "5", "--seed", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "this is the model that comes with the code, shakespeare" in done.stdout
    assert "thinking steps" in done.stdout  # the puzzles of the other one
