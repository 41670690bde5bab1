"""A puzzle that a model solves (engine/puzzle.py), printed and drawn as a picture that moves."""

from pathlib import Path

from analysis.pages import write_page
from corpus.lookup import longest_of
from engine.puzzle import open_model, puzzle, show, solve
from interop import PUZZLES, locate
from model import Given, strict_dataclass
from runtime import UserError
from training.config import Share

SECONDS, PAUSE = 0.9, 4  # of a step, and behind the last


@strict_dataclass
class Puzzle:
    """A puzzle solved, one lookup a thinking step: printed, and as a picture that moves (SVG)."""

    run: Given | None = None  # a model of the lookup task on the grid; by default models/lookup
    seed: int = 6  # of the puzzle
    number: int | None = None  # lookups of the question that is drawn; by default the most
    tau: Share = 0.1
    out: Path = Path("out/puzzle.svg")

    def draw(self):
        model, tokenizer = open_model(PUZZLES if self.run is None else locate(self.run))
        show(model, tokenizer, self.tau, self.seed)
        table, letters = puzzle(self.seed, longest_of(tokenizer))
        number = max(letters) if self.number is None else self.number
        if number not in letters:
            raise UserError(f"--number {number}: there are 1 to {max(letters)} lookups")
        found = solve(model, tokenizer, table, letters[number], self.tau)
        period = SECONDS * (found.steps + 2) + PAUSE
        at = [100 * SECONDS * (k + 1) / period for k in range(found.steps + 2)]  # percent
        write_page(self.out, "puzzle.svg", found=found, number=number, period=period, at=at)
