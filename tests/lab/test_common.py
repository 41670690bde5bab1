"""Errors in one line, JSON that is checked, files that are whole or not there."""

import pydantic
import pytest
import torch
from conftest import full_disk

import model
from lab.common import command_line, progress, read_json, strict_dataclass, write_bytes, writing
from model import UserError


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff", b"[" * 3000, b'{"a":' * 3000, b'{"a": ' + b"9" * 5000 + b"}"],
)
def test_not_json(tmp_path, content):
    """Catches a stack trace for a damaged file, too deep ones included."""
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.json .*; write it again"):
        read_json(tmp_path / "x.json", way_out="; write it again")


def test_another_kind(tmp_path):
    """Catches a field of another type."""
    (tmp_path / "x.json").write_text('{"a": "b"}')
    with pytest.raises(UserError, match=r"x\.json is damaged: a = 'b'"):
        read_json(tmp_path / "x.json", dict[str, int])


def test_full_disk(tmp_path):
    """Catches a full disk without a word of the file, a file that is cut, and one that is left."""
    file = tmp_path / "x.json"
    write_bytes(file, b"old")
    with full_disk(100), pytest.raises(SystemExit, match=r"x\.json .*File too large; [\d,]+ MiB are free"):
        command_line(lambda: write_bytes(file, b"new" * 100))
    assert [f.read_text() for f in tmp_path.iterdir()] == ["old"]


@strict_dataclass
class Settings:
    number: int = 1


def test_what_ends_in_one_line(tmp_path):
    """Catches a bug whose stack trace is lost, and what a user can mend with one."""

    def fail(error):
        raise error

    for error in (ValueError("x"), RuntimeError("x"), KeyError("x"), ZeroDivisionError("x")):
        with pytest.raises(type(error)):
            command_line(lambda error=error: fail(error))
    with pytest.raises(SystemExit, match=r"^error: number = 'x': it should be a valid integer"):
        command_line(lambda: Settings(number="x"))
    with pytest.raises(pydantic.ValidationError):
        model.command_line(lambda: Settings(number="x"))  # which knows no pydantic
    with pytest.raises(SystemExit, match=r"^error: .*memory"):
        command_line(lambda: torch.empty(2**20, 2**20, 2**5))

    def write():
        with writing(tmp_path / "file"):
            raise OSError(28, "No space left on device")

    with pytest.raises(SystemExit, match=r"file: No space left on device \([\d,]+ MiB free\)"):
        command_line(write)


def test_progress(capsys, monkeypatch):
    """Catches bars in a file, and none in a terminal."""
    assert list(progress(range(3))) == [0, 1, 2] and not capsys.readouterr().err
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(progress(range(3))) == [0, 1, 2] and "3/3" in capsys.readouterr().err
