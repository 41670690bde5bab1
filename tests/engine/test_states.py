"""Prompts read in parallel, executed slots only: the states that decoding slot by slot has."""

import pytest
import torch
from lab_helpers import decode, small_model

from lab.engine.cache import GridPrompt
from lab.engine.states import read_on_grid, settle, within
from router import stop_step

LENGTHS = torch.tensor([14, 1, 12])
QUICK = [(0, 0.3), (1, 0.3), (2, 0), (3, 1e-4), (3, 0.3), (3, 1), (4, 0.3)]
ALL = [(K, tau) for K in range(5) for tau in (0, 1e-4, 0.3, 1)]


@pytest.fixture(scope="module")
def model():
    return small_model(seed=2)


def batch(T=14, seed=1):
    return torch.randint(31, (3, T), generator=torch.Generator().manual_seed(seed))


def logits_of(model, found):
    return model.lm_head(model.integrate(found.h, found.s, found.steps))


@pytest.mark.parametrize(
    "K,tau", [pytest.param(*p, marks=[] if p in QUICK else pytest.mark.slow) for p in ALL]
)
@pytest.mark.parametrize("method", ["ponderlm3", "grid"])
def test_equals_decoding(method, K, tau):
    """Catches a slot with an old input, one that never comes back, and padding that is seen."""
    shape = dict(method=method, ponder_steps=K) if K else dict(method="vanilla")
    model, idx = small_model(seed=2, **shape), batch()
    if model.grid:
        layers = [GridPrompt() for _ in model.model.layers]
        found, _, executed = read_on_grid(model, idx, tau, lengths=LENGTHS, cache=layers)
        assert found.slots == executed.sum() == (found.steps + 1)[within(idx, LENGTHS)].sum()
    else:
        found = settle(model, idx, tau, lengths=LENGTHS, tolerance=0)
    logits = logits_of(model, found)
    for b, n in enumerate(LENGTHS):
        expected, steps, _ = decode(model, idx[b, :n], tau)
        assert (logits[b, :n] - expected).abs().max() < 1e-9
        assert found.steps[b].tolist() == steps + [0] * (14 - int(n))
    beyond = torch.arange(K + 1) > found.steps[..., None]
    assert not found.h[beyond].any()


def test_steps_that_fall_and_rise(monkeypatch):
    """Catches a slot that is lost when w falls below tau for a few passes, or has a stale output;
    in the models above, whose tokens hardly look at each other, that does not happen."""
    changes = [settle_and_watch(seed, monkeypatch).flatten() for seed in range(8)]
    assert sum((change < 0).any() and (change > 0).any() for change in changes) >= 2


def settle_and_watch(seed, monkeypatch):
    """Check one model against the simple decoder -> how its slots of each pass change."""
    model, idx, ran = small_model(seed=seed), batch(), []
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight *= 6
    forward = model.model.forward

    def watch(x, positions, *args):
        ran.append(torch.stack([(positions[0] == t).sum() for t in range(idx.size(1))]))
        return forward(x, positions, *args)

    monkeypatch.setattr(model.model, "forward", watch)
    rough = settle(model, idx[:1], 0.3, tolerance=0.9)
    assert torch.equal(rough.steps, stop_step(rough.log_w, 0.3))  # all that w asks for ran
    assert torch.equal(ran[-1], rough.steps[0] + 1)
    ran.clear()
    found = settle(model, idx[:1], 0.3, tolerance=0)
    monkeypatch.undo()
    ran = torch.stack(ran)  # (passes, T) slots of each token
    assert len(ran) == found.passes and int(ran.sum()) == found.slots
    assert ran[0].tolist() == [1] * idx.size(1)  # the ladder
    expected, steps, _ = decode(model, idx[0], 0.3)
    assert (logits_of(model, found)[0] - expected).abs().max() < 1e-9
    assert ran[-1].tolist() == [k + 1 for k in steps]
    return ran[4:].diff(dim=0)


def test_tolerance(model):
    """Catches a tolerance that is not kept, and passes that do not end when it is."""
    exact = settle(model, batch(T=24), 0.3, tolerance=0)
    assert exact.passes <= 3 * 24 + 1
    before = exact.passes
    for tolerance in (1e-8, 1e-5, 1e-2):
        found = settle(model, batch(T=24), 0.3, tolerance=tolerance)
        error = (found.h - exact.h).norm() / exact.h.norm()
        assert 0 < error < 5 * tolerance and found.passes < before
        before = found.passes


def test_bfloat16():
    """Agreement in bfloat16: rounding alone, 2 % of the logits, a few times decoding's own."""
    model, idx = small_model(seed=2).float(), batch()[:1]
    exact, _, _ = decode(model, idx[0], 1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = logits_of(model, settle(model, idx, 1e-4, tolerance=1e-2))[0]
        rounded, _, _ = decode(model, idx[0], 1e-4)
    error, floor = ((x.float() - exact).norm() / exact.norm() for x in (logits, rounded))
    assert 0 < error < 0.02 and error < 5 * floor


def test_rows_are_independent(model):
    """Catches rows that go on while a neighbour still moves: the last digits would tell."""
    idx, each = batch(), []
    together = settle(model, idx, 0.3, lengths=LENGTHS, tolerance=1e-3)
    for b, n in enumerate(LENGTHS):
        alone = settle(model, idx[b : b + 1, :n], 0.3, tolerance=1e-3)
        assert (alone.h[0] - together.h[b, :n]).abs().max() < 1e-12
        each.append((alone.passes, alone.slots))
    passes, slots = zip(*each, strict=True)
    assert len(set(passes)) == 3  # they stop at different times
    assert (together.passes, together.slots) == (max(passes), sum(slots))
