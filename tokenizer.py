"""Tokenizers: bytes <-> token ids, as single bytes, as a BPE that is trained here, or as GPT-2's."""

import base64
import hashlib
import json
import math
import re
import time
from collections import Counter, defaultdict
from heapq import heapify, heappop, heappush
from itertools import pairwise

import regex
import tiktoken

from common import UserError, atomic_write, progress, read_json, user_error_if_unreadable

# How GPT-2 splits a text into words, the pieces within which a BPE merges. In the order of the alternatives:
GPT2_SPLIT_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)"  # an English contraction: 's, 'd, 'm, 't, 'll, 've, 're
    r"| ?\p{L}+"  # letters, with the one space before them
    r"| ?\p{N}+"  # digits, likewise
    r"| ?[^\s\p{L}\p{N}]+"  # other symbols, likewise
    r"|\s+(?!\S)"  # white space; if text follows, the last blank is left for the word after it
    r"|\s+"  # what is left: one blank before text that cannot take it, such as a line break
)
# The tokenizers that a file may name. No other pattern is run, because a regular expression can take for
# ever.
PATTERNS = {"bytes": r"[\s\S]", "bpe": GPT2_SPLIT_PATTERN, "gpt2": GPT2_SPLIT_PATTERN}
# tiktoken takes quadratic time in the length of a run of blanks, and a very long run overflows its stack. So
# long runs are cut. The look-behind lets the search begin at the first blank of a run only.
LONG_WHITESPACE = re.compile(r"((?<!\s)\s{500,})")
WHITESPACE_PIECE = 500
NOT_UTF8 = re.compile("([\udc80-\udcff]+)")  # how the error handler surrogateescape writes such bytes

SINGLE_BYTES = [bytes([i]) for i in range(256)]
BPE_TRAINING_BYTES = 10**7  # a BPE is trained on about that much text
BPE_VOCAB_SIZE = 4096  # of a BPE, if no size is given


class Tokenizer:
    """Bytes <-> token ids. Decoding what was encoded returns the same bytes, whatever they are."""

    def __init__(self, name, tokens):
        """
        Args:
            name: 'bytes', 'bpe' or 'gpt2'.
            tokens: the bytes of token 0, 1, .. The end-of-text token comes after them.
        """
        self.name = name
        self.pattern = PATTERNS[name]
        self.tokens = tokens
        self.end_of_text = len(tokens)
        self.vocab_size = len(tokens) + 1
        self.encoding = tiktoken.Encoding(
            name,
            pat_str=self.pattern,
            mergeable_ranks={token: i for i, token in enumerate(tokens)},
            special_tokens={"<|endoftext|>": self.end_of_text},
        )

    @classmethod
    def named(cls, name):
        """The tokenizer 'bytes', with one token per byte, or 'gpt2', which tiktoken downloads once.

        Raises:
            UserError: the download failed.
        """
        if name == "bytes":
            return cls("bytes", SINGLE_BYTES)
        try:
            gpt2 = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken passes on whatever its download raised
            raise UserError(
                f"the vocabulary of gpt2 could not be downloaded ({type(error).__name__}): connect to the "
                "network once, or use --tokenizer bytes or --tokenizer bpe"
            ) from None
        return cls("gpt2", [gpt2.decode_single_token_bytes(i) for i in range(gpt2.eot_token)])

    @classmethod
    def train(cls, texts, vocab_size):
        """Train a BPE.

        Args:
            texts: a list of bytes. If they are longer than BPE_TRAINING_BYTES, every n-th piece is used.
            vocab_size: number of tokens, the end-of-text token included.

        Raises:
            UserError: the vocabulary is too small.
        """
        check_bpe_size(vocab_size)
        pieces = []
        for text in texts:
            pieces.extend(pieces_of(text))
        total_bytes = sum(len(text) for text in texts)
        every = max(1, math.ceil(total_bytes / BPE_TRAINING_BYTES))
        words = Counter()
        for piece in pieces[::every]:
            words.update(regex.findall(GPT2_SPLIT_PATTERN, piece.decode("utf-8", "ignore")))
        return cls("bpe", merge_pairs(words, vocab_size - 1))

    def encode(self, text):
        """str or bytes -> a list of ids. A text's own "<|endoftext|>" is encoded as ordinary characters."""
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        if self.name == "bytes":
            return list(data)
        ids = []
        parts = NOT_UTF8.split(data.decode("utf-8", "surrogateescape"))
        for i, part in enumerate(parts):
            if i % 2 == 0:  # text; split() returns it at even places, and what matched at odd ones
                ids.extend(self.encode_text(part))
            else:  # bytes that are not UTF-8: one token each
                for byte in part.encode("utf-8", "surrogateescape"):
                    ids.append(self.encoding.encode_single_token(bytes([byte])))
        return ids

    def encode_text(self, text):
        """str -> a list of ids, in time that is linear in the length of the text."""
        ids = []
        for i, part in enumerate(LONG_WHITESPACE.split(text)):
            if i % 2 == 0:
                ids.extend(self.encoding.encode_ordinary(part))
            else:
                for start in range(0, len(part), WHITESPACE_PIECE):
                    ids.extend(self.encoding.encode_ordinary(part[start : start + WHITESPACE_PIECE]))
        return ids

    def decode(self, ids):
        """ids -> bytes. A token may end within a character, so decode to str only at the end."""
        # Larger ids are possible: the model's vocabulary is padded.
        known = [int(i) for i in ids if int(i) < self.vocab_size]
        return self.encoding.decode_bytes(known)

    def fields(self):
        """What tokenizer.json holds."""
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        return {"name": self.name, "pattern": self.pattern, "tokens": tokens}

    def save(self, file):
        text = json.dumps(self.fields())
        atomic_write(file, lambda temporary: temporary.write_text(text))

    @property
    def digest(self):
        """8 hexadecimal digits that identify the tokenizer."""
        return hashlib.sha256(json.dumps(self.fields()).encode()).hexdigest()[:8]


