"""What is thinking worth? Models with and without it on the lookup task (corpora/lookup.py), in which each
question says how many lookups it takes.

    python -m lab worth                 the table of docs/figures/worth.csv, and its figure
    python -m lab worth --runs out/worth/*-[0-9] --data data/lookup-all   adds runs of lab/runs/worth.sh

column           meaning
model            plain: no thinking; always: all steps for every token (PonderLM-2); decides (PonderLM-3)
layers           of the model
learning_rate    of its training; of several the one with the most right answers counts, over all seeds
steps            that its training took, in all stages; last_stage: those of the last one
lookups, right   that a question takes, and the share of answers that are right
passes           layers that a token passes, as it decodes, mean over all tokens of a line
seconds          to decode a line of 64 tokens, one after another: mean over 16 lines, the models in turns
"""

import time
from pathlib import Path

import pandas as pd
import torch
import tyro

from lab.common import Given, command_line, strict_dataclass
from lab.evaluation.texts import Share
from lab.figures.comparing import read_runs
from lab.figures.lookup import answers
from lab.figures.subject import decoded, open_subject
from lab.figures.tables import COLORS, LINES, MARKERS, markdown, new_figure, save_figure
from model import UserError, write_whole

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


def seconds(subjects):
    """Mean seconds a line of each: the least of ROUNDS, in turns, since other work only slows down."""
    found = [[] for _ in subjects]
    for _ in range(ROUNDS):
        for times, subject in zip(found, subjects, strict=True):
            lines = subject.windows[:LINES_TIMED, :-1].tolist()
            times.append(sum(decode(subject.model, line, subject.tau) for line in lines) / len(lines))
    return [min(times) for times in found]


def worth_rows(runs, tau, data, device):
    """A row for each run and number of lookups: the columns above."""
    if odd := [str(run.path) for run in runs if run.shape.method not in NAMES]:
        raise UserError(f"{odd[0]}: only {', '.join(NAMES)} are compared here")
    subjects = [open_subject(run.path, 1024, tau, device, data, other=True) for run in runs]
    rows = []
    for run, subject, time_ in zip(runs, subjects, seconds(subjects), strict=True):
        asked, right, _ = answers(subject)
        steps, layers = decoded(subject)[1].double().mean().item(), run.shape.num_hidden_layers
        one = {"model": NAMES[run.shape.method], "layers": layers, "seed": run.config.seed}
        one |= {"learning_rate": run.config.learning_rate, "steps": trained_steps(run)}
        one |= {"last_stage": run.config.steps}
        for n in range(1, int(asked.max()) + 1):
            row = {"lookups": n, "right": right[asked == n].double().mean().item()}
            rows.append(one | row | {"passes": layers * (1 + steps), "seconds": time_})
    return pd.DataFrame(rows)


def trained_steps(run):
    """Optimizer steps of a training and of those that it began from."""
    before = getattr(run.config, "init_from", None)
    return run.config.steps + (trained_steps(*read_runs([before])) if before else 0)


def title(model, layers, last_stage, shortest):
    longer = f", stages {last_stage / shortest:g} times as long" if last_stage > shortest else ""
    return f"{model}, {layers} layer{'s' * (layers > 1)}{longer}"


def summary(frame):
    """A row for each model and length of its stages, with the learning rate that has most right answers."""
    score = frame.groupby([*ROW, "learning_rate"]).right.mean().reset_index()
    kept = frame.merge(score.loc[score.groupby(ROW).right.idxmax(), [*ROW, "learning_rate"]])
    rows = []
    for which, group in kept.groupby(ROW):
        row = {"model": title(*which, kept.last_stage.min()), "seeds": group.seed.nunique()}
        right = group.groupby("lookups").right.mean()
        row |= {f"{n} lookup{'s' * (n > 1)}": f"{share:.2f}" for n, share in right.items()}
        worst = group.groupby("seed").right.min().min()
        row |= {"worst": f"{worst:.2f}", "steps of training": f"{group.steps.mean():,.0f}"}
        row |= {"passes a token": f"{group.passes.mean():.2f}"}
        rows.append(row | {"ms a line": f"{1000 * group.seconds.mean():.0f}", "order": group.passes.mean()})
    return pd.DataFrame(rows).sort_values("order").drop(columns="order"), kept


@strict_dataclass
class Worth:
    """What thinking is worth where the answer is known: table and figure."""

    runs: tuple[str, ...] = ()  # directories of trained runs, to measure anew
    tau: Share | None = None  # where pondering stops; by default where each run scored it
    data: Given | None = None  # the prepared corpus that all are asked about
    table: Path = Path("docs/figures/worth.csv")  # of the measured numbers; --runs take the place of theirs
    out: Path = Path("out/analyze")  # where the figure goes

    def draw(self):
        if self.runs:
            frame = worth_rows(read_runs(self.runs), self.tau, self.data, torch.device("cpu"))
            if self.table.is_file():  # other runs may be gone
                both = pd.concat([pd.read_csv(self.table), frame])
                frame = both.drop_duplicates([*ROW, "learning_rate", "seed", "lookups"], keep="last")
            self.table.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.table, lambda part: frame.to_csv(part, index=False))
        if not self.table.is_file():
            raise UserError(f"{self.table} is not there: make it of trained runs, --runs (lab/runs/worth.sh)")
        try:
            cells, kept = summary(pd.read_csv(self.table))
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{self.table} is damaged ({error}): make it anew, with --runs") from None
        print(markdown(cells))
        figure, (axes,) = new_figure(
            "lookups that a question takes; passes: layers that a token passes", "share of right answers"
        )
        for i, (which, group) in enumerate(kept.groupby(ROW)):
            curve = group.groupby("lookups").right.agg(["mean", "min", "max"])
            look = {"color": COLORS[i], "marker": MARKERS[i], "linestyle": LINES[i % len(LINES)]}
            label = f"{title(*which, kept.last_stage.min())}: {group.passes.mean():.2f} passes"
            axes.plot(curve.index, curve["mean"], label=label, **look)
            axes.fill_between(curve.index, curve["min"], curve["max"], color=COLORS[i], alpha=0.15)
        axes.axhline(0.25, color="#777777", linestyle=":", label="a guess among the ends of four chains")
        axes.set_ylim(0, 1.05)
        self.out.mkdir(parents=True, exist_ok=True)
        save_figure(figure, self.out / "worth.png")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(Worth, prog="python -m lab worth", description=__doc__).draw())
