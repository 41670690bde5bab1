"""Soft-mask attention: the reference against its definition, the other forms against it."""

import types

import pytest
import torch
from helpers import assert_is_attention, assert_masked_key_is_gone, attention_inputs, outputs_and_gradients

import attention
from attention import LOG_W_HIDDEN, attend_to_cache, augment, auto, eager, fa2, sdpa, soft_mask_attention


def literal(q, k, v, log_w):
    """Section 3.2.2 query by query, head by head."""
    out = torch.zeros_like(q)
    for b in range(q.size(0)):
        for h in range(q.size(1)):
            g = h * k.size(1) // q.size(1)
            for i in range(q.size(2)):
                scores = [q[b, h, i] @ k[b, g, j] / q.size(-1) ** 0.5 + log_w[b, j] for j in range(i + 1)]
                p = torch.stack(scores).softmax(0)
                out[b, h, i] = sum(p[j] * v[b, g, j] for j in range(i + 1))
    return out


def test_eager_is_the_definition():
    """Catches a wrong scale, bias, causal mask or head grouping in the reference itself."""
    leaves = attention_inputs(H=4, G=2, N=5, d=4, log_w=(-5, 0))
    out = soft_mask_attention(*leaves, backend=eager)
    torch.testing.assert_close(out, literal(*leaves), atol=1e-12, rtol=0)


@pytest.mark.parametrize("form", [sdpa, auto])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-11), (torch.float32, 5e-5)])
@pytest.mark.parametrize("G", [4, 2, 1])
@pytest.mark.parametrize("N,d", [(1, 8), (17, 7), (33, 8), (40, 56), (19, 64)])
def test_forms_equal_eager(form, dtype, tolerance, G, N, d):
    """Catches errors of the augmentation, or a head group, in outputs and all gradients."""
    assert_is_attention(form, attention_inputs(4, G, N, d, dtype), tolerance)


@pytest.mark.parametrize("backend", [eager, sdpa])
@pytest.mark.parametrize("value", [0.0, -80.0, LOG_W_HIDDEN])
def test_extreme_masks(backend, value):
    """Catches NaN and overflow: w = 1 is plain attention, a masked key is one that is not there."""
    q, k, v, _ = attention_inputs(N=12, dtype=torch.float32)
    bias = torch.zeros(2, 12)
    bias[:, 5] = value
    leaves = [q, k, v, bias.requires_grad_()]
    out, *gradients = outputs_and_gradients(lambda *x: soft_mask_attention(*x, backend=backend), leaves)
    assert all(torch.isfinite(x).all() for x in gradients)
    rest = [i for i in range(12) if i != 5 or not value]
    expected = soft_mask_attention(q[:, :, rest], k[:, :, rest], v[:, :, rest], None, backend)
    torch.testing.assert_close(out[:, :, rest], expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [8, 24, 56, 128])
def test_masked_in_half_precision(d, dtype):
    """Catches a hidden key that overflows (-1e4 sqrt(128) is -1e5, beyond float16), or is seen."""
    assert_masked_key_is_gone(soft_mask_attention, augment, d, dtype)


def test_cache_equals_parallel():
    """Catches a bias that does not travel with its cached key, and mixed-up head groups."""
    q, k, v, log_w = attention_inputs(H=6, G=2, N=9, d=6)
    expected = eager(q, k, v, log_w)
    qa, ka, va = augment(q, k, v, log_w)
    for i in range(1, 10):
        out = attend_to_cache(qa[:, :, i - 1 : i], ka[:, :, :i], va[:, :, :i], d=6)
        torch.testing.assert_close(out, expected[:, :, i - 1 : i], atol=1e-12, rtol=0)


def test_gradient_of_the_mask_numerically():
    """Catches an analytic gradient that agrees between backends and is wrong in both."""
    assert torch.autograd.gradcheck(sdpa, attention_inputs(H=2, G=1, N=5, d=4, log_w=(-3, 0)))


@pytest.mark.parametrize("G", [4, 2])
@pytest.mark.parametrize("d", [7, 56, 64])
def test_fa2_layout(monkeypatch, G, d):
    """Catches a wrong layout, scale or grouping in the call of flash-attn, where it is missing.

    The stand-in has flash_attn_func's documented signature: (B, N, H, d), GQA by fewer key heads.
    """

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        assert causal and dropout_p == 0
        assert q.shape[-1] % 8 == 0 and q.shape[:2] == k.shape[:2]  # (B, N, ...)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        how = dict(is_causal=True, scale=softmax_scale, enable_gqa=True)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2)

    monkeypatch.setattr(attention, "flash_attn_func", flash_attn_func)
    assert_is_attention(fa2, attention_inputs(4, G, 13, d), 1e-11)


def test_the_fastest_form(monkeypatch):
    """Catches a form that is taken where another is faster, and flash-attn where nobody asked for it."""
    entered = []
    for name in ("eager", "sdpa", "fa2"):
        monkeypatch.setattr(attention, name, lambda *_, name=name: entered.append(name))
    for there in (True, False):
        monkeypatch.setattr(attention, "flash_attn_func", there or None)
        for device, dtype, N, form in (
            ("cpu", torch.bfloat16, attention.EAGER_MAX_SLOTS, "eager"),
            ("cpu", torch.float32, attention.EAGER_MAX_SLOTS + 1, "sdpa"),
            ("cuda", torch.float32, 8, "sdpa"),
            ("cuda", torch.bfloat16, 8, "sdpa"),
        ):
            q = types.SimpleNamespace(
                is_cuda=device == "cuda", device=torch.device(device), dtype=dtype, size=lambda _, N=N: N
            )
            auto(q, None, None, None)
            assert entered.pop() == form
    with pytest.raises(RuntimeError, match="flash-attn"):
        fa2(*attention_inputs())


@pytest.mark.parametrize("dtype, repeated", [(torch.float32, True), (torch.bfloat16, False)])
def test_shared_heads(dtype, repeated, monkeypatch):
    """Catches shared key heads in float32 that are left to torch, which then holds the N x N scores on a GPU;
    and key heads that are repeated where the kernels share them."""
    real, seen = torch.nn.functional.scaled_dot_product_attention, []

    def kernel(q, k, v, **how):
        seen.append((k.size(1), how["enable_gqa"]))
        return real(q, k, v, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    sdpa(*attention_inputs(H=4, G=2, dtype=dtype))
    assert seen == [(4, False) if repeated else (2, True)]


def test_shapes_that_do_not_fit():
    """Catches a broadcast where a shape is wrong."""
    q, k, v, log_w = attention_inputs()
    for wrong in ((k[:, :3], v[:, :3], log_w), (k, v, log_w[:, 1:]), (k[:, :, 1:], v, log_w)):
        with pytest.raises(ValueError, match="shape"):
            soft_mask_attention(q, *wrong)
