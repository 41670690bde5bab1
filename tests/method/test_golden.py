"""PonderLM-2 against numbers of the official code (tests/golden)."""

import torch

from sample import generate


def test_every_pass(golden):
    """Catches a ladder that adds slots in another order, or refreshes too few latents."""
    model, expected, _ = golden("fwd_K2_J1.safetensors")
    idx = expected["input_ids"]
    with torch.no_grad():
        e = model.embed(idx)
        latents = e[:, :, None][:, :, :0]
        for n in range(4):
            h, _, _ = model.jacobi_pass(e, latents)
            latents = model.feed_back(h[:, :, :2])
            torch.testing.assert_close(
                h.flatten(1, 2), expected[f"pass_out.{n}"], atol=1e-5, rtol=0
            )
            logits = (
                model.lm_head(h),
                model.lm_head(expected[f"pass_out.{n}"]).view(*h.shape[:3], -1),
            )
            torch.testing.assert_close(*logits, atol=1e-5, rtol=0)


def test_logits_and_loss(golden):
    """Catches another slot's logits, or targets shifted by one."""
    model, expected, config = golden("fwd_K2_J1.safetensors")
    idx = expected["input_ids"]
    targets = torch.full_like(idx, -100)
    targets[:, :-1] = idx[:, 1:]
    with torch.no_grad():
        out = model(idx, targets, R=config["num_jacobi_iterations"])
    torch.testing.assert_close(out.logits, expected["logits"], atol=1e-5, rtol=0)
    torch.testing.assert_close(out.loss, expected["loss"][0], atol=1e-5, rtol=0)


def test_cached_decoding(golden):
    """Catches wrong positions or keys in the cache: greedy ids, and the logits of every step."""
    model, expected, _ = golden("decode_K2_J12.safetensors")
    prompt, sequences = expected["prompt"], expected["sequences"]
    n = sequences.size(1) - prompt.size(1)
    samples = generate(model, prompt, n, temperature=0)
    for b, sample in enumerate(samples):
        assert sample.tokens == sequences[b, prompt.size(1) :].tolist()
        assert sample.steps == [2] * n
        cache = model.new_cache()
        logits = [model.ponder_token(int(x), t, cache)[0] for t, x in enumerate(sequences[b, :-1])]
        actual = torch.stack(logits[prompt.size(1) - 1 :])
        torch.testing.assert_close(actual, expected["step_logits"][b], atol=1e-5, rtol=0)
