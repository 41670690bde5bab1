"""Bytes <-> token ids: raw bytes, BPE trained with rustbpe, GPT-2's, all used through tiktoken;
and the tokenizer.json beside a Llama, through Hugging Face's tokenizers.

Every tokenizer has

name            bytes, bpe, gpt2, lookup, ids or huggingface
vocab_size      V; ids are below it
padded          whether it may have tokens, like <pad>, that are in no text and in no model
begin           ids before each text
end_of_text     the id behind each text, or None
encode, decode  str or bytes -> ids; ids -> bytes
save            writes a tokenizer.json, which load_tokenizer reads
digest          8 characters that tell it from others
"""

import base64
import hashlib
import json
import re
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import rustbpe
import tiktoken
from pydantic import Field
from typing_extensions import TypedDict

from runtime import UserError, locate, read_json, write_json, write_text

# What a tokenizer of the Hugging Face Hub may consist of.
FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
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
        check_bpe_size(vocab_size)
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

    def save_pretrained(self, directory):
        """As Hugging Face has it, for transformers' AutoTokenizer: the same ids of any text."""
        ranks = {token: i for i, token in enumerate(self.tokens)}
        character = {byte: text for text, byte in byte_characters().items()}
        text_of = {token: "".join(character[byte] for byte in token) for token in self.tokens}
        # tiktoken joins any two neighbours that are a token together, so all such pairs are merges.
        pairs = [
            sorted((ranks[a], ranks[b]) for a, b in halves(token) if a in ranks and b in ranks)
            for token in self.tokens
        ]
        merges = [[text_of[self.tokens[i]] for i in pair] for of in pairs for pair in of]
        levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
        words = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated"}
        cuts = [words | {"invert": False}, levels | {"use_regex": False}]
        end = {"id": self.end_of_text, "content": END_OF_TEXT, "special": True}
        end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        definition = {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
            "decoder": levels,
            "model": {
                "type": "BPE",
                "vocab": {text_of[token]: i for token, i in ranks.items()},
                "merges": merges,
            },
        }
        write_pretrained(directory, definition, END_OF_TEXT)


def halves(token):
    """All ways to cut a token's bytes in two."""
    return [(token[:i], token[i:]) for i in range(1, len(token))]


def write_pretrained(directory, definition, end, begin=None):
    """tokenizer.json and tokenizer_config.json: what AutoTokenizer reads."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "bos_token": begin,
        "pad_token": end,
        "padding_side": "left",  # a text goes on at the right
        "split_special_tokens": True,  # nothing in a text is taken for one
    }
    write_json(Path(directory, "tokenizer.json"), definition)
    write_json(Path(directory, "tokenizer_config.json"), settings)


def check_bpe_size(vocab_size):
    """Refuse a BPE without a merge: the 256 bytes and the end of text are 257 tokens."""
    if vocab_size <= 257:
        raise UserError(f"a BPE of {vocab_size} tokens is too small: --vocab-size must be over 257")


class Ids(TypedDict):
    vocab_size: Annotated[int, Field(ge=1, le=2**20)]


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


class HuggingFaceTokenizer(Saved):
    """A tokenizer.json of Hugging Face. Encodes text that is UTF-8."""

    name, padded = "huggingface", True

    def __init__(self, definition, end=None):
        """`definition`: what tokenizer.json holds; `end`: the text of the end-of-text token."""
        try:
            import tokenizers

            self.library = tokenizers.Tokenizer.from_str(json.dumps(definition))
        except ImportError:
            raise UserError("this model's tokenizer needs: pip install tokenizers") from None
        except Exception as error:  # the library raises no class of its own
            raise UserError(f"tokenizers cannot read its tokenizer.json: {error}") from None
        self.library.no_truncation()
        self.library.no_padding()
        self.definition, self.end = definition, end
        self.end_of_text = None if end is None else self.library.token_to_id(end)
        if end is not None and self.end_of_text is None:
            raise UserError(f"its end of text, {end!r}, is not in its vocabulary")
        probe = self.library.encode("a")
        added = zip(probe.ids, probe.special_tokens_mask, strict=True)
        self.begin = [i for i, special in takewhile(lambda pair: pair[1], added)]
        self.library.encode_special_tokens = True  # nothing in a text is taken for one
        self.tokens = token_bytes(self.library, definition.get("decoder"))
        self.vocab_size = len(self.tokens)

    def encode(self, text):
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        text = text.encode("utf-8", "replace").decode()  # lone surrogates
        return self.library.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return b"".join(self.tokens[i] for i in map(int, ids) if i < self.vocab_size)

    def fields(self):
        return {"name": self.name, "end": self.end, "tokenizer": self.definition}

    def save_pretrained(self, directory):
        """As Hugging Face has it: what transformers' AutoTokenizer loads."""
        begin = self.library.id_to_token(self.begin[0]) if self.begin else None
        write_pretrained(directory, self.definition, self.end, begin)


