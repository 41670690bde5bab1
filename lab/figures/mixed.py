"""One model for two kinds of text (lab corpus lookup --prose): does it take extra steps where they pay?

column       meaning
kind         prose: tokens of the docstrings; puzzles: all tokens of the lines of the task; 1 .. 6: questions
             that take so many lookups
tokens       how many tokens of this kind there are
loss         nats per token, hard-stopped at tau; all_steps: with all steps
right        accuracy: the fraction of these tokens whose next token is the most probable one
steps        executed steps at tau, mean over these tokens
"""

from dataclasses import replace

import pandas as pd
import torch

from lab.corpora.lookup import SHORT, longest_of, lookups_asked
from lab.figures.comparing import ABOUT, OnAnyText
from lab.figures.subject import decoded_tokens
from model import Fraction, validated_dataclass


def is_line(rows, tokenizer):
    """Which windows (W, T+1) are lines of the task, that is, begin with a table of pairs: booleans (W,)."""
    pairs = longest_of(tokenizer) + SHORT  # of a table
    (first_pair,) = tokenizer.encode(" ab")  # pairs have the largest ids of the vocabulary
    return (rows[:, :pairs] >= first_pair).all(-1)


def kind_rows(subject):
    """The frame of one run, a row for each kind of token."""
    tokenizer = subject.tokenizer
    windows = subject.windows.cpu()
    T = windows.size(1) - 1
    is_puzzle = is_line(windows, tokenizer)  # (W,)
    asked = torch.full((len(windows), T), -1)
    asked[is_puzzle] = lookups_asked(windows[is_puzzle, :-1], tokenizer)
    asked = asked.flatten()  # (n,)
    of_puzzle = is_puzzle.repeat_interleave(T)  # (n,)
    kinds = {"prose": ~of_puzzle, "puzzles": of_puzzle}
    for n in range(1, longest_of(tokenizer) + 1):
        kinds[str(n)] = asked == n

    loss, steps, right = decoded_tokens(subject)
    all_steps, _, _ = decoded_tokens(replace(subject, tau=0.0))
    columns = {"loss": loss, "all_steps": all_steps, "steps": steps, "right": right}
    rows = []
    for kind, chosen in kinds.items():
        row = {"kind": kind, "tokens": int(chosen.sum())}
        for name, values in columns.items():
            row[name] = values[chosen].double().mean().item()
        rows.append(row)
    return pd.DataFrame(rows)


@validated_dataclass
class Mixed(OnAnyText):
    """For models that were trained on prose and puzzles: a table of loss, steps and accuracy on each."""

    # early-exit threshold: a token takes no further pondering step once the router's probability that it
    # needs one falls below this; 0: take all steps; None: the tau of each run's evaluation
    tau: Fraction | None = None

    by = ["kind"]
    columns = ABOUT | {"kind": "kind", "loss": "loss:.4f", "with all steps": "all_steps:.4f"}
    columns |= {"steps": "steps:.2f", "right": "right:.3f"}

    def measure(self, run):
        return kind_rows(self.subject(run, 2000))
