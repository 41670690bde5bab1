"""What a token costs: by the paper's formula, by hand, and counted while it is computed."""

from dataclasses import replace

import pytest
from lab_helpers import small_model, tokens

from lab.methods import PonderConfig, all_methods, configure, find
from lab.methods.cost import paper_flops, parameters
from train import PRESETS

SHAPE_125M = PonderConfig(50_304, 768, 2064, 12, 12)


def shape(method, **settings):
    return configure(PonderConfig(), method, **settings)


def training_forwards(config, steps):
    return find(config.method).training_forwards(config, steps)


def test_the_papers_column(monkeypatch):
    """Catches another constant than 6, or the first computation not counted."""
    monkeypatch.setattr("lab.methods.cost.parameters", lambda config: 0.41e9)
    for steps, printed in ((3, 9.84), (2.60, 8.86), (2.43, 8.44)):
        assert round(paper_flops(shape("ponderlm3"), steps) / 1e9, 2) == printed


@pytest.mark.parametrize(
    "config,total",
    [(PRESETS["70m"][1], 70.5), (SHAPE_125M, 162.7), (PRESETS["410m"][1], 406.6)],
)
def test_shapes(config, total):
    """Catches a shape other than that of the compared models; in millions."""
    assert round(parameters(configure(config, "vanilla")) / 1e6, 1) == total


def test_tied_tables_count_once():
    """Catches a head that is counted twice when it is the embedding."""
    untied, tied = (parameters(PonderConfig(tie_word_embeddings=tie)) for tie in (False, True))
    assert untied - tied == 257 * 128


def test_training_forwards():
    """Catches a wrong cost table: slots in training for each token, by hand."""
    assert training_forwards(shape("mor-expert"), 1) == 1 + 0.75 + 0.5 + 0.25
    assert training_forwards(shape("mor-token"), 1.5) == 2.5
    for K, R, forwards in ((1, 2, 7), (1, 3, 9), (3, 2, 18), (3, 3, 22)):
        for method in ("ponderlm2", "ponderlm3"):
            config = shape(method, ponder_steps=K, refinements=(R, R))
            assert training_forwards(config, K) == forwards
    assert training_forwards(shape("ponderlm2"), 3) == 20  # R is 2 or 3


@pytest.mark.parametrize("method", [kind.method for kind in all_methods()])
def test_training_forwards_are_what_runs(method):
    """Catches a method that runs another number of slots in training than it reports."""
    model, rows = small_model(method=method).train(), []
    idx = tokens(T=12)
    model.model.layers[0].register_forward_hook(lambda _, inputs, __: rows.append(inputs[0]))
    out = model(idx, idx, R=2)
    steps = out.steps.float().mean().item()
    config = replace(model.config, refinements=(2, 2))
    executed = sum(x.size(0) * x.size(1) for x in rows) / idx.numel()
    assert executed == pytest.approx(training_forwards(config, steps))


def test_cost_of_a_token():
    """Catches swapped units."""
    assert paper_flops(shape("ponderlm3"), 2.5) == 21 * parameters(shape("ponderlm3"))
