"""Differences at equal steps, by pairs of seeds."""

import math

import pytest
import torch

import lab.figures.__main__ as figures
from lab.figures.budget import budget_rows
from lab.figures.comparing import read_runs
from lab.figures.frontier import frontier_rows
from model import UserError

CPU = torch.device("cpu")


@pytest.fixture
def runs(make_run, request):
    """Three seeds of methods with a gain in loss each."""
    paths, reference = [], getattr(request, "param", "ponderlm2")
    for seed, gain in enumerate((0.1, 0.2, 0.6)):
        shared = dict(seed=seed)
        paths += [make_run(f"v{seed}", 3.0 + seed, 0.0, method="vanilla", **shared)]
        for K in (1, 2):
            loss = 3.0 + seed - 0.4 * K
            name, shape = f"p{K}{seed}", dict(method=reference, ponder_steps=K)
            paths += [make_run(name, loss, float(K), **shared, **shape)]
        shape = dict(method="looped", ponder_steps=2)
        paths += [make_run(f"l{seed}", 2.4 + seed - gain, 1.5, **shared, **shape)]
        steps = 2.5 if seed else 1.5  # more than the reference has
        paths += [make_run(f"q{seed}", 2.0, steps, method="pause", **shared)]
    return paths


@pytest.mark.parametrize("runs", ["ponderlm2", "grid-fixed"], indirect=True)
def test_differences_by_pair(runs):
    """Catches another seed's reference, one at other steps, spreads of seeds instead of pairs, and
    a number where the reference has none."""
    frame = frontier_rows(read_runs(runs), (0.1,), CPU).set_index("method")
    looped, pause = frame.loc["LoopedLM"], frame.loc["Pause"]
    assert looped.difference == pytest.approx(-0.3) and (looped.steps, looped.seeds) == (1.5, 3)
    assert looped.difference_std == pytest.approx(math.sqrt(0.07))
    assert looped.interval == pytest.approx(4.303 * math.sqrt(0.07 / 3))
    assert math.isnan(pause.difference) and math.isnan(pause.interval)
    (title,) = set(frame.index) - {"LoopedLM", "Pause", "vanilla"}
    ours = frame.loc[["vanilla", title]]
    assert ours.loss.tolist() == pytest.approx([4.0, 3.6, 3.2]) and ours.difference.isna().all()


def test_worse_with_more_steps(runs, make_run):
    """Catches a reference that may be beaten at three steps where it is better with two."""
    shape = dict(method="ponderlm2", ponder_steps=3)
    worse = [make_run(f"p3{seed}", 9.0, 3.0, seed=seed, **shape) for seed in range(3)]
    frame = frontier_rows(read_runs(runs + worse), (0.1,), CPU).set_index("method")
    # of K = 2: 2.2 + seed; seed 0 takes 1.5 steps, halfway to 2.6 of K = 1, the others 2.5
    assert frame.loc["Pause"].difference == pytest.approx(2.0 - (2.4 + 3.2 + 4.2) / 3)


def test_refused(runs):
    """Catches a comparison with nothing to compare with, or nothing to compare."""
    for paths, message in (
        (runs[1:2] + runs[3:4], "no seed has two runs"),
        (runs[:3], "no run beside ponderlm2 and vanilla"),
    ):
        with pytest.raises(UserError, match=message):
            frontier_rows(read_runs(paths), (0.1,), CPU)


def test_command(runs, tmp_path):
    """Catches a table or figure that is not of the rows, and one that is not redrawn the same."""
    figures.main(["frontier", "--runs", *runs, "--out", str(tmp_path / "out")])
    names = [tmp_path / "out" / f"frontier.{end}" for end in ("csv", "md", "png")]
    before = [file.read_bytes() for file in names]
    assert b"-0.3000 \xc2\xb1 0.6573" in before[1]
    figures.main(["frontier", "--redraw", "--out", str(tmp_path / "out")])
    assert before == [file.read_bytes() for file in names]


def test_budget(make_run):
    """Catches slots of one pass or of another batch, a difference to another seed or K, runs of other
    settings as seeds of one, and an earlier training that does not count."""
    paths = []
    for seed, gain in enumerate((0.1, 0.2, 0.6)):
        paths.append(make_run(f"v{seed}", 3.0 + seed, 0.0, seed, "vanilla"))
        grid = dict(method="grid", ponder_steps=1, batch_size=4)
        paths.append(make_run(f"g{seed}", 3.0 + seed - gain, 1.0, seed, **grid))
    frame = budget_rows(read_runs(paths), "vanilla").set_index("method")
    grid, vanilla = frame.loc["PonderLM-3, grid"], frame.loc["vanilla"]
    assert grid.slots == vanilla.slots == vanilla["read"] == 2 * grid["read"] == 0.0512
    assert grid.difference == pytest.approx(-0.3) and vanilla.difference == 0
    assert grid.interval == pytest.approx(4.303 * math.sqrt(0.07 / 3))
    several = [make_run(f"p{K}", 3.0 + K, 1.0, ponder_steps=K) for K in (1, 2)]
    frame = budget_rows(read_runs([*paths[1:2], *several]), "ponderlm3").set_index("method")
    assert frame.loc["PonderLM-3, grid"].difference == pytest.approx(-1.1)
    other = make_run("other", 1.0, 1.0, 1, method="grid", ponder_steps=1)
    named = budget_rows(read_runs([*paths, other]), "vanilla").set_index("method")
    assert named.seeds.to_dict() == {
        "vanilla": 3,
        "PonderLM-3, grid": 1,
        "PonderLM-3, grid, batch_size 4": 3,
    }
    with pytest.raises(UserError, match="taught began from a model, whose training is not counted"):
        budget_rows(read_runs([*paths, make_run("taught", 1.0, 1.0, init_from="x")]), "vanilla")
    twice = [*paths[:1], make_run("half", 2.0, 0.0, 0, "vanilla", batch_size=4)]
    with pytest.raises(UserError, match="half: another vanilla with its K and seed: leave one out"):
        budget_rows(read_runs(twice), "vanilla")
    with pytest.raises(UserError, match=r"g1: no vanilla with its seed \(and K\): leave it out"):
        budget_rows(read_runs([paths[0], paths[1], paths[3]]), "vanilla")
    with pytest.raises(UserError, match="no run of vanila among those given"):
        budget_rows(read_runs(paths), "vanila")
