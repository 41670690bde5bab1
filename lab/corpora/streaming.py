"""A corpus larger than memory, through Hugging Face `datasets`, into memory-mapped shards.

    pip install datasets
    python -m lab corpus stream fineweb-edu --tokens 1e9
    python -m lab train --preset 70m --data data/fineweb-edu-gpt2

val.bin, train-00000.bin, ..   token ids; the first documents are the validation
tokenizer.json
meta.json                      what has been read so far, and where in the dataset that was

meta.json follows each shard. After an interruption the same command goes on behind the last shard
and makes the files that it would have made anyway; a larger --tokens adds shards.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from pydantic import Field

from lab.common import progress, strict_dataclass, write_bytes
from lab.corpora.preparation import CACHE, check_end, describe, field_of, id_type, read_meta
from lab.corpora.tokenizers import begin_of, load_tokenizer, open_tokenizer
from model import UserError, write_json

NAMES = {  # of Hugging Face's hub: repository, configuration
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "minipile": ("JeanKaddour/minipile", None),
    "pile": ("monology/pile-uncopyrighted", None),
}
BATCH = 2**22  # bytes encoded at a time
Tokens = Annotated[float, Field(ge=1)]


@strict_dataclass
class Options:
    """Stream a corpus into shards of token ids, and go on where an earlier call stopped."""

    # fineweb-edu, minipile, pile, any dataset of the hub, or a local folder of .jsonl or .parquet
    # files, or of .txt files, one document each
    name: tyro.conf.Positional[str]
    tokens: Tokens  # number of training tokens, for instance 1e9; inf for all
    tokenizer: str = "gpt2"  # bytes, gpt2, or the folder of a model or a prepared corpus
    config: str | None = None  # configuration of the dataset, where it has several
    split: str = "train"  # split of the dataset
    field: str = "text"  # the column with the text; meta.text: within meta
    val_tokens: Tokens = 1e6  # number of validation tokens, from the first documents
    shard_tokens: Tokens = 1e8  # tokens a file, and the most that an interruption loses
    folder: Path | None = None  # where to; by default data/NAME-TOKENIZER


def local_files(name):
    """The files of a local folder, sorted; none of a dataset of the hub."""
    return sorted(file for file in Path(name).rglob("*") if file.is_file())


def open_dataset(options):
    """An iterable of documents that can tell where it is."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError("streaming needs the package datasets: pip install datasets") from None
    name, config = NAMES.get(options.name, (options.name, None))
    kwargs = dict(path=name, name=options.config or config)
    files = local_files(name)
    if {file.suffix for file in files} == {".txt"}:
        # A file is a document; datasets would take each line for one.
        texts = {options.split: [*map(str, files)]}
        kwargs = dict(path="text", data_files=texts, sample_by="document")
    try:
        return load_dataset(**kwargs, split=options.split, streaming=True)
    except StopIteration:  # of datasets, where there is no row to look at
        raise UserError(f"{name} is empty; give more text") from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot open {name}: {error}. Without a network give a local folder of .jsonl, "
            ".parquet or .txt files"
        ) from None


def texts_of(dataset, field):
    """Its documents as bytes."""
    try:
        for row in dataset:
            try:
                text = field_of(row, field)
            except (LookupError, TypeError):
                text = 0
            if not isinstance(text, str | None):
                raise UserError(f"a document has no text in {field!r}; --field is one of {[*row]}")
            yield (text or "").encode("utf-8", "replace")
    except (OSError, ValueError) as error:  # no connection, or a line that is no JSON
        raise UserError(
            f"the stream broke off: {error}; the same command goes on behind the last shard"
        ) from None


def take(texts, size):
    """Documents of about `size` bytes. A token has a byte or more, so that `size` is exceeded by
    less than the last document's tokens."""
    batch = []
    for text in texts:
        batch.append(text)
        size -= len(text) + 1  # the end of text is a token
        if size <= 0:
            break
    return batch


