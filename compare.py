"""Several runs side by side: methods and budgets compared, for analyze.py.

word        meaning
K           extra computations a token may take, of any method (methods.py)
steps       those it does take in decoding, hard-stopped at tau; mean over tokens
loss        nats per token on the validation windows, as it decodes: fixed point, hard-stopped
perplexity  exp(loss), per token: per byte for models of bytes
seeds       runs that differ in nothing else; a spread is their standard deviation
R           refinements in training (the most, where they are drawn)
frontier    no other row is better in steps or perplexity and not worse in the other (means)
"""

import math
import re
import statistics
from dataclasses import replace
from itertools import cycle
from pathlib import Path

from tqdm import tqdm

from cost import cost
from device import pick_device
from hops import CHAINS, HOPS
from measure import answers, mean, open_subject, validation_windows
from methods import load
from run import read_lines
from tables import (
    COLORS,
    MARKERS,
    check_comparable,
    draw_curves,
    group_runs,
    markdown,
    mean_std,
    method_index,
    new_figure,
    read_runs,
    save_figure,
    save_rows,
    show,
)
from validation import evaluate

# -- Perplexity against executed steps (section 4.1) -----------------------------------------------


def on_frontier(points):
    """For each (steps, perplexity): does no other have less of one and not more of the other?"""
    better = lambda a, b: a[0] <= b[0] and a[1] <= b[1] and a != b  # noqa: E731
    return [not any(better(other, point) for other in points) for point in points]


def at_other_taus(runs, taus, device):
    """The PonderLM-3 runs, hard-stopped at each of `taus` instead of at the one they have."""
    found, mine = [], [run for run in runs if run.shape.label == "ponderlm3"]
    pairs = [(run, tau) for run in mine for tau in dict.fromkeys(taus) if tau != run.config.tau]
    for run, tau in tqdm(pairs, desc="other tau", disable=not pairs):
        _, _, val = validation_windows(run.path)
        count = min(run.config.eval_windows, val.count)
        hard = evaluate(load(run.path).to(device), val, count, device, tau=tau, tau_steps=tau)
        config = replace(run.config, tau=tau)
        found.append(replace(run, config=config, results={"hard": hard}))
    return found


def pareto_rows(runs):
    """One row for each method and K: seeds, executed steps, loss, perplexity, and what it costs."""
    check_comparable(runs)
    rows = []
    for (name, K), group in group_runs(runs).items():
        hard = [run.results["hard"] for run in group]
        row = {"method": name, "K": K, "seeds": len(group)}
        row["steps"], row["steps_std"] = mean_std([h["steps"] for h in hard])
        row["loss"], row["loss_std"] = mean_std([h["loss"] for h in hard])
        row["perplexity"], row["perplexity_std"] = mean_std([math.exp(h["loss"]) for h in hard])
        rows.append(row | vars(cost(group[0].shape, row["steps"])))
    frontier = on_frontier([(row["steps"], row["perplexity"]) for row in rows])
    return [row | {"frontier": int(best)} for row, best in zip(rows, frontier, strict=True)]


def pareto_table(rows):
    titles = [
        "method",
        "K",
        "seeds",
        "extra steps",
        "loss",
        "perplexity",
        "MFLOPs, 6N",
        "MFLOPs, 2N",
    ]
    titles += ["keys a layer", "training forwards", "frontier"]
    lines = []
    if not any(r["frontier"] for r in rows):
        raise ValueError("no row is on the frontier")
    for r in rows:
        method_index(r["method"])
        line = [r["method"], f"{r['K']:.0f}", f"{r['seeds']:.0f}"]
        line += [show(r["steps"], r["steps_std"], 2), show(r["loss"], r["loss_std"], 4)]
        line += [show(r["perplexity"], r["perplexity_std"], 3)]
        line += [f"{r['paper_flops'] / 1e6:.2f}", f"{r['forward_flops'] / 1e6:.2f}"]
        line += [f"{r['cache_entries']:.2f}", f"{r['training_forwards']:.1f}"]
        lines.append([*line, "yes" if r["frontier"] else ""])
    return markdown(titles, lines)


