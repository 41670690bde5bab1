"""Saved numbers and the tables that are made of them."""

import pandas as pd

from lab.figures.tables import save, tabulate


def test_numbers_survive_their_file(tmp_path):
    """Catches digits that are lost, and nothing as 0."""
    frame = pd.DataFrame([{"x": 1 / 3, "y": 1.0}, {"x": 2 / 3, "y": None}])
    save(tmp_path, "a", frame, tabulate(frame, {"x": "x:.2f", "y": "y:g"}))
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "a.csv"), frame, check_exact=True)
    shown = "| x | y |\n| --- | --- |\n| 0.33 | 1 |\n| 0.67 | - |\n"
    assert (tmp_path / "a.md").read_text() == shown