def describe_source(options):
    """What a corpus is made from. Local files by size and time: changed ones are another corpus."""
    o, files = options, local_files(options.name)
    states = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    digest = [hashlib.sha256(repr(states).encode()).hexdigest()[:8]] if files else []
    names = [o.name, *digest, o.config or "", o.split, o.field, o.tokenizer]
    return " ".join([*names, f"{o.val_tokens:g} {o.shard_tokens:g}"])


def read_shard(texts, wanted, encode, bar):
    """Documents until there are `wanted` tokens -> the ids of each, and their bytes in all."""
    pieces, count, size = [], 0, 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while count < wanted and (batch := take(texts, min(BATCH, wanted - count))):
            for ids in pool.map(encode, batch):
                pieces.append(ids)
                count += len(ids)
                bar.update(len(ids))
            size += sum(map(len, batch))
    return pieces, size


def add_shards(folder, meta, dataset, options):
    """Write val.bin, then shards until there are enough tokens, and meta.json after each file.

    `meta` is what meta.json holds; it is changed in place.
    """
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    check_end(tokenizer)
    kind = id_type(tokenizer.vocab_size)

    def encode(text):
        ids = [*begin_of(tokenizer), *tokenizer.encode(text), tokenizer.end_of_text]
        return np.array(ids, dtype=kind)

    texts, all_tokens = texts_of(dataset, options.field), options.val_tokens + options.tokens
    done = meta["tokens"] + (options.val_tokens if meta["tokens"] else 0)
    with progress(total=all_tokens, initial=done, unit=" tokens", unit_scale=True) as bar:
        while meta["tokens"] < options.tokens:
            if meta["shards"] == 0:
                name, wanted = "val.bin", options.val_tokens
            else:
                name = f"train-{meta['shards'] - 1:05}.bin"
                wanted = min(options.shard_tokens, options.tokens - meta["tokens"])
            pieces, size = read_shard(texts, wanted, encode, bar)
            if not pieces:  # the text has ended
                break
            shard = np.concatenate(pieces)
            write_bytes(folder / name, shard.tobytes())
            meta["sha256"] = hashlib.sha256(meta["sha256"].encode() + shard.tobytes()).hexdigest()
            meta["bytes"] += size
            if name == "val.bin":
                meta["val_bytes"] = size
            else:
                meta["tokens"] += len(shard)
            meta |= dict(dtype=kind.name, shards=meta["shards"] + 1, complete=False)
            meta["state"] = dataset.state_dict()
            write_json(folder / "meta.json", meta)


def stream(options: Annotated[Options, tyro.conf.arg(name="")]):
    """Write the corpus that `options` describe, or what an earlier call left of it to write.

    Raises:
        UserError: text that is too short or cannot be read, or a folder that holds something else.
    """
    options.name = name = options.name.rstrip("/")
    folder = Path(options.folder or CACHE / f"{Path(name).name}-{Path(options.tokenizer).name}")
    dataset, source, meta = open_dataset(options), describe_source(options), read_meta(folder)
    if "shards" not in meta and any(folder.glob("*")):
        raise UserError(f"{folder} holds something else: use another --folder")
    if not meta.get("tokens"):  # a stream that got no further than its validation begins again
        if options.tokenizer == "bpe":
            raise UserError(
                "a stream takes a BPE that is there: prepare a part of the text with one (python "
                "-m lab corpus FILE --tokenizer bpe), and name its folder with --tokenizer"
            )
        tokenizer = open_tokenizer(options.tokenizer)
        folder.mkdir(parents=True, exist_ok=True)
        meta = dict(source=source, complete=False, tokens=0, shards=0, bytes=0, sha256="")
        write_json(folder / "meta.json", meta)  # first: the folder is ours
        tokenizer.save(folder / "tokenizer.json")
    elif meta["source"] != source:
        raise UserError(f"{folder} was made from {meta['source']!r}, not {source!r}: use --folder")
    else:
        dataset.load_state_dict(meta["state"])
    add_shards(folder, meta, dataset, options)
    if not meta["tokens"]:
        raise UserError(f"the validation takes all of {name}: give more text, or lower --val-tokens")
    write_json(folder / "meta.json", meta | dict(complete=True))
    print(f"{describe(folder)}, {meta['tokens']:,} training tokens; next:")
    print(f"python -m lab train --data {folder}")
