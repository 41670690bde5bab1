"""The lab's methods: all tokens at once, one after another and from a cache are the same function; and
the loop against numbers of the official code (tests/golden).

Of PonderLM-3 on the root's own backbone: root/test_model.py and root/test_golden.py.
"""

import math
from dataclasses import asdict

import pytest
import torch
from helpers import assert_jacobi_is_sequential, assert_three_forms_agree, distance_of_masks, read_golden
from lab_helpers import decode, small_model, tokens

from lab.methods import PonderConfig, build, configure


@pytest.mark.parametrize("method", ["ponderlm3", "ponderlm2", "ablation-index"])
@pytest.mark.parametrize("K", [1, 3])
def test_jacobi_equals_sequential(method, K):
    """Catches a wrong slot order, position, mask or router timing."""
    model = small_model(method=method, ponder_steps=K)
    assert_jacobi_is_sequential(model, printed=model.config.method == "ablation-index")


@pytest.mark.parametrize("tau", [0, 1e-4, 0.3])
@pytest.mark.parametrize(
    "method,K,reread",
    [("ponderlm3", 3, False), ("ponderlm3", 3, True), ("ponderlm2", 2, False), ("vanilla", 0, False)],
)
def test_hard_stopping_parallel_sequential_and_cached_agree(tau, method, K, reread):
    """Catches a key that stopping should hide, an integration that runs on, a wrong cache."""
    model = small_model(method=method, ponder_steps=K, router_scale=12.0, reread=reread)
    steps = assert_three_forms_agree(model, tau)
    if method == "ponderlm3" and tau == 0.3:
        assert 0 in steps and 3 in steps and len(set(steps)) > 2


@pytest.mark.parametrize("tau", [0, 0.3])
@pytest.mark.parametrize("ablation", ["mask", "integration", "router"])
def test_ablations(ablation, tau):
    """Catches an ablation that leaves its part in, or decodes otherwise than it scores: logits to 1e-9."""
    scale = 0 if ablation == "router" else 12.0
    model, idx = small_model(method=f"ablation-{ablation}", router_scale=scale), tokens(T=12)
    with torch.no_grad():
        out = model(idx, tau=tau, R=33)
    assert (decode(model, idx[0], tau)[0] - out.logits[0]).abs().max() < 1e-9
    h, s, log_w = model.states(idx, R=33, tau=tau)
    bias = model.mask_keys(log_w)
    assert (bias.abs().max() == 0) == (ablation == "mask")
    h_hat = model.integrate(h, s, out.steps)
    last = h.gather(2, out.steps[..., None, None].expand(-1, -1, 1, h.size(-1)))[:, :, 0]
    assert ((h_hat - last).abs().max() < 1e-12) == (ablation == "integration")
    assert ((s - 0.25).abs().max() < 1e-6) == (ablation == "router")
    model.train().objective(idx, idx, 1)[0].backward()
    assert (model.router.proj.weight.grad is None) == (ablation == "router")


def test_price_by_probability():
    """Catches a price on other tokens, or another share of it on what s expects."""
    model = small_model(method="ablation-price", by_probability=0.25, penalty_weight=0.0).train()
    idx = tokens(T=12)
    y = idx.masked_fill(idx % 3 == 0, -100)
    loss, _, out = model.objective(idx, y, 1, price=0.3)
    w = out.log_w[y != -100].exp()[:, 1:]
    relaxed = (1 + w.log() / math.log(1e4)).clamp(min=0)
    torch.testing.assert_close(loss, out.loss + 0.3 * (0.25 * w + 0.75 * relaxed).sum(-1).mean())


@pytest.mark.parametrize("method, low, high", [("ponderlm3", 0, 1e-7), ("ablation-index", 1e-3, math.inf)])
def test_mask_index(method, low, high):
    """Catches an ablation that has another index than the printed one, by which the slot after the last
    executed one stays visible, and the logits move by more than 1e-3."""
    assert low <= distance_of_masks(small_model(method=method, router_scale=2000.0)) < high


@torch.no_grad()
def test_golden():
    """Catches a loop with a norm in between, or one too many. PonderLM-2: interop/test_interop.py."""
    looped = lambda config: build(configure(PonderConfig(**asdict(config)), "looped"))  # noqa: E731
    model, expected, _ = read_golden("loop_K2.safetensors", looped)
    idx = expected["input_ids"]
    targets = torch.full_like(idx, -100)
    targets[:, :-1] = idx[:, 1:]
    out = model(idx, targets)
    torch.testing.assert_close(out.logits, expected["logits"], atol=1e-5, rtol=0)
    torch.testing.assert_close(out.loss, expected["loss"][0], atol=1e-5, rtol=0)
