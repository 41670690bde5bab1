"""Does depth follow difficulty, where that is known, and what is thinking worth there? The lookup task
(corpora/lookup.py), in which each question says how many lookups it takes.

column           meaning, of the table of `worth`
model            plain: no thinking; always: all steps for every token (PonderLM-2); decides (PonderLM-3)
layers           of the model
learning_rate    of its training; of several the one with the most right answers counts, over all seeds
steps            that its training took, in all stages; last_stage: those of the last one
lookups, right   that a question takes, and the share of answers that are right
passes           layers that a token passes, as it decodes, mean over all tokens of a line
seconds          to decode a line of 64 tokens, one after another: mean over 16 lines, the models in turns
machine, precision, text   of the last stage, as in comparing.py
"""

import time
from dataclasses import replace
from typing import Annotated

import pandas as pd
import torch
import tyro
from pydantic import PositiveInt

from attention import LOG_W_HIDDEN
from common import UserError, command_line
from lab.corpora.lookup import KINDS, kinds_of, longest_of, lookups_asked
from lab.figures.comparing import ABOUT, Comparison, draw_curves, needs_router, read_runs
from lab.figures.subject import decoded, open_subject, rerouted
from lab.figures.tables import COLORS, LINES, MARKERS, show
from lab.interop.warm_start import longer, start_from
from model import Fraction, validated_dataclass


def answers(subject):
    """Of each token that takes a known number of lookups: that number, whether the next token is
    predicted, and the executed steps -> (n,) each, decoded at tau; and the steps of all tokens, (n,)."""
    asked = lookups_asked(subject.windows[:, :-1], subject.tokenizer).flatten().cpu()
    _, steps, right = decoded(subject)
    return *(values[asked >= 0] for values in (asked, right, steps)), steps


@validated_dataclass
class Lookup(Comparison):
    """Does depth follow difficulty? Models that were trained on the lookup task."""

    tau: Fraction | None = None  # where pondering stops; by default where each run scored it
    # steps that each may take, instead of its K: what the router says of its last one holds for the new ones
    most: tuple[PositiveInt, ...] = ()
    other, by, keeps_means = True, ["most", "lookups"], True
    sheet = "lookups that the next token takes (0: filler)", "", 2
    columns = {name: name for name in ("method", "K", "most", "seeds", "lookups")}
    columns |= {"accuracy": "accuracy:.3f", "extra steps": "steps:.2f"}

    def measure(self, run):
        """A row for each number of steps and of lookups, 0 for filler; asked of at most 1024 lines."""
        subject, shape, found = self.subject(run, 1024), run.shape, []
        for n in self.most or [shape.ponder_steps]:
            if n < shape.ponder_steps:
                raise UserError(f"--most {n}: {run.path} takes {shape.ponder_steps} steps already")
            if n != shape.ponder_steps:
                grown = replace(shape, ponder_steps=n, router_offset=longer(shape, n))
                subject.model = start_from(run.path, grown).to(subject.windows.device).eval()
            asked, right, steps, _ = answers(subject)
            tokens = pd.DataFrame({"accuracy": right.double(), "steps": steps.double()})
            rows = tokens.groupby(asked.numpy()).mean()
            rows = rows.reindex(range(longest_of(subject.tokenizer) + 1)).rename_axis("lookups")
            found.append(rows.reset_index().assign(most=n))
        return pd.concat(found)

    def frame(self, runs):
        frame = super().frame(runs)
        # grown models differ in what K says already
        frame["method"] = frame.method.str.replace(r", router_offset( -?[\d.]+)+", "", regex=True)
        return frame.sort_values("K", kind="stable")

    def picture(self, frame, left, right):
        names = frame.method + ", K = " + frame.K.map("{:.0f}".format)
        if (frame.most != frame.K).any():
            names += frame.most.map(", at most {:.0f} steps".format)
        for axes, y in ((left, "accuracy"), (right, "steps")):
            draw_curves(axes, frame.assign(name=names), "name", "lookups", y, "most")
        longest = frame.lookups.max()
        right.plot([1, longest], [0, longest - 1], color="#777777", linestyle=":", label="lookups - 1")
        left.set_ylabel("share of right answers")
        right.set_ylabel("executed steps")


