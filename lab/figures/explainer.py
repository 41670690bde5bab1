"""Two trained models on one HTML page that runs them: one solves puzzles whose difficulty is known, the other
shows the extra steps of a text, byte by byte, while you type.

The page holds the weights and a PonderLM-3 in plain JavaScript (templates/model.js), and loads nothing from
elsewhere. worker.js runs each model in a thread of its own; puzzle.js and explainer.js show what the models
do; chains.js makes the puzzles.
"""

import base64
import os
from dataclasses import asdict
from pathlib import Path

import jinja2

from common import UserError, atomic_write
from lab.common import NonEmpty, settings_of
from lab.corpora.tokenizers import load_tokenizer
from lab.interop.weights import INCLUDED, PUZZLES, find_model, load
from model import Fraction, validated_dataclass

ROOT = Path(__file__).parents[2]
BYTES = 256  # tokens before the words of the puzzle, which does not use them
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
    """Write a file from a template of templates/ and its values."""
    text = PAGES.get_template(template).render(values)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, lambda part: part.write_text(text, encoding="utf-8"))
    print(f"written: {file}")


def packed(model, first=0):
    """A model for the page, without the first tokens of its vocabulary.

    Returns:
        A dict with its settings and [(name, shape), ..] of its tensors; and their numbers in that order, in
        float16, as base64.
    """
    tensors = {name: tensor.half().cpu() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name in tensors.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        tensors[name] = tensors[name][first:]
    data = b"".join(tensor.numpy().astype("<f2").tobytes() for tensor in tensors.values())
    c = model.config
    config = asdict(c)
    config |= dict(key_value_heads=c.kv_heads, head_width=c.head_width, scale=c.scale, offset=c.offset)
    config["vocab_size"] -= first
    shapes = [(name, list(tensor.shape)) for name, tensor in tensors.items()]
    return {"config": config, "tensors": shapes}, base64.b64encode(data).decode()


def open_model(path, method, tokens):
    """Open a Llama that must have this method and this tokenizer.

    Args:
        path: its directory.
        method: the name of the method.
        tokens: the name of the tokenizer.

    Returns:
        The model and its tokenizer.

    Raises:
        UserError: it has another one.
    """
    model = load(path)
    tokenizer = load_tokenizer(path / "tokenizer.json")
    found_and_needed = {
        "method": (model.method, method),
        "backbone": (model.config.backbone, "llama"),
        "tokenizer": (tokenizer.name, tokens),
        "vocabulary": (model.config.vocab_size, tokenizer.vocab_size),
    }
    for what, (found, needed) in found_and_needed.items():
        if found != needed:
            raise UserError(
                f"{path} has the {what} {found}, but {needed} is needed: give --run a model with the {what} "
                f"{needed}"
            )
    return model, tokenizer


@validated_dataclass
class Explainer:
    """Write a page that runs two models: one solves puzzles, the other reads a text while you type."""

    # the model that reads what you type: directory of a PonderLM-3 that was trained with --tokenizer bytes;
    # None: the newest run in out/, or else models/docstrings. The model that solves puzzles is models/lookup
    run: NonEmpty | None = None
    tau: Fraction | None = None  # where the slider for tau starts; None: the tau of the run's evaluation
    # file for the page; None: <run>/report/explainer.html, or out/explainer.html for models/docstrings
    out: Path | None = None

    def draw(self):
        path = find_model(self.run, otherwise=INCLUDED)
        of_run = Path("out") if path == INCLUDED and self.run is None else path / "report"
        file = self.out or of_run / "explainer.html"
        config = settings_of(path)
        if not {"tau", "data", "steps"} <= config.keys():
            raise UserError(f"{path}/train.json has no run settings: name a trained run with --run")
        model, _ = open_model(path, "ponderlm3", "bytes")
        puzzler, tokenizer = open_model(PUZZLES, "grid", "lookup")
        of_text, weights = packed(model)
        of_puzzle, puzzle_weights = packed(puzzler, BYTES)
        end = tokenizer.vocab_size - 1
        words = [tokenizer.decode([i]).decode().strip() for i in range(BYTES, end)]
        of_text["tau"] = config["tau"] if self.tau is None else self.tau
        of_puzzle |= {"tau": PUZZLE_TAU, "words": [*words, "end of text"]}
        # The page links to files of the repository, by paths from where the page is.
        root = os.path.relpath(ROOT, file.resolve().parent).replace(os.sep, "/")
        write_page(
            file,
            "explainer.html",
            payload={"text": of_text, "puzzle": of_puzzle, "root": root},
            root=root,
            # the model of the text
            config=model.config,
            weights=weights,
            K=model.config.ponder_steps,
            steps=config["steps"],
            data=Path(config["data"]).name,
            text=TEXT,
            # the model of the puzzle
            puzzle=puzzler.config,
            puzzle_weights=puzzle_weights,
            parameters=[sum(p.numel() for p in each.parameters()) for each in (puzzler, model)],
        )
