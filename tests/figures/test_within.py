"""What the state after each layer of a model would predict."""

import pandas as pd
import pytest
import torch
from lab_helpers import small_model

from common import UserError
from lab.figures.within import Within, layer_rows


@pytest.mark.parametrize("method", ["ponderlm3", "grid", "grid-fixed"])
def test_rows(method, subject):
    """Catches states of a later pass or slot, a state without the final norm, and layers in another order."""
    one = subject(small_model(method=method))
    model, x, y = one.model, one.windows[:, :-1], one.windows[:, 1:]
    rows = layer_rows(one)
    assert rows.layer.tolist() == [0, 1, 2]
    with torch.no_grad():
        positions = torch.arange(x.size(1))
        state = e = model.embed(x)
        cos_and_sin = model.model.rope_cos_sin(positions, e.dtype)
        for row, layer in zip(rows.itertuples(), [None, *model.model.layers], strict=True):
            if layer is not None:
                state = layer(state, cos_and_sin, None, model.backend, None)
            loss = model.cross_entropy(model.model.norm(state), y).mean().item()
            assert row.loss == pytest.approx(loss, rel=1e-6)
            assert row.size == pytest.approx(state.square().mean(-1).sqrt().mean().item(), rel=1e-6)
    table = model.model.embed_tokens.weight
    assert rows.weights[0] == pytest.approx(table.square().mean().sqrt().item(), rel=1e-6)


def test_methods_without_a_pass_of_slot_0(make_run, tmp_path):
    """Catches a traceback, or the loss of a state that such a model never predicts from."""
    for method in ("pause", "mor-token"):
        with pytest.raises(UserError, match=f"{method}, whose first pass does not run slot 0 alone"):
            Within((make_run(method, 1.0, 1, method=method),), out=tmp_path / "out").draw()


def test_command(trained, tmp_path):
    """Catches a run of a method whose layers are not found."""
    runs, text = (str(trained / "ponder"), str(trained / "plain")), str(trained.parent / "text.txt")
    Within(runs, data=text, windows=8, out=tmp_path).draw()
    rows = pd.read_csv(tmp_path / "within.csv")
    assert len(rows) == 4 and rows.machine.notna().all()
