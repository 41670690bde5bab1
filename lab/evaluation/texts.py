"""The texts that a model is measured on: those of a run's validation, or a user's own."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from common import UserError
from data import Windows, id_type, pick_tokenizer
from lab.corpora.preparation import OURS, open_corpus
from lab.corpora.sources import of_files
from lab.corpora.tokenizers import begin_of
from lab.train import read_run
from sources import SOURCES


def validation_corpus(run, data=None, other=False, flag="--data"):
    """The corpus that a run was scored on -> its settings, those of its model, and the corpus.

    A run may come from a stranger, so no file is opened because its train.json names it: `data` names it,
    too, by a command's `flag`, and a tokenizer with a name was copied into the run. other: it may be another
    text in the same tokens.

    Raises:
        UserError: it is no run; `data` is missing, another text, or in the tokens of another tokenizer.
    """
    config, shape, known = read_run(run)
    if data is None and config.data not in SOURCES:
        raise UserError(f"{run} was trained on {config.data!r}: give this text again, by {flag}")
    config = replace(config, data=data or config.data)
    began = config.tokenizer == "auto" and getattr(config, "init_from", None)  # with a model's tokenizer
    named = config.tokenizer not in ("auto", *OURS)
    tokenizer = str(run) if began or named else pick_tokenizer(config.preset, config.data, config.tokenizer)
    corpus = open_corpus(config.data, tokenizer, shape.vocab_size)
    if corpus.fingerprint()["tokenizer"] != known.get("tokenizer"):
        raise UserError(f"{config.data} has ids of another tokenizer than {run}")
    if not other and corpus.fingerprint()["val_sha256"] != known.get("val_sha256"):
        raise UserError(f"{config.data} is not the text that {run} was scored on")
    return config, shape, corpus


def validation_windows(run, data=None, other=False):
    """The validation windows that a run was scored on -> its settings, tokenizer and Windows; as above."""
    config, shape, corpus = validation_corpus(run, data, other)
    return config, corpus.tokenizer, Windows(corpus.val, shape.block_size, seed=0)


def validation_text(run, data=None):
    """A run's validation text as one text, in which ends of documents are predicted like other tokens.
    -> its name, [ids], and its bytes, if they are known."""
    if not Path(run, "train.json").is_file():
        raise UserError(f"{run} is no run, which has a text of its own: give a text, --data")
    _, _, corpus = validation_corpus(run, data, flag="--corpus")
    return f"validation text of {run}", [corpus.val], corpus.val_bytes


def own_texts(data, tokenizer):
    """The texts of a file or folder, each behind what texts begin with -> name, [ids, ..], bytes."""
    found = [text for _, text in of_files(data)]
    if not found:
        raise UserError(f"--data {data}: no file or folder with text")
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    before = begin_of(tokenizer) or end  # without any, the first token is not predicted: bytes are unknown
    ids = [np.array([*before, *tokenizer.encode(text)], id_type(tokenizer.vocab_size)) for text in found]
    return data, ids, sum(map(len, found)) if before else None
