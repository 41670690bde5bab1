"""What data.py has not: JSON lines, two more texts, tokenizers of others, corpora in shards.

open_corpus   as data.open_corpus, of all these -> data.Corpus: what `python -m lab train` trains on
prepare       the name of a corpus, a file or a folder -> a prepared folder, which is made once
load_tokens   a split of a prepared folder -> one long array of token ids, of one file or of shards

A prepared folder is that of data.py, also with train-00000.bin, train-00001.bin, .. in place of train.bin.
"""

import hashlib
import json
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NotRequired

import numpy as np
from typing_extensions import TypedDict

import data as root
from data import (
    ID_TYPES,
    NO_TEXT,
    PACKAGES,
    SOURCES,
    Corpus,
    divide,
    id_type,
    open_ids,
    pieces_of,
    tokenizer_of,
)
from lab.common import progress, read_json, writing
from lab.corpora.tokenizers import Tokenizer, begin_of, load_tokenizer, open_tokenizer
from model import UserError, write_json

CACHE = Path("data")
SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)

# -- Sources of text -------------------------------------------------------------------------------


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


CORPORA = SOURCES | {"shakespeare": shakespeare}


def read_texts(path):
    """As data.read_texts; of a .jsonl file each line is a text, in the field "text": (name, bytes)."""
    files = [path]
    if not path.is_file():
        found = (file for file in sorted(path.rglob("*")) if file.is_file())
        files = [f for f in found if not any(x[0] == "." for x in f.relative_to(path).parts)]
    lines = [file for file in files if file.suffix.lower() == ".jsonl"]
    if not lines:
        return root.read_texts(path)
    texts, odd = [], []
    for file in files:
        name, content = str(file.relative_to(path.parent)), file.read_bytes()
        if file in lines:
            texts += json_lines(file, name, content)
        elif b"\0" in content or file.suffix.lower() in NO_TEXT:
            odd.append(name)
        else:
            texts.append((name, content))
    if odd:
        print(f"note: {len(odd)} of {len(files)} files are no UTF-8 text, left out: {', '.join(odd[:3])}")
    return [(name, text) for name, text in texts if text.strip()]


def field_of(row, field):
    """What a row has in a field, "meta.text" within "meta". LookupError, TypeError: it has not."""
    for name in field.split("."):
        row = row[name]
    return row


def json_lines(file, name, content):
    """The texts of a .jsonl file, each with a name of its own: (name, bytes)."""
    for i, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                text = json.loads(line)["text"]
                text = ("" if text is None else text).encode("utf-8", "replace")
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise UserError(f"{file}, line {i}: no JSON object with a text in 'text'") from None
            yield f"{name} line {i}", text


# -- Documents -> files of ids ---------------------------------------------------------------------


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
            out.write(np.array(begin_of(tokenizer), dtype=kind).tobytes())
            encode = tokenizer.encode
            for piece in pieces_of(text):
                out.write(np.array(encode(piece), dtype=kind).tobytes())
                bar.update(len(piece))
                encode = getattr(tokenizer, "encode_rest", encode)
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
        documents = read_texts(path)
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
    digest = hashlib.sha256(f"{source} {kind}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
    folder = Path(cache) / f"{path.stem}-{kind}-{digest}"
    if folder.exists():
        return folder, load_tokenizer(folder / "tokenizer.json")

    if tokenizer in ("bytes", "gpt2"):  # which may need the network: before minutes of reading
        tokenizer = open_tokenizer(tokenizer)
    documents = documents or CORPORA[data]()
    if tokenizer == "bpe":
        tokenizer = Tokenizer.train(divide(documents)[0], vocab_size)
    write_corpus(folder, source, documents, tokenizer)
    return folder, tokenizer


def bin_tokenizer(folder, name):
    """As data.tokenizer_of, also of a model."""
    if name in (None, "bytes", "bpe", "gpt2"):
        if name is None and (folder / "tokenizer.json").exists():
            return load_tokenizer(folder / "tokenizer.json")
        return tokenizer_of(folder, name)
    return open_tokenizer(name)


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
    sha256: NotRequired[str]  # of the text, if it was prepared here; of a streamed corpus that of its shards
    val_bytes: NotRequired[int]
    dtype: NotRequired[Literal[ID_TYPES]]  # no other: bytes would become what they say
    tokens: NotRequired[int]  # of training
    shards: NotRequired[int]
    complete: NotRequired[bool]
    state: NotRequired[Any]  # where in the dataset it stopped


def read_meta(folder):
    """A corpus's meta.json; of somebody else's, which has no source, the dtype alone; {} without one."""
    file, way_out = folder / "meta.json", f"; move {folder} away and prepare it again"
    content = read_json(file, way_out=way_out) if file.exists() else {}
    if "source" not in content:
        return {key: content[key] for key in content if key == "dtype"}
    return read_json(file, Meta, way_out)


def describe(folder):
    """One line on where a corpus came from. Losses compare only on the same text."""
    meta = read_meta(folder)
    if "source" not in meta:
        return str(folder)
    digest = f"sha256 {meta['sha256'][:16]}, " if "sha256" in meta else ""
    return f"{folder}: {meta['bytes']:,} bytes, {digest}{meta['source']}"


class Shards:
    """The ids of several .bin files as one long array."""

    def __init__(self, parts):
        self.parts, self.starts = parts, np.cumsum([0, *map(len, parts)])

    def __len__(self):
        return int(self.starts[-1])

    def __getitem__(self, piece):
        start, stop, _ = piece.indices(len(self))
        first, last = np.searchsorted(self.starts, (start, stop - 1), side="right") - 1
        pairs = zip(self.parts[first : last + 1], self.starts[first:], strict=False)
        pieces = [part[max(start - at, 0) : stop - at] for part, at in pairs]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def max(self, axis=None, out=None):
        return max(part.max() for part in self.parts)


def load_tokens(folder, split, vocab_size):
    """The tokens of a split of a prepared corpus: 'train' or 'val' -> an array, or Shards.

    Raises:
        UserError: as data.open_ids; or a stream that was interrupted, or shards that are missing.
    """
    meta, files = read_meta(folder), bin_files(folder, split)
    if meta.get("complete") is False:
        raise UserError(f"{folder} is not complete; run the command that began it again")
    parts = [open_ids(file, meta.get("dtype"), vocab_size) for file in files or [folder / f"{split}.bin"]]
    tokens = parts[0] if len(parts) == 1 else Shards(parts)
    if split == "train" and len(tokens) != meta.get("tokens", len(tokens)):
        raise UserError(
            f"{folder} has {len(tokens):,} training tokens, not the {meta['tokens']:,} of its meta.json; "
            "delete it and stream it again"
        )
    return tokens


@dataclass
class Prepared(Corpus):
    val_bytes: int | None  # of the text; None where that is not known


def open_corpus(data="pydocs", tokenizer=None, vocab_size=4096, cache=CACHE):
    """As data.open_corpus, of all that `prepare` takes."""
    folder, tokenizer = prepare(data, tokenizer, vocab_size, cache)
    V = tokenizer.vocab_size
    train, val = (load_tokens(folder, split, V) for split in ("train", "val"))
    padded = V if V < 1024 else -(-V // 64) * 64
    size = read_meta(folder).get("val_bytes")
    return Prepared(folder.absolute().name, tokenizer, padded, train, val, describe(folder), size)
