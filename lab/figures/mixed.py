"""One model for two kinds of text (lab corpus lookup --prose): does it think where thinking pays?

column       meaning
kind         prose: a token of the docstrings; 1 .. 6: the question of a puzzle that takes so many lookups;
             puzzles: a token of a line of the task, whatever it is
loss         nats a token, hard-stopped at tau; all_steps: with every step taken
right        the share of the questions whose answer is the most probable token
steps        executed at tau, mean over these tokens
"""

from dataclasses import replace

import pandas as pd
import torch

from lab.corpora.lookup import longest_of, lookups_asked
from lab.figures.comparing import ABOUT, Comparison
from lab.figures.subject import decoded
from model import Fraction, validated_dataclass


def is_line(rows, tokenizer):
    """Which windows (W, T+1) are lines of the task: they begin with a table of pairs. -> (W,) bool"""
    return (rows[:, : longest_of(tokenizer) + 7] >= tokenizer.encode(" ab")[0]).all(-1)


def kind_rows(subject):
    """A row for each kind, of one run."""
    tokenizer, rows = subject.tokenizer, subject.windows.cpu()
    puzzle = is_line(rows, tokenizer)
    asked = torch.full((len(rows), rows.size(1) - 1), -1)
    asked[puzzle] = lookups_asked(rows[puzzle, :-1], tokenizer)
    asked, of_puzzle = asked.flatten(), puzzle.repeat_interleave(rows.size(1) - 1)
    loss, steps, right = decoded(subject)
    all_steps, *_ = decoded(replace(subject, tau=0.0))
    kinds = {"prose": ~of_puzzle, "puzzles": of_puzzle}
    kinds |= {str(n): asked == n for n in range(1, longest_of(tokenizer) + 1)}
    columns = {"loss": loss, "all_steps": all_steps, "steps": steps, "right": right}
    return pd.DataFrame(
        {"kind": kind, "tokens": int(chosen.sum())}
        | {name: x[chosen].double().mean().item() for name, x in columns.items()}
        for kind, chosen in kinds.items()
    )


@validated_dataclass
class Mixed(Comparison):
    """Models that were trained on prose and puzzles: loss, steps and right answers of each. A table."""

    tau: Fraction | None = None  # where pondering stops; by default where each run scored it

    other, by = True, ["kind"]
    columns = ABOUT | {"kind": "kind", "loss": "loss:.4f", "with all steps": "all_steps:.4f"}
    columns |= {"steps": "steps:.2f", "right": "right:.3f"}

    def measure(self, run):
        return kind_rows(self.subject(run, 2000))
