import json
import re
import resource
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha1, sha256
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from corpus import preparation
from corpus.preparation import divide, docstrings, pieces_of, prepare, read_texts
from corpus.tokenizers import Tokenizer
from runtime import UserError


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def refuse(monkeypatch):
    """GPT-2's vocabulary cannot be fetched."""

    def fail(*_, **__):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)


# -- Sources ---------------------------------------------------------------------------------------


def test_docstrings(tmp_path):
    """Catches docstrings that are missed, and files of other Pythons that stop the preparation."""
    file = tmp_path / "m.py"
    file.write_text(
        '"""M."""\nclass C:\n    """C."""\n    async def f(self):\n        """F."""\n        "no"\n'
    )
    assert docstrings(file) == ["M.", "C.", "F."]
    file.write_text("print 'python 2'")
    assert docstrings(file) == []


def test_pydocs(tmp_path, monkeypatch):
    """Catches a docstring that comes twice, and documents in another order than their files."""
    for name, text in (("a", '"""One."""'), ("b", '"""One."""'), ("c", "0"), ("d", '"""Two."""')):
        (tmp_path / name).write_text(text + '\ndef f():\n    """F."""\n' * (name == "d"))
    files = [(file.name, file) for file in sorted(tmp_path.iterdir())]
    monkeypatch.setattr(preparation, "package_files", lambda: iter(files))
    monkeypatch.setattr(preparation, "ProcessPoolExecutor", lambda n, _: ThreadPoolExecutor(n))
    monkeypatch.setattr(preparation, "topics", {"lambda": "Two.", "if": "Three."})
    expected = [("a", b"One."), ("d", b"Two.\n\nF."), ("topics/if", b"Three.")]
    assert preparation.pydocs() == expected


def test_package_files(monkeypatch):
    """Catches test files in the default corpus, and an unstable order."""
    monkeypatch.setattr(preparation, "PACKAGES", ("numpy", "networkx"))
    names = [name for name, _ in preparation.package_files()]
    assert len(names) > 900 and len(set(names)) == len(names)
    assert not any("/tests/" in name or "site-packages" in name for name in names)
    for _, group in groupby(names, lambda name: name.split("/")[0]):
        paths = [Path(name) for name in group]
        assert paths == sorted(paths)
    packages = [package for package, _ in groupby(name.split("/")[0] for name in names)]
    assert packages == ["python", *preparation.PACKAGES]


def test_network(monkeypatch, tmp_path, refuse):
    """Catches another text under the same address; a stack trace without a network, or its one line
    after minutes of reading text."""
    (tmp_path / "input.txt").write_bytes(b"To be")
    address, right = (tmp_path / "input.txt").as_uri(), sha256(b"To be").hexdigest()
    monkeypatch.setattr(preparation, "SHAKESPEARE", (address, right))
    assert preparation.shakespeare() == [("shakespeare", b"To be")]
    monkeypatch.setattr(preparation, "SHAKESPEARE", (address, "0"))
    with pytest.raises(UserError, match=r"cannot download .*its sha256 is.*--data FILE"):
        preparation.shakespeare()
    monkeypatch.setitem(
        preparation.CORPORA, "pydocs", lambda: pytest.fail("the text was read before")
    )
    with pytest.raises(UserError, match=r"--tokenizer bytes"):
        prepare("pydocs", "gpt2", cache=tmp_path)


def test_texts_that_are_left_out(tmp_path, capsys):
    """Catches files that are left out without a word."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text("text", encoding="utf-16")
    assert read_texts(tmp_path) == [(f"{tmp_path.name}/a.txt", b"text")]
    assert "1 of 2 files left out, with zero bytes" in capsys.readouterr().out
    assert read_texts(tmp_path / "b.txt") == []
    assert "b.txt" in capsys.readouterr().out


def test_json_lines(tmp_path, cache):
    """Catches a .jsonl file that is trained on as it is, with its braces, and a line without a text
    that is not named."""
    file, other = tmp_path / "a.jsonl", tmp_path / "b.txt"
    file.write_text('{"text": "naïve", "id": 1}\n\n{"text": null}\r\n{"text": "b\\nc\\ud800"}\n')
    other.write_text('{"text": "as it is"}')
    lines = ["naïve".encode(), b"", b"b\nc?"]
    assert read_texts(file) == [*zip([f"a.jsonl line {i}" for i in (1, 3, 4)], lines, strict=True)]
    assert [text for _, text in read_texts(tmp_path)] == [*lines, other.read_bytes()]
    folder, tokenizer = prepare(str(file), cache=cache)
    ids = [np.fromfile(folder / f"{split}.bin", dtype=np.uint16) for split in ("train", "val")]
    assert b"{" not in tokenizer.decode(np.concatenate(ids))
    for bad in ('{"body": "b"}', '{"text": 5}', "[1]", "{", "\xff"):
        file.write_bytes(b'{"text": "a"}\n' + bad.encode("latin-1"))
        with pytest.raises(UserError, match=r"a\.jsonl, line 2: .*'text'"):
            read_texts(file)


# -- Documents -> ids ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [b"", b"a\nb", b"a" * 10**6, b"line\n" * 500_000, b"x" * 2_500_000, "日".encode() * 700_000],
)
def test_pieces(text):
    """Catches a text that is cut inside a line or a character, or where it need not be, or loses
    something."""
    pieces = list(pieces_of(text))
    assert b"".join(pieces) == text and len(pieces) == -(-len(text) // 10**6)
    assert all(piece.decode() for piece in pieces)
    assert b"\n" not in text or all(piece.endswith(b"\n") for piece in pieces[:-1])


def test_split_by_file():
    """Catches documents cut in two where there are enough to keep them whole, and a corpus of many
    files without any validation, or without any training."""
    documents = [(f"f{i}", f"text {i}".encode()) for i in range(400)]
    train, val = divide(documents)
    assert sorted(train + val) == sorted(text for _, text in documents)
    assert 8 < len(val) < 40
    held_out = [f"f{i}" for i in range(4000) if int(sha1(b"f%d" % i).hexdigest(), 16) % 20 == 0]
    others = [f"f{i}" for i in range(150) if f"f{i}" not in held_out]
    for names in (held_out, others):  # all would be on one side
        train, val = divide([(name, b"0123456789") for name in names[:100]])
        assert train == [b"012345678"] * 100 and val == [b"9"] * 100


def test_corpus_of_files(tmp_path, cache):
    """Catches lost bytes, text in both parts, and a cache that ignores a change."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(3):
        (texts / f"{i}.txt").write_text(f"file {i}. " * 100, encoding="utf-8")
    (texts / ".hidden").write_text("no")
    (texts / "image").write_bytes(b"\x89PNG\0")
    folder, tokenizer = prepare(str(texts), cache=cache)
    parts = [np.fromfile(folder / f"{n}.bin", dtype=np.uint16) for n in ("train", "val")]
    train, val = (tokenizer.decode(x).split(b"<|endoftext|>") for x in parts)
    whole = [a + b for a, b in zip(train, val, strict=True)]
    assert whole == [*(f"file {i}. ".encode() * 100 for i in range(3)), b""]
    assert len(parts[1]) == 3 * 81
    assert prepare(str(texts), cache=cache)[0] == folder
    (texts / "3.txt").write_text("more")
    assert prepare(str(texts), cache=cache)[0] != folder
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["bytes"] == 2400
    # Three documents, each with an end of text.
    assert meta["val_bytes"] == (folder / "val.bin").stat().st_size // 2 - 3


