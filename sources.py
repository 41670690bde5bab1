"""Sources of text: where the documents of a corpus come from. A document is a pair (name, bytes).

pydocs      docstrings of Python's standard library and of some packages, and Python's help topics
pysource    the Python files that these docstrings are in
a path      a text file, or a folder of them
"""

import ast
import gc
import hashlib
import shlex
import sys
import sysconfig
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from stat import S_ISREG

from common import UserError, progress, refuse_lfs_pointer
from tokenizer import NOT_UTF8

PACKAGES = ("numpy", "torch", "matplotlib", "sympy", "networkx")  # read beside the standard library
ROW_SUFFIXES = (".jsonl", ".ndjson", ".parquet")  # a text in each row; python -m lab corpus reads these
NOT_TEXT = (".json", ".csv")  # structured data, not text
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z")  # archives and compressed files
SAVED_DATA = (".arrow",)  # what datasets.save_to_disk writes


# -- Python's own text -----------------------------------------------------------------------------


def package_files():
    """Yield (name, path) of the Python files, without tests, of the standard library and of PACKAGES."""
    folders = {"python": Path(sysconfig.get_paths()["stdlib"])}
    missing = []
    for name in PACKAGES:
        found = find_spec(name)
        if found:
            folders[name] = Path(found.origin).parent
        else:
            missing.append(name)
    if missing:
        print(f"note: not installed, so the text lacks what is in them: {', '.join(missing)}")
    skip = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
    for name, folder in folders.items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).parts
            if not skip.intersection(parts):
                yield f"{name}/{'/'.join(parts)}", file


def pysource():
    """Whole Python files, 80 to 90 MB, for models that read much: one document per file."""
    documents = []
    for name, file in package_files():
        text = file.read_bytes()
        if text.strip():
            documents.append((name, text))
    return documents


def pydocs():
    """The docstrings of package_files(), each only once, and Python's help topics: one document per file."""
    files = list(package_files())
    show = progress(f"reading the docstrings of {len(files):,} files")
    sources = []
    gc.disable()  # it would search all syntax trees again and again, which takes half of the time
    try:
        for i, (name, file) in enumerate(files):
            sources.append((name, docstrings(file)))
            show(i / len(files))
    finally:
        gc.enable()
    sources += [(f"topics/{topic}", [text]) for topic, text in topics.items()]

    documents = []
    seen = set()
    for name, texts in sources:
        new = [text for text in dict.fromkeys(texts) if text not in seen]
        if new:
            seen.update(new)
            documents.append((name, "\n\n".join(new).encode("utf-8", "replace")))
    return documents


def docstrings(file):
    """The docstrings of one Python file, in the order of the source."""
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in other people's strings
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # written for another version of Python
        return []
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))  # ast.walk goes level by level
    texts = [ast.get_docstring(node) for node in nodes]
    return [text for text in texts if text]


SOURCES = {"pydocs": pydocs, "pysource": pysource}


def source_version(name):
    """What the text of one of SOURCES depends on: the versions of Python and of the packages."""
    versions = [f"{package} {version(package)}" for package in PACKAGES if find_spec(package)]
    return ", ".join([name, f"Python {sys.version.split()[0]}", *versions])


# -- Files -----------------------------------------------------------------------------------------


def files_below(folder, entered=None):
    """The files of a folder and of the folders in it, by name. Hidden ones are skipped; links are
    followed once.

    Args:
        entered: folders that have been entered already.

    Raises:
        OSError: a folder cannot be entered, or a link leads nowhere.
    """
    entered = set() if entered is None else entered
    real = folder.resolve()
    if real in entered:
        return []
    entered.add(real)
    files = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            files += files_below(path, entered)
        elif S_ISREG(path.stat().st_mode):  # not a pipe, for instance
            files.append(path)
    return files


def read_documents(path):
    """Read a text file, or the text files of a folder, by name.

    Files that hold no text are skipped with a note: those of NOT_TEXT, and those with NUL bytes.

    Raises:
        UserError: a file of ROW_SUFFIXES, an archive, a saved data set, or a Git LFS pointer.
        OSError: a file cannot be read.
    """
    if path.is_file():
        files = [path]
        top = path.parent
    else:
        files = files_below(path)
        top = path  # names begin below it: data.split_documents splits by names, and a folder may be renamed
    documents = []
    skipped = []
    not_utf8 = []
    for file in files:
        name = str(file.relative_to(top))
        suffix = file.suffix.lower()
        if suffix in ROW_SUFFIXES:
            raise UserError(
                f"{file} has one text per row, which this command does not read: prepare it with python -m "
                f"lab corpus prepare {shlex.quote(str(file))} --to FOLDER, and pass --data FOLDER"
            )
        refuse_packed(file)
        if suffix in NOT_TEXT:
            skipped.append(name)
            continue
        refuse_lfs_pointer(file)
        text = file.read_bytes()
        if b"\0" in text:
            skipped.append(name)
        elif text.strip():
            documents.append((name, text))
            if NOT_UTF8.search(text.decode("utf-8", "surrogateescape")):
                not_utf8.append(name)
    if skipped:
        note_files(skipped, files, "hold no text and are skipped")
    if not_utf8:
        note_files(not_utf8, files, "are not UTF-8 and are read byte by byte")
    return documents


def refuse_packed(file):
    """
    Raises:
        UserError: an archive, a compressed file or a saved data set, whose text would otherwise be left
            out silently.
    """
    suffix = file.suffix.lower()
    if suffix in PACKED:
        raise UserError(f"{file} is a compressed file or an archive: unpack it first, or move it elsewhere")
    if suffix in SAVED_DATA:
        raise UserError(
            f"{file} is part of a data set that was saved with save_to_disk: write its texts as .jsonl "
            "(dataset.to_json), and prepare that with python -m lab corpus prepare"
        )


def note_files(names, files, what):
    print(f"note: {len(names)} of {len(files)} files {what}: {', '.join(names[:3])}")


def documents_version(name, documents):
    """Identifies documents by their names and contents."""
    digests = [(document, hashlib.sha256(text).hexdigest()) for document, text in documents]
    return f"{name} {hashlib.sha256(repr(digests).encode()).hexdigest()}"
