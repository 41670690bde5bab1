"""From any source to a folder with train.bin and val.bin, and the way on after a kill."""

import json
import os
import shutil
import sys
import tracemalloc
from itertools import count
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from lab_helpers import full_disk
from pyarrow import parquet

import data
from data import Tokenizer, UserError, read_corpus
from lab.corpora import preparation
from lab.corpora.preparation import Options, is_held_out, open_corpus, prepare
from lab.corpora.sources import texts
from lab.corpora.tokenizers import load_tokenizer

# CRLF, bytes that are not UTF-8, a blank line, no newline at the end.
TEXTS = [b"one\r\n\r\ntwo", "naïve café 😀\n".encode(), b"caf\xe9\r\n", b"no newline \x80\x81"]
TEXTS += [f"document {i}\n".encode() for i in range(150)]


def write_rows(file, rows=TEXTS):
    file.parent.mkdir(exist_ok=True)
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": rows, "id": [*range(len(rows))]}), file, row_group_size=40)
    else:
        lines = [json.dumps({"text": text and text.decode("utf-8", "surrogateescape")}) for text in rows]
        file.write_text("\r\n".join(lines))
    return file


def write_texts(folder, rows=TEXTS):
    folder.mkdir()
    for i, text in enumerate(rows):
        (folder / f"{i:03}.txt").write_bytes(text)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty directory."""
    monkeypatch.chdir(tmp_path)


def of_hub(monkeypatch, rows=TEXTS):
    """Rows as a data set someone/texts of the Hub, in three files."""
    rows = [{"text": text.decode("utf-8", "replace"), "meta": {"text": "within", "id": 1}} for text in rows]
    dataset = datasets.Dataset.from_list(rows)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: dataset.to_iterable_dataset(num_shards=3))
    return "someone/texts"


def found_in(folder):
    """The documents of a prepared folder of bytes."""
    corpus = read_corpus(Path(folder), load_tokenizer(Path(folder, "tokenizer.json")))
    ids = np.concatenate([corpus.train, corpus.val])
    assert ids[-1] == 256 == corpus.train[-1]
    return [bytes(part.astype(np.uint8)) for part in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]]


def one_text(patch):
    Path("one.txt").write_bytes(b"\n".join(TEXTS))
    return "one.txt"


def linked(patch):
    Path("link").symlink_to(write_texts(Path("texts")))
    return "link"


def two_files(patch):
    write_rows(Path("texts/train-notes.jsonl"), TEXTS[:50])  # a name in which others read a split
    return write_rows(Path("texts/chapters.parquet"), TEXTS[50:]).parent


SOURCES = {
    "folder": lambda patch: write_texts(Path("texts")),
    "linked": linked,
    "json lines": lambda patch: write_rows(Path("texts.JSONL")),
    "parquet": lambda patch: write_rows(Path("texts.parquet")),
    "two files": two_files,
    "hub": of_hub,
    "one text": one_text,
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source(source, monkeypatch, capsys):
    """Catches texts that are lost, cut at lines, or of other bytes (line ends, invalid UTF-8), other lengths
    in meta.json, and another split or order than the root's."""
    path, expected = str(SOURCES[source](monkeypatch)), TEXTS
    if source == "hub":  # whose texts are UTF-8
        expected = [text.decode("utf-8", "replace").encode() for text in TEXTS]
    if source == "one text":
        expected = [b"\n".join(TEXTS)]
    prepare(Options(path, Path("out")))
    said = capsys.readouterr().out
    if source == "one text":
        found, end = found_in("out")
        assert found[:-1] + end == expected[0] + b"\0" and len(end) - 1 == len(expected[0]) // 10
    else:
        assert sorted(found_in("out")) == sorted(text + b"\0" for text in expected)
    meta = json.loads(Path("out/meta.json").read_text())
    corpus = data.open_corpus("out")
    assert meta["bytes"] == sum(map(len, expected)) and corpus.val_bytes == meta["val_bytes"] > 0
    assert len(corpus.val) == meta["val_bytes"] + np.count_nonzero(corpus.val == 256)
    assert sorted(os.listdir("out")) == ["meta.json", "tokenizer.json", "train.bin", "val.bin"]
    if source != "hub":
        assert f"of {path} are not UTF-8, read byte by byte" in said
        assert sorted(text for _, text in texts(path)) == sorted(expected)
    if source in ("folder", "linked", "one text"):
        same = data.open_corpus(path)
        assert np.array_equal(same.train, corpus.train) and np.array_equal(same.val, corpus.val)
    elif source != "hub":
        assert np.array_equal(open_corpus(path).train, corpus.train)  # as the lab's training prepares it


