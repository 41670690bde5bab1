"""Where texts come from: files, JSON lines, Parquet, the Hugging Face Hub -> (name, text), one after another.

rows     all that a source holds, in its order; a text is bytes, or the path of a file, which may be large
judge    what is to be said of a text: those that hold none are left out
texts    the texts of files, whole, for scoring

Files are chosen and named as data.read_texts does it, and each row of a .jsonl or .parquet file is a text. So
whatever the form, the same texts are the same bytes.
"""

import codecs
import hashlib
import io
import json
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from data import LINES, NO_TEXT, PACKAGES, SOURCES, UserError, files_below, one_line, reading

LONE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # halves of surrogate pairs that stand for no byte
EMPTY, FOREIGN = "hold no text, left out", "are not UTF-8, read byte by byte"


def files_of(path):
    """The files of a folder, or a file alone; and which of them hold many texts. UserError: also texts."""
    files = [path] if path.is_file() else files_below(path)
    many = [file for file in files if file.suffix.lower() in LINES]
    for file in files:
        if many and file not in many and judge(file) != EMPTY:
            raise UserError(f"{file} is a text beside {many[0].name}, which holds many: divide them")
    return files, many


def describe(data, split="train", config=None):
    """What tells a source from others, of files by size and time; and its bytes, if they are known."""
    path = Path(data)
    if data in SOURCES:
        packages = [f"{name} {version(name)}" for name in PACKAGES if find_spec(name)]
        return ", ".join([data, f"Python {sys.version.split()[0]}", *packages]), None
    if not path.exists():
        return " ".join(filter(None, [data, config, split])), None
    found = [(str(file), file.stat()) for file in files_of(path)[0]]
    digest = hashlib.sha256(ascii([(name, x.st_size, x.st_mtime_ns) for name, x in found]).encode())
    return f"{path.name} {digest.hexdigest()[:16]}", sum(x.st_size for _, x in found)


# -- Rows ------------------------------------------------------------------------------------------


def rows(data, field="text", split="train", config=None, first=0, place=None):
    """Yield (name, text, place) from row `first` on, which is at this `place` in a data set of the Hub.

    Raises:
        UserError: no such source, or a row without a text.
    """
    path = Path(data)
    if data in SOURCES or path.exists():
        found = SOURCES[data]() if data in SOURCES else rows_of_files(path, field)
        for i, (name, text) in enumerate(found):
            if i >= first:
                yield name, text, None
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", data) and not path.parent.exists():
        yield from rows_of_hub(data, field, split, config, first, place)
    else:
        raise UserError(f"{data!r} is no file or folder, and none of {', '.join(SOURCES)}")


def rows_of_files(path, field):
    for file in files_of(path)[0]:
        name, kind = str(file.relative_to(path.parent)), file.suffix.lower()
        if kind not in LINES:
            yield name, file
        else:
            found = json_rows(file, field) if kind == ".jsonl" else parquet_rows(file, field)
            yield from ((f"{name} {i}", text) for i, text in found)


def json_rows(file, field):
    with open(file, "rb") as lines:
        for i, line in enumerate(lines, start=1):
            if line.strip():
                with reading(f"{file}, line {i},"):
                    text = text_in(json.loads(line.decode("utf-8-sig", "surrogateescape")), field)
                yield i, text


def parquet_rows(file, field):
    try:
        from pyarrow import compute
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{file} needs a package: pip install pyarrow") from None
    (column, *inner), n = field.split("."), count(1)
    with reading(file), ParquetFile(file) as content:
        if column not in (names := content.schema_arrow.names):
            raise ValueError(f"no text in {field!r}; --field is one of {names}")
        for batch in content.iter_batches(256, columns=[column]):
            found = batch.column(0)
            for name in inner:
                found = compute.struct_field(found, name)
            yield from ((next(n), text or b"") for text in found.cast("large_binary").to_pylist())


def rows_of_hub(name, field, split, config, first, place):
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"{name!r} is no file; as a data set it needs: pip install datasets") from None
    try:
        dataset = load_dataset(name, config, split=split, streaming=True)
        if place:
            dataset.load_state_dict(place)
        found = iter(dataset)
        for i in count(first):
            place = dataset.state_dict()
            if (row := next(found, None)) is None:
                return
            yield f"{name} {i}", text_in(row, field), place
    except Exception as error:  # a download fails in any way
        raise UserError(f"{name} cannot be read ({one_line(error)}); the same command goes on") from None


def text_in(row, field):
    """The bytes of what a row has in a field, "meta.text" within "meta"."""
    text = row
    for name in field.split("."):
        text = text[name] if isinstance(text, dict) and name in text else 0
    if not isinstance(text, str | None):
        raise ValueError(f"no text in {field!r}; --field is one of {list(row)}")
    return LONE.sub("?", text or "").encode("utf-8", "surrogateescape")


# -- Texts -----------------------------------------------------------------------------------------


def opened(text):
    return open(text, "rb") if isinstance(text, Path) else io.BytesIO(text)


def judge(text):
    """EMPTY, FOREIGN, or None where nothing is to be said of it."""
    if isinstance(text, Path) and text.suffix.lower() in NO_TEXT:
        return EMPTY
    decoder, blank, foreign = codecs.getincrementaldecoder("utf-8")(), True, False
    with opened(text) as stream:
        while block := stream.read(10**6):
            if b"\0" in block:
                return EMPTY
            blank = blank and not block.strip()
            try:
                decoder.decode(block, final=len(block) < 10**6)
            except UnicodeDecodeError:
                foreign = True
                decoder.reset()
    return EMPTY if blank else FOREIGN if foreign else None


def note(notes, remark, name):
    """Add to {remark: (of how many, the names of the first three)}."""
    if remark:
        (n, names), name = notes.get(remark, (0, [])), name.encode("utf-8", "backslashreplace").decode()
        notes[remark] = n + 1, [*names, name][:3]


def show(notes, data):
    """Print what was noted, and what is hidden."""
    path = Path(data)
    for hidden in sorted(path.rglob(".*")) if path.is_dir() else ():
        note(notes, "are hidden, left out", str(hidden.relative_to(path.parent)))
    for remark, (n, names) in notes.items():
        print(f"note: {n} of {data} {remark}: {', '.join(names)}{', ..' * (n > len(names))}")


def texts(data, field="text"):
    """(name, bytes) of the texts of a file or folder, all in memory, and a note on what is left out."""
    notes, found = {}, []
    for name, text, _ in rows(data, field):
        note(notes, remark := judge(text), name)
        if remark != EMPTY:
            found.append((name, text.read_bytes() if isinstance(text, Path) else text))
    show(notes, data)
    return found
