"""Reads the tokenizers of Hugging Face's models as well as ours, and writes both in the form that
transformers reads.

A tokenizer of Hugging Face has more than ours: `begin`, the ids before each text, and `encode_prompt`, in
which each control token is one id. One of ours that was written in their form is read as ours, which is five
times as fast.
"""

import json
import re
from itertools import takewhile
from pathlib import Path

import tokenizer
from common import UserError, read_json, user_error_if_unreadable, write_json
from lab.common import locate
from tokenizer import PATTERNS, Tokenizer

# The files of a tokenizer on the Hugging Face Hub that are read.
FILES = "tokenizer.json", "tokenizer_config.json"
NAME_FIELD = "ponderlm"  # the field of tokenizer_config.json with the name of a tokenizer of ours
END = "<|endoftext|>"  # the end of text of our tokenizers, in the form of Hugging Face

PATTERNS["lookup"] = r" ?[^ ]+| "  # words of the lookup task, one token each


def begin_of(tokenizer):
    """The ids before each text, a list."""
    return getattr(tokenizer, "begin", [])


def open_tokenizer(name):
    """A tokenizer by its name: "bytes", "gpt2", or that of a model or corpus, by its directory or its name on
    the Hub.

    Raises:
        UserError: there is no such model, or it has no tokenizer.
    """
    if name in ("bytes", "gpt2"):
        return Tokenizer.named(name)
    choice = "use bytes, bpe, gpt2, or the directory of a model or corpus that has a tokenizer.json"
    if "/" not in str(name) and not Path(name).exists():  # with a slash it may be on the Hub
        raise UserError(f"--tokenizer {name} does not exist: {choice}")
    file = locate(name, FILES) / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"--tokenizer {name} has no tokenizer.json: {choice}")
    return load_tokenizer(file)


def load_tokenizer(file):
    """Read a tokenizer.json: one that Tokenizer.save wrote, or that of a Hugging Face model.

    Raises:
        UserError: the file is missing, damaged, or not a tokenizer.
    """
    file = Path(file)
    fields = read_json(file) if file.is_file() else {}
    # With the field `model` it is Hugging Face's; with `tokenizer`, one that HuggingFaceTokenizer.save wrote;
    # otherwise it is ours.
    if not {"model", "tokenizer"} & fields.keys():
        return tokenizer.load_tokenizer(file)
    with user_error_if_unreadable(file):
        if "tokenizer" in fields:
            return HuggingFaceTokenizer(fields["tokenizer"], fields["end"])
        beside = file.with_name("tokenizer_config.json")
        settings = read_json(beside) if beside.exists() else {}
        name = settings.get(NAME_FIELD)
        if name:
            vocabulary = fields["model"]["vocab"]
            byte = byte_characters()
            tokens = []
            for text in sorted(vocabulary, key=vocabulary.get):
                tokens.append(bytes(byte[character] for character in text))
            return Tokenizer(name, tokens)
        end = settings.get("eos_token")
        if isinstance(end, dict):
            end = end["content"]
        return HuggingFaceTokenizer(fields, end)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face. It encodes text that is UTF-8.

    Args:
        definition: the content of tokenizer.json.
        end: the text of the end-of-text token.

    Raises:
        ValueError: the definition is damaged, or of an unknown kind.
    """

    name = "huggingface"

    def __init__(self, definition, end=None):
        import tokenizers

        try:
            self.library = tokenizers.Tokenizer.from_str(json.dumps(definition))
        except Exception as error:  # the library raises no class of its own
            raise ValueError(error) from None
        self.library.no_truncation()
        self.library.no_padding()
        self.definition = definition
        self.end = end
        self.end_of_text = None if end is None else self.library.token_to_id(end)
        probe = self.library.encode("a")
        added = zip(probe.ids, probe.special_tokens_mask, strict=True)
        self.begin = [i for i, special in takewhile(lambda pair: pair[1], added)]
        self.library.encode_special_tokens = True  # no part of a text is taken for a control token
        self.tokens = token_bytes(self.library, definition.get("decoder"))
        self.vocab_size = max(self.tokens, default=0) + 1

    def encode(self, text):
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        text = text.encode("utf-8", "replace").decode()  # without lone surrogates
        return self.library.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text):
        """As encode, but each control token of the model, such as <|im_start|>, is one id."""
        self.library.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self.library.encode_special_tokens = True

    def decode(self, ids):
        return b"".join(self.tokens.get(int(i), b"") for i in ids)

    def fields(self):
        return {"name": self.name, "end": self.end, "tokenizer": self.definition}

    def save(self, file):
        write_json(file, self.fields())


def byte_characters():
    """ByteLevel's alphabet, {character: byte}: visible characters stand for themselves, and U+0100, U+0101,
    .. for the other bytes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    for i, byte in enumerate(others):
        alphabet[chr(256 + i)] = byte
    return alphabet


