"""Several runs side by side: a row for each, differences by pairs of seeds, curves over steps or costs.

column       meaning
method       name of a run: its method, and settings that tell it from other runs (runs.py)
K            most extra computations a token may take, at the start of training
seed         of the weights and batches: runs with the same seed make a pair
tau          where pondering stops
steps, loss  as the model decodes, hard-stopped at tau: extra computations per token, and nats per token. Both
             are means over the validation windows that results.json reports
trained      loss with soft masks and the R of the training
fixed        loss with soft masks at the fixed point
choose       loss at tau on other windows, to choose a method or tau by; choose_steps: the steps there
entropy      of the distribution of executed steps over the tokens, in nats: 0 if all tokens take as many
swapped      loss at tau if each token is given the s and w of the token at the same place in another window
read         tokens that training read, in millions; a token counts each time that it is read
slots        slots that ran forward in training, in millions: training_forwards of the method times `read`
minutes      that training took, at the speed of its end
machine      CPU or GPU of its training, threads, and version of torch
precision    of its training
text         hash of its corpus: training text, validation text, and tokenizer

A run may be compared with a reference, the method of --against. The reference rarely took exactly as many
steps as the run. So the loss of the reference is interpolated linearly between its K.

difference   a run's loss minus that of its partner, a run of the reference with the same seed, machine,
             precision and text: below 0 the run is better
pairs        how many runs have a partner
interval     half the width of the 95 % interval of the mean difference (Student's t over the pairs)
unpaired     the mean loss over all runs minus that over all runs of the reference, and half the width of its
             95 % interval (Welch's t)
"""

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import Field

from common import UserError, user_error_if_unreadable
from hardware import eval_batch_size, pick_device
from lab.common import NonEmpty, progress
from lab.evaluation.texts import validation_windows
from lab.figures.runs import ORIGIN, check_comparable, named, read_runs
from lab.figures.subject import open_subject, rerouted
from lab.figures.tables import look_of, new_figure, save, save_figure, tabulate
from lab.interop.weights import load
from lab.intervals import interval, unpaired
from model import Fraction, validated_dataclass
from train import evaluate

ABOUT = {"method": "method", "K": "K", "seeds": "seeds"}  # the first columns of most tables


# -- A figure of several runs ----------------------------------------------------------------------


