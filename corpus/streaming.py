"""A corpus larger than memory, through Hugging Face `datasets`, into memory-mapped shards.

    pip install datasets
    python -m corpus stream fineweb-edu --tokens 1e9
    python train.py --preset 70m --data data/fineweb-edu-gpt2

val.bin, train-00000.bin, ..   token ids (see batches.py); the first documents are the validation
tokenizer.json
meta.json                      what has been read so far, and where in the dataset that was

meta.json follows each shard. After an interruption the same command goes on behind the last shard
and makes the files that it would have made anyway; a larger --tokens adds shards.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from corpus.batches import check_streamed, describe, id_type, is_prepared, read_meta
from corpus.preparation import CACHE, check_end
from corpus.tokenizers import Tokenizer, check_bpe_size, load_tokenizer, open_tokenizer
from runtime import UserError, sync, write_json

NAMES = {  # of Hugging Face's hub: repository, configuration
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "minipile": ("JeanKaddour/minipile", None),
    "pile": ("monology/pile-uncopyrighted", None),
}
BATCH = 2**22  # bytes encoded at a time
BPE_TEXT = 20_000_000  # bytes that a BPE is trained on


def open_dataset(name, config, split, field):
    """An iterable of documents that can tell where it is."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError("streaming needs the package datasets: pip install datasets") from None
    known = NAMES.get(name, (name, None))
    config = config or known[1]
    files = [file for file in sorted(Path(name).rglob("*")) if file.is_file()]
    texts = [str(file) for file in files if file.suffix == ".txt"]
    if texts and len(texts) < len(files):
        other = next(file for file in files if file.suffix != ".txt")
        raise UserError(
            f"{name} has .txt files and {other.name}: give them in folders of their own"
        )
    try:
        if texts:  # a file is a document; by itself datasets takes each line for one
            kwargs = dict(data_files={split: texts}, sample_by="document")
            dataset = load_dataset("text", split=split, streaming=True, **kwargs)
        else:
            dataset = load_dataset(known[0], config, split=split, streaming=True)
        first = next(iter(dataset), None)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"cannot open {known[0]}: {reason}. Without a network give a local folder of .jsonl, "
            ".parquet or .txt files"
        ) from None
    if first is None:
        raise UserError(f"{known[0]} has no documents in its split {split}")
    if not isinstance(first.get(field), str):
        raise UserError(f"{known[0]} has no text in {field!r}; --field is one of {sorted(first)}")
    return dataset


def texts_of(dataset, field):
    """Its documents as bytes."""
    try:
        for row in dataset:
            yield (row[field] or "").encode("utf-8", "replace")
    except OSError as error:
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


def describe_source(name, *settings):
    """What a corpus is made from. Local files by size and time: changed ones are another corpus."""
    files = [f for f in sorted(Path(name).rglob("*")) if f.is_file()]
    states = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    digest = [hashlib.sha256(repr(states).encode()).hexdigest()[:8]] if files else []
    return " ".join(str(x) for x in (name, *digest, *settings))


def make_tokenizer(name, vocab_size, documents):
    """As `prepare` has it, but a BPE is trained on the beginning of the corpus."""
    if name != "bpe":
        return open_tokenizer(name)
    check_bpe_size(vocab_size)
    bar = tqdm(documents, "reading text for a BPE", unit=" documents", leave=False)
    texts = [text.decode() for text in take(bar, BPE_TEXT)]
    print(f"training a BPE tokenizer of {vocab_size} tokens", flush=True)
    return Tokenizer.train(texts, vocab_size)


def write_shard(file, ids):
    """All of a shard, or none of it."""
    temporary = file.with_name(file.name + ".tmp")
    ids.tofile(temporary)
    sync(temporary)
    os.replace(temporary, file)


def begin(folder, meta, source, tokenizer, vocab_size, documents):
    """A new corpus in `folder`, whose meta.json is `meta` so far -> what meta.json has now."""
    if is_prepared(folder) and "shards" not in meta:
        raise UserError(f"{folder} holds another corpus: delete it, or use --folder")
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(tokenizer, vocab_size, documents).save(folder / "tokenizer.json")
    meta = dict(source=source, complete=False, tokens=0, shards=0, documents=0, bytes=0)
    meta |= dict(sha256="", state=None)
    write_json(folder / "meta.json", meta)
    return meta


def read_shard(texts, wanted, encode, progress):
    """Documents until there are `wanted` tokens -> ids of each, tokens and bytes in all."""
    pieces, count, size = [], 0, 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while count < wanted and (batch := take(texts, min(BATCH, wanted - count))):
            for ids in pool.map(encode, batch):
                pieces.append(ids)
                count += len(ids)
                progress(len(ids))
            size += sum(map(len, batch))
    return pieces, count, size


