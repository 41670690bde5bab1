"""The model that comes with the code: models/docstrings."""

import re

import pytest
import torch

import checkpoint as root
from common import read_json
from lab.figures import explainer
from lab.interop.weights import INCLUDED, load, read_config
from lab.train import read_run
from sample import stream


def test_its_loss_is_as_stated():
    """Catches weights that are other ones than described, or read as others: loss to 1e-3, steps to 0.02."""
    model, idx = load(INCLUDED), torch.tensor([list(explainer.TEXT.encode())[:65]])
    of_text = (INCLUDED / "README.md").read_text("utf-8").split("Loss on the first text")[1]
    stated = re.findall(r"\| `--tau (\S+)` \| (\S+) \| (\S+) \|", of_text)
    assert len(stated) == 2
    for tau, loss, steps in stated:
        with torch.no_grad():
            out = model(idx[:, :-1], idx[:, 1:], tau=float(tau))
        assert out.loss.item() == pytest.approx(float(loss), abs=1e-3)
        assert out.steps.float().mean().item() == pytest.approx(float(steps), abs=0.02)
    assert (INCLUDED / "model.safetensors").stat().st_size < 1.5e6


@pytest.mark.parametrize("tau", [0.0, 1e-4, 0.1])
@torch.no_grad()
def test_what_it_decodes(tau):
    """Catches other steps or logits (to 1e-4; 1e-3 where it stops by itself) than token by token."""
    model, prompt, seen, read = root.load(INCLUDED), [*b"Return "], [], []

    decode = model.ponder_token

    def seen_by_the_sampler(*args):
        logits, steps = decode(*args)
        seen.append(logits)
        return logits, steps

    model.ponder_token = seen_by_the_sampler
    tokens = [token for token, _ in stream(model, prompt, 24, temperature=0, read=read, tau=tau)]
    seen = seen[len(prompt) - 1 :]
    for same, R, atol in ((model, 1000, 1e-4), (model, None, 1e-3), (load(INCLUDED), None, 1e-3)):
        out = same(torch.tensor([prompt + tokens[:-1]]), R=R, tau=tau)
        assert out.steps[0].tolist() == read
        found = out.logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(found, torch.stack(seen), atol=atol, rtol=0)


def test_its_files_are_those_of_a_run():
    """Catches a setting that its files lack, and a page unlike results.json."""
    config, shape, _ = read_run(INCLUDED)
    assert shape == read_config(INCLUDED)
    page = (INCLUDED / "README.md").read_text("utf-8").split("Loss on the first text")[0]
    stated = {tau: scores for tau, *scores in re.findall(r"\| `--tau (\S+)`.* \| (\S+) \| (\S+) \|", page)}
    hard = read_json(INCLUDED / "results.json")["hard"]
    assert stated["1e-4"] == [f"{hard['loss']:.4f}", f"{hard['steps']:.2f}"] and config.tau == 1e-4
