"""Causal attention in which every key has a weight: the definition, and the same through flash kernels.

    Attn(Q, K, V) = softmax(Q K^T / sqrt(d) + M + log w) V                      (section 3.2.2)

M is the causal mask. w, one number per key in [0, 1], says how visible that key is to every query that
may see it: with w = 1 nothing changes, as w -> 0 the key fades out. log w is differentiable, so that the
model can learn which keys nobody needs.

    code     paper    shape
    q        Q        (B, H, N, d)   queries, after RoPE
    k, v     K, V     (B, G, N, d)   keys, after RoPE, and values
    log_w    log w    (B, N)         log of the mask score of each key, at most 0; None: w = 1
    MASKED            scalar         log w of a key that must not be seen at all

B sequences of N slots (of which a token has several, see model.py); H heads of queries share G heads of keys,
H a multiple of G, each d numbers wide.

    eager    the definition, with the N x N scores in memory
    sdpa     torch's fused kernels, which know nothing of log w: it travels as one more channel
    fa2      the same through the package flash-attn, on a GPU in half precision
    auto     the fastest of these for the tensors at hand
"""

import math

import torch
import torch.nn.functional as F

try:
    from flash_attn import flash_attn_func
except ImportError:  # optional; flash-attn-4 has a namespace of this name and no such function
    flash_attn_func = None

MASKED = -1e4  # exp(-1e4) is 0, and the number is finite in float16, too
SHORT = 256  # slots up to which a CPU attends faster by the definition, measured


def eager(q, k, v, log_w):
    """The definition. log w + M is made once for all heads, and rounded to the type of q."""
    (_, H, N, d), G = q.shape, k.size(1)
    k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))  # (B, H, N, d)
    M = torch.full((N, N), -torch.inf, device=q.device).triu(1)  # -inf where j > i, else 0
    bias = M if log_w is None else log_w[:, None, None, :] + M
    scores = (q / math.sqrt(d)) @ k.mT + bias.to(q.dtype)  # (B, H, N, N)
    return scores.softmax(-1).to(v.dtype) @ v  # autocast made them float32


def augment(q, k, v, log_w):
    """Move log w into the dot product (appendix A): q' . k' / sqrt(d) = q . k / sqrt(d) + log w.

    With q_extra = sqrt(d) and the scale kept at 1/sqrt(d) it is exact, but for the rounding of sqrt(d) and
    log w (reading note 4, docs/reading-notes.md). Zeros fill up to a multiple of 8, which the kernels want;
    values get zeros alone. (B, *, N, d) -> (B, *, N, d'); without log w nothing changes.
    """
    if log_w is None:
        return q, k, v
    d = q.size(-1)
    q_extra = q.new_full((*q.shape[:-1], 1), math.sqrt(d))
    k_extra = log_w.to(k.dtype)[:, None, :, None].expand(*k.shape[:-1], 1)  # for all G key heads
    fill = -(d + 1) % 8
    q = F.pad(torch.cat([q, q_extra], dim=-1), (0, fill))
    k = F.pad(torch.cat([k, k_extra], dim=-1), (0, fill))
    return q, k, F.pad(v, (0, 1 + fill))


def sdpa(q, k, v, log_w):
    """Through torch's fused kernels: where there is one for these tensors, no N x N matrix is in memory."""
    (_, H, _, d), G = q.shape, k.size(1)
    q, k, v = augment(q, k, v, log_w)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(d), enable_gqa=G != H)
    return out[..., :d]


def fa2(q, k, v, log_w):
    """Through the package flash-attn, whose layout is (B, N, H, d)."""
    if flash_attn_func is None:
        raise RuntimeError("fa2 needs the package flash-attn; sdpa computes the same without")
    d = q.size(-1)
    q, k, v = (x.transpose(1, 2) for x in augment(q, k, v, log_w))
    out = flash_attn_func(q, k, v, causal=True, softmax_scale=1 / math.sqrt(d))
    return out.transpose(1, 2)[..., :d]


def auto(q, k, v, log_w):
    """The fastest form for these tensors: on a CPU eager for short texts; on a GPU fa2 where it can."""
    if flash_attn_func and q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        return fa2(q, k, v, log_w)
    short = q.device.type == "cpu" and q.size(2) <= SHORT
    return eager(q, k, v, log_w) if short else sdpa(q, k, v, log_w)


BACKENDS = {"auto": auto, "eager": eager, "sdpa": sdpa, "fa2": fa2}


def soft_mask_attention(q, k, v, log_w=None, backend=auto):
    """Causal attention in which every query sees key j with weight w_j (section 3.2.2).

    Args:
        q: (B, H, N, d). k, v: (B, G, N, d), with H a multiple of G.
        log_w: (B, N), at most 0; None is w = 1 everywhere, plain causal attention.
        backend: one of BACKENDS' functions, or any of the same four arguments.

    -> (B, H, N, d), differentiable in q, k, v and log_w. ValueError: shapes that do not fit together.
    """
    (B, H, N, d), G = q.shape, k.size(1)
    if k.shape != (B, G, N, d) or v.shape != k.shape or H % G:
        shapes = f"q {[*q.shape]}, k {[*k.shape]}, v {[*v.shape]}"
        raise ValueError(f"{shapes}: (B, H, N, d) and twice (B, G, N, d) are needed, with H a multiple of G")
    if log_w is not None and log_w.shape != (B, N):
        raise ValueError(f"log_w has shape {[*log_w.shape]}, but q needs {[B, N]}")
    return backend(q, k, v, log_w)


def attend_to_cache(q, k, v, d):
    """The newest slot against all C slots so far, its own included: what decoding does.

    q (B, H, 1, d') and k, v (B, G, C, d'), augmented; d is the width before -> (B, H, 1, d).
    """
    (B, H, _, width), G = q.shape, k.size(1)
    q = q.reshape(B, G, H // G, width)  # the heads of a group as so many queries of their one key head
    out = F.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(d))
    return out[..., :d].reshape(B, H, 1, d)
