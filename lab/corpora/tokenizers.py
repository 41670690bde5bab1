"""The tokenizers of data.py, and those of Hugging Face's models, which huggingface.py reads.

A tokenizer of theirs has more: `begin`, ids before each text; `ends`, ids after which the model stops, beside
the end of a text; `encode_prompt`, in which control tokens are one id each; `encode_rest`, of what is not the
beginning of a text; and a chat template.
"""

from importlib import import_module
from pathlib import Path

import data
from data import Tokenizer, UserError, one_line, read_json
from lab.common import locate

# What a tokenizer of the Hugging Face Hub may consist of.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
FILES += ("generation_config.json", "chat_template.jinja")

data.PATTERNS["lookup"] = r" ?[^ ]+| "  # of the lookup task, a word a token


def begin_of(tokenizer):
    """The ids before each text."""
    return getattr(tokenizer, "begin", [])


def ends_of(tokenizer):
    """The ids after which a text is over."""
    return {tokenizer.end_of_text, *getattr(tokenizer, "ends", ())} - {None}


def encode_piece(tokenizer, piece, first):
    """The ids of a piece of a text, which is its first or is not."""
    return (tokenizer.encode if first else getattr(tokenizer, "encode_rest", tokenizer.encode))(piece)


def load_tokenizer(file):
    """What a tokenizer's `save` wrote, or the tokenizer.json of a model of Hugging Face.

    Raises:
        UserError: there is none, or a file that is damaged, or something else.
    """
    file = Path(file)
    if not (file.is_file() and {"model", "tokenizer"} & (fields := read_json(file)).keys()):
        return data.load_tokenizer(file)
    try:
        return import_module("lab.corpora.huggingface").read_fields(file, fields)
    except (UserError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be used: {one_line(error)}") from None


def open_tokenizer(name):
    """'bytes' or 'gpt2'; else the tokenizer of a model: its directory, or its name on the Hub.

    Raises:
        UserError: there is no such model, or it has none.
    """
    if name in ("bytes", "gpt2"):
        return getattr(Tokenizer, name)()
    try:
        directory = locate(name, FILES)
    except UserError as error:
        raise UserError(f"--tokenizer is bytes, bpe, gpt2 or a model: {error}") from None
    return load_tokenizer(directory / "tokenizer.json")
