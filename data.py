"""Text -> tokens -> train.bin and val.bin.

    python data.py                          the default corpus: docstrings of Python packages
    python data.py FILE_OR_FOLDER           any text; a folder with train.bin and val.bin is ready
    python data.py stream NAME --tokens N   a large corpus, through Hugging Face datasets

With tokenizer.json and meta.json beside them that is a prepared corpus, which windows.py reads.
"""

import hashlib
import json
import pickle
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
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
from windows import check_streamed, describe, id_type, is_prepared, load_tokens, unigram_entropy

CACHE = Path("data")


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
    if tokenizer == "hops" and data != "hops":
        raise DataError(f"--tokenizer hops is for --data hops, not {data}")
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

    if tokenizer in ("bytes", "gpt2"):  # which may need the network: before minutes of reading
        tokenizer = open_tokenizer(tokenizer)
    if data in corpora:
        documents = corpora[data]()
    train, val = divide(documents)
    if tokenizer == "bpe":
        print(f"training a BPE tokenizer of {vocab_size} tokens", flush=True)
        tokenizer = Tokenizer.train((text.decode("utf-8", "ignore") for text in train), vocab_size)
    elif tokenizer == "hops":
        tokenizer = hops.tokenizer()
    write_corpus(folder, source, documents, train, val, tokenizer)
    return folder, tokenizer


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
