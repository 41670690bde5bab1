"""Figures and tables from trained runs.

Of one run, by default the newest in out/; written to <run>/report/:

    python analyze.py converge      the Jacobi iteration approaching its fixed point
    python analyze.py buckets       which tokens gain by which step, and which take it
    python analyze.py shift         what fewer or more steps do to easy and to hard tokens
    python analyze.py tokens        which tokens and words get how many steps
    python analyze.py tau           loss and steps against where pondering stops
    python analyze.py penalty       why the printed penalty never acts
    python analyze.py heatmap       a text, each token shaded by its steps: an HTML page
    python analyze.py chain         where each step of an answered lookup looks (data/lookup)
    python analyze.py report        all of these on one page, index.html
    python analyze.py explainer     the model itself on a page that runs it: explainer.html

Of several runs, written to out/analyze/:

    python analyze.py pareto --runs out/pareto/tiny/*     perplexity against executed extra steps
    python analyze.py frontier --runs out/frontier/*      differences to a method at equal steps
    python analyze.py confidence --runs out/frontier/*    stopping where a state looks sure enough
    python analyze.py adaptation --runs out/frontier/*    do steps go where they are needed?
    python analyze.py cost --runs out/frontier/*          loss against what the training has cost
    python analyze.py depth --runs out/pareto/tiny/*      loss against the step budget K
    python analyze.py losses --runs out/tiny/*            with all steps, stopped, steps permuted
    python analyze.py choice --runs out/frontier/*        on held-out text, to choose settings by
    python analyze.py lookup --runs out/lookup/*          accuracy where the difficulty is known

Each saves its numbers (<figure>.csv), the same as a table (.md) and a figure (.png), and draws
again from the saved numbers with --redraw.
"""

import sys
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from analysis import (
    adaptation,
    comparing,
    confidence,
    explainer,
    figures,
    frontier,
    lookup,
    pages,
    training_cost,
)
from analysis.comparing import Comparison
from analysis.figures import Study
from model import Count, Given, strict_dataclass
from runtime import UserError, command_line
from training.config import Share

TAUS = (0, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1)
Alpha = Annotated[float, Field(ge=-1e6, le=1e6)]

# Each command is a class: its flags are the fields, beside those of Study or Comparison.


@strict_dataclass
class Converge(Study):
    """The Jacobi iteration approaching its fixed point, with an exponential fit (8 windows)."""

    needs, draw = "iterates", figures.draw_converge


@strict_dataclass
class Buckets(Study):
    """Which tokens gain by which step, and which of them take it."""

    # a trained model without pondering, on the same text: its losses are a second difficulty
    reference: Given | None = None
    draw = figures.draw_buckets


@strict_dataclass
class Shift(Buckets):
    """What fewer or more steps do to easy and to hard tokens: the router shifted by alpha."""

    # what the router's logits are shifted by, times the step index
    alphas: tuple[Alpha, ...] = (-8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4)
    draw = figures.draw_shift


@strict_dataclass
class Tokens(Study):
    """Which tokens and words get how many steps; long words, inside and at their end."""

    # words to look for; their steps are those after their last token. The paper has a, the, of
    words: tuple[str, ...] = ("a", "an", "the", "of", "in", "to", "on", "for", "and", "is")
    least: Count = 50  # leave out tokens that occur less often
    draw = figures.draw_tokens


@strict_dataclass
class Tau(Study):
    """Loss, perplexity and executed steps against tau."""

    # where pondering stops
    taus: tuple[Share, ...] = TAUS
    draw = figures.draw_tau


@strict_dataclass
class Penalty(Study):
    """Why the printed penalty never acts: its ratio rho by both readings, on batches of a run."""

    draw = figures.draw_penalty


@strict_dataclass
class Heatmap(Study):
    """A text with each token shaded by its steps, or by its loss: an HTML page by itself."""

    text: Path | None = None  # a text file; by default the beginning of the validation text
    draw = pages.draw_heatmap


@strict_dataclass
class Chain(Study):
    """Where each step of an answered question looks, of a model trained on the lookup task."""

    needs, draw = "iterates", lookup.draw_chain


@strict_dataclass
class Report(Shift, Tokens, Tau, Heatmap):
    """All figures and tables of one run, the depth map, config and commit, on one page."""

    draw = pages.draw_report


