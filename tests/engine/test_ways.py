"""A model says the same whichever way it is asked: by the root's decoder, by the engine, or all at once."""

from dataclasses import asdict

import helpers
import pytest
import torch
from placement import TEST_DEVICE

import model as root
import sample
from lab.engine.batching import Engine
from lab.engine.request import choose
from lab.interop.weights import INCLUDED, load
from lab.methods import PonderConfig, PonderLM3

GROUPED = dict(num_attention_heads=4, num_key_value_heads=1, head_dim=10)
MODELS = {
    "docstrings": None,
    "K = 0": dict(seed=1, ponder_steps=0),
    "K = 1": dict(seed=2, ponder_steps=1),
    "K = 3, tied": dict(seed=3, tie_word_embeddings=True),
    "K = 3, grouped": dict(seed=4, **GROUPED),
    "K = 3, alpha": dict(seed=5),
}


def two_of(settings):
    """The root's model and the lab's of the same weights, in float32."""
    if settings is None:
        return root.load(INCLUDED).to(TEST_DEVICE), load(INCLUDED).to(TEST_DEVICE)
    ours = helpers.small_model(block_size=64, **settings).float()
    theirs = PonderLM3(PonderConfig(**asdict(ours.config))).eval().to(TEST_DEVICE)
    theirs.load_state_dict(ours.state_dict())
    theirs.tie()
    return ours, theirs


def by_engine(model, prompt, n, monkeypatch, tau, alpha, **how):
    """-> tokens, the steps of all that were read, and the logits from which each token was chosen."""
    seen, read = [], [[]]

    def watch(logits, *args):
        seen.append(logits[0])
        return choose(logits, *args)

    with monkeypatch.context() as patch:
        patch.setattr("lab.engine.batching.choose_finite", watch)
        patch.setattr("lab.engine.rows.choose", watch)
        engine = Engine(model, 1, tau=tau, alpha=alpha, **how)
        tokens = [token for _, token, _ in engine.stream([prompt], n, read=read, temperature=0.0)]
    return tokens, read[0], torch.stack(seen)


@pytest.mark.parametrize("tau", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_same(name, tau, monkeypatch):
    """Catches one of the ways that says something else: the same tokens, the same steps, logits to 1e-4; all
    at once, where the iteration stops by itself (at a relative change of 1e-4), to 1e-3."""
    ours, theirs = two_of(MODELS[name])
    prompt, n, alpha = ([82, 101, 116, 117, 114, 110, 32], 24, 2.0 if "alpha" in name else 0.0)
    prompt, read, seen = [token % ours.config.vocab_size for token in prompt], [], []

    def greedy(logits):
        seen.append(logits)
        return int(logits.argmax())

    how = dict(tau=tau, alpha=alpha)
    tokens = [t for t, _ in sample.stream(ours, prompt, n, choose=greedy, read=read, **how)]
    logits = torch.stack(seen)
    for model, R, atol in ((ours, 1000, 1e-4), (ours, None, 1e-3), (theirs, None, 1e-3)):
        out = model(torch.tensor([prompt + tokens[:-1]]), R=R, **how)
        assert out.steps[0].tolist() == read
        torch.testing.assert_close(out.logits[0, len(prompt) - 1 :], logits, atol=atol, rtol=0)
    for way in (dict(prefill="jacobi"), dict(prefill="sequential")):
        found = by_engine(theirs, prompt, n, monkeypatch, **how, **way)
        assert found[:2] == (tokens, read)
        if TEST_DEVICE.type == "cpu":  # nobody can look at logits within a CUDA graph
            torch.testing.assert_close(found[2], logits, atol=1e-4, rtol=0)
