"""Where text comes from: docstrings of installed packages, files, a download. As documents, bytes.

A document is (name, bytes); here nothing is cut into tokens yet.
"""

import ast
import hashlib
import os
import sysconfig
import urllib.request
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from tokenizer import DataError

PACKAGES = ("numpy", "torch", "matplotlib", "sympy", "networkx")  # torch brings the last two
SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)


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
    from pydoc_data.topics import topics

    names, files = zip(*package_files(), strict=True)
    # Fresh processes: a fork of a process in which torch runs threads may hang.
    with ProcessPoolExecutor(min(os.cpu_count(), 8), get_context("spawn")) as pool:
        found = pool.map(docstrings, files, chunksize=16)
        found = list(tqdm(found, "reading docstrings", len(files), unit=" files", leave=False))
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
    return [(name, file.read_bytes()) for name, file in tqdm(files, "reading source", leave=False)]


def shakespeare():
    """Tiny Shakespeare (1.1 MB), downloaded and checked."""
    url, sha256 = SHAKESPEARE
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            text = response.read()
    except OSError as error:
        raise DataError(
            f"cannot download {url} ({error}); without a network train on the default, --data "
            "pydocs, or on a file of your own, --data FILE"
        ) from None
    if hashlib.sha256(text).hexdigest() != sha256:
        raise DataError(
            f"{url} is not the file it was: its sha256 differs; use --data FILE instead"
        )
    return [("shakespeare", text)]


def read_texts(path):
    """A file, or the text files of a folder, none that is hidden or has a NUL byte: (name, bytes),
    sorted by name."""
    hidden = lambda f: any(part.startswith(".") for part in f.relative_to(path).parts)  # noqa: E731
    files = [f for f in sorted(path.rglob("*")) if f.is_file() and not hidden(f)]
    files = [path] if path.is_file() else files
    try:
        texts = [(str(file.relative_to(path.parent)), file.read_bytes()) for file in files]
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from None
    return [(name, text) for name, text in texts if path.is_file() or b"\0" not in text]


def boundary(text, at):
    """The last place up to `at` where no character of UTF-8 is cut."""
    for back in range(min(4, at)):
        if at >= len(text) or text[at - back] & 0b1100_0000 != 0b1000_0000:
            return at - back
    return at  # it is no UTF-8


def divide(documents):
    """Documents -> train, validation: one file in 20 by the hash of its name, so that no docstring
    has its neighbours on the other side; of few documents the last tenth of each."""
    train, val = [], []
    for name, text in documents:
        if len(documents) >= 100:
            held_out = int(hashlib.sha1(name.encode()).hexdigest(), 16) % 20 == 0
            (val if held_out else train).append(text)
        else:
            cut = boundary(text, len(text) - len(text) // 10)
            train.append(text[:cut])
            val.append(text[cut:])
    return train, val
