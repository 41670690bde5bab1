"""Several runs side by side: a row for each, differences by pairs of seeds, curves over steps or slots.

column       meaning
method       of a run, with those of its settings in which the runs of its method and K differ
K            extra computations a token may take, of any method (methods/); where a method lowers it, at first
seed         of its weights and batches: runs with the same one are a pair
tau          where pondering stops
steps, loss  as it decodes, hard-stopped at tau: extra computations a token, nats a token, means over the
             validation windows that results.json is about
trained      loss with soft masks and the R of the training; fixed: at the fixed point
choose       loss at tau on other windows, by which one chooses; choose_steps: steps there
entropy      of the executed steps over tokens, in nats: 0 where all take as many
swapped      loss at tau where each token has s and w of one of another window (--swap)
read         text: tokens that training read, in millions, again and again where the corpus is shorter
slots        that ran forward in training, in millions: training_forwards of the method times `read`
minutes      that training took, at the speed of its end
machine      CPU or GPU of its training, threads and version of torch; precision: of its training
text         hash of its corpus: of the tokens to train on and to validate with, and of the tokenizer

difference   a run's loss minus that of its partner, a run of the reference with the same seed, machine,
             precision and text, after as many steps (between two K of the reference on the line between
             its losses): below 0 the run is better
pairs        how many runs have a partner
interval     half the width of the 95 % interval of their mean (Student's t over the pairs)
unpaired     the mean over all runs minus that of all runs of the reference, at as many steps, and half the
             width of its 95 % interval (Welch's t)
"""

import hashlib
import json
from contextlib import nullcontext
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import Field

from common import UserError, read_json, user_error_if_unreadable
from hardware import pick_device
from lab.common import NonEmpty, progress
from lab.evaluation.texts import validation_windows
from lab.figures.subject import open_subject, rerouted
from lab.figures.tables import COLORS, LINES, MARKERS, new_figure, save, save_figure, tabulate
from lab.interop.weights import load, read_config
from lab.intervals import interval, unpaired
from lab.methods import PonderConfig, all_methods, configure, find
from lab.train import read_run
from model import Fraction, validated_dataclass
from train import TrainConfig, evaluate

# No part of a recipe: names, method, K and seed, and what changes speed alone.
LEFT_OUT = {"preset", "name", "out", "resume", "data", "tokenizer", "method", "seed", "ponder_steps"}
LEFT_OUT |= {"log_every", "eval_every", "device", "attention", "compile", "recompute", "micro_batch_size"}
ORIGIN = ["machine", "precision", "text"]  # columns in which two runs of a pair agree, beside the seed


@dataclass
class Run:
    path: Path
    config: TrainConfig
    begun: PonderConfig  # the model's settings as the training began, of which a method may change some
    shape: PonderConfig  # of the trained model
    corpus: dict
    results: dict

    @property
    def method(self):
        """Its class."""
        return find(self.shape.method)

    @property
    def recipe(self):
        """What could matter of its settings; of what it began from, whether it began from anything."""
        found = vars(self.config) | vars(self.shape)
        found["init_from"] = found.get("init_from") is not None
        left_out = LEFT_OUT if self.method.iterates else LEFT_OUT | {"refinements"}
        return {name: value for name, value in found.items() if name not in left_out}

    @property
    def scored(self):
        """How many windows it was scored on."""
        return self.results.get("windows", self.config.eval_windows)

    @property
    def speed(self):
        """Tokens a second, at the end of its training. UserError: its log is missing or damaged."""
        with user_error_if_unreadable(file := self.path / "log.jsonl"):
            return pd.read_json(file, lines=True)["tokens_per_second"].dropna().iloc[-1]

    @property
    def origin(self):
        """Where and on what it was trained: the columns ORIGIN, None what an older run did not record. A run
        that was resumed elsewhere has several machines or precisions.

        Raises:
            UserError: its log is missing or damaged.
        """
        machines, precisions = [], []
        file = self.path / "log.jsonl"
        with user_error_if_unreadable(file):
            for line in file.read_text("utf-8").splitlines():
                row = json.loads(line)
                if "machine" in row:
                    threads = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
                    machines.append(f"{row['machine']}, {threads}, torch {row['torch']}")
                    precisions.append(row["precision"])
        known = {key: value for key, value in self.corpus.items() if key != "name"}
        text = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        return {
            "machine": "; ".join(dict.fromkeys(machines)) or None,
            "precision": "; ".join(dict.fromkeys(precisions)) or None,
            "text": text[:12],
        }

    def title(self, among):
        """The title of its method and those settings `among` its recipe that are not at their defaults:
        'PonderLM-3, step_price 0.03'."""

        def readable(value):
            if isinstance(value, tuple):  # as the flag has it
                return " ".join(map(readable, value))
            return f"{value:g}" if isinstance(value, float) else str(value)

        recipe, model = self.recipe, configure(PonderConfig(), self.shape.method)
        defaults = vars(TrainConfig()) | vars(model) | {"init_from": False}
        own = [name for name in sorted(among) if recipe[name] != defaults[name]]
        return ", ".join([self.method.title, *(f"{name} {readable(recipe[name])}" for name in own)])


