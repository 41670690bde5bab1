"""Figures and pages beyond the paper's, which are in analyze.py at the root.

Of one run, by default the newest in out/; written to <run>/report/:

    python -m lab analyze heatmap        a text, each token shaded by its steps: an HTML page
    python -m lab analyze report         this and the paper's five figures on one page, index.html
    python -m lab analyze explainer      the model itself on a page that runs it: explainer.html

Of several runs, written to out/analyze/:

    python -m lab analyze pareto --runs out/pareto/tiny/*     perplexity against executed extra steps
    python -m lab analyze frontier --runs out/frontier/*      differences to PonderLM-2 at equal steps
    python -m lab analyze budget --runs out/slots/*           loss at equal cost of training
    python -m lab analyze layers --runs out/layers/*          a step's worth in layers
    python -m lab analyze lookup --runs out/lookup/*          accuracy where the difficulty is known
    python -m lab analyze kinds --runs out/lookup/grown-?     which tokens take a step there, and need it
    python -m lab analyze where --runs out/mine               which kinds of tokens are thought about
    python -m lab analyze choose --runs out/router/*          settings, by text that is not reported

A figure of several comes with its numbers (<figure>.csv) and their table (.md), and --redraw draws it again
from the saved numbers.
"""

import sys
from typing import Annotated

import tyro

from lab.common import command_line
from lab.figures.budget import Budget
from lab.figures.choose import Choose
from lab.figures.comparing import Pareto
from lab.figures.explainer import Explainer
from lab.figures.frontier import Frontier
from lab.figures.layers import Layers
from lab.figures.lookup import Kinds, Lookup
from lab.figures.pages import Heatmap, Report
from lab.figures.where import Where

FIGURES = Heatmap, Report, Explainer, Pareto, Frontier, Budget, Layers, Lookup, Kinds, Where, Choose


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
