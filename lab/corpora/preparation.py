"""Texts of any size to a folder of token ids, with train.bin and val.bin, which data.py and train.py read.

prepare       writes such a folder from JSON lines, Parquet files, plain texts or a data set of the Hub
open_corpus   as data.open_corpus, and also opens these, with the tokenizer of a model if that is asked for

Until it is complete, the folder is called FOLDER.part, and its state.json says how far it is. If the command
is killed, what state.json knows of is kept: the same command continues after that, and makes the same files.
"""

import os
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha1, sha256
from pathlib import Path
from typing import Annotated, Any

import filelock
import numpy as np
import tyro

import data as root_data
from common import UserError, one_line, read_json, user_error_if_unreadable, write_json
from data import end_of_training_part, id_type
from lab.common import NonEmpty, progress
from lab.corpora.sources import describe, files_of, show, texts
from lab.corpora.tokenizers import begin_of, load_tokenizer, open_tokenizer
from model import Positive, validated_dataclass
from sources import ROW_SUFFIXES, SOURCES
from tokenizer import BPE_TRAINING_BYTES, Tokenizer

OURS = None, *root_data.TOKENIZERS  # the tokenizers that the root can open
FEW = 100  # with fewer texts, the last tenth of each text is for validation
BATCH = 4 * 10**6  # bytes of text that are written before state.json is


@validated_dataclass
class Options:
    """Prepare a corpus for train.py --data, or continue where an earlier command stopped."""

    # a text, .jsonl, .ndjson or .parquet file, a folder of them, pydocs or pysource (text that comes with
    # Python), or OWNER/NAME of a data set on the Hugging Face Hub
    data: Annotated[tyro.conf.Positional[NonEmpty], tyro.conf.arg(metavar="DATA")]
    to: Path  # new folder to write to
    tokenizer: str = "bytes"  # bytes, bpe, gpt2, or the directory of a model or corpus that has a tokenizer
    vocab_size: int = 4096  # vocabulary size of a bpe tokenizer, which is trained on the text
    field: str = "text"  # field of a row that holds its text
    config: str | None = None  # configuration of a data set on the Hub, if it has several
    split: str = "train"  # split of a data set on the Hub
    # stop at the end of the document that brings the training text to this many tokens; None: use all text
    tokens: Positive | None = None


@dataclass
class State:
    """How far a folder is."""

    options: dict  # that the folder was begun with
    few: bool  # whether there are so few texts that each is divided
    texts: int = 0  # texts that have been written
    place: Any = None  # where to resume after these texts: the state_dict of a data set of the Hub
    tokens: dict = field(default_factory=lambda: {"train": 0, "val": 0})  # tokens that have been written
    bytes: dict = field(default_factory=lambda: {"train": 0, "val": 0})  # bytes of their text


def prepare(o):
    """Write the folder that Options describe, or the rest of it, if an earlier command has begun.

    Raises:
        UserError: there is no text, a text cannot be read, the tokenizer does not fit, or the folder exists.
    """
    if o.to.exists():
        raise UserError(f"--to {o.to} already exists: name a new folder")
    is_folder = o.data not in SOURCES and Path(o.data).is_dir()
    if is_folder and o.to.resolve().is_relative_to(Path(o.data).resolve()):
        raise UserError(f"--to {o.to} lies in {o.data}, whose files are the text: name a folder elsewhere")
    part = Path(f"{o.to}.part")
    notes = defaultdict(list)
    source, size = describe(o.data, o.split, o.config)
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
        raise UserError(f"another process is writing {part}: wait until it has finished") from None
    except OSError as error:
        raise UserError(
            f"cannot write {part} ({one_line(error)}): fix this, then run the same command again to continue"
        ) from None
    for name in ("state.json", ".lock"):
        (o.to / name).unlink()
    show(notes, o.data)
    print(f"{o.to}: {state.tokens['train']:,} training tokens, {state.tokens['val']:,} for validation")


def begun(o, part, source):
    """The state of a folder and its tokenizer, new or as an earlier command left them.

    Args:
        o: Options.
        part: the folder.
        source: a description that differs whenever the texts do, see sources.describe.
    """
    file = part / "state.json"
    options = {**asdict(o), "data": source, "to": ""}
    if not file.exists():
        few = are_few(o)
        if o.tokenizer == "bpe":
            tokenizer = Tokenizer.train(sample(o, few), o.vocab_size)
        else:
            tokenizer = open_tokenizer(o.tokenizer)
        if tokenizer.end_of_text is None:
            raise UserError(
                f"the tokenizer of {o.tokenizer} has no end-of-text token: add eos_token to its "
                "tokenizer_config.json"
            )
        return State(options, few), tokenizer
    with user_error_if_unreadable(file, f"; delete {part} and begin again"):
        state = State(**read_json(file))
    changed = []  # as they are typed
    for name, value in options.items():
        if state.options.get(name) != value:
            changed.append("DATA" if name == "data" else "--" + name.replace("_", "-"))
    if changed:
        raise UserError(
            f"{part} was begun with a different {', '.join(changed)}: delete it, or name another folder with "
            "--to"
        )
    return state, load_tokenizer(part / "tokenizer.json")


# -- Which text is for what ------------------------------------------------------------------------


def is_held_out(name):
    """Whether a text is for validation: one in 20, chosen as data.split_documents chooses them."""
    return int(sha1(name.encode("utf-8", "surrogateescape")).hexdigest(), 16) % 20 == 0


