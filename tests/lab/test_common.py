"""What the rooms of the lab share: models by name, and bars."""

from pathlib import Path

import pytest

from data import UserError
from lab.common import locate


def test_hub(tmp_path, monkeypatch):
    """Catches a name of the Hub that is not looked up, a path that is, and code that is fetched."""
    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, allow_patterns))
        if name == "someone/private":
            raise ConnectionError("401")
        return str(tmp_path / "fetched")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert locate("someone/a-model") == tmp_path / "fetched"
    assert asked == [("someone/a-model", ["*.json", "*.safetensors"])]
    with pytest.raises(UserError, match="someone/private"):
        locate("someone/private")
    (tmp_path / "out").mkdir()
    for path in ("out/typo", "typo", "a/b/c", "/no/where"):
        with pytest.raises(UserError, match=path):
            locate(path)
    assert locate("out") == Path("out") and len(asked) == 2
