"""Text -> a prepared corpus in data/, once: sources of text, the validation split, files of ids.

documents   [(name, bytes)], where text comes from: docstrings, source files, a download, files
divide      documents -> texts of train and val
prepare     the name of a corpus, a file or a folder -> a folder as batches.py describes it, from
            the cache where the same text was prepared with the same tokenizer before
"""

import ast
import hashlib
import os
import sys
import sysconfig
import tempfile
import urllib.request
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from corpus.batches import check_streamed, id_type, is_prepared
from corpus.tokenizers import (
    IdTokenizer,
    Tokenizer,
    check_bpe_size,
    load_tokenizer,
    open_tokenizer,
)
from runtime import UserError, progress, write_json, writing

CACHE = Path("data")
PACKAGES = ("numpy", "torch", "matplotlib", "sympy", "networkx")  # torch brings the last two
SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)

# -- Sources of text -------------------------------------------------------------------------------


def package_files():
    """Python files of the standard library and of PACKAGES: (name, path), sorted, without tests."""
    folders = {"python": Path(sysconfig.get_paths()["stdlib"])}
    folders |= {name: Path(find_spec(name).origin).parent for name in PACKAGES}
    skip = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
    for name, folder in folders.items():
        for file in sorted(folder.rglob("*.py")):
            if not skip & set(file.relative_to(folder).parts):
                yield f"{name}/{file.relative_to(folder).as_posix()}", file


def docstrings(file):
    """The docstrings of one Python file, in the order of the source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def pydocs():
    """The default corpus: one document a file, its docstrings, each docstring only once."""
    names, files = zip(*package_files(), strict=True)
    # Fresh processes: a fork of a process in which torch runs threads may hang.
    with ProcessPoolExecutor(min(os.cpu_count(), 8), get_context("spawn")) as pool:
        found = pool.map(docstrings, files, chunksize=16)
        found = list(progress(found, "reading docstrings", len(files), unit=" files", leave=False))
    sources = [*zip(names, found, strict=True), *((f"topics/{k}", [topics[k]]) for k in topics)]
    documents, seen = [], set()
    for name, texts in sources:
        new = [text for text in dict.fromkeys(texts) if text not in seen]
        seen.update(new)
        if new:
            documents.append((name, "\n\n".join(new).encode("utf-8", "replace")))
    return documents


def pysource():
    """The same packages' Python files whole."""
    files = list(package_files())
    return [
        (name, file.read_bytes()) for name, file in progress(files, "reading source", leave=False)
    ]


def shakespeare():
    """Tiny Shakespeare (1.1 MB), downloaded and checked."""
    url, sha256 = SHAKESPEARE
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            text = response.read()
    except OSError as error:
        raise UserError(
            f"cannot download {url} ({error}); without a network use --data pydocs or --data FILE"
        ) from None
    if hashlib.sha256(text).hexdigest() != sha256:
        raise UserError(f"the sha256 of {url} differs from the known one; use --data FILE instead")
    return [("shakespeare", text)]


CORPORA = {"pydocs": pydocs, "pysource": pysource, "shakespeare": shakespeare}


def read_texts(path):
    """A file, or the files of a folder that are not hidden or binary: (name, bytes), by name.

    Raises:
        OSError: a file or folder that may not be read.
    """

    def fail(error):
        raise error

    files = [path]
    if not path.is_file():
        found = (
            Path(place, name) for place, _, names in os.walk(path, onerror=fail) for name in names
        )
        files = [file for file in sorted(found) if file.is_file()]
    files = [f for f in files if not any(x[0] == "." for x in f.relative_to(path).parts)]
    texts = [(str(f.relative_to(path.parent)), f.read_bytes()) for f in files]
    if odd := [name for name, text in texts if b"\0" in text]:
        what = "taken as it is" if path.is_file() else f"{len(odd)} of {len(files)} files left out"
        print(f"note: {what}, which has zero bytes and is no UTF-8 text: {', '.join(odd[:3])}")
    return [(name, text) for name, text in texts if path.is_file() or b"\0" not in text]


# -- Documents -> files of ids ---------------------------------------------------------------------


def boundary(text, at):
    """The last place up to `at` where no character of UTF-8 is cut."""
    for back in range(min(4, at)):
        if at >= len(text) or text[at - back] & 0b1100_0000 != 0b1000_0000:
            return at - back
    return at  # it is not UTF-8


