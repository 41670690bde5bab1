"""Texts of any size -> a folder with train.bin and val.bin, which data.py and train.py read.

prepare       JSON lines, Parquet, plain texts or a data set of the Hub -> such a folder
open_corpus   as data.open_corpus, also of such files and with the tokenizer of a model

While it is made, the folder is FOLDER.part, and state.json in it says how far it is: what was written by then
is kept after a kill, and the same command goes on behind it and makes the same files.
"""

import os
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha1, sha256
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import tyro

import data as root
from common import UserError, one_line, read_json, user_error_if_unreadable, write_json
from data import id_type
from lab.common import Given, progress
from lab.corpora.sources import describe, files_of, show, texts
from lab.corpora.tokenizers import begin_of, load_tokenizer, open_tokenizer
from model import Positive, validated_dataclass
from sources import LINES
from tokenizer import BPE_TRAINING_BYTES, Tokenizer

OURS = None, "bytes", "bpe", "gpt2"  # the tokenizers that the root opens
FEW = 100  # texts: of fewer each gives its last tenth to validation
BATCH = 4 * 10**6  # bytes between two entries in state.json


@validated_dataclass
class Options:
    """Prepare a corpus for train.py --data, or go on where an earlier call stopped."""

    # a text, a .jsonl or .parquet file, a folder of them, pydocs, pysource, or a data set of the Hub
    data: tyro.conf.Positional[Given]
    to: Path  # a new folder
    tokenizer: str = "bytes"  # bytes, bpe, gpt2, or a model or prepared folder that has one
    vocab_size: int = 4096  # tokens of a bpe, which is trained on the text
    field: str = "text"  # where the text of a row is
    config: str | None = None  # of a data set of the Hub that has several
    split: str = "train"  # of a data set of the Hub
    tokens: Positive | None = None  # stop behind so many training tokens; None: all


@dataclass
class State:
    """How far a folder is."""

    options: dict  # that it was begun with
    few: bool  # are there so few texts that each is divided?
    texts: int = 0  # that are written
    place: Any = None  # behind them in a data set of the Hub
    tokens: dict = field(default_factory=lambda: {"train": 0, "val": 0})  # written
    bytes: dict = field(default_factory=lambda: {"train": 0, "val": 0})  # of their text


def prepare(o):
    """Write the folder that Options describe, or what an earlier call left of it to write.

    Raises:
        UserError: no text, or one that cannot be read; a tokenizer that does not fit; a folder that is there.
    """
    if o.to.exists():
        raise UserError(f"{o.to} is there already: name a new folder, --to")
    part, notes, (source, size) = Path(f"{o.to}.part"), defaultdict(list), describe(o.data, o.split, o.config)
    state, tokenizer = begun(o, part, source)
    part.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(part / ".lock", blocking=False):
            tokenizer.save(part / "tokenizer.json")
            with progress(total=size, initial=sum(state.bytes.values()), unit="B", unit_scale=True) as bar:
                for done in write(o, part, state, tokenizer, notes):
                    bar.update(done)
            meta = {"source": source, "bytes": sum(state.bytes.values()), "val_bytes": state.bytes["val"]}
            write_json(part / "meta.json", meta | {"dtype": id_type(tokenizer.vocab_size).name})
            part.rename(o.to)
    except filelock.Timeout:
        raise UserError(f"another process writes {part}: wait for that one") from None
    except OSError as error:
        raise UserError(f"cannot write {part}: {one_line(error)}; the same command goes on") from None
    for name in ("state.json", ".lock"):
        (o.to / name).unlink()
    show(notes, o.data)
    print(f"{o.to}: {state.tokens['train']:,} training tokens, {state.tokens['val']:,} for validation")


def begun(o, part, source):
    """The state of a folder and its tokenizer: as an earlier call left them, or new."""
    file, options = part / "state.json", {**asdict(o), "data": source, "to": ""}
    if not file.exists():
        few, bpe = are_few(o), o.tokenizer == "bpe"
        tokenizer = Tokenizer.train(sample(o, few), o.vocab_size) if bpe else open_tokenizer(o.tokenizer)
        if tokenizer.end_of_text is None:
            raise UserError(f"{o.tokenizer} has no eos_token in its tokenizer_config.json: set it")
        return State(options, few), tokenizer
    with user_error_if_unreadable(file, f"; delete {part} and begin again"):
        state = State(**read_json(file))
    if other := [name for name in options if state.options.get(name) != options[name]]:
        raise UserError(f"{part} has another {', '.join(other)}: delete it, or name another --to")
    return state, load_tokenizer(part / "tokenizer.json")


