"""From documents to token ids, and from ids to batches of windows.

    open_corpus      a text file, a folder of them, or Python's own texts -> a Corpus, which is kept in data/
    Corpus           the ids of training and of validation, and the tokenizer that made them
    Windows          ids -> batches of windows, which depend on the seed and the step alone

    ids              arrays of token ids, memory-mapped uint16 (uint32 beyond 65,536 tokens)
    documents        [(name, bytes)], see sources.py; some are held out for validation
    T                context length in tokens. A window has T+1 tokens: the last is only a target

A prepared folder holds

    train.bin, val.bin    token ids one after the other, in nanoGPT's format
    tokenizer.json        name, pattern and the bytes of each token
    meta.json             where the text came from, its size, and the type of the ids

A folder as nanoGPT prepares it, with the first two files alone, is read as is, assuming GPT-2's token ids.

    python data.py                                   prepare pydocs and show what is in it
    python data.py --data my_texts --tokenizer bpe   prepare a text
"""

import hashlib
import math
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

from common import (
    UserError,
    atomic_write,
    check_writable,
    command_line,
    progress,
    read_json,
    user_error_if_unreadable,
    write_json,
)
from model import Size
from sources import SOURCES, documents_version, read_documents, source_version
from tokenizer import BPE_VOCAB_SIZE, Tokenizer, check_bpe_size, load_tokenizer, pieces_of

ID_TYPES = ("uint8", "uint16", "uint32", "uint64")  # that a .bin file may have
LLM_C_HEADER = (20240520).to_bytes(4, "little")  # how files of llm.c begin, before 1,020 bytes more


# -- Documents -> files of ids ---------------------------------------------------------------------


TOKENIZERS = "bytes", "bpe", "gpt2"  # the names that open_corpus knows


def split_documents(documents):
    """Divide documents into training and validation texts.

    One document in 20 is held out for validation, chosen by the hash of its name, so that no document is in
    both splits. With fewer than 100 documents, or where that leaves a split empty, the last tenth of each
    document is held out instead: at least one byte, so that both splits contain a part of every document.

    Returns:
        Two lists of bytes.
    """
    train = []
    val = []
    for name, text in documents:
        digest = hashlib.sha1(name.encode("utf-8", "surrogateescape")).hexdigest()
        is_validation = int(digest, 16) % 20 == 0
        if is_validation:
            val.append(text)
        else:
            train.append(text)
    if len(documents) >= 100 and train and val:
        return train, val

    train = []
    val = []
    for _, text in documents:
        cut = end_of_training_part(text)
        train.append(text[:cut])
        val.append(text[cut:])
    return train, val


