"""Prose and puzzles by one model."""

import random

import pytest
import torch
from lab_helpers import small_model

from lab.corpora import lookup
from lab.figures.mixed import kind_rows


@torch.no_grad()
def test_kinds(subject):
    """Catches tokens of the other kind, questions of other lookups, and losses or steps of another tau."""
    tokens, rng = lookup.tokenizer(), random.Random(0)
    rows = [[*tokens.encode(lookup.line(rng)), tokens.end_of_text, 9] for _ in range(8)]
    rows += [[rng.randrange(256) for _ in range(65)] for _ in range(3)]
    rng.shuffle(rows)
    model = small_model(method="grid", vocab_size=tokens.vocab_size, block_size=64, seed=3)
    one = subject(model)
    one.tokenizer, one.windows = tokens, torch.tensor(rows)
    found = {row.kind: row for row in kind_rows(one).itertuples()}
    x, y = one.windows[:, :-1], one.windows[:, 1:]
    stopped, whole = model(x, y, tau=one.tau), model(x, y, tau=0.0)
    right = stopped.logits.argmax(-1) == y
    puzzle = torch.tensor([row[0] >= 256 for row in rows])
    for kind, chosen in (("prose", ~puzzle), ("puzzles", puzzle)):
        assert found[kind].tokens == chosen.sum() * 64
        assert found[kind].loss == pytest.approx(stopped.ce[chosen].mean().item(), abs=1e-3)
        assert found[kind].all_steps == pytest.approx(whole.ce[chosen].mean().item(), abs=1e-3)
        assert found[kind].steps == pytest.approx(stopped.steps[chosen].double().mean().item(), abs=1e-3)
    for n in range(1, 7):
        at = [b for b in range(len(rows)) if puzzle[b] and rows[b][13] == tokens.encode(f" {n}")[0]]
        assert found[str(n)].tokens == len(at)
        if at:
            assert found[str(n)].steps == pytest.approx(stopped.steps[at, 14].double().mean().item())
            assert found[str(n)].right == pytest.approx(right[at, 14].double().mean().item())
