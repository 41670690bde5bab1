"""What steps would gain that go to the right tokens."""

import pandas as pd
import pytest
import torch
from lab_helpers import small_model

from common import UserError
from lab.figures.depth import Depth, depth_rows, given, predict, take_most
from lab.figures.tables import new_figure
from lab.methods import configure
from lab.methods.drawn import Drawn

WINDOWS = torch.randint(31, (40, 9), generator=torch.Generator().manual_seed(3))


def drawn_model(**settings):
    shape = small_model(vocab_size=31, block_size=8, seed=1).config
    torch.manual_seed(0)
    return Drawn(configure(shape, "drawn", ponder_steps=2, router_offset=None, **settings))


@torch.no_grad()
def test_given_steps():
    """Catches steps of another token, keys of slots that do not run, and a model that keeps its steps."""
    model, rows = drawn_model().eval(), torch.randint(31, (3, 9), generator=torch.Generator().manual_seed(2))
    x, y = rows[:, :-1], rows[:, 1:]
    h, *_ = model.states(x)
    loss, h0 = given(model, rows, torch.zeros(3, 8, dtype=torch.long))
    assert torch.allclose(loss, model.cross_entropy(h[:, :, 0], y)) and torch.equal(h0, h[:, :, 0])
    steps = torch.tensor([0, 2, 1, 0, 2, 2, 1, 0]).repeat(3, 1)
    loss, _ = given(model, rows, steps)
    model.router.forward = lambda h0, alpha: (  # a router that says so by itself
        torch.nn.functional.one_hot(steps, 3).float(),
        torch.zeros(3, 8, 3).masked_fill(torch.arange(3) > steps[..., None], -1e4),
    )
    expected = model(x, y, tau=1e-4)
    assert torch.allclose(loss, expected.ce, atol=1e-5) and torch.equal(expected.steps, steps)


def test_rules():
    """Catches the smallest gains in the place of the largest, and a prediction that has seen the answers."""
    assert take_most(torch.tensor([1.0, 3.0, 2.0, 0.0]), 0.5, 2).tolist() == [1, 2, 2, 1]
    x = torch.randn(50, 3)
    assert predict(x[:40], x[:40] @ torch.tensor([1.0, -2, 0.5]) + 3, x[40:]).numpy() == pytest.approx(
        (x[40:] @ torch.tensor([1.0, -2, 0.5]) + 3).numpy(), abs=1e-4
    )
    rows = list(depth_rows(drawn_model(), WINDOWS))
    assert [(row["step"], row["share"]) for row in rows[:5]] == [(1, x) for x in (0, 0.25, 0.5, 0.75, 1)]
    for row in rows:
        if row["share"] in (0, 1):
            assert row["predicted"] == row["random"] == row["largest"]
    assert rows[4]["random"] == rows[5]["random"]  # all take one step


def test_drawn_share():
    """Catches depths that are drawn where the router should decide, or the same ones each time."""
    model, idx = drawn_model(drawn=0.5, drawn_until=10).train(), torch.randint(31, (64, 8))
    shares, seen = [], []
    for count in (0, 5, 10):
        model.seen.fill_(count)
        seen.append(model.objective(idx, idx, 1)[2].s)
        shares.append((seen[-1].max(-1).values == 1).float().mean().item())
    assert shares == pytest.approx([0.5, 0.25, 0], abs=0.1) and not torch.equal(seen[0], seen[1])
    assert not (model.eval().states(idx)[1].max(-1).values == 1).any()


def test_command(make_run, tmp_path):
    """Catches a run of another method, and a curve or row that is missing."""
    with pytest.raises(UserError, match="--method drawn"):
        Depth((make_run("plain", 1.0, 0),), out=tmp_path / "out").draw()
    who, figure = {"method": "drawn", "K": 2, "seed": 0}, Depth((), out=tmp_path)
    rows = pd.DataFrame(who | row for row in depth_rows(drawn_model(), WINDOWS))
    _, (axes,) = new_figure(*figure.sheet)
    figure.picture(rows, axes)
    assert len(axes.lines) == 2 * 3 and len(figure.table(rows)) == 10  # steps, rules and shares
    both = pd.concat([rows, rows.assign(method="another")])
    _, (axes,) = new_figure(*figure.sheet)
    figure.picture(both, axes)
    assert len(axes.lines) == 2 * 2 * 3 and len({line.get_color() for line in axes.lines}) == 2
    assert figure.table(both).method.nunique() == 2
