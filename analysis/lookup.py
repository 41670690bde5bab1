"""Thinking where its depth is known: the lookup task (corpus/lookup.py), for analyze.py.

code       shape        meaning
N                       slots of a line that run, in the order of the text
weights    (H, N, N)    how much each slot attends to each, of all heads of all layers
chain      (n,)         places of the pairs that a question leads through, one a lookup
"""

from dataclasses import replace
from itertools import cycle

import pandas as pd
import torch

from analysis.comparing import over_seeds
from analysis.measuring import BATCH, open_subject, stopped
from analysis.tables import COLORS, MARKERS, new_figure, save_figure, tabulate
from attention import eager
from corpus.lookup import CHAINS, LETTERS, LOOKUPS, chain_asked, lookups_asked, words
from engine.prefill import settle
from runtime import UserError, pick_device
from training.warm_start import deeper

# -- Right answers and steps -----------------------------------------------------------------------


@torch.no_grad()
def answers(subject):
    """Of each token that takes a known number of lookups: that number, whether the next token is
    predicted (the most probable one), and the executed steps -> (n,) each, decoded at tau."""
    found = []
    for x, y, h_hat, steps in stopped(subject, subject.tau, label="answers"):
        right = subject.model.lm_head(h_hat).argmax(-1) == y
        asked = lookups_asked(x, subject.tokenizer)
        found.append([values[asked >= 0].cpu() for values in (asked, right, steps)])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def lookup_rows(runs, tau, device, data=None, more_steps=0):
    """One row for each method, K and number of lookups, 0 for filler, over the seeds.

    Asked of at most 1024 lines, of the corpus `data` if that is given, with `more_steps` than K.
    """

    def numbers(run):
        subject = open_subject(run.path, 1024, tau, device, "", data)
        if more_steps:
            subject = replace(subject, model=deeper(subject.model, more_steps))
        asked, right, steps = answers(subject)
        tokens = pd.DataFrame({"accuracy": right.double(), "steps": steps.double()})
        found = tokens.groupby(asked.numpy()).mean().reindex([0, *LOOKUPS])
        return found.rename_axis("lookups").reset_index()

    frame = over_seeds(runs, numbers, by=["lookups"], one_text=not data)
    frame = frame.sort_values("K", kind="stable")
    if more_steps:
        frame["method"] += f", {more_steps} more steps"
    # The offset has as many numbers as K says; where it alone tells two curves apart it stays.
    short = frame.method.str.replace(r", router_offset [^,]+", "", regex=True)
    alone = not frame.assign(method=short).duplicated(["method", "K", "lookups"]).any()
    return frame.assign(method=short) if alone else frame


def lookup_table(frame):
    """Accuracy and executed steps, a column for each number of lookups."""
    curve = ["method", "K", "lookups"]
    cells = tabulate(frame, {"accuracy": "accuracy:.3f", "steps": "steps:.2f"})
    cells = frame[curve].join(cells).astype({"K": int}).set_index(curve)
    cells = cells.stack().unstack("lookups", sort=False)
    cells.columns = [f"{n} lookup" + "s"[: n - 1] if n else "filler" for n in cells.columns]
    return cells.rename_axis(["method", "K", ""]).reset_index()


def draw_lookup(study):
    def rows(runs):
        device = pick_device(study.device)
        return lookup_rows(runs, study.tau, device, study.data, study.more_steps)

    frame = study.frame("lookup", lookup_table, rows)
    x = "lookups that the next token takes (0: filler)"
    figure, (left, right) = new_figure(x, "", panels=2)
    curves, alone = frame.groupby(["method", "K"], sort=False), frame.method.nunique() == 1
    looks = zip(cycle(COLORS), cycle(MARKERS), strict=True)
    for ((name, K), curve), (color, marker) in zip(curves, looks, strict=False):
        label = f"K = {K:.0f}" if alone else f"{name}, K = {K:.0f}"
        look = {"marker": marker, "color": color, "label": label, "capsize": 2, "elinewidth": 0.6}
        left.errorbar(curve.lookups, curve.accuracy, curve.get("accuracy_std"), **look)
        right.errorbar(curve.lookups, curve.steps, curve.get("steps_std"), **look)
    left.axhline(1 / CHAINS, color="#777777", linestyle=":", label="guessing; lookups - 1")
    right.plot(LOOKUPS, [n - 1 for n in LOOKUPS], color="#777777", linestyle=":")
    left.set_ylabel("share of right answers")
    right.set_ylabel("executed steps")
    look = {"loc": "outside lower center", "ncols": 3, "fontsize": 8}
    figure.legend(*left.get_legend_handles_labels(), **look)
    save_figure(figure, study.out / "lookup.png")


