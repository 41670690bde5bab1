"""Figures beyond the paper's, which are in analyze.py at the root.

    python -m lab analyze explainer      a model itself on a page that runs it
    python -m lab analyze difficulty --reference out/plain    buckets and shift by another model's losses

Of several runs, written to out/analyze/:

    python -m lab analyze compare --runs out/pays/grid/*      losses over steps or costs, by pairs of seeds
    python -m lab analyze depth --runs out/depth/any-*       how much deciding could gain
    python -m lab analyze layers --runs out/layers/*          a step's worth in layers
    python -m lab analyze lookup --runs out/lookup/*          accuracy where the difficulty is known
    python -m lab analyze kinds --runs out/lookup/grown-?     which tokens take a step there, and need it
    python -m lab analyze mixed --runs out/mixed/by-token-?   prose and puzzles by one model
    python -m lab analyze where --runs out/mine               which kinds of tokens are thought about
    python -m lab analyze within --runs out/mine              what the state after each layer would predict

A figure comes with its numbers (<figure>.csv) and their table (.md); --runs <figure>.csv draws it again.
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
    """A function that reads a figure's flags: given the class, tyro prints an error as a page."""

    def read(flags: Annotated[figure, tyro.conf.arg(name="")]):
        return flags

    read.__doc__ = figure.__doc__
    return read


def main(argv=None):
    """Draw one figure. argv: its name and flags; by default those of the command line."""
    commands = {figure.__name__.lower(): reader(figure) for figure in FIGURES}
    how = dict(prog="python -m lab analyze", description=__doc__)
    tyro.extras.subcommand_cli_from_dict(commands, args=sys.argv[1:] if argv is None else argv, **how).draw()


if __name__ == "__main__":
    command_line(main)
