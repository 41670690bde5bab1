"""JSON that is checked, files that are whole or not there, and bars."""

import pytest
from lab_helpers import full_disk

from data import UserError, command_line, read_json, write_json
from lab.common import progress


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff", b"[" * 3000, b'{"a":' * 3000, b'{"a": ' + b"9" * 5000 + b"}"],
)
def test_not_json(tmp_path, content):
    """Catches a stack trace for a damaged file, too deep ones included."""
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.json cannot be read"):
        read_json(tmp_path / "x.json")


def test_full_disk(tmp_path):
    """Catches a full disk without a word of the file, a file that is cut, and one that is left."""
    file = tmp_path / "x.json"
    file.write_text("old")
    with full_disk(100), pytest.raises(SystemExit, match=r"x\.json.*File too large"):
        command_line(lambda: write_json(file, {"new": "new" * 100}))
    assert [f.read_text() for f in tmp_path.iterdir()] == ["old"]


def test_progress(capsys, monkeypatch):
    """Catches bars in a file, and none in a terminal."""
    assert list(progress(range(3))) == [0, 1, 2] and not capsys.readouterr().err
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(progress(range(3))) == [0, 1, 2] and "3/3" in capsys.readouterr().err
