"""What trainings have cost, in slots."""

import json

import pytest

import analyze
from analysis.comparing import read_runs
from analysis.training_cost import cost_rows, slots_of_token
from baselines import configure
from model import PonderConfig
from runtime import UserError

PLAIN = PonderConfig()


def test_slots_of_a_token():
    """Catches a pass that is left out, or counted as if it had gradients."""
    ladder = 1 + 2 + 3
    three = configure(PLAIN, "ponderlm3", ponder_steps=3, refinements=(1, 2))
    assert slots_of_token(three, 3) == ladder + 2.5 * 4
    last = configure(PLAIN, "ponderlm3", ponder_steps=3, refinements=(1, 2), backprop_passes=1)
    assert slots_of_token(last, 3) == pytest.approx((ladder + 2.5 * 4 + 2 * 4) / 3)
    more = configure(PLAIN, "ponderlm3", ponder_steps=3, refinements=(1, 1), backprop_passes=3)
    assert slots_of_token(more, 3) == pytest.approx((ladder + 2 * 4 + 2 * (3 + 4 + 4)) / 3)
    every = configure(PLAIN, "ponderlm3", ponder_steps=3, refinements=(1, 1), backprop_passes=99)
    assert slots_of_token(every, 3) == ladder + 2 * 4
    assert slots_of_token(configure(PLAIN, "looped", ponder_steps=3), 3) == 4
    assert slots_of_token(configure(PLAIN, "vanilla", ponder_steps=0), 0) == 1


def test_runs(make_run, tmp_path):
    """Catches a beginning that is not counted, and one that is gone."""
    plain = make_run("plain", 2.0, 0.0, method="vanilla")
    taught = make_run("taught", 1.5, 2.0)
    content = json.loads((tmp_path / "taught/train.json").read_text())
    content["config"]["init_from"] = plain
    (tmp_path / "taught/train.json").write_text(json.dumps(content))
    frame = cost_rows(read_runs([plain, taught])).set_index("K")
    tokens = 100 * 8 * 64 / 1e6
    assert frame.slots[0] == pytest.approx(tokens)
    assert frame.slots[3] == pytest.approx(tokens * (1 + 6 + 2 * 4))
    (tmp_path / "plain/train.json").unlink()
    with pytest.raises(UserError, match="plain has cost to train is unknown"):
        cost_rows(read_runs([taught]))


def test_command(make_run, tmp_path):
    """Catches a table or figure that is not redrawn the same."""
    runs = [make_run("a", 2.0, 0.0, method="vanilla"), make_run("b", 1.5, 2.0)]
    analyze.main(["cost", "--runs", *runs, "--out", str(tmp_path / "out")])
    names = [tmp_path / "out" / f"cost.{end}" for end in ("csv", "md", "png")]
    before = [file.read_bytes() for file in names]
    analyze.main(["cost", "--redraw", "--out", str(tmp_path / "out")])
    assert before == [file.read_bytes() for file in names]
