"""How many layers is a step of thinking worth? Losses of plain models with more layers, and of thinking ones.

column       meaning
model        plain: no thinking; always: all K steps for every token (PonderLM-2); decides (PonderLM-3)
layers       of the model; K: its most steps
loss, steps  nats a token as it decodes, hard-stopped at its tau, and steps executed, means over tokens
parameters   learned numbers
training     seconds that its training took at the speed of its end
machine, precision, text   as in comparing.py
decoding     milliseconds to decode a token, one after another, mean over some windows, the models in turns
worth        layers that a plain model of the same seed needs more for the same loss, on the line between
             its losses; a model that is ahead of the deepest counts as this one
"""

import math

import numpy as np
import pandas as pd
import tyro

from lab.figures.comparing import Comparison, check_comparable
from lab.figures.lookup import NAMES, timed
from lab.figures.tables import COLORS, show
from lab.intervals import interval
from model import validated_dataclass


def layer_rows(runs, data=None):
    """A row for each run: the columns above."""
    check_comparable(runs)
    rows = []
    for run, subject, time_ in timed(runs, 4, data=data):
        read = run.config.steps * run.config.batch_size * run.shape.block_size
        row = {"model": NAMES[run.shape.method], "layers": run.shape.num_hidden_layers}
        row |= {"K": run.begun.ponder_steps, "seed": run.config.seed} | {
            key: run.results["hard"][key] for key in ("loss", "steps")
        }
        row |= {"parameters": sum(p.numel() for p in subject.model.parameters())}
        row |= {"training": read / run.speed, "decoding": 1000 * time_ / run.shape.block_size}
        rows.append(row | run.origin)
    return with_worth(pd.DataFrame(rows))


def with_worth(frame):
    """The frame with the column worth, nan where the seed has no plain models of two depths."""
    worth = []
    for row in frame.itertuples():
        plain = frame[(frame.model == "plain") & (frame.seed == row.seed)].sort_values("layers")
        plain = plain[plain.loss < plain.loss.cummin().shift(fill_value=math.inf)]  # that fewer do not reach
        needed = np.interp(-row.loss, -plain.loss, plain.layers) if len(plain) > 1 else math.nan
        worth.append(needed - row.layers)
    return frame.assign(worth=worth)


def summary(frame):
    """A row for each model, its layers and K: means over seeds, and 95 % intervals of loss and worth."""
    rows = []
    deepest = frame[frame["model"] == "plain"].groupby("seed")["loss"].min()
    for (model, layers, K), group in frame.groupby(["model", "layers", "K"], sort=False):
        means, deviations = (getattr(group, how)(numeric_only=True) for how in ("mean", "std"))
        loss, worth = (
            show(means[x], form, interval(deviations[x], group[x].notna().sum()))
            for x, form in (("loss", ".4f"), ("worth", ".2f"))
        )
        known = group.worth.notna()  # of a seed with plain models of two depths
        least = "≥ " if (group.loss < group.seed.map(deepest))[known].any() else ""
        title = model if model == "plain" else f"{model}, K = {K}"
        row = {"model": f"{title}, {layers} layers", "seeds": len(group), "steps": f"{means.steps:.2f}"}
        row |= {"loss": loss, "layers worth": "" if model == "plain" else least + worth}
        row |= {"parameters": f"{means.parameters:,.0f}", "training, s": f"{means.training:.0f}"}
        rows.append(row | {"decoding, ms": f"{means.decoding:.2f}"})
    return pd.DataFrame(rows)


@validated_dataclass
class Layers(Comparison):
    """What a step is worth, in layers: table and figure."""

    device: tyro.conf.Suppress[str] = "cpu"  # on which decoding is timed
    sheet = "layers of a model without thinking", "nats per token"

    def frame(self, runs):
        return layer_rows(runs, self.data)

    def table(self, frame):
        return summary(frame)

    def picture(self, frame, axes):
        means = frame.groupby(["model", "layers", "K"], sort=False)[["loss", "steps"]].mean().reset_index()
        plain = means[means.model == "plain"].sort_values("layers")
        axes.plot(plain.layers, plain.loss, "o-", color=COLORS[2], label="no thinking")
        axes.set_xticks(plain.layers)
        for i, row in enumerate(means[means.model != "plain"].itertuples()):
            what = f"{row.model}: {row.steps:.2f} steps on {row.layers} layers"
            axes.axhline(row.loss, color=COLORS[i % len(COLORS)], linestyle="--", label=what)