# -- Where the slots of an answered question look --------------------------------------------------


class Watched:
    """Attention of one layer that is written down, where a LayerCache stands in decoding."""

    def __init__(self):
        self.seen = {}  # of each row, in the last pass that it was part of: (H, N, N)
        self.rows = None  # which these are: prefill.settle says it

    def attend(self, q, k, v, key_bias):
        v = v.repeat_interleave(q.size(1) // v.size(1), dim=1)  # (R, H, N, d)
        each = torch.eye(q.size(2), dtype=q.dtype, device=q.device).expand(*v.shape[:3], -1)
        weights = eager(q, k, each, key_bias)  # (R, H, N, N)
        self.seen |= dict(zip(self.rows.tolist(), weights.cpu(), strict=True))
        return weights @ v


@torch.no_grad()
def chain_rows(subject):
    """One row for each step of the first questions that are answered right, and each pair of the
    table: how much attention it gets, of the head that gives it most.

    line, lookups   of which line, and how many lookups its question takes
    step, pair      k, and the place of the pair in the table
    text            the pair
    lookup          the lookup of the chain that this pair is, from 1; 0: it is not in it
    """
    model, at, found = subject.model, len(LETTERS) + 2, []
    for first, (x, y) in enumerate(subject.batches("attention")):
        layers = [Watched() for _ in model.model.layers]
        now = settle(model, x, subject.tau, cache=layers)
        h_hat = model.integrate(now.h, now.s, now.steps)[:, at]
        right = model.lm_head(h_hat).argmax(-1) == y[:, at]
        asked = lookups_asked(x, subject.tokenizer)[:, at].tolist()
        for row in right.nonzero()[:, 0].tolist():
            line, slots = x[row].tolist(), (now.steps[row] + 1).tolist()  # of each token
            chain = chain_asked(line, subject.tokenizer)
            pairs = words(line[: len(LETTERS)], subject.tokenizer)
            weights = torch.cat([layer.seen[row] for layer in layers])  # (H, N, N)
            for k in range(slots[at]):
                seen = weights[:, sum(slots[:at]) + k, : sum(slots)].split(slots, dim=-1)
                for pair in range(len(LETTERS)):
                    what = {"line": first * BATCH + row, "lookups": asked[row], "step": k}
                    what |= {"pair": pair, "text": pairs[pair]}
                    what["lookup"] = chain.index(pair) + 1 if pair in chain else 0
                    found.append(what | {"attention": seen[pair].sum(-1).max().item()})
    if not found:
        raise UserError(f"{subject.path} answers no question right, so that none can be followed")
    return found


def chain_table(frame):
    """Attention of each step to the pair of each lookup, over all questions of as many lookups."""
    chain = frame[frame.lookup > 0]
    mean = chain.pivot_table(index=["lookups", "step"], columns="lookup", values="attention")
    mean.insert(0, "questions", frame.groupby(["lookups", "step"]).line.nunique())
    columns = {name: f"{name}:.0f" for name in ("lookups", "step", "questions")}
    columns |= {f"pair of lookup {n}": f"{n}:.2f" for n in mean.columns[1:]}
    return tabulate(mean.rename(columns=str).reset_index(), columns)


def draw_chain(study):
    frame = study.frame("chain", chain_table, lambda: chain_rows(study.subject))
    most = frame[frame.lookups == frame.lookups.max()]
    line = most[most.line == most.line.min()]
    grid = line.pivot(index="step", columns="pair", values="attention")
    pairs = line.drop_duplicates("pair").sort_values("pair")
    figure, (axes,) = new_figure("pairs of the line; in orange the chain of the question", "step")
    axes.grid(False)
    image = axes.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    figure.colorbar(image, label="attention, of the head that gives most")
    axes.set_xticks(range(len(pairs)), pairs.text, family="monospace")
    axes.set_yticks(range(len(grid)))
    for lookup, pair in zip(pairs.lookup, pairs.pair, strict=True):
        if lookup:
            axes.text(pair, lookup - 1, lookup, color=COLORS[0], ha="center", va="center", size=14)
            axes.get_xticklabels()[pair].set_color(COLORS[0])
    save_figure(figure, study.out / "chain.png")
