import os
import re
import resource
import urllib.error
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import data
from lab.corpora import preparation
from lab.corpora.preparation import prepare, read_texts
from model import UserError


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def refuse(monkeypatch):
    """GPT-2's vocabulary cannot be fetched."""

    def fail(*_, **__):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)


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
    monkeypatch.setitem(preparation.CORPORA, "pydocs", lambda: pytest.fail("the text was read before"))
    with pytest.raises(UserError, match=r"--tokenizer bytes"):
        prepare("pydocs", "gpt2", cache=tmp_path)


def test_json_lines(tmp_path, cache):
    """Catches a .jsonl file that is trained on as it is, with its braces, and a line without a text
    that is not named."""
    file, other = tmp_path / "a.jsonl", tmp_path / "b.txt"
    file.write_text('{"text": "naïve", "id": 1}\n\n{"text": null}\r\n{"text": "b\\nc\\ud800"}\n')
    other.write_text('{"text": "as it is"}')
    lines = ["naïve".encode(), b"b\nc?"]
    assert read_texts(file) == [*zip(["a.jsonl line 1", "a.jsonl line 4"], lines, strict=True)]
    assert [text for _, text in read_texts(tmp_path)] == [*lines, other.read_bytes()]
    folder, tokenizer = prepare(str(file), cache=cache)
    ids = [np.fromfile(folder / f"{split}.bin", dtype=np.uint16) for split in ("train", "val")]
    assert b"{" not in tokenizer.decode(np.concatenate(ids))
    for bad in ('{"body": "b"}', '{"text": 5}', "[1]", "{", "\xff"):
        file.write_bytes(b'{"text": "a"}\n' + bad.encode("latin-1"))
        with pytest.raises(UserError, match=r"a\.jsonl, line 2: .*'text'"):
            read_texts(file)


def test_names_that_are_not_utf8(tmp_path, cache):
    """Catches a stack trace for a file whose name is in an older encoding."""
    file = tmp_path / os.fsdecode(b"caf\xe9.txt")
    file.write_text("as it is " * 20)
    folder, _ = prepare(str(file), cache=cache)
    assert prepare(str(file), cache=cache)[0] == folder == data.prepare(str(file), "bytes", 0, cache)


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


def test_command(tmp_path, monkeypatch, capsys, run):
    """Catches a corpus that is not shown as it is."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("abab" * 100)
    run("text.txt")
    out = capsys.readouterr().out
    assert "400 bytes, sha256" in out and "'abababab" in out
    assert "train: 361 tokens, unigram entropy 0.71" in out  # log 2, and one end of text
