"""PonderLM-2 and its loop against numbers of the official code (tests/golden)."""

import pytest
import torch
from conftest import decode

from lab.engine.simple import generate


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_every_pass(golden):
    """Catches a ladder that adds slots in another order, or refreshes too few latents."""
    model, expected, _ = golden("fwd_K2_J1.safetensors")
    with torch.no_grad():
        e = model.embed(expected["input_ids"])
        latents = e[:, :, None][:, :, :0]
        for n in range(4):
            h = model.jacobi_pass(e, latents)
            official = expected[f"pass_out.{n}"].view_as(h)
            assert_close(h, official)
            assert_close(model.lm_head(h), model.lm_head(official))
            latents = h[:, :, :2]


@pytest.mark.parametrize("name,method", [("fwd_K2_J1", "ponderlm2"), ("loop_K2", "looped")])
def test_logits_and_loss(golden, name, method):
    """Catches another slot's logits, targets shifted by one, a loop with a norm in between, or one
    too many."""
    model, expected, config = golden(f"{name}.safetensors", method)
    idx = expected["input_ids"]
    targets = torch.full_like(idx, -100)
    targets[:, :-1] = idx[:, 1:]
    with torch.no_grad():
        out = model(idx, targets, R=config.get("num_jacobi_iterations"))
    assert_close(out.logits, expected["logits"])
    assert_close(out.loss, expected["loss"][0])


def test_cached_decoding(golden):
    """Catches wrong positions or keys in the cache: greedy ids, and the logits of every step."""
    model, expected, _ = golden("decode_K2_J12.safetensors")
    prompt, sequences = expected["prompt"], expected["sequences"]
    n = sequences.size(1) - prompt.size(1)
    samples = generate(model, prompt, n, temperature=0)
    for b, sample in enumerate(samples):
        assert sample.tokens == sequences[b, prompt.size(1) :].tolist()
        assert sample.steps == [2] * n
        logits, _, _ = decode(model, sequences[b, :-1])
        assert_close(logits[prompt.size(1) - 1 :], expected["step_logits"][b])
