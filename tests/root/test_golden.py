"""PonderLM-2 against numbers of the official code (tests/golden). Losses: interop/test_interop.py; its loop:
methods/test_equivalence.py."""

import torch
from helpers import decode, read_golden

from sample import stream


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_every_pass(monkeypatch):
    """Catches a ladder that adds slots in another order, or refreshes too few latents."""
    model, expected, _ = read_golden("fwd_K2_J1.safetensors")
    passes, transform = [], model.transform
    monkeypatch.setattr(model, "transform", lambda *args: passes.append(transform(*args)) or passes[-1])
    model.jacobi(expected["input_ids"], R=1)
    assert len(passes) == 4
    for n, h in enumerate(passes):
        official = expected[f"pass_out.{n}"].view_as(h)
        assert_close(h, official)
        assert_close(model.lm_head(h), model.lm_head(official))


def test_cached_decoding():
    """Catches wrong positions or keys in the cache: greedy ids, and the logits of every step."""
    model, expected, _ = read_golden("decode_K2_J12.safetensors")
    prompt, sequences = expected["prompt"], expected["sequences"]
    n = sequences.size(1) - prompt.size(1)
    for b, sequence in enumerate(sequences):
        found = [*stream(model, prompt[b], n, temperature=0.0)]
        assert found == [(token, 2) for token in sequence[-n:].tolist()]
        logits, _, _ = decode(model, sequence[:-1])
        assert_close(logits[prompt.size(1) - 1 :], expected["step_logits"][b])
