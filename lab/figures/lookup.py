"""Three figures about the lookup task (corpora/lookup.py), in which each question says how many lookups it
takes: whether depth follows difficulty, which tokens need their steps, and what extra steps are worth.

column           meaning, in the table of `worth`
model            plain: no extra steps; always thinks: all steps for every token (PonderLM-2); decides: as
                 many as the router says (PonderLM-3)
layers           layers of the model
learning_rate    of its training; of several, the one with the highest accuracy over all seeds counts
steps            training steps of all stages; last_stage: those of the last stage
lookups, right   lookups that a question takes, and the accuracy of the answers
passes           layers that a token passes as it is decoded: mean over all tokens of a line
seconds          to decode a line of 64 tokens, one after another: mean over 16 lines, the models in turns
machine, precision, text   of the last stage, as in comparing.py
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import tyro
from pydantic import PositiveInt

from attention import LOG_W_HIDDEN
from common import UserError, command_line
from lab.corpora.lookup import KINDS, kinds_of, longest_of, lookups_asked
from lab.figures.comparing import ABOUT, OnAnyText, draw_curves
from lab.figures.runs import check_one_recipe, read_runs, refuse_without_router
from lab.figures.subject import decoded_tokens, open_subject, rerouted
from lab.figures.tables import look_of, show
from lab.interop.warm_start import has_router_rows, longer, start_from
from model import Fraction, validated_dataclass


def answers(subject):
    """How a model decodes the tokens that take a known number of lookups.

    Returns:
        For each of these tokens the number of lookups, whether the next token is predicted, and the executed
        steps, (m,) each; and the executed steps of all tokens, (n,).
    """
    asked = lookups_asked(subject.windows[:, :-1], subject.tokenizer).flatten().cpu()
    _, steps, right = decoded_tokens(subject)
    known = asked >= 0
    return asked[known], right[known], steps[known], steps


@validated_dataclass
class Lookup(OnAnyText):
    """Draw accuracy and steps by the number of lookups, for models that were trained on the lookup task."""

    # early-exit threshold: a token takes no further pondering step once the router's probability that it
    # needs one falls below this; 0: take all steps; None: the tau of each run's evaluation
    tau: Fraction | None = None
    # measure each model with each of these as its maximum number of steps, instead of K; for steps beyond K,
    # the router uses what it learned for step K
    most: tuple[PositiveInt, ...] | None = None
    by = ["most", "lookups"]
    keeps_means = True
    sheet = (
        "Puzzles of one to many lookups: accuracy, and steps taken",
        "lookups that the next token takes (0: filler)",
        "",
        2,
    )
    columns = {name: name for name in ("method", "K", "most", "seeds", "lookups")}
    columns |= {"accuracy": "accuracy:.3f", "extra steps": "steps:.2f"}

    def measure(self, run):
        """The frame of one run: a row for each of `most` and each number of lookups, 0 for filler, on at most
        1024 lines."""
        subject = self.subject(run, 1024)
        trained = subject.model
        K = run.model_config.ponder_steps
        found = []
        for n in self.most or [K]:
            if n < K:
                raise UserError(
                    f"--most {n} is too small: {run.path} already takes {K} steps, so give {K} or more"
                )
            subject.model = trained
            if n != K:
                changes = {"ponder_steps": n}
                if has_router_rows(run.model_config.method):
                    changes["router_offset"] = longer(run.model_config, n)
                grown = replace(run.model_config, **changes)
                subject.model = start_from(run.path, grown).to(subject.windows.device).eval()
            asked, right, steps, _ = answers(subject)
            tokens = pd.DataFrame({"accuracy": right.double(), "steps": steps.double()})
            rows = tokens.groupby(asked.numpy()).mean()
            rows = rows.reindex(range(longest_of(subject.tokenizer) + 1)).rename_axis("lookups")
            found.append(rows.reset_index().assign(most=n))
        return pd.concat(found)

    def frame(self, runs):
        frame = super().frame(runs)
        # The offsets of grown models differ in length only, which K says already. If they also differ in
        # something else, they stay in the name.
        without_offset = frame.method.str.replace(r", router_offset( -?[\d.]+)+", "", regex=True)
        shorter = frame.assign(method=without_offset)
        if not shorter.duplicated(["method", "K", *self.by]).any():
            frame = shorter
        return frame.sort_values("K", kind="stable")

    def picture(self, frame, left, right):
        names = frame.method + ", K = " + frame.K.map("{:.0f}".format)
        if (frame.most != frame.K).any():
            names += frame.most.map(", at most {:.0f} steps".format)
        for axes, y in ((left, "accuracy"), (right, "steps")):
            draw_curves(axes, frame.assign(name=names), "name", "lookups", y, "most")
        longest = frame.lookups.max()
        right.plot([1, longest], [0, longest - 1], color="#777777", linestyle=":", label="lookups - 1")
        left.set_ylabel("accuracy")
        right.set_ylabel("executed steps")


def stilled(places):
    """A function for subject.rerouted that takes away the steps of some places of a line, (T,) booleans."""

    def change(s, log_w):
        still = places[:, None] & (torch.arange(s.size(-1), device=s.device) > 0)  # (T, S)
        # The model itself never renormalises s. Here a token without steps gets s_0 = 1, as from a router
        # that is certain of step 0; without that its state would be scaled down.
        s = s.masked_fill(still, 0)
        s = s / s.sum(-1, keepdim=True)
        return s, log_w.masked_fill(still, LOG_W_HIDDEN)

    return change


def kind_rows(subject):
    """The frame of one run, a row for each kind of token.

    column       meaning
    kind         one of KINDS; all: all tokens, whose steps stay; idle: tokens that are neither pairs nor
                 questions
    tokens       the fraction of tokens of this kind
    steps        executed steps of these tokens, mean
    steps_left   executed steps of all tokens when those of this kind take none, mean
    right_left   the accuracy then, mean over the numbers of lookups
    worst_left   the accuracy then at the number of lookups where it is lowest
    """
    *_, steps = answers(subject)
    kinds = kinds_of(subject.windows.size(1) - 1, subject.tokenizer).to(subject.windows.device)  # (T,)
    groups = {"all": []}  # the kinds, as indices of KINDS, whose steps are taken away: here none
    groups |= {kind: [i] for i, kind in enumerate(KINDS)}
    groups["idle"] = [i for i, kind in enumerate(KINDS) if kind not in ("pair", "question")]
    rows = []
    for name, chosen in groups.items():
        places = torch.isin(kinds, torch.tensor(chosen, device=kinds.device))  # (T,), which are stilled
        counted = places if chosen else torch.ones_like(places)  # which have their steps counted
        counted = counted.repeat(len(subject.windows)).cpu()  # (n,)
        with rerouted(subject.model, stilled(places)):
            asked, right, _, left = answers(subject)
        accuracy = pd.Series(right.double()).groupby(asked.numpy()).mean().drop(0, errors="ignore")
        rows.append(
            {
                "kind": name,
                "tokens": counted.double().mean().item(),
                "steps": steps[counted].double().mean().item(),
                "steps_left": left.double().mean().item(),
                "right_left": accuracy.mean(),
                "worst_left": accuracy.min(),
            }
        )
    return pd.DataFrame(rows)


@validated_dataclass
class Kinds(OnAnyText):
    """Show which tokens of the lookup task take steps, and which of these steps are needed. A table."""

    # early-exit threshold: a token takes no further pondering step once the router's probability that it
    # needs one falls below this; 0: take all steps; None: the tau of each run's evaluation
    tau: Fraction | None = None

    by = ["kind"]
    keeps_means = True
    columns = ABOUT | {"kind": "kind", "share of tokens": "tokens:.3f", "steps": "steps:.2f"}
    columns |= {"steps without": "steps_left:.2f", "right without": "right_left:.3f"}
    columns |= {"fewest right": "worst_left:.3f"}

    def measure(self, run):
        refuse_without_router(run)
        return kind_rows(self.subject(run, 400))


# -- What extra steps are worth --------------------------------------------------------------------

NAMES = {"vanilla": "plain", "ponderlm2": "always thinks", "grid-fixed": "always thinks"}
NAMES |= {"ponderlm3": "decides", "grid": "decides"}
LEGEND = {"always thinks": "PonderLM-2, every step", "decides": "PonderLM-3"}  # of the picture
LINES_TIMED = 16
ROUNDS = 3
ROW = ["model", "layers", "last_stage"]  # runs that agree in these are one row of the table


@torch.inference_mode()
def decode(model, line, tau):
    """The seconds that it takes to read a line of ids token by token."""
    start = time.perf_counter()
    cache = model.new_cache()
    for position, token in enumerate(line):
        model.ponder_token(token, position, cache, tau)
    return time.perf_counter() - start


def family(run):
    """What a run is called in a table of layers or lookups, see NAMES. A model of any method that takes no
    extra steps is plain."""
    return "plain" if run.K == 0 else NAMES[run.model_config.method]


def timed(runs, windows, tau=None, data=None, other=False):
    """Measure how long runs take to decode a line, in turns.

    Args:
        runs: of runs.read_runs.
        windows, tau, data, other: as subject.open_subject.

    Returns:
        (run, Subject, mean seconds per line) of each run. The fastest of ROUNDS counts, since other work on
        the machine can only slow a run down.

    Raises:
        UserError: a run is of a method that is not in NAMES.
    """
    for run in runs:
        if run.model_config.method not in NAMES:
            raise UserError(
                f"{run.path} uses the method {run.model_config.method}, but only {', '.join(NAMES)} can be "
                "compared: remove it from --runs"
            )
    subjects = [open_subject(run.path, windows, tau, torch.device("cpu"), data, other) for run in runs]
    found = [[] for _ in subjects]
    for _ in range(ROUNDS):
        for times, subject in zip(found, subjects, strict=True):
            lines = subject.windows[:LINES_TIMED, :-1].tolist()
            times.append(sum(decode(subject.model, line, subject.tau) for line in lines) / len(lines))
    return zip(runs, subjects, map(min, found), strict=True)


def worth_rows(runs, tau, data):
    """The frame of some runs, with the columns above and a row for each run and number of lookups."""
    check_one_recipe(
        runs,
        lambda run: (family(run), run.model_config.num_hidden_layers, run.config.steps),
        but={"learning_rate"},
    )
    rows = []
    for run, subject, seconds in timed(runs, 1024, tau, data, other=True):
        asked, right, _, all_steps = answers(subject)
        layers = run.model_config.num_hidden_layers
        steps = all_steps.double().mean().item()
        of_run = {
            "model": family(run),
            "layers": layers,
            "seed": run.config.seed,
            "learning_rate": run.config.learning_rate,
            "steps": trained_steps(run),
            "last_stage": run.config.steps,
        }
        for n in range(1, int(asked.max()) + 1):
            accuracy = right[asked == n].double().mean().item()
            row = {"lookups": n, "right": accuracy, "passes": layers * (1 + steps), "seconds": seconds}
            rows.append(of_run | run.origin | row)
    return pd.DataFrame(rows)


def trained_steps(run):
    """Training steps of a run and of the runs that it started from."""
    before = getattr(run.config, "init_from", None)
    if not before:
        return run.config.steps
    if not Path(before, "results.json").is_file():
        raise UserError(
            f"{run.path} began with {before}, whose training steps count, too, but there is no finished run: "
            "call the command in the folder in which it was trained"
        )
    (run_before,) = read_runs([before])
    return run.config.steps + trained_steps(run_before)


def row_title(model, layers, last_stage, shortest):
    """The title of a row of the table. shortest: training steps of the shortest last stage of all rows."""
    title = f"{model}, 1 layer" if layers == 1 else f"{model}, {layers} layers"
    if last_stage > shortest:
        title += f", stages {last_stage / shortest:g} times as long"
    return title


def summary(frame):
    """The table: a row for each model and length of its stages.

    Returns:
        The table, and the rows of the frame with the learning rate of the highest accuracy, which it is made
        from.
    """
    accuracy = frame.groupby([*ROW, "learning_rate"]).right.mean().reset_index()
    best = accuracy.loc[accuracy.groupby(ROW).right.idxmax(), [*ROW, "learning_rate"]]
    kept = frame.merge(best, on=[*ROW, "learning_rate"])
    rows = []
    for (model, layers, last_stage), group in kept.groupby(ROW):
        passes = group.passes.mean()
        title = row_title(model, layers, last_stage, kept.last_stage.min())
        row = {"model": title, "seeds": group.seed.nunique()}
        for n, right in group.groupby("lookups").right.mean().items():
            title = "1 lookup" if n == 1 else f"{n} lookups"
            row[title] = show(right, ".2f")
        row["worst"] = f"{group.right.min():.2f}"
        row["steps of training"] = f"{group.steps.mean():,.0f}"
        row["passes a token"] = f"{passes:.2f}"
        row["ms a line"] = f"{1000 * group.seconds.mean():.0f}"
        row["order"] = passes
        rows.append(row)
    return pd.DataFrame(rows).sort_values("order").drop(columns="order"), kept


@validated_dataclass
class Worth(OnAnyText):
    """Draw the accuracy of models with and without extra steps on puzzles, with a table of what they cost."""

    # early-exit threshold: a token takes no further pondering step once the router's probability that it
    # needs one falls below this; 0: take all steps; None: the tau of each run's evaluation
    tau: Fraction | None = None
    device: tyro.conf.Suppress[str] = "cpu"  # on which decoding is timed
    keeps = [*ROW, "learning_rate", "steps", "lookups", "right", "passes", "seconds"]
    sheet = "What extra steps are worth on puzzles", "lookups that a question takes", "accuracy"

    def frame(self, runs):
        return worth_rows(runs, self.tau, self.data)

    def table(self, frame):
        table, _ = summary(frame)
        return table

    def picture(self, frame, axes):
        _, kept = summary(frame)
        for i, ((model, layers, last_stage), group) in enumerate(kept.groupby(ROW)):
            curve = group.groupby("lookups").right.agg(["mean", "min", "max"])
            look = look_of(i)
            title = row_title(LEGEND.get(model, model), layers, last_stage, kept.last_stage.min())
            label = f"{title}: {group.passes.mean():.2f} passes"
            axes.plot(curve.index, curve["mean"], label=label, **look)
            axes.fill_between(curve.index, curve["min"], curve["max"], color=look["color"], alpha=0.15)
        axes.axhline(0.25, color="#777777", linestyle=":", label="a guess among the ends of four chains")
        axes.set_ylim(0, 1.05)


def main(figure: Annotated[Worth, tyro.conf.arg(name="")]):
    """Compare models that were trained on the lookup task, with and without extra steps: the accuracy of each
    model at every difficulty, and its passes and time, as a table and a figure."""
    figure.draw()


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab worth"))
