"""The model that comes with the code: models/docstrings."""

import re

import pytest
import torch

from data import read_json
from lab.figures import explainer
from lab.interop.weights import INCLUDED, load, read_config
from lab.train import read_run


def test_its_loss_is_as_stated():
    """Catches weights that are other ones than those described, or are read as others: the loss of
    a text, with all steps and with early exit, to 1e-3, and its steps, to 0.02."""
    model, idx = load(INCLUDED), torch.tensor([list(explainer.TEXT.encode())[:65]])
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
    config, shape, _ = read_run(INCLUDED)
    assert shape == read_config(INCLUDED)
    results = read_json(INCLUDED / "results.json")
    assert {"trained", "fixed", "hard", "R", "unigram_entropy"} <= results.keys()
    assert all({"loss", "steps", "stopped", "weight"} <= results[x].keys() for x in ("fixed", "hard"))
    page = (INCLUDED / "README.md").read_text("utf-8").split("explainer begins")[0]
    stated = {tau: scores for tau, *scores in re.findall(r"\| `--tau (\S+)`.* \| (\S+) \| (\S+) \|", page)}
    hard = results["hard"]
    assert stated["1e-4"] == [f"{hard['loss']:.4f}", f"{hard['steps']:.2f}"] and config.tau == 1e-4
