"""`python -m lab bench decode`: what it measures against, and what it refuses before it measures."""

import pytest
import torch
from lab_helpers import needs_bfloat16, small_model
from pydantic import ValidationError

from data import UserError
from lab.bench.decoding import (
    decode,
    exit_rows,
    in_ctranslate2,
    llama,
    other_rows,
    prompt_rows,
    prompts_of,
    weight_bytes,
)
from lab.engine.batching import Engine
from lab.interop.weights import save


@pytest.fixture(scope="module")
def val():
    return torch.randint(31, (200,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "method, options, wrong",
    [
        ("ponderlm3", dict(prompts=(-3,)), "equal to 1"),
        ("ponderlm3", dict(alphas=(float("nan"),)), "less than or equal to"),
        ("ponderlm3", dict(tau=2.0), "less than or equal to"),
        ("ponderlm2", {}, "of method ponderlm2: give a PonderLM-3"),
    ],
)
def test_refusals(method, options, wrong, tmp_path):
    """Catches a measurement that breaks off after minutes, or sweeps a router that is not there."""
    save(small_model(method=method).float(), tmp_path)
    with pytest.raises((UserError, ValidationError), match=wrong):
        decode(str(tmp_path), device="cpu", **options)


def test_llama_beside_a_ponderlm():
    """Catches settings of PonderLM-3 that keep a Llama of its shape away, and another shape."""
    model = small_model(penalty_weight=0.0, reread=True)
    theirs, ours = llama(model.config)
    idx = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(idx).logits, theirs(idx).logits, atol=1e-5, rtol=0)
    assert ours.config.hidden_size == model.config.hidden_size and ours.config.method == "vanilla"


def test_ctranslate2(val):
    """Catches a peer that does something else: other weights, positions, or fewer tokens."""
    theirs, ours = llama(small_model().config)
    prompts = prompts_of(val, 3, 12)
    found = in_ctranslate2(theirs, "float32")(prompts, 9)
    assert found == [s.tokens for s in Engine(ours, 3).generate(prompts, 9, temperature=0)]


INT8 = pytest.param(dict(weights="int8"), marks=needs_bfloat16)


@pytest.mark.parametrize("how", [{}, dict(dtype=torch.bfloat16), INT8], ids=str)
def test_weights_that_a_pass_reads(how):
    """Catches a share of the memory's speed that counts other weights than are read."""
    model = small_model(method="vanilla").float()
    by_hand = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    by_hand -= model.model.embed_tokens.weight.numel()  # of which it takes a line
    size = 1 if "weights" in how else 2 if how else 4
    assert weight_bytes(Engine(model, 1, **how)) == size * by_hand


@pytest.mark.parametrize("how", [{}, dict(dtype=torch.bfloat16), INT8], ids=str)
def test_rows(val, how):
    """Catches a measurement that crashes, or counts other slots than were run."""
    alphas, single = (0.0, -4.0), small_model(seed=2, block_size=64).float()
    full, less = exit_rows(single, val, (2,), (5,), 4, 0.3, alphas, 1, **how)
    assert 0 < less["slot_ratio"] < full["slot_ratio"] < 1 and less["time_ratio"] > 0
    assert less["slot_ratio"] == pytest.approx((1 + less["steps"]) / 4)
    for row in (full, less):  # of 4 samples of 4 tokens, of which the first comes of the prompt
        engine = Engine(single, 2, tau=0.3, alpha=row["alpha"], prefill="jacobi", **how)
        engine.generate(4 * prompts_of(val, 1, 5), 4, seed=0)
        assert (1 + row["steps"]) * 4 * 3 == pytest.approx(engine.stats.slots)
    always = less["tokens_per_second"] * less["time_ratio"]
    assert less["always_tokens_per_second"] == pytest.approx(always)
    others = other_rows(single, val, (2,), (5,), 4, 1, **how)
    against = [row["against"] for row in others]
    assert against == ["transformers"] + ["CTranslate2"] * ("dtype" not in how)
    assert all(0 < row["memory"] < 1 for row in others)
    for row in prompt_rows(single, val, (5,), 1, **how):
        assert 0.25 <= row["slot_ratio"] <= 1 <= row["passes"] <= 16