@validated_dataclass
class Comparison:
    """A figure of several runs: the flags that all such figures have, and how they come about.

    A subclass defines measure(run), which returns the rows of numbers of one run. Unless it is a table alone,
    it also has a `sheet`, and defines picture(frame, *axes), which draws the rows of all runs.
    """

    # directories of trained runs; or the CSV that an earlier call wrote, to redraw it (flags that change what
    # is measured are then ignored)
    runs: tuple[str, ...]
    # the text that the runs were trained on, needed unless that was pydocs or pysource
    data: NonEmpty | None = None
    out: Path = Path("out/analyze")  # folder for the results
    device: str = "auto"  # cpu, cuda or mps; auto is a GPU if there is one, else the CPU

    tau = None  # where models stop, see open_subject; some figures have a flag in its place
    other = False  # whether --data may be another text in the same tokens, see OnAnyText
    by = []  # columns that tell the rows of one run apart
    columns = {}  # of the table, see tables.py
    keeps = ["method", "K"]  # columns that its CSV has beside those of `by` and `columns`
    keeps_means = False  # whether the CSV has means over the seeds; otherwise it has the rows of each run
    sheet = None  # of the picture, the arguments of new_figure; None: the figure is a table alone

    def subject(self, run, windows):
        """A run's model on its device, with windows of the text."""
        device = pick_device(self.device)
        return open_subject(run.path, windows, self.tau, device, self.data, self.other)

    def frame(self, runs):
        """The numbers of the figure, which its CSV keeps."""
        one_text = not (self.other and self.data)
        frame = by_run(runs, self.measure, one_text)
        if self.keeps_means:
            return over_seeds(frame, self.by)
        return frame

    def table(self, frame):
        """The cells of its table."""
        means = frame if self.keeps_means else over_seeds(frame, self.by)
        return tabulate(means, self.columns)

    def draw(self):
        """Write the numbers, the table and the picture."""
        if any(Path(run).suffix == ".csv" for run in self.runs):
            frame, cells = self.read_csv()
        else:
            frame = self.frame(read_runs(self.runs))
            cells = self.table(frame)
        name = type(self).__name__.lower()
        save(self.out, name, frame, cells)
        if self.sheet:
            figure, panels = new_figure(*self.sheet)
            self.picture(frame, *panels)
            save_figure(figure, self.out / f"{name}.png")

    def read_csv(self):
        """The numbers that an earlier call wrote, and the cells of their table.

        Raises:
            UserError: there are other arguments beside the CSV, or it lacks columns of this figure.
        """
        if len(self.runs) > 1:
            raise UserError("--runs mixes a CSV with other arguments: give directories of runs, or one CSV")
        (file,) = self.runs
        with user_error_if_unreadable(file):
            frame = pd.read_csv(file)
        needed = [*self.keeps, *self.by, *(column.partition(":")[0] for column in self.columns.values())]
        if not self.keeps_means:
            needed = ["seed", *(name for name in needed if name != "seeds")]
        missing = [name for name in dict.fromkeys(needed) if name not in frame]
        if missing:
            figure = type(self).__name__.lower()
            raise UserError(
                f"{file} is not a CSV of the figure {figure}, since it has no column {', '.join(missing)}: "
                f"give a {figure}.csv, or directories of runs"
            )
        repeated = frame.duplicated()
        if repeated.any():
            line = frame.index[repeated][0] + 2
            raise UserError(
                f"line {line} of {file} repeats an earlier line, and would count as another seed: remove it"
            )
        with user_error_if_unreadable(file):
            return frame, self.table(frame)


@validated_dataclass
class OnAnyText(Comparison):
    """A figure that also measures runs on a text that they were not trained on."""

    # the text to measure on: that of the runs, or any text that is tokenized in the same way; needed unless
    # the runs were trained on pydocs or pysource
    data: NonEmpty | None = None
    other = True


def by_run(runs, measure, one_text=True):
    """Measure runs.

    Args:
        runs: of read_runs.
        measure: a function that returns rows of numbers of one run.
        one_text: as check_comparable.

    Returns:
        A frame of all rows: first the method, K and seed of the run, then what was measured, then ORIGIN.
    """
    check_comparable(runs, one_text)
    found = []
    for name, group in named(runs).items():
        for run in progress(group, desc=name, leave=False):
            rows = pd.DataFrame(measure(run)).reset_index(drop=True)
            about = pd.DataFrame({"method": name, "K": run.K, "seed": run.config.seed}, index=rows.index)
            found.append(about.join(rows).assign(**run.origin))
    return pd.concat(found, ignore_index=True)


def over_seeds(frame, by=()):
    """Means over the seeds.

    Args:
        frame: of by_run.
        by: columns that tell the rows of one run apart.

    Returns:
        A frame with a row for each method, K and `by`: how many seeds it has; the mean and the standard
        deviation (<key>_std, NaN for one seed) of each number; and the machines, precisions and texts of its
        runs.
    """
    keys = ["method", "K", *by]
    origin = [name for name in ORIGIN if name in frame]
    groups = frame.groupby(keys, sort=False, dropna=False)
    numbers = frame.drop(columns=["seed", *origin]).groupby(keys, sort=False, dropna=False)
    means = numbers.agg(["mean", "std"])
    means.columns = [key if statistic == "mean" else f"{key}_std" for key, statistic in means.columns]
    means.insert(0, "seeds", numbers.size())
    for name in origin:
        means[name] = groups[name].agg(different_ones)
    return means.reset_index()


