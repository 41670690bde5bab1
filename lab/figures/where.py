"""Where does a model think? Executed steps and losses by the kind of token that was read.

    group                kinds: of the token behind which the steps are taken, which predict the next one
    character            what its last byte is
    place in its word    a word is letters, digits, underscores and bytes beyond ASCII
    frequency            thirds of the text: its most frequent tokens make up the first
    steps taken          0 .. K
    step distribution    its own, or that of another token of its window (a permutation): what is lost where
                         the distributions are the same ones but fall to others

Losses are in nats a token, of the next token, hard-stopped at tau.
"""

from itertools import pairwise

import numpy as np
import pandas as pd
import torch

from lab.figures.comparing import ABOUT, Comparison, needs_router
from lab.figures.subject import decoded, rerouted
from lab.figures.tables import COLORS
from model import Count, Fraction, validated_dataclass

GROUPS = "character", "place in its word", "frequency", "steps taken", "step distribution"


def character(byte):
    """The kind of a byte."""
    c = chr(byte)
    if byte >= 128:
        return "beyond ASCII"
    if c.isspace():
        return "line end" if c == "\n" else "space"
    if c.isdigit():
        return "digit"
    if c.isalpha():
        return "vowel" if c.lower() in "aeiou" else "consonant"
    return "punctuation"


def in_word(byte):
    return chr(byte).isalnum() or byte in b"_" or byte >= 128


def kinds_of(windows, tokenizer):
    """The kinds of each token of windows (W, T+1) but the last, in the first three groups: (n,) each."""
    ids = windows[:, :-1].flatten().tolist()
    pieces = {i: tokenizer.decode([i]) or b"\n" for i in {*ids, *windows[:, -1].tolist()}}
    places = []
    for row in windows.tolist():
        word = [(in_word(pieces[i][0]), in_word(pieces[i][-1])) for i in row]
        before = False  # whether the last token ends in a word; a window's first token begins one
        for (begins, inside), (goes_on, _) in pairwise(word):
            place = "first" if not (before and begins) else "inside" if goes_on else "last"
            places.append(place if inside else "between words")
            before = inside
    counts = np.bincount(ids)
    order = np.argsort(-counts, kind="stable")
    share = np.empty(len(counts))
    share[order] = (np.cumsum(counts[order]) - counts[order] / 2) / len(ids)  # of its middle occurrence
    thirds = np.array(["frequent", "between", "rare"])[(3 * share).astype(int).clip(max=2)]
    return [character(pieces[i][-1]) for i in ids], places, [thirds[i] for i in ids]


def permuted(s, log_w):
    """s and log_w (B, T, S) of another token of each window, always the same one."""
    place = torch.randperm(s.size(1), generator=torch.Generator().manual_seed(0)).to(s.device)  # (T,)
    return s[:, place], log_w[:, place]


def where_rows(subject):
    """{group, kind, tokens (the share of all), steps, loss}, a row for each kind."""
    loss, steps, _ = (x.double().numpy() for x in decoded(subject))
    K = subject.model.config.ponder_steps
    kinds = [*kinds_of(subject.windows.cpu(), subject.tokenizer), [f"{k:.0f}" for k in steps]]
    rows = []
    for group, kind in zip(GROUPS, kinds, strict=False):
        each = pd.DataFrame({"kind": kind, "steps": steps, "loss": loss}).groupby("kind")
        found = each.mean().assign(tokens=each.size() / len(loss)).reset_index()
        if group == "steps taken":  # a mean of no tokens is none
            found = found.set_index("kind").reindex(map(str, range(K + 1))).reset_index()
            found.tokens = found.tokens.fillna(0)
        rows.append(found.assign(group=group))
    with rerouted(subject.model, permuted):
        other_loss, other_steps, _ = (x.double().numpy() for x in decoded(subject))
    control = {"kind": ["its own", "another token's"], "steps": [steps.mean(), other_steps.mean()]}
    control |= {"loss": [loss.mean(), other_loss.mean()], "tokens": 1.0, "group": GROUPS[-1]}
    return pd.concat([*rows, pd.DataFrame(control)])


@validated_dataclass
class Where(Comparison):
    """Which kinds of tokens are thought about: table and figure."""

    windows: Count = 512  # of the validation text
    tau: Fraction | None = None  # where pondering stops; by default where each run scored it
    by, keeps_means = ["group", "kind"], True
    sheet = "executed steps after the token, mean", "", 3
    columns = ABOUT | {"group": "group", "kind": "kind", "share of tokens": "tokens:.3f"}
    columns |= {"steps": "steps:.2f", "loss": "loss:.3f"}

    def measure(self, run):
        needs_router(run)
        return where_rows(self.subject(run, self.windows))

    def picture(self, frame, *panels):
        first = next(iter(frame.groupby(["method", "K"], sort=False)))[1]
        for axes, group in zip(panels, GROUPS, strict=False):
            mine = first[first.group == group].sort_values("steps")
            axes.barh(mine.kind, mine.steps, xerr=mine.steps_std.fillna(0), color=COLORS[1])
            axes.set_title(group)
        panels[0].figure.suptitle(f"{first.method.iloc[0]}, K = {first.K.iloc[0]:.0f}")
