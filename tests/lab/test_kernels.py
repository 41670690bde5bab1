"""The further forms of attention against the definition, channels in half precision, the choice."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_is_attention, assert_masked_key_is_gone, attention_inputs, outputs_and_gradients
from pretended_cuda import pretended_cuda
from torch.backends import cuda as flags

from attention import EAGER_MAX_SLOTS, eager
from lab import kernels


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-11), (torch.float32, 5e-5)])
@pytest.mark.parametrize("G", [4, 2, 1])
@pytest.mark.parametrize("N,d", [(1, 8), (17, 7), (33, 8), (40, 56), (19, 64)])
def test_exact_equals_eager(dtype, tolerance, G, N, d):
    """Catches errors of the channels or a head group, in outputs and all gradients."""
    assert_is_attention(kernels.exact, attention_inputs(4, G, N, d, dtype), tolerance)


# -- One slot of all tokens against several --------------------------------------------------------


def to_slots_by_hand(q, k, v, log_w):
    """Token by token: of every slot, those of the tokens up to t."""
    (_, H, T, d), n = q.shape, k.size(2) // q.size(2)
    k, v = (x.repeat_interleave(H // k.size(1), dim=1) for x in (k, v))
    out = []
    for t in range(T):
        seen = [slot * T + j for slot in range(n) for j in range(t + 1)]
        scores = (k[:, :, seen] @ q[:, :, t, :, None])[..., 0] / math.sqrt(d) + log_w[:, None, seen]
        out.append((scores.softmax(-1)[:, :, None] @ v[:, :, seen])[:, :, 0])
    return torch.stack(out, dim=2)


@pytest.mark.parametrize("G", [4, 2])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("short", [True, False])
def test_attend_to_slots(short, n, G, monkeypatch):
    """Catches a slot seen too early or without its log w, and mixed-up heads, in short and long texts."""
    assert n * 11 <= EAGER_MAX_SLOTS
    monkeypatch.setattr("lab.kernels.EAGER_MAX_SLOTS", EAGER_MAX_SLOTS if short else 0)
    q, k, v, log_w = attention_inputs(4, G, n * 11, 16, log_w=(-8, 0))
    leaves = [q.detach()[:, :, :11].requires_grad_(), k, v, log_w]
    forms = kernels.attend_to_slots, to_slots_by_hand
    found, expected = (outputs_and_gradients(form, leaves) for form in forms)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


# -- log w in half precision -----------------------------------------------------------------------


@pytest.mark.parametrize("d", [24, 56, 64, 120, 128])
@pytest.mark.parametrize("dtype,bits", [(torch.bfloat16, 16), (torch.float16, 20)])
def test_bias_in_half_precision(d, dtype, bits):
    """Catches a log w that is rounded to 8 bits, or multiplied by a rounded sqrt(d) (0.2 % at 56):
    what queries and keys carry makes sqrt(d) log w to 16 bits in bfloat16, 20 in float16 (of which
    the smallest number is 6e-8)."""
    log_w = -torch.logspace(-3, 2, 400, dtype=torch.float64)
    q, k = kernels.query_channels(d, dtype).double(), kernels.key_channels(log_w, d, dtype).double()
    torch.testing.assert_close(k @ q / math.sqrt(d), log_w, rtol=2**-bits, atol=1e-7)
    assert kernels.key_channels(log_w, d, dtype).shape == (400, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [8, 24, 56, 128])
def test_masked_in_half_precision(d, dtype):
    """Catches a hidden key that overflows (-1e4 sqrt(128) is -1e5, beyond float16), or is seen."""
    assert_masked_key_is_gone(kernels.exact, kernels.augment, d, dtype)


def test_decoding_kernels():
    """Catches decoding that waits for a cuDNN plan at each slot, and training that loses cuDNN."""
    with kernels.decoding_kernels(torch.device("cuda")):
        assert not flags.cudnn_sdp_enabled()
        assert flags.flash_sdp_enabled() and flags.mem_efficient_sdp_enabled()
    assert flags.cudnn_sdp_enabled()


@pytest.mark.parametrize("dtype, masked", [("bfloat16", False), ("bfloat16", True), ("float32", False)])
def test_keys_that_heads_share(dtype, masked, monkeypatch):
    """Catches N x N scores on CUDA, which the form has that shares keys in float32, or with a mask."""
    own, asked = F.scaled_dot_product_attention, []

    def watch(*args, enable_gqa, **kwargs):
        asked.append(enable_gqa)
        return own(*args, enable_gqa=enable_gqa, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    with pretended_cuda():
        q, k, v, _ = (x.detach().to("cuda", getattr(torch, dtype)) for x in attention_inputs(G=2))
        mask = torch.ones(17, 17, dtype=torch.bool, device="cuda").tril() if masked else None
        found, expected = kernels.attend(q, k, v, 8, mask), eager(q, k, v, None)
    assert asked == [dtype == "bfloat16" and not masked]
    assert (found - expected).norm() < 1e-2 * expected.norm()
