"""Is a method better than another one at equal steps? Differences by pair of seeds, for analyze.py.

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

from analysis.comparing import method_of, over_seeds
from analysis.measuring import decoded, mean, open_subject
from analysis.tables import LINES, MARKERS, new_figure, save_figure, tabulate
from baselines import find
from runtime import UserError, pick_device, progress

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


def scores(run, taus, device):
    """Steps and loss of a run, hard-stopped at each tau: rows."""
    hard, known = run.results["hard"], run.config.tau
    rows = [{"tau": known, "steps": hard["steps"], "loss": hard["loss"]}]
    if not run.method.has_router:
        return rows
    subject = open_subject(run.path, None, device=device)
    for tau in sorted({*taus} - {known}):
        loss, steps = decoded(subject, tau, label=f"tau {tau:g}")
        rows.append({"tau": tau, "steps": mean(steps), "loss": mean(loss)})
    return rows if known in taus else rows[1:]


def frontier_rows(runs, reference, taus, device):
    """One row for each method, K and tau: steps, loss, and the difference to the reference."""
    curves = reference_curves(runs, find(reference).method)
    known = reference, "vanilla"
    others = [run for run in runs if run.shape.method not in known and run.config.seed in curves]
    if not others:
        raise UserError(f"no run of a method beside {reference} and vanilla has one of their seeds")
    left = progress(total=len(others), desc="runs")

    def measure(run):
        steps, losses = curves[run.config.seed]
        rows = scores(run, taus, device)
        for row in rows:
            row["inside"] = float(steps[0] <= row["steps"] <= steps[-1])
            row["difference"] = row["loss"] - np.interp(row["steps"], steps, losses)
        left.update()
        return rows

    frame = over_seeds(others, measure, by=["tau"])
    left.close()
    pairs = zip(frame.difference_std, frame.seeds, strict=True)
    frame = frame.assign(interval=[interval(std, seeds) for std, seeds in pairs])
    outside = frame.inside < 1  # of some seed: there is nothing to compare with
    frame.loc[outside, ["difference", "difference_std", "interval"]] = math.nan
    return frame.drop(columns=["inside", "inside_std"])


def frontier_table(frame):
    columns = {"method": "method", "K": "K:.0f", "τ": "tau:g", "seeds": "seeds:.0f"}
    columns |= {"extra steps": "steps:.2f", "loss": "loss:.4f"}
    shown = frame.drop(columns="difference_std").rename(columns={"interval": "difference_std"})
    return tabulate(shown, columns | {"to the reference, 95 %": "difference:.4f"})


def draw_frontier(study):
    def rows(runs):
        return frontier_rows(runs, study.reference, study.taus, pick_device(study.device))

    frame = study.frame("frontier", frontier_table, rows)
    labels = "executed extra steps per token", "loss minus that of the reference, nats"
    figure, (axes,) = new_figure(*labels)
    axes.axhline(0, color=find(study.reference).color, label=find(study.reference).title)
    curves = frame.groupby(["method", "K"], sort=False)
    for i, ((name, K), curve) in enumerate(curves):
        curve = curve.sort_values("steps")
        axes.errorbar(
            curve.steps, curve.difference, yerr=curve.interval, label=f"{name}, K = {K}",
            color=method_of(name).color, marker=MARKERS[i % len(MARKERS)],
            linestyle=LINES[i % len(LINES)], linewidth=1.2, elinewidth=0.6, capsize=2,
        )  # fmt: skip
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    save_figure(figure, study.out / "frontier.png")
