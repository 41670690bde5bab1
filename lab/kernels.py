"""Further forms of soft-mask attention, for half precision, for caches and for the grid.

attention.augment appends one channel for log w to each query and key; in bfloat16 it keeps 8 bits of log w.
Here log w has two channels, which together keep 16 bits. In these channels a query holds 8, not sqrt(d):
every precision represents a power of two exactly.

code       shape                  meaning
d, d'                             head width without and with the channels; d' is a multiple of 8
channels   (.., d'-d)             the components of a query or a key after its own d
"""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import BACKENDS, EAGER_MAX_SLOTS

HALF = (torch.float16, torch.bfloat16)
UNIT = 8.0  # what a query holds in the channels of log w: a power of two, of the size of sqrt(d)


def padded_width(d, more=0):
    """d': room for two channels of log w and for so many `more`, rounded up to a multiple of 8, which fused
    kernels require."""
    return 8 * math.ceil((d + 2 + more) / 8)


def query_channels(d, dtype, device=None):
    """The channels of a query, (d'-d,): the same for all queries."""
    channels = torch.zeros(padded_width(d) - d, dtype=dtype, device=device)
    channels[:2] = UNIT
    return channels


def log_w_channels(log_w, d, dtype):
    """log w of keys in two channels, (...) -> (..., 2). Their dot product with the channels of a query is
    sqrt(d) log w.

    In half precision the second channel holds what is lost when the first one is rounded; otherwise it is
    zero.
    """
    x = log_w.to(torch.promote_types(torch.float32, dtype)) * (math.sqrt(d) / UNIT)
    if x.dtype == dtype:  # not half precision: nothing is rounded
        return F.pad(x[..., None], (0, 1))
    high = x.to(dtype)
    low = (x - high).detach().to(dtype)  # all of the gradient flows through `high`
    return torch.stack([high, low], dim=-1)


def key_channels(log_w, d, dtype):
    """The channels of keys whose log w is given, (...) -> (..., d'-d)."""
    return F.pad(log_w_channels(log_w, d, dtype), (0, padded_width(d) - d - 2))


def augment(q, k, v, log_w):
    """As attention.augment, with two channels: (B, *, N, d) -> (B, *, N, d')."""
    if log_w is None:
        return q, k, v
    d = q.size(-1)
    of_query = query_channels(d, q.dtype, q.device).expand(*q.shape[:-1], -1)
    of_key = key_channels(log_w, d, k.dtype)[:, None].expand(*k.shape[:-1], -1)
    q = torch.cat([q, of_query], dim=-1)
    k = torch.cat([k, of_key], dim=-1)
    return q, k, F.pad(v, (0, padded_width(d) - d))


def attend(q, k, v, d, mask=None):
    """Attention of augmented queries, keys and values.

    Args:
        q: (B, H, N, d').
        k, v: (B, G, M, d').
        d: the width before `augment`.
        mask: (.., N, M), True where a query sees a key; None: causal.

    Returns:
        (B, H, N, d).
    """
    H = q.size(1)
    G = k.size(1)
    grouped = G != H
    if grouped and q.is_cuda and (q.dtype not in HALF or mask is not None):
        # Of a GPU's fused kernels, only the one for half precision without a mask lets queries share key
        # heads. In other cases torch would fall back to a form that holds the N x M scores.
        k = k.repeat_interleave(H // G, dim=1)
        v = v.repeat_interleave(H // G, dim=1)
        grouped = False
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=1 / math.sqrt(d), enable_gqa=grouped
    )
    return out[..., :d]


def exact(q, k, v, log_w):
    """As attention.sdpa, with log w to 16 bits in half precision."""
    return attend(*augment(q, k, v, log_w), q.size(-1))


BACKENDS["exact"] = exact  # for --attention


def attend_to_slots(q, k, v, log_w):
    """Attention of one slot of all tokens to n slots of all tokens: token t sees the slots of tokens up to t.

    Short texts on a CPU are computed as the definition says, everything else by torch's fused attention.

    Args:
        q: (B, H, T, d).
        k, v: (B, G, n T, d): first slot 0 of all tokens, then slot 1 of all tokens, and so on.
        log_w: (B, n T), in the same order.

    Returns:
        (B, H, T, d).
    """
    _, H, T, d = q.shape
    G = k.size(1)
    n = k.size(2) // T
    if q.device.type == "cpu" and n * T <= EAGER_MAX_SLOTS:
        k = k.repeat_interleave(H // G, dim=1)
        v = v.repeat_interleave(H // G, dim=1)
        M = torch.full((T, T), -torch.inf).triu(1).repeat(1, n)  # (T, n T)
        scores = q @ k.mT / math.sqrt(d) + (log_w[:, None, None, :] + M)  # (B, H, T, n T)
        return scores.softmax(-1).to(v.dtype) @ v
    mask = None
    if n > 1:
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().repeat(1, n)
    return attend(*augment(q, k, v, log_w), d, mask)


def decoding_kernels(device):
    """A context for the attention of decoding, in which CUDA does not use cuDNN's kernel. That kernel makes a
    new plan for each shape: training has a handful of shapes, but decoding has a new one for almost every
    slot."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
