"""What a token costs: parameters, and slots that run in training."""

from dataclasses import replace

import pytest
import torch
from lab_helpers import small_model, tokens

from lab.methods import all_methods, build, configure
from train import preset_settings


def parameters(config):
    with torch.device("meta"):  # shapes only, no memory
        return sum(p.numel() for p in build(config).parameters())


@pytest.mark.parametrize(
    "config, total", [(preset_settings("70m")[1], 70.5), (preset_settings("410m")[1], 406.6)]
)
def test_shapes(config, total):
    """Catches a shape other than that of the compared models, in millions; a tied table that counts twice."""
    plain = configure(config, "vanilla")
    assert round(parameters(plain) / 1e6, 1) == total
    tied = parameters(replace(plain, tie_word_embeddings=True))
    assert parameters(plain) - tied == config.vocab_size * config.hidden_size


@pytest.mark.parametrize("R", [1, 2])
@pytest.mark.parametrize("method", [kind.method for kind in all_methods()])
def test_training_forwards_are_what_runs(method, R):
    """Catches a method that runs another number of slots in training than it reports."""
    model, rows = small_model(method=method).train(), []
    idx = tokens(T=12)
    model.model.layers[0].register_forward_hook(lambda _, inputs, __: rows.append(inputs[0]))
    out = model(idx, idx, R=R)
    steps = out.steps.float().mean().item()
    config = replace(model.config, refinements=(R, R))
    executed = sum(x.size(0) * x.size(1) for x in rows) / idx.numel()
    assert executed == pytest.approx(model.training_forwards(config, steps, training_steps=1))