def byte_characters():
    """The byte that each character of ByteLevel's alphabet stands for: {character: byte}."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]  # these stand for themselves
    others = [b for b in range(256) if b not in visible]  # U+0100, U+0101, .. stand for these
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(others)}


def token_bytes(library, decoder):
    """The bytes of each token of a Hugging Face vocabulary, whose entries are text.

    There are two ways to write bytes as text. ByteLevel (GPT-2's) has a character for each byte.
    SentencePiece writes a space as U+2581, and a byte outside its alphabet as <0x0A>.
    """
    vocabulary = library.get_vocab(with_added_tokens=True)
    added = library.get_added_tokens_decoder()
    if (largest := max(vocabulary.values(), default=0)) >= 2**24:
        raise UserError(f"its tokenizer.json has a token {largest}: no table is so large")
    tokens = [b""] * (largest + 1)
    kinds = {part["type"] for part in (decoder or {}).get("decoders", [decoder or {"type": None}])}
    byte = byte_characters()
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise UserError(f"its tokenizer.json has an unknown decoder, {sorted(map(str, kinds))}")
    for text, i in vocabulary.items():
        if i in added:
            tokens[i] = added[i].content.encode()
        elif "ByteLevel" in kinds:
            tokens[i] = bytes(byte[character] for character in text)
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            tokens[i] = bytes([int(text[3:5], 16)])
        else:
            tokens[i] = text.replace("\u2581", " ").encode()
    return tokens


def end_of_text_beside(file, added_tokens):
    """The end-of-text token that the files beside a Hugging Face tokenizer.json name, or None."""
    settings, config = file.with_name("tokenizer_config.json"), file.with_name("config.json")
    end = read_json(settings).get("eos_token") if settings.is_file() else None
    if end is None and config.is_file():
        i = read_json(config).get("eos_token_id")
        i = i[0] if isinstance(i, list) else i
        return next((token["content"] for token in added_tokens if token["id"] == i), None)
    return end["content"] if isinstance(end, dict) else end


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
        if "model" in fields and "name" not in fields:
            end = end_of_text_beside(file, fields.get("added_tokens") or [])
            return HuggingFaceTokenizer(fields, end)
        if fields["name"] == HuggingFaceTokenizer.name:
            return HuggingFaceTokenizer(fields["tokenizer"], fields["end"])
        if fields["name"] == IdTokenizer.name:
            return IdTokenizer(read_json(file, Ids)["vocab_size"])
        if fields["name"] == "chars":
            raise UserError("character vocabularies are no longer read; prepare the text again")
        tokens = [base64.b64decode(token) for token in fields["tokens"]]
        if len(set(tokens)) < len(tokens):
            raise ValueError("a token is there twice")
        if not {bytes([i]) for i in range(256)} <= set(tokens):
            raise ValueError("a byte has no token")
        return Tokenizer(fields["name"], fields["pattern"], tokens)
    except UserError as error:
        raise UserError(f"the tokenizer of {file.parent} cannot be used: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
