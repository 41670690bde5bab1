"""Where texts come from: files, JSON lines, Parquet, the Hugging Face Hub, the texts of data.py.

A file is a text, with the name that data.read_texts gives it, and beyond a megabyte several, cut behind a
line. Each row of a .jsonl or .parquet file or of a data set is a text. They come one after another, so that
memory does not grow with their number.
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
from sources import LINES, NOT_TEXT, PACKAGES, SOURCES, files_below
from tokenizer import NOT_UTF8

PIECE = 10**6  # bytes


def files_of(data):
    """A file, or the files of a folder; none of another source. UserError: texts beside files of many."""
    path = Path(data)
    if not data or data in SOURCES or not path.exists():
        return []
    files = [path] if path.is_file() else files_below(path)
    many = [file for file in files if file.suffix.lower() in LINES]
    for file in files if many else ():
        if file.suffix.lower() not in (*LINES, *NOT_TEXT) and look_through(file)[0]:
            raise UserError(f"{file} is a text beside {many[0].name}, which holds many: divide them")
    return files


def describe(data, split="train", config=None):
    """What tells a source from others, of files by size and time; and its bytes, if they are known."""
    if data in SOURCES:
        packages = (f"{name} {version(name)}" for name in PACKAGES if find_spec(name))
        return ", ".join([data, f"Python {sys.version.split()[0]}", *packages]), None
    if not (files := files_of(data)):
        return " ".join(filter(None, [data, config, split])), None
    found = [(str(file), file.stat()) for file in files]
    digest = hashlib.sha256(ascii([(name, x.st_size, x.st_mtime_ns) for name, x in found]).encode())
    return f"{Path(data).name} {digest.hexdigest()[:16]}", sum(x.st_size for _, x in found)


def texts(o, first=0, place=None, notes=None):
    """Yield (name, bytes, place behind it in a data set of the Hub) of each text from the `first` on.

    Args:
        o: Options of preparation.py. place: behind the text before.
        notes: {remark: the files of which it is true}, which is added to.

    Raises:
        UserError: no such source, or a row without a text.
    """
    if o.data in SOURCES:
        found = SOURCES[o.data]()
    elif Path(o.data).exists():
        found = of_files(o.data, o.field, notes)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", o.data) and not Path(o.data).parent.exists():
        return (yield from of_hub(o, first, place))
    else:
        raise UserError(f"{o.data!r} is no file or folder, and none of {', '.join(SOURCES)}")
    yield from ((name, text, None) for name, text in islice(found, first, None))


def of_files(data, field="text", notes=None):
    """Yield (name, bytes) of the texts of a file or folder."""
    notes = defaultdict(list) if notes is None else notes
    for file in files_of(data):
        name, kind = str(file.relative_to(Path(data).parent)), file.suffix.lower()
        if kind in LINES:
            with user_error_if_unreadable(file):
                rows = (json_rows if kind == ".jsonl" else parquet_rows)(file, field)
                yield from ((f"{name} {i}", text) for i, text in enumerate(rows, start=1) if text.strip())
            continue
        is_text, is_utf8 = (False, True) if kind in NOT_TEXT else look_through(file)
        if not is_text:
            notes["hold no text, left out"].append(name)
            continue
        if not is_utf8:
            notes["are not UTF-8, read byte by byte"].append(name)
        yield from ((f"{name} {i}" if i else name, text) for i, text in enumerate(pieces(file)))


def pieces(file):
    """The bytes of a file, a megabyte or a little more at a time, cut behind a line."""
    with open(file, "rb") as stream:
        while text := stream.read(PIECE) + stream.readline(PIECE):
            yield text


def look_through(file):
    """Does a file hold text, which has no zero bytes and is not blank? And is it UTF-8?"""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    blank, zero, foreign = True, False, False
    for piece in chain(pieces(file), [b""]):
        blank, zero = blank and not piece.strip(), zero or b"\0" in piece
        foreign = foreign or NOT_UTF8.search(decoder.decode(piece, final=not piece))
    return not (blank or zero), not foreign


def json_rows(file, field):
    with open(file, encoding="utf-8-sig") as lines:
        for i, line in enumerate(lines, start=1):
            if line.strip():
                with user_error_if_unreadable(f"{file}, line {i},"):
                    text = text_in(json.loads(line), field)
                yield text


def parquet_rows(file, field):
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as content:
        for batch in content.iter_batches(256):
            yield from (text_in(row, field) for row in batch.to_pylist())


def of_hub(o, first, place):
    from datasets import load_dataset

    try:
        dataset = load_dataset(o.data, o.config, split=o.split, streaming=True)
        if place:
            dataset.load_state_dict(place)
        for row in dataset:
            if (text := text_in(row, o.field)).strip():
                yield f"{o.data} {first}", text, dataset.state_dict()
                first += 1
    except Exception as error:  # a download fails in any way
        why = f"{o.data} cannot be read: {one_line(error)}"
        raise UserError(f"{why}; if the network failed, the same command goes on") from None


def text_in(row, field):
    """The text of a row; null is an empty one. ValueError: it has none, or something else."""
    names = "python -m lab corpus prepare --field names the text"
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.40} is no row with a field {field!r}")
    if field not in row:
        raise ValueError(f"a row has no {field!r}, but {', '.join(map(str, row))}: {names}")
    if not isinstance(text := "" if row[field] is None else row[field], str):
        raise ValueError(f"{field} = {text!r:.40} is no text: {names}")
    return text.encode("utf-8", "replace")  # halves of surrogate pairs


def show(notes, data):
    """Print what was noted of files."""
    for remark, names in notes.items():
        shown = ", ".join(names[:3]).encode("utf-8", "backslashreplace").decode()
        print(f"note: {len(names)} files of {data} {remark}: {shown}{', ..' * (len(names) > 3)}")
