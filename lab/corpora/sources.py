"""Where texts come from: files, JSON lines, Parquet, the Hugging Face Hub, the texts of data.py.

A file is one text, with the name that sources.read_documents gives it; a file of more than a megabyte is
several texts, cut at the ends of lines. Each row of a .jsonl, .ndjson or .parquet file or of a data set is
a text. Texts come one after another, so that memory does not grow with their number.
"""

import codecs
import hashlib
import json
import re
import sys
from collections import defaultdict
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path

from common import UserError, one_line, user_error_if_unreadable
from sources import NOT_TEXT, PACKAGES, ROW_SUFFIXES, SOURCES, files_below, refuse_packed
from tokenizer import NOT_UTF8

PIECE = 10**6  # bytes


def files_of(data):
    """The files of a source: one file, those of a folder, or none if it is something else.

    Raises:
        UserError: a folder holds plain texts beside files of rows.
    """
    path = Path(data)
    if not data or data in SOURCES or not path.exists():
        return []
    files = [path] if path.is_file() else files_below(path)
    for file in files:
        refuse_packed(file)
    of_rows = [file for file in files if file.suffix.lower() in ROW_SUFFIXES]
    if not of_rows:
        return files
    for file in files:
        if file.suffix.lower() in (*ROW_SUFFIXES, *NOT_TEXT):
            continue
        is_text, _ = look_through(file)
        if is_text:
            raise UserError(
                f"{file} is one text, but {of_rows[0].name} has a text in each row: move them to different "
                "folders"
            )
    return files


def describe(data, split="train", config=None):
    """A description that tells a source from others (files by their sizes and times), and the bytes of its
    text, None if they are not known."""
    if data in SOURCES:
        packages = [f"{name} {version(name)}" for name in PACKAGES if find_spec(name)]
        return ", ".join([data, f"Python {sys.version.split()[0]}", *packages]), None
    files = files_of(data)
    if not files:
        return " ".join(filter(None, [data, config, split])), None
    found = []
    size = 0
    for file in files:
        status = file.stat()
        found.append((str(file), status.st_size, status.st_mtime_ns))
        size += status.st_size
    digest = hashlib.sha256(ascii(found).encode()).hexdigest()
    return f"{Path(data).name} {digest[:16]}", size


def texts(o, first=0, place=None, notes=None):
    """The texts of a source, from text number `first` on.

    Args:
        o: preparation.Options.
        first: how many texts to skip.
        place: the place after these texts in a data set of the Hub.
        notes: {remark: names of the files that it is about}; remarks are added.

    Yields:
        (name, bytes, place after the text in a data set of the Hub).

    Raises:
        UserError: there is no such source, or a row has no text.
    """
    if o.data in SOURCES:
        found = SOURCES[o.data]()
    elif Path(o.data).exists():
        found = of_files(o.data, o.field, notes)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", o.data) and not Path(o.data).parent.exists():
        yield from of_hub(o, first, place)
        return
    else:
        known = ", ".join(SOURCES)
        raise UserError(
            f"{o.data!r} does not exist: give a file, a folder, one of {known}, or a data set on the Hub"
        )
    for name, text in islice(found, first, None):
        yield name, text, None


def of_files(data, field="text", notes=None):
    """Yield (name, bytes) of the texts of a file or folder. The name of the file or folder itself is not part
    of the names of rows, or of files in the folder: it does not matter to the split."""
    if notes is None:
        notes = defaultdict(list)
    top = Path(data)
    for file in files_of(data):
        name = file.name if file == top else str(file.relative_to(top))
        kind = file.suffix.lower()
        if kind in ROW_SUFFIXES:
            with user_error_if_unreadable(file):
                rows = parquet_rows(file, field) if kind == ".parquet" else json_rows(file, field)
                for i, text in enumerate(rows, start=1):
                    if text.strip():
                        yield (f"row {i}" if file == top else f"{name} {i}"), text
            continue
        is_text = False
        if kind not in NOT_TEXT:
            is_text, is_utf8 = look_through(file)
        if not is_text:
            notes["have no text and are skipped"].append(name)
            continue
        if not is_utf8:
            notes["are not UTF-8 and are read byte by byte"].append(name)
        for i, text in enumerate(pieces(file)):
            yield (f"{name} {i}" if i else name), text


def pieces(file):
    """The bytes of a file in pieces of a megabyte or a little more, cut at the end of a line."""
    with open(file, "rb") as stream:
        while True:
            text = stream.read(PIECE) + stream.readline(PIECE)
            if not text:
                return
            yield text


def look_through(file):
    """Whether a file holds text, which is not blank and has no zero bytes; and whether that is UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    is_blank = True
    has_zero = False
    is_utf8 = True
    for piece in chain(pieces(file), [b""]):
        if piece.strip():
            is_blank = False
        if b"\0" in piece:
            has_zero = True
        # The decoder turns each byte that is not UTF-8 into a surrogate, which NOT_UTF8 finds.
        if NOT_UTF8.search(decoder.decode(piece, final=not piece)):
            is_utf8 = False
    return not is_blank and not has_zero, is_utf8


def json_rows(file, field):
    """Yield the texts of a .jsonl or .ndjson file, bytes."""
    with open(file, encoding="utf-8-sig") as lines:
        for i, line in enumerate(lines, start=1):
            if line.strip():
                with user_error_if_unreadable(f"{file}, line {i},"):
                    text = text_in(json.loads(line), field)
                yield text


def parquet_rows(file, field):
    """Yield the texts of a .parquet file, bytes."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as content:
        for batch in content.iter_batches(256):
            for row in batch.to_pylist():
                yield text_in(row, field)


def of_hub(o, first, place):
    """Yield the texts of a data set of the Hugging Face Hub; arguments and results as those of `texts`."""
    from datasets import load_dataset

    try:
        dataset = load_dataset(o.data, o.config, split=o.split, streaming=True)
        if place:
            dataset.load_state_dict(place)
        for row in dataset:
            text = text_in(row, o.field)
            if text.strip():
                yield f"{o.data} {first}", text, dataset.state_dict()
                first += 1
    except Exception as error:  # a download can fail with any error
        why = f"{o.data} cannot be read: {one_line(error)}"
        raise UserError(f"{why}; if the network failed, run the same command again to continue") from None


def text_in(row, field):
    """The text of a row, bytes; null is an empty text.

    Raises:
        ValueError: the row has no such field, or something else than a text in it.
    """
    advice = "name the field that holds the text, python -m lab corpus prepare --field NAME"
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.40} is not a JSON object: each line must be one, with the field {field!r}")
    if field not in row:
        raise ValueError(f"a row has no field {field!r}, only {', '.join(map(str, row))}: {advice}")
    text = "" if row[field] is None else row[field]
    if not isinstance(text, str):
        raise ValueError(f"the field {field!r} holds {text!r:.40}, which is not a string: {advice}")
    return text.encode("utf-8", "replace")  # a lone surrogate becomes a question mark


def show(notes, data):
    """Print the notes that `texts` has made about files."""
    for remark, names in notes.items():
        shown = ", ".join(names[:3]).encode("utf-8", "backslashreplace").decode()
        if len(names) > 3:
            shown += ", .."
        print(f"note: {len(names)} files in {data} {remark}: {shown}")
