"""`python -m bench decode`: what it measures against, and what it refuses before it measures."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from conftest import needs_bfloat16, small_model
from pydantic import ValidationError

from bench.decoding import (
    How,
    SamePrompt,
    context_rows,
    decode,
    exit_rows,
    limit,
    llama,
    other_rows,
    prompt_rows,
    prompts_of,
)
from bench.throughput import serve, serve_in_batches
from engine.batching import Engine
from interop import save
from runtime import UserError


@pytest.fixture(scope="module")
def model():
    return small_model(seed=2, block_size=64)


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
    model = small_model(method="ablation-mask", penalty_weight=0.0, feedback_scale=2.0)
    theirs, ours = llama(model.config)
    idx = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(idx).logits, theirs(idx).logits, atol=1e-5, rtol=0)
    assert ours.config.hidden_size == model.config.hidden_size and ours.config.method == "vanilla"


def test_limit():
    """Catches weights, or a cache, that are counted in bytes of another size."""
    model, sizes = small_model().float(), []
    own = torch.ones

    def watched(*shape, **kwargs):
        sizes.append(shape[0])
        return own(*shape, **kwargs)

    for weights in ("float32", "bfloat16", "int8"):
        with patch("bench.decoding.torch.ones", watched):
            limit(model, 2, 10, How(weights=weights))
    config, few = model.config, sum(p.numel() for p in model.parameters() if p.dim() == 2)
    few -= model.model.embed_tokens.weight.numel() + model.router.proj.weight.numel()
    kv = 4 * 2 * 2 * 10 * config.key_value_heads * config.head_width * config.num_hidden_layers
    found = [4 * n for n in sizes]
    assert found == pytest.approx([4 * few + kv, 2 * few + kv, few + kv], abs=3)


def test_same_prompt(model):
    """Catches a prompt that is copied with a slot too many, or read again for each sequence."""
    prompts, settings = 5 * [[3, 1, 4, 1, 5]], dict(seed=0, temperature=1.0)
    engine, other = SamePrompt(model, 2, tau=0.3), Engine(model, 2, tau=0.3, prefill="jacobi")
    for _ in range(2):
        assert engine.generate(prompts, 6, **settings) == other.generate(prompts, 6, **settings)
    once = Engine(model, 1, tau=0.3, prefill="jacobi")
    once.generate(prompts[:1], 1)
    assert engine.stats.prompt_passes == once.stats.prompt_passes


INT8 = pytest.param(How(weights="int8"), marks=needs_bfloat16)


@pytest.mark.parametrize("how", [How(), How("bfloat16"), INT8], ids="-".join)
def test_rows(model, val, how):
    """Catches a measurement that crashes, or counts other slots than were run."""
    alphas, single = (0.0, -4.0), small_model(seed=2, block_size=64).float()
    full, less = exit_rows(single, val, (2,), (5,), 4, 0.3, alphas, 1, how)
    assert 0 < less["slot_ratio"] < full["slot_ratio"] < 1 and less["time_ratio"] > 0
    assert less["slot_ratio"] == pytest.approx((1 + less["steps"]) / 4)
    assert 0 < full["limit_share"] == less["limit_share"] < 1
    for row in (full, less):  # of 4 samples of 4 tokens, of which the first comes of the prompt
        engine = how.engine(single, 2, tau=0.3, alpha=row["alpha"], prefill="jacobi")
        engine.generate(4 * prompts_of(val, 1, 5), 4, seed=0)
        assert (1 + row["steps"]) * 4 * 3 == pytest.approx(engine.stats.slots)
    always = less["tokens_per_second"] * less["time_ratio"]
    assert less["always_tokens_per_second"] == pytest.approx(always)
    against = [row["against"] for row in other_rows(single, val, (2,), (5,), 4, 1, how)]
    assert against == ["no cache", "transformers"]
    for row in prompt_rows(single, val, (5,), alphas, 1, how):
        assert 0.25 <= row["slot_ratio"] <= 1 <= row["passes"] <= 16
    assert [row["slots"] for row in context_rows(single, (4, 16), 1, how)] == [4, 16]


def test_context(monkeypatch):
    """Catches a token that is timed behind other slots than the row says, or not to its end."""
    seen, launch = [], Engine.launch
    watch = lambda self, how: seen.append(self.running[0].length) or launch(self, how)  # noqa: E731
    monkeypatch.setattr(Engine, "launch", watch)
    context_rows(small_model(block_size=64).float(), (16,), 1)
    assert seen == 2 * list(range(16, 16 + 8 * 4))


def test_requests(model, monkeypatch):
    """Catches requests that get other numbers of tokens than they are counted for, and a batch of
    transformers that is not as long as its longest or does not hide its padding."""
    prompts, lengths, made, asked = [[1], [2, 3], [4]], [2, 5, 3], [], []
    engine = Engine(model, 2)
    generate = engine.generate
    monkeypatch.setattr(engine, "generate", lambda *x, **y: made.extend(generate(*x, **y)))
    serve(engine, prompts, lengths)
    assert [len(sample.tokens) for sample in made] == lengths

    def record(idx, attention_mask, max_new_tokens, min_new_tokens, **_):
        assert min_new_tokens == max_new_tokens
        asked.append((idx.tolist(), attention_mask.tolist(), max_new_tokens))

    serve_in_batches(SimpleNamespace(device="cpu", generate=record), prompts, lengths, 2)
    assert asked == [([[0, 1], [2, 3]], [[0, 1], [1, 1]], 5), ([[4]], [[1]], 3)]