def stilled(places):
    """A change of s and log_w (B, T, S) by which some places of a line, (T,) bool, take no step."""

    def change(s, log_w):
        still = places[:, None] & (torch.arange(s.size(-1), device=s.device) > 0)  # (T, S)
        s = s.masked_fill(still, 0)
        return s / s.sum(-1, keepdim=True), log_w.masked_fill(still, LOG_W_HIDDEN)

    return change


def kind_rows(subject):
    """A row for each kind of token: its share of a line and steps; then, with the steps of these tokens
    taken away, the steps of all and the share of right answers, over all numbers of lookups and at the
    one with the fewest. The first row is of all tokens as they are, the last without the steps that
    neither read the table nor answer."""
    *_, steps = answers(subject)
    kinds = kinds_of(subject.windows.size(1) - 1, subject.tokenizer).to(subject.windows.device)
    idle = [KINDS.index(kind) for kind in KINDS if kind not in ("pair", "question")]
    rows = []
    for name, chosen in [("all", []), *((kind, [i]) for i, kind in enumerate(KINDS)), ("idle", idle)]:
        places = torch.isin(kinds, torch.tensor(chosen, device=kinds.device))
        mine = (places if chosen else ~places).repeat(len(subject.windows)).cpu()
        with rerouted(subject.model, stilled(places)):
            asked, right, _, left = answers(subject)
        found = pd.Series(right.double()).groupby(asked.numpy()).mean().drop(0, errors="ignore")
        row = {"kind": name, "tokens": mine.double().mean().item()}
        row |= {"steps": steps[mine].double().mean().item(), "steps_left": left.double().mean().item()}
        rows.append(row | {"right_left": found.mean(), "worst_left": found.min()})
    return pd.DataFrame(rows)


@validated_dataclass
class Kinds(Comparison):
    """Which tokens of the lookup task take steps, and which of these steps are used? A table."""

    tau: Fraction | None = None  # where pondering stops; by default where each run scored it

    other, by, keeps_means = True, ["kind"], True
    columns = ABOUT | {"kind": "kind", "share of tokens": "tokens:.3f", "steps": "steps:.2f"}
    columns |= {"steps without": "steps_left:.2f", "right without": "right_left:.3f"}
    columns |= {"fewest right": "worst_left:.3f"}

    def measure(self, run):
        needs_router(run)
        return kind_rows(self.subject(run, 400))


# -- What thinking is worth ------------------------------------------------------------------------

NAMES = {"vanilla": "plain", "ponderlm2": "always thinks", "grid-fixed": "always thinks"}
NAMES |= {"ponderlm3": "decides", "grid": "decides"}
LINES_TIMED, ROUNDS = 16, 3
ROW = ["model", "layers", "last_stage"]  # what makes a row of the table


@torch.inference_mode()
def decode(model, line, tau):
    """Read a line of ids token by token. -> seconds"""
    start, cache = time.perf_counter(), model.new_cache()
    for position, token in enumerate(line):
        model.ponder_token(token, position, cache, tau)
    return time.perf_counter() - start


def timed(runs, windows, tau=None, data=None, other=False):
    """Of each run the run, its Subject and the mean seconds to decode a line: the least of ROUNDS, in turns,
    since other work only slows down. UserError: a run of another method than NAMES."""
    if odd := [str(run.path) for run in runs if run.shape.method not in NAMES]:
        raise UserError(f"{odd[0]}: only {', '.join(NAMES)} are compared here")
    subjects = [open_subject(run.path, windows, tau, torch.device("cpu"), data, other) for run in runs]
    found = [[] for _ in subjects]
    for _ in range(ROUNDS):
        for times, subject in zip(found, subjects, strict=True):
            lines = subject.windows[:LINES_TIMED, :-1].tolist()
            times.append(sum(decode(subject.model, line, subject.tau) for line in lines) / len(lines))
    return zip(runs, subjects, map(min, found), strict=True)


