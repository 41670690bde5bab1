"""Texts of any size -> a folder with train.bin and val.bin, which data.py and train.py read.

prepare       JSON lines, Parquet, plain texts or a data set of the Hub -> such a folder
open_corpus   as data.open_corpus, also of such files and with the tokenizer of a model

While it is made, the folder is FOLDER.part, and state.json in it says how far it is: what was written by then
is kept after a kill, and the same command goes on behind it and makes the same files. Memory holds a few
pieces of a megabyte, however long the text is.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, field
from functools import partial
from hashlib import sha1, sha256
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import tyro

import data as root
from data import MOST, SOURCES, Tokenizer, UserError, id_type, one_line, read_json, reading, write_json
from lab.common import Given, progress
from lab.corpora.sources import EMPTY, describe, files_of, judge, note, opened, rows, show
from lab.corpora.tokenizers import begin_of, encode_piece, load_tokenizer, open_tokenizer
from model import Positive, from_json, settings

OURS = None, "bytes", "bpe", "gpt2"  # the tokenizers that the root opens
FEW = 100  # documents: of fewer each gives its last tenth to validation
PIECE, BATCH = 10**6, 4 * 10**6  # bytes that are encoded at once, and between two entries in state.json


@settings
class Options:
    """Prepare a corpus for train.py --data, or go on where an earlier call stopped."""

    # a text, a .jsonl or .parquet file, a folder of them, pydocs, pysource, or a data set of the Hub
    data: tyro.conf.Positional[Given]
    to: Path  # a new folder
    tokenizer: str = "bytes"  # bytes, bpe, gpt2, or a model or prepared folder that has one
    vocab_size: int = 4096  # tokens of a bpe, which is trained on the text
    field: str = "text"  # where the text of a row is; meta.text: within meta
    config: str | None = None  # of a data set of the Hub that has several
    split: str = "train"  # of a data set of the Hub
    tokens: Positive | None = None  # stop after so many training tokens; None: all

    @property
    def source(self):
        return self.data, self.field, self.split, self.config


def nothing():
    return {"train": 0, "val": 0}


@settings
class State:
    """How far a folder is."""

    options: dict  # that it was begun with, and what its source was
    few: bool  # are there so few documents that each is divided?
    row: int = 0  # of the source, of which `piece` pieces are written
    piece: int = 0
    place: Any = None  # where this row is in a data set of the Hub
    tokens: dict[str, int] = field(default_factory=nothing)  # written
    bytes: dict[str, int] = field(default_factory=nothing)  # of their text
    notes: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    full: bool = False  # are there as many tokens as were asked for?


def prepare(o):
    """Write the folder that Options describe, or what an earlier call left of it to write.

    Raises:
        UserError: no text, or one that cannot be read; a tokenizer that does not fit; a folder that is there.
    """
    if o.to.exists():
        raise UserError(f"{o.to} is there already: name a new folder, --to")
    refuse_unused(o)
    part, (source, size) = Path(f"{o.to}.part"), describe(o.data, o.split, o.config)
    state, tokenizer = begun(o, part, source)
    part.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(part / ".lock", blocking=False):
            tokenizer.save(part / "tokenizer.json")
            with progress(total=size, initial=sum(state.bytes.values()), unit="B", unit_scale=True) as bar:
                write(o, part, state, tokenizer, bar)
    except filelock.Timeout:
        raise UserError(f"another process writes {part}: wait for that one") from None
    meta = {"source": source, "bytes": sum(state.bytes.values()), "val_bytes": state.bytes["val"]}
    write_json(part / "meta.json", meta | {"dtype": id_type(tokenizer.vocab_size).name})
    part.rename(o.to)
    for name in ("state.json", ".lock"):
        (o.to / name).unlink()
    show(state.notes, o.data)
    print(f"{o.to}: {state.tokens['train']:,} training tokens, {state.tokens['val']:,} for validation")


def refuse_unused(o):
    """UserError: a setting that would be ignored."""
    here = o.data in SOURCES or Path(o.data).exists()
    plain = here and (o.data in SOURCES or not files_of(Path(o.data))[1])
    unused = {"vocab_size": o.tokenizer != "bpe", "field": plain, "config": here, "split": here}
    for name in unused:
        if unused[name] and getattr(o, name) != Options.__dataclass_fields__[name].default:
            raise UserError(
                f"{name} = {getattr(o, name)!r} means nothing to {o.data} in {o.tokenizer}: leave it"
            )


def begun(o, part, source):
    """The state of a folder and its tokenizer: as an earlier call left them, or new."""
    file, options = part / "state.json", {**asdict(o), "data": source, "to": ""}
    if not file.exists():
        few, bpe = are_few(o), o.tokenizer == "bpe"
        tokenizer = Tokenizer.train(sample(o, few), o.vocab_size) if bpe else open_tokenizer(o.tokenizer)
        if tokenizer.end_of_text is None:
            raise UserError("the tokenizer has no end of text: set eos_token in tokenizer_config.json")
        return State(options, few), tokenizer
    with reading(file, f"; delete {part} and begin again"):
        state = from_json(State, read_json(file))
    if other := [name for name in options if state.options.get(name) != options[name]]:
        raise UserError(f"{part} has another {', '.join(other)}: delete it, or name another --to")
    return state, load_tokenizer(part / "tokenizer.json")


# -- Which text is for what ------------------------------------------------------------------------


def is_held_out(name):
    """One document in 20, as data.divide takes them."""
    return int(sha1(name.encode("utf-8", "surrogateescape")).hexdigest(), 16) % 20 == 0


def are_few(o):
    """Does each document give its last tenth to validation? By data.divide's rule."""
    sides = {True: 0, False: 0}
    for name, text, _ in rows(*o.source):
        sides[is_held_out(name)] += judge(text) != EMPTY
        if sum(sides.values()) >= FEW and all(sides.values()):
            return False
    if not sum(sides.values()):
        raise UserError(f"{o.data} holds no text; give a file or folder with some")
    print(f"note: of these {sum(sides.values())} documents the last tenth of each is for validation")
    return True