def check_bpe_size(vocab_size):
    """
    Raises:
        UserError: the vocabulary is too small for a BPE.
    """
    if vocab_size <= 257:  # the 256 bytes, the end of a text, and no merge
        raise UserError(f"--vocab-size {vocab_size} is too small for a BPE: use more than 257")


def load_tokenizer(file):
    """Read what `Tokenizer.save` wrote.

    Raises:
        UserError: the file is missing, damaged, or holds something else.
    """
    fields = read_json(file)
    with user_error_if_unreadable(file, ": restore the file, or prepare the text or train the model again"):
        name = fields.get("name")
        if name not in PATTERNS:
            raise UserError(
                f"{file} is not a tokenizer that train.py or data.py wrote: python -m lab reads others"
            )
        if fields["pattern"] != PATTERNS[name]:
            raise ValueError(f"its pattern is not that of {name}")
        tokens = [base64.b64decode(token, validate=True) for token in fields["tokens"]]
        if len(set(tokens)) < len(tokens) or b"" in tokens:
            raise ValueError("a token is empty or occurs twice")
        if not set(SINGLE_BYTES) <= set(tokens):
            raise ValueError("its vocabulary does not contain every single byte")
        if name == "bytes" and tokens != SINGLE_BYTES:
            raise ValueError("in a bytes tokenizer, token i must be byte i")
        return Tokenizer(name, tokens)


def pieces_of(text):
    """Split bytes into pieces of at most 1 MB, after a line break where there is one."""
    start = 0
    while start < len(text):
        end = min(start + 10**6, len(text))
        if end < len(text):
            after_line = text.rfind(b"\n", start, end) + 1  # 0 if there is no line break
            end = after_line or end
        yield text[start:end]
        start = end


# -- Byte-pair encoding ----------------------------------------------------------------------------


def merge_pairs(words, size):
    """Byte-pair encoding (Sennrich et al., arXiv 1508.07909).

    At first every byte is a token. Then, again and again, the most frequent pair of neighbouring tokens
    within words becomes a new token. Among equally frequent pairs, the one with the smallest ids comes
    first.

    Args:
        words: {word: how often it occurs}.
        size: number of tokens wanted. There will be fewer if nothing is left to merge.

    Returns:
        The bytes of each token, a list.
    """
    tokens = list(SINGLE_BYTES)
    pairs = PairCounts(words)
    show = progress(f"training a BPE of {size + 1} tokens")
    begin = time.monotonic()
    while len(tokens) < size:
        pair = pairs.pop_most_frequent()
        if pair is None:
            break
        a, b = pair
        pairs.merge(a, b, new=len(tokens))
        tokens.append(tokens[a] + tokens[b])
        show(len(tokens) / size)
        merges = len(tokens) - 256
        if merges == 16:
            warn_if_slow((time.monotonic() - begin) / merges * (size - len(tokens)))
    return tokens


def warn_if_slow(seconds):
    if seconds > 120:
        print(
            f"note: this may take up to {seconds / 60:,.0f} minutes, because few words of the text repeat. A "
            "smaller --vocab-size takes less time, and so does --tokenizer bytes",
            flush=True,
        )


class PairCounts:
    """How often each pair of neighbouring tokens occurs in a text, which is given as counted words."""

    def __init__(self, words):
        self.words = [list(word.encode()) for word in words]  # each as token ids
        self.times = list(words.values())  # how often each word occurs
        self.counts = Counter()  # of each pair of ids
        self.words_with = defaultdict(set)  # indices of the words that have, or once had, each pair
        for i in range(len(self.words)):
            self.add_word(i)
        # A lazy heap: its entries (-count, pair) are not updated when a count falls, but when they are
        # popped. A count never rises after it was pushed, so no pair is more frequent than its entry says.
        self.heap = [(-count, pair) for pair, count in self.counts.items()]
        heapify(self.heap)

    def add_word(self, i):
        for pair in pairwise(self.words[i]):
            self.counts[pair] += self.times[i]
            self.words_with[pair].add(i)

    def remove_word(self, i):
        for pair in pairwise(self.words[i]):
            self.counts[pair] -= self.times[i]

    def pop_most_frequent(self):
        """The most frequent pair of ids, or None if no pair is left."""
        while self.heap:
            negative_count, pair = heappop(self.heap)
            count = self.counts[pair]
            if count == 0:
                continue
            if count == -negative_count:
                return pair
            heappush(self.heap, (-count, pair))  # a stale entry: push it back with its current count
        return None

    def merge(self, a, b, new):
        """Replace every a that is followed by b with the token `new`."""
        made = set()  # pairs that come into being
        for i in self.words_with.pop((a, b)):
            self.remove_word(i)
            self.words[i] = merged(self.words[i], a, b, new)
            self.add_word(i)
            for pair in pairwise(self.words[i]):
                if new in pair:
                    made.add(pair)
        for pair in made:
            heappush(self.heap, (-self.counts[pair], pair))


def merged(ids, a, b, new):
    """Replace, from the left, each a that is followed by b. A list of ids -> a list of ids."""
    result = []
    for x in ids:
        if x == b and result and result[-1] == a:
            result[-1] = new
        else:
            result.append(x)
    return result