@pytest.mark.parametrize("rows", [TEXTS[:1], TEXTS[:99], [b"x"], [b"ab", b"c" * 30]])
def test_few_documents(rows, capsys):
    """Catches a validation that is empty, or a text whose end is learned and asked; of many documents another
    one in 20 than data.divide's."""
    prepare(Options(str(write_texts(Path("texts"), rows)), Path("out")))
    assert f"of these {len(rows)} documents the last tenth of each is for" in capsys.readouterr().out
    theirs, ours = data.open_corpus("texts"), data.open_corpus("out")
    assert np.array_equal(theirs.train, ours.train) and np.array_equal(theirs.val, ours.val)
    documents = [(f"{i}\udcff", str(i).encode()) for i in range(1000)]
    assert [text for name, text in documents if is_held_out(name)] == data.divide(documents)[1]


def test_what_is_left_out(capsys):
    """Catches a stray file by which a folder is read otherwise, or that vanishes without a word."""
    texts = write_texts(Path("texts"))
    (texts / ".DS_Store").write_bytes(b"\0\0")
    (texts / ".copies").mkdir()
    shutil.copy(texts / "001.txt", texts / ".copies")
    (texts / "001.txt").rename(texts / "001.TXT")
    for name, content in {"data.json": b"{}", "image.png": b"a\0", "no.txt": b" \n", "x.csv": b"a,b"}.items():
        (texts / name).write_bytes(content)
    prepare(Options("texts", Path("out")))
    said = capsys.readouterr().out
    assert "note: 4 of texts hold no text, left out: texts/data.json, texts/image.png" in said
    assert "note: 2 of texts are hidden, left out: texts/.DS_Store, texts/.copies" in said
    assert sorted(found_in("out")) == sorted(text + b"\0" for text in TEXTS)
    write_rows(Path("rows/a.jsonl"), [None, b" ", *TEXTS, b"a\0b"])
    shutil.copy(texts / "data.json", "rows")
    prepare(Options("rows", Path("out2")))
    assert "note: 4 of rows hold no text, left out" in capsys.readouterr().out
    assert len(found_in("out2")) == len(TEXTS)


@pytest.mark.parametrize("many", ["a.jsonl", "a.Parquet"])
def test_texts_beside_rows(many):
    """Catches a folder of which one kind of file is dropped in silence."""
    write_rows(Path("rows") / many.lower()).rename(Path("rows") / many)
    Path("rows/README.md").write_text("what these are")
    for read in (open_corpus, texts, lambda name: prepare(Options(name, Path("out")))):
        with pytest.raises(UserError, match=r"README\.md"):
            read("rows")
    assert not Path("out.part").exists()


# -- A kill ----------------------------------------------------------------------------------------


def killed(monkeypatch, o, at):
    """Prepare until the `at`-th entry in state.json would be written, at which the process dies."""
    n, write = count(1), preparation.write_json

    def write_json(file, content):
        if next(n) == at:
            raise KeyboardInterrupt
        write(file, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparation, "write_json", write_json)
        prepare(o)


@pytest.mark.parametrize("at", [1, 2, 5, 9])
@pytest.mark.parametrize("source", ["folder", "json lines", "parquet", "hub", "one text"])
def test_kill(monkeypatch, capsys, source, at):
    """Catches a kill that loses or repeats text, or notes: the same command makes the same files."""
    monkeypatch.setattr(preparation, "BATCH", 150)
    monkeypatch.setattr(preparation, "PIECE", 100)
    path = str(SOURCES[source](monkeypatch))
    prepare(Options(path, Path("whole")))
    said = capsys.readouterr().out
    killed(monkeypatch, o := Options(path, Path("again")), at)
    assert not Path("again").exists() and not data.is_prepared("again")
    with open("again.part/train.bin", "ab") as file:
        file.write(b"what came after the last entry")
    prepare(o)
    for file in Path("whole").iterdir():
        assert file.read_bytes() == Path("again", file.name).read_bytes()
    notes = [line for line in said.splitlines() if line.startswith("note") and "tenth" not in line]
    assert all(line in capsys.readouterr().out for line in notes[-1:])
    assert not Path("again.part").exists()


