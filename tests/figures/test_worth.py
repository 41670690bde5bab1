"""What thinking is worth: the numbers of the table, and which of them count."""

import shutil

import pandas as pd
import pytest
from lab_helpers import records

from common import UserError
from lab.figures import lookup as worth
from lab.figures.lookup import Worth, answers, summary, trained_steps
from lab.figures.runs import read_runs
from lab.figures.subject import open_subject


def test_rows(trained, tmp_path, monkeypatch):
    """Catches passes of answers alone, layers that do not count, other questions, a run of another method."""
    folder = trained.parent / "data/lookup"
    monkeypatch.setattr(worth, "LINES_TIMED", 1)
    runs = [str(trained / f"lookup-{name}") for name in (0, 1, "plain")]
    how = dict(tau=0.3, data=str(folder), out=tmp_path)
    Worth(runs=tuple(runs), **how).draw()
    rows = records(pd.read_csv(tmp_path / "worth.csv"))
    assert [(r["model"], r["seed"]) for r in rows[::6]] == [("decides", 0), ("decides", 1), ("plain", 0)]
    assert all(r["seconds"] > 0 for r in rows) and (tmp_path / "worth.png").stat().st_size > 5000
    asked, right, _, steps = answers(open_subject(runs[1], 1024, 0.3, data=str(folder)))
    for row in rows[6:12]:
        assert row["passes"] == pytest.approx(1 + steps.double().mean().item())
        if (mine := asked == row["lookups"]).any():
            assert row["right"] == pytest.approx(right[mine].double().mean().item())


def test_summary():
    """Catches the worse learning rate, one for each seed, a mean that hides a seed, a longer training."""
    row = dict(layers=1, steps=9, last_stage=3, lookups=1, passes=1.0, seconds=0.5)
    rights = {("plain", 1e-3): (0.5, 0.7), ("plain", 3e-3): (0.9, 0.2), ("decides", 3e-3): (1.0, 0.96)}
    frame = pd.DataFrame(
        row | dict(model=model, learning_rate=rate, seed=seed, right=x)
        for (model, rate), both in rights.items()
        for seed, x in enumerate(both)
    )
    longer = frame[frame.learning_rate == 1e-3].assign(last_stage=12, right=0.8)
    cells, kept = summary(pd.concat([frame, longer]))
    assert "plain, 1 layer, stages 4 times as long" in set(cells.model)
    kept = kept[kept.last_stage == 3]
    (plain,) = [r for r in cells.to_dict("records") if r["model"] == "plain, 1 layer"]
    assert (plain["1 lookup"], plain["worst"], plain["seeds"]) == ("0.60", "0.50", 2)
    assert set(kept[kept.model == "plain"].learning_rate) == {1e-3}


def test_steps_of_all_stages(make_run):
    """Catches a training whose earlier stages are left out."""
    first = make_run("first", 1.0, 1.0)
    (run,) = read_runs([make_run("second", 1.0, 1.0, init_from=first)])
    assert trained_steps(run) == 200
    shutil.rmtree(first)
    with pytest.raises(UserError, match=r"second began with .*first, whose training steps count"):
        trained_steps(run)
