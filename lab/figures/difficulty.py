"""What each step gains, and the shifted router, by a difficulty that is no term of the gain: the losses of
another model on the same windows (reading note 11)."""

from dataclasses import replace
from pathlib import Path

import pandas as pd

import analyze
from common import UserError, atomic_write
from hardware import pick_device
from lab.common import Given
from lab.corpora.tokenizers import load_tokenizer
from lab.figures.subject import decoded, open_subject
from lab.figures.tables import save
from lab.interop.weights import find_model, load
from model import Count, Fraction, validated_dataclass


def reference_losses(subject, place):
    """The losses (n,) of the model in `place` on a subject's windows. UserError: it cannot read them."""
    model = load(place).to(subject.windows.device)
    digest = load_tokenizer(place / "tokenizer.json").digest
    if digest != subject.tokenizer.digest or model.config.block_size < subject.windows.size(1) - 1:
        raise UserError(f"--reference {place} has another tokenizer than {subject.path}, or a shorter window")
    return decoded(replace(subject, model=model))[0]


def gains(subject, difficulty):
    """As analyze.buckets, by thirds of a difficulty (n,)."""
    ce, steps = analyze.losses_by_depth(subject.model, subject.windows, subject.tau)
    columns = {f"gain_{i}": ce[:, i - 1] - ce[:, i] for i in range(1, ce.size(1))}
    return [*analyze.by_bucket(difficulty, {"difficulty": difficulty, "steps": steps, **columns})]


def shifts(subject, difficulty):
    """As analyze.shift, by thirds of a difficulty (n,)."""
    model, windows, tau = subject.model, subject.windows, subject.tau
    found = {alpha: analyze.decoded(model, windows, tau, alpha) for alpha in analyze.ALPHAS}
    return [
        {"alpha": alpha, **row}
        for alpha, (loss, steps) in found.items()
        for row in analyze.by_bucket(difficulty, {"steps": steps, "change": loss - found[0][0]})
    ]


@validated_dataclass
class Difficulty:
    """The paper's figures of easy and hard tokens, by the losses of another model."""

    reference: Given  # another trained model on the same text
    run: Given | None = None  # directory of a trained model; None: the newest in out/
    windows: Count = 256  # of the validation text
    tau: Fraction | None = None  # where pondering stops; None: where the run was scored
    data: Given | None = None  # the text that it was scored on, if that is no named corpus
    out: Path | None = None  # where the results go; None: <run>/report
    device: str = "auto"  # auto, cpu, cuda or mps

    def draw(self):
        path = find_model(self.run)
        subject = open_subject(path, self.windows, self.tau, pick_device(self.device), self.data)
        if not subject.model.iterates or not subject.model.has_router:
            raise UserError(f"{path} is of method {subject.model.method}: these are figures of a PonderLM-3")
        difficulty, out = reference_losses(subject, find_model(self.reference)), self.out or path / "report"
        for name, rows in (("buckets", gains(subject, difficulty)), ("shift", shifts(subject, difficulty))):
            title, _, draw = analyze.DRAWINGS[name]
            frame = pd.DataFrame(rows)
            cells = frame.map(lambda x: x if isinstance(x, str) else f"{x:.4g}")
            save(out, f"{name}-by-reference", frame, cells)
            figure, (axes,) = analyze.sheet(title)
            draw(rows, axes)
            axes.get_legend().set_title("thirds by the loss of another model")
            file = out / f"{name}-by-reference.png"
            atomic_write(file, lambda part, figure=figure: figure.savefig(part, format="png"))
            print(f"written: {file}")
