"""From any source to a folder with train.bin and val.bin, and the way on after a kill."""

import json
import os
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from lab_helpers import full_disk
from pyarrow import parquet

import data
from common import UserError
from lab.corpora import preparation, sources
from lab.corpora.preparation import Options, is_held_out, open_corpus, prepare
from lab.corpora.sources import of_files
from tokenizer import Tokenizer

# CRLF, bytes that are not UTF-8, a blank line, no newline at the end.
TEXTS = [b"one\r\n\r\ntwo", "naïve café 😀\n".encode(), b"caf\xe9\r\n", b"no newline \x80\x81"]
TEXTS += [f"document {i}\n".encode() for i in range(150)]


def write_rows(file, rows=TEXTS):
    file.parent.mkdir(exist_ok=True)
    rows = [{"text": text and text.decode("utf-8", "replace"), "id": i} for i, text in enumerate(rows)]
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=40)
    else:
        file.write_text("\ufeff" + "\r\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


def write_texts(folder, rows=TEXTS):
    folder.mkdir()
    for i, text in enumerate(rows):
        (folder / f"{i:03}.txt").write_bytes(text)
    return folder


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Texts are divided and written often."""
    monkeypatch.setattr(preparation, "BATCH", 150)


def of_hub(monkeypatch, rows=TEXTS):
    """Rows as a data set someone/texts of the Hub, in three files."""
    rows = [{"text": text and text.decode("utf-8", "replace"), "id": 1} for text in rows]
    dataset = datasets.Dataset.from_list(rows)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: dataset.to_iterable_dataset(num_shards=3))
    return "someone/texts"


def found_in(folder):
    """The documents of a prepared folder of bytes."""
    corpus = data.open_corpus(str(folder))
    ids = np.concatenate([corpus.train, corpus.val])
    assert ids[-1] == 256 == corpus.train[-1]
    return [bytes(part[:-1].astype(np.uint8)) for part in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]]


def one_text(patch):
    Path("one.txt").write_bytes(b"\n".join(TEXTS))
    return "one.txt"


def mixed(patch):
    write_rows(Path("texts/train-notes.jsonl"), [None, b" ", *TEXTS[:50]])
    return write_rows(Path("texts/chapters.parquet"), TEXTS[50:]).parent


SOURCES = {
    "folder": lambda patch: write_texts(Path("texts")),
    "json lines": lambda patch: write_rows(Path("texts.JSONL")),
    "ndjson": lambda patch: write_rows(Path("texts.ndjson")),
    "parquet": lambda patch: write_rows(Path("texts.parquet")),
    "mixed": mixed,
    "hub": lambda patch: of_hub(patch, [None, *TEXTS]),
    "one text": one_text,
}


def same_ids(a, b):
    return np.array_equal(a.train, b.train) and np.array_equal(a.val, b.val)


@pytest.mark.parametrize("source", SOURCES)
def test_every_source(source, monkeypatch, capsys):
    """Catches texts that are lost, cut at lines or of other bytes, and another split than the root's."""
    path = str(SOURCES[source](monkeypatch))
    prepare(Options(path, Path("out")))
    said, corpus, meta = capsys.readouterr().out, data.open_corpus("out"), data.read_json("out/meta.json")
    if source in ("folder", "one text"):
        assert same_ids(data.open_corpus(path), corpus)
        assert f"files in {path} are not UTF-8 and are read byte by byte" in said
    else:
        expected = [text.decode("utf-8", "replace").encode() for text in TEXTS]
        assert sorted(found_in("out")) == sorted(expected)
        if source != "hub":
            assert sorted(text for _, text in of_files(path)) == sorted(expected)
            assert same_ids(open_corpus(path), corpus)  # as the lab's training prepares it
    assert meta["bytes"] == sum(map(len, found_in("out"))) and meta["val_bytes"] == corpus.val_bytes > 0
    assert len(corpus.val) == meta["val_bytes"] + np.count_nonzero(corpus.val == 256)
    assert sorted(os.listdir("out")) == ["meta.json", "tokenizer.json", "train.bin", "val.bin"]


def test_texts_beside_rows():
    """Catches texts beside files of many texts that are read as one source."""
    write_rows(Path("rows/z.parquet")).rename("rows/z.Parquet")
    Path("rows/data.json").write_text("{}")  # no text
    assert len([*of_files("rows")]) == len(TEXTS)
    Path("rows/README.md").write_text("what these are")
    for read in (open_corpus, lambda name: prepare(Options(name, Path("out")))):
        with pytest.raises(UserError, match=r"README\.md"):
            read("rows")
    assert not Path("out.part").exists()


@pytest.mark.parametrize("name", ["texts/000.gz", "texts/z.ZIP", "texts/z.jsonl.zst", "texts/z.arrow"])
def test_compressed_files(name):
    """Catches files whose text is left out without a word, or read as if their bytes were text."""
    write_texts(Path("texts"))
    Path(name).write_bytes(b"not even a byte of 0")
    for read in (open_corpus, lambda name: prepare(Options(name, Path("out")))):
        for source in ("texts", name):
            with pytest.raises(UserError, match=f"{name} (is a compressed|is part of a data set)"):
                read(source)
    assert not Path("out.part").exists()


@pytest.mark.parametrize("rows", [TEXTS[:1], TEXTS[:99], [b"x"], [b"ab", b"c" * 30]])
def test_few_documents(rows, capsys):
    """Catches an empty validation, an end that is learned and asked, another choice than
    data.split_documents's."""
    prepare(Options(str(write_texts(Path("texts"), rows)), Path("out")))
    number = "is only 1 document:" if len(rows) == 1 else f"are only {len(rows)} documents:"
    assert number in capsys.readouterr().out
    assert same_ids(data.open_corpus("texts"), data.open_corpus("out"))
    documents = [(f"{i}\udcff", str(i).encode()) for i in range(1000)]
    assert [text for name, text in documents if is_held_out(name)] == data.split_documents(documents)[1]


def test_a_folder_in_its_own_text():
    """Catches a preparation that reads what it writes, so that it cannot be resumed."""
    write_texts(Path("texts"))
    for place in ("texts/out", "texts/deep/out"):
        with pytest.raises(UserError, match=f"--to {place} lies in texts"):
            prepare(Options("texts", Path(place)))
    prepare(Options("texts/000.txt", Path("texts/out")))  # one of the files


def test_the_name_of_a_file_does_not_matter():
    """Catches a text that is split otherwise because its file or folder was renamed."""
    rows = write_rows(Path("rows.jsonl"), TEXTS)
    before = [(name, is_held_out(name)) for name, _ in of_files(rows)]
    assert before == [(name, is_held_out(name)) for name, _ in of_files(rows.rename("renamed.jsonl"))]
    texts = write_texts(Path("texts"))
    assert list(of_files(texts)) == list(of_files(texts.rename("moved")))


@pytest.mark.parametrize("end", [b"\n", b" "])
def test_large_texts(monkeypatch, end):
    """Catches bytes that are lost where a text is cut, a cut within a line, and pieces without a bound."""
    monkeypatch.setattr(sources, "PIECE", 50)
    Path("a.txt").write_bytes(text := b"".join(b"%d%s" % (i, end) for i in range(5000)))
    pieces = [piece for _, piece in of_files("a.txt")]
    assert b"".join(pieces) == text and max(map(len, pieces)) <= 100
    assert end == b" " or all(piece.endswith(end) for piece in pieces)
    assert len({name for name, _ in of_files("a.txt")}) == len(pieces) > 200


def test_what_is_left_out(monkeypatch, capsys):
    """Catches a stray file that is read as text, or that vanishes without a word; zero bytes, or an older
    encoding, that only the beginning of a file is asked for."""
    monkeypatch.setattr(sources, "PIECE", 4)
    texts = write_texts(Path("texts"))
    (texts / "001.txt").rename(texts / os.fsdecode(b"caf\xe9.TXT"))
    stray = {".DS_Store": b"hidden", "data.json": b"{}", "no.txt": b" \n" * 9}
    for name, content in (stray | {"image.png": b"text\n" * 9 + b"\0"}).items():
        (texts / name).write_bytes(content)
    (texts / "foreign.txt").write_bytes(late := b"text\n" * 9 + b"\xe9")
    prepare(Options("texts", Path("out")))
    said = capsys.readouterr().out
    assert "3 files in texts have no text" in said
    assert "skipped: data.json, image.png, no.txt" in said
    assert "3 files in texts are not UTF-8" in said and "byte by byte: 002.txt, 003.txt, foreign.txt" in said
    assert sum(map(len, found_in("out"))) == sum(map(len, [*TEXTS, late]))


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


@pytest.mark.parametrize("tokens", [None, 1500.0])
@pytest.mark.parametrize("at", [1, 2, 9])
@pytest.mark.parametrize("source", ["folder", "mixed", "hub", "one text"])
def test_kill(monkeypatch, source, at, tokens):
    """Catches a kill that loses or repeats text: the same command makes the same files."""
    monkeypatch.setattr(sources, "PIECE", 70)
    path = str(SOURCES[source](monkeypatch))
    prepare(Options(path, Path("whole"), tokens=tokens))
    killed(monkeypatch, o := Options(path, Path("again"), tokens=tokens), at)
    assert not Path("again").exists() and not data.is_prepared("again")
    with open("again.part/train.bin", "ab") as file:
        file.write(b"what came after the last entry")
    prepare(o)
    for file in Path("whole").iterdir():
        assert file.read_bytes() == Path("again", file.name).read_bytes()
    assert not Path("again.part").exists()
    train, val = (len(ids) for ids in (data.open_corpus("again").train, data.open_corpus("again").val))
    assert val and (tokens is None or 1500 <= train < 1700)


def test_few_tokens(monkeypatch):
    """Catches far more tokens than were asked for, where a batch holds more than these."""
    monkeypatch.setattr(preparation, "BATCH", 10**6)
    prepare(Options(str(write_texts(Path("texts"))), Path("out"), tokens=300.0))
    assert 300 <= len(data.open_corpus("out").train) < 400


def test_another_text_or_setting(monkeypatch):
    """Catches a folder that is gone on with from another text, by other flags or half a file."""
    write_texts(Path("texts"))
    killed(monkeypatch, o := Options("texts", Path("out")), 7)
    with pytest.raises(UserError, match=r"out\.part.*--tokens"):
        prepare(Options("texts", Path("out"), tokens=10.0))
    with preparation.filelock.FileLock("out.part/.lock"), pytest.raises(UserError, match="another process"):
        prepare(o)
    os.utime("texts/000.txt", (1, 1))
    with pytest.raises(UserError, match=r"out\.part.*DATA"):
        prepare(o)
    for damage in ('{"few": 1}', "{"):
        Path("out.part/state.json").write_text(damage)
        with pytest.raises(UserError, match=r"out\.part/state\.json"):
            prepare(o)
    shutil.rmtree("out.part")
    prepare(o)
    with pytest.raises(UserError, match=r"^--to out already exists"):
        prepare(o)


def test_full_disk(monkeypatch):
    """Catches a full disk without a word of which file, and a text that has to begin again."""
    monkeypatch.setattr(preparation, "BATCH", 10**6)
    Path("a.txt").write_text("0123456789\n" * 200_000)
    with full_disk(2_500_000), pytest.raises(UserError, match=r"cannot write out\.part"):
        prepare(Options("a.txt", Path("out")))
    assert data.read_json("out.part/state.json")["texts"] > 0
    prepare(Options("a.txt", Path("out")))
    assert sum(map(len, found_in("out"))) == 2_200_000


@pytest.mark.parametrize("n", [20, 150])
def test_bpe(n):
    """Catches another BPE than the root's of the same text, and that of another corpus that is not taken."""
    write_texts(Path("texts"), [text * 9 for text in TEXTS[:n]])
    prepare(Options("texts", Path("out"), "bpe", vocab_size=300))
    theirs, ours = data.open_corpus("texts", "bpe", 300), open_corpus("out")
    assert theirs.tokenizer.digest == ours.tokenizer.digest and same_ids(theirs, ours)
    prepare(Options(str(write_rows(Path("a.jsonl"))), Path("other"), "out"))
    assert open_corpus("other").tokenizer.digest == ours.tokenizer.digest


def test_memory(monkeypatch):
    """Catches a text that is held in memory, as rows or as one file."""
    monkeypatch.setattr(sources, "PIECE", 10**4)
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
        ("blank.txt", {}, r"blank\.txt"),
        ("out/typo", {}, "out/typo"),
        ("a.txt", {"tokenizer": "no/where/at all"}, "no/where"),
        ("a.txt", {"tokenizer": "bpe", "vocab_size": 100}, "--vocab-size 100"),
        ("a.parquet", {"field": "body"}, r"a\.parquet.*'body'.*--field"),
        ("a.parquet", {"field": "id"}, r"a\.parquet.*id.*--field"),
        ("bad.parquet", {}, r"bad\.parquet"),
        *((f"{i}.jsonl", {}, rf"{i}\.jsonl{', line 2,' * (i != 4)}") for i in range(6)),
        ("someone/texts", {"field": "id"}, "someone/texts.*id"),
        ("someone/broken", {}, "no route to host"),
    ],
)
def test_refused(monkeypatch, name, flags, words):
    """Catches a stack trace, or a folder that is left, where one line should name the file."""

    def broken(*_, **__):
        raise ConnectionError("no route to host")

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


