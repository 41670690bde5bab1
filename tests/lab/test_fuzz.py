"""Damaged files: that the hunt finds what it hunts, and a small hunt."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from lab import fuzz
from model import UserError


def fails():
    raise KeyError("a bug")


def says():
    raise UserError("the file is odd; give another")


def hangs():
    time.sleep(30)


def crashes():
    os.kill(os.getpid(), signal.SIGKILL)


def eats():
    assert len(bytearray(b"x") * (400 * 2**20))


def escapes():
    Path("../../out.txt").write_text("x")


@pytest.mark.parametrize(
    "command, found",
    [
        (fails, "KeyError"),
        (says, "sentence"),
        (lambda: None, "result"),
        (hangs, "more than 1 s"),
        (crashes, "ended by signal 9"),
        (eats, "MB of memory"),
        (escapes, "wrote "),
        (lambda: exit(), "exit None"),
    ],
)
def test_what_is_found(command, found, tmp_path, monkeypatch):
    """Catches a traceback, a hang, a crash, memory or a file elsewhere that passes for a result."""
    monkeypatch.setattr(fuzz, "SECONDS", 1 if command is hangs else 30)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    assert found in fuzz.attempt("file", command, b"y", tmp_path)


def test_damage():
    """Catches damage that leaves files as they are, or is another one for the same seed."""
    content = json.dumps({"a": [1, 2, {"b": None}], "c": "d"}).encode()
    forms = [fuzz.damage(content, random.Random(i)) for i in range(300)]
    assert forms == [fuzz.damage(content, random.Random(i)) for i in range(300)]
    assert len({*forms}) > 150 and sum(form == content for form in forms) < 20


@pytest.mark.slow
def test_every_file_is_read(tmp_path, monkeypatch):
    """Catches a file that none of its commands reads, whose damage nobody would notice."""
    monkeypatch.chdir(tmp_path)
    fuzz.make_run()
    for name, commands in fuzz.FILES.items():
        if name.endswith(("json", "safetensors", "pt", "bin")):
            found = {fuzz.attempt(name, command, b"{", tmp_path) for command in commands}
            assert found == {"sentence"}, name


@pytest.mark.slow
def test_a_small_hunt(tmp_path, monkeypatch, capsys):
    """Catches a file that the commands do not read, undamaged, and one of few forms that stops one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        fuzz.main(forms=2, out=tmp_path / "found")
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert all(name in said for name in fuzz.FILES) and not (tmp_path / "found").exists()
    monkeypatch.setitem(
        fuzz.FILES, "bins/meta.json", (lambda: json.loads(Path("bins/meta.json").read_text()),)
    )
    with pytest.raises(SystemExit) as ended:
        fuzz.main(forms=20, files=("bins/meta.json",), out=tmp_path / "found")
    assert ended.value.code == 1 and any((tmp_path / "found").iterdir())
