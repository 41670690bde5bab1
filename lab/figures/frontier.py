"""Is a method better than PonderLM-2 at equal steps? Differences by pair of seeds.

word         meaning
reference    PonderLM-2, by Jacobi or, where there is no such run, on the grid; which the others are
             compared with, at each of its K; K = 0 is vanilla
loss         nats per token as it decodes, hard-stopped at tau
difference   a run's loss minus that of the reference with the same seed, as many steps (between two
             K of the reference on the line between its losses; where a smaller K is better, that
             one's loss): below 0 the run is better
interval     half the width of the 95 % interval of its mean (Student's t over the seeds)
"""

import math

import numpy as np

from lab.common import Given, strict_dataclass
from lab.evaluation.texts import Share
from lab.figures.comparing import Comparison, curve_names, draw_curves, over_seeds, stopped_at
from lab.figures.tables import new_figure, save_figure, tabulate
from lab.intervals import interval
from model import UserError


def reference(runs):
    """The methods that are the reference, see above."""
    found = {run.shape.method for run in runs}
    return {"ponderlm2" if "ponderlm2" in found else "grid-fixed", "vanilla"}


def reference_curves(runs):
    """{seed: (steps, losses)} of the reference, by rising steps: lowest losses so far.

    Raises:
        UserError: no seed with two points.
    """
    curves, methods = {}, reference(runs)
    for run in runs:
        if run.shape.method in methods:
            point = run.results["hard"]["steps"], run.results["hard"]["loss"]
            curves.setdefault(run.config.seed, []).append(point)
    ordered = {seed: np.array(sorted(p)).T for seed, p in curves.items() if len(p) > 1}
    if not ordered:
        raise UserError("no seed has two runs of ponderlm2 or grid-fixed (or one and vanilla)")
    return {seed: (x, np.minimum.accumulate(losses)) for seed, (x, losses) in ordered.items()}


def frontier_rows(runs, taus, device, data=None):
    """One row for each method, K and tau: steps, loss, and the difference to the reference, of others."""
    curves, methods = reference_curves(runs), reference(runs)
    compared = [run for run in runs if run.config.seed in curves]
    if all(run.shape.method in methods for run in compared):
        raise UserError(f"no run beside {' and '.join(sorted(methods))} has one of their seeds")

    def measure(run):
        steps, losses = curves[run.config.seed]
        stops = taus if run.method.has_router else [run.config.tau]
        for tau, hard in stopped_at(run, stops, device, data):
            row = {"tau": tau, "steps": hard["steps"], "loss": hard["loss"]}
            row["inside"] = float(run.shape.method not in methods and steps[0] <= row["steps"] <= steps[-1])
            row["difference"] = row["loss"] - np.interp(row["steps"], steps, losses)
            yield row

    frame = over_seeds(compared, measure, by=["tau"])
    frame["interval"] = list(map(interval, frame.difference_std, frame.seeds))
    outside = frame.inside < 1  # of some seed: there is nothing to compare with
    frame.loc[outside, ["difference", "difference_std", "interval"]] = math.nan
    return frame.drop(columns=["inside", "inside_std"])


def with_interval(frame):
    """The frame with the interval as the spread of the difference."""
    return frame.drop(columns="difference_std").rename(columns={"interval": "difference_std"})


def frontier_table(frame):
    columns = {"method": "method", "K": "K:.0f", "τ": "tau:g", "seeds": "seeds:.0f"}
    columns |= {"extra steps": "steps:.2f", "loss": "loss:.4f"}
    columns |= {"to PonderLM-2, 95 %": "difference:.4f"}
    return tabulate(with_interval(frame), columns)


@strict_dataclass
class Frontier(Comparison):
    """Losses against PonderLM-2's at equal steps, by pairs of seeds: table and figure."""

    taus: tuple[Share, ...] = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5)  # of those that stop

    data: Given | None = None  # the text that they were scored on, if that is no named corpus

    def draw(self):
        def rows(runs, device):
            return frontier_rows(runs, self.taus, device, self.data)

        frame = self.frame("frontier", frontier_table, rows)
        drawn = frame[frame.difference.notna()]
        labels = (
            "executed extra steps per token, more to the right where τ is smaller",
            "loss minus PonderLM-2's, nats",
        )
        figure, (axes,) = new_figure(*labels)
        axes.axhline(0, color="#777777", label="PonderLM-2; below: better")
        draw_curves(axes, with_interval(drawn), curve_names(drawn), "steps", "difference")
        save_figure(figure, self.out / "frontier.png")