@strict_dataclass
class Explainer:
    """A model of bytes on a page that runs it: a text's thinking time, live as one types."""

    # directory of a trained PonderLM-3; by default the newest in out/, else models/shakespeare
    run: Given | None = None
    tau: Share | None = None  # where its slider starts; by default where the run scored it
    # the page; by default <run>/report/explainer.html, of models/shakespeare out/explainer.html
    out: Path | None = None
    draw = explainer.draw_explainer


@strict_dataclass
class Pareto(Comparison):
    """Perplexity against the mean executed extra steps of every method: table and figure."""

    taus: tuple[Share, ...] = ()  # stop the PonderLM-3 among them here, too; each makes a curve
    device: str = "auto"  # auto, cpu, cuda or mps
    draw = comparing.draw_pareto


@strict_dataclass
class Frontier(Comparison):
    """Losses against a reference method's at equal steps, by pairs of seeds: table and figure."""

    reference: Given = "ponderlm2"  # a method, with runs at several K
    taus: tuple[Share, ...] = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5)  # of those that stop
    device: str = "auto"  # auto, cpu, cuda or mps
    draw = frontier.draw_frontier


@strict_dataclass
class Confidence(Comparison):
    """PonderLM-2 and -3 that stop where a state looks sure enough, beside the router."""

    taus: tuple[Share, ...] = (1e-4, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5)  # of the router
    # where the largest probability of the next token is enough
    probabilities: tuple[Share, ...] = (0.1, 0.3, 0.5, 0.7, 0.9, 0.97)
    # how little a step may change a state, as a share of it
    changes: tuple[Annotated[float, Field(ge=0)], ...] = (0.05, 0.1, 0.2, 0.3, 0.5)
    windows: Count = 256  # the first ones of the validation text
    device: str = "auto"  # auto, cpu, cuda or mps
    draw = confidence.draw_confidence


@strict_dataclass
class Adaptation(Comparison):
    """Do steps go where they are needed, and do seeds agree where that is? A table, no figure."""

    tau: Share | None = None  # where pondering stops; by default where each run chose
    device: str = "auto"  # auto, cpu, cuda or mps
    draw = adaptation.write_adaptation


@strict_dataclass
class Cost(Comparison):
    """Losses against the slots that ran in training: table and figure."""

    draw = training_cost.draw_cost


@strict_dataclass
class Depth(Comparison):
    """PonderLM-3's loss against its step budget K: table and figure. Other methods are left out."""

    draw = comparing.draw_depth


@strict_dataclass
class Losses(Comparison):
    """Losses with all steps, stopped, and with the steps of other tokens: a table, no figure."""

    draw = comparing.write_losses


@strict_dataclass
class Choice(Comparison):
    """Losses on text that no other figure reports, by which to choose a setting: a table."""

    windows: Count = 1024  # of the validation text, behind the reported ones
    device: str = "auto"  # auto, cpu, cuda or mps
    draw = comparing.write_choice


@strict_dataclass
class Lookup(Comparison):
    """Does depth follow difficulty? Models that were trained on the lookup task."""

    tau: Share | None = None  # where pondering stops; by default where each run scored it
    # the prepared corpus that all are asked about; by default what each was trained on
    data: Given | None = None
    more_steps: Annotated[int, Field(ge=0)] = 0  # than each was trained with, its last one again
    device: str = "auto"  # auto, cpu, cuda or mps
    draw = lookup.draw_lookup


OF_ONE_RUN = (Converge, Buckets, Shift, Tokens, Tau, Penalty, Heatmap, Report)
OF_SEVERAL = (Pareto, Frontier, Confidence, Adaptation, Cost, Depth, Losses, Choice, Lookup)


def reader(kind):
    """A function that reads the flags of a command: of a class tyro prints an error as a page."""

    def read(flags: Annotated[kind, tyro.conf.arg(name="")]):
        return flags

    read.__doc__ = kind.__doc__
    return read


def main(argv=None):
    """Run one command. argv: its name and flags; by default those of the command line."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["hops"]:
        raise UserError("`analyze.py hops` has another name now: python analyze.py lookup")
    kinds = (*OF_ONE_RUN, Chain, Explainer, *OF_SEVERAL)
    commands = {kind.__name__.lower(): reader(kind) for kind in kinds}
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__, args=argv).draw()


if __name__ == "__main__":
    command_line(main)
