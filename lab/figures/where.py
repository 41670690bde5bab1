"""Where does a model take extra steps? Executed steps and losses by the kind of the token that was read.

    group                kinds of tokens; the steps of a token predict the next one
    character            the kind of its last byte
    place in its word    a word consists of letters, digits, underscores and bytes beyond ASCII
    frequency            thirds of the text, the most frequent tokens first
    steps taken          0 .. K
    step distribution    the token's own, or that of another token of its window (a permutation): what is lost
                         if the same distributions go to other tokens

Losses are those of the next token, in nats, hard-stopped at tau.
"""

from itertools import pairwise

import numpy as np
import pandas as pd
import torch

from lab.figures.comparing import ABOUT, Comparison
from lab.figures.runs import refuse_without_router
from lab.figures.subject import decoded_tokens, rerouted
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
    """Whether a byte is part of a word."""
    return chr(byte).isalnum() or byte in b"_" or byte >= 128


def kinds_of(windows, tokenizer):
    """The kind of each token of windows (W, T+1) except for the last one of each window.

    Returns:
        The kinds by character, by place in its word and by frequency: a list of n each.
    """
    ids = windows[:, :-1].flatten().tolist()
    pieces = {}  # bytes of each token; without any it counts as the end of a line
    for i in {*ids, *windows[:, -1].tolist()}:
        pieces[i] = tokenizer.decode([i]) or b"\n"
    characters = [character(pieces[i][-1]) for i in ids]
    places = []
    for row in windows.tolist():
        places += places_of([pieces[i] for i in row])
    thirds = thirds_of(ids)
    return characters, places, [thirds[i] for i in ids]


def places_of(pieces):
    """Where each token of a window, except the last, stands in its word. `pieces` holds the bytes of each
    token."""
    places = []
    before_in_word = False  # whether the token before ends in a word; the first token begins one
    for piece, following in pairwise(pieces):
        continues = before_in_word and in_word(piece[0])
        ends_in_word = in_word(piece[-1])
        if not ends_in_word:
            places.append("between words")
        elif not continues:
            places.append("first")
        elif in_word(following[0]):
            places.append("inside")
        else:
            places.append("last")
        before_in_word = ends_in_word
    return places


def thirds_of(ids):
    """The third of the text that each token id belongs to, when tokens are sorted by their frequency."""
    counts = np.bincount(ids)
    order = np.argsort(-counts, kind="stable")
    middle = np.empty(len(counts))  # where the middle occurrence of a token stands in the sorted text, 0 to 1
    middle[order] = (np.cumsum(counts[order]) - counts[order] / 2) / len(ids)
    return np.array(["frequent", "between", "rare"])[(3 * middle).astype(int).clip(max=2)]


def permuted(s, log_w):
    """s and log_w (B, T, S) with tokens permuted within their windows, in the same way in all windows."""
    place = torch.randperm(s.size(1), generator=torch.Generator().manual_seed(0)).to(s.device)  # (T,)
    return s[:, place], log_w[:, place]


def where_rows(subject):
    """The frame of one run: group, kind, tokens (fraction of all), steps, loss; a row for each kind."""
    loss, steps, _ = (values.double().numpy() for values in decoded_tokens(subject))
    K = subject.model.config.ponder_steps
    kinds = [*kinds_of(subject.windows.cpu(), subject.tokenizer), [f"{k:.0f}" for k in steps]]
    rows = []
    for group, kind in zip(GROUPS[:-1], kinds, strict=True):
        each = pd.DataFrame({"kind": kind, "steps": steps, "loss": loss}).groupby("kind")
        found = each.mean().assign(tokens=each.size() / len(loss)).reset_index()
        if group == "steps taken":  # with a row for steps that no token takes, which has no means
            found = found.set_index("kind").reindex(map(str, range(K + 1))).reset_index()
            found.tokens = found.tokens.fillna(0)
        rows.append(found.assign(group=group))
    with rerouted(subject.model, permuted):
        other_loss, other_steps, _ = (values.double().numpy() for values in decoded_tokens(subject))
    control = {
        "kind": ["its own", "another token's"],
        "steps": [steps.mean(), other_steps.mean()],
        "loss": [loss.mean(), other_loss.mean()],
        "tokens": 1.0,
        "group": GROUPS[-1],
    }
    return pd.concat([*rows, pd.DataFrame(control)])


@validated_dataclass
class Where(Comparison):
    """Plot which kinds of tokens take extra steps. Also writes a table."""

    windows: Count = 512  # number of windows (pieces as long as the model's context) to measure
    # early-exit threshold: a token takes no further pondering step once the router's probability that it
    # needs one falls below this; 0: take all steps; None: the tau of each run's evaluation
    tau: Fraction | None = None
    by = ["group", "kind"]
    keeps = ["method", "K", "steps_std"]
    keeps_means = True
    sheet = "Which kinds of tokens take extra steps", "executed steps after the token, mean", "", 3
    columns = ABOUT | {"group": "group", "kind": "kind", "share of tokens": "tokens:.3f"}
    columns |= {"steps": "steps:.2f", "loss": "loss:.3f"}

    def measure(self, run):
        refuse_without_router(run)
        return where_rows(self.subject(run, self.windows))

    def picture(self, frame, *panels):
        # The picture shows the first method only; the table has them all.
        groups = [group for _, group in frame.groupby(["method", "K"], sort=False)]
        first = groups[0]
        for axes, group in zip(panels, GROUPS, strict=False):
            mine = first[first.group == group].sort_values("steps")
            axes.barh(mine.kind, mine.steps, xerr=mine.steps_std.fillna(0), color=COLORS[1])
            axes.set_title(group)
        title, *_ = self.sheet
        panels[0].figure.suptitle(f"{title}: {first.method.iloc[0]}, K = {first.K.iloc[0]:.0f}")
