"""Text -> tokens -> train.bin and val.bin -> batches.

    python data.py                          the default corpus: docstrings of Python packages
    python data.py FILE_OR_FOLDER           any text; a folder with train.bin and val.bin is ready
    python data.py stream NAME --tokens N   a large corpus, through Hugging Face datasets

A prepared corpus is a folder with train.bin and val.bin (uint16 token ids, nanoGPT's format; uint32
where the vocabulary is larger; of a large corpus train-00000.bin and so on), tokenizer.json, and
meta.json (where the text came from, its size, its sha256, the type of the ids).
"""

import hashlib
import json
import pickle
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import tyro
from tqdm import tqdm

import hops
from corpora import PACKAGES, boundary, divide, pydocs, pysource, read_texts, shakespeare
from device import command_line
from tokenizer import (
    CharTokenizer,
    DataError,
    IdTokenizer,
    Tokenizer,
    check_bpe_size,
    load_tokenizer,
)
from weights import locate

CACHE = Path("data")


def id_type(vocab_size):
    """The type of the ids in a .bin file."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def pieces_of(text):
    """A text in pieces of at most 1 MB, cut behind a line where there is one."""
    start = 0
    while start < len(text):
        end = min(start + 10**6, len(text))
        if end < len(text):
            end = text.rfind(b"\n", start, end) + 1 or boundary(text, end)
        yield text[start:end]
        start = end


def write_tokens(texts, tokenizer, file, label):
    """Encode documents, each followed by the end of text, into a file of ids."""
    check_end(tokenizer)
    kind = id_type(tokenizer.vocab_size)
    bar = tqdm(total=sum(map(len, texts)), desc=label, unit="B", unit_scale=True, leave=False)
    with open(file, "wb") as out, bar:
        for text in texts:
            np.array(tokenizer.begin, dtype=kind).tofile(out)
            for piece in pieces_of(text):
                np.array(tokenizer.encode(piece), dtype=kind).tofile(out)
                bar.update(len(piece))
            np.array([tokenizer.end_of_text], dtype=kind).tofile(out)


def open_tokenizer(name):
    """'bytes' or 'gpt2'; else the tokenizer of a model: its directory, or its name on the Hub.

    Raises:
        DataError: there is no such model, or it has none.
    """
    if name in ("bytes", "gpt2"):
        return getattr(Tokenizer, name)()
    try:
        return load_tokenizer(locate(name) / "tokenizer.json")
    except FileNotFoundError as error:
        raise DataError(f"--tokenizer is bytes, bpe, gpt2 or a model: {error}") from None


def check_end(tokenizer):
    """Refuse a tokenizer that cannot divide one text from the next."""
    if tokenizer.end_of_text is None:
        raise DataError(
            f"the tokenizer {tokenizer.name} has no end of text, which divides one text from the "
            "next: name it in tokenizer_config.json, as eos_token, or give ready .bin files"
        )


def is_prepared(folder):
    """Whether a folder holds token ids already."""
    return any(bin_files(Path(folder), split) for split in ("train", "val"))


def bin_files(folder, split):
    """train.bin, or the shards train-00000.bin, train-00001.bin, .. of a split."""
    return sorted([*folder.glob(f"{split}.bin"), *folder.glob(f"{split}-[0-9]*.bin")])


def write_corpus(folder, source, documents, train, val, tokenizer):
    """A prepared corpus, whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        half = Path(temporary) / "corpus"  # renamed when complete: no half corpus in the cache
        half.mkdir()
        write_tokens(train, tokenizer, half / "train.bin", "encoding train")
        write_tokens(val, tokenizer, half / "val.bin", "encoding val")
        tokenizer.save(half / "tokenizer.json")
        text = b"".join(text for _, text in documents)
        meta = {"source": source, "documents": len(documents), "bytes": len(text)}
        meta |= {"sha256": hashlib.sha256(text).hexdigest(), "val_bytes": sum(map(len, val))}
        meta |= {"dtype": id_type(tokenizer.vocab_size).name}
        (half / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
        try:
            half.rename(folder)
        except OSError:  # another program prepared the same meanwhile
            if not folder.exists():
                raise


def prepare(data="pydocs", tokenizer=None, vocab_size=4096, cache=CACHE):
    """Make a corpus ready for training, once; later calls find it in the cache.

    Args:
        data: 'pydocs', 'pysource', 'shakespeare', 'hops', a text file, a folder of text files, or a
            folder with train.bin and val.bin.
        tokenizer: 'bytes', 'bpe' (trained on the corpus), 'gpt2', or the directory of a model that
            has one. None: a .bin folder's own, one token a word for 'hops', bytes for other text.
        vocab_size: of 'bpe'.

    Returns:
        The folder with train.bin and val.bin, and its tokenizer.

    Raises:
        DataError: text that is missing, unreadable, empty, or ids that do not fit.
    """
    if not data:
        raise DataError("--data is empty; name a corpus, a file or a folder")
    path = Path(data)
    if is_prepared(path):
        check_streamed(path)
        return path, bin_tokenizer(path, tokenizer)
    corpora = {"pydocs": pydocs, "pysource": pysource, "shakespeare": shakespeare}
    corpora["hops"] = hops.documents
    if data in corpora:
        versions = [f"{name} {version(name)}" for name in PACKAGES] if data[:2] == "py" else []
        source = ", ".join([data, f"Python {sys.version.split()[0]}", *versions])
    elif path.exists():
        documents = [(name, text) for name, text in read_texts(path) if text.strip()]
        if not documents:
            raise DataError(f"{data} holds no text; give a file or folder with some")
        texts = [(name, hashlib.sha256(text).hexdigest()) for name, text in documents]
        source = f"{path.name} {hashlib.sha256(repr(texts).encode()).hexdigest()}"
    else:
        raise DataError(f"--data {data}: no such file or folder, nor one of {', '.join(corpora)}")
    tokenizer = tokenizer or ("hops" if data == "hops" else "bytes")
    kind = tokenizer
    if tokenizer == "bpe":
        check_bpe_size(vocab_size)
        kind = f"bpe{vocab_size}"
    elif tokenizer not in ("bytes", "gpt2", "hops"):
        tokenizer = open_tokenizer(tokenizer)
        kind = tokenizer.name + ("" if tokenizer.name == "bytes" else f"-{tokenizer.digest}")
    digest = hashlib.sha256(f"{source} {kind}".encode()).hexdigest()[:8]
    folder = Path(cache) / f"{path.stem}-{kind}-{digest}"
    if folder.exists():
        return folder, load_tokenizer(folder / "tokenizer.json")

    if data in corpora:
        documents = corpora[data]()
    train, val = divide(documents)
    if tokenizer == "bpe":
        print(f"training a BPE tokenizer of {vocab_size} tokens", flush=True)
        tokenizer = Tokenizer.train((text.decode("utf-8", "ignore") for text in train), vocab_size)
    elif isinstance(tokenizer, str):
        tokenizer = hops.tokenizer() if tokenizer == "hops" else open_tokenizer(tokenizer)
    write_corpus(folder, source, documents, train, val, tokenizer)
    return folder, tokenizer


def describe(folder):
    """One line on where a corpus came from: its losses compare only with those on the same text."""
    meta = read_meta(folder)
    if not meta:
        return str(folder)
    return f"{folder}: {meta['bytes']:,} bytes, sha256 {meta['sha256'][:16]}, {meta['source']}"


def read_meta(folder):
    """A corpus's meta.json; {} without one, or with somebody else's."""
    file = folder / "meta.json"
    try:
        meta = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return meta if "source" in meta else {}
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{file} is damaged ({error}); delete {folder} and prepare it again"
        ) from None


