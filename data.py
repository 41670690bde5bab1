"""Text -> token ids -> batches of windows.

    Tokenizer        bytes <-> token ids: single bytes, a BPE that is trained here, or GPT-2's
    open_corpus      a text, a folder or the default corpus -> Corpus; prepared once, then kept in data/
    Corpus           the ids of training and of validation, and the tokenizer that made them
    Windows          ids -> batches of windows, a function of seed and step

    tokens, ids      arrays of token ids, memory-mapped uint16 (uint32 beyond 65,536 tokens)
    documents        [(name, bytes)], of which some are held out for validation
    T                the window, in tokens; a row of a batch has T+1, the last one only as a target

A prepared folder holds

    train.bin, val.bin    token ids, one after the other, in nanoGPT's format
    tokenizer.json        name, pattern and the bytes of each token
    meta.json             where the text came from, its size, and the type of the ids

A folder of nanoGPT, which has only the first two, is taken as it is: its ids are GPT-2's.

    python data.py FILE      prepare a text and show what is in it; train.py does the first by itself
"""

import ast
import base64
import gc
import hashlib
import json
import re
import sys
import sysconfig
import tempfile
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import regex
import tiktoken
import torch

from model import UserError, command_line, read_json, write_json, write_whole

# How GPT-2 cuts a text into words, within which BPE merges.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The tokenizers that a file may hold. No other pattern is run: a regular expression can take for ever.
PATTERNS = {"bytes": r"[\s\S]", "bpe": WORDS, "gpt2": WORDS, "lookup": r" ?[^ ]+| "}
BLANKS = re.compile(r"(\s{100000})")  # so long a run overflows tiktoken's stack
INVALID = re.compile("([\udc80-\udcff]+)")  # how surrogateescape writes bytes that are not UTF-8

PACKAGES = ("numpy", "torch", "matplotlib", "sympy", "networkx")  # of pydocs; torch brings the last two
NO_TEXT = (".json", ".jsonl", ".csv", ".parquet")  # data with a structure, which is not to be learned
MOST = 10**7  # bytes that a BPE is trained on
ID_TYPES = ("uint8", "uint16", "uint32", "uint64")  # that a .bin file may have


# -- Tokenizers ------------------------------------------------------------------------------------