def divided(name, size, few):
    """The parts of a document: [(split, its first byte, its end)]."""
    if not few:
        return [("val" if is_held_out(name) else "train", 0, size)]
    cut = size - max(size // 10, 1)
    return [("train", 0, cut), ("val", cut, size)]


def pieces_of(stream, start, end):
    """As data.pieces_of, of a part of a stream: (bytes, are they the last?), of an empty part once."""
    last = False
    while not last:
        stream.seek(start)
        piece = stream.read(min(PIECE, end - start))
        if piece and start + len(piece) < end:
            piece = piece[: piece.rfind(b"\n") + 1 or len(piece)]
        start += len(piece)
        yield piece, (last := start >= end or not piece)


def all_pieces(o, state):
    """Yield each piece from where a State is on, and move that behind it: (split, bytes, is it the first, is
    it the last of its part of a document?)."""
    started = state.row
    for row, (name, text, place) in enumerate(rows(*o.source, started, state.place), started):
        done = state.piece if row == started else 0
        remark, n = judge(text), 0
        if not done:
            note(state.notes, remark, name)
        if remark == EMPTY:
            continue
        with opened(text) as stream:
            for split, start, end in divided(name, stream.seek(0, 2), state.few):
                first = True
                for piece, last in pieces_of(stream, start, end):
                    n += 1
                    if n > done:
                        state.row, state.piece, state.place = row, n, place
                        yield split, piece, first, last
                    first = False


def sample(o, few):
    """What a BPE is trained on: the first 100 MB, from which it takes MOST bytes itself."""
    found, size = [], 0
    for split, piece, *_ in all_pieces(o, State({}, few)):
        found += [piece] * (split == "train")
        size += len(piece)
        if size > 10 * MOST:
            break
    return found


# -- Pieces -> ids ---------------------------------------------------------------------------------


def encode(tokenizer, piece):
    """A piece -> its ids, with what stands before and behind a text."""
    _, text, first, last = piece
    ids = encode_piece(tokenizer, text, first)
    if first:
        ids[:0] = begin_of(tokenizer)
    if last:
        ids.append(tokenizer.end_of_text)
    return np.array(ids, id_type(tokenizer.vocab_size))


def write(o, part, state, tokenizer, bar):
    """Write what is missing in train.bin and val.bin, and move the state on."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, ExitStack() as stack:
        files = {split: stack.enter_context(open(part / f"{split}.bin", "ab")) for split in state.tokens}
        for split, file in files.items():
            size = state.tokens[split] * id_type(tokenizer.vocab_size).itemsize
            if file.tell() < size:
                raise UserError(f"{file.name} is shorter than it was: delete {part} and begin again")
            file.truncate(size)
        pieces = all_pieces(o, state)
        while not state.full and (batch := take(pieces)):
            ids = pool.map(partial(encode, tokenizer), batch)
            try:
                for (split, piece, _, last), some in zip(batch, ids, strict=True):
                    files[split].write(some)
                    state.tokens[split] += len(some)
                    state.bytes[split] += len(piece)
                    bar.update(len(piece))
                    enough = o.tokens and state.tokens["train"] >= o.tokens and state.tokens["val"]
                    state.full = bool(last and enough)
                    if state.full:
                        break
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise UserError(f"cannot write {part}: {one_line(error)}; the same command goes on") from None
            write_json(part / "state.json", asdict(state))


def take(pieces):
    """The next pieces, of BATCH bytes or more."""
    batch, size = [], 0
    while size < BATCH and (piece := next(pieces, None)):
        batch.append(piece)
        size += len(piece[1]) + 1
    return batch


# -- Opening ---------------------------------------------------------------------------------------


def open_corpus(data="pydocs", tokenizer=None, vocab_size=4096, cache="data"):
    """As data.open_corpus, also of .jsonl and .parquet files, and with the tokenizer of a model."""
    folder = Path(data)
    if root.is_prepared(data):
        if tokenizer is None and (folder / "tokenizer.json").exists():
            tokenizer = folder
        made = root.tokenizer_of(folder, tokenizer) if tokenizer in OURS else open_tokenizer(tokenizer)
        return root.read_corpus(folder, made)
    many = data not in SOURCES and data and folder.exists() and files_of(folder)[1]
    if not many and (tokenizer in OURS or not (data in SOURCES or folder.exists())):
        return root.open_corpus(data, tokenizer if tokenizer in OURS else None, vocab_size, cache)
    name = tokenizer or "bytes"
    made = None if name == "bpe" else open_tokenizer(name)
    kind = f"bpe{vocab_size}" if made is None else f"{made.name}-{made.digest}"
    digest = sha256(ascii((describe(data), kind)).encode()).hexdigest()[:8]
    folder = Path(cache, f"{folder.stem}-{kind}-{digest}")
    if not folder.exists():
        size = {"vocab_size": vocab_size} if made is None else {}
        prepare(Options(data, folder, name, **size))
    return root.read_corpus(folder, made or load_tokenizer(folder / "tokenizer.json"))
