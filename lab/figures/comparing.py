"""Several runs side by side: methods and budgets compared.

word        meaning
run         what a finished run directory holds (train.py)
recipe      what could matter of a run's settings, beside its method, K and seed
group       runs that differ in nothing but their seed
K           extra computations a token may take, of any method (methods/)
steps       those it does take in decoding, hard-stopped at tau; mean over tokens
loss        nats per token on the validation windows, as it decodes: fixed point, hard-stopped
perplexity  exp(loss), per token: per byte for models of bytes
seeds       runs of a group; a spread is their standard deviation
frontier    no other row is better in steps or perplexity and not worse in the other (means)
"""

import math
from dataclasses import dataclass, fields, replace
from itertools import combinations, count
from pathlib import Path
from textwrap import fill

import pandas as pd

from lab.common import Given, progress, strict_dataclass
from lab.evaluation.texts import Share, validation_windows
from lab.figures.tables import COLORS, LINES, MARKERS, new_figure, save, save_figure, tabulate
from lab.interop import load, read_config
from lab.interop.warm_start import BACKBONE
from lab.methods import PonderConfig, all_methods, configure, find
from lab.methods.cost import cost
from lab.train import read_run
from model import UserError, pick_device, read_json
from train import TrainConfig, evaluate

# -- Runs and groups of them -----------------------------------------------------------------------

# No part of a recipe: names, method, K and seed, and what changes speed alone.
LEFT_OUT = {"preset", "name", "out", "resume", "data", "tokenizer", "method", "seed", "ponder_steps"}
LEFT_OUT |= {"log_every", "eval_every", "device", "backend", "compile", "recompute"}


@dataclass
class Run:
    path: Path
    config: TrainConfig
    shape: PonderConfig  # of the trained model
    corpus: dict
    results: dict

    @property
    def method(self):
        """Its class."""
        return find(self.shape.method)

    @property
    def recipe(self):
        """{setting: value}, see above; of what it began from, whether it began from anything."""
        found = vars(self.config) | vars(self.shape)
        found["init_from"] = found.get("init_from") is not None
        left_out = LEFT_OUT if self.method.iterates else LEFT_OUT | {"refinements"}
        return {name: value for name, value in found.items() if name not in left_out}

    def title(self, among):
        """The title of its method and those settings `among` its recipe that are not at their
        defaults, numbers in six digits: 'PonderLM-3, penalty_weight 0'."""

        def readable(value):
            if isinstance(value, tuple):  # as the flag has it
                return " ".join(map(readable, value))
            return f"{value:g}" if isinstance(value, float) else str(value)

        recipe, model = self.recipe, configure(PonderConfig(), self.shape.method)
        defaults = vars(TrainConfig()) | vars(model) | {"init_from": False}
        odd = [name for name in sorted(among) if recipe[name] != defaults[name]]
        return ", ".join([self.method.title, *(f"{name} {readable(recipe[name])}" for name in odd)])


def read_results(run):
    """results.json of a run. UserError: it is damaged, or of an earlier version."""
    content = read_json(run / "results.json")
    try:
        ways = [content[way] for way in ("trained", "fixed", "hard")]
        losses = [*(way["loss"] for way in ways), content["unigram_entropy"]]
        # e to a larger loss is infinite
        if all(0 <= x < 700 for x in losses) and all(0 <= way["steps"] < 1e9 for way in ways):
            return content
    except (KeyError, TypeError):
        pass
    raise UserError(f"{run / 'results.json'} is damaged, or of an earlier version: evaluate the run again")


def read_runs(directories):
    """The finished ones among some runs; the others are named.

    Raises:
        UserError: there is none, or a damaged one.
    """
    runs = []
    for path in map(Path, directories):
        if not (path / "results.json").is_file():
            print(f"left out, not a finished run: {path}")
            continue
        config, _, corpus = read_run(path)
        runs.append(Run(path, config, read_config(path), corpus, read_results(path)))
    if not runs:
        raise UserError(
            "no finished run among those given: name some, for instance --runs out/*, "
            "or train one: python train.py"
        )
    return runs