def pareto(
    runs: tuple[str, ...] = (),
    taus: tuple[float, ...] = (),
    out: Path = Path("out/analyze"),
    redraw: bool = False,
    device: str = "auto",
):
    """Perplexity against the mean executed extra steps of every method: table and figure.

    Args:
        runs: directories of trained runs
        taus: evaluate the PonderLM-3 among them at these, too; each makes a curve
        out: where pareto.csv, .md and .png go
        redraw: from the numbers saved there, without runs
        device: auto, cpu, cuda or mps; where they are evaluated
    """
    rows, loaded = None, read_runs(runs, redraw)
    if not redraw:
        rows = pareto_rows(loaded + at_other_taus(loaded, taus, pick_device(device)))
    rows = save_rows(out, "pareto", rows, pareto_table)
    best = sorted((row["steps"], row["perplexity"]) for row in rows if row["frontier"])
    low, high = min(p for _, p in best), max(p for _, p in best)
    margin = 0.15 * (high - low) + 0.01
    far = any(row["perplexity"] > high + margin for row in rows)
    labels = "executed extra steps per token (points: K)", "perplexity per token"
    figure, panels = new_figure(*labels, panels=1 + far)  # all; and what is near the frontier
    for axes in panels:
        draw_curves(axes, rows, "steps", "perplexity")
        axes.step(
            *zip(*best, strict=True), where="post", color="#BBBBBB", zorder=0, label="frontier"
        )
    panels[-1].set_ylim(low - margin, high + margin)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(
        *handles, loc="outside lower center", ncols=2 * len(panels), fontsize=8, handlelength=5
    )
    save_figure(figure, out / "pareto.png")


# -- What is lost by stopping (section 3.3) --------------------------------------------------------


def losses_rows(runs):
    """One row for each method and K, over the seeds: its losses, and differences between them.

    loss: at the fixed point, all steps run. hard: stopped at tau. gap: loss less that at R, the
    number of refinements in training. permuted: what it costs, stopped, to give each token the
    step distribution of another one.
    """
    check_comparable(runs)
    rows = []
    for (name, K), group in group_runs(runs).items():
        row, results = {"method": name, "K": K, "seeds": len(group)}, [r.results for r in group]
        for key, values in {
            "loss": [r["fixed"]["loss"] for r in results],
            "hard": [r["hard"]["loss"] for r in results],
            "steps": [r["hard"]["steps"] for r in results],
            "gap": [r["fixed"]["loss"] - r["trained"]["loss"] for r in results],
            "permuted": [r["permuted"]["loss"] - r["hard"]["loss"] for r in results],
        }.items():
            row[key], row[f"{key}_std"] = mean_std(values)
        forwards = cost(group[0].shape, row["steps"]).training_forwards
        rows.append(row | {"R": results[0]["iters"], "training_forwards": forwards})
    return rows


def losses_table(rows):
    titles = ["method", "K", "R", "seeds", "loss, all steps", "hard-stopped", "extra steps"]
    lines = []
    for r in rows:
        keys = (("loss", 4), ("hard", 4), ("steps", 2), ("gap", 4), ("permuted", 3))
        numbers = [show(r[key], r[f"{key}_std"], digits) for key, digits in keys]
        line = [r["method"], *(f"{r[key]:.0f}" for key in ("K", "R", "seeds")), *numbers]
        lines.append([*line, f"{r['training_forwards']:.1f}"])
    return markdown([*titles, "gap to R", "s permuted, +", "training forwards"], lines)


def losses(runs: tuple[str, ...] = (), out: Path = Path("out/analyze"), redraw: bool = False):
    """Losses with all steps, stopped, and with the steps of other tokens: a table, no figure.

    Args:
        runs: directories of trained runs
        out: where losses.csv and .md go
        redraw: from the numbers saved there, without runs
    """
    loaded = read_runs(runs, redraw)
    save_rows(out, "losses", None if redraw else losses_rows(loaded), losses_table)
    print(f"written: {out / 'losses'}.csv, .md")


# -- Loss against the step budget (section 4.4) ----------------------------------------------------


def training_loss(run):
    """Mean logged training cross-entropy of the last tenth of the steps, in nats."""
    rows = [row for row in read_lines(run.path / "log.jsonl") if "ce" in row]
    last = [row["ce"] for row in rows if row["step"] > 0.9 * run.config.steps]
    if not last:
        raise ValueError(f"{run.path}/log.jsonl has no line of the last tenth of the steps")
    return statistics.mean(last)


def depth_rows(runs):
    """One row for each K of PonderLM-3, over the seeds.

    Raises:
        ValueError: no run is of PonderLM-3.
    """
    runs, rows = [run for run in runs if run.shape.label == "ponderlm3"], []
    if not runs:
        raise ValueError("none of the runs is a PonderLM-3; train one: python train.py")
    check_comparable(runs)
    for (name, K), group in group_runs(runs).items():
        row = {"method": name, "K": K, "seeds": len(group)}
        for key, values in {
            "training_loss": [training_loss(run) for run in group],
            "loss": [run.results["hard"]["loss"] for run in group],
            "steps": [run.results["hard"]["steps"] for run in group],
        }.items():
            row[key], row[f"{key}_std"] = mean_std(values)
        rows.append(
            row | {"training_forwards": cost(group[0].shape, row["steps"]).training_forwards}
        )
    return rows


