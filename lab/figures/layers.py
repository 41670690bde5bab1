"""How many layers is an extra step worth? Losses of plain models with more layers, and of models that take
extra steps.

column       meaning
model        plain: no extra steps; always thinks: all K steps for every token (PonderLM-2); decides: as many
             as the router says (PonderLM-3)
layers, K    layers of the model, and its most steps
loss, steps  nats per token as the model decodes, hard-stopped at its tau, and executed steps; both are means
parameters   learned numbers
training     seconds that the training took, at the speed of its end
machine, precision, text   as in comparing.py
decoding     milliseconds to decode a token, one after another: mean over some windows, the models in turns
worth        how many more layers a plain model of the same seed needs for the same loss, interpolated between
             the losses of plain models; a model that is ahead of the deepest one counts as that one
"""

import math

import numpy as np
import pandas as pd
import tyro

from lab.figures.comparing import Comparison
from lab.figures.lookup import family, timed
from lab.figures.runs import check_comparable, check_one_recipe
from lab.figures.tables import COLORS, show
from lab.intervals import interval
from model import validated_dataclass


def layer_rows(runs, data=None):
    """The frame of some runs, with the columns above and a row for each run."""
    check_comparable(runs)
    check_one_recipe(runs, lambda run: (family(run), run.model_config.num_hidden_layers, run.K))
    rows = []
    for run, subject, seconds in timed(runs, 4, data=data):
        tokens = run.config.steps * run.config.batch_size * run.model_config.block_size
        row = {
            "model": family(run),
            "layers": run.model_config.num_hidden_layers,
            "K": run.K,
            "seed": run.config.seed,
            "loss": run.results["hard"]["loss"],
            "steps": run.results["hard"]["steps"],
            "parameters": sum(p.numel() for p in subject.model.parameters()),
            "training": tokens / run.speed,
            "decoding": 1000 * seconds / run.model_config.block_size,
        }
        rows.append(row | run.origin)
    return with_worth(pd.DataFrame(rows))


def with_worth(frame):
    """The frame with the column `worth`, nan where a seed has no plain models of two depths."""
    worth = []
    for row in frame.itertuples():
        plain = frame[(frame.model == "plain") & (frame.seed == row.seed)].sort_values("layers")
        best_of_fewer = plain.loss.cummin().shift(fill_value=math.inf)
        plain = plain[plain.loss < best_of_fewer]  # depths that are better than all smaller ones
        needed = math.nan
        if len(plain) > 1:
            needed = np.interp(-row.loss, -plain.loss, plain.layers)
        worth.append(needed - row.layers)
    return frame.assign(worth=worth)


def summary(frame):
    """The table: means over seeds for each model, its layers and K, with 95 % intervals of loss and worth."""
    rows = []
    lowest_plain_loss = frame[frame["model"] == "plain"].groupby("seed")["loss"].min()
    highest_plain_loss = frame[frame["model"] == "plain"].groupby("seed")["loss"].max()
    for (model, layers, K), group in frame.groupby(["model", "layers", "K"], sort=False):
        means = group.mean(numeric_only=True)
        deviations = group.std(numeric_only=True)
        half_intervals = {
            key: interval(deviations[key], group[key].notna().sum()) for key in ("loss", "worth")
        }
        has_worth = group.worth.notna()
        # Ahead of all plain models: worth is a lower bound.
        is_ahead = group.loss < group.seed.map(lowest_plain_loss)
        # Behind all plain models: worth is an upper bound.
        is_behind = group.loss > group.seed.map(highest_plain_loss)
        worth = show(means.worth, ".2f", half_intervals["worth"])
        bounds = {(True, False): "≥ ", (False, True): "≤ ", (True, True): "≈ ", (False, False): ""}
        worth = bounds[is_ahead[has_worth].any(), is_behind[has_worth].any()] + worth
        title = model if model == "plain" else f"{model}, K = {K}"
        rows.append(
            {
                "model": f"{title}, {layers} layers",
                "seeds": len(group),
                "steps": f"{means.steps:.2f}",
                "loss": show(means.loss, ".4f", half_intervals["loss"]),
                "layers worth": "" if model == "plain" else worth,
                "parameters": f"{means.parameters:,.0f}",
                "training, s": f"{means.training:.0f}",
                "decoding, ms": f"{means.decoding:.2f}",
            }
        )
    return pd.DataFrame(rows)


@validated_dataclass
class Layers(Comparison):
    """Plot how many layers an extra step is worth, from runs of models that differ in layers or in steps,
    with a table."""

    device: tyro.conf.Suppress[str] = "cpu"  # on which decoding is timed
    keeps = ["model", "layers", "K", "loss", "steps", "parameters", "training", "decoding", "worth"]
    sheet = "Loss by layers: means and standard deviations", "layers", "loss, nats per token"

    def frame(self, runs):
        return layer_rows(runs, self.data)

    def table(self, frame):
        return summary(frame)

    def picture(self, frame, axes):
        groups = frame.groupby(["model", "layers", "K"], sort=False)
        means = groups.agg(loss=("loss", "mean"), deviation=("loss", "std"), steps=("steps", "mean"))
        means = means.fillna({"deviation": 0}).reset_index()  # of one seed it is not known
        plain = means[means.model == "plain"].sort_values("layers")
        bars = {"capsize": 4, "marker": "o"}
        axes.errorbar(
            plain.layers, plain.loss, plain.deviation, color="#777777", label="no extra steps", **bars
        )
        axes.set_xticks(plain.layers)
        thinking = means[means.model != "plain"].sort_values("steps")
        for i, row in enumerate(thinking.itertuples()):
            color = COLORS[i % len(COLORS)]
            x = row.layers + 0.12 * (i + 1)  # side by side, so that the bars can be told apart
            label = f"{row.layers} layers, {row.model}: {row.steps:.2f} extra steps"
            axes.errorbar(x, row.loss, row.deviation, color=color, label=label, **bars)
            axes.axhline(row.loss, color=color, linestyle="--", linewidth=1)  # to read off layers
