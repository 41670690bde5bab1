"""The tokenizers of data.py, and those of Hugging Face's models, which huggingface.py reads.

A tokenizer of theirs has more: `begin`, ids before each text; `ends`, ids after which the model stops, beside
the end of a text; `encode_prompt`, in which control tokens are one id each; a chat template; and `padded`,
whether it may have tokens, like <pad>, that are in no text and in no model.
"""

from importlib import import_module
from pathlib import Path

import data
from data import IdTokenizer, Tokenizer
from lab.common import locate
from model import UserError, read_json

# What a tokenizer of the Hugging Face Hub may consist of.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
FILES += ("generation_config.json", "chat_template.jinja")

__all__ = ["FILES", "IdTokenizer", "Tokenizer", "begin_of", "ends_of", "load_tokenizer", "open_tokenizer"]


def begin_of(tokenizer):
    """The ids before each text."""
    return getattr(tokenizer, "begin", [])


def ends_of(tokenizer):
    """The ids after which a text is over."""
    return {tokenizer.end_of_text, *getattr(tokenizer, "ends", ())} - {None}


def load_tokenizer(file):
    """What a tokenizer's `save` wrote, or the tokenizer.json of a model of Hugging Face.

    Raises:
        UserError: there is none, or a file that is damaged, or something else.
    """
    file = Path(file)
    if file.is_file() and {"model", "tokenizer"} & (fields := read_json(file)).keys():
        try:
            return import_module("lab.corpora.huggingface").read_fields(file, fields)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{file} is not a tokenizer that is known here: {error!r}") from None
        except UserError as error:
            raise UserError(f"the tokenizer of {file.parent} cannot be used: {error}") from None
    return data.load_tokenizer(file)


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
