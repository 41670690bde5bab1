"""Several runs side by side: methods and budgets compared, for analyze.py.

word        meaning
run         what a finished run directory holds (training/runs.py)
group       runs that differ in nothing but their seed
K           extra computations a token may take, of any method (baselines/)
steps       those it does take in decoding, hard-stopped at tau; mean over tokens
loss        nats per token on the validation windows, as it decodes: fixed point, hard-stopped
perplexity  exp(loss), per token: per byte for models of bytes
seeds       runs of a group; a spread is their standard deviation
R           refinements in training (the most, where they are drawn)
frontier    no other row is better in steps or perplexity and not worse in the other (means)
"""

import math
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from textwrap import fill

import pandas as pd

from analysis.tables import LINES, MARKERS, new_figure, save, save_figure, tabulate
from baselines import all_methods, configure, find
from baselines.cost import cost
from interop import load, read_config
from model import LlamaConfig, PonderConfig, strict_dataclass
from runtime import UserError, pick_device, progress
from training.config import TrainConfig, is_same, read_run, validation_windows
from training.runs import read_lines, read_results
from training.validation import evaluate, reported

# -- Runs and groups of them -----------------------------------------------------------------------

# Settings that change neither what is learned nor how it is scored; `group_runs` knows the seed.
IRRELEVANT = {"preset", "name", "out", "resume", "seed", "data", "tokenizer", "model", "log_every"}
IRRELEVANT |= {
    "eval_every",
    "device",
    "threads",
    "precision",
    "backend",
    "compile",
    "recompute",
    "method",
    "tau_cost",
}
BACKBONE = {field.name for field in fields(LlamaConfig)}


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
    def settings(self):
        """What could matter of the settings beside method and seed, {name: value}."""
        found = vars(self.config) | vars(self.config.model)
        if self.config.init_from:
            found["init_from"] = origin(self.config.init_from)
        left_out = IRRELEVANT if self.method.iterates else IRRELEVANT | {"R"}
        return {name: value for name, value in found.items() if name not in left_out}


@dataclass(frozen=True)
class Origin:
    """A run that another one began from. Those that differ in their seed alone are equal."""

    K: int
    method: str
    settings: dict

    def __str__(self):
        return f"K = {self.K} ({self.settings['steps']} steps)"


def origin(place):
    """What a run began from: an Origin, or where it is if that is no run (any more)."""
    try:
        path, config, corpus = read_run(place)
    except UserError:
        return place
    run = Run(path, config, config.model, corpus, {})
    return Origin(config.model.ponder_steps, config.model.method, run.settings)


def read_runs(directories):
    """The whole and finished ones among some runs; the others are named.

    Raises:
        UserError: there is none.
    """
    runs = []
    for path in map(Path, directories):
        if not (path / "results.json").is_file():
            print(f"left out, not a finished run: {path}")
            continue
        try:
            _, config, corpus = read_run(path)
            run = Run(path, config, read_config(path), corpus, read_results(path))
            if (K := run.shape.ponder_steps) < run.results["hard"]["steps"]:
                raise UserError(f"{path}/results.json: more steps than its {K}")
        except (UserError, OSError) as error:
            print(f"left out, damaged: {error}")
            continue
        runs.append(run)
    if not runs:
        raise UserError(
            "no whole and finished run among those given: name some, for instance --runs out/*, "
            "or train one: python train.py"
        )
    return runs


def brief(value, others):
    """A setting in few digits, if that tells it from the others; else with what does."""
    if isinstance(value, Origin):
        alike = [x for x in others if isinstance(x, Origin) and str(x) == str(value)]
        own = sorted(value.settings.items(), key=str)
        own = [f"{k} {v}" for k, v in own if any(x.settings.get(k) != v for x in alike)]
        return ", ".join([str(value), *own])
    if isinstance(value, list | tuple):  # as the flag has it
        return " ".join(str(x).removesuffix(".0") for x in value)
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.4g}"
    others = [other for other in others if isinstance(other, float) and other != value]
    return str(value) if short in [f"{other:.4g}" for other in others] else short