class Tokenizer:
    """Bytes <-> token ids. Any bytes come back as they were."""

    def __init__(self, name, pattern, tokens):
        """`tokens` are the bytes of token 0, 1, ..; the end of a text comes after them."""
        self.name, self.pattern, self.tokens = name, pattern, tokens
        self.end_of_text, self.vocab_size = len(tokens), len(tokens) + 1
        ranks, special = {token: i for i, token in enumerate(tokens)}, {"<|endoftext|>": len(tokens)}
        self.encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )

    @classmethod
    def bytes(cls):
        """One token a byte."""
        return cls("bytes", PATTERNS["bytes"], [bytes([i]) for i in range(256)])

    @classmethod
    def gpt2(cls):
        """GPT-2's vocabulary, which tiktoken fetches once. UserError: it cannot."""
        try:
            gpt2 = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken passes on whatever its download raised
            raise UserError(
                f"gpt2's vocabulary could not be fetched ({type(error).__name__}): it needs the network "
                "once; without it take --tokenizer bytes or --tokenizer bpe"
            ) from None
        return cls("gpt2", WORDS, [gpt2.decode_single_token_bytes(i) for i in range(gpt2.eot_token)])

    @classmethod
    def train(cls, texts, vocab_size):
        """Byte-pair encoding of texts (bytes, MOST of them): `vocab_size` tokens with the end of a text."""
        if vocab_size <= 257:  # the 256 bytes, the end of a text, and no merge
            raise UserError(f"--vocab-size {vocab_size} is too small for a BPE: give over 257")
        every = -(-sum(map(len, texts)) // MOST) or 1
        pieces = [piece for text in texts for piece in pieces_of(text)][::every]  # from everywhere
        words = Counter(x for piece in pieces for x in regex.findall(WORDS, piece.decode("utf-8", "ignore")))
        return cls("bpe", WORDS, merge_pairs(words, vocab_size - 1))

    def encode(self, text):
        """str or bytes -> list of ids. Nothing in a text is taken for its end."""
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        if self.name == "bytes":
            return list(data)
        ids = []
        for i, part in enumerate(INVALID.split(data.decode("utf-8", "surrogateescape"))):
            if i % 2:  # bytes that are not UTF-8: one token each
                part = part.encode("utf-8", "surrogateescape")
                ids += [self.encoding.encode_single_token(bytes([byte])) for byte in part]
            else:
                ids += [x for piece in BLANKS.split(part) for x in self.encoding.encode_ordinary(piece)]
        return ids

    def decode(self, ids):
        """ids -> bytes. A token may hold a part of a character, so turn only the whole into str."""
        return self.encoding.decode_bytes(
            [i for i in map(int, ids) if i < self.vocab_size]
        )  # others are padding

    def fields(self):
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        return {"name": self.name, "pattern": self.pattern, "tokens": tokens}

    def save(self, file):
        write_whole(Path(file), lambda part: part.write_text(json.dumps(self.fields())))

    @property
    def digest(self):
        """8 characters that tell it from others."""
        return hashlib.sha256(json.dumps(self.fields()).encode()).hexdigest()[:8]


class IdTokenizer(Tokenizer):
    """For ids whose vocabulary is not at hand: a text is ids with spaces between them."""

    name, end_of_text = "ids", None

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


def merge_pairs(words, size):
    """Byte-pair encoding (Sennrich et al., arXiv 1508.07909): {word: count} -> the bytes of `size` tokens.

    Again and again the most frequent pair of neighbours within words becomes a token; of several the one
    with the smallest ids. There are fewer tokens where nothing is left to merge. A word is a str here that
    has chr(id) for each token, so that a merge replaces two characters by one.
    """
    tokens = [bytes([i]) for i in range(256)]
    words, times = [word.encode().decode("latin-1") for word in words], [*words.values()]
    counts, places = Counter(), defaultdict(set)  # of each pair: how often, and in which words
    for i, word in enumerate(words):
        for pair in map("".join, pairwise(word)):
            counts[pair] += times[i]
            places[pair].add(i)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapify(heap)
    show = progress(f"training a BPE of {size + 1} tokens")
    while heap and len(tokens) < size:
        count, (a, b) = heappop(heap)
        if -count != counts[a + b]:
            continue  # it has changed since, and stands in the heap once more
        new, changed = chr(len(tokens)), Counter()
        tokens.append(tokens[ord(a)] + tokens[ord(b)])
        for i in places.pop(a + b):
            parts = words[i].split(a + b)
            words[i] = new.join(parts)
            # Of each merge only the neighbours change. "aaaa" with (a, a): parts "", "", ""; where `left`
            # is empty the neighbour is the merge before, which ended in b and is now the new token.
            for at, (left, right) in enumerate(pairwise(parts)):
                gone, made = [a + b], []
                if left or at:
                    gone.append((left or b)[-1] + a)
                    made.append((left or new)[-1] + new)
                if right:
                    gone.append(b + right[0])
                    made.append(new + right[0])
                for pair in gone:
                    changed[pair] -= times[i]
                for pair in made:
                    changed[pair] += times[i]
                    places[pair].add(i)
        counts.update(changed)
        for pair in changed:
            if counts[pair]:
                heappush(heap, (-counts[pair], pair))
        show(len(tokens) / size)
    return tokens


def load_tokenizer(file):
    """What a tokenizer's `save` wrote. UserError: there is none, or a damaged one, or something else."""
    file = Path(file)
    if not file.is_file():
        raise UserError(f"{file} is missing: a model has its tokenizer beside it; copy it there")
    fields = read_json(file)
    if "model" in fields or "tokenizer" in fields:
        raise UserError(f"{file} is a tokenizer of Hugging Face; python -m lab reads it")
    try:
        name, size = fields["name"], fields.get("vocab_size")
        if name == "ids" and type(size) is int and 0 < size <= 2**20:  # the most of a model
            return IdTokenizer(size)
        if not isinstance(name, str) or fields["pattern"] != PATTERNS.get(name):
            raise ValueError(f"no name with its pattern of {', '.join(PATTERNS)}")
        tokens = [base64.b64decode(token, validate=True) for token in fields["tokens"]]
        if len(set(tokens)) < len(tokens) or b"" in tokens:
            raise ValueError("a token is there twice, or empty")
        single = [bytes([i]) for i in range(256)]
        if not set(single) <= set(tokens) or (name == "bytes" and tokens != single):
            raise ValueError("a byte has no token, or another one than its own")
        return Tokenizer(name, fields["pattern"], tokens)
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{file} is not a tokenizer that is known here: {error!r}") from None


# -- Sources of text -------------------------------------------------------------------------------


def package_files():
    """Python files, tests left out, of the standard library and of PACKAGES where they are: (name, path)."""
    folders = {"python": Path(sysconfig.get_paths()["stdlib"])}
    folders |= {name: Path(find_spec(name).origin).parent for name in PACKAGES if find_spec(name)}
    if missing := [name for name in PACKAGES if name not in folders]:
        print(f"note: {', '.join(missing)} not installed: the text is shorter")
    skip = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
    for name, folder in folders.items():
        for file in sorted(folder.rglob("*.py")):
            if not skip & set(file.relative_to(folder).parts):
                yield f"{name}/{file.relative_to(folder).as_posix()}", file


def docstrings(file):
    """The docstrings of one Python file, in the order of the source."""

    def statements(node):  # expressions hold no docstrings, and are most of a tree
        yield node
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
                yield from statements(child)

    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # of another Python
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in statements(tree) if isinstance(node, kinds))
    return [text for text in found if text]


