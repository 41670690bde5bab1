"""A trained model as one HTML page that runs it: thinking time, byte by byte, live as one types.

The page holds the weights and a PonderLM-3 in plain JavaScript (templates/model.js), and asks no
other place for anything. worker.js runs it in a thread of its own, explainer.js shows what it does.
"""

import base64
import os
from dataclasses import asdict
from pathlib import Path

from analysis.pages import write_page
from corpus.tokenizers import load_tokenizer
from interop import INCLUDED, find_model, load
from model import Given, strict_dataclass
from runtime import UserError
from training.config import Share, read_run
from training.runs import read_results

ROOT = Path(__file__).parent.parent
TEXT = """\
ROMEO:
The sun, the sun, the sun! and then the zephyr,
And then the sun again.

JULIET:
What's that to me?"""


def packed(model):
    """Weights in float16 -> [(name, shape), ..] and their bytes in that order, as base64."""
    tensors = {name: tensor.half().cpu() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    data = b"".join(tensor.numpy().astype("<f2").tobytes() for tensor in tensors.values())
    shapes = [(name, list(tensor.shape)) for name, tensor in tensors.items()]
    return shapes, base64.b64encode(data).decode()


def check(path, model, tokenizer):
    """Refuse what the page's model is not. UserError."""
    names = "method", "backbone", "tokenizer", "vocabulary"
    found = model.method, model.config.backbone, tokenizer.name, model.config.vocab_size
    needed = "ponderlm3", "llama", "bytes", tokenizer.vocab_size
    for what, a, b in zip(names, found, needed, strict=True):
        if a != b:
            raise UserError(f"{path} has the {what} {a}; the page runs {b} alone")


def measured(path, config):
    """What the run measured of itself, for the page; None of an unfinished run."""
    if not (path / "results.json").is_file():
        return None
    hard, fixed = (read_results(path)[key] for key in ("hard", "fixed"))
    losses = {"hard": hard["loss"], "always": fixed["loss"], "truncated": fixed["truncated"]}
    return {"tau": config.tau, "steps": hard["steps"], **losses}


@strict_dataclass
class Explainer:
    """A model of bytes on a page that runs it: a text's thinking time, live as one types."""

    # directory of a trained PonderLM-3; by default the newest in out/, else models/shakespeare
    run: Given | None = None
    tau: Share | None = None  # where its slider starts; by default where the run scored it
    # the page; by default <run>/report/explainer.html, of models/shakespeare out/explainer.html
    out: Path | None = None

    def draw(self):
        path = find_model(self.run, otherwise=INCLUDED)
        of_run = Path("out") if path == INCLUDED and self.run is None else path / "report"
        file = self.out or of_run / "explainer.html"
        run, config, _ = read_run(path)
        model = load(path)
        check(path, model, load_tokenizer(path / "tokenizer.json"))
        tensors, weights = packed(model)
        shape = model.config
        names = "key_value_heads", "head_width", "scale", "offset"
        derived = {name: getattr(shape, name) for name in names}
        payload = {
            "config": asdict(shape) | derived,
            "tensors": tensors,
            "tau": config.tau if self.tau is None else self.tau,
        }
        write_page(
            file,
            "explainer.html",
            payload=payload,
            weights=weights,
            config=shape,
            K=shape.ponder_steps,
            parameters=sum(p.numel() for p in model.parameters()),
            numbers=measured(run, config),
            data=Path(config.data).name,
            steps=config.steps,
            text=TEXT,
            root=os.path.relpath(ROOT, file.resolve().parent).replace(os.sep, "/"),
        )
