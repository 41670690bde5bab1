"""Saved numbers and the tables that are made of them."""

import math

import pandas as pd
import pytest

from analysis.tables import markdown, read, save, show, tabulate
from runtime import UserError


def test_show():
    """Catches a spread of one seed that is called 0, and nothing that is shown as nan."""
    assert show(1.25, ".1f", 0.5) == "1.2 ± 0.5" and show(1.25, ".2f", math.nan) == "1.25"
    assert show(math.nan, ".2f", 1.0) == show(None, ".2f") == "-" and show("x", "") == "x"


def test_markdown():
    """Catches cells that are lost or torn by the bars of a table."""
    cells = pd.DataFrame({"a": ["<x>", "a | b"], "b": [-1, ""]})
    assert markdown(cells) == "| a | b |\n| --- | --- |\n| <x> | -1 |\n| a \\| b |  |\n"


def test_numbers_survive_their_file(tmp_path):
    """Catches digits that are lost, tokens that become numbers or nothing, and nothing as 0."""
    rows = [{"text": text, "x": 1 / 3, "y": y} for text, y in (("3", 1), ("nan", None), (" ", 2))]
    columns = {"x": "x:.2f"}
    frame, cells = save(tmp_path, "a", rows, columns)
    pd.testing.assert_frame_equal(cells, tabulate(frame, columns))
    assert list(frame.text) == ["3", "nan", " "] and list(frame.x) == [1 / 3] * 3
    assert frame.y.isna().tolist() == [False, True, False]
    assert (tmp_path / "a.md").read_text() == "| x |\n| --- |\n" + "| 0.33 |\n" * 3
    pd.testing.assert_frame_equal(read(tmp_path / "a.csv"), frame)
    with pytest.raises(UserError, match="nothing to put into"):
        save(tmp_path, "b", [], None)
    with pytest.raises(UserError, match="draw it once without --redraw"):
        save(tmp_path, "b", None, None)
