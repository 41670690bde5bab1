"""Another transformer in the place of the Llama. By the engine: engine/test_batching.py."""

import pytest
import torch
from lab_helpers import LLAMA3, decode, small_model, tokens

from data import UserError
from lab.methods import PonderConfig, all_methods, build, configure

NEOX = dict(backbone="gpt_neox", num_key_value_heads=None, router_scale=12.0)


def neox(method="ponderlm3", parallel=True):
    options = {"rotary_pct": 0.5, "parallel_residual": float(parallel)}
    model = small_model(method=method, backbone_options=options, **NEOX)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # which a new model has at 0
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "sequential"])
@pytest.mark.parametrize("method", [*(kind.method for kind in all_methods()), "llama3"])
def test_cached_decoding_equals_scoring(method, parallel):
    """Catches a method that knows its backbone, and a cache without positions or biases."""
    if method == "llama3":
        model = small_model(backbone="llama3", backbone_options=LLAMA3, router_scale=12.0)
    else:
        model = neox(method, parallel)
    idx = tokens(T=12)
    with torch.no_grad():
        out = model(idx, R=40, tau=0.1)
    logits, steps, _ = decode(model, idx[0], tau=0.1)
    torch.testing.assert_close(logits, out.logits[0], atol=1e-9, rtol=0)
    assert steps == out.steps[0].tolist()
    if method == "ponderlm3":
        assert len(set(steps)) > 1


@pytest.mark.parametrize(
    "backbone,options,message",
    [
        ("gpt", {}, "backbone 'gpt' is not one of llama, gpt_neox"),
        ("gpt_neox", {}, "num_key_value_heads = 2: gpt_neox does not follow it"),
        ("llama", {"rotary_pct": 0.5}, r"backbone_options .*rotary_pct.*: llama has none"),
        ("llama3", {"rotary_pct": 0.5}, "backbone_options of llama3: .*rotary_pct"),
        ("llama3", LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor = 4.0 is not below"),
        ("llama3", LLAMA3 | {"factor": True}, "factor = True: "),
    ],
)
def test_settings_of_another(backbone, options, message):
    """Catches a setting that is passed over, as another backbone's."""
    with pytest.raises(UserError, match=message):
        small_model(backbone=backbone, backbone_options=options)


def test_rotary_width():
    """Catches half a pair."""
    options = {"rotary_pct": 0.2}
    with pytest.raises(UserError, match="rotary_pct turns 1 of 8 numbers of a head"):
        small_model(backbone_options=options, **NEOX)


def test_initialisation():
    """Catches loud layers into the residual stream, biases that are not zero, and a Llama by another name."""
    torch.manual_seed(0)
    config = configure(PonderConfig(), "ponderlm3", backbone="gpt_neox", hidden_size=256)
    model, std = build(config), (2 / (5 * 256)) ** 0.5
    for block in model.model.layers:
        for linear in (block.attention.dense, block.mlp.dense_4h_to_h):
            assert linear.weight.std().item() == pytest.approx(std / 8**0.5, rel=0.05)
        assert block.attention.query_key_value.weight.std().item() == pytest.approx(std, rel=0.05)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))
