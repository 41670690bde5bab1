"""The pictures of the passes and of the masks are of what the models do."""

import pytest
from lab_helpers import small_model

import lab.methods.grid
import model as model_script
from docs.pictures import visible
from lab.memory import slots_of_passes
from model import PonderLM


@pytest.mark.parametrize("K, R", [(2, 2), (3, 0), (1, 1)])
def test_passes(K, R, monkeypatch):
    """Catches a picture of other passes than those of the Jacobi iteration."""
    ran = []
    jacobi_pass = PonderLM.jacobi_pass

    def counted(self, e, latents, *how):
        ran.append(latents.size(2) + 1)
        return jacobi_pass(self, e, latents, *how)

    monkeypatch.setattr(PonderLM, "jacobi_pass", counted)
    model = small_model(ponder_steps=K, router_offset=(0.0,) * (K + 1))
    model.jacobi(model.lm_head.weight.new_zeros(1, 8).long(), R)
    assert ran == slots_of_passes(K, R)


@pytest.mark.parametrize("method, place", [("ponderlm3", model_script), ("grid", lab.methods.grid)])
def test_masks(method, place, monkeypatch):
    """Catches a picture in which a slot sees other slots than it does when decoding takes all steps."""
    seen = []
    attend = place.attend_to_cache

    def counted(q, k, v, d):
        seen.append(k.size(2))
        return attend(q, k, v, d)

    monkeypatch.setattr(place, "attend_to_cache", counted)
    model = small_model(method=method, num_hidden_layers=1)
    cache = model.new_cache()
    for position in range(4):
        model.ponder_token(1, position, cache, tau=0)
    K = model.config.ponder_steps
    assert seen == visible(4, K, on_grid=method == "grid").sum(1).tolist()
