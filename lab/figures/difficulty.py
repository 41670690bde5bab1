"""The paper's figures of easy and hard tokens, with the losses of another model as the difficulty.

A token's own loss is a term of the gain of a step, so tokens sorted by their own loss would show a gain even
where there is none (reading note 11). The losses of another model on the same windows are no part of the
gain.
"""

from dataclasses import replace
from pathlib import Path

import pandas as pd

import analyze
from common import UserError, atomic_write
from hardware import pick_device
from lab.common import NonEmpty
from lab.corpora.tokenizers import load_tokenizer
from lab.figures.subject import decoded_tokens, open_subject
from lab.figures.tables import save
from lab.interop.weights import find_model, load
from model import Count, Fraction, validated_dataclass


def reference_losses(subject, place):
    """The losses (n,) of the model in `place` on the windows of a subject.

    Raises:
        UserError: the model has a different tokenizer, or a shorter window.
    """
    model = load(place).to(subject.windows.device)
    digest = load_tokenizer(place / "tokenizer.json").digest
    if digest != subject.tokenizer.digest:
        raise UserError(
            f"--reference {place} has a different tokenizer from {subject.path}: choose a model with "
            "the same tokenizer"
        )
    T = subject.windows.size(1) - 1
    if model.config.block_size < T:
        raise UserError(
            f"--reference {place} reads {model.config.block_size} tokens at a time, but {subject.path} reads "
            f"{T}: name a model with a context length of at least {T}"
        )
    losses, _, _ = decoded_tokens(replace(subject, model=model))
    return losses


def gains(subject, difficulty):
    """The rows of analyze.buckets, by thirds of a difficulty (n,)."""
    ce, steps = analyze.losses_by_depth(subject.model, subject.windows, subject.tau)
    columns = {"difficulty": difficulty, "steps": steps}
    for k in range(1, ce.size(1)):
        columns[f"gain_{k}"] = ce[:, k - 1] - ce[:, k]
    return list(analyze.by_bucket(difficulty, columns))


def shifts(subject, difficulty):
    """The rows of analyze.shift, by thirds of a difficulty (n,)."""
    found = {}
    for alpha in analyze.ALPHAS:
        found[alpha] = analyze.decoded(subject.model, subject.windows, subject.tau, alpha)
    unshifted, _ = found[0]
    rows = []
    for alpha, (loss, steps) in found.items():
        for row in analyze.by_bucket(difficulty, {"steps": steps, "change": loss - unshifted}):
            rows.append({"alpha": alpha, **row})
    return rows


@validated_dataclass
class Difficulty:
    """Plot what extra steps gain on easy and on hard tokens, as in the paper, but with the loss of another
    model as the difficulty of a token."""

    # another model with the same tokenizer; its loss on a token is taken as the difficulty of this token
    reference: NonEmpty
    run: NonEmpty | None = None  # directory of a trained PonderLM-3; None: the newest run in out/
    windows: Count = 256  # number of windows (pieces as long as the model's context) to measure
    # early-exit threshold: a token takes no further pondering step once the router's probability that it
    # needs one falls below this; 0: take all steps; None: the tau of the run's evaluation
    tau: Fraction | None = None
    # the text that the run was trained on, needed unless that was pydocs or pysource
    data: NonEmpty | None = None
    out: Path | None = None  # folder for the results; None: <run>/report
    device: str = "auto"  # cpu, cuda or mps; auto is a GPU if there is one, else the CPU

    def draw(self):
        path = find_model(self.run)
        subject = open_subject(path, self.windows, self.tau, pick_device(self.device), self.data)
        if not subject.model.iterates or not subject.model.has_router:
            raise UserError(
                f"this figure needs a router and the Jacobi iteration, which {path} (method "
                f"{subject.model.method}) lacks: name a run of --method ponderlm3 with --run"
            )
        difficulty = reference_losses(subject, find_model(self.reference))
        out = self.out or path / "report"
        figures = {"buckets": gains(subject, difficulty), "shift": shifts(subject, difficulty)}
        for name, rows in figures.items():
            title, _, draw = analyze.DRAWINGS[name]
            frame = pd.DataFrame(rows)
            cells = frame.map(lambda x: x if isinstance(x, str) else f"{x:.4g}")
            save(out, f"{name}-by-reference", frame, cells)
            figure, (axes,) = analyze.sheet(title)
            draw(rows, axes)
            axes.get_legend().set_title("thirds by the loss of another model")
            if subject.tokenizer.name == "bytes":
                analyze.name_unit(figure, "byte")
            file = out / f"{name}-by-reference.png"
            atomic_write(file, lambda part, figure=figure: figure.savefig(part, format="png"))
            print(f"written: {file}")
