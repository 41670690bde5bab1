"""Figures of more lines than there are colours."""

import pandas as pd
from matplotlib.figure import Figure

from lab.figures.depth import RULES, Depth
from lab.figures.tables import COLORS, look_of


def test_more_lines_than_colours():
    """Catches an IndexError where there are more lines than colours, and lines that look alike."""
    looks = [tuple(look_of(i).values()) for i in range(2 * len(COLORS))]
    assert len(set(looks)) == len(looks)


def test_depth_of_many_steps(tmp_path):
    """Catches a figure of K = 8 that ends in an IndexError."""
    rows = [
        {
            "method": "drawn",
            "seed": 0,
            "K": K,
            "step": step,
            "share": share,
            "loss": 1.0,
            **dict.fromkeys(RULES, 1.0),
        }
        for K in (1, 8)
        for step in (1, 2)
        for share in (0.0, 1.0)
    ]
    axes = Figure().subplots()
    Depth(runs=("x",), out=tmp_path).picture(pd.DataFrame(rows), axes)
    assert len({line.get_color() for line in axes.lines}) >= 1