def read_runs(directories):
    """The finished ones among some runs; the others are named.

    Raises:
        UserError: there is none, a damaged one, or the same training twice.
    """
    runs = []
    for path in map(Path, directories):
        if not (path / "results.json").is_file():
            print(f"left out, not a finished run: {path}")
            continue
        config, begun, corpus = read_run(path)
        results = read_json(path / "results.json")
        with user_error_if_unreadable(path / "results.json"):
            if not all(float(results[way]["loss"]) >= 0 for way in ("trained", "fixed", "hard")):
                raise ValueError("a loss below 0")
        runs.append(Run(path, config, begun, read_config(path), corpus, results))
    if not runs:
        raise UserError(
            "no finished run among those given: name some, for instance --runs out/*, "
            "or train one: python train.py"
        )
    for a, b in combinations(runs, 2):
        pairs = [(r.shape.method, r.begun.ponder_steps, r.config.seed, r.recipe, r.origin) for r in (a, b)]
        if pairs[0] == pairs[1]:
            raise UserError(f"{a.path} and {b.path} are the same training: give one of them")
    return runs


def named(runs):
    """{name: its runs}, in the order of all_methods() and by rising K. Beside the method a name says what is
    not at its default, of the method's own settings and of those in which its runs with the same K differ."""
    groups = {}
    for kind in all_methods():
        of_kind = sorted((r for r in runs if r.method is kind), key=lambda run: run.begun.ponder_steps)
        among = {field.name for field in fields(kind.Config)} - {field.name for field in fields(PonderConfig)}
        for a, b in combinations(of_kind, 2):
            if a.begun.ponder_steps == b.begun.ponder_steps:
                among |= {name for name, value in a.recipe.items() if value != b.recipe[name]}
        for run in of_kind:
            groups.setdefault(run.title(among), []).append(run)
    return groups


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
            ("numbers of windows", first.scored != run.scored),
        ):
            if differ:
                raise UserError(f"{first.path} and {run.path} are scored on different {what}")
    for name in ("steps", "batch_size", "learning_rate"):
        if len(values := {getattr(run.config, name) for run in runs}) > 1:
            print(f"note: the runs differ in {name}, too: {', '.join(map(str, sorted(values)))}")


def by_run(runs, measure, one_text=True):
    """What `measure` finds of each run, rows of numbers, behind its method, K and seed."""
    check_comparable(runs, one_text)
    found = []
    for name, group in named(runs).items():
        for run in progress(group, desc=name, leave=False):
            who = {"method": name, "K": run.begun.ponder_steps, "seed": run.config.seed}
            rows = pd.DataFrame(measure(run)).reset_index(drop=True)
            found.append(pd.DataFrame(who, index=rows.index).join(rows).assign(**run.origin))
    return pd.concat(found, ignore_index=True)


