"""Errors in one line, files that are whole or not there."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, full_disk

from runtime import UserError, command_line, pick_threads, progress, read_json, write_text, writing


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff", b"[" * 3000, b'{"a":' * 3000, b'{"a": ' + b"9" * 5000 + b"}"],
)
def test_not_json(tmp_path, content):
    """Catches a stack trace for a damaged file, too deep ones included."""
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.json is not a JSON object"):
        read_json(tmp_path / "x.json")


def test_not_a_file(tmp_path):
    """Catches a folder or a device that is read for ever."""
    (tmp_path / "link.json").symlink_to("/dev/zero")
    for file in (tmp_path, tmp_path / "link.json", tmp_path / "none.json"):
        with pytest.raises(SystemExit, match="no such file"):
            command_line(lambda file=file: read_json(file))


def test_full_disk(tmp_path):
    """Catches a full disk without a word of the file, a file that is cut, and one that is left."""
    file = tmp_path / "x.json"
    write_text(file, "old")
    message = r"x\.json: File too large \([\d,]+ MiB free\)"
    with full_disk(100), pytest.raises(SystemExit, match=message):
        command_line(lambda: write_text(file, "new" * 100))
    assert [f.read_text() for f in tmp_path.iterdir()] == ["old"]


def test_what_ends_in_one_line(tmp_path):
    """Catches a bug whose stack trace is lost, and too little memory with one."""

    def fail(error):
        with (
            writing(tmp_path / "file")
            if isinstance(error, OSError)
            else pytest.MonkeyPatch.context()
        ):
            raise error

    for error in (ValueError("x"), RuntimeError("x"), KeyError("x"), ZeroDivisionError("x")):
        with pytest.raises(type(error)):
            command_line(lambda error=error: fail(error))
    for make in (lambda: torch.empty(2**20, 2**20, 2**5), lambda: fail(MemoryError())):
        with pytest.raises(SystemExit, match="there is not enough memory"):
            command_line(make)
    with pytest.raises(SystemExit, match=r"file: No space left"):
        command_line(lambda: fail(OSError(28, "No space left on device")))


def test_progress(capsys, monkeypatch):
    """Catches bars in a file, and none in a terminal."""
    assert list(progress(range(3))) == [0, 1, 2] and not capsys.readouterr().err
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(progress(range(3))) == [0, 1, 2] and "3/3" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["attention", "router"])
def test_help(script):
    """Catches a script that runs when it is asked what it does."""
    command = [sys.executable, ROOT / f"{script}.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0 and "usage:" in done.stdout and "0.1 " not in done.stdout


def test_threads(capsys, monkeypatch):
    """Catches a number of threads that is not the one asked for, or measured where it was."""
    before = torch.get_num_threads()
    try:
        assert pick_threads(1, torch.device("cpu")) == torch.get_num_threads() == 1
        assert pick_threads(None, torch.device("cpu")) == 1 and not capsys.readouterr().out
        torch.set_num_threads(2)
        clock = iter(range(10**6))
        monkeypatch.setattr(
            "time.perf_counter", lambda: next(clock) * 0.06 * torch.get_num_threads()
        )
        assert pick_threads(None, torch.device("cpu")) == torch.get_num_threads() == 1
        assert "by one thread" in capsys.readouterr().out
    finally:
        torch.set_num_threads(before)
