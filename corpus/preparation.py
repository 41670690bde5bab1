"""Text -> token ids -> batches.

documents     [(name, bytes)]: docstrings, source files, a download, or files of yours
divide        documents -> texts of train and of validation
prepare       the name of a corpus, a file or a folder -> a prepared corpus, which is made once
load_tokens   a split of a prepared corpus -> one long array of token ids
Windows       token ids -> batches of windows of T tokens

A prepared corpus is a folder:

train.bin, val.bin   token ids in nanoGPT's format: uint16; uint32 for more than 65,536 tokens. The
                     training ids of a streamed corpus are in shards: train-00000.bin, ..
tokenizer.json       the vocabulary
meta.json            see Meta
"""

import ast
import hashlib
import json
import os
import sys
import sysconfig
import tempfile
import urllib.request
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal, NotRequired

import numpy as np
import torch
from typing_extensions import TypedDict

from corpus.tokenizers import IdTokenizer, Tokenizer, load_tokenizer, open_tokenizer
from runtime import UserError, progress, read_json, write_json, writing

CACHE = Path("data")
PACKAGES = ("numpy", "torch", "matplotlib", "sympy", "networkx")  # torch brings the last two
SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)

# -- Sources of text -------------------------------------------------------------------------------


def package_files():
    """Python files of the standard library and of PACKAGES: (name, path), sorted, without tests."""
    folders = {"python": Path(sysconfig.get_paths()["stdlib"])}
    folders |= {name: Path(find_spec(name).origin).parent for name in PACKAGES}
    skip = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
    for name, folder in folders.items():
        for file in sorted(folder.rglob("*.py")):
            if not skip & set(file.relative_to(folder).parts):
                yield f"{name}/{file.relative_to(folder).as_posix()}", file


def docstrings(file):
    """The docstrings of one Python file, in the order of the source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def pydocs():
    """The default corpus: one document a file, its docstrings, each docstring only once."""
    names, files = zip(*package_files(), strict=True)
    # Fresh processes: a fork of a process in which torch runs threads may hang.
    with ProcessPoolExecutor(min(os.cpu_count(), 8), get_context("spawn")) as pool:
        found = pool.map(docstrings, files, chunksize=16)
        found = list(progress(found, "reading docstrings", len(files), unit=" files", leave=False))
    sources = [*zip(names, found, strict=True), *((f"topics/{k}", [topics[k]]) for k in topics)]
    documents, seen = [], set()
    for name, texts in sources:
        new = [text for text in dict.fromkeys(texts) if text not in seen]
        seen.update(new)
        if new:
            documents.append((name, "\n\n".join(new).encode("utf-8", "replace")))
    return documents


def pysource():
    """The same packages' Python files whole."""
    files = progress([*package_files()], "reading source", leave=False)
    return [(name, file.read_bytes()) for name, file in files]


def shakespeare():
    """Tiny Shakespeare (1.1 MB), downloaded and checked."""
    url, sha256 = SHAKESPEARE
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            text = response.read()
        if hashlib.sha256(text).hexdigest() != sha256:
            raise OSError("its sha256 is not the known one")
    except OSError as error:
        raise UserError(
            f"cannot download {url} ({error}); without a network use --data pydocs or --data FILE"
        ) from None
    return [("shakespeare", text)]


CORPORA = {"pydocs": pydocs, "pysource": pysource, "shakespeare": shakespeare}


def read_texts(path):
    """The texts of a file, or of the files of a folder that are not hidden: (name, bytes), by name.

    A .jsonl file has a text a line, in the field "text". Files with zero bytes are no UTF-8 text:
    they are left out, and named.
    """
    files = [path]
    if not path.is_file():
        found = (file for file in sorted(path.rglob("*")) if file.is_file())
        files = [f for f in found if not any(x[0] == "." for x in f.relative_to(path).parts)]
    texts, odd = [], []
    for file in files:
        name, text = str(file.relative_to(path.parent)), file.read_bytes()
        if b"\0" in text:
            odd.append(name)
        elif file.suffix == ".jsonl":
            texts += json_lines(file, name, text)
        else:
            texts.append((name, text))
    if odd:
        left_out = f"{len(odd)} of {len(files)} files left out, with zero bytes"
        print(f"note: {left_out}, which no UTF-8 text has: {', '.join(odd[:3])}")
    return texts