def different_ones(values):
    """The different texts of a column, as one text; None if there are none."""
    return "; ".join(values.dropna().unique()) or None


def draw_curves(axes, frame, names, x, y, label="K"):
    """Draw a curve for each name.

    Args:
        axes: where to draw.
        frame: of over_seeds. Where a column has a standard deviation, it is drawn as an error bar.
        names: the column with the names of the curves.
        x, y: columns.
        label: the column of the numbers that stand at the points.
    """
    text = {"fontsize": 7, "ha": "center", "va": "center_baseline", "clip_on": True, "zorder": 5}
    for i, (name, curve) in enumerate(frame.groupby(names, sort=False)):
        look = look_of(i)
        axes.errorbar(
            curve[x], curve[y], xerr=curve.get(f"{x}_std"), yerr=curve.get(f"{y}_std"), label=name, **look,
            linewidth=1.2, elinewidth=0.6, capsize=2, markersize=10, markerfacecolor="white",
        )  # fmt: skip
        for at_x, at_y, number in zip(curve[x], curve[y], curve[label], strict=True):
            axes.text(at_x, at_y, f"{number:.0f}", color=look["color"], **text)


# -- Losses, steps and costs of a run --------------------------------------------------------------


def losses(run, taus, choose, device, data=None, swap=False):
    """Measure a run.

    Args:
        run: of read_runs.
        taus: where to stop. A method without a router has one row, whatever they are.
        choose: how many further windows to score, after those that are reported; 0: none.
        device: of the model.
        data: the text, as texts.validation_corpus.
        swap: whether to measure the column `swapped`.

    Yields:
        The row of each tau, with the columns at the head of this file.
    """
    model = None
    val = None
    reported = run.scored
    if choose or swap or any(tau != run.config.tau for tau in taus):  # results.json does not say it
        _, _, val = validation_windows(run.path, data)
        model = load(run.path).to(device)
        reported = min(reported, val.count)  # older runs did not record how many windows there were
        check_windows_to_choose_by(run, val.count, reported, choose)

    millions_read = run.config.steps * run.config.batch_size * run.model_config.block_size / 1e6
    of_run = {
        "trained": run.results["trained"]["loss"],
        "fixed": run.results["fixed"]["loss"],
        "read": millions_read,
        "minutes": millions_read * 1e6 / run.speed / 60,
    }
    if not (taus and run.method.has_router):
        taus = [run.config.tau]
    for tau in taus:
        hard = run.results["hard"]
        if tau != run.config.tau:
            hard = evaluate(model, val, reported, tau=tau)
        stopped = torch.tensor(hard["stopped"])  # the fraction of tokens that take 0, 1, .. steps
        forwards = run.method.training_forwards(run.initial_model_config, hard["steps"], run.config.steps)
        row = {
            "tau": tau,
            "steps": hard["steps"],
            "loss": hard["loss"],
            "entropy": torch.special.entr(stopped).sum().item(),
            "slots": forwards * millions_read,
        }
        if choose:
            further = evaluate(model, val, choose, tau=tau, first=reported)
            row["choose"] = further["loss"]
            row["choose_steps"] = further["steps"]
        if swap and run.method.priced:
            size = eval_batch_size(val.block_size, model.config.vocab_size, device)
            is_left_alone = size > 1 and reported % size == 1  # the last window, in a batch of its own
            with rerouted(model, of_another_window):
                row["swapped"] = evaluate(model, val, reported - is_left_alone, tau=tau)["loss"]
        yield of_run | row


def check_windows_to_choose_by(run, count, reported, choose):
    """Refuse to choose by windows that are also reported.

    Args:
        run: for the message.
        count: how many windows the text has.
        reported: how many of them are reported.
        choose: how many others are asked for.

    Raises:
        UserError: there are not so many.
    """
    if count < reported + choose:
        raise UserError(
            f"--choose {choose} is too large: {run.path} has {count} windows, {reported} of which are "
            f"already reported, so give {count - reported} or less"
        )


