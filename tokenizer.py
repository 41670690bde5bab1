"""Bytes <-> token ids: raw bytes, BPE trained with rustbpe, GPT-2's, all used through tiktoken.

A tokenizer has `vocab_size`, `end_of_text` (an id, or None), `encode`, `decode` and `save`.
"""

import base64
import json
import re
from pathlib import Path

import tiktoken

END_OF_TEXT = "<|endoftext|>"
# How GPT-2 cuts a text into words, within which BPE merges.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
EACH = r"[\s\S]"  # every character by itself
INVALID = re.compile("([\udc80-\udcff]+)")  # how surrogateescape writes bytes that are not UTF-8


class DataError(ValueError):
    """The text or its tokens cannot be used; the message says why and what to do."""


class Tokenizer:
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
        return cls("bytes", EACH, [bytes([i]) for i in range(256)])

    @classmethod
    def gpt2(cls):
        """GPT-2's own vocabulary, which tiktoken fetches once."""
        try:
            gpt2 = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken passes on whatever its download raised
            raise DataError(
                f"gpt2's vocabulary could not be fetched ({type(error).__name__}): it needs the "
                "network once; without it take --tokenizer bytes or --tokenizer bpe"
            ) from None
        tokens = [gpt2.decode_single_token_bytes(i) for i in range(gpt2.eot_token)]
        return cls("gpt2", WORDS, tokens)

    @classmethod
    def train(cls, texts, vocab_size):
        """Byte-pair encoding of `texts`, with `vocab_size` tokens, the end of text included."""
        import rustbpe

        check_bpe_size(vocab_size)
        bpe = rustbpe.Tokenizer()
        bpe.train_from_iterator(iter(texts), vocab_size - 1, pattern=WORDS)
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
                ids += self.encoding.encode_ordinary(piece)
        return ids

    def decode(self, ids):
        """ids -> bytes. A token may hold part of a character, so turn the whole into str."""
        known = [i for i in map(int, ids) if i < self.vocab_size]  # a model's table may be padded
        return self.encoding.decode_bytes(known)

    def save(self, file):
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        fields = {"name": self.name, "pattern": self.pattern, "tokens": tokens}
        Path(file).write_text(json.dumps(fields), encoding="utf-8")


def check_bpe_size(vocab_size):
    if vocab_size <= 257:
        raise DataError(
            f"a BPE of {vocab_size} tokens has no merge: 256 bytes and the end of text take 257; "
            "give more, for instance --vocab-size 1024"
        )


class CharTokenizer(Tokenizer):
    """nanoGPT's character vocabulary (its meta.pkl): encodes only characters that it knows."""

    def __init__(self, characters):
        super().__init__("chars", EACH, [c.encode() for c in characters])
        self.vocab_size = len(characters)  # such a corpus has no end of text
        self.end_of_text = None

    def encode(self, text):
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        unknown = sorted({c for c in text if c.encode("utf-8", "replace") not in self.tokens})
        if unknown:
            raise DataError(f"the text has characters that the vocabulary lacks: {unknown[:10]}")
        return super().encode(text)


class IdTokenizer:
    """For ids whose vocabulary is not at hand: a text is ids with spaces between them."""

    name, end_of_text = "ids", None

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def encode(self, text):
        try:
            return [int(i) for i in text.split()]
        except ValueError:
            raise DataError(
                f"this model has no vocabulary: give ids, '15 3 7', not {text!r}"
            ) from None

    def decode(self, ids):
        return "".join(f" {int(i)}" for i in ids).encode()

    def save(self, file):
        fields = {"name": self.name, "vocab_size": self.vocab_size}
        Path(file).write_text(json.dumps(fields), encoding="utf-8")


def load_tokenizer(file):
    """What a tokenizer's `save` wrote.

    Raises:
        DataError: a file that is missing, damaged, or something else.
    """
    try:
        fields = json.loads(Path(file).read_text(encoding="utf-8"))
        if fields["name"] == "ids":
            return IdTokenizer(fields["vocab_size"])
        tokens = [base64.b64decode(token) for token in fields["tokens"]]
        if fields["name"] == "chars":
            return CharTokenizer([token.decode() for token in tokens])
        return Tokenizer(fields["name"], fields["pattern"], tokens)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is not a tokenizer of this program: {error!r}") from None
