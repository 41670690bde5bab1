"""Two trained models on one HTML page that runs them: puzzles whose difficulty is known, and the
thinking time of a text, byte by byte, live as one types.

The page holds the weights and a PonderLM-3 in plain JavaScript (templates/model.js), and asks no
other place for anything. worker.js runs each model in a thread of its own; puzzle.js and
explainer.js show what they do. chains.js makes the puzzles.
"""

import base64
import os
from dataclasses import asdict
from pathlib import Path

import jinja2

from common import UserError, atomic_write
from lab.common import Given, settings_of
from lab.corpora.tokenizers import load_tokenizer
from lab.interop.weights import INCLUDED, PUZZLES, find_model, load
from model import Fraction, validated_dataclass

ROOT = Path(__file__).parents[2]
BYTES = 256  # tokens before the words of the puzzle, which has no use for them
PUZZLE_TAU = 1e-4
TEXT = """\
Return a copy of the array.

Parameters
----------
axis : int, optional
    The axis along which the values are computed."""


PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)


def write_page(file, template, **values):
    """Fill in a template of templates/."""
    text = PAGES.get_template(template).render(values)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, lambda part: part.write_text(text, encoding="utf-8"))
    print(f"written: {file}")


def packed(model, first=0):
    """A model, without the first tokens of its vocabulary -> its settings and [(name, shape), ..];
    its weights in float16 and in that order, as base64."""
    tensors = {name: tensor.half().cpu() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name in tensors.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        tensors[name] = tensors[name][first:]
    data = b"".join(tensor.numpy().astype("<f2").tobytes() for tensor in tensors.values())
    c, config = model.config, asdict(model.config)
    config |= dict(key_value_heads=c.kv_heads, head_width=c.head_width, scale=c.scale, offset=c.offset)
    config["vocab_size"] -= first
    shapes = [(name, list(tensor.shape)) for name, tensor in tensors.items()]
    return {"config": config, "tensors": shapes}, base64.b64encode(data).decode()


def open_model(path, method, tokens):
    """A model of this method for these tokens, and its tokenizer. UserError: it is another one."""
    model, tokenizer = load(path), load_tokenizer(path / "tokenizer.json")
    names = "method", "backbone", "tokenizer", "vocabulary"
    found = model.method, model.config.backbone, tokenizer.name, model.config.vocab_size
    needed = method, "llama", tokens, tokenizer.vocab_size
    for what, a, b in zip(names, found, needed, strict=True):
        if a != b:
            raise UserError(f"{path} has the {what} {a}, not {b}")
    return model, tokenizer


@validated_dataclass
class Explainer:
    """A page that runs models: one solves puzzles, one of bytes reads a text, live as one types."""

    # directory of a trained PonderLM-3; by default the newest in out/, else models/docstrings
    run: Given | None = None
    tau: Fraction | None = None  # where its slider starts; by default where the run scored it
    # the page; by default <run>/report/explainer.html, of models/docstrings out/explainer.html
    out: Path | None = None

    def draw(self):
        path = find_model(self.run, otherwise=INCLUDED)
        of_run = Path("out") if path == INCLUDED and self.run is None else path / "report"
        file = self.out or of_run / "explainer.html"
        config = settings_of(path)
        if not {"tau", "data", "steps"} <= config.keys():
            raise UserError(f"{path}/train.json does not hold the settings of a run")
        model, _ = open_model(path, "ponderlm3", "bytes")
        puzzler, tokenizer = open_model(PUZZLES, "grid", "lookup")
        of_text, weights = packed(model)
        of_puzzle, puzzle_weights = packed(puzzler, BYTES)
        end = tokenizer.vocab_size - 1
        words = [tokenizer.decode([i]).decode().strip() for i in range(BYTES, end)]
        of_text["tau"] = config["tau"] if self.tau is None else self.tau
        of_puzzle |= {"tau": PUZZLE_TAU, "words": [*words, "end of text"]}
        root = os.path.relpath(ROOT, file.resolve().parent).replace(os.sep, "/")
        values = {"payload": {"text": of_text, "puzzle": of_puzzle, "root": root}, "weights": weights}
        values |= {"puzzle_weights": puzzle_weights, "puzzle": puzzler.config, "config": model.config}
        values |= {"K": model.config.ponder_steps, "steps": config["steps"], "text": TEXT, "root": root}
        values["parameters"] = [sum(p.numel() for p in each.parameters()) for each in (puzzler, model)]
        write_page(file, "explainer.html", **values, data=Path(config["data"]).name)