def of_another_window(s, log_w):
    """s and log_w (B, T, S) of the tokens at the same places in the window before."""
    if len(s) < 2:
        raise UserError("--swap needs at least two windows in a batch, but only one fits: omit --swap")
    return s.roll(1, dims=0), log_w.roll(1, dims=0)


# -- Differences to a reference --------------------------------------------------------------------

# The steps of a run may lie this far outside those of the reference: means over tokens are rarely equal, even
# where both models take nearly all of their steps. The loss at the end of the curve then stands for it.
STEPS_TOLERANCE = 0.05


def differences(frame, reference):
    """Compare each run with its partner, at equal steps.

    A difference is NaN if the run has no partner: the reference has no run with its seed, none with so few or
    so many steps, or only such that were trained elsewhere. How many of the last kind there are is printed.

    Args:
        frame: of by_run.
        reference: the name of the method to compare with.

    Returns:
        The frame with the column `difference`.

    Raises:
        UserError: there is no run of that name.
    """
    of_reference = frame[frame.method == reference]
    if of_reference.empty:
        names = ", ".join(map(repr, frame.method.unique()))
        raise UserError(
            f"--against {reference!r} is not the name of a method in the table: give one of {names}"
        )
    found = []
    trained_elsewhere = 0
    for _, row in frame.iterrows():
        same_seed = of_reference[of_reference.seed == row.seed]
        partners = same_seed[same_origin(same_seed, row)]
        difference = row.loss - loss_at(row.steps, partners)
        if np.isnan(difference) and not np.isnan(loss_at(row.steps, same_seed)):
            trained_elsewhere += 1
        found.append(difference)
    if trained_elsewhere:
        pairs = "1 pair" if trained_elsewhere == 1 else f"{trained_elsewhere} pairs"
        print(f"note: leaving out {pairs} of runs that differ in {', '.join(ORIGIN)}")
    return frame.assign(difference=found)


def same_origin(frame, row):
    """Which runs of a frame agree with the run of a row in the columns ORIGIN, as booleans.

    Two missing values agree: runs and CSVs from before 2026-11-28 lack these numbers.
    """
    agree = pd.Series(True, index=frame.index)
    for name in ORIGIN:
        if name in frame:
            is_same = frame[name] == row[name]
            both_missing = frame[name].isna() & pd.isna(row[name])
            agree &= is_same | both_missing
    return agree


def loss_at(steps, curve):
    """The loss at a number of steps, interpolated linearly between the runs of one seed; NaN beyond them."""
    if curve.empty:
        return np.nan
    curve = curve.sort_values("steps")
    fewest = curve.steps.min() - STEPS_TOLERANCE
    most = curve.steps.max() + STEPS_TOLERANCE
    if not fewest <= steps <= most:
        return np.nan
    return np.interp(steps, curve.steps, curve.loss)


def unpaired_difference(group, of_reference):
    """Compare all runs of a row of the table with all runs of the reference.

    Args:
        group: the runs of one method, K and tau.
        of_reference: all runs of the reference.

    Returns:
        The mean loss of the group minus that of the reference at the group's mean steps, and half the width
        of its 95 % interval; NaN where no run of the reference takes so many steps.
    """
    origin = [name for name in ORIGIN if name in of_reference]
    steps = group.steps.mean()
    reference_losses = []
    for _, curve in of_reference.groupby(["seed", *origin], dropna=False):
        loss = loss_at(steps, curve)
        if not np.isnan(loss):
            reference_losses.append(loss)
    if not reference_losses:
        return np.nan, np.nan
    return unpaired(group.loss, reference_losses)


