"""Bytes <-> token ids: raw bytes, BPE trained with rustbpe, GPT-2's, all through tiktoken.

Every tokenizer has

name            bytes, bpe, gpt2, lookup, ids or huggingface
vocab_size      V; ids are below it
padded          whether it may have tokens, like <pad>, that are in no text and in no model
begin           ids before each text
end_of_text     the id behind each text, or None
encode, decode  str or bytes -> ids; ids -> bytes
save            writes a tokenizer.json, which load_tokenizer reads
digest          8 characters that tell it from others

The tokenizer.json beside a Llama is read by huggingface.py.
"""

import base64
import hashlib
import json
import re
from importlib import import_module
from pathlib import Path

import rustbpe
import tiktoken

from runtime import UserError, locate, read_json, write_text

# What a tokenizer of the Hugging Face Hub may consist of.
FILES = ("tokenizer.json", "tokenizer_config.json")
END_OF_TEXT = "<|endoftext|>"
# How GPT-2 cuts a text into words, within which BPE merges.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BLANKS = re.compile(r"(\s{100000})")  # so long a run overflows the stack of the two libraries
INVALID = re.compile("([\udc80-\udcff]+)")  # how surrogateescape writes bytes that are not UTF-8


class Saved:
    """What all tokenizers have in common: a file of JSON, from `fields`."""

    begin, end_of_text = [], None
    padded = False

    def save(self, file):
        write_text(Path(file), json.dumps(self.fields()))

    @property
    def digest(self):
        """Tells tokenizers apart."""
        return hashlib.sha256(json.dumps(self.fields()).encode()).hexdigest()[:8]


class Tokenizer(Saved):
    """Bytes <-> token ids, through a tiktoken.Encoding. Any bytes come back as they were."""

    def __init__(self, name, pattern, tokens):
        """`tokens` are the bytes of token 0, 1, ..; the end-of-text token comes after them."""
        self.name, self.pattern, self.tokens = name, pattern, tokens
        self.end_of_text = len(tokens)
        self.vocab_size = len(tokens) + 1
        ranks = {token: i for i, token in enumerate(tokens)}
        special = {END_OF_TEXT: self.end_of_text}
        self.encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )

    @classmethod
    def bytes(cls):
        """One token a byte."""
        return cls("bytes", r"[\s\S]", [bytes([i]) for i in range(256)])

    @classmethod
    def gpt2(cls):
        """GPT-2's own vocabulary, which tiktoken fetches once."""
        try:
            gpt2 = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken passes on whatever its download raised
            raise UserError(
                f"gpt2's vocabulary could not be fetched ({type(error).__name__}): it needs the "
                "network once; without it take --tokenizer bytes or --tokenizer bpe"
            ) from None
        tokens = [gpt2.decode_single_token_bytes(i) for i in range(gpt2.eot_token)]
        return cls("gpt2", WORDS, tokens)

    @classmethod
    def train(cls, texts, vocab_size):
        """Byte-pair encoding of `texts`, with `vocab_size` tokens, the end of text included."""
        if vocab_size <= 257:  # the 256 bytes, the end of text, and no merge
            raise UserError(f"--vocab-size {vocab_size} is too small for a BPE: give over 257")
        print(f"training a BPE tokenizer of {vocab_size} tokens", flush=True)
        bpe = rustbpe.Tokenizer()
        pieces = (piece for text in texts for piece in BLANKS.split(text))
        bpe.train_from_iterator(pieces, vocab_size - 1, pattern=WORDS)
        ranks = sorted(bpe.get_mergeable_ranks(), key=lambda pair: pair[1])
        return cls("bpe", WORDS, [bytes(token) for token, _ in ranks])

    def encode(self, text):
        """str or bytes -> list of ids. Nothing in a text is taken for a special token."""
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        if self.name == "bytes":
            return list(data)
        ids = []
        # Bytes that are not UTF-8 turn into lone surrogates here, and then into one token each.
        for i, piece in enumerate(INVALID.split(data.decode("utf-8", "surrogateescape"))):
            if i % 2:
                piece = piece.encode("utf-8", "surrogateescape")
                ids += [self.encoding.encode_single_token(bytes([b])) for b in piece]
            else:
                for part in BLANKS.split(piece):
                    ids += self.encoding.encode_ordinary(part)
        return ids

    def decode(self, ids):
        """ids -> bytes. A token may hold part of a character, so turn the whole into str."""
        known = [i for i in map(int, ids) if i < self.vocab_size]  # a model's table may be padded
        return self.encoding.decode_bytes(known)

    def fields(self):
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        return {"name": self.name, "pattern": self.pattern, "tokens": tokens}


class IdTokenizer(Saved):
    """For ids whose vocabulary is not at hand: a text is ids with spaces between them."""

    name = "ids"

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def encode(self, text):
        try:
            return [int(i) for i in text.split()]
        except ValueError:
            raise UserError(f"without a vocabulary give ids, '15 3 7', not {text!r}") from None

    def decode(self, ids):
        return "".join(f" {int(i)}" for i in ids).encode()

    def fields(self):
        return {"name": self.name, "vocab_size": self.vocab_size}


def load_tokenizer(file):
    """What a tokenizer's `save` wrote, or the tokenizer.json of a model of Hugging Face.

    Raises:
        UserError: there is none, or a file that is damaged, or something else.
    """
    file = Path(file)
    if not file.is_file():
        raise UserError(f"{file} is missing: a model has its tokenizer beside it; copy it there")
    try:
        fields = read_json(file)
        if "model" in fields or "tokenizer" in fields:
            return import_module("corpus.huggingface").read_fields(file, fields)
        if fields["name"] == "ids":
            return IdTokenizer(int(fields["vocab_size"]))
        tokens = [base64.b64decode(token) for token in fields["tokens"]]
        if len(set(tokens)) < len(tokens):
            raise ValueError("a token is there twice")
        if not {bytes([i]) for i in range(256)} <= set(tokens):
            raise ValueError("a byte has no token")
        return Tokenizer(fields["name"], fields["pattern"], tokens)
    except UserError as error:
        raise UserError(f"the tokenizer of {file.parent} cannot be used: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a tokenizer that is known here: {error!r}") from None


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
