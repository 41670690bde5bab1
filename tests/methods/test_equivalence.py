"""The lab's methods: all tokens at once, one after another and from a cache are the same function; and
PonderLM-2 and its loop against numbers of the official code (tests/golden).

Of PonderLM-3 on the root's own backbone: root/test_model.py and root/test_golden.py.
"""

import math
from itertools import pairwise

import pytest
import torch
from lab_helpers import decode, small_model, tokens

from attention import eager
from lab.engine.batching import Engine
from lab.engine.simple import generate


@torch.no_grad()
def sequential(model, idx, tau=None):
    """Section 3.3 without a cache: for every slot the whole prefix anew. (T,) -> logits, steps.

    tau None runs all K steps with soft masks.
    """
    inputs, positions, bias, logits, steps, log_w = [], [], [], [], [], None
    printed = model.config.method == "ablation-index"
    for t, token in enumerate(idx):
        e = model.embed(token[None, None])[0, 0]
        x, h_hat, k, stop = e, 0, 0, 0
        while k <= stop:
            inputs.append(x)
            positions.append(t)
            bias.append(0.0 if k == 0 else float(log_w[k - 1 if printed else k]))
            rows = torch.stack(inputs)[None], torch.tensor(positions)
            h = model.model(*rows, torch.tensor([bias], dtype=x.dtype), eager)[0, -1]
            if k == 0:
                s, log_w = model.route(h[None])
                w = log_w.exp()
                stop = max(j for j in range(len(w)) if not tau or w[j] >= tau)
            h_hat = h_hat + s[k] * h
            x, k = (e + model.feedback.weight * h if model.config.reread else h), k + 1
        logits.append(model.lm_head(h_hat))
        steps.append(stop)
    return torch.stack(logits), steps


@pytest.mark.parametrize("method", ["ponderlm3", "ponderlm2", "ablation-index"])
@pytest.mark.parametrize("K", [0, 1, 3])
def test_jacobi_equals_sequential(method, K):
    """Catches a wrong slot order, position, mask or router timing: after R = K(T-1) refinements the
    parallel form is the sequential one, to 1e-9 in float64; and more passes come closer."""
    model = small_model(method=method, ponder_steps=K)
    idx = tokens()
    expected, _ = sequential(model, idx[0])
    with torch.no_grad():
        errors = [(model(idx, R=R).logits[0] - expected).abs().max() for R in (0, 2, 4, 8, K * 9)]
    assert errors[-1] < 1e-9
    if K:
        assert errors[0] > 1e-6  # otherwise the test could not tell
        assert all(a > 2 * b for a, b in pairwise(errors) if a > 1e-10)


@pytest.mark.parametrize("tau", [0, 1e-4, 0.3])
@pytest.mark.parametrize(
    "method,K,reread",
    [("ponderlm3", 3, False), ("ponderlm3", 3, True), ("ponderlm2", 2, False), ("vanilla", 0, False)],
)
def test_hard_stopping_parallel_sequential_and_cached_agree(tau, method, K, reread):
    """Catches a key that hard stopping should hide, an integration that runs on, a cache that
    keeps or drops a slot: logits to 1e-9 and the same steps in all three forms."""
    model = small_model(method=method, ponder_steps=K, router_scale=12.0, reread=reread)
    idx = tokens(T=12)
    expected, steps = sequential(model, idx[0], tau)
    with torch.no_grad():
        out = model(idx, tau=tau, R=K * 11)
    logits, cached_steps, cache = decode(model, idx[0], tau)
    assert (out.logits[0] - expected).abs().max() < 1e-9
    assert (logits - expected).abs().max() < 1e-9
    assert out.steps[0].tolist() == cached_steps == steps
    assert cache[0].keys.size(2) == len(steps) + sum(steps)  # executed slots only
    if method == "ponderlm3" and tau == 0.3:
        assert 0 in steps and 3 in steps and len(set(steps)) > 2


@pytest.mark.parametrize("tau", [0, 0.3])
@pytest.mark.parametrize("ablation", ["mask", "integration", "router"])
def test_ablations(ablation, tau):
    """Catches an ablation that leaves in what it should take out, or that decodes (simply, and by
    the engine) otherwise than it scores: logits to 1e-9."""
    scale = 0 if ablation == "router" else 12.0
    model, idx = small_model(method=f"ablation-{ablation}", router_scale=scale), tokens(T=12)
    with torch.no_grad():
        out = model(idx, tau=tau, R=33)
    assert (decode(model, idx[0], tau)[0] - out.logits[0]).abs().max() < 1e-9
    expected = generate(model, [idx[0]], 8, tau=tau, temperature=0)
    engine = Engine(model, tau=tau, tolerance=0)
    assert engine.generate([idx[0]], 8, temperature=0) == expected

    h, s, log_w = model.states(idx, R=33, tau=tau)
    bias = model.mask_keys(log_w)
    assert (bias.abs().max() == 0) == (ablation == "mask")
    h_hat = model.integrate(h, s, out.steps)
    last = h.gather(2, out.steps[..., None, None].expand(-1, -1, 1, h.size(-1)))[:, :, 0]
    assert ((h_hat - last).abs().max() < 1e-12) == (ablation == "integration")
    assert ((s - 0.25).abs().max() < 1e-6) == (ablation == "router")
    model.train().objective(idx, idx, 1)[0].backward()
    assert (model.router.proj.weight.grad is None) == (ablation == "router")


@pytest.mark.parametrize("printed,low,high", [(False, 0, 1e-7), (True, 1e-3, math.inf)])
def test_mask_index(printed, low, high):
    """Reading note 1, with a router that is always sure: masking slot k by w_k, the soft model and
    the hard-stopped one agree to 1e-7. By the printed index, w_(k-1), the slot after the last
    executed one stays visible, and the logits move by more than 1e-3."""
    model = small_model(method="ablation-index" if printed else "ponderlm3", router_scale=2000.0)
    idx = tokens(T=12)
    with torch.no_grad():
        soft, hard = model(idx, R=33), model(idx, R=33, tau=1e-4)
    w = soft.log_w.exp()
    assert (w < 1e-9).any() and ((w < 1e-9) | (w > 0.9)).all()
    assert low <= (soft.logits - hard.logits).abs().max() < high


def test_fixed_depth():
    """Catches a one-hot s at the wrong end, and keys with a weight."""
    model = small_model(method="ponderlm2")
    s, log_w = model.route(torch.randn(2, 3, 1, 32))
    assert (s == torch.tensor([0, 0, 0, 1])).all() and not log_w.any()
    assert model.mask_keys(log_w, 0.3) is None


@pytest.mark.parametrize("name,method", [("fwd_K2_J1", "ponderlm2"), ("loop_K2", "looped")])
def test_golden(golden, name, method):
    """Catches another slot's logits, targets shifted by one, a loop with a norm in between, or one
    too many."""
    model, expected, config = golden(f"{name}.safetensors", method)
    idx = expected["input_ids"]
    targets = torch.full_like(idx, -100)
    targets[:, :-1] = idx[:, 1:]
    with torch.no_grad():
        out = model(idx, targets, R=config.get("num_jacobi_iterations"))
    torch.testing.assert_close(out.logits, expected["logits"], atol=1e-5, rtol=0)
    torch.testing.assert_close(out.loss, expected["loss"][0], atol=1e-5, rtol=0)
