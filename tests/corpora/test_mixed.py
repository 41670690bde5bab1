"""Prose and puzzles in one corpus."""

import re

import numpy as np
import pytest
import torch

from common import UserError
from lab.corpora import lookup
from lab.corpora.lookup import LINE, lookups_asked, prepare_lookup, tokenizer
from lab.corpora.preparation import open_corpus
from lab.figures.mixed import is_line

PROSE = [(f"file{i}", f"Return the first {i} of them, or the last one. ".encode() * 9) for i in range(150)]


@pytest.fixture(autouse=True)
def docstrings(monkeypatch):
    monkeypatch.setattr(lookup, "pydocs", lambda: list(PROSE))


def test_two_kinds_of_windows(tmp_path):
    """Catches windows cut elsewhere, kinds not as many or not shuffled, questions of other lookups."""
    prepare_lookup(tmp_path / "mixed", lines=400, lookups=(1, 3), prose=True)
    corpus, tokens = open_corpus(str(tmp_path / "mixed")), tokenizer()
    for ids, n in ((corpus.train, 380), (corpus.val, 20)):
        rows = torch.from_numpy(np.array(ids, dtype=np.int64)).view(2 * n, LINE)
        puzzle = is_line(rows, tokens)
        assert puzzle.sum() == n and 0 < puzzle[:n].sum() < n
        assert (rows[:, -1] == tokens.end_of_text).all()
        asked = lookups_asked(rows[puzzle], tokens)
        assert {*asked.flatten().tolist()} == {-1, 0, 1, 3}
        text = b"".join(tokens.decode(row[:-1]) for row in rows[~puzzle].tolist())
        assert max(map(int, re.findall(rb"Return the first (\d+) of", text))) > 120  # in random order


def test_refused(tmp_path):
    """Catches a folder of something else that is taken or lost, and too little prose."""
    prepare_lookup(tmp_path / "mixed", lines=100, prose=True)
    (tmp_path / "mine").mkdir()
    for folder, changes, words in (
        ("mixed", dict(seed=1), "mixed"),
        ("mixed", dict(prose=False), "mixed"),
        ("mine", {}, "mine"),
        ("wrong", dict(lookups=(0, 7)), "lookups"),
        ("more", dict(lines=10**6), "--lines"),
    ):
        with pytest.raises(UserError, match=words):
            prepare_lookup(tmp_path / folder, **dict(lines=100, prose=True) | changes)
    assert {x.name for x in tmp_path.iterdir()} == {"mixed", "mine"}  # nothing half written