def group_runs(runs):
    """{(name, K): runs that differ in their seed alone}, names in the order of all_methods().

    The name says what is not at its default, of a method's own settings and of those in which its
    runs with the same K differ: 'PonderLM-3, penalty_weight 0'.

    Raises:
        UserError: the same settings and seed twice.
    """
    groups = {}
    for kind in all_methods():
        mine = [run for run in runs if run.shape.method == kind.method]
        mine.sort(key=lambda run: run.shape.ponder_steps)
        defaults = vars(TrainConfig()) | vars(configure(PonderConfig(), kind.method))
        own = {field.name for field in fields(kind.Config)} - BACKBONE
        named = own - {"method", "ponder_steps", "R"}
        for run, other in combinations(mine, 2):
            if run.shape.ponder_steps == other.shape.ponder_steps:
                named |= {k for k, v in run.settings.items() if v != other.settings[k]}
        for run in mine:
            name = kind.title
            for k in sorted(named):
                if run.settings[k] != defaults[k]:
                    name += f", {k} {brief(run.settings[k], [r.settings[k] for r in mine])}"
            group = groups.setdefault((name, run.shape.ponder_steps), {})
            if (other := group.setdefault(run.config.seed, run)) is not run:
                same = f"{other.path} and {run.path} are the same training"
                raise UserError(f"{same}: method, settings and seed; give one of them")
    return {key: list(group.values()) for key, group in groups.items()}


def check_comparable(runs, one_text=True):
    """Name what differs between the runs beside the method, which a comparison should not have.

    `one_text`: they have to be scored on the text that they come with.

    Raises:
        UserError: they are scored on different texts, or windows of them.
    """
    first, odd = runs[0], {}
    for run in runs:
        for what, differ in (
            ("corpora", one_text and not is_same(first.corpus, run.corpus)),
            ("windows", first.shape.block_size != run.shape.block_size),
            ("numbers of windows", first.config.eval_windows != run.config.eval_windows),
        ):
            if differ:
                raise UserError(f"{first.path} and {run.path} are scored on different {what}")
        of_method = vars(run.config.model).keys() - BACKBONE | {"tau"}
        for name in run.settings.keys() - of_method:
            if run.settings[name] != first.settings[name]:
                odd.setdefault(name, {str(first.settings[name])}).add(str(run.settings[name]))
    for name, values in sorted(odd.items()):
        print(f"note: the runs differ in {name}, too: {', '.join(sorted(values))}")


def over_seeds(runs, measure, by=(), one_text=True):
    """One row for each method and K: how many seeds, and mean and deviation of each number.

    Args:
        measure: a function of a run -> rows of numbers: dicts or a frame
        by: the keys that tell the rows of a run apart; without any, what the steps cost is added
        one_text: see check_comparable

    Returns:
        a frame of method, K, by, seeds, <number>, <number>_std, ..; one seed has no deviation: NaN.
    """
    check_comparable(runs, one_text)
    groups = group_runs(runs)
    found = [
        pd.DataFrame(measure(run)).assign(method=name, K=K)
        for (name, K), group in groups.items()
        for run in group
    ]
    grouped = pd.concat(found).groupby(["method", "K", *by], sort=False)
    frame = grouped.agg(["mean", "std"])
    frame.columns = [key + {"mean": "", "std": "_std"}[which] for key, which in frame.columns]
    frame.insert(0, "seeds", grouped.size())
    frame = frame.reset_index()
    if by:
        return frame
    shapes = [group[0].shape for group in groups.values()]
    costs = [vars(cost(shape, x)) for shape, x in zip(shapes, frame.steps, strict=True)]
    return frame.join(pd.DataFrame(costs))


@strict_dataclass
class Comparison:
    """The flags of analyze.py that all figures of several runs have."""

    runs: tuple[str, ...] = ()  # directories of trained runs
    out: Path = Path("out/analyze")  # where the results go
    redraw: bool = False  # from the numbers saved there, without runs

    def frame(self, name, table, rows):
        """The numbers of a figure: what `rows` makes of the runs, or as saved."""
        if self.redraw and self.runs:
            raise UserError("--redraw takes the saved numbers and --runs makes new ones; give one")
        rows = None if self.redraw else rows(read_runs(self.runs))
        return save(self.out, name, rows, table)[0]


# -- Curves ----------------------------------------------------------------------------------------


def method_of(name):
    """The method of a row: the one with the longest title that its name begins with.

    Raises:
        UserError: no title fits.
    """
    kinds = [kind for kind in all_methods() if name.startswith(kind.title)]
    if not kinds:
        raise UserError(f"no method has a title that {name!r} begins with; see baselines/")
    return max(kinds, key=lambda kind: len(kind.title))