def depth_table(rows):
    titles = ["method", "K", "seeds", "training loss", "validation loss", "extra steps"]
    lines = []
    for r in rows:
        keys = (("training_loss", 3), ("loss", 4), ("steps", 2))
        numbers = [show(r[key], r[f"{key}_std"], digits) for key, digits in keys]
        line = [r["method"], f"{r['K']:.0f}", f"{r['seeds']:.0f}", *numbers]
        lines.append([*line, f"{r['training_forwards']:.1f}"])
    return markdown([*titles, "training forwards"], lines)


def depth(runs: tuple[str, ...] = (), out: Path = Path("out/analyze"), redraw: bool = False):
    """PonderLM-3's loss against its step budget K: table and figure.

    Args:
        runs: directories of trained runs; those of other methods are left out
        out: where depth.csv, .md and .png go
        redraw: from the numbers saved there, without runs
    """
    loaded = read_runs(runs, redraw)
    rows = None if redraw else depth_rows(loaded)
    rows = save_rows(out, "depth", rows, depth_table)
    figure, (axes,) = new_figure("K, the step budget", "validation loss, nats per token")
    draw_curves(axes, rows, "K", "loss")
    axes.set_xticks(sorted({row["K"] for row in rows}))
    axes.xaxis.set_major_formatter("{x:.0f}")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    save_figure(figure, out / "depth.png")


# -- Accuracy where the difficulty is known --------------------------------------------------------


def hops_rows(runs, tau, device):
    """One row for each method, K and number of lookups, 0 for filler, over the seeds."""
    labels = ("ponderlm3", "ponderlm2", "vanilla")
    runs, rows = [run for run in runs if run.shape.label in labels], []
    if not runs:
        raise ValueError(f"none of the runs is of {', '.join(labels)}")
    check_comparable(runs)
    for (name, K), group in sorted(group_runs(runs).items(), key=lambda item: item[0][1]):
        name = re.sub(r", router_offset \([^)]*\)", "", name)  # as many numbers as K says
        name = name if K else "vanilla"  # whose router does not matter
        found = [answers(open_subject(r.path, 1024, tau, device, labels)) for r in group]
        for n in (0, *HOPS):
            row = {"method": name, "K": K, "seeds": len(group), "hops": n}
            for key, part in (("accuracy", 1), ("steps", 2)):
                values = [mean(each[part][each[0] == n]) for each in found]
                known = None not in values  # where there was such a question
                row[key], row[f"{key}_std"] = mean_std(values) if known else (None, None)
            rows.append(row)
    return rows


def hops_table(rows):
    """Accuracy and executed steps, a column for each number of lookups."""
    asked = list(dict.fromkeys(row["hops"] for row in rows))
    titles = [
        "method",
        "K",
        "",
        *(f"{n:.0f} lookup{'s' * (n > 1)}" if n else "filler" for n in asked),
    ]
    lines = []
    for name, K in dict.fromkeys((row["method"], row["K"]) for row in rows):
        mine = [row for row in rows if (row["method"], row["K"]) == (name, K)]
        for key, digits in (("accuracy", 3), ("steps", 2)):
            numbers = [
                "-" if row[key] is None else show(row[key], row[f"{key}_std"], digits)
                for row in mine
            ]
            lines.append([name, f"{K:.0f}", key, *numbers])
    return markdown(titles, lines)


def hops(
    runs: tuple[str, ...] = (),
    tau: float | None = None,
    out: Path = Path("out/analyze"),
    redraw: bool = False,
    device: str = "auto",
):
    """Does depth follow difficulty? Accuracy and steps against the lookups that an answer takes.

    Args:
        runs: directories of runs trained with --data hops; PonderLM-3, PonderLM-2 and vanilla
        tau: where pondering stops; by default where each run scored it
        out: where hops.csv, .md and .png go
        redraw: from the numbers saved there, without runs
        device: auto, cpu, cuda or mps; where they are evaluated
    """
    loaded = read_runs(runs, redraw)
    rows = None if redraw else hops_rows(loaded, tau, pick_device(device))
    rows = save_rows(out, "hops", rows, hops_table)
    figure, (left, right) = new_figure(
        "lookups that the next token takes (0: filler)", "", panels=2
    )
    curves = list(dict.fromkeys((row["method"], row["K"]) for row in rows))
    for (name, K), color, marker in zip(curves, cycle(COLORS), cycle(MARKERS), strict=False):
        mine = [row for row in rows if (row["method"], row["K"]) == (name, K)]
        for axes, key in ((left, "accuracy"), (right, "steps")):
            place = [row["hops"] for row in mine], [row[key] for row in mine]
            axes.plot(*place, marker=marker, color=color, label=f"{name}, K = {K:.0f}")
    left.axhline(1 / CHAINS, color="#777777", linestyle=":", label="guessing")
    left.set_ylabel("share of right answers")
    right.set_ylabel("executed steps")
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8
    )
    save_figure(figure, out / "hops.png")
