"""The tokenizers of data.py and those of Hugging Face's models: read both, and write both for transformers.

One of theirs has more: `begin`, ids before each text, and `encode_prompt`, in which control tokens are one id
each. One of ours in their form is read as ours, which is five times as fast.
"""

import json
import re
from itertools import takewhile
from pathlib import Path

import tokenizer
from common import read_json, user_error_if_unreadable, write_json
from lab.common import locate
from tokenizer import PATTERNS, Tokenizer

# What a tokenizer of the Hugging Face Hub may consist of.
FILES = "tokenizer.json", "tokenizer_config.json"
OURS, END = "ponderlm", "<|endoftext|>"  # in the form of others: our name of a tokenizer, its end of text

PATTERNS["lookup"] = r" ?[^ ]+| "  # of the lookup task, a word a token


def begin_of(tokenizer):
    """The ids before each text."""
    return getattr(tokenizer, "begin", [])


def open_tokenizer(name):
    """'bytes' or 'gpt2'; else the tokenizer of a model: its directory, or its name on the Hub.

    Raises:
        UserError: there is no such model, or it has none.
    """
    if name in ("bytes", "gpt2"):
        return Tokenizer.named(name)
    return load_tokenizer(locate(name, FILES) / "tokenizer.json")


def load_tokenizer(file):
    """What a tokenizer's `save` wrote, or the tokenizer.json of a model of Hugging Face.

    Raises:
        UserError: there is none, or a file that is damaged, or something else.
    """
    file = Path(file)
    if not (file.is_file() and {"model", "tokenizer"} & (fields := read_json(file)).keys()):
        return tokenizer.load_tokenizer(file)
    with user_error_if_unreadable(file):
        if "tokenizer" in fields:
            return HuggingFaceTokenizer(fields["tokenizer"], fields["end"])
        beside = file.with_name("tokenizer_config.json")
        settings = read_json(beside) if beside.exists() else {}
        if name := settings.get(OURS):
            vocabulary, byte = fields["model"]["vocab"], byte_characters()
            tokens = [bytes(byte[x] for x in text) for text in sorted(vocabulary, key=vocabulary.get)]
            return Tokenizer(name, tokens)
        end = settings.get("eos_token")
        return HuggingFaceTokenizer(fields, end["content"] if isinstance(end, dict) else end)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face. Encodes text that is UTF-8."""

    name = "huggingface"

    def __init__(self, definition, end=None):
        """`definition`: what tokenizer.json holds; `end`: the text of the end-of-text token."""
        import tokenizers

        try:
            self.library = tokenizers.Tokenizer.from_str(json.dumps(definition))
        except Exception as error:  # the library raises no class of its own
            raise ValueError(error) from None
        self.library.no_truncation()
        self.library.no_padding()
        self.definition, self.end = definition, end
        self.end_of_text = None if end is None else self.library.token_to_id(end)
        probe = self.library.encode("a")
        added = zip(probe.ids, probe.special_tokens_mask, strict=True)
        self.begin = [i for i, special in takewhile(lambda pair: pair[1], added)]
        self.library.encode_special_tokens = True  # nothing in a text is taken for one
        self.tokens = token_bytes(self.library, definition.get("decoder"))
        self.vocab_size = max(self.tokens, default=0) + 1

    def encode(self, text):
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        text = text.encode("utf-8", "replace").decode()  # lone surrogates
        return self.library.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text):
        """As encode, but the model's control tokens, like <|im_start|>, are one id each."""
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
    """The byte that each character of ByteLevel's alphabet stands for: {character: byte}."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]  # these stand for themselves
    others = [b for b in range(256) if b not in visible]  # U+0100, U+0101, .. stand for these
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(others)}


def token_bytes(library, decoder):
    """The bytes of each token of a vocabulary, whose entries are text: {id: bytes}.

    There are two ways to write bytes as text. ByteLevel (GPT-2's) has a character for each byte.
    SentencePiece writes a space as U+2581, or as its decoder says, and a byte outside its alphabet as <0x0A>.
    """
    parts = (decoder or {}).get("decoders", [decoder or {"type": None}])
    kinds = {part["type"] for part in parts}
    space = next((part["replacement"] for part in parts if part["type"] == "Metaspace"), "\u2581")
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise ValueError(f"decoder = {sorted(map(str, kinds))} is not known")
    tokens, byte, added = {}, byte_characters(), library.get_added_tokens_decoder()
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
    """Write what transformers' AutoTokenizer reads: the same ids of any text."""
    theirs = isinstance(tokenizer, HuggingFaceTokenizer)
    definition, end = (tokenizer.definition, tokenizer.end) if theirs else (definition_of(tokenizer), END)
    begin = [tokenizer.library.id_to_token(i) for i in begin_of(tokenizer)[:1]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "bos_token": begin[0] if begin else end,  # as GPT-2: others ask for one
        "pad_token": end,
        "padding_side": "left",  # a text goes on at the right
    }
    if not theirs:  # which has no control tokens, so nothing is taken for one
        settings |= {OURS: tokenizer.name, "split_special_tokens": True}
    write_json(Path(directory, "tokenizer.json"), definition)
    write_json(Path(directory, "tokenizer_config.json"), settings)


def definition_of(tokenizer):
    """A Tokenizer of ours as a tokenizer.json of Hugging Face."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    ranks = {token: i for i, token in enumerate(tokenizer.tokens)}
    character = {byte: text for text, byte in byte_characters().items()}
    text_of = {token: "".join(character[byte] for byte in token) for token in tokenizer.tokens}
    merges = []  # tiktoken joins any two neighbours that are a token together: all such pairs
    for token in tokenizer.tokens:
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(a, b) for a, b in halves if a in ranks and b in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(text_of[a], text_of[b]) for a, b in pairs]
    library = Library(models.BPE({text_of[token]: i for token, i in ranks.items()}, merges))
    words = pre_tokenizers.Split(Regex(tokenizer.pattern), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer, library.decoder = pre_tokenizers.Sequence([words, as_bytes]), decoders.ByteLevel()
    library.add_special_tokens([END])
    return json.loads(library.to_str())