def json_lines(file, name, content):
    """The texts of a .jsonl file, each with a name of its own: (name, bytes)."""
    for i, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                text = (json.loads(line)["text"] or "").encode("utf-8", "replace")
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise UserError(f"{file}, line {i}: no JSON object with a text in 'text'") from None
            yield f"{name} line {i}", text


# -- Documents -> files of ids ---------------------------------------------------------------------


def boundary(text, at):
    """The last place up to `at` where no character of UTF-8 is cut."""
    for back in range(min(4, at)):
        if at >= len(text) or text[at - back] & 0b1100_0000 != 0b1000_0000:
            return at - back
    return at  # it is not UTF-8


def divide(documents):
    """Documents -> texts of train and of validation.

    Validation takes one document in 20, by the hash of its name: no docstring has its neighbours on
    the other side. Of fewer than 100 documents, or where no name has such a hash, it takes the last
    tenth of each.
    """
    train, val = [], []
    for name, text in documents:
        # What is not UTF-8 in a file's name is a surrogate in Python's.
        digest = hashlib.sha1(name.encode("utf-8", "surrogateescape")).hexdigest()
        (train if int(digest, 16) % 20 else val).append(text)
    if len(documents) < 100 or not (train and val):
        cuts = [(text, boundary(text, len(text) - len(text) // 10)) for _, text in documents]
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


def check_end(tokenizer):
    """Refuse a tokenizer that cannot divide one text from the next."""
    if tokenizer.end_of_text is None:
        raise UserError("the tokenizer has no end of text: set eos_token in tokenizer_config.json")


def write_tokens(texts, tokenizer, file):
    """Encode texts, each followed by the end of text, into a file of ids."""
    kind = id_type(tokenizer.vocab_size)
    size, label = sum(map(len, texts)), f"encoding {file.stem}"
    bar = progress(total=size, desc=label, unit="B", unit_scale=True, leave=False)
    with writing(file), open(file, "wb") as out, bar:
        for text in texts:
            out.write(np.array(tokenizer.begin, dtype=kind).tobytes())
            for piece in pieces_of(text):
                out.write(np.array(tokenizer.encode(piece), dtype=kind).tobytes())
                bar.update(len(piece))
            out.write(np.array([tokenizer.end_of_text], dtype=kind).tobytes())


def write_corpus(folder, source, documents, tokenizer):
    """A prepared corpus of documents, whole or not at all. `source` tells where they came from."""
    check_end(tokenizer)
    train, val = divide(documents)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        half = Path(temporary) / "corpus"
        half.mkdir()
        write_tokens(train, tokenizer, half / "train.bin")
        write_tokens(val, tokenizer, half / "val.bin")
        tokenizer.save(half / "tokenizer.json")
        text = b"".join(text for _, text in documents)
        meta = {"source": source, "bytes": len(text)}
        meta |= {"sha256": hashlib.sha256(text).hexdigest(), "val_bytes": sum(map(len, val))}
        write_json(half / "meta.json", meta | {"dtype": id_type(tokenizer.vocab_size).name})
        if not folder.exists():  # another program may have prepared the same meanwhile
            half.rename(folder)


# -- Preparing, once -------------------------------------------------------------------------------


def prepare(data="pydocs", tokenizer=None, vocab_size=4096, cache=CACHE):
    """Make a corpus ready for training, once; later calls find it in the cache.

    Args:
        data: 'pydocs', 'pysource', 'shakespeare', a text file, a folder of text files, or a folder
            with train.bin and val.bin.
        tokenizer: 'bytes', 'bpe' (trained on the corpus), 'gpt2', or the directory of a model that
            has one. None: a .bin folder's own, bytes for text.
        vocab_size: of 'bpe'.

    Returns:
        The folder with train.bin and val.bin, and its tokenizer.

    Raises:
        UserError: text that is missing or empty, or a tokenizer that is missing or does not fit.
        OSError: text that cannot be read.
    """
    if not data:
        raise UserError("--data is empty; name a corpus, a file or a folder")
    path, documents = Path(data), None
    if is_prepared(path):
        return path, bin_tokenizer(path, tokenizer)
    if data in CORPORA:
        versions = (f"{name} {version(name)}" for name in PACKAGES)
        python = ", ".join([data, f"Python {sys.version.split()[0]}", *versions])
        source = data if data == "shakespeare" else python
    elif path.exists():
        documents = [(name, text) for name, text in read_texts(path) if text.strip()]
        if not documents:
            raise UserError(f"{data} holds no text; give a file or folder with some")
        texts = [(name, hashlib.sha256(text).hexdigest()) for name, text in documents]
        source = f"{path.name} {hashlib.sha256(repr(texts).encode()).hexdigest()}"
    else:
        raise UserError(f"{data}: no such file or folder, nor one of {', '.join(CORPORA)}")
    kind = tokenizer = tokenizer or "bytes"
    if tokenizer == "bpe":
        kind = f"bpe{vocab_size}"
    elif tokenizer not in ("bytes", "gpt2"):
        tokenizer = open_tokenizer(tokenizer)
        kind = tokenizer.name + ("" if tokenizer.name == "bytes" else f"-{tokenizer.digest}")
    digest = hashlib.sha256(f"{source} {kind}".encode()).hexdigest()[:8]
    folder = Path(cache) / f"{path.stem}-{kind}-{digest}"
    if folder.exists():
        return folder, load_tokenizer(folder / "tokenizer.json")

    if tokenizer in ("bytes", "gpt2"):  # which may need the network: before minutes of reading
        tokenizer = open_tokenizer(tokenizer)
    documents = documents or CORPORA[data]()
    if tokenizer == "bpe":
        train, _ = divide(documents)
        tokenizer = Tokenizer.train((text.decode("utf-8", "ignore") for text in train), vocab_size)
    write_corpus(folder, source, documents, tokenizer)
    return folder, tokenizer


def bin_tokenizer(folder, name):
    """The tokenizer of a folder with train.bin and val.bin: as named, or its own, or GPT-2's."""
    if name == "bpe":
        raise UserError(f"{folder} holds token ids already; a BPE cannot be trained on them")
    if name is not None:
        return open_tokenizer(name)
    if (folder / "tokenizer.json").exists():
        return load_tokenizer(folder / "tokenizer.json")
    if (folder / "meta.pkl").exists():
        raise UserError(
            f"{folder / 'meta.pkl'} is a character vocabulary, which is not read here: give its "
            "text instead, --data FILE, or the vocabulary of its ids with --tokenizer"
        )
    try:
        return Tokenizer.gpt2()
    except UserError as error:
        print(f"note: {folder} is taken for GPT-2 tokens; text is shown as token ids, because")
        print(f"      {str(error).split(':')[0]}")
        return IdTokenizer(50_257)


# -- A prepared corpus -> one long array -----------------------------------------------------------


def bin_files(folder, split):
    """train.bin, or the shards train-00000.bin, train-00001.bin, .. of a split."""
    found = (*folder.glob(f"{split}.bin"), *folder.glob(f"{split}-[0-9]*.bin"))
    return sorted(file for file in found if file.is_file())


def is_prepared(folder):
    """Whether a folder holds token ids already."""
    return any(bin_files(Path(folder), split) for split in ("train", "val"))


class Meta(TypedDict):
    """What meta.json holds, which a corpus of others may lack; the last four if it is streamed."""

    source: str
    bytes: int  # of the text
    sha256: str  # of the text; of a streamed corpus that of its shards
    val_bytes: NotRequired[int]
    dtype: NotRequired[Literal["uint16", "uint32"]]  # no other: bytes would become what they say
    tokens: NotRequired[int]  # of training
    shards: NotRequired[int]
    complete: NotRequired[bool]
    state: NotRequired[Any]  # where in the dataset it stopped


def read_meta(folder):
    """A corpus's meta.json; {} without one, or with somebody else's."""
    file, way_out = folder / "meta.json", f"; move {folder} away and prepare it again"
    if not file.exists() or "source" not in read_json(file, way_out=way_out):
        return {}
    return read_json(file, Meta, way_out)


def describe(folder):
    """One line on where a corpus came from. Losses compare only on the same text."""
    meta = read_meta(folder)
    if not meta:
        return str(folder)
    return f"{folder}: {meta['bytes']:,} bytes, sha256 {meta['sha256'][:16]}, {meta['source']}"


class Tokens:
    """The .bin files of a split as one long array of token ids, memory-mapped."""

    def __init__(self, files, kind=np.uint16, bytes=None):
        self.bytes = bytes  # of the text, if they are known
        self.parts = [np.memmap(file, dtype=kind, mode="r") for file in files]
        self.starts = np.cumsum([0, *map(len, self.parts)])

    def __len__(self):
        return int(self.starts[-1])

    def __getitem__(self, piece):
        start, stop, _ = piece.indices(len(self))
        first, last = np.searchsorted(self.starts, (start, stop - 1), side="right") - 1
        pairs = zip(self.parts[first : last + 1], self.starts[first:], strict=False)
        pieces = [part[max(start - at, 0) : stop - at] for part, at in pairs]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def load_tokens(folder, split, vocab_size, block_size):
    """The tokens of a split of a prepared corpus: 'train' or 'val' -> Tokens.

    Raises:
        UserError: a file that is missing or damaged, a stream that was interrupted, ids beyond the
            vocabulary (of the first 10^9 tokens), or less than one window.
    """
    meta, files = read_meta(folder), bin_files(folder, split)
    if meta.get("complete") is False:
        raise UserError(f"{folder} is not complete; run the command that began it again")
    if not files:
        raise UserError(f"{folder / split}.bin is missing; a corpus has train.bin and val.bin")
    kind = np.dtype(meta.get("dtype", id_type(vocab_size)))
    try:
        tokens = Tokens(files, kind, meta.get(f"{split}_bytes"))
    except ValueError as error:  # an odd number of bytes, or none
        raise UserError(f"{folder / split}.bin does not hold {kind} token ids: {error}") from None
    if split == "train" and len(tokens) != meta.get("tokens", len(tokens)):
        raise UserError(
            f"{folder} has {len(tokens):,} training tokens, not the {meta['tokens']:,} of its "
            "meta.json; delete it and stream it again"
        )
    if len(tokens) <= block_size:
        raise UserError(
            f"{files[0]} has {len(tokens)} tokens, less than one window of {block_size} and the "
            "token after it: give more text, or a smaller --block-size"
        )
    starts = range(0, min(len(tokens), 10**9), 10**7)
    largest = max(int(tokens[i : i + 10**7].max()) for i in starts)
    if largest >= vocab_size:
        raise UserError(
            f"{folder} has token id {largest} in its {split} tokens, beyond the vocabulary of "
            f"{vocab_size}; name the tokenizer it was made with, for instance --tokenizer gpt2"
        )
    return tokens


def unigram_entropy(tokens, vocab_size):
    """Entropy of the token frequencies in nats: the loss of knowing them and nothing else."""
    pieces = (tokens[i : i + 10**7] for i in range(0, len(tokens), 10**7))
    p = sum(np.bincount(piece, minlength=vocab_size) for piece in pieces) / len(tokens)
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


# -- Batches ---------------------------------------------------------------------------------------


class Windows:
    """Batches as a function of (seed, step, rank). Each epoch visits each window once, reshuffled.

    Windows do not overlap: window w is tokens w*T .. w*T + T, the last one only as a target.
    """

    def __init__(self, tokens, block_size, seed):
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
        return torch.from_numpy(np.stack([self.window(i) for i in range(first, first + size)]))