def test_names_in_the_cache(tmp_path, cache, refuse):
    """Catches corpora that were prepared before and are not found any more, or that need the
    network again."""
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox. " * 100)
    folder, _ = prepare(str(file), cache=cache)
    assert folder.name == "text-bytes-1f655a00"
    assert sha256((folder / "train.bin").read_bytes()).hexdigest().startswith("a13707bc4b08c76b")
    assert prepare(str(file), "bpe", 300, cache)[0].name == "text-bpe300-019e43b6"
    folder.rename(folder.with_name("text-gpt2-44cdd419"))
    assert prepare(str(file), "gpt2", cache=cache)[0].name == "text-gpt2-44cdd419"


@pytest.mark.parametrize(
    "data,flags,message",
    [
        ("blank.txt", [], "holds no text"),
        ("missing.txt", [], "no such file or folder, nor one of pydocs, pysource"),
        ("", [], "--data is empty"),
        (__file__, ["bpe", 100], "--vocab-size 100 is too small"),
        (__file__, ["no/where/at all"], "--tokenizer is bytes, bpe, gpt2 or a model: no/where"),
    ],
)
def test_refused(tmp_path, monkeypatch, data, flags, message):
    """Catches a stack trace where one line should name the problem and the way out."""
    monkeypatch.chdir(tmp_path)
    Path("blank.txt").write_text(" \n")
    with pytest.raises(UserError, match=message):
        prepare(data, *flags, cache=tmp_path)


def test_full_disk(tmp_path, cache):
    """Catches a full disk without a word of which file, and half a corpus that is left."""
    text = tmp_path / "text.txt"
    text.write_text("0123456789" * 10_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with pytest.raises(OSError) as error:
            prepare(str(text), cache=tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.filename.endswith("train.bin")
    assert re.fullmatch(r"File too large \([\d,]+ MiB free\)", error.value.strerror)
    assert not any((tmp_path / "cache").iterdir())


# -- Folders of .bin files -------------------------------------------------------------------------


def test_nanogpt_folders(tmp_path, capsys, refuse):
    """Catches nanoGPT's folders not taken as they are, also without GPT-2's vocabulary, and ids of
    characters that are taken for GPT-2's."""
    for name in ("train.bin", "val.bin"):
        np.array([0, 1, 2, 3] * 50, dtype=np.uint16).tofile(tmp_path / name)
    folder, tokenizer = prepare(str(tmp_path))
    assert folder == tmp_path and tokenizer.vocab_size == 50_257
    assert "shown as token ids" in capsys.readouterr().out
    assert tokenizer.encode("3 1 2") == [3, 1, 2] and tokenizer.decode([3, 1]) == b" 3 1"
    with pytest.raises(UserError, match="give ids"):
        tokenizer.encode("hello")
    with pytest.raises(UserError, match="a BPE cannot be trained on them"):
        prepare(str(tmp_path), "bpe")

    (tmp_path / "meta.pkl").write_bytes(b"a pickle")
    with pytest.raises(UserError, match=r"meta\.pkl is a character .*--data FILE.* --tokenizer"):
        prepare(str(tmp_path))
    assert prepare(str(tmp_path), "bytes")[1].name == "bytes"
    Tokenizer.bytes().save(tmp_path / "tokenizer.json")
    assert prepare(str(tmp_path))[1].name == "bytes"


# -- python -m corpus ------------------------------------------------------------------------------


def test_command(tmp_path, monkeypatch, capsys, run):
    """Catches a corpus that is not shown as it is."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("abab" * 100)
    run("text.txt")
    out = capsys.readouterr().out
    assert "400 bytes, sha256" in out and "'abababab" in out
    assert "train: 361 tokens, unigram entropy 0.71" in out  # log 2, and one end of text