def pydocs():
    """The default corpus, which needs no network: a document a file, with each docstring only once."""
    files, documents, seen = [*package_files()], [], set()
    show = progress(f"reading docstrings of {len(files):,} files")
    gc.disable()  # it would look through all syntax trees again and again: half of the time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            sources = []
            for i, (name, file) in enumerate(files):
                sources.append((name, docstrings(file)))
                show(i / len(files))
    finally:
        gc.enable()
    for name, texts in [*sources, *((f"topics/{topic}", [topics[topic]]) for topic in topics)]:
        new = [text for text in dict.fromkeys(texts) if text not in seen]
        seen.update(new)
        if new:
            documents.append((name, "\n\n".join(new).encode("utf-8", "replace")))
    return documents


def pysource():
    """The same Python files whole: 80 to 90 MB, for models that read much."""
    return [(name, text) for name, file in package_files() if (text := file.read_bytes()).strip()]


SOURCES = {"pydocs": pydocs, "pysource": pysource}


def read_texts(path):
    """The text of a file, or of the files of a folder that are not hidden: (name, bytes), by name.

    Left out, and named, are files with zero bytes, which no UTF-8 text has, and those of NO_TEXT.
    """
    files = [path]
    if path.is_file() and path.suffix.lower() in NO_TEXT:
        raise UserError(f"{path} is no plain text; write its text into a .txt file, or see python -m lab")
    if not path.is_file():
        found = (file for file in sorted(path.rglob("*")) if file.is_file())
        files = [file for file in found if not any(x[0] == "." for x in file.relative_to(path).parts)]
    texts, odd = [], []
    for file in files:
        name = str(file.relative_to(path.parent))
        text = b"\0" if file.suffix.lower() in NO_TEXT else file.read_bytes()
        odd.append(name) if b"\0" in text else texts.append((name, text))
    if odd:
        print(f"note: {len(odd)} of {len(files)} files are no UTF-8 text, left out: {', '.join(odd[:3])}")
    return [(name, text) for name, text in texts if text.strip()]


