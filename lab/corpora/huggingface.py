"""The tokenizer.json of Hugging Face's models: read it, and write our own tokenizers in that form.

Reading needs the package tokenizers, or transformers. One of ours in that form is read as ours, which is
five times as fast. `load_tokenizer` of tokenizers.py asks for this file when it meets such a tokenizer.json.
"""

import json
import re
from itertools import takewhile
from pathlib import Path

from data import PATTERNS, Tokenizer, UserError, read_json, write_json


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face. Encodes text that is UTF-8."""

    name = "huggingface"

    def __init__(self, definition, end=None, ends=(), chat_template=None):
        """`definition`: what tokenizer.json holds; `end`: the text of the end-of-text token; `ends`: ids of
        all tokens after which the model stops; `chat_template`: kept for transformers."""
        try:
            import tokenizers

            self.library = tokenizers.Tokenizer.from_str(json.dumps(definition))
        except ImportError:
            raise UserError("this model's tokenizer needs: pip install tokenizers") from None
        except Exception as error:  # the library raises no class of its own
            raise UserError(f"tokenizers cannot read its tokenizer.json: {error}") from None
        self.library.no_truncation()
        self.library.no_padding()
        self.definition, self.end, self.chat_template = definition, end, chat_template
        self.end_of_text = None if end is None else self.library.token_to_id(end)
        if end is not None and self.end_of_text is None:
            raise UserError(f"its end of text, {end!r}, is not in its vocabulary")
        probe = self.guarded("a", add_special_tokens=True)
        added = zip(probe.ids, probe.special_tokens_mask, strict=True)
        self.begin = [i for i, special in takewhile(lambda pair: pair[1], added)]
        self.library.encode_special_tokens = True  # nothing in a text is taken for one
        self.tokens = token_bytes(self.library, definition.get("decoder"))
        self.vocab_size = max(self.tokens, default=0) + 1
        if self.vocab_size > 2**20:
            raise UserError(f"its vocabulary of {self.vocab_size:,} ids is beyond 2^20, the most of a model")
        self.ends = [i for i in ends if i in self.tokens and i != self.end_of_text]

    def encode(self, text):
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        text = text.encode("utf-8", "replace").decode()  # lone surrogates
        return self.guarded(text, add_special_tokens=False).ids

    def guarded(self, text, **how):
        """The library's encode. UserError: it fails, also by a panic, which is no Exception."""
        try:
            return self.library.encode(text, **how)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise UserError(f"its tokenizer.json fails on {text[:20]!r}: {error}") from None

    def encode_prompt(self, text):
        """As encode, but the model's control tokens, like <|im_start|>, are one id each."""
        self.library.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self.library.encode_special_tokens = True

    def encode_rest(self, piece):
        """As encode, of a piece behind others of a text: without what SentencePiece puts before a text."""
        if self.encode("a\n") + self.encode("a") == self.encode("a\na"):
            return self.encode(piece)
        before = self.encode("\n")
        return self.encode(b"\n" + piece)[len(before) :]

    def decode(self, ids):
        return b"".join(self.tokens.get(int(i), b"") for i in ids)

    def fields(self):
        return {"name": self.name, "end": self.end, "tokenizer": self.definition}  # what ids depend on

    def save(self, file):
        write_json(file, self.fields() | {"ends": self.ends, "chat_template": self.chat_template})


END_OF_TEXT = "<|endoftext|>"  # of our own


def read_fields(file, fields):
    """What a tokenizer.json holds, Hugging Face's or what `save` wrote -> a tokenizer."""
    if "tokenizer" in fields:
        more = fields.get("ends", ()), fields.get("chat_template")
        return HuggingFaceTokenizer(fields["tokenizer"], fields["end"], *more)
    if ours := one_of_ours(fields):
        return ours

    def beside(*names):
        return [read_json(place) for place in map(file.with_name, names) if place.is_file()]

    settings = beside("tokenizer_config.json", "special_tokens_map.json")
    end = next((end for end in (said.get("eos_token") for said in settings) if end), None)
    stops = (said.get("eos_token_id") for said in beside("generation_config.json", "config.json"))
    stops = next((stop for stop in stops if stop is not None), [])
    template = next((said["chat_template"] for said in settings if said.get("chat_template")), None)
    if (place := file.with_name("chat_template.jinja")).is_file():
        template = place.read_text("utf-8")
    ends = stops if isinstance(stops, list) else [stops]
    return HuggingFaceTokenizer(fields, end["content"] if isinstance(end, dict) else end, ends, template)


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
        raise UserError(f"its tokenizer.json has an unknown decoder, {sorted(map(str, kinds))}")
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


def save_pretrained(tokenizer, directory):
    """Write what transformers' AutoTokenizer reads: the same ids of any text.

    tokenizer: one of text, that is a HuggingFaceTokenizer or a Tokenizer.
    """
    theirs = isinstance(tokenizer, HuggingFaceTokenizer)
    if theirs:
        definition, end, begin = tokenizer.definition, tokenizer.end, tokenizer.begin
        begin = tokenizer.library.id_to_token(begin[0]) if begin else None
    else:
        definition, end, begin = definition_of(tokenizer), END_OF_TEXT, None
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "bos_token": begin or end,  # as GPT-2: others ask for one
        "pad_token": end,
        "padding_side": "left",  # a text goes on at the right
        "split_special_tokens": not theirs,  # ours has no control tokens, so nothing is taken for one
    }
    if theirs and tokenizer.chat_template:
        settings["chat_template"] = tokenizer.chat_template
    write_json(Path(directory, "tokenizer.json"), definition)
    write_json(Path(directory, "tokenizer_config.json"), settings)


def definition_of(tokenizer):
    """A Tokenizer of ours as a tokenizer.json of Hugging Face."""
    ranks = {token: i for i, token in enumerate(tokenizer.tokens)}
    character = {byte: text for text, byte in byte_characters().items()}
    text_of = {token: "".join(character[byte] for byte in token) for token in tokenizer.tokens}
    merges = []  # tiktoken joins any two neighbours that are a token together: all such pairs
    for token in tokenizer.tokens:
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(a, b) for a, b in halves if a in ranks and b in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [[text_of[a], text_of[b]] for a, b in pairs]
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    words = {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated"}
    cuts = [words | {"invert": False}, levels | {"use_regex": False}]
    end = {"id": tokenizer.end_of_text, "content": END_OF_TEXT, "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
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


def one_of_ours(definition):
    """The Tokenizer whose definition_of this is; None: there is none."""
    try:
        pattern = definition["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        vocabulary, byte = definition["model"]["vocab"], byte_characters()
        tokens = [bytes(byte[x] for x in text) for text in sorted(vocabulary, key=vocabulary.get)]
        name = next(name for name, known in PATTERNS.items() if known == pattern)
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration):
        return None
    found = Tokenizer("gpt2" if name == "bpe" and len(tokens) == 50_256 else name, pattern, tokens)
    return found if definition_of(found) == definition else None