def worth_rows(runs, tau, data):
    """A row for each run and number of lookups: the columns above."""
    rows = []
    for run, subject, time_ in timed(runs, 1024, tau, data, other=True):
        asked, right, _, steps = answers(subject)
        layers, steps = run.shape.num_hidden_layers, steps.double().mean().item()
        one = {"model": NAMES[run.shape.method], "layers": layers, "seed": run.config.seed}
        one |= {"learning_rate": run.config.learning_rate, "steps": trained_steps(run)}
        one |= {"last_stage": run.config.steps} | run.origin
        for n in range(1, int(asked.max()) + 1):
            row = {"lookups": n, "right": right[asked == n].double().mean().item()}
            rows.append(one | row | {"passes": layers * (1 + steps), "seconds": time_})
    return pd.DataFrame(rows)


def trained_steps(run):
    """Optimizer steps of a training and of those that it began from."""
    before = getattr(run.config, "init_from", None)
    return run.config.steps + (trained_steps(*read_runs([before])) if before else 0)


def row_title(model, layers, last_stage, shortest):
    longer = f", stages {last_stage / shortest:g} times as long" if last_stage > shortest else ""
    return f"{model}, {layers} layer{'s' * (layers > 1)}{longer}"


def summary(frame):
    """A row for each model and length of its stages, with the learning rate that has most right answers."""
    score = frame.groupby([*ROW, "learning_rate"]).right.mean().reset_index()
    kept = frame.merge(score.loc[score.groupby(ROW).right.idxmax(), [*ROW, "learning_rate"]])
    rows = []
    for which, group in kept.groupby(ROW):
        row = {"model": row_title(*which, kept.last_stage.min()), "seeds": group.seed.nunique()}
        right = group.groupby("lookups").right.mean()
        row |= {f"{n} lookup{'s' * (n > 1)}": show(share, ".2f") for n, share in right.items()}
        worst = group.groupby("seed").right.min().min()
        row |= {"worst": f"{worst:.2f}", "steps of training": f"{group.steps.mean():,.0f}"}
        row |= {"passes a token": f"{group.passes.mean():.2f}"}
        rows.append(row | {"ms a line": f"{1000 * group.seconds.mean():.0f}", "order": group.passes.mean()})
    return pd.DataFrame(rows).sort_values("order").drop(columns="order"), kept


@validated_dataclass
class Worth(Comparison):
    """What thinking is worth where the answer is known: table and figure."""

    tau: Fraction | None = None  # where pondering stops; by default where each run scored it
    device: tyro.conf.Suppress[str] = "cpu"  # on which decoding is timed
    sheet = "lookups that a question takes; passes: layers that a token passes", "share of right answers"

    def frame(self, runs):
        return worth_rows(runs, self.tau, self.data)

    def table(self, frame):
        return summary(frame)[0]

    def picture(self, frame, axes):
        _, kept = summary(frame)
        for i, (which, group) in enumerate(kept.groupby(ROW)):
            curve = group.groupby("lookups").right.agg(["mean", "min", "max"])
            look = {"color": COLORS[i], "marker": MARKERS[i], "linestyle": LINES[i % len(LINES)]}
            label = f"{row_title(*which, kept.last_stage.min())}: {group.passes.mean():.2f} passes"
            axes.plot(curve.index, curve["mean"], label=label, **look)
            axes.fill_between(curve.index, curve["min"], curve["max"], color=COLORS[i], alpha=0.15)
        axes.axhline(0.25, color="#777777", linestyle=":", label="a guess among the ends of four chains")
        axes.set_ylim(0, 1.05)


def main(figure: Annotated[Worth, tyro.conf.arg(name="")]):
    """What thinking is worth where the answer is known: table and figure."""
    figure.draw()


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab worth"))