def needs_router(run):
    """UserError: a run of a method without a PonderLM-3's."""
    if not run.method.priced:
        raise UserError(f"{run.path} is of method {run.shape.method}: it has no router as PonderLM-3 has")


def over_seeds(frame, by=()):
    """by_run's rows -> one for each method, K and `by`: how many seeds, mean and deviation of each number,
    and the machines, precisions and texts of its runs. One seed has no deviation: NaN."""
    keys = ["method", "K", *by]
    origin = [name for name in ORIGIN if name in frame]
    numbers = frame.drop(columns=["seed", *origin]).groupby(keys, sort=False, dropna=False)
    means = numbers.agg(["mean", "std"])
    means.columns = [key + {"mean": "", "std": "_std"}[which] for key, which in means.columns]
    means.insert(0, "seeds", numbers.size())
    grouped = frame.groupby(keys, sort=False, dropna=False)
    for name in origin:
        means[name] = grouped[name].agg(lambda values: "; ".join(values.dropna().unique()) or None)
    return means.reset_index()


ABOUT = {"method": "method", "K": "K", "seeds": "seeds"}  # columns of most tables


@validated_dataclass
class Comparison:
    """The flags that all figures of several runs have, and how such a figure comes about.

    One of them says what it `measure`s of a run, rows of numbers, and what it draws into its sheet.
    """

    # directories of trained runs; or one CSV that this figure kept, to draw it again: flags that say what is
    # measured do nothing then
    runs: tuple[str, ...] = ()
    data: NonEmpty | None = None  # the text that they were scored on, if that is no named corpus
    out: Path = Path("out/analyze")  # where the results go
    device: str = "auto"  # auto, cpu, cuda or mps

    tau = None  # or a flag
    other = False  # may `data` be another text in the same tokens?
    by, columns = [], {}  # what tells the rows of a run apart; of the table
    keeps_means = False  # does the file have means over the seeds, or each run?
    sheet = None  # labels of x and y in its picture, how many panels; None: a table alone

    def subject(self, run, windows):
        """A run's model on its device, with windows of the text."""
        device = pick_device(self.device)
        return open_subject(run.path, windows, self.tau, device, self.data, self.other)

    def frame(self, runs):
        """The numbers of a figure, which its file keeps."""
        found = by_run(runs, self.measure, one_text=not (self.other and self.data))
        return over_seeds(found, self.by) if self.keeps_means else found

    def table(self, frame):
        """The cells of its table."""
        return tabulate(frame if self.keeps_means else over_seeds(frame, self.by), self.columns)

    def draw(self):
        name, kept = type(self).__name__.lower(), ".csv" in {Path(run).suffix for run in self.runs}
        if kept and len(self.runs) > 1:
            raise UserError(f"--runs {' '.join(self.runs)}: give directories of runs, or one CSV")
        with user_error_if_unreadable(self.runs[0]) if kept else nullcontext():
            frame = pd.read_csv(*self.runs) if kept else self.frame(read_runs(self.runs))
            cells = self.table(frame)
        save(self.out, name, frame, cells)
        if self.sheet:
            figure, panels = new_figure(*self.sheet)
            self.picture(frame, *panels)
            save_figure(figure, self.out / f"{name}.png")


# -- Losses, steps and costs -----------------------------------------------------------------------


