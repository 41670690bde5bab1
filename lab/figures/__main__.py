"""Draw figures beyond those of the paper, which `python analyze.py` draws.

    python -m lab analyze explainer      a page that runs a model in the browser
    python -m lab analyze difficulty --reference out/plain    what steps gain on easy and hard tokens

For several runs, written to out/analyze/:

    python -m lab analyze compare --runs out/pays/grid/*      losses against steps or cost
    python -m lab analyze depth --runs out/depth/any-*        what giving steps to the right tokens could gain
    python -m lab analyze layers --runs out/layers/*          how many layers an extra step is worth
    python -m lab analyze lookup --runs out/lookup/*          accuracy on puzzles of known difficulty
    python -m lab analyze kinds --runs out/lookup/grown-?     which tokens of a puzzle need their steps
    python -m lab analyze mixed --runs out/mixed/by-token-?   models that read both prose and puzzles
    python -m lab analyze where --runs out/mine               which kinds of tokens take extra steps
    python -m lab analyze within --runs out/mine              how well the state after each layer predicts

A figure comes with its numbers (<figure>.csv) and a table of them (<figure>.md). --runs <figure>.csv draws it
again.
"""

import sys
from typing import Annotated

import tyro

from common import command_line
from lab.figures.comparing import Compare
from lab.figures.depth import Depth
from lab.figures.difficulty import Difficulty
from lab.figures.explainer import Explainer
from lab.figures.layers import Layers
from lab.figures.lookup import Kinds, Lookup
from lab.figures.mixed import Mixed
from lab.figures.where import Where
from lab.figures.within import Within

FIGURES = Explainer, Difficulty, Compare, Depth, Layers, Lookup, Kinds, Mixed, Where, Within


def reader(figure):
    """A function that reads the flags of a figure.

    It is given to tyro rather than the class itself, with which tyro would print a page for each error.
    """

    def read(flags: Annotated[figure, tyro.conf.arg(name="")]):
        return flags

    read.__doc__ = figure.__doc__
    return read


def main(argv=None):
    """Draw one figure, by its name and flags in `argv`; None: those of the command line."""
    commands = {figure.__name__.lower(): reader(figure) for figure in FIGURES}
    figure = tyro.extras.subcommand_cli_from_dict(
        commands,
        args=sys.argv[1:] if argv is None else argv,
        prog="python -m lab analyze",
        description=__doc__,
    )
    figure.draw()


if __name__ == "__main__":
    command_line(main)
