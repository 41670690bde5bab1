"""Is a method better than another one at equal steps? Differences by pair of seeds.

word         meaning
reference    the method that the others are compared with, at each of its K; K = 0 is vanilla
loss         nats per token as it decodes, hard-stopped at tau
difference   a run's loss minus that of the reference with the same seed, as many steps (between two
             K of the reference on the line between its losses; where a smaller K is better, that
             one's loss): below 0 the run is better
interval     half the width of the 95 % interval of its mean (Student's t over the seeds)
"""

import math

import numpy as np

from analysis.comparing import Comparison, method_of, over_seeds, stopped_at
from analysis.tables import LINES, MARKERS, new_figure, save_figure, tabulate
from baselines import find
from model import Given, strict_dataclass
from runtime import UserError
from training.config import Share

# Of 2, 3, .. seeds; beyond them the normal distribution's is near enough.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NORMAL = 1.96


def interval(std, seeds):
    """Half the 95 % interval of a mean; nan for a single seed."""
    t = STUDENT[seeds - 2] if 2 <= seeds < len(STUDENT) + 2 else NORMAL
    return t * std / math.sqrt(seeds) if seeds > 1 else math.nan


def reference_curves(runs, name):
    """{seed: (steps, losses)} of a method and of vanilla, by rising steps: lowest losses so far.

    Raises:
        UserError: a seed that has two runs with as many steps, or no seed with two points.
    """
    curves = {}
    for run in runs:
        if run.shape.method in (name, "vanilla"):
            point = run.results["hard"]["steps"], run.results["hard"]["loss"]
            curves.setdefault(run.config.seed, []).append(point)
    for seed, points in curves.items():
        if len({steps for steps, _ in points}) < len(points):
            raise UserError(f"seed {seed} has two runs of {name} with as many steps: give one")
    ordered = {seed: np.array(sorted(p)).T for seed, p in curves.items() if len(p) > 1}
    curves = {seed: (x, np.minimum.accumulate(losses)) for seed, (x, losses) in ordered.items()}
    if not curves:
        raise UserError(f"--reference {name}: no seed has two runs of it (or one and vanilla)")
    return curves


def frontier_rows(runs, reference, taus, device):
    """One row for each method, K and tau: steps, loss, and the difference to the reference."""
    curves = reference_curves(runs, find(reference).method)
    known = reference, "vanilla"
    others = [run for run in runs if run.shape.method not in known and run.config.seed in curves]
    if not others:
        raise UserError(f"no run of a method beside {reference} and vanilla has one of their seeds")

    def measure(run):
        steps, losses = curves[run.config.seed]
        own = [run.config.tau]
        for tau, hard in stopped_at(run, taus if run.method.has_router else own, device):
            row = {"tau": tau, "steps": hard["steps"], "loss": hard["loss"]}
            row["inside"] = float(steps[0] <= row["steps"] <= steps[-1])
            row["difference"] = row["loss"] - np.interp(row["steps"], steps, losses)
            yield row

    frame = over_seeds(others, measure, by=["tau"])
    frame["interval"] = list(map(interval, frame.difference_std, frame.seeds))
    outside = frame.inside < 1  # of some seed: there is nothing to compare with
    frame.loc[outside, ["difference", "difference_std", "interval"]] = math.nan
    return frame.drop(columns=["inside", "inside_std"])


def frontier_table(frame):
    columns = {"method": "method", "K": "K:.0f", "τ": "tau:g", "seeds": "seeds:.0f"}
    columns |= {"extra steps": "steps:.2f", "loss": "loss:.4f"}
    shown = frame.drop(columns="difference_std").rename(columns={"interval": "difference_std"})
    return tabulate(shown, columns | {"to the reference, 95 %": "difference:.4f"})


@strict_dataclass
class Frontier(Comparison):
    """Losses against a reference method's at equal steps, by pairs of seeds: table and figure."""

    reference: Given = "ponderlm2"  # a method, with runs at several K
    taus: tuple[Share, ...] = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5)  # of those that stop

    def draw(self):
        def rows(runs, device):
            return frontier_rows(runs, self.reference, self.taus, device)

        frame = self.frame("frontier", frontier_table, rows)
        labels = "executed extra steps per token", "loss minus that of the reference, nats"
        figure, (axes,) = new_figure(*labels)
        axes.axhline(0, color=find(self.reference).color, label=find(self.reference).title)
        curves = frame.groupby(["method", "K"], sort=False)
        for i, ((name, K), curve) in enumerate(curves):
            curve = curve.sort_values("steps")
            axes.errorbar(
                curve.steps, curve.difference, yerr=curve.interval, label=f"{name}, K = {K}",
                color=method_of(name).color, marker=MARKERS[i % len(MARKERS)],
                linestyle=LINES[i % len(LINES)], linewidth=1.2, elinewidth=0.6, capsize=2,
            )  # fmt: skip
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
        save_figure(figure, self.out / "frontier.png")