def divide(documents):
    """Documents -> texts of train and of validation.

    Validation takes one file in 20, by the hash of its name: no docstring has its neighbours on the
    other side. Of fewer than 100 documents, or where no name has such a hash, it takes the last
    tenth of each.
    """
    train, val = [], []
    for name, text in documents:
        # What is not UTF-8 in a file's name is a surrogate in Python's.
        digest = hashlib.sha1(name.encode("utf-8", "surrogateescape")).hexdigest()
        (train if int(digest, 16) % 20 else val).append(text)
    if len(documents) < 100 or not (train and val):
        cuts = [(text, boundary(text, len(text) - len(text) // 10)) for _, text in documents]
        train, val = [text[:cut] for text, cut in cuts], [text[cut:] for text, cut in cuts]
    return train, val


def pieces_of(text):
    """A text in pieces of at most 1 MB, cut behind a line where there is one."""
    start = 0
    while start < len(text):
        end = min(start + 10**6, len(text))
        if end < len(text):
            end = text.rfind(b"\n", start, end) + 1 or boundary(text, end)
        yield text[start:end]
        start = end


def check_end(tokenizer):
    """Refuse a tokenizer that cannot divide one text from the next."""
    if tokenizer.end_of_text is None:
        raise UserError("the tokenizer has no end of text: set eos_token in tokenizer_config.json")


def write_tokens(texts, tokenizer, file, label):
    """Encode documents, each followed by the end of text, into a file of ids."""
    kind = id_type(tokenizer.vocab_size)
    bar = progress(total=sum(map(len, texts)), desc=label, unit="B", unit_scale=True, leave=False)
    with writing(file), open(file, "wb") as out, bar:
        for text in texts:
            out.write(np.array(tokenizer.begin, dtype=kind).tobytes())
            for piece in pieces_of(text):
                out.write(np.array(tokenizer.encode(piece), dtype=kind).tobytes())
                bar.update(len(piece))
            out.write(np.array([tokenizer.end_of_text], dtype=kind).tobytes())


def write_corpus(folder, source, documents, tokenizer):
    """A prepared corpus of documents, whole or not at all. `source` tells where they came from."""
    check_end(tokenizer)
    train, val = divide(documents)
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
        write_json(half / "meta.json", meta | {"dtype": id_type(tokenizer.vocab_size).name})
        try:
            half.rename(folder)
        except OSError:  # another program prepared the same meanwhile
            if not folder.exists():
                raise


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
        UserError: text that is missing, empty, or ids that do not fit.
        OSError: text that cannot be read.
    """
    if not data:
        raise UserError("--data is empty; name a corpus, a file or a folder")
    if {data, tokenizer} & {"lookup", "hops"}:
        raise UserError(
            "the lookup task is an ordinary corpus: prepare it with python -m corpus lookup, and "
            f"give its folder alone, --data {CACHE / 'lookup'}"
        )
    path = Path(data)
    if is_prepared(path):
        check_streamed(path)
        return path, bin_tokenizer(path, tokenizer)
    documents = None
    if data in CORPORA:
        versions = [f"{name} {version(name)}" for name in PACKAGES] if data[:2] == "py" else []
        source = ", ".join([data, f"Python {sys.version.split()[0]}", *versions])
    elif path.exists():
        documents = [(name, text) for name, text in read_texts(path) if text.strip()]
        if not documents:
            raise UserError(f"{data} holds no text; give a file or folder with some")
        texts = [(name, hashlib.sha256(text).hexdigest()) for name, text in documents]
        source = f"{path.name} {hashlib.sha256(repr(texts).encode()).hexdigest()}"
    else:
        lookup = "; the lookup task is made by python -m corpus lookup" * (path.name == "lookup")
        raise UserError(f"{data}: no such file or folder, nor one of {', '.join(CORPORA)}{lookup}")
    kind = tokenizer = tokenizer or "bytes"
    if tokenizer == "bpe":
        check_bpe_size(vocab_size)
        kind = f"bpe{vocab_size}"
    elif tokenizer not in ("bytes", "gpt2"):
        tokenizer = open_tokenizer(tokenizer)
        kind = tokenizer.name + ("" if tokenizer.name == "bytes" else f"-{tokenizer.digest}")
    digest = hashlib.sha256(f"{source} {kind}".encode()).hexdigest()[:8]
    folder = Path(cache) / f"{path.stem}-{kind}-{digest}"
    if folder.exists():
        return folder, load_tokenizer(folder / "tokenizer.json")

    if tokenizer in ("bytes", "gpt2"):  # which may need the network: before minutes of reading
        tokenizer = open_tokenizer(tokenizer)
    documents = documents or CORPORA[data]()
    if tokenizer == "bpe":
        train, _ = divide(documents)
        tokenizer = Tokenizer.train((text.decode("utf-8", "ignore") for text in train), vocab_size)
    write_corpus(folder, source, documents, tokenizer)
    return folder, tokenizer


def bin_tokenizer(folder, name):
    """The tokenizer of a folder with train.bin and val.bin: as named, or its own, or GPT-2's."""
    if name == "bpe":
        raise UserError(f"{folder} holds token ids already; a BPE cannot be trained on them")
    if name is not None:
        return open_tokenizer(name)
    if (folder / "tokenizer.json").exists():
        return load_tokenizer(folder / "tokenizer.json")
    if (folder / "meta.pkl").exists():
        raise UserError(
            f"{folder / 'meta.pkl'} is a character vocabulary, which is not read here: give its "
            "text instead, --data FILE, or the vocabulary of its ids with --tokenizer"
        )
    try:
        return Tokenizer.gpt2()
    except UserError as error:
        print(f"note: {folder} is taken for GPT-2 tokens; text is shown as token ids, because")
        print(f"      {str(error).split(':')[0]}")
        return IdTokenizer(50_257)
