"""What a token costs: by the paper's formula, by hand, and counted while it is computed."""

from dataclasses import replace

import pytest
from lab_helpers import small_model, tokens

from lab.methods import PonderConfig, all_methods, configure
from lab.methods.cost import paper_flops, parameters
from train import PRESETS


def shape(method, **settings):
    return configure(PonderConfig(), method, **settings)


def test_the_papers_column(monkeypatch):
    """Catches another constant than 6, or the first computation not counted."""
    monkeypatch.setattr("lab.methods.cost.parameters", lambda config: 0.41e9)
    for steps, printed in ((3, 9.84), (2.60, 8.86), (2.43, 8.44)):
        assert round(paper_flops(shape("ponderlm3"), steps) / 1e9, 2) == printed


@pytest.mark.parametrize("config, total", [(PRESETS["70m"][1], 70.5), (PRESETS["410m"][1], 406.6)])
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
    assert executed == pytest.approx(model.training_forwards(config, steps))
