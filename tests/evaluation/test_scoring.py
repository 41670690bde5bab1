"""Losses of texts: against the simple decoder, and whatever is scored beside them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lab_helpers import decode, method_model

from lab.evaluation.scoring import cut, score
from lab.methods import all_methods

METHODS = [kind.method for kind in all_methods() if not kind.method.startswith("ablation")]


def ids(n, seed=0):
    return torch.randint(31, (n,), generator=torch.Generator().manual_seed(seed)).numpy()


@pytest.mark.parametrize("T", [8, 7, 1])
def test_cut(T):
    """Catches a token that is predicted twice or never, or from less than half a window."""
    texts = [100 * n + np.arange(n) for n in (0, 1, 2, 5, 9, 10, 16, 17, 40)]
    places, predicted = cut(texts, T), []
    for text, start, end, first in places:
        assert end - start <= T + 1
        predicted.append(texts[text][first:end])
        assert first > start and all(place - start >= min(place, T // 2 + 1) for place in range(first, end))
    assert np.array_equal(np.concatenate(predicted), np.concatenate([ids[1:] for ids in texts]))
    assert (places[:, 2] - places[:, 3]).tolist() == [*map(len, predicted)]
    for n in (2, len(places) * 6 // 10, len(places), 10**6):  # spread over all
        at = [places.tolist().index(place) for place in cut(texts, T, n).tolist()]
        assert len({*at}) == min(n, len(places)) and (at[0], at[-1]) == (0, len(places) - 1)
        assert max(np.diff(at)) - min(np.diff(at)) <= 1


@pytest.mark.parametrize("tau", [0, 0.3])
@pytest.mark.parametrize("method", METHODS)
def test_against_the_simple_decoder(method, tau):
    """Catches scores that decoding does not give: losses to 1e-4, steps exactly."""
    model, text = method_model(method), ids(20)
    scores = score(model, [text], cut([text], 32), tau)
    for found, its_tau in ((scores.soft, 0), (scores.hard, tau)):
        logits, steps, _ = decode(model, text[:-1], its_tau)
        losses = F.cross_entropy(logits, torch.tensor(text[1:]), reduction="none")
        torch.testing.assert_close(found, losses, atol=1e-4, rtol=0)
    assert scores.steps.tolist() == steps
    assert scores.soft.std() > 0.1  # states of zeros would score log V everywhere


@pytest.mark.parametrize("method", METHODS)
def test_batches_and_order_do_not_matter(method):
    """Catches padding that is seen, a tolerance that is shared, and scores in the wrong place."""
    model = method_model(method)
    texts = [ids(n, n) for n in (12, 5, 33, 7, 20, 90)]
    places = cut(texts, 32)
    alone = [score(model, texts, places[[i]], 0.3) for i in range(len(places))]
    for batch_tokens, order in ((50, [*range(len(places))]), (10_000, [*range(len(places))][::-1])):
        together = score(model, texts, places[order], 0.3, batch_tokens)
        for name in ("soft", "hard", "steps"):
            expected = torch.cat([getattr(alone[i], name) for i in order])
            torch.testing.assert_close(getattr(together, name), expected, atol=1e-9, rtol=0)