def check_streamed(folder):
    """Refuse a streamed corpus that is not complete, or lost a shard or a part of one."""
    meta = read_meta(folder)
    if meta.get("complete") is False:
        raise DataError(f"{folder} is not complete; run the command again that began it")
    size = np.dtype(meta.get("dtype", "uint16")).itemsize
    found = sum(file.stat().st_size // size for file in bin_files(folder, "train"))
    if found != meta.get("tokens", found):
        raise DataError(
            f"{folder} has {found:,} training tokens, not the {meta['tokens']:,} of its meta.json; "
            "delete it and stream it again"
        )


def bin_tokenizer(folder, name):
    """The tokenizer of a folder with train.bin and val.bin: as named, or its own, or GPT-2's."""
    if name == "bpe":
        raise DataError(f"{folder} holds token ids already; a BPE cannot be trained on them")
    if name is not None:
        return open_tokenizer(name)
    if (folder / "tokenizer.json").exists():
        return load_tokenizer(folder / "tokenizer.json")
    if (folder / "meta.pkl").exists():
        return CharTokenizer(read_nanogpt_characters(folder / "meta.pkl"))
    try:
        return Tokenizer.gpt2()
    except DataError as error:
        print(f"note: {folder} is taken for GPT-2 tokens; text is shown as token ids, because")
        print(f"      {str(error).split(':')[0]}")
        return IdTokenizer(50_257)


def read_nanogpt_characters(file):
    """nanoGPT's meta.pkl -> its characters in the order of their ids, without running any code."""

    class PlainData(pickle.Unpickler):
        def find_class(self, module, name):  # a dict of str and int names no class
            raise pickle.UnpicklingError(f"it names {module}.{name}")

    try:
        with open(file, "rb") as stream:
            itos = PlainData(stream).load()["itos"]
        characters = [itos[i] for i in range(len(itos))]
        if not all(isinstance(c, str) and len(c) == 1 for c in characters):
            raise TypeError("itos does not map ids to characters")
        return characters
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is not nanoGPT's character table: {error}") from None


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
        DataError: no file, an odd length, ids beyond the vocabulary (of the first 10^9 tokens), or
            less than one window.
    """
    files = bin_files(folder, split)
    if not files:
        raise DataError(f"{folder / split}.bin is missing; a corpus has train.bin and val.bin")
    meta = read_meta(folder)
    kind = np.dtype(meta.get("dtype", "uint16"))
    for file in files:
        size = file.stat().st_size
        if size % kind.itemsize or not size:
            raise DataError(
                f"{file} has {size} bytes: no file of {kind.itemsize * 8}-bit token ids"
            )
    tokens = Tokens(files, kind, meta.get(f"{split}_bytes"))
    if len(tokens) <= block_size:
        raise DataError(
            f"{files[0]} has {len(tokens)} tokens, less than one window of {block_size} and the "
            "token after it: give more text, or a smaller --block-size"
        )
    for i in range(0, min(len(tokens), 10**9), 10**7):
        largest = int(tokens[i : i + 10**7].max())
        if largest >= vocab_size:
            raise DataError(
                f"{folder} has token id {largest} in its {split} tokens, beyond the vocabulary of "
                f"{vocab_size}: it was made with another tokenizer; name it, for instance "
                "--tokenizer gpt2"
            )
    return tokens


class Windows:
    """Batches as a function of (seed, step, rank). An epoch visits each window once, in an order
    of its own.

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

    def batch(self, step, size, rank=0, processes=1):
        """Inputs and targets of a step, (size, T) each: this process's share of the whole batch."""
        first = (step * processes + rank) * size
        rows = np.stack([self.window(i) for i in range(first, first + size)])
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


def unigram_entropy(tokens, vocab_size):
    """Entropy of the token frequencies in nats: the loss of knowing them and nothing else."""
    pieces = (tokens[i : i + 10**7] for i in range(0, len(tokens), 10**7))
    p = sum(np.bincount(piece, minlength=vocab_size) for piece in pieces) / len(tokens)
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def main(
    data: tyro.conf.Positional[str] = "pydocs",
    tokenizer: str | None = None,
    vocab_size: int = 4096,
):
    """Prepare a corpus and show what is in it.

    Args:
        data: pydocs, pysource, shakespeare, hops, a text file, a folder of them, or of .bin files
        tokenizer: bytes, bpe, gpt2, or a model that has one; by default bytes, or the corpus's own
        vocab_size: number of tokens of a bpe tokenizer
    """
    folder, tokenizer = prepare(data, tokenizer, vocab_size)
    print(describe(folder))
    for split in ("train", "val"):
        tokens = load_tokens(folder, split, tokenizer.vocab_size, block_size=1)
        entropy = unigram_entropy(tokens, tokenizer.vocab_size)
        print(f"{split}: {len(tokens):,} tokens, unigram entropy {entropy:.3f} nats, begins")
        print("    " + repr(tokenizer.decode(tokens[:60]).decode("utf-8", "replace")))


if __name__ == "__main__":
    if sys.argv[1:2] == ["stream"]:
        from stream import stream

        command_line(lambda: tyro.cli(stream, prog="data.py stream", args=sys.argv[2:]))
    else:
        command_line(lambda: tyro.cli(main, description=__doc__))