# -- Documents -> files of ids ---------------------------------------------------------------------


def progress(what):
    """Say what begins -> a function that shows the share that is done, if somebody is looking."""
    print(what, flush=True)
    return lambda share: sys.stdout.isatty() and print(f"{share:4.0%}\r", end="", flush=True)


def boundary(text, at):
    """The last place up to `at` where no character of UTF-8 is cut; `at` where the text is not UTF-8."""
    for start in range(at, max(at - 4, 0), -1):  # back over bytes that go on a character, 10xxxxxx
        if start >= len(text) or text[start] & 0b1100_0000 != 0b1000_0000:
            return start
    return at


def divide(documents):
    """Documents -> texts of training and of validation.

    Validation takes one document in 20, by the hash of its name, so that no text has its neighbours on
    the other side. Of fewer than 100 documents, or where that leaves a side empty, the last tenth of each,
    one byte at least: a text that is cut so has an end on both sides.
    """
    train, val = [], []
    for name, text in documents:
        digest = hashlib.sha1(name.encode("utf-8", "surrogateescape")).hexdigest()
        (train if int(digest, 16) % 20 else val).append(text)
    if len(documents) < 100 or not (train and val):
        cuts = [(text, boundary(text, len(text) - max(len(text) // 10, 1))) for _, text in documents]
        train, val = [text[:cut] for text, cut in cuts], [text[cut:] for text, cut in cuts]
    return train, val


def pieces_of(text):
    """A text in pieces of at most 1 MB, cut behind a line where there is one."""
    start = 0
    while start < len(text):
        end = min(start + 10**6, len(text))
        if end < len(text):
            end = text.rfind(b"\n", start, end) + 1 or boundary(text, end)
        yield text[start:end]
        start = end


def id_type(vocab_size):
    """The type of the ids in a .bin file."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def write_tokens(texts, tokenizer, file):
    """Encode texts, each followed by the end of a text, into a file of ids."""
    kind, size, done = id_type(tokenizer.vocab_size), sum(map(len, texts)), 0
    show = progress(f"encoding {size / 1e6:.1f} MB")
    with open(file, "wb") as out:
        for text in texts:
            for piece in pieces_of(text):
                out.write(np.array(tokenizer.encode(piece), kind).tobytes())
                show((done := done + len(piece)) / size)
            out.write(np.array([tokenizer.end_of_text], kind).tobytes())


def write_corpus(folder, source, documents, tokenizer):
    """A prepared folder, whole or not at all. `source` tells where the documents came from."""
    train, val = divide(documents)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
        half = Path(temporary) / "half"
        half.mkdir()
        write_whole(half / "train.bin", lambda file: write_tokens(train, tokenizer, file))
        write_whole(half / "val.bin", lambda file: write_tokens(val, tokenizer, file))
        tokenizer.save(half / "tokenizer.json")
        meta = {"source": source, "bytes": sum(len(text) for _, text in documents)}
        write_json(half / "meta.json", meta | {"dtype": id_type(tokenizer.vocab_size).name})
        if not folder.exists():  # another program may have prepared the same meanwhile
            half.rename(folder)


# -- Corpora ---------------------------------------------------------------------------------------


@dataclass
class Corpus:
    """What a model is trained and measured on."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int  # of the model: large tables are padded, for the GPU's matrix products
    train: np.ndarray  # ids
    val: np.ndarray
    source: str  # where it came from, for people

    @property
    def known_by(self):
        """What tells it from others. The ends stand for tokens that may be of gigabytes."""
        known = {"name": self.name, "train_tokens": len(self.train), "val_tokens": len(self.val)}
        for name, ids in (("sha256", self.train), ("val_sha256", self.val)):
            known[name] = hashlib.sha256(np.concatenate([ids[: 10**6], ids[-(10**6) :]])).hexdigest()
        return known | {"tokenizer": self.tokenizer.digest}


def open_corpus(data="pydocs", tokenizer=None, vocab_size=4096, cache="data"):
    """A corpus to train on. A text is encoded once; later calls find it in `cache`.

    Args:
        data: 'pydocs', 'pysource', a text file, a folder of texts, or a folder with train.bin and val.bin.
        tokenizer: 'bytes', 'bpe' (trained on the text) or 'gpt2'; None: a .bin folder's own, bytes for text.
        vocab_size: of 'bpe'.

    Raises:
        UserError: no text, ids that are damaged, or a tokenizer that is not known or does not fit.
    """
    if tokenizer not in (None, "bytes", "bpe", "gpt2"):
        raise UserError(f"--tokenizer {tokenizer} is not known: give bytes, bpe or gpt2")
    if data and is_prepared(data):
        folder, tokenizer = Path(data), tokenizer_of(Path(data), tokenizer)
    else:
        folder = prepare(data, tokenizer or "bytes", vocab_size, Path(cache))
        tokenizer = load_tokenizer(folder / "tokenizer.json")
    meta = read_json(folder / "meta.json") if (folder / "meta.json").exists() else {}
    V = tokenizer.vocab_size
    train, val = (open_ids(folder / f"{split}.bin", meta.get("dtype"), V) for split in ("train", "val"))
    padded = V if V < 1024 else -(-V // 64) * 64
    source = f"{folder}: {meta.get('source', 'token ids as they were found')}"
    return Corpus(folder.absolute().name, tokenizer, padded, train, val, source)


def is_prepared(folder):
    """Whether a folder holds token ids already."""
    return any((Path(folder) / f"{split}.bin").is_file() for split in ("train", "val"))


def prepare(data, tokenizer, vocab_size, cache):
    """The prepared folder of a text, made if it is not there."""
    path, documents = Path(data), None
    if data in SOURCES:
        versions = (f"{name} {version(name)}" for name in PACKAGES if find_spec(name))
        source = ", ".join([data, f"Python {sys.version.split()[0]}", *versions])
    elif not data or not path.exists():
        raise UserError(f"--data {data!r} is no file or folder, and none of {', '.join(SOURCES)}")
    elif documents := read_texts(path):
        digests = [(name, hashlib.sha256(text).hexdigest()) for name, text in documents]
        source = f"{path.name} {hashlib.sha256(repr(digests).encode()).hexdigest()}"
    else:
        raise UserError(f"{data} holds no text; give a file or folder with some")
    kind = f"bpe{vocab_size}" if tokenizer == "bpe" else tokenizer
    digest = hashlib.sha256(f"{source} {kind}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
    folder = cache / f"{path.stem}-{kind}-{digest}"
    if folder.exists():
        return folder
    if tokenizer == "bpe":
        documents = documents or SOURCES[data]()
        made = Tokenizer.train(divide(documents)[0], vocab_size)
    else:  # first: GPT-2's may be out of reach
        made = getattr(Tokenizer, tokenizer)()
    write_corpus(folder, source, documents or SOURCES[data](), made)
    return folder


def tokenizer_of(folder, name):
    """The tokenizer of a folder with train.bin and val.bin: as named, or its own, or GPT-2's."""
    if name == "bpe":
        raise UserError(f"{folder} holds token ids already; a BPE cannot be trained on them")
    if name is not None:
        return getattr(Tokenizer, name)()
    if (folder / "tokenizer.json").exists():
        return load_tokenizer(folder / "tokenizer.json")
    if (folder / "meta.pkl").exists():
        raise UserError(
            f"{folder / 'meta.pkl'} is not read here: give the text that was encoded, --data FILE"
        )
    try:
        return Tokenizer.gpt2()
    except UserError as error:
        print(f"note: the ids of {folder} are taken for GPT-2's and shown as numbers: {error}")
        return IdTokenizer(50_257)


def open_ids(file, stated, vocab_size):
    """The ids of a .bin file, memory-mapped. `stated` is the name of their type; None: of the vocabulary.

    Raises:
        UserError: a file that is missing, of another type, or with ids beyond the vocabulary (of the first
            10^9 tokens).
    """
    kind = id_type(vocab_size).name if stated is None else stated
    if kind not in ID_TYPES:  # bytes become what numpy is told: also pointers
        raise UserError(f"{file.with_name('meta.json')}: dtype = {kind!r} is none of {', '.join(ID_TYPES)}")
    if not file.is_file():
        raise UserError(f"{file} is missing; a prepared folder has train.bin and val.bin")
    try:
        ids = np.memmap(file, kind, mode="r")
    except ValueError as error:  # half an id, or none
        raise UserError(f"{file} does not hold {kind} token ids: {error}") from None
    first, looks = ids[: 10**6], None
    for wide in ("uint32", "uint64"):  # text has no such zeros
        n = np.dtype(wide).itemsize // ids.itemsize
        if n > 1 and len(ids) % n == 0 and not first.reshape(-1, n)[:, 1:].any():
            looks = wide
    if stated is None:  # ids have other high bytes than low ones
        low, *_, high = first.view("uint8").reshape(len(first), -1).T
        shares = [np.bincount(x, minlength=256) / len(x) for x in (low, high)]
        looks = "uint8" if np.abs(shares[0] - shares[1]).sum() < 0.3 else looks
    if looks:
        raise UserError(
            f"{file} looks like ids of type {looks}, read as {kind}: say which in "
            f'{file.with_name("meta.json")}, {{"dtype": "{looks}"}}'
        )
    if (largest := int(ids[: 10**9].max())) >= vocab_size:
        raise UserError(
            f"{file} has token id {largest}, beyond the vocabulary of {vocab_size}; name the tokenizer it "
            "was made with, for instance --tokenizer gpt2"
        )
    return ids


def unigram_entropy(tokens, vocab_size):
    """Entropy of the token frequencies in nats: the loss of knowing them and nothing else."""
    pieces = (tokens[i : i + 10**7].astype(np.int64) for i in range(0, len(tokens), 10**7))
    p = sum(np.bincount(piece, minlength=vocab_size) for piece in pieces) / len(tokens)
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


# -- Batches ---------------------------------------------------------------------------------------


class Windows:
    """Batches as a function of (seed, step, rank). Each epoch visits each window once, reshuffled.

    Windows do not overlap: window w is tokens w T .. w T + T, the last one only as a target.
    """

    def __init__(self, tokens, block_size, seed):
        if len(tokens) <= block_size:
            raise UserError(
                f"{getattr(tokens, 'filename', 'the text')} has {len(tokens)} tokens, less than one window "
                f"of {block_size} and the token after it: give more text, or a smaller --block-size"
            )
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.count = (len(tokens) - 1) // block_size
        self.epoch = None

    def window(self, i):
        """The i-th window of training, counted through all epochs: (T+1,) int64."""
        epoch, i = divmod(i, self.count)
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng((self.seed, epoch)).permutation(self.count)
        start = self.order[i] * self.block_size
        return self.tokens[start : start + self.block_size + 1].astype(np.int64)

    def rows(self, step, size, rank=0, processes=1):
        """The tokens of a step, (size, T+1): this process's share of the whole batch."""
        first = (step * processes + rank) * size
        return self.stack(first, first + size)

    def stack(self, first, end):
        """The windows first .. end-1, (end - first, T+1)."""
        return torch.from_numpy(np.stack([self.window(i) for i in range(first, end)]))


def main():
    corpus = open_corpus(*sys.argv[1:3])
    print(corpus.source)
    for split, ids in (("train", corpus.train), ("val", corpus.val)):
        entropy = unigram_entropy(ids, corpus.vocab_size)
        print(f"{split}: {len(ids):,} tokens, unigram entropy {entropy:.3f} nats, begins")
        print("    " + repr(corpus.tokenizer.decode(ids[:60]).decode("utf-8", "replace")))


if __name__ == "__main__":
    command_line(main)
