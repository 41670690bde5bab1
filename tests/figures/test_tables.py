"""Saved numbers and the tables that are made of them."""

import math

import pandas as pd
import pytest

from data import UserError
from lab.figures.tables import save, show


def test_show():
    """Catches a spread of one seed that is called 0, and nothing that is shown as nan."""
    assert show(1.25, ".1f", 0.5) == "1.2 ± 0.5" and show(1.25, ".2f", math.nan) == "1.25"
    assert show(math.nan, ".2f", 1.0) == show(None, ".2f") == "-" and show("x", "") == "x"


def test_numbers_survive_their_file(tmp_path):
    """Catches digits that are lost, nothing as 0, a damaged file, and a redraw of nothing."""
    frame = pd.DataFrame([{"x": 1 / 3, "y": 1.0}, {"x": 2 / 3, "y": None}])
    pd.testing.assert_frame_equal(save(tmp_path, "a", frame, {"x": "x:.2f", "y": "y:g"}), frame)
    shown = "| x | y |\n| --- | --- |\n| 0.33 | 1 |\n| 0.67 | - |\n"
    assert (tmp_path / "a.md").read_text() == shown
    with pytest.raises(UserError, match="draw it once without --redraw"):
        save(tmp_path, "b", None, None)
    for damaged in ("", "x\n1\n", "x,y\na,b\n", 'x,y\n1,2,3,4\n5,6\n"\n'):
        (tmp_path / "a.csv").write_text(damaged)
        with pytest.raises(UserError, match=r"a\.csv is damaged"):
            save(tmp_path, "a", None, {"x": "x:.2f", "y": "y:g"})