# -- Which text is for what ------------------------------------------------------------------------


def is_held_out(name):
    """One text in 20, as data.split_documents takes them."""
    return int(sha1(name.encode("utf-8", "surrogateescape")).hexdigest(), 16) % 20 == 0


def are_few(o):
    """Does each text give its last tenth to validation? By data.split_documents's rule."""
    sides = Counter()
    for name, *_ in texts(o):
        sides[is_held_out(name)] += 1
        if sides.total() >= FEW and len(sides) == 2:
            return False
    if not sides:
        raise UserError(f"{o.data} holds no text: blank files are none, nor those with zero bytes (UTF-16)")
    print(f"note: of these {sides.total()} documents the last tenth of each is for validation")
    return True


def divided(name, text, few):
    """The parts of a text: [(split, bytes)]."""
    if few:
        cut = len(text) - max(len(text) // 10, 1)
        return [("train", text[:cut]), ("val", text[cut:])]
    return [("val" if is_held_out(name) else "train", text)]


def sample(o, few):
    """What a BPE is trained on: the first 100 MB, from which it takes BPE_TRAINING_BYTES itself."""
    found, size = [], 0
    for name, text, _ in texts(o):
        found += [part for split, part in divided(name, text, few) if split == "train"]
        size += len(text)
        if size > 10 * BPE_TRAINING_BYTES:
            break
    return found


# -- Texts -> ids ----------------------------------------------------------------------------------


def encode(tokenizer, text):
    """A text -> its ids, with what stands before and behind it."""
    ids = [*begin_of(tokenizer), *tokenizer.encode(text), tokenizer.end_of_text]
    return np.array(ids, id_type(tokenizer.vocab_size))


def write(o, part, state, tokenizer, notes):
    """Write what is missing in train.bin and val.bin, and move the state on; yields the bytes."""
    found, width = texts(o, state.texts, state.place, notes), id_type(tokenizer.vocab_size).itemsize
    with ThreadPoolExecutor(os.cpu_count()) as pool, ExitStack() as stack:
        files = {split: stack.enter_context(open(part / f"{split}.bin", "ab")) for split in state.tokens}
        for split, file in files.items():
            file.truncate(width * state.tokens[split])
        while not is_full(o, state) and (batch := take(found, most_bytes(o, state))):
            parts = [part for name, text, _ in batch for part in divided(name, text, state.few)]
            ids = pool.map(partial(encode, tokenizer), [text for _, text in parts])
            for (split, text), some in zip(parts, ids, strict=True):
                files[split].write(some)
                state.tokens[split] += len(some)
                state.bytes[split] += len(text)
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
            state.texts, state.place = state.texts + len(batch), batch[-1][-1]
            write_json(part / "state.json", asdict(state))
            yield sum(len(text) for _, text in parts)


def is_full(o, state):
    return o.tokens and state.tokens["train"] >= o.tokens and state.tokens["val"]


def most_bytes(o, state):
    """How much is written at once: BATCH, or as many bytes as tokens are still wanted, at least one."""
    return BATCH if o.tokens is None else min(BATCH, max(o.tokens - state.tokens["train"], 1))


def take(found, enough):
    """The next texts, of so many bytes or more."""
    batch, size = [], 0
    while size < enough and (text := next(found, None)):
        batch.append(text)
        size += len(text[1])
    return batch


# -- Opening ---------------------------------------------------------------------------------------


def open_corpus(data="pydocs", tokenizer=None, vocab_size=4096):
    """As data.open_corpus, also of .jsonl and .parquet files, and with the tokenizer of a model."""
    folder = Path(data)
    if root.is_prepared(data):
        if tokenizer is None and (folder / "tokenizer.json").exists():
            tokenizer = folder
        made = root.tokenizer_of(folder, tokenizer) if tokenizer in OURS else open_tokenizer(tokenizer)
        return root.read_corpus(folder, made)
    if tokenizer in OURS and not any(file.suffix.lower() in LINES for file in files_of(data)):
        return root.open_corpus(data, tokenizer, vocab_size)
    name = tokenizer or "bytes"
    made = None if name == "bpe" else open_tokenizer(name)
    kind = f"bpe{vocab_size}" if made is None else f"{made.name}-{made.digest}"
    digest = sha256(ascii((describe(data), kind)).encode()).hexdigest()[:8]
    folder = Path("data", f"{folder.stem}-{kind}-{digest}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_name(f".{folder.name}.lock")):  # another training may prepare it
        if not folder.exists():
            prepare(Options(data, folder, name, vocab_size))
    return root.read_corpus(folder, made or load_tokenizer(folder / "tokenizer.json"))