def group_runs(runs):
    """{(name, K): runs that differ in their seed alone}, names in the order of all_methods().

    A name says what is not at its default, of the method's own settings and of those in which its
    runs with the same K differ.

    Raises:
        UserError: the same recipe and seed twice.
    """
    groups = {}
    for kind in all_methods():
        mine = [run for run in runs if run.shape.method == kind.method]
        own = {field.name for field in fields(kind.Config)}.difference(BACKBONE)
        named = own - {"block_size", "refinements"} - LEFT_OUT | differing(mine)
        for run in sorted(mine, key=lambda run: run.shape.ponder_steps):
            group = groups.setdefault((run.title(named), run.shape.ponder_steps), [])
            for other in group:
                if other.config.seed == run.config.seed:
                    same = f"{other.path} and {run.path} are the same training"
                    raise UserError(f"{same}: method, settings and seed; give one of them")
            group.append(run)
    return groups


def differing(runs):
    """The settings in which runs of one method differ from others with the same K."""
    return {
        name
        for a, b in combinations(runs, 2)
        if a.shape.ponder_steps == b.shape.ponder_steps
        for name, value in a.recipe.items()
        if value != b.recipe[name]
    }


def check_comparable(runs, one_text=True):
    """Name what differs between the runs beside the method, which a comparison should not have.

    `one_text`: they have to be scored on the text that they come with.

    Raises:
        UserError: they are scored on different texts, or windows of them.
    """
    first = runs[0]
    for run in runs:
        for what, differ in (
            ("corpora", one_text and first.corpus | {"name": ""} != run.corpus | {"name": ""}),
            ("windows", first.shape.block_size != run.shape.block_size),
            ("numbers of windows", first.config.eval_windows != run.config.eval_windows),
        ):
            if differ:
                raise UserError(f"{first.path} and {run.path} are scored on different {what}")
    for name in ("steps", "batch_size", "learning_rate"):
        if len(values := {getattr(run.config, name) for run in runs}) > 1:
            print(f"note: the runs differ in {name}, too: {', '.join(map(str, sorted(values)))}")


def over_seeds(runs, measure, by=(), one_text=True):
    """One row for each method and K: how many seeds, and mean and deviation of each number.

    Args:
        measure: a function of a run -> rows of numbers: dicts or a frame
        by: the keys that tell the rows of a run apart
        one_text: see check_comparable

    Returns:
        a frame of method, K, by, seeds, <number>, <number>_std, ..; one seed has no deviation: NaN.
    """
    check_comparable(runs, one_text)
    found = [
        pd.DataFrame(measure(run)).assign(method=name, K=K)
        for (name, K), group in group_runs(runs).items()
        for run in progress(group, desc=name, leave=False)
    ]
    grouped = pd.concat(found).groupby(["method", "K", *by], sort=False)
    frame = grouped.agg(["mean", "std"])
    frame.columns = [key + {"mean": "", "std": "_std"}[which] for key, which in frame.columns]
    frame.insert(0, "seeds", grouped.size())
    return frame.reset_index()


@strict_dataclass
class Comparison:
    """The flags that all figures of several runs have."""

    runs: tuple[str, ...] = ()  # directories of trained runs
    out: Path = Path("out/analyze")  # where the results go
    redraw: bool = False  # from the numbers saved there, without runs
    device: str = "auto"  # auto, cpu, cuda or mps

    def frame(self, name, table, rows):
        """The numbers of a figure: what `rows` makes of runs and device, or as saved."""
        found = None if self.redraw else rows(read_runs(self.runs), pick_device(self.device))
        return save(self.out, name, found, table)


def curve_names(frame):
    """Method and K of each row; K alone where there is one method."""
    K = "K = " + frame.K.map("{:.0f}".format)
    return K if frame.method.nunique() == 1 else frame.method + ", " + K


def draw_curves(axes, frame, names, x, y, label="K"):
    """One curve for each of `names` (rows,), its points named by `label`, with the spread of the seeds.

    A method, which is what comes before the comma of a name, has a colour; its variants differ in marker and
    line, and in colour, too, where there is no other method.
    """
    variants, one = {}, frame.method.str.split(",").str[0].nunique() == 1
    for n, (name, curve) in enumerate(frame.groupby(names, sort=False)):
        variant = variants.setdefault(name.split(",")[0], count())
        color = COLORS[(n if one else [*variants.values()].index(variant)) % len(COLORS)]
        i = n if one else next(variant)
        axes.errorbar(
            curve[x], curve[y], xerr=curve.get(f"{x}_std"), yerr=curve.get(f"{y}_std"),
            label=fill(name, 90), color=color, marker=MARKERS[i % len(MARKERS)],
            linestyle=LINES[i % len(LINES)], linewidth=1.2, elinewidth=0.6, capsize=2,
            markersize=10, markerfacecolor="white",
        )  # fmt: skip
        place = {"fontsize": 7, "ha": "center", "va": "center_baseline", "clip_on": True}
        for at_x, at_y, n in zip(curve[x], curve[y], curve[label], strict=True):
            axes.text(at_x, at_y, f"{n:.0f}", color=color, zorder=5, **place)


