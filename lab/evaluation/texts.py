"""The texts that a model is measured on: the validation text of a run, or any other text."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from common import UserError
from data import Windows, id_type, is_prepared, pick_tokenizer
from lab.corpora.preparation import OURS, open_corpus
from lab.corpora.sources import of_files, show
from lab.corpora.tokenizers import begin_of
from lab.train import read_run
from sources import SOURCES


def validation_corpus(run, data=None, other=False, flag="--data"):
    """The corpus that a run was evaluated on.

    train.json may come from a stranger, so a file that it names is opened only if the caller names it as
    well. A tokenizer that was given by name is read from its copy in the run.

    Args:
        run: its directory.
        data: the text that the run was trained on; None: that is one of sources.SOURCES.
        other: whether `data` may be another text in the same tokens.
        flag: by which a command is given `data`, for messages.

    Returns:
        The settings of the run, those of its model, and the corpus.

    Raises:
        UserError: it is no run, or `data` is missing, another text, or in the ids of another tokenizer.
    """
    if not Path(run, "train.json").is_file():
        raise UserError(
            f"{run} has no train.json, which says what text it was evaluated on: give the folder of a run"
        )
    config, model_config, known = read_run(run)
    if data is None and config.data not in SOURCES:
        raise UserError(
            f"{run} was trained on {config.data!r}. For safety, paths that are stored in a run are not "
            f"opened: pass the text with {flag}"
        )
    config = replace(config, data=data or config.data)
    has_tokenizer_of_model = config.tokenizer == "auto" and getattr(config, "init_from", None)
    has_named_tokenizer = config.tokenizer not in ("auto", *OURS)
    if has_tokenizer_of_model or has_named_tokenizer:
        tokenizer = str(run)
    else:
        tokenizer = pick_tokenizer(config.preset, config.data, config.tokenizer)
    corpus = open_corpus(config.data, tokenizer, model_config.vocab_size)
    if corpus.fingerprint()["tokenizer"] != known.get("tokenizer"):
        raise UserError(
            f"{config.data} was encoded with a different tokenizer from {run}: name the run's own text with "
            f"{flag}"
        )
    if not other and corpus.fingerprint()["val_sha256"] != known.get("val_sha256"):
        raise UserError(
            f"{config.data} is not the text that {run} was evaluated on: name that text with {flag}"
        )
    return config, model_config, corpus


def validation_windows(run, data=None, other=False):
    """The validation windows that a run was evaluated on. Arguments and errors as those of validation_corpus.

    Returns:
        The settings of the run, its tokenizer, and the Windows.
    """
    config, model_config, corpus = validation_corpus(run, data, other)
    return config, corpus.tokenizer, Windows(corpus.val, model_config.block_size, seed=0)


def validation_text(run, data=None):
    """The validation text of a run as one text, in which ends of documents are predicted like other tokens.

    Args:
        run, data: as validation_corpus.

    Returns:
        Its name, a list of its ids, and its bytes, None if they are not known.
    """
    if not Path(run, "train.json").is_file():
        raise UserError(f"{run} is a model, not a run with a validation text: name a text with --data")
    _, _, corpus = validation_corpus(run, data, flag="--corpus")
    return f"validation text of {run}", [corpus.val], corpus.val_bytes


def own_texts(data, tokenizer):
    """The texts of a file or folder, each after the tokens that texts begin with.

    Returns:
        Their name, a list of the ids of each, and their bytes. The bytes are None if no token stands before a
        text: its first token is then not predicted, so its loss would be missing from the bits per byte.

    Raises:
        UserError: there is no text.
    """
    if is_prepared(data) or (data in SOURCES and not Path(data).exists()):
        raise UserError(
            f"--data {data} is a text to train on, whose validation part can be scored: use --corpus {data}"
        )
    if not Path(data).exists():
        raise UserError(f"--data {data} does not exist: give a text file or a folder of text files")
    notes = defaultdict(list)
    found = [text for _, text in of_files(data, notes=notes)]
    show(notes, data)
    if not found:
        raise UserError(f"--data {data} has no text: give a text file or a folder of text files")
    before = begin_of(tokenizer)
    if not before and tokenizer.end_of_text is not None:
        before = [tokenizer.end_of_text]
    kind = id_type(tokenizer.vocab_size)
    ids = [np.array([*before, *tokenizer.encode(text)], kind) for text in found]
    size = sum(map(len, found)) if before else None
    return data, ids, size
