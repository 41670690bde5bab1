"""The grid: what a slot sees, against one sequence of all slots with a mask written out."""

import math

import pytest
import torch
from lab_helpers import small_model, tokens

from router import stop_step


def masked(S):
    """attention.eager for all slots of all tokens, of which slot k sees slots up to k."""

    def attend(q, k, v, log_w):
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        scores = q @ k.mT / math.sqrt(q.size(-1))  # (B, H, T*S, T*S)
        if log_w is not None:
            scores = scores + log_w[:, None, None]
        slot, N = torch.arange(q.size(2), device=q.device) % S, q.size(2)
        seen = slot.new_ones(N, N).bool().tril() & (slot <= slot[:, None])
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v

    return attend


def obvious(model, idx, tau=None):
    """States by passes over all slots at once, as many as there are slots: then they are exact."""
    S = model.config.ponder_steps + 1
    e, backend = model.embed(idx), model.backend
    latents, key_log_w, model.backend = e.new_zeros(*idx.shape, S - 1, e.size(-1)), None, masked(S)
    for _ in range(S + 1):  # one more: the scores of the first pass have no log w
        x = torch.cat([e[:, :, None], latents], dim=2).flatten(1, 2)
        positions = torch.arange(idx.size(1)).repeat_interleave(S)
        bias = None if key_log_w is None else key_log_w.flatten(1)
        h = model.model(x, positions, bias, model.backend).view(*idx.shape, S, -1)
        s, log_w = model.route(h)
        latents, key_log_w = h[:, :, :-1], model.mask_keys(log_w, tau)
    model.backend = backend
    return h, s, log_w


@pytest.mark.parametrize("form", ["fused", "definition", "recompute"])
@pytest.mark.parametrize("tau", [None, 0.1])
@pytest.mark.parametrize("method,K", [("grid", 1), ("grid", 3), ("grid-fixed", 3)])
def test_states_and_gradients(method, K, tau, form, monkeypatch):
    """Catches a deeper key that is seen, log w of another slot, a wrong order of the keys, and a pass that
    is computed again with the keys of a later one. To 1e-10 in float64."""
    model = small_model(seed=2, method=method, ponder_steps=K, router_scale=12.0)
    monkeypatch.setattr("lab.kernels.EAGER_MAX_SLOTS", 256 if form == "definition" else 0)
    idx, found = tokens(T=9, B=2), []
    for states in (model.states, lambda idx, tau: obvious(model, idx, tau)):
        model.recompute = form == "recompute"
        h, s, log_w = states(idx, tau=tau)
        out = model.integrate(h, s, stop_step(log_w, tau))
        loss = (out * torch.linspace(0, 1, out.numel()).view_as(out)).sum()
        found.append([h, s, log_w, *torch.autograd.grad(loss, list(model.model.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
