import sys
import types

import pytest
import torch

import attention
from attention import MASKED, attend_to_cache, augment, pick_backend, soft_mask_attention
from runtime import UserError


def inputs(H=4, G=4, N=17, d=8, dtype=torch.float64, log_w=(-80.0, 0.0), seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, H, N, d, generator=g, dtype=dtype)
    k, v = (torch.randn(2, G, N, d, generator=g, dtype=dtype) for _ in range(2))
    low, high = log_w
    bias = low + (high - low) * torch.rand(2, N, generator=g, dtype=dtype)
    bias[:, 0] = 0  # the first slot of a sequence is always visible
    return [x.requires_grad_() for x in (q, k, v, bias)]


def outputs_and_gradients(function, leaves):
    out = function(*leaves)
    g = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=g, dtype=out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


def literal(q, k, v, log_w):
    """Section 3.2.2 query by query, head by head."""
    out = torch.zeros_like(q)
    for b in range(q.size(0)):
        for h in range(q.size(1)):
            g = h * k.size(1) // q.size(1)
            for i in range(q.size(2)):
                scores = [
                    q[b, h, i] @ k[b, g, j] / q.size(-1) ** 0.5 + log_w[b, j] for j in range(i + 1)
                ]
                p = torch.stack(scores).softmax(0)
                out[b, h, i] = sum(p[j] * v[b, g, j] for j in range(i + 1))
    return out


def test_eager_is_the_definition():
    """Catches a wrong scale, bias, causal mask or head grouping in the reference itself."""
    leaves = inputs(H=4, G=2, N=5, d=4, log_w=(-5, 0))
    out = soft_mask_attention(*leaves, backend="eager")
    torch.testing.assert_close(out, literal(*leaves), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-11), (torch.float32, 5e-5)])
@pytest.mark.parametrize("H,G", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("N,d", [(1, 8), (17, 7), (33, 8), (40, 56), (19, 64)])
def test_sdpa_equals_eager(dtype, tolerance, H, G, N, d):
    """Catches errors of the augmentation (scale, channel, padding) in outputs and all gradients."""
    leaves = inputs(H, G, N, d, dtype)
    expected = outputs_and_gradients(attention.eager, leaves)
    actual = outputs_and_gradients(attention.sdpa, leaves)
    for name, a, b in zip(("out", "dq", "dk", "dv", "dlog_w"), actual, expected, strict=True):
        torch.testing.assert_close(
            a, b, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("value", [0.0, -80.0, MASKED])
def test_extreme_masks(backend, value):
    """Catches NaN and overflow: w = 1 is plain attention, a masked key is one that is not there."""
    q, k, v, _ = inputs(N=12, dtype=torch.float32)
    bias = torch.zeros(2, 12)
    bias[:, 5] = value
    leaves = [q, k, v, bias.requires_grad_()]
    results = outputs_and_gradients(lambda *x: soft_mask_attention(*x, backend=backend), leaves)
    assert all(torch.isfinite(x).all() for x in results)
    if value == 0:
        expected = soft_mask_attention(q, k, v, None, backend)
    else:
        rest = [i for i in range(12) if i != 5]
        expected = results[0].clone()
        expected[:, :, rest] = soft_mask_attention(q[:, :, rest], k[:, :, rest], v[:, :, rest])
    torch.testing.assert_close(results[0], expected, atol=2e-6, rtol=0)


def test_cache_equals_parallel():
    """Catches a bias that does not travel with its cached key, and mixed-up head groups."""
    q, k, v, log_w = inputs(H=6, G=2, N=9, d=6)
    expected = attention.eager(q, k, v, log_w)
    qa, ka, va = augment(q, k, v, log_w)
    for i in range(9):
        out = attend_to_cache(qa[:, :, i : i + 1], ka[:, :, : i + 1], va[:, :, : i + 1], d=6)
        torch.testing.assert_close(out[:, :, 0], expected[:, :, i], atol=1e-12, rtol=0)


def test_gradient_of_the_mask_numerically():
    """Catches an analytic gradient that agrees between backends and is wrong in both."""
    leaves = inputs(H=2, G=1, N=5, d=4, log_w=(-3, 0))
    assert torch.autograd.gradcheck(attention.sdpa, leaves)


@pytest.mark.parametrize("H,G", [(4, 4), (4, 2)])
@pytest.mark.parametrize("d", [7, 56, 64])
def test_fa2_layout(monkeypatch, H, G, d):
    """Catches a wrong layout, scale or grouping in the call of flash-attn, where it is missing.

    The stand-in has flash_attn_func's documented signature: (B, N, H, d), GQA by fewer key heads.
    """

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        assert causal and dropout_p == 0
        assert q.shape[-1] % 8 == 0 and q.shape[:2] == k.shape[:2]  # (B, N, ...)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        scores = q @ k.mT * softmax_scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)

    stand_in = types.ModuleType("flash_attn")
    stand_in.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    leaves = inputs(H, G, 13, d)
    expected = outputs_and_gradients(attention.eager, leaves)
    for a, b in zip(outputs_and_gradients(attention.fa2, leaves), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


@pytest.mark.skipif(
    not torch.cuda.is_available() or attention.find_spec("flash_attn") is None,
    reason="needs CUDA and flash-attn",
)
def test_fa2_on_cuda():
    """Catches what the stand-in cannot: the real kernel, in bfloat16, against eager in float32."""
    leaves = [x.detach().cuda() for x in inputs(4, 2, 130, 56, torch.float32, log_w=(-8, 0))]
    expected = outputs_and_gradients(attention.eager, [x.clone().requires_grad_() for x in leaves])
    half = [x.to(torch.bfloat16).requires_grad_() for x in leaves]
    for a, b in zip(outputs_and_gradients(attention.fa2, half), expected, strict=True):
        assert (a.float() - b).norm() / b.norm() < 2e-2


def test_auto_and_refusals():
    """Catches a silent fallback: what cannot run is refused by name, with the way out."""
    assert pick_backend("auto", "cpu") == "sdpa"
    with pytest.raises(UserError, match="use 'sdpa'"):
        pick_backend("fa2", "cpu")
    with pytest.raises(ValueError, match="'flash' is not one of auto, eager, sdpa, fa2"):
        pick_backend("flash", "cpu")
    q, k, v, log_w = inputs()
    with pytest.raises(ValueError, match=r"4 % 3"):
        soft_mask_attention(q, k[:, :3], v[:, :3], log_w)
    with pytest.raises(ValueError, match="key_bias"):
        soft_mask_attention(q, k, v, log_w[:, 1:])
    with pytest.raises(ValueError, match="do not fit"):
        soft_mask_attention(q, k[:, :, 1:], v, log_w)
