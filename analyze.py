"""Figures and tables from trained runs.

Of one run, by default the newest in out/; written to <run>/report/:

    python analyze.py converge      the Jacobi iteration approaching its fixed point
    python analyze.py buckets       which tokens gain by which step, and which take it
    python analyze.py shift         what fewer or more steps do to easy and to hard tokens
    python analyze.py tokens        which tokens and words get how many steps
    python analyze.py tau           loss and steps against where pondering stops
    python analyze.py penalty       why the printed penalty never acts
    python analyze.py heatmap       a text, each token shaded by its steps: an HTML page
    python analyze.py report        all of these on one page, index.html

Of several runs, written to out/analyze/:

    python analyze.py pareto --runs out/pareto/tiny/*     perplexity against executed extra steps
    python analyze.py depth --runs out/pareto/tiny/*      loss against the step budget K
    python analyze.py losses --runs out/tiny/*            with all steps, stopped, steps permuted
    python analyze.py hops --runs out/hops/*              accuracy where the difficulty is known

Each saves its numbers (<figure>.csv), the same as a table (.md) and a figure (.png), and draws
again from the saved numbers with --redraw.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

import report as pages
from compare import depth, hops, losses, pareto
from device import command_line
from figures import (
    ALPHAS,
    TAUS,
    WORDS,
    Study,
    draw_buckets,
    draw_converge,
    draw_heatmap,
    draw_penalty,
    draw_shift,
    draw_tau,
    draw_tokens,
)


@dataclass
class Options:
    run: str | None = None  # directory of a trained model; by default the newest in out/
    windows: int = 256  # validation windows to measure
    tau: float | None = None  # where pondering stops; by default where the run scored it
    out: Path | None = None  # where the results go; by default <run>/report
    redraw: bool = False  # from the numbers saved there, without the model
    device: str = "auto"  # auto, cpu, cuda or mps


@dataclass
class WithReference(Options):
    # a trained model without pondering, on the same text: its losses are a second difficulty
    reference: str | None = None


Flags = Annotated[Options, tyro.conf.arg(name="")]
FlagsWithReference = Annotated[WithReference, tyro.conf.arg(name="")]


def converge(flags: Flags):
    """The Jacobi iteration approaching its fixed point, with an exponential fit (8 windows)."""
    draw_converge(Study(flags, labels=("ponderlm3", "ponderlm2")))


def buckets(flags: FlagsWithReference):
    """Which tokens gain by which step, and which of them take it."""
    draw_buckets(Study(flags))


def shift(flags: FlagsWithReference, alphas: tuple[float, ...] = ALPHAS):
    """What fewer or more steps do to easy and to hard tokens: the router shifted by alpha.

    Args:
        alphas: what the router's logits are shifted by, times the step index
    """
    draw_shift(Study(flags, alphas=alphas != ALPHAS), alphas)


def tokens(flags: Flags, words: tuple[str, ...] = WORDS, least: int = 50):
    """Which tokens and words get how many steps; words of several tokens, inside and at their end.

    Args:
        words: words to look for; their steps are those after their last token
        least: leave out tokens that occur less often
    """
    draw_tokens(Study(flags, words=words != WORDS, least=least != 50), words, least)


def tau(flags: Flags, taus: tuple[float, ...] = TAUS):
    """Loss, perplexity and executed steps against tau.

    Args:
        taus: where pondering stops
    """
    if not taus:
        raise ValueError("--taus is empty: give at least one")
    draw_tau(Study(flags, taus=taus != TAUS), taus)


def penalty(flags: Flags):
    """Why the printed penalty never acts: its ratio rho by both readings, on batches of a run."""
    draw_penalty(Study(flags))


def heatmap(flags: Flags, text: Path | None = None):
    """A text with each token shaded by its steps, or by its loss: an HTML page by itself.

    Args:
        text: a text file; by default the beginning of the validation text
    """
    draw_heatmap(Study(flags, text=text is not None), text)


def report(flags: FlagsWithReference):
    """All figures and tables of one run, the depth map, config and commit, on one page."""
    if flags.redraw and not flags.run:
        raise ValueError("report --redraw needs --run, the run that the page is about")
    study = Study(flags)
    for draw in (
        draw_converge,
        draw_buckets,
        draw_shift,
        draw_tokens,
        draw_tau,
        draw_penalty,
        draw_heatmap,
    ):
        print(f"\n--- {draw.__name__[5:]}", flush=True)
        draw(study)
    print(f"written: {pages.report_page(study.path, study.out)}")


if __name__ == "__main__":
    commands = (
        converge,
        buckets,
        shift,
        tokens,
        tau,
        penalty,
        heatmap,
        report,
        pareto,
        depth,
        losses,
        hops,
    )
    commands = {command.__name__: command for command in commands}
    command_line(lambda: tyro.extras.subcommand_cli_from_dict(commands, description=__doc__))