def end_of_training_part(text):
    """Where the last tenth of a text (bytes) begins. A UTF-8 character there is not cut in two."""
    cut = len(text) - max(len(text) // 10, 1)
    for start in range(cut, max(cut - 4, -1), -1):  # a character has at most four bytes
        continues = text[start] & 0b11000000 == 0b10000000
        if not continues:
            return start
    return cut  # not UTF-8


def id_type(vocab_size):
    """The type of the ids in a .bin file."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def write_tokens(texts, tokenizer, file):
    """Encode texts into a file of ids, with the end-of-text token after each."""
    dtype = id_type(tokenizer.vocab_size)
    total_bytes = sum(len(text) for text in texts)
    bytes_done = 0
    show = progress(f"encoding {total_bytes / 1e6:.1f} MB")
    with open(file, "wb") as out:
        for text in texts:
            for piece in pieces_of(text):
                ids = tokenizer.encode(piece)
                out.write(np.array(ids, dtype).tobytes())
                bytes_done += len(piece)
                show(bytes_done / total_bytes)
            out.write(np.array([tokenizer.end_of_text], dtype).tobytes())


@contextmanager
def new_folder(folder):
    """Yield a temporary folder to fill, which is then renamed to `folder`: whole, or not at all. If another
    program has made that folder meanwhile, its folder stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
        unfinished = Path(temporary, "unfinished")
        unfinished.mkdir()
        yield unfinished
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():
                raise


def write_corpus(folder, source, documents, tokenizer):
    """Make a prepared folder. `source` says where the documents came from."""
    train, val = split_documents(documents)
    with new_folder(folder) as unfinished:
        atomic_write(unfinished / "train.bin", lambda temporary: write_tokens(train, tokenizer, temporary))
        atomic_write(unfinished / "val.bin", lambda temporary: write_tokens(val, tokenizer, temporary))
        tokenizer.save(unfinished / "tokenizer.json")
        meta = {
            "source": source,
            "bytes": sum(len(text) for _, text in documents),
            "val_bytes": sum(len(text) for text in val),
            "dtype": id_type(tokenizer.vocab_size).name,
        }
        write_json(unfinished / "meta.json", meta)


def prepare(data, tokenizer_name, vocab_size):
    """The prepared folder of a text, which is made if it does not exist. Its name has a hash of the text
    and of the tokenizer.

    Raises:
        UserError: there is no text, or the tokenizer cannot be had.
    """
    if tokenizer_name == "bpe":
        check_bpe_size(vocab_size)

    # Name the folder after its source, its tokenizer and a hash of both.
    path = Path(data)
    if data in SOURCES:
        documents = None  # reading them takes a while, so only if the folder does not exist
        source = source_version(data)
    elif data and (path.is_file() or path.is_dir()):  # a device, such as /dev/null, is neither
        documents = read_documents(path)
        if not documents:
            raise UserError(f"--data {data} holds no text: give a text file, or a folder with text files")
        source = documents_version(path.name, documents)
    else:
        raise UserError(
            f"--data {data!r} is not a file or folder: give a text file, a folder of texts, or one of "
            f"{', '.join(SOURCES)}"
        )
    kind = f"bpe{vocab_size}" if tokenizer_name == "bpe" else tokenizer_name
    digest = hashlib.sha256(f"{source} {kind}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
    # A file name can have 255 bytes, and the temporary folder's is longer than this one.
    folder = Path("data", f"{path.stem[:50]}-{kind}-{digest}")
    if folder.exists():
        return folder

    # Make it.
    check_writable(folder.parent, "run the command in a folder of your own")
    if tokenizer_name == "bpe":
        documents = documents or SOURCES[data]()
        train_texts, _ = split_documents(documents)
        tokenizer = Tokenizer.train(train_texts, vocab_size)
    else:
        tokenizer = Tokenizer.named(tokenizer_name)  # before the text is read, since a download may fail
        documents = documents or SOURCES[data]()
    write_corpus(folder, source, documents, tokenizer)
    return folder


# -- Corpora ---------------------------------------------------------------------------------------


@dataclass
class Corpus:
    """What a model is trained and evaluated on."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int  # of the model: large vocabularies are padded, for the matrix products of a GPU
    train: np.ndarray  # ids
    val: np.ndarray  # ids
    source: str  # where the text came from, to be printed
    val_bytes: int | None = None  # size of the validation text, where it is known

    def fingerprint(self):
        """Identifies the corpus: a dict with its size, its tokenizer, and hashes of the first and last
        10^6 ids, since there may be gigabytes."""
        return {
            "name": self.name,
            "train_tokens": len(self.train),
            "val_tokens": len(self.val),
            "sha256": hash_of_ends(self.train),
            "val_sha256": hash_of_ends(self.val),
            "tokenizer": self.tokenizer.digest,
        }


def hash_of_ends(ids):
    ends = np.concatenate([ids[: 10**6], ids[-(10**6) :]])
    return hashlib.sha256(ends).hexdigest()


def open_corpus(data="pydocs", tokenizer=None, vocab_size=BPE_VOCAB_SIZE):
    """Open a corpus to train on. A text is encoded once; later calls find it in data/.

    Args:
        data: 'pydocs', 'pysource', a text file, a folder of texts, or a folder with train.bin and val.bin.
        tokenizer: 'bytes', 'bpe' (trained on the text) or 'gpt2'. None takes a .bin folder's own
            tokenizer, and bytes for a text.
        vocab_size: number of tokens of a BPE.

    Raises:
        UserError: there is no text, the ids are damaged, or the tokenizer is unknown or does not fit.
    """
    if tokenizer not in (None, *TOKENIZERS):
        raise UserError(f"--tokenizer {tokenizer} is unknown: use bytes, bpe or gpt2")
    if data and is_prepared(data):
        folder = Path(data)
        return read_corpus(folder, tokenizer_of(folder, tokenizer))
    folder = prepare(data, tokenizer or "bytes", vocab_size)
    return read_corpus(folder, load_tokenizer(folder / "tokenizer.json"))


def read_corpus(folder, tokenizer):
    """Open the files of a folder with train.bin and val.bin.

    Raises:
        UserError: a file is missing or damaged.
    """
    has_meta = (folder / "meta.json").exists()
    meta = read_json(folder / "meta.json") if has_meta else {}
    V = tokenizer.vocab_size
    padded = 64 * math.ceil(V / 64)
    return Corpus(
        name=folder.absolute().name,
        tokenizer=tokenizer,
        vocab_size=V if V < 1024 else padded,
        train=open_ids(folder / "train.bin", meta.get("dtype"), V),
        val=open_ids(folder / "val.bin", meta.get("dtype"), V),
        source=f"{folder}: {meta.get('source', 'token ids as they were found')}",
        val_bytes=meta.get("val_bytes"),
    )


def is_prepared(folder):
    """True if a folder holds token ids already."""
    return any(Path(folder, name).is_file() for name in ("train.bin", "val.bin"))


def pick_tokenizer(preset, data, tokenizer):
    """The tokenizer to open a corpus with. 'auto' is that of the preset, or None for a .bin folder, which
    has its own."""
    if tokenizer != "auto":
        return tokenizer
    if is_prepared(data):
        return None
    return {"tiny": "bytes", "small": "bpe"}.get(preset, "gpt2")


def tokenizer_of(folder, name):
    """The tokenizer of a folder with train.bin and val.bin: the one that is named, else its own, else
    GPT-2's.

    Raises:
        UserError: that tokenizer cannot be used.
    """
    if name == "bpe":
        raise UserError(
            f"{folder} already holds token ids, so no BPE can be trained on it: omit --tokenizer bpe"
        )
    own_file = folder / "tokenizer.json"
    own = load_tokenizer(own_file) if own_file.exists() else None
    if name is not None:
        named = Tokenizer.named(name)
        refuse_other_tokenizer(folder, own, named, name)
        return named
    if own is not None:
        return own
    if (folder / "meta.pkl").exists():
        raise UserError(
            f"{folder / 'meta.pkl'} is a pickle, which could run code, so it is not opened: use --data with "
            "the text itself"
        )
    return Tokenizer.named("gpt2")


def refuse_other_tokenizer(folder, own, asked, name):
    """Refuse another tokenizer than the one that encoded a folder with token ids.

    Args:
        own: the tokenizer in the folder, or None.
        asked: the tokenizer that was asked for.
        name: of `asked`, for the message.

    Raises:
        UserError: they differ, so that the ids would mean other texts.
    """
    if own is not None and own.digest != asked.digest:
        raise UserError(
            f"--tokenizer {name} is not the tokenizer that encoded {folder}, which has its own: omit "
            "--tokenizer"
        )


def open_ids(file, stated, vocab_size):
    """Memory-map the ids of a .bin file.

    Args:
        stated: the name of their type; None for the type that is usual for the vocabulary.

    Raises:
        UserError: the file is missing, its type is another one, or one of its first 10^9 ids is beyond
            the vocabulary.
    """
    kind = stated if stated is not None else id_type(vocab_size).name
    if kind not in ID_TYPES:  # numpy would take any type, also pointers
        raise UserError(
            f"{file.with_name('meta.json')}: dtype {kind!r} is not supported: set it to "
            f"the type of the ids in {file.name} ({', '.join(ID_TYPES)})"
        )
    with user_error_if_unreadable(file, "; a prepared folder has train.bin and val.bin"):
        ids = np.memmap(file, kind, mode="r")
    if ids[:1024].tobytes()[:4] == LLM_C_HEADER:
        raise UserError(f"{file} begins with a header, as files of llm.c do: remove its first 1,024 bytes")
    wider = wider_type(file, kind, vocab_size)
    if wider is not None:
        raise UserError(
            f'{file} looks like {wider}, not {kind}: put {{"dtype": "{wider}"}} into a meta.json beside it'
        )
    largest = int(ids[: 10**9].max())
    if largest >= vocab_size:
        raise UserError(
            f"{file} has token id {largest}, but the vocabulary has {vocab_size} tokens: name the tokenizer "
            "that encoded it, for instance --tokenizer gpt2, or omit --tokenizer if the folder has its own"
        )
    return ids


def wider_type(file, kind, vocab_size):
    """The widest type, wider than `kind`, under which every value is a valid id; None if there is none. (A
    file of wide ids that is read as a narrow type shows each id followed by zeros, which are valid ids.)"""
    size = file.stat().st_size
    for name in reversed(ID_TYPES):
        width = np.dtype(name).itemsize
        if width > np.dtype(kind).itemsize and size % width == 0:
            ids = np.memmap(file, name, mode="r")[: 10**6]
            if (ids < vocab_size).all():
                return name
    return None


def unigram_entropy(ids, vocab_size):
    """Entropy of the token frequencies in nats: the loss of a model that knows only these frequencies."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for i in range(0, len(ids), 10**7):
        counts += np.bincount(ids[i : i + 10**7].astype(np.int64), minlength=vocab_size)
    p = counts / len(ids)
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


# -- Batches ---------------------------------------------------------------------------------------


class Windows:
    """The windows of a corpus, in an order that depends on the seed. Each epoch visits each window once,
    reshuffled.

    Windows do not overlap: window w is tokens w T .. w T + T, of which the last is only a target.
    """

    def __init__(self, ids, block_size, seed):
        """
        Args:
            ids: the token ids of a split of a corpus.
            block_size: context length in tokens (T).
            seed: of the order.

        Raises:
            UserError: the ids do not fill one window.
        """
        if len(ids) <= block_size:
            name = getattr(ids, "filename", "the text")
            raise UserError(
                f"{name} has {len(ids)} tokens, but one window of --block-size {block_size} needs "
                f"{block_size + 1}: use more text, or a smaller --block-size"
            )
        self.tokens = ids
        self.block_size = block_size
        self.seed = seed
        self.count = (len(ids) - 1) // block_size
        self.epoch = None  # the epoch of `order`
        self.order = None

    def window(self, i):
        """The i-th window, counted through all epochs. (T+1,) int64"""
        epoch, place = divmod(i, self.count)
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng((self.seed, epoch)).permutation(self.count)
        start = self.order[place] * self.block_size
        return self.tokens[start : start + self.block_size + 1].astype(np.int64)

    def stack(self, first, end):
        """The windows first .. end-1. (end - first, T+1)"""
        return torch.from_numpy(np.stack([self.window(i) for i in range(first, end)]))

    def share_of_batch(self, step, batch_size, rank=0, world_size=1):
        """The windows of a training step that one of several processes takes. (batch_size / world_size,
        T+1)"""
        share = batch_size // world_size
        first = step * batch_size + rank * share
        return self.stack(first, first + share)


# -- The command -----------------------------------------------------------------------------------


def main(
    data: str = "pydocs",
    tokenizer: Literal["auto", "bytes", "bpe", "gpt2"] = "auto",
    vocab_size: Size = BPE_VOCAB_SIZE,
):
    """Prepare a text for training, and show what is in it.

    Args:
        data: pydocs, pysource, a text file, a folder of text files, or a folder with train.bin and val.bin
        tokenizer: how text becomes tokens (auto: a .bin folder's own, bytes for a text)
        vocab_size: number of tokens of a BPE

    Raises:
        UserError: the text cannot be prepared, or the vocabulary size is for another tokenizer.
    """
    if vocab_size != BPE_VOCAB_SIZE and tokenizer != "bpe":
        raise UserError(f"--vocab-size {vocab_size} applies to a BPE: drop it, or add --tokenizer bpe")
    corpus = open_corpus(data, None if tokenizer == "auto" else tokenizer, vocab_size)
    print(corpus.source)
    for split, ids in (("train", corpus.train), ("val", corpus.val)):
        entropy = unigram_entropy(ids, corpus.vocab_size)
        begins = corpus.tokenizer.decode(ids[:60]).decode("utf-8", "replace")
        print(f"{split}: {len(ids):,} tokens, unigram entropy {entropy:.3f} nats, begins")
        print(f"    {begins!r}")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python data.py"))