DAMAGES = {
    "state.json is cut": ("state.json", lambda b: b[: len(b) // 2]),
    "state.json lacks a field": ("state.json", lambda b: b'{"row": 1}'),
    "state.json has a wrong type": ("state.json", lambda b: b.replace(b'"row": ', b'"row": "x", "r": ')),
    "train.bin is cut": ("train.bin", lambda b: b[:10]),
    "tokenizer.json is cut": ("tokenizer.json", lambda b: b[:100]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage(monkeypatch, damage):
    """Catches half a file that is gone on with, and a stack trace."""
    monkeypatch.setattr(preparation, "BATCH", 150)
    write_texts(Path("texts"))
    killed(monkeypatch, o := Options("texts", Path("out")), 7)
    name, change = DAMAGES[damage]
    file = Path("out.part", name)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UserError, match=rf"out\.part/{name}"):
        prepare(o)
    shutil.rmtree("out.part")  # the way out that is named
    prepare(o)


def test_another_text_or_setting(monkeypatch):
    """Catches a folder that is gone on with from another text, or by other flags, or written over."""
    monkeypatch.setattr(preparation, "BATCH", 150)
    write_texts(Path("texts"))
    killed(monkeypatch, o := Options("texts", Path("out")), 7)
    for name, value in (("tokenizer", "bpe"), ("tokens", 10.0)):
        with pytest.raises(UserError, match=rf"out\.part has another {name}"):
            prepare(Options(**{"data": "texts", "to": Path("out"), name: value}))
    with preparation.filelock.FileLock("out.part/.lock"), pytest.raises(UserError, match="another process"):
        prepare(o)
    os.utime("texts/000.txt", (1, 1))
    with pytest.raises(UserError, match=r"out\.part has another data"):
        prepare(o)
    shutil.rmtree("out.part")
    prepare(o)
    with pytest.raises(UserError, match="out is there already"):
        prepare(o)


def test_full_disk(capsys):
    """Catches a full disk without a word of which file, and a text that has to begin again."""
    Path("a.txt").write_text("0123456789\n" * 200_000)
    with full_disk(2_500_000), pytest.raises(UserError, match=r"cannot write out\.part.*the same command"):
        prepare(Options("a.txt", Path("out")))
    prepare(Options("a.txt", Path("out")))
    assert np.array_equal(data.open_corpus("out").train, data.open_corpus("a.txt").train)


def test_tokens(monkeypatch):
    """Catches a text that is cut where there are enough tokens, and other texts after a kill."""
    monkeypatch.setattr(preparation, "BATCH", 150)
    write_rows(Path("a.jsonl"))
    prepare(o := Options("a.jsonl", Path("out"), tokens=500.0))
    killed(monkeypatch, again := Options("a.jsonl", Path("again"), tokens=500.0), 5)
    prepare(again)
    train = data.open_corpus("out").train
    assert 500 <= len(train) < 520 and train[-1] == 256 and len(data.open_corpus("out").val)
    assert np.array_equal(train, data.open_corpus("again").train) and o.tokens


@pytest.mark.parametrize("n", [20, 150])
def test_bpe(n):
    """Catches another BPE than the root's of the same text, and that of another corpus that is not taken."""
    write_texts(Path("texts"), [text * 9 for text in TEXTS[:n]])
    prepare(Options("texts", Path("out"), "bpe", vocab_size=300))
    theirs, ours = data.open_corpus("texts", "bpe", 300), open_corpus("out")
    assert theirs.tokenizer.digest == ours.tokenizer.digest and np.array_equal(theirs.train, ours.train)
    prepare(Options(str(write_rows(Path("a.jsonl"))), Path("other"), "out"))
    assert open_corpus("other").tokenizer.digest == ours.tokenizer.digest


def test_memory(monkeypatch):
    """Catches a text that is held in memory, as rows or as one file."""
    monkeypatch.setattr(preparation, "PIECE", 10**4)
    monkeypatch.setattr(preparation, "BATCH", 10**5)
    Path("a.txt").write_bytes(b"a line of a text\n" * 300_000)
    write_rows(Path("a.jsonl"), [b"a line of a text\n" * 100] * 3000)
    for name in ("a.txt", "a.jsonl"):
        prepare(Options(name, Path(name + "-")))  # what is imported, once
        tracemalloc.start()
        prepare(Options(name, Path(name + "-again")))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3e6 < Path(name).stat().st_size


# -- What is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,flags,words",
    [
        ("blank.txt", {}, "holds no text"),
        ("missing.txt", {}, "'missing.txt' is no file or folder"),
        ("out/typo", {}, "is no file or folder"),
        ("a.txt", {"tokenizer": "no/where/at all"}, "no/where"),
        ("a.txt", {"tokenizer": "bpe", "vocab_size": 100}, "--vocab-size 100"),
        ("a.txt", {"vocab_size": 300}, "vocab_size = 300"),
        ("a.txt", {"field": "body"}, "field = 'body'"),
        ("a.parquet", {"config": "x"}, "config = 'x'"),
        ("pydocs", {"split": "test"}, "split = 'test'"),
        ("a.parquet", {"field": "body"}, r"a\.parquet.*'body'; --field is one of .*'text', 'id'"),
        ("a.parquet", {"field": "id"}, r"a\.parquet.*int64"),
        ("bad.parquet", {}, r"bad\.parquet"),
        *((f"{i}.jsonl", {}, rf"{i}\.jsonl, line 2,") for i in range(6)),
        ("someone/texts", {"field": "id"}, "someone/texts.*'id'.*'text', 'meta'"),
        ("someone/texts", {"field": "meta.id"}, "someone/texts.*'meta.id'"),
        ("someone/broken", {}, "no route to host.*the same command goes on"),
    ],
)
def test_refused(monkeypatch, name, flags, words):
    """Catches a stack trace, or a folder that is left, where one line should name the file and the row."""
    Path("out").mkdir()
    for file, text in (("blank.txt", b" \n"), ("a.txt", b"some text"), ("bad.parquet", b"PAR1")):
        Path(file).write_bytes(text)
    write_rows(Path("a.parquet"))
    for i, bad in enumerate((b'{"body": "b"}', b'{"text": 5}', b"[1]", b"{", b"\xff", b"[" * 10**5)):
        Path(f"{i}.jsonl").write_bytes(b'{"text": "a"}\n' + bad)
    of_hub(monkeypatch)
    if name == "someone/broken":
        monkeypatch.setattr("datasets.load_dataset", broken)
    with pytest.raises(UserError, match=words):
        prepare(Options(name, Path("new"), **flags))
    assert not Path("new.part").exists()


def broken(*_, **__):
    raise ConnectionError("no route to host")


def test_missing_packages(monkeypatch):
    """Catches a stack trace where a package is to be installed."""
    write_rows(Path("a.parquet"))
    for package, name in (("datasets", "someone/texts"), ("pyarrow", "a.parquet")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UserError, match=f"pip install {package}"):
            prepare(Options(name, Path("out")))


def test_fields(monkeypatch):
    """Catches a text within another column."""
    rows = [{"meta": {"text": text.decode("latin-1")}} for text in TEXTS[:3]]
    Path("a.jsonl").write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    parquet.write_table(pyarrow.Table.from_pylist(rows), "a.parquet")
    expected = [text.decode("latin-1").encode() for text in TEXTS[:3]]
    for name in ("a.jsonl", "a.parquet"):
        assert [text for _, text in texts(name, "meta.text")] == expected
    prepare(Options(of_hub(monkeypatch), Path("out"), field="meta.text"))
    assert {*found_in("out")} == {b"within\0"}


def test_names_that_are_not_utf8(monkeypatch, capsys):
    """Catches a stack trace for a file whose name is in an older encoding, also after a kill; and for half a
    surrogate pair."""
    monkeypatch.setattr(preparation, "BATCH", 1)
    folder = write_rows(Path("rows/a.jsonl")).parent
    (folder / os.fsdecode(b"caf\xe9.jsonl")).write_text('{"text": "a\\ud800"}\n{"text": "b\\udcff"}')
    killed(monkeypatch, o := Options("rows", Path("out")), 155)
    prepare(o)
    assert b"a?\0" in found_in("out") and b"b\xff\0" in found_in("out")
    (folder / os.fsdecode(b"caf\xe9.csv")).touch()
    assert len(texts("rows")) == len(TEXTS) + 2 and "left out: rows/caf\\udce9.csv" in capsys.readouterr().out


def test_corpora_of_the_root(monkeypatch):
    """Catches a text of the root that the lab prepares otherwise."""
    monkeypatch.setitem(data.SOURCES, "pydocs", lambda: [(f"{i}", text) for i, text in enumerate(TEXTS)])
    prepare(Options("pydocs", Path("out")))
    theirs, ours = open_corpus("pydocs", "bytes"), open_corpus("out")
    assert np.array_equal(theirs.train, ours.train) and np.array_equal(theirs.val, ours.val)
    assert ours.tokenizer.digest == Tokenizer.bytes().digest


def test_command(capsys, run):
    """Catches flags that do not arrive, and a next step that is not named."""
    write_texts(Path("texts"), TEXTS[:9])
    run("prepare", "texts", "--to", "there", "--tokenizer", "bpe", "--vocab-size", "260")
    assert capsys.readouterr().out.endswith("next: python train.py --data there\n")
    assert data.open_corpus("there").vocab_size == 260
    with pytest.raises(SystemExit, match="stream"):
        run("stream", "texts")
