"""A puzzle that a model solves, a lookup a thinking step: printed, and drawn as a picture that moves.

python -m lab puzzle                                   models/lookup
python -m lab puzzle --run out/grid --number 4         another model, a question of four lookups
"""

from pathlib import Path
from typing import Annotated

import tyro

from data import UserError, command_line
from lab.common import Given
from lab.corpora.lookup import longest_of
from lab.engine.puzzle import open_model, puzzle, show, solve
from lab.figures.explainer import write_page
from lab.interop.weights import PUZZLES, locate
from model import Share, settings

SECONDS, PAUSE = 0.9, 4  # of a step, and behind the last


@settings
class Puzzle:
    run: Given | None = None  # a model of the lookup task on the grid; by default models/lookup
    seed: int = 6  # of the puzzle
    number: int | None = None  # lookups of the question that is drawn; by default the most
    tau: Share = 1e-4  # where pondering stops
    out: Path = Path("out/puzzle.svg")


def main(options: Annotated[Puzzle, tyro.conf.arg(name="")]):
    o = options
    model, tokenizer = open_model(PUZZLES if o.run is None else locate(o.run))
    table, letters = puzzle(o.seed, longest_of(tokenizer))
    number = max(letters) if o.number is None else o.number
    if number not in letters:
        raise UserError(f"--number {number}: there are 1 to {max(letters)} lookups")
    show(model, tokenizer, o.tau, o.seed)
    found = solve(model, tokenizer, table, letters[number], o.tau)
    period = SECONDS * (found.steps + 2) + PAUSE
    at = [100 * SECONDS * (k + 1) / period for k in range(found.steps + 2)]  # percent
    write_page(o.out, "puzzle.svg", found=found, number=number, period=period, at=at)


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab puzzle", description=__doc__))
