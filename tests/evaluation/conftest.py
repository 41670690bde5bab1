"""What the tests of evaluation share: models of every method."""

import pytest
from lab_helpers import small_model


@pytest.fixture(scope="session")
def method_model():
    """A small float64 model, of which a router is decided, so that tokens stop at all depths."""

    def make(method, **kwargs):
        scale = {"router_scale": 12.0} if method == "ponderlm3" else {}
        return small_model(seed=2, method=method, **scale, **kwargs)

    return make
