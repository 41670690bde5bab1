"""How both decoders choose a token, and the loop that decodes one text."""

import pytest
import torch
from lab_helpers import small_model

from lab.engine.choosing import choose_finite, uniform
from lab.engine.simple import generate
from sample import stream


def test_seeds_and_independence():
    """Catches prompts that share random numbers, and a seed that does not repeat."""
    model, prompts = small_model(), [[1, 2], torch.tensor([5, 6, 7])]
    a, b = generate(model, prompts, 12, seed=5), generate(model, prompts, 12, seed=5)
    assert a == b
    assert generate(model, prompts[1:], 12, seed=6) == a[1:]
    assert generate(model, prompts, 12, seed=7) != a


def test_longer_than_the_window():
    """Catches another context than the last half of the window, and beginnings that do not stay."""
    model, greedy = small_model(block_size=8), dict(temperature=0)
    for begin in ([], [30, 29]):
        read = []
        (long,) = generate(model, [[*range(20)]], 3, begin=begin, read=[read], **greedy)
        (short,) = generate(model, [[*begin, 16, 17, 18, 19]], 3, **greedy)
        assert (long.tokens, long.steps) == (short.tokens, short.steps)
        assert len(read) == len(begin) + 4 + 2


def test_the_loop_of_the_root():
    """Catches a loop that reads or chooses otherwise than the root's, also when the window slides."""
    model = small_model(seed=3, block_size=8)
    expected = [*stream(model, [1, 2, 3], 20, temperature=0, tau=0.3)]
    (found,) = generate(model, [[1, 2, 3]], 20, temperature=0, tau=0.3)
    assert [*zip(found.tokens, found.steps, strict=True)] == expected


def test_choices():
    """Catches top-k or top-p that keeps one too many or few, and an unused temperature."""
    logits, u = torch.tensor([0.1, 0.4, 0.2, 0.3]).log(), uniform(0, 0, 1000)
    for kept, args in (
        *(({1}, (0, None, None)), ({0, 1, 2, 3}, (1, None, None)), ({1, 3}, (1, 2, None))),
        *(({1}, (1, None, 0.39)), ({1, 3}, (1, None, 0.41)), ({1, 2, 3}, (1, 3, 0.99))),
        ({0, 1, 2, 3}, (1, 9, None)),
    ):
        assert set(choose_finite(logits.expand(1000, 4), u, *args).tolist()) == kept
    assert choose_finite(torch.tensor([-torch.inf, 1.0, 1.0]), torch.tensor(0.0)) == 1  # never 0


@pytest.mark.parametrize("args", [(1.0,), (0.5,), (1.0, 3), (1.0, None, 0.65)])
def test_frequencies(args):
    """Catches tokens chosen more or less often than their probability, and rows mixed up."""
    rows, u = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.0, 0.2, 0.1]]), uniform(1, 0, 20_000)
    for row in rows:
        p = row ** (1 / args[0])
        if len(args) == 2:
            p[row.argsort()[: 4 - args[1]]] = 0
        if len(args) == 3:
            p = torch.where(row >= 0.3, p, 0)
        counts = choose_finite(row.log().expand(20_000, 4), u, *args).bincount(minlength=4)
        assert ((counts / 20_000 - p / p.sum()).abs() < 0.015).all()
    two = choose_finite(rows.log(), u[:2], *args).tolist()
    assert two == [int(choose_finite(row.log(), u[i], *args)) for i, row in enumerate(rows)]