def are_few(o):
    """Whether there are so few texts that the last tenth of each is for validation, as data.split_documents
    says.

    Raises:
        UserError: there is no text.
    """
    sides = Counter()
    for name, *_ in texts(o):
        sides[is_held_out(name)] += 1
        if sides.total() >= FEW and len(sides) == 2:
            return False
    if not sides:
        raise UserError(
            f"{o.data} has no text: blank files, and files with NUL bytes, such as UTF-16, are skipped; "
            "convert them to UTF-8"
        )
    n = sides.total()
    found = "is only 1 document" if n == 1 else f"are only {n} documents"
    print(f"note: there {found}: the last tenth of each is for validation")
    return True


def divided(name, text, few):
    """The parts of a text, [(split, bytes)]; `few` as are_few says."""
    if few:
        cut = end_of_training_part(text)
        return [("train", text[:cut]), ("val", text[cut:])]
    return [("val" if is_held_out(name) else "train", text)]


def sample(o, few):
    """The texts that a BPE is trained on: the training texts among the first ten times BPE_TRAINING_BYTES.

    The BPE draws BPE_TRAINING_BYTES of them, so that it does not see the beginning of the corpus alone.
    """
    found = []
    size = 0
    for name, text, _ in texts(o):
        found += [part for split, part in divided(name, text, few) if split == "train"]
        size += len(text)
        if size > 10 * BPE_TRAINING_BYTES:
            break
    return found


# -- Texts -> ids ----------------------------------------------------------------------------------


def encode(tokenizer, text):
    """The ids of a text, with the tokens that stand before and after each text."""
    ids = [*begin_of(tokenizer), *tokenizer.encode(text), tokenizer.end_of_text]
    return np.array(ids, id_type(tokenizer.vocab_size))


def write(o, part, state, tokenizer, notes):
    """Write the rest of train.bin and val.bin in batches, and advance the state.

    Args:
        o: Options.
        part: the folder.
        state: State, which is changed.
        tokenizer: of the folder.
        notes: as sources.texts.

    Yields:
        The bytes of text in each batch.
    """
    found = texts(o, state.texts, state.place, notes)
    width = id_type(tokenizer.vocab_size).itemsize
    with ThreadPoolExecutor(os.cpu_count()) as pool, ExitStack() as stack:
        files = {}
        for split, tokens in state.tokens.items():
            files[split] = stack.enter_context(open(part / f"{split}.bin", "ab"))
            # What was written after the last saved state is dropped, and written again.
            files[split].truncate(width * tokens)
        while not is_full(o, state):
            batch = take(found, most_bytes(o, state))
            if not batch:
                break
            parts = []
            for name, text, _ in batch:
                parts += divided(name, text, state.few)
            all_ids = pool.map(partial(encode, tokenizer), [text for _, text in parts])
            for (split, text), ids in zip(parts, all_ids, strict=True):
                files[split].write(ids)
                state.tokens[split] += len(ids)
                state.bytes[split] += len(text)
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
            state.texts += len(batch)
            _, _, state.place = batch[-1]
            write_json(part / "state.json", asdict(state))
            yield sum(len(text) for _, text in parts)


def is_full(o, state):
    """Whether there are as many training tokens as are wanted, and something for validation."""
    return o.tokens and state.tokens["train"] >= o.tokens and state.tokens["val"]


def most_bytes(o, state):
    """Bytes of the next batch."""
    if o.tokens is None:
        return BATCH
    # A token has at least one byte, so a batch of this many bytes has hardly more tokens than are wanted:
    # beyond them are only the rest of its last text, which is not cut, and the end token of each text.
    return min(BATCH, max(o.tokens - state.tokens["train"], 1))


def take(found, enough):
    """The next of the texts `found`, until they have `enough` bytes or there are no more."""
    batch = []
    size = 0
    while size < enough:
        text = next(found, None)
        if text is None:
            break
        batch.append(text)
        size += len(text[1])
    return batch


# -- Opening ---------------------------------------------------------------------------------------


def open_corpus(data="pydocs", tokenizer=None, vocab_size=4096):
    """Open a corpus as data.open_corpus does, and also .jsonl, .ndjson and .parquet files.

    Args:
        data: as Options.data, or a prepared folder.
        tokenizer: as Options.tokenizer; None: the one of a prepared folder, otherwise bytes.
        vocab_size: as Options.vocab_size.

    Raises:
        UserError: as `prepare`.
    """
    folder = Path(data)
    if root_data.is_prepared(data):
        own_file = folder / "tokenizer.json"
        own = load_tokenizer(own_file) if own_file.exists() else None
        if tokenizer is None and own is not None:
            made = own
        elif tokenizer in OURS:
            made = root_data.tokenizer_of(folder, tokenizer)
        else:
            made = open_tokenizer(tokenizer)
            root_data.refuse_other_tokenizer(folder, own, made, tokenizer)
        return root_data.read_corpus(folder, made)
    has_rows = any(file.suffix.lower() in ROW_SUFFIXES for file in files_of(data))
    if tokenizer in OURS and not has_rows:
        return root_data.open_corpus(data, tokenizer, vocab_size)
    name = tokenizer or "bytes"
    if name == "bpe":
        made = None  # it is trained on the text, in `prepare`
        kind = f"bpe{vocab_size}"
    else:
        made = open_tokenizer(name)
        kind = f"{made.name}-{made.digest}"
    digest = sha256(ascii((describe(data), kind)).encode()).hexdigest()[:8]
    folder = Path("data", f"{folder.stem}-{kind}-{digest}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_name(f".{folder.name}.lock")):  # another process may prepare it
        if not folder.exists():
            if name != "bpe":  # only a BPE follows it: an interrupted preparation goes on with another one
                vocab_size = Options.vocab_size
            prepare(Options(data, folder, name, vocab_size))
    return root_data.read_corpus(folder, made or load_tokenizer(folder / "tokenizer.json"))