# -- Perplexity against executed steps (section 4.1) -----------------------------------------------


def on_frontier(points):
    """For each (steps, perplexity): does no other have less of one and not more of the other?"""
    better = lambda a, b: a[0] <= b[0] and a[1] <= b[1] and a != b  # noqa: E731
    return [not any(better(other, point) for other in points) for point in points]


def stopped_at(run, taus, device, data=None):
    """A run with a router, hard-stopped at each of `taus`: (tau, results as `evaluate` has them).
    At the tau that it has these are known."""
    for tau in taus:
        if tau == run.config.tau:
            yield tau, run.results["hard"]
            continue
        _, _, val = validation_windows(run.path, data)
        count = min(run.config.eval_windows, val.count)
        yield tau, evaluate(load(run.path).to(device), val, count, tau=tau)


def at_other_taus(runs, taus, device, data=None):
    """The runs with a router, as if each of `taus` was the one that they have."""
    return [
        replace(run, config=replace(run.config, tau=tau), results={"hard": hard})
        for run in progress([run for run in runs if run.method.has_router], desc="other tau")
        for tau, hard in stopped_at(run, taus, device, data)
        if tau != run.config.tau
    ]


def pareto_rows(runs):
    """One row for each method and K: seeds, executed steps, loss, perplexity, and what it costs."""

    def numbers(run):
        steps, loss = (run.results["hard"][key] for key in ("steps", "loss"))
        return [{"steps": steps, "loss": loss, "perplexity": math.exp(loss)}]

    frame = over_seeds(runs, numbers)
    shapes = [group[0].shape for group in group_runs(runs).values()]
    costs = [vars(cost(shape, x)) for shape, x in zip(shapes, frame.steps, strict=True)]
    best = on_frontier(list(zip(frame.steps, frame.perplexity, strict=True)))
    return frame.join(pd.DataFrame(costs)).assign(frontier=[int(b) for b in best])


def pareto_table(frame):
    columns = {"method": "method", "K": "K:.0f", "seeds": "seeds:.0f"}
    columns |= {"extra steps": "steps:.2f", "loss": "loss:.4f", "perplexity": "perplexity:.3f"}
    columns |= {"MFLOPs, 6N": "paper_flops:.2f", "keys a layer": "cache_entries:.2f"}
    columns |= {"training forwards": "training_forwards:.1f"}
    shown = frame.assign(frontier=frame["frontier"].map({1: "yes", 0: ""}))
    shown["paper_flops"] /= 1e6
    return tabulate(shown, columns | {"frontier": "frontier"})


@strict_dataclass
class Pareto(Comparison):
    """Perplexity against the mean executed extra steps of every method: table and figure."""

    taus: tuple[Share, ...] = ()  # stop the PonderLM-3 among them here, too; each makes a curve
    data: Given | None = None  # for this: the text that they were scored on, if that is no named corpus

    def draw(self):
        def rows(runs, device):
            return pareto_rows(runs + at_other_taus(runs, self.taus, device, self.data))

        frame = self.frame("pareto", pareto_table, rows)
        best = frame[frame.frontier == 1].sort_values(["steps", "perplexity"])
        low, high = best.perplexity.min(), best.perplexity.max()
        margin = 0.15 * (high - low) + 0.01
        far = bool((frame.perplexity > high + margin).any())
        labels = "executed extra steps per token (points: K)", "perplexity per token"
        figure, panels = new_figure(*labels, panels=1 + far)  # all; and what is near the frontier
        for axes in panels:
            draw_curves(axes, frame, frame.method, "steps", "perplexity")
            look = {"where": "post", "color": "#BBBBBB", "zorder": 0, "label": "frontier"}
            axes.step(best.steps, best.perplexity, **look)
        panels[-1].set_ylim(low - margin, high + margin)
        save_figure(figure, self.out / "pareto.png")