def comparison_table(frame, against=None):
    """The table: a row for each method, K and tau.

    Args:
        frame: of by_run.
        against: the name of the method to compare with; None: the table has no differences.
    """
    if against:
        frame = differences(frame, against)
    means = over_seeds(frame, ["tau"])
    # The table has these numbers without their spread.
    means = means.drop(columns=["choose_std", "swapped_std", "slots_std", "minutes_std"], errors="ignore")
    columns = {"method": "method", "K": "K", "tau": "tau:g", "seeds": "seeds", "extra steps": "steps:.2f"}
    columns["loss"] = "loss:.4f"
    if "swapped" in means:
        columns["swapped"] = "swapped:.4f"
    if "choose" in means:
        columns["to choose by"] = "choose:.4f"
    columns |= {"slots, M": "slots:.1f", "minutes": "minutes:.1f"}
    if against:
        means = with_intervals(means, frame, against)
        columns |= {"unpaired, 95 %": "unpaired:+.4f", "pairs": "pairs"}
        columns[f"to {against}, 95 %"] = "difference:+.4f"
    return tabulate(means, columns)


def with_intervals(means, frame, against):
    """Add the columns `pairs` and `unpaired` to the rows of the table, and the intervals of both differences.

    tabulate prints the column <key>_std after ±. Here it holds half an interval, not a standard deviation.
    """
    of_reference = frame[frame.method == against]
    pairs = []
    half_intervals = []
    unpaired_means = []
    unpaired_halves = []
    groups = frame.groupby(["method", "K", "tau"], sort=False, dropna=False)  # in the order of `means`
    for (_, group), deviation in zip(groups, means.difference_std, strict=True):
        count = group.difference.notna().sum()
        pairs.append(count)
        half_intervals.append(interval(deviation, count))
        difference, half = unpaired_difference(group, of_reference)
        unpaired_means.append(difference)
        unpaired_halves.append(half)
    return means.assign(
        pairs=pairs,
        difference_std=half_intervals,
        unpaired=unpaired_means,
        unpaired_std=unpaired_halves,
    )


# -- The figure ------------------------------------------------------------------------------------

AXES = {
    "steps": "executed extra steps per token",
    "slots": "slots that ran in training, millions",
    "read": "text read, millions of tokens",
    "minutes": "minutes of training",
    "tau": "threshold tau",
}


@validated_dataclass
class Compare(Comparison):
    """Plot the loss of each method against executed steps or training cost, and compare runs with the same
    seed."""

    taus: tuple[Fraction, ...] | None = None  # also score models with a router at these thresholds tau
    # also score each token with the router's output for a token in another window, to see whether it matters
    # which token gets how many steps
    swap: bool = False
    # also score this many further validation windows, separate from those that are reported, on which to
    # choose a method or tau
    choose: Annotated[int, Field(ge=0)] = 0
    # method to compare the others with, named as in the printed table, for example "PonderLM-2, grid"; None:
    # the table has no differences
    against: NonEmpty | None = None
    # what the x axis shows. steps: steps per token; slots: slots (tokens and their extra steps) computed in
    # training; read: tokens read in training; minutes: training time; tau: the threshold, and then the y axis
    # shows the steps per token, not the loss
    over: Literal["steps", "slots", "read", "minutes", "tau"] = "steps"

    keeps = ["method", "K", "tau", "steps", "loss", "slots", "read", "minutes"]

    def frame(self, runs):
        device = pick_device(self.device)
        taus = {run.config.tau for run in runs} | set(self.taus or ())

        def measure(run):
            return losses(run, sorted(taus), self.choose, device, self.data, self.swap)

        return by_run(runs, measure)

    def table(self, frame):
        return comparison_table(frame, self.against)

    @property
    def sheet(self):
        if self.over == "tau":
            return "Steps by the threshold tau (the number in a point is K)", AXES["tau"], AXES["steps"]
        title = "Loss of each method (the number in a point is K)"
        return title, AXES[self.over], "loss, nats per token"

    def picture(self, frame, axes):
        means = over_seeds(frame, ["tau"]).sort_values("tau")
        if self.over == "tau":
            axes.set_xscale("log")
            draw_curves(axes, means, "method", "tau", "steps")
        else:
            draw_curves(axes, means, "method", self.over, "loss")
