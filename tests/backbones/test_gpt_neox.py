"""GPT-NeoX in the place of the Llama: every method, every decoder."""

import pytest
import torch
from conftest import needs_bfloat16, small_model

from baselines import all_methods, build, configure
from engine.batching import Engine
from model import PonderConfig, PonderLM
from runtime import UserError
from sample import generate

METHODS = [kind.method for kind in all_methods()]
NEOX = dict(backbone="gpt_neox", num_key_value_heads=None, rotary_pct=0.5, router_scale=12.0)


def neox(method="ponderlm3", **kwargs):
    steps = {"ponder_steps": 0} if method == "vanilla" else {}
    model = small_model(method=method, **NEOX | steps | kwargs)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # which a new model has at 0
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def tokens(B=3, T=10):
    return torch.randint(31, (B, T), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "sequential"])
@pytest.mark.parametrize("method", METHODS)
def test_cached_decoding_equals_scoring(method, parallel):
    """Catches a method that knows its backbone, and a cache without positions or biases: logits
    token by token, and the steps, of what all tokens at once give."""
    model, idx = neox(method, parallel_residual=parallel), tokens(B=1, T=12)
    with torch.no_grad():
        out = model(idx, R=40, tau=0.1)
    cache, read = model.new_cache(), []
    for t, token in enumerate(idx[0].tolist()):
        logits, steps = model.ponder_token(token, t, cache, tau=0.1)
        torch.testing.assert_close(logits, out.logits[0, t], atol=1e-9, rtol=0)
        read.append(steps)
    assert read == out.steps[0].tolist()
    if method == "ponderlm3":
        assert len(set(read)) > 1


@pytest.mark.parametrize("graphs", [False, True], ids=["host", "static"])
@pytest.mark.parametrize("prefill", ["jacobi", "sequential"])
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "sequential"])
def test_engine_equals_simple_decoder(parallel, prefill, graphs):
    """Catches a key in another row's place or without its bias, and rows that get mixed up when one
    ends: ids and steps of sample.generate, beyond the window."""
    model = neox(parallel_residual=parallel)
    prompts = [row[:n].tolist() for row, n in zip(tokens(5), (3, 10, 1, 7, 5), strict=True)]
    kwargs = dict(temperature=1.0, seed=3)
    expected = generate(model, prompts, 30, tau=0.1, **kwargs)
    engine = Engine(model, 3, tau=0.1, prefill=prefill, graphs=graphs)
    assert engine.generate(prompts, 30, **kwargs) == expected
    assert len({step for sample in expected for step in sample.steps}) > 2


def test_bfloat16():
    """Catches a step that needs one type throughout: the cache in half the size."""
    model = neox().float()
    found = Engine(model, 2, dtype=torch.bfloat16, tau=0).generate(tokens().tolist(), 5, seed=0)
    assert [len(sample.tokens) for sample in found] == [5] * 3


@pytest.mark.parametrize(
    "kwargs,message",
    [
        (dict(backbone="gpt"), "backbone 'gpt' is not one of llama, gpt_neox"),
        (dict(backbone="gpt_neox"), "num_key_value_heads = 2: gpt_neox does not follow it"),
        (dict(rotary_pct=0.5), "rotary_pct = 0.5: llama does not follow it"),
        (dict(parallel_residual=False), "parallel_residual = False: llama does not follow it"),
    ],
)
def test_settings_of_the_other(kwargs, message):
    """Catches a setting that is passed over, as the other backbone's."""
    with pytest.raises(UserError, match=message):
        small_model(**kwargs)


def test_rotary_width():
    """Catches half a pair."""
    with pytest.raises(ValueError, match=r"head_dim = 32 times rotary_pct = 0\.1 is odd"):
        PonderConfig(rotary_pct=0.1)


def test_built_by_build():
    """Catches a Llama with the name of a GPT-NeoX in its config."""
    config = configure(PonderConfig(), "ponderlm3", backbone="gpt_neox")
    assert type(build(config).model).__name__ == "Backbone"
    with pytest.raises(ValueError, match="build it by baselines"):
        PonderLM(config)


def test_initialisation():
    """Catches layers that write to the residual stream as loudly as the others, biases that are
    not zero."""
    torch.manual_seed(0)
    config = PonderConfig(backbone="gpt_neox", hidden_size=256, num_hidden_layers=8)
    model, std = build(config), (2 / (5 * 256)) ** 0.5
    for block in model.model.layers:
        for linear in block.writers():
            assert linear.weight.std().item() == pytest.approx(std / 4, rel=0.05)
        assert block.attention.query_key_value.weight.std().item() == pytest.approx(std, rel=0.05)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))


@needs_bfloat16
def test_weights_of_few_bits():
    """Catches an engine that takes a GPT-NeoX for a Llama to make its products fast."""
    with pytest.raises(UserError, match="weights = int8 is for llama, not gpt_neox"):
        Engine(neox().float(), 2, weights="int8")