def test_corpora_of_the_root(monkeypatch):
    """Catches a text of the root that the lab prepares otherwise."""
    monkeypatch.setitem(data.SOURCES, "pydocs", lambda: [(f"{i}", text) for i, text in enumerate(TEXTS)])
    prepare(Options("pydocs", Path("out")))
    assert same_ids(open_corpus("pydocs", "bytes"), open_corpus("out"))
    assert open_corpus("out").tokenizer.digest == Tokenizer.named("bytes").digest


@pytest.mark.parametrize("open_it", [open_corpus, data.open_corpus])
def test_another_tokenizer_than_that_of_the_ids(open_it, monkeypatch):
    """Catches ids of one tokenizer that are read as those of another one."""
    monkeypatch.setitem(data.SOURCES, "pydocs", lambda: [(f"{i}", text) for i, text in enumerate(TEXTS)])
    prepare(Options("pydocs", Path("out"), "bpe", vocab_size=258))
    open_it("out")
    with pytest.raises(UserError, match="--tokenizer bytes is not the tokenizer that encoded out"):
        open_it("out", "bytes")
    prepare(Options("pydocs", Path("bytes")))
    assert same_ids(open_it("bytes", "bytes"), open_it("bytes"))
    if open_it is open_corpus:
        assert same_ids(open_it("bytes", "bytes"), open_it("bytes", "./bytes"))
        with pytest.raises(UserError, match=r"--tokenizer \./bytes is not the tokenizer"):
            open_it("out", "./bytes")


def test_bytes_without_a_vocabulary_size():
    """Catches an interrupted preparation that cannot go on since another preset has another --vocab-size."""
    path = str(write_rows(Path("a.jsonl")))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "prepare", lambda o: seen.append(o.vocab_size) or 1 / 0)
        for size in (4096, 257):
            with pytest.raises(ZeroDivisionError):
                open_corpus(path, "bytes", size)
    assert len(set(seen)) == 1


def test_two_at_once():
    """Catches a training that fails since another one is preparing the same text."""
    path = str(write_rows(Path("a.jsonl")))
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(open_corpus, [path, path])
    assert one.fingerprint() == two.fingerprint()