def add_shards(folder, meta, dataset, field, tokens, val_tokens, shard_tokens):
    """Write shards until there are `tokens` tokens, and `meta` after each -> has the text ended?"""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    check_end(tokenizer)
    kind = id_type(tokenizer.vocab_size)
    meta["dtype"] = kind.name

    def encode(text):
        ids = [*tokenizer.begin, *tokenizer.encode(text), tokenizer.end_of_text]
        return np.array(ids, dtype=kind)

    texts, ended = texts_of(dataset, field), False
    total = int(tokens) if tokens < np.inf else None
    with tqdm(total=total, initial=meta["tokens"], unit=" tokens", unit_scale=True) as bar:
        while not ended and (meta["shards"] == 0 or meta["tokens"] < tokens):
            is_val = meta["shards"] == 0
            wanted = val_tokens if is_val else min(shard_tokens, tokens - meta["tokens"])
            progress = (lambda n: None) if is_val else bar.update
            pieces, count, size = read_shard(texts, wanted, encode, progress)
            ended = count < wanted
            if is_val and ended:
                raise UserError(f"{folder}: the text has {count:,} tokens; lower --val-tokens")
            if not pieces:
                break
            shard, number = np.concatenate(pieces), meta["shards"] - 1
            write_shard(folder / ("val.bin" if is_val else f"train-{number:05}.bin"), shard)
            meta["sha256"] = hashlib.sha256(meta["sha256"].encode() + shard.tobytes()).hexdigest()
            meta["documents"] += len(pieces)
            meta["bytes"] += size
            if is_val:
                meta["val_bytes"] = size
            else:
                meta["tokens"] += count
            meta |= dict(shards=meta["shards"] + 1, complete=False, state=dataset.state_dict())
            write_json(folder / "meta.json", meta)
    return ended


def stream(
    name: tyro.conf.Positional[str],
    tokens: float,
    tokenizer: str = "gpt2",
    vocab_size: int = 4096,
    config: str | None = None,
    split: str = "train",
    field: str = "text",
    val_tokens: float = 1e6,
    shard_tokens: float = 1e8,
    folder: Path | None = None,
):
    """Stream a corpus into shards of token ids, and go on where an earlier call stopped.

    Args:
        name: fineweb-edu, minipile, pile, any dataset of the hub, or a local folder of .jsonl
            or .parquet files, or of .txt files, one document each
        tokens: number of training tokens, for instance 1e9; inf for all
        tokenizer: bytes, gpt2, bpe (trained on the first 20 MB), or a model that has one
        vocab_size: number of tokens of a bpe tokenizer
        config: configuration of the dataset, where it has several
        split: split of the dataset
        field: the column with the text
        val_tokens: number of validation tokens, from the first documents
        shard_tokens: tokens a file, and the most that an interruption loses
        folder: where to; by default data/NAME-TOKENIZER
    """
    if not min(tokens, val_tokens, shard_tokens) >= 1:
        raise UserError("--tokens, --val-tokens and --shard-tokens must be at least 1")
    name = name.rstrip("/")
    folder = Path(folder or CACHE / f"{Path(name).name}-{Path(tokenizer).name}")
    dataset = open_dataset(name, config, split, field)
    kind = f"bpe{vocab_size}" if tokenizer == "bpe" else tokenizer
    if tokenizer not in ("bytes", "bpe", "gpt2"):
        kind = open_tokenizer(tokenizer).digest
    source = describe_source(
        name, config or "", split, field, f"{kind} {val_tokens:g} {shard_tokens:g}"
    )
    meta = read_meta(folder)
    if meta.get("shards", 0) == 0:
        meta = begin(folder, meta, source, tokenizer, vocab_size, texts_of(dataset, field))
    elif meta["source"] != source:
        raise UserError(f"{folder} was made from {meta['source']!r}, not {source!r}: use --folder")
    if meta["complete"]:
        check_streamed(folder)
    if meta["state"]:
        dataset.load_state_dict(meta["state"])
    ended = add_shards(folder, meta, dataset, field, tokens, val_tokens, shard_tokens)
    if not meta["tokens"]:
        for file in ("val.bin", "tokenizer.json", "meta.json"):
            (folder / file).unlink()
        raise UserError(
            f"{name} is used up by the validation, which takes whole documents: give more of them, "
            "or lower --val-tokens"
        )
    write_json(folder / "meta.json", meta | dict(complete=True))
    if ended and tokens < np.inf:
        print(f"note: {name} has {meta['tokens']:,} training tokens, not {tokens:,.0f}")
    print(f"{describe(folder)}, {meta['tokens']:,} training tokens; next:")
    print(f"python train.py --data {folder}")