def token_bytes(library, decoder):
    """The bytes of each token of a vocabulary, {id: bytes}.

    A vocabulary has texts, and there are two ways to write bytes as text. ByteLevel, which is GPT-2's, has a
    character for each byte. SentencePiece writes a space as U+2581, or as its decoder says, and a byte
    outside its alphabet as, for instance, <0x0A>.

    Args:
        library: a tokenizers.Tokenizer.
        decoder: the decoder of its definition.

    Raises:
        ValueError: the decoder is neither.
    """
    decoder = decoder or {"type": None}
    parts = decoder.get("decoders", [decoder])
    kinds = {part["type"] for part in parts}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        found = ", ".join(sorted(map(str, kinds)))
        raise ValueError(
            f"the tokenizer's decoder {found} is not supported (only ByteLevel, ByteFallback and Metaspace "
            "are): use another --tokenizer"
        )
    space = "\u2581"
    metaspaces = [part for part in parts if part["type"] == "Metaspace"]
    if metaspaces:
        space = metaspaces[0]["replacement"]
    tokens = {}
    byte = byte_characters()
    added = library.get_added_tokens_decoder()
    for text, i in library.get_vocab(with_added_tokens=True).items():
        if i in added:
            tokens[i] = added[i].content.encode()
        elif "ByteLevel" in kinds:
            tokens[i] = bytes(byte[character] for character in text)
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            tokens[i] = bytes([int(text[3:5], 16)])
        else:
            tokens[i] = text.replace(space, " ").encode()
    return tokens


# -- For transformers ------------------------------------------------------------------------------


def save_pretrained(tokenizer, directory):
    """Write a tokenizer so that transformers' AutoTokenizer reads it, and gives the same ids for any text
    without 500 blanks in a row, which our BPE cuts (tokenizer.LONG_WHITESPACE)."""
    theirs = isinstance(tokenizer, HuggingFaceTokenizer)
    if theirs:
        definition = tokenizer.definition
        end = tokenizer.end
    else:
        definition = definition_of(tokenizer)
        end = END
    begin = begin_of(tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        # Programs ask for one. Without any it is the end of text, as in GPT-2.
        "bos_token": tokenizer.library.id_to_token(begin[0]) if begin else end,
        "pad_token": end,
        "padding_side": "left",  # generated text follows on the right
    }
    if not theirs:
        settings[NAME_FIELD] = tokenizer.name
        settings["split_special_tokens"] = True  # it has no control tokens: no text is taken for one
    write_json(Path(directory, "tokenizer.json"), definition)
    write_json(Path(directory, "tokenizer_config.json"), settings)


def definition_of(tokenizer):
    """The content of a tokenizer.json of Hugging Face for a Tokenizer of ours."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    ranks = {token: i for i, token in enumerate(tokenizer.tokens)}
    character = {byte: text for text, byte in byte_characters().items()}
    text_of = {}
    for token in tokenizer.tokens:
        text_of[token] = "".join(character[byte] for byte in token)
    # tiktoken merges any two neighbours whose concatenation is a token, the token of the lowest rank first.
    # So each split of a token into two tokens is a merge here, in the order of the tokens that they make.
    merges = []
    for token in tokenizer.tokens:
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(a, b) for a, b in halves if a in ranks and b in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))  # as transformers does
        merges += [(text_of[a], text_of[b]) for a, b in pairs]
    vocabulary = {text_of[token]: i for token, i in ranks.items()}
    # A word that is a token is that token, even where no merges lead to it; tiktoken does the same.
    library = Library(models.BPE(vocabulary, merges, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(tokenizer.pattern), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END])
    return json.loads(library.to_str())