def draw_curves(axes, frame, x, y):
    """One curve for each method of the rows, its points named by K, with the seeds' spread."""
    seen = []
    for name, curve in frame.groupby("method", sort=False):
        kind = method_of(name)
        variant = seen.count(kind)
        seen.append(kind)
        following = MARKERS[(MARKERS.find(kind.marker) + variant) % len(MARKERS)]
        spread = [curve.get(f"{axis}_std", pd.Series(0.0)).fillna(0) for axis in (x, y)]
        xerr, yerr = (deviations if deviations.any() else None for deviations in spread)
        axes.errorbar(
            curve[x], curve[y], xerr=xerr, yerr=yerr, label=fill(name, 90), color=kind.color,
            marker=following if variant else kind.marker, linestyle=LINES[variant % len(LINES)],
            linewidth=1.2, elinewidth=0.6, capsize=2, markersize=10, markerfacecolor="white",
        )  # fmt: skip
        place = {"fontsize": 7, "ha": "center", "va": "center_baseline", "clip_on": True}
        for at_x, at_y, K in zip(curve[x], curve[y], curve.K, strict=True):
            axes.text(at_x, at_y, f"{K:.0f}", color=kind.color, zorder=5, **place)


def compared(frame, columns):
    """The cells of a table of methods: name, K, seeds, and `columns`.

    Raises:
        UserError: a name that belongs to no method.
    """
    for name in frame.method.unique():
        method_of(name)
    start = {"method": "method", "K": "K:.0f", "seeds": "seeds:.0f"}
    return tabulate(frame, start | columns)


# -- Perplexity against executed steps (section 4.1) -----------------------------------------------


def on_frontier(points):
    """For each (steps, perplexity): does no other have less of one and not more of the other?"""
    better = lambda a, b: a[0] <= b[0] and a[1] <= b[1] and a != b  # noqa: E731
    return [not any(better(other, point) for other in points) for point in points]


def at_other_taus(runs, taus, device):
    """The runs with a router, hard-stopped at each of `taus` instead of at the one they have."""
    found, mine = [], [run for run in runs if run.method.has_router]
    pairs = [(run, tau) for run in mine for tau in dict.fromkeys(taus) if tau != run.config.tau]
    for run, tau in progress(pairs, desc="other tau", disable=not pairs or None):
        _, _, val = validation_windows(run.path)
        count = reported(run.config, val)
        hard = evaluate(load(run.path).to(device), val, count, device, tau=tau)
        config = replace(run.config, tau=tau)
        found.append(replace(run, config=config, results={"hard": hard}))
    return found


def pareto_rows(runs):
    """One row for each method and K: seeds, executed steps, loss, perplexity, and what it costs."""

    def numbers(run):
        steps, loss = (run.results["hard"][key] for key in ("steps", "loss"))
        return [{"steps": steps, "loss": loss, "perplexity": math.exp(loss)}]

    frame = over_seeds(runs, numbers)
    best = on_frontier(list(zip(frame.steps, frame.perplexity, strict=True)))
    return frame.assign(frontier=[int(b) for b in best])


def pareto_table(frame):
    if not frame.frontier.any():
        raise ValueError("no row is on the frontier")
    columns = {"extra steps": "steps:.2f", "loss": "loss:.4f", "perplexity": "perplexity:.3f"}
    columns |= {"MFLOPs, 6N": "paper_flops:.2f", "MFLOPs, 2N": "forward_flops:.2f"}
    columns |= {"keys a layer": "cache_entries:.2f", "training forwards": "training_forwards:.1f"}
    shown = frame.assign(frontier=frame.frontier.map({1: "yes", 0: ""}))
    shown[["paper_flops", "forward_flops"]] /= 1e6
    return compared(shown, columns | {"frontier": "frontier"})


def draw_pareto(study):
    def rows(runs):
        return pareto_rows(runs + at_other_taus(runs, study.taus, pick_device(study.device)))

    frame = study.frame("pareto", pareto_table, rows)
    best = frame[frame.frontier == 1].sort_values(["steps", "perplexity"])
    low, high = best.perplexity.min(), best.perplexity.max()
    margin = 0.15 * (high - low) + 0.01
    far = bool((frame.perplexity > high + margin).any())
    labels = "executed extra steps per token (points: K)", "perplexity per token"
    figure, panels = new_figure(*labels, panels=1 + far)  # all; and what is near the frontier
    for axes in panels:
        draw_curves(axes, frame, "steps", "perplexity")
        look = {"where": "post", "color": "#BBBBBB", "zorder": 0, "label": "frontier"}
        axes.step(best.steps, best.perplexity, **look)
    panels[-1].set_ylim(low - margin, high + margin)
    look = {"loc": "outside lower center", "ncols": 2 * len(panels), "handlelength": 5}
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, **look)
    save_figure(figure, study.out / "pareto.png")