def losses(run, taus, windows, device, data=None, swap=False):
    """Rows of a run, one for each tau where that matters: the columns above."""
    first, val, model = run.scored, None, None
    if windows or swap or any(tau != run.config.tau for tau in taus):
        (_, _, val), model = validation_windows(run.path, data), load(run.path).to(device)
        first = min(first, val.count)  # of a run that does not say
        if val.count < first + windows:
            raise UserError(
                f"--choose {windows}: {run.path} has {val.count} windows, of which {first} are reported"
            )
    text = run.config.steps * run.config.batch_size * run.shape.block_size / 1e6
    shared = {"trained": run.results["trained"]["loss"], "fixed": run.results["fixed"]["loss"], "read": text}
    shared |= {"minutes": text * 1e6 / run.speed / 60}
    for tau in taus if taus and run.method.has_router else [run.config.tau]:
        hard = run.results["hard"]
        if tau != run.config.tau:
            hard = evaluate(model, val, first, tau=tau)
        stopped = torch.tensor(hard["stopped"])
        row = {"tau": tau, "steps": hard["steps"], "loss": hard["loss"]}
        row["entropy"] = torch.special.entr(stopped).sum().item()
        row["slots"] = run.method.training_forwards(run.begun, hard["steps"], run.config.steps) * text
        if windows:
            other = evaluate(model, val, windows, tau=tau, first=first)
            row |= {"choose": other["loss"], "choose_steps": other["steps"]}
        if swap and run.method.priced:
            with rerouted(model, of_another_window):
                row["swapped"] = evaluate(model, val, first, tau=tau)["loss"]
        yield shared | row


def of_another_window(s, log_w):
    """s and log_w (B, T, S) of the tokens at the same places in the window before."""
    if len(s) < 2:
        raise UserError("--swap takes s of another window: windows are too long to read two at once")
    return s.roll(1, dims=0), log_w.roll(1, dims=0)


def differences(frame, reference):
    """To the runs of by_run's frame whose method is `reference`, at equal steps: the column difference; NaN
    where the reference of the seed has no run with so few, or so many, steps, or only one that was trained
    elsewhere: how many of these there are is said.

    Raises:
        UserError: there is no such run.
    """
    chosen = frame[frame.method == reference]
    if chosen.empty:
        raise UserError(f"--against {reference!r} is none of {', '.join(map(repr, frame.method.unique()))}")
    found, left_out = [], 0
    for _, row in frame.iterrows():
        of_seed = chosen[chosen.seed == row.seed]
        curve = of_seed[same_origin(of_seed, row)]
        difference = row.loss - loss_at(row.steps, curve)
        left_out += np.isnan(difference) and not np.isnan(loss_at(row.steps, of_seed))
        found.append(difference)
    if left_out:
        print(f"note: {left_out} pairs are left out, of runs that differ in {', '.join(ORIGIN)}")
    return frame.assign(difference=found)


def same_origin(frame, row):
    """Which runs of a frame agree with that of a row in the columns ORIGIN. What neither says does not tell
    them apart: CSVs of before 2026-11-28 have no such columns."""
    agree = pd.Series(True, index=frame.index)
    for name in ORIGIN:
        if name in frame:
            agree &= (frame[name] == row[name]) | (frame[name].isna() & pd.isna(row[name]))
    return agree


def loss_at(steps, curve):
    """The loss at a number of steps on the line between a seed's runs; NaN beyond them."""
    curve = curve.sort_values("steps")
    if curve.empty or not curve.steps.min() - 0.05 <= steps <= curve.steps.max() + 0.05:
        return np.nan
    return np.interp(steps, curve.steps, curve.loss)


def unpaired_difference(group, chosen):
    """The mean loss of a group of runs minus that of the reference's, at the group's mean steps, and half the
    width of its interval; NaN where no run of the reference takes so many steps."""
    curves = chosen.groupby(["seed", *(name for name in ORIGIN if name in chosen)], dropna=False)
    steps = group.steps.mean()
    losses = [loss_at(steps, curve) for _, curve in curves]
    losses = [loss for loss in losses if not np.isnan(loss)]
    return unpaired(group.loss, losses) if losses else (np.nan, np.nan)


