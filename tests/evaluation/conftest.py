"""What the tests of evaluation share: models of every method, and the simple decoder's losses."""

from itertools import pairwise

import pytest
from conftest import small_model


@pytest.fixture(scope="session")
def method_model():
    """A small float64 model, of which a router is decided, so that tokens stop at all depths."""

    def make(method, **kwargs):
        scale = {"router_scale": 12.0} if method == "ponderlm3" else {}
        return small_model(seed=2, method=method, **scale, **kwargs)

    return make


@pytest.fixture(scope="session")
def decoder_losses():
    """The losses of a text's tokens, and the steps before each, by the simple decoder."""

    def losses_and_steps(model, text, tau):
        cache, losses, steps = model.new_cache(), [], []
        for t, (token, following) in enumerate(pairwise(text)):
            logits, k = model.ponder_token(token, t, cache, tau)
            losses.append(-logits.log_softmax(-1)[following].item())
            steps.append(k)
        return losses, steps

    return losses_and_steps