# -- What is lost by stopping (section 3.3) --------------------------------------------------------


def losses_rows(runs):
    """One row for each method and K, over the seeds: its losses, and differences between them.

    loss: at the fixed point, all steps run. hard: stopped at tau. gap: loss less that at R, the
    number of refinements in training. permuted: what it costs, stopped, to give each token the
    step distribution of another one.
    """

    def numbers(run):
        keys = ("fixed", "hard", "trained", "permuted")
        fixed, hard, trained, permuted = (run.results[key]["loss"] for key in keys)
        row = {"R": run.results["R"], "steps": run.results["hard"]["steps"], "loss": fixed}
        return [row | {"hard": hard, "gap": fixed - trained, "permuted": permuted - hard}]

    return over_seeds(runs, numbers).drop(columns="R_std")


def write_losses(study):
    columns = {"method": "method", "K": "K:.0f", "R": "R:.0f", "seeds": "seeds:.0f"}
    columns |= {"loss, all steps": "loss:.4f", "hard-stopped": "hard:.4f"}
    columns |= {"extra steps": "steps:.2f", "gap to R": "gap:.4f", "s permuted, +": "permuted:.3f"}
    columns |= {"training forwards": "training_forwards:.1f"}
    study.frame("losses", columns, losses_rows)
    print(f"written: {study.out / 'losses'}.csv, .md")


# -- Settings chosen by text that is not reported --------------------------------------------------


def choice_rows(runs, windows, device):
    """One row for each setting and K: its loss with all steps, on windows behind the reported ones.

    Raises:
        UserError: a run has no window beside those that are reported.
    """

    def numbers(run):
        _, _, val = validation_windows(run.path)
        first = reported(run.config, val)
        count = min(windows, val.count - first)
        if count < 1:
            raise UserError(f"{run.path}: all of its {first} windows are reported; give more text")
        scores = evaluate(load(run.path).to(device), val, count, device, first=first)
        left.update()
        return [{"windows": count, "loss": scores["loss"]}]

    with progress(total=len(runs), desc="runs") as left:
        return over_seeds(runs, numbers, by=["windows"])


def write_choice(study):
    def rows(runs):
        return choice_rows(runs, study.windows, pick_device(study.device))

    columns = {"windows": "windows:.0f", "loss, held apart": "loss:.4f"}
    study.frame("choice", lambda frame: compared(frame, columns), rows)
    print(f"written: {study.out / 'choice'}.csv, .md")


# -- Loss against the step budget (section 4.4) ----------------------------------------------------


def training_loss(run):
    """Mean logged training cross-entropy of the last tenth of the steps, in nats."""
    log = pd.DataFrame(read_lines(run.path / "log.jsonl"), columns=["step", "ce"])
    last = log.ce[log.step > 0.9 * run.config.steps].dropna()
    if last.empty:
        raise UserError(f"{run.path}/log.jsonl has no line of the last tenth of the steps")
    return last.mean()


def depth_rows(runs):
    """One row for each K of PonderLM-3 and its ablations, over the seeds.

    Raises:
        UserError: no run has a learned router.
    """

    def numbers(run):
        steps, loss = (run.results["hard"][key] for key in ("steps", "loss"))
        return [{"training_loss": training_loss(run), "loss": loss, "steps": steps}]

    runs = [run for run in runs if run.method.has_router]
    if not runs:
        raise UserError("none of the runs is a PonderLM-3; train one: python train.py")
    return over_seeds(runs, numbers)


def depth_table(frame):
    columns = {"training loss": "training_loss:.3f", "validation loss": "loss:.4f"}
    columns |= {"extra steps": "steps:.2f", "training forwards": "training_forwards:.1f"}
    return compared(frame, columns)


def draw_depth(study):
    frame = study.frame("depth", depth_table, depth_rows)
    figure, (axes,) = new_figure("K, the step budget", "validation loss, nats per token")
    draw_curves(axes, frame, "K", "loss")
    axes.set_xticks(sorted(frame.K.unique()))
    axes.xaxis.set_major_formatter("{x:.0f}")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    save_figure(figure, study.out / "depth.png")
