"""PonderLM: all tokens at once, one after another and from a cache are the same function."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from conftest import decode, small_model, tokens

from attention import auto, eager, sdpa
from lab.engine.batching import Engine
from lab.engine.simple import generate
from lab.methods import PonderConfig, PonderLM3, objective
from router import bottom_mass_penalty


@torch.no_grad()
def sequential(model, idx, tau=None):
    """Section 3.3 without a cache: for every slot the whole prefix anew. (T,) -> logits, steps.

    tau None runs all K steps with soft masks.
    """
    inputs, positions, bias, logits, steps, log_w = [], [], [], [], [], None
    printed = model.config.method == "ablation-index"
    for t, token in enumerate(idx):
        x, h_hat, k, stop = model.embed(token[None, None])[0, 0], 0, 0, 0
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
            e = model.embed(token[None, None])[0, 0]
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


@pytest.mark.parametrize("K", [0, 1, 3])
def test_number_of_passes(K, monkeypatch):
    """Catches a bound that stops before the last link of the chain is settled, and idle passes."""
    model, calls, idx = small_model(ponder_steps=K), [], tokens(T=5, B=2)
    transform = model.transform
    monkeypatch.setattr(model, "transform", lambda *args: calls.append(1) or transform(*args))
    for R, passes in ((0, K + 1), (2, K + 3 if K else 1), (10**6, 5 * K + 1)):
        calls.clear()
        model.jacobi(idx, R=R)
        assert len(calls) == passes
    calls.clear()
    model.jacobi(idx, tolerance=0)
    assert len(calls) == 5 * K + 1


def test_automatic_passes_reach_the_fixed_point():
    """Catches a stopping rule of the evaluation that stops too early or not at all."""
    model, idx = small_model(), tokens(B=3)
    with torch.no_grad():
        exact = model.jacobi(idx, R=27)[0]
        loose, tight = (model.jacobi(idx, tolerance=tol)[0] for tol in (1e-4, 1e-9))
    assert (loose - exact).norm() / exact.norm() < 2e-4
    assert (tight - exact).norm() / exact.norm() < 2e-9
    assert not torch.equal(loose, tight)


@pytest.mark.parametrize("tau", [0, 1e-4, 0.3])
@pytest.mark.parametrize(
    "method,K,reread",
    [
        ("ponderlm3", 3, False),
        ("ponderlm3", 3, True),
        ("ponderlm3", 1, False),
        ("ponderlm2", 2, False),
        ("vanilla", 0, False),
    ],
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
    if method == "ponderlm3" and K == 3 and tau == 0.3:
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
    objective(model.train(), idx, idx, 1)[0].backward()
    assert (model.router.proj.weight.grad is None) == (ablation == "router")


def test_alpha_in_decoding():
    """Catches an alpha that decoding ignores: cached against parallel, logits to 1e-9."""
    model, idx = small_model(router_scale=12.0), tokens(T=12)
    means = []
    for alpha in (-3.0, 0.0, 3.0):
        logits, _, _ = decode(model, idx[0], 0.1, alpha)
        with torch.no_grad():
            out = model(idx, tau=0.1, alpha=alpha, R=33)
        assert (logits - out.logits[0]).abs().max() < 1e-9
        means.append(out.steps.double().mean().item())
    assert means[0] < means[1] < means[2]


@pytest.mark.parametrize("printed,low,high", [(False, 0, 1e-7), (True, 1e-3, math.inf)])
def test_mask_index(printed, low, high):
    """Reading note 1, with a router that is always sure: masking slot k by w_k, the soft model and
    the hard-stopped one agree to 1e-7. By the printed index, w_(k-1), the slot after the last
    executed one stays visible, and the logits move by more than 1e-3."""
    method = "ablation-index" if printed else "ponderlm3"
    model = small_model(method=method, router_scale=2000.0)
    idx = tokens(T=12)
    with torch.no_grad():
        soft, hard = model(idx, R=33), model(idx, R=33, tau=1e-4)
    w = soft.log_w.exp()
    assert (w < 1e-9).any() and ((w < 1e-9) | (w > 0.9)).all()
    assert low <= (soft.logits - hard.logits).abs().max() < high


@pytest.mark.parametrize("backend", [auto, eager, sdpa])
@pytest.mark.parametrize("kwargs", [{}, {"tau": 0.3}, {"alpha": 1.0}])
@pytest.mark.parametrize("method", ["ponderlm3", "ponderlm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_causality_to_the_bit(backend, kwargs, method, dtype):
    """Catches any path from a token to an earlier output."""
    model = small_model(method=method).to(dtype)
    model.backend = backend
    idx = tokens(T=16, B=2)
    changed = idx.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 31
    with torch.no_grad():
        a, b = (model(x, R=3, **kwargs) for x in (idx, changed))
    for name in ("logits", "s", "log_w", "steps"):
        assert torch.equal(getattr(a, name)[:, :9], getattr(b, name)[:, :9]), name
    assert not torch.equal(a.logits[:, 9], b.logits[:, 9])


def test_k0_is_llama():
    """Catches a backbone that is not Llama's: logits of transformers' LlamaForCausalLM, float64."""
    transformers = pytest.importorskip("transformers")
    model = small_model(ponder_steps=0, head_dim=10, rms_norm_eps=1e-3, rope_theta=500.0)
    c = model.config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    names += ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    shape = {name: getattr(c, name) for name in names}
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    config = transformers.LlamaConfig(**shape, rope_parameters=rope)
    llama = transformers.LlamaForCausalLM(config).double().eval()
    weights = model.state_dict()
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * c.scale
    llama.load_state_dict(weights)
    idx = tokens(T=20, B=2)
    with torch.no_grad():
        # transformers computes RMSNorm and RoPE in float32
        torch.testing.assert_close(model(idx).logits, llama(idx).logits, atol=2e-6, rtol=0)


def test_training_loss_and_its_gradient():
    """Catches a detach in the Jacobi iteration and a wrong loss: the loss is CE + lambda * penalty,
    and its gradient that of finite differences through all passes (penalty off: it has steps)."""
    model, idx = small_model(penalty_weight=0.0).train(), tokens(T=6, B=2)
    y = tokens(T=6, B=2, seed=1)
    model(idx, y, R=2).loss.backward()
    torch.manual_seed(1)
    parameters = list(model.parameters())
    directions = [torch.randn_like(p) for p in parameters]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, directions, strict=True))
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=sign * 1e-6)
            losses.append(model(idx, y, R=2).loss)
            for p, d in zip(parameters, directions, strict=True):
                p.sub_(d, alpha=sign * 1e-6)
    assert slope.item() == pytest.approx(((losses[0] - losses[1]) / 2e-6).item(), rel=1e-5)


def test_parts_of_the_loss():
    """Catches partial states that are renormalised, a wrong depth, lambda applied twice, and
    targets that should be ignored."""
    model, idx = small_model(penalty="token", penalty_weight=0.7).train(), tokens(T=9, B=2)
    y = tokens(9, 2, seed=1)
    model.lm_head.weight.data *= 20  # some tokens below 0.5 nats, so that the penalty acts
    y = model(idx, R=2).logits.argmax(-1).where(y % 3 > 0, y)
    y[0, 3] = -100
    loss, penalty, out = objective(model, idx, y, 2)
    h, s, log_w = model.jacobi(idx, R=2)
    ce = torch.zeros(2, 9, 4, dtype=torch.float64)
    for b in range(2):
        for t in range(9):
            for i in range(4):
                partial = sum(s[b, t, j] * h[b, t, j] for j in range(i + 1))
                ce[b, t, i] = F.cross_entropy(model.lm_head(partial), y[b, t], reduction="sum")
    valid = y != -100
    torch.testing.assert_close(out.loss, ce[..., 3][valid].mean(), atol=1e-5, rtol=0)
    expected, _ = bottom_mass_penalty(log_w[valid], ce[valid], "token")
    assert expected > 0
    torch.testing.assert_close(penalty, expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(loss, out.loss + 0.7 * penalty)


def test_price_of_steps():
    """Catches a price with another weight, on tokens that predict nothing, or without its gradient."""
    model, idx = small_model(penalty_weight=0.0).train(), tokens(T=9, B=2)
    y = tokens(9, 2, seed=1)
    y[1, 4:] = -100
    loss, penalty, out = objective(model, idx, y, 2, price=0.3)
    w = model.jacobi(idx, R=2)[2][y != -100].exp()  # (13, 4)
    executed = (1 + w[:, 1:].log() / math.log(1e4)).clamp(min=0).sum(-1).mean()
    assert penalty.item() == 0 and executed > 0
    torch.testing.assert_close(loss, out.loss + 0.3 * executed)
    loss.backward()
    before = model.router.proj.weight.grad.clone()
    model.zero_grad()
    objective(model, idx, y, 2)[0].backward()
    assert (before - model.router.proj.weight.grad).abs().max() > 1e-6


def gradients(model, idx, R):
    model.zero_grad()
    loss, _, _ = objective(model, idx[:, :-1], idx[:, 1:], R)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def test_recompute():
    """Catches activations that are kept, and another gradient: equal to 1e-12, in float64."""
    model, idx = small_model(penalty_weight=0.3).train(), tokens(B=2)
    loss, expected = gradients(model, idx, R=2)
    calls = []
    model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    model.recompute = True
    again, found = gradients(model, idx, R=2)
    assert len(calls) == 2 * (3 + 2 + 1) and again == loss
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    with torch.no_grad():
        model(idx, R=2)
    assert len(calls) == 3 * (3 + 2 + 1)  # nothing is computed twice without gradients


def test_logits_are_made_late():
    """Catches logits that cost memory in training, and ones with a gradient that nobody wants."""
    model, idx = small_model(), tokens()
    heads = []
    model.lm_head.register_forward_pre_hook(lambda *_: heads.append(1))
    with torch.no_grad():
        out = model(idx)
    assert not heads and out.logits.shape == (1, 10, 31)


@pytest.mark.parametrize(
    "kwargs,message",
    [
        (dict(ponder_steps=-1), "-1"),
        (dict(block_size=2**31), "2147483648: it must lie in 1 .. 16777216"),
        (dict(hidden_size=0), "hidden_size"),
        (dict(num_attention_heads=4, num_key_value_heads=3), "4 heads cannot share"),
        (dict(hidden_size=30, num_attention_heads=4), "30 is not divisible by 4"),
        (dict(head_dim=7), "7 is odd"),
        (dict(router_offset=(0.0, 1.0)), "K\\+1 = 4 numbers"),
        (dict(refinements=(3, 2)), "low <= high"),
        (dict(refinements=(-1, 2)), "refinements"),
    ],
)
def test_config_refuses(kwargs, message):
    """Catches a config that would fail later, far from its cause."""
    with pytest.raises(ValueError, match=message):
        PonderConfig(**kwargs)


def test_input_refused():
    """Catches what is impossible and becomes an error of somebody else, or a result of nans."""
    model = small_model()
    for idx, kwargs, message in (
        (tokens(T=33), {}, "window"),
        (tokens(T=0), {}, "window"),
    ):
        with pytest.raises(ValueError, match=message):
            model(idx, **kwargs)


def test_initialisation():
    """Catches a wrong init: unit RMS of scaled embeddings, 1/sqrt(2L) into the residual stream."""
    torch.manual_seed(0)
    config = PonderConfig(hidden_size=256, num_hidden_layers=8)
    model = PonderLM3(config)
    model.requires_grad_(False)
    layer = model.model.layers[3]
    # a normal of this std cut at 3 std has 0.986 of it
    std = 0.986 * math.sqrt(2 / (5 * 256))
    assert layer.mlp.up_proj.weight.std().item() == pytest.approx(std, rel=0.02)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(std / 4, rel=0.02)
    assert layer.self_attn.o_proj.weight.std().item() == pytest.approx(std / 4, rel=0.02)
    embeddings = model.model.embed_tokens.weight * config.scale
    assert embeddings.square().mean().sqrt() == pytest.approx(0.986, rel=0.02)
    assert not model.router.proj.weight.any()
