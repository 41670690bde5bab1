"""Further forms of soft-mask attention: log w to 16 bits in half precision, and one slot against all so far.

For long trainings on a GPU and for caches: `augment` of the root's attention.py with a second channel, and a
power of two in place of sqrt(d), which every precision holds.

code       shape                  meaning
d, d'                             head width without and with the channels, a multiple of 8
channels   (.., d'-d)             what stands behind the d numbers of a query or a key
"""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import BACKENDS, EAGER_MAX_SLOTS

HALF = (torch.float16, torch.bfloat16)
UNIT = 8.0  # of a query in the channels of log w: about sqrt(d)


def padded_width(d):
    return d + 1 + -(d + 1) % 8


def query_channels(d, dtype, device=None):
    """What every query carries, (d'-d,)."""
    channels = torch.zeros(padded_width(d) - d, dtype=dtype, device=device)
    channels[:2] = UNIT
    return channels


def log_w_channels(log_w, d, dtype):
    """log w of keys in two channels: times the query's they make sqrt(d) log w. (...) -> (..., 2).

    In half precision the second holds what the rounding of the first one loses, else zero.
    """
    x = log_w.to(torch.promote_types(torch.float32, dtype)) * (math.sqrt(d) / UNIT)
    if x.dtype == dtype:  # nothing is rounded
        return F.pad(x[..., None], (0, 1))
    high = x.to(dtype)
    low = (x - high).detach().to(dtype)  # all of the gradient flows through `high`
    return torch.stack([high, low], dim=-1)


def key_channels(log_w, d, dtype):
    """What a key carries, (...) -> (..., d'-d)."""
    return F.pad(log_w_channels(log_w, d, dtype), (0, padded_width(d) - d - 2))


def augment(q, k, v, log_w):
    """As attention.augment. (B, *, N, d) -> (B, *, N, d'); None changes nothing."""
    if log_w is None:
        return q, k, v
    d = q.size(-1)
    of_query = query_channels(d, q.dtype, q.device).expand(*q.shape[:-1], -1)
    of_key = key_channels(log_w, d, k.dtype)[:, None].expand(*k.shape[:-1], -1)
    q, k = torch.cat([q, of_query], dim=-1), torch.cat([k, of_key], dim=-1)
    return q, k, F.pad(v, (0, padded_width(d) - d))


def attend(q, k, v, d, mask=None):
    """Attention of what `augment` made of width d: causal, or with a mask (.., N, M) of who sees whom."""
    grouped = q.size(1) != k.size(1)
    if grouped and q.is_cuda and (q.dtype not in HALF or mask is not None):
        # The kernel that shares keys is for half precision, and knows no mask: others make N x N scores.
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=1 / math.sqrt(d), enable_gqa=grouped
    )
    return out[..., :d]


def exact(q, k, v, log_w):
    """As attention.sdpa, with log w to 16 bits in half precision."""
    return attend(*augment(q, k, v, log_w), q.size(-1))


BACKENDS["exact"] = exact  # so that --attention knows it


def attend_to_slots(q, k, v, log_w):
    """One slot of all tokens against all slots so far: token t sees those of the tokens up to t.

    Args:
        q: (B, H, T, d). k, v: (B, G, n T, d), log_w: (B, n T): slot 0 of all tokens, then slot 1, ..

    Returns:
        (B, H, T, d): on a CPU a short text by the definition, else through torch's fused attention.
    """
    (_, H, T, d), G, n = q.shape, k.size(1), k.size(2) // q.size(2)
    if q.device.type == "cpu" and n * T <= EAGER_MAX_SLOTS:
        k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
        M = torch.full((T, T), -torch.inf).triu(1).repeat(1, n)
        scores = q @ k.mT / math.sqrt(d) + (log_w[:, None, None, :] + M)
        return scores.softmax(-1).to(v.dtype) @ v
    mask = None if n == 1 else torch.ones(T, T, dtype=torch.bool, device=q.device).tril().repeat(1, n)
    return attend(*augment(q, k, v, log_w), d, mask)


def decoding_kernels(device):
    """The context in which decoding attends: on CUDA any kernel but cuDNN's, which plans anew for each
    shape. Training has a handful of shapes, decoding a new one for almost every slot."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
