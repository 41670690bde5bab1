"""A trained model as one HTML page that runs it: thinking time, byte by byte, live as one types.

The page holds the weights and a PonderLM-3 in plain JavaScript (templates/model.js), and asks no
other place for anything. worker.js runs it in a thread of its own, explainer.js shows what it does.
"""

import base64
import os
from dataclasses import asdict
from pathlib import Path

from analysis.pages import PAGES
from corpus.tokenizers import load_tokenizer
from interop import INCLUDED, find_model, load
from model import Given, strict_dataclass
from runtime import UserError, write_text
from training.config import Share, read_run
from training.runs import read_results

ROOT = Path(__file__).parent.parent
LARGEST = 8e6  # bytes of weights in float16, a page of 11 MB
TEXT = """\
ROMEO:
The sun, the sun, the sun! and then the zephyr,
And then the sun again.

JULIET:
What's that to me?"""


def packed(model):
    """Weights in float16 -> [(name, shape), ..] and their bytes in that order, as base64.

    Raises:
        UserError: too many of them for a page, or one that float16 cannot hold.
    """
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    size = 2 * sum(tensor.numel() for tensor in tensors.values())
    if size > LARGEST:
        raise UserError(
            f"the weights take {size / 1e6:.1f} MB in float16, a page holds {LARGEST / 1e6:g} MB; "
            "train a smaller model, like that of --preset tiny"
        )
    tensors = {name: tensor.half().cpu() for name, tensor in tensors.items()}
    if large := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UserError(f"{', '.join(large)}: float16 has no numbers beyond 65504, but this has")
    data = b"".join(tensor.numpy().astype("<f2").tobytes() for tensor in tensors.values())
    shapes = [(name, list(tensor.shape)) for name, tensor in tensors.items()]
    return shapes, base64.b64encode(data).decode()


def check(path, model, tokenizer):
    """Refuse what the page's model is not. UserError."""
    if model.method != "ponderlm3":
        raise UserError(f"{path} is of method {model.method}; the page runs ponderlm3 alone")
    if model.config.backbone != "llama":
        raise UserError(f"{path} is of {model.config.backbone}; the page runs llama alone")
    if tokenizer.name != "bytes" or model.config.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"{path} has the tokenizer {tokenizer.name} and a vocabulary of "
            f"{model.config.vocab_size}; the page reads bytes: train with --tokenizer bytes"
        )


def measured(path, config):
    """What the run measured of itself, for the page; None of an unfinished run."""
    if not (path / "results.json").is_file():
        return None
    results = read_results(path)
    return {
        "tau": config.tau,
        "steps": results["hard"]["steps"],
        "hard": results["hard"]["loss"],
        "always": results["fixed"]["loss"],
        "truncated": results["fixed"]["truncated"],
    }


def explainer_page(path, file, tau=None):
    """The run at `path` -> the page `file`. tau: where its slider starts; None: the run's own.

    Raises:
        UserError: no run, or one that the page cannot run, see `check` and `packed`.
    """
    run, config, _ = read_run(path)
    model = load(path)
    check(path, model, load_tokenizer(path / "tokenizer.json"))
    tensors, weights = packed(model)
    of_model = model.config
    derived = {name: getattr(of_model, name) for name in ("key_value_heads", "head_width", "scale")}
    payload = {
        "config": asdict(of_model) | derived | {"offset": of_model.offset},
        "tensors": tensors,
        "tau": config.tau if tau is None else tau,
    }
    page = PAGES.get_template("explainer.html").render(
        payload=payload,
        weights=weights,
        config=of_model,
        K=of_model.ponder_steps,
        parameters=sum(p.numel() for p in model.parameters()),
        numbers=measured(run, config),
        data=Path(config.data).name,
        steps=config.steps,
        text=TEXT,
        root=os.path.relpath(ROOT, file.resolve().parent).replace(os.sep, "/"),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, page)


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
        if file.is_dir() or file.suffix != ".html":  # never in place of something else
            raise UserError(f"--out {file} is a folder, or no .html: name a page")
        explainer_page(path, file, self.tau)
        print(f"written: {file} ({file.stat().st_size / 1e6:.2f} MB)")
