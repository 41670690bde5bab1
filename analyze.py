"""Figures and tables from trained runs: a list. Each is drawn, and has its flags, in analysis/.

Of one run, by default the newest in out/; written to <run>/report/:

    python analyze.py converge      the Jacobi iteration approaching its fixed point
    python analyze.py buckets       which tokens gain by which step, and which take it
    python analyze.py shift         what fewer or more steps do to easy and to hard tokens
    python analyze.py tokens        which tokens and words get how many steps
    python analyze.py tau           loss and steps against where pondering stops
    python analyze.py heatmap       a text, each token shaded by its steps: an HTML page
    python analyze.py report        all of these on one page, index.html
    python analyze.py explainer     the model itself on a page that runs it: explainer.html
    python analyze.py puzzle        what it looks up at each step: printed, and puzzle.svg

Of several runs, written to out/analyze/:

    python analyze.py pareto --runs out/pareto/tiny/*     perplexity against executed extra steps
    python analyze.py frontier --runs out/frontier/*      differences to PonderLM-2 at equal steps
    python analyze.py budget --runs out/slots/*           loss at equal cost of training
    python analyze.py lookup --runs out/lookup/*          accuracy where the difficulty is known

A figure comes with its numbers (<figure>.csv) and their table (.md), and --redraw draws it again
from the saved numbers.
"""

import sys
from typing import Annotated

import tyro

from analysis.budget import Budget
from analysis.comparing import Pareto
from analysis.explainer import Explainer
from analysis.figures import Buckets, Converge, Shift, Tau, Tokens
from analysis.frontier import Frontier
from analysis.lookup import Lookup
from analysis.pages import Heatmap, Report
from analysis.puzzle import Puzzle
from runtime import command_line

OF_ONE_RUN = (Converge, Buckets, Shift, Tokens, Tau, Heatmap, Report)
OF_SEVERAL = (Pareto, Frontier, Budget, Lookup)


def reader(figure):
    """A function that reads a figure's flags: given the class, tyro prints an error as a page."""

    def read(flags: Annotated[figure, tyro.conf.arg(name="")]):
        return flags

    read.__doc__ = figure.__doc__
    return read


def main(argv=None):
    """Draw one figure. argv: its name and flags; by default those of the command line."""
    argv = sys.argv[1:] if argv is None else argv
    figures = (*OF_ONE_RUN, Explainer, Puzzle, *OF_SEVERAL)
    commands = {figure.__name__.lower(): reader(figure) for figure in figures}
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__, args=argv).draw()


if __name__ == "__main__":
    command_line(main)
