"""A prepared corpus: its files, its tokens as one long array, and batches of windows of them.

A prepared corpus is a folder, which preparation.py, streaming.py or lookup.py wrote:

train.bin, val.bin   token ids in nanoGPT's format: uint16; uint32 for more than 65,536 tokens. The
                     training ids of a large corpus are in shards: train-00000.bin, ..
tokenizer.json       the vocabulary
meta.json            where the text came from, its bytes, its sha256 (of a streamed corpus that of
                     the shards), the type of the ids

T is the number of tokens of a window.
"""

from pathlib import Path
from typing import Any, Literal, NotRequired

import numpy as np
import torch
from pydantic import NonNegativeInt
from typing_extensions import TypedDict

from runtime import UserError, read_json


def id_type(vocab_size):
    """The type of the ids in a .bin file."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def is_prepared(folder):
    """Whether a folder holds token ids already."""
    return any(bin_files(Path(folder), split) for split in ("train", "val"))


def bin_files(folder, split):
    """train.bin, or the shards train-00000.bin, train-00001.bin, .. of a split."""
    found = (*folder.glob(f"{split}.bin"), *folder.glob(f"{split}-[0-9]*.bin"))
    return sorted(file for file in found if file.is_file())


def describe(folder):
    """One line on where a corpus came from. Losses compare only on the same text."""
    meta = read_meta(folder)
    if not meta:
        return str(folder)
    return f"{folder}: {meta['bytes']:,} bytes, sha256 {meta['sha256'][:16]}, {meta['source']}"


class Meta(TypedDict):
    """What meta.json holds; the last four of a streamed corpus."""

    source: str
    bytes: NonNegativeInt
    sha256: str
    documents: NotRequired[NonNegativeInt]
    val_bytes: NotRequired[NonNegativeInt]
    dtype: NotRequired[Literal["uint16", "uint32"]]  # no other: bytes would become what they say
    tokens: NotRequired[NonNegativeInt]
    shards: NotRequired[NonNegativeInt]
    complete: NotRequired[bool]
    state: NotRequired[Any]


def read_meta(folder):
    """A corpus's meta.json; {} without one, or with somebody else's."""
    file, way_out = folder / "meta.json", f"; move {folder} away and prepare it again"
    if not file.exists() or "source" not in read_json(file, way_out=way_out):
        return {}
    return read_json(file, Meta, way_out)


def type_of(files, meta, vocab_size):
    """The type of the ids in .bin files: as meta.json says, else as the ids need it."""
    kind = np.dtype(meta.get("dtype", id_type(vocab_size)))
    first = np.fromfile(files[0], kind, 10**6)
    if not meta and kind == np.uint16 and first[::2].any() and not first[1::2].any():
        return np.dtype(np.uint32)  # halves of small ids
    return kind


def check_streamed(folder):
    """Refuse a streamed corpus that is not complete, or has lost training tokens."""
    meta = read_meta(folder)
    if meta.get("complete") is False:
        raise UserError(f"{folder} is not complete; run the command that began it again")
    size = np.dtype(meta.get("dtype", "uint16")).itemsize
    found = sum(file.stat().st_size // size for file in bin_files(folder, "train"))
    if found != meta.get("tokens", found):
        raise UserError(
            f"{folder} has {found:,} training tokens, not the {meta['tokens']:,} of its meta.json; "
            "delete it and stream it again"
        )


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
        UserError: no file, an odd length, ids beyond the vocabulary (of the first 10^9 tokens), or
            less than one window.
    """
    files = bin_files(folder, split)
    if not files:
        raise UserError(f"{folder / split}.bin is missing; a corpus has train.bin and val.bin")
    meta = read_meta(folder)
    kind = type_of(files, meta, vocab_size)
    try:
        tokens = Tokens(files, kind, meta.get(f"{split}_bytes"))
    except ValueError as error:  # an odd number of bytes, or none
        raise UserError(f"{folder / split}.bin does not hold {kind} token ids: {error}") from None
    if len(tokens) <= block_size:
        raise UserError(
            f"{files[0]} has {len(tokens)} tokens, less than one window of {block_size} and the "
            "token after it: give more text, or a smaller --block-size"
        )
    for i in range(0, min(len(tokens), 10**9), 10**7):
        largest = int(tokens[i : i + 10**7].max())
        if largest >= vocab_size:
            raise UserError(
                f"{folder} has token id {largest} in its {split} tokens, beyond the vocabulary of "
                f"{vocab_size}; name the tokenizer it was made with, for instance --tokenizer gpt2"
            )
    return tokens


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

    def batch(self, *step):
        """Inputs and targets of a step, (size, T) each: two views of its `rows`."""
        rows = self.rows(*step)
        return rows[:, :-1], rows[:, 1:]


def unigram_entropy(tokens, vocab_size):
    """Entropy of the token frequencies in nats: the loss of knowing them and nothing else."""
    pieces = (tokens[i : i + 10**7] for i in range(0, len(tokens), 10**7))
    p = sum(np.bincount(piece, minlength=vocab_size) for piece in pieces) / len(tokens)
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())