def comparison_table(frame, against=None):
    """The cells of a table: a row for each method, K and tau."""
    frame = differences(frame, against) if against else frame
    means = over_seeds(frame, ["tau"])
    means = means.drop(columns=["choose_std", "swapped_std", "slots_std", "minutes_std"], errors="ignore")
    columns = {"method": "method", "K": "K", "tau": "tau:g", "seeds": "seeds", "extra steps": "steps:.2f"}
    columns |= {"loss": "loss:.4f"} | ({"swapped": "swapped:.4f"} if "swapped" in means else {})
    columns |= {"to choose by": "choose:.4f"} if "choose" in means else {}
    columns |= {"slots, M": "slots:.1f", "minutes": "minutes:.1f"}
    if against:
        groups = [group for _, group in frame.groupby(["method", "K", "tau"], sort=False, dropna=False)]
        means["pairs"] = [group.difference.notna().sum() for group in groups]
        pairs = zip(means.difference_std, means.pairs, strict=True)
        means["difference_std"] = [interval(*pair) for pair in pairs]
        chosen = frame[frame.method == against]
        found = [unpaired_difference(group, chosen) for group in groups]
        means["unpaired"] = [difference for difference, _ in found]
        means["unpaired_std"] = [half for _, half in found]
        columns |= {"unpaired, 95 %": "unpaired:+.4f", "pairs": "pairs"}
        columns[f"to {against}, 95 %"] = "difference:+.4f"
    return tabulate(means, columns)


@validated_dataclass
class Compare(Comparison):
    """Losses of methods over executed steps, or over what training took, by pairs of seeds."""

    taus: tuple[Fraction, ...] = ()  # stop those with a router here, too
    swap: bool = False  # also the loss where tokens have the steps of others
    choose: Annotated[int, Field(ge=0)] = 0  # windows behind those that are reported, by which to choose
    against: NonEmpty | None = None  # the method, as the table names it, that others are compared with
    over: Literal["steps", "slots", "read", "minutes", "tau"] = "steps"  # x axis; over tau, y has the steps

    def frame(self, runs):
        taus, device = {run.config.tau for run in runs} | {*self.taus}, pick_device(self.device)
        how = dict(windows=self.choose, device=device, data=self.data, swap=self.swap)
        return by_run(runs, lambda run: losses(run, sorted(taus), **how))

    def table(self, frame):
        return comparison_table(frame, self.against)

    @property
    def sheet(self):
        labels = {"steps": "executed extra steps per token (points: K)", "minutes": "minutes of training"}
        labels |= {"slots": "slots that ran in training, millions", "read": "text read, millions of tokens"}
        y = labels["steps"] if self.over == "tau" else "loss, nats per token"
        return labels.get(self.over, "tau"), y

    def picture(self, frame, axes):
        axes.set_xscale("log" if self.over == "tau" else "linear")
        y = "steps" if self.over == "tau" else "loss"
        draw_curves(axes, over_seeds(frame, ["tau"]).sort_values("tau"), "method", self.over, y)


def draw_curves(axes, frame, names, x, y, label="K"):
    """One curve for each name in column `names`, its points named by `label`, with the spread of seeds."""
    for i, (name, curve) in enumerate(frame.groupby(names, sort=False)):
        color = COLORS[i % len(COLORS)]
        axes.errorbar(
            curve[x], curve[y], xerr=curve.get(f"{x}_std"), yerr=curve.get(f"{y}_std"), label=name,
            color=color, marker=MARKERS[i % len(MARKERS)], linestyle=LINES[i % len(LINES)],
            linewidth=1.2, elinewidth=0.6, capsize=2, markersize=10, markerfacecolor="white",
        )  # fmt: skip
        place = {"fontsize": 7, "ha": "center", "va": "center_baseline", "clip_on": True}
        for at_x, at_y, n in zip(curve[x], curve[y], curve[label], strict=True):
            axes.text(at_x, at_y, f"{n:.0f}", color=color, zorder=5, **place)
