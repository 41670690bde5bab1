"""Prose and puzzles in one corpus."""

import numpy as np
import pytest
import torch

from data import UserError
from lab.corpora import mixed
from lab.corpora.lookup import LINE, lookups_asked, tokenizer
from lab.corpora.preparation import open_corpus
from lab.figures.mixed import is_line

PROSE = [(f"file{i}", f"Return the first {i} of them, or the last one. ".encode() * 9) for i in range(150)]


@pytest.fixture(autouse=True)
def docstrings(monkeypatch):
    monkeypatch.setattr(mixed, "pydocs", lambda: list(PROSE))


def test_two_kinds_of_windows(tmp_path):
    """Catches windows cut elsewhere, kinds not as many or not shuffled, questions of other lookups."""
    mixed.prepare_mixed(tmp_path / "mixed", lines=400, lookups=(1, 3))
    corpus, tokens = open_corpus(str(tmp_path / "mixed")), tokenizer()
    for ids, n in ((corpus.train, 380), (corpus.val, 20)):
        rows = torch.from_numpy(np.array(ids, dtype=np.int64)).view(2 * n, LINE)
        puzzle = is_line(rows, tokens)
        assert puzzle.sum() == n and 0 < puzzle[:n].sum() < n
        assert (rows[:, -1] == tokens.end_of_text).all()
        asked = lookups_asked(rows[puzzle], tokens)
        assert {*asked.flatten().tolist()} == {-1, 0, 1, 3}
        text = b"".join(tokens.decode(row[:-1]) for row in rows[~puzzle].tolist())
        assert b"Return the first" in text
    assert corpus.source.endswith("400 lines of the lookup task and as many windows of docstrings, seed 0, "
                                  "lookups 1 3")  # fmt: skip


def test_refused(tmp_path):
    """Catches a folder of other settings that is taken, one that is made again, and too little prose."""
    mixed.prepare_mixed(tmp_path / "mixed", lines=100)
    before = (tmp_path / "mixed/train.bin").stat().st_mtime_ns
    mixed.prepare_mixed(tmp_path / "mixed", lines=100)
    assert (tmp_path / "mixed/train.bin").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="holds something else"):
        mixed.prepare_mixed(tmp_path / "mixed", lines=100, seed=1)
    for wrong in (dict(lines=99), dict(seed=-1), dict(lookups=(0, 7))):
        with pytest.raises((UserError, ValueError), match=next(iter(wrong))):
            mixed.prepare_mixed(tmp_path / "wrong", **dict(lines=100) | wrong)
    with pytest.raises(UserError, match="give fewer --lines"):
        mixed.prepare_mixed(tmp_path / "more", lines=10**6)
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="mine holds something else"):
        mixed.prepare_mixed(tmp_path / "mine", lines=100)
    assert {x.name for x in tmp_path.iterdir()} == {"mixed", "mine"}  # nothing half written
