"""Causal attention with a soft mask on the keys: a plain reference, and two forms that use fused kernels.

    Attn(Q, K, V) = softmax(Q K^T / sqrt(d) + M + log w) V                      (section 3.2.2)

M is the causal mask. w holds one number in [0, 1] per key, which says how visible that key is to every query
that may see it. At w = 1 the key is fully visible; as w goes to 0 it fades out. In between, the gradient
through log w teaches the model which keys nobody needs.

    code            paper    shape
    q               Q        (B, H, N, d)   queries, after RoPE
    k, v            K, V     (B, G, N, d)   keys, after RoPE, and values
    log_w           log w    (B, N)         log of each key's mask score, at most 0; None means w = 1
    LOG_W_HIDDEN             scalar         log w of a key that must not be seen at all

B: batch; N: sequence length in slots (a slot is one input vector of the transformer, and each token occupies
several, see model.py); H: query heads; G: key/value heads (G divides H); d: head dimension.

    eager    the definition, with the N x N scores in memory
    sdpa     PyTorch's fused kernels. They take either is_causal or a mask, and a mask that also holds the
             causal triangle is N x N. So log w is passed as an extra channel of q and k
    fa2      the same extra channel, through the package flash-attn; it needs a GPU and half precision. It is
             here to compare with, and auto never picks it
    auto     eager for short sequences on a CPU, otherwise sdpa
"""

import math

import torch
import torch.nn.functional as F

try:
    from flash_attn import flash_attn_func
except ImportError:  # optional; flash-attn-4 has a namespace of this name without this function
    flash_attn_func = None

LOG_W_HIDDEN = -1e4  # exp(-1e4) is 0, and the number is finite in float16, too
EAGER_MAX_SLOTS = 256  # measured: on a CPU, eager is faster than sdpa up to this length


def repeat_heads(x, H):
    """Repeat each key/value head for the H/G query heads that share it. (B, G, N, d) -> (B, H, N, d)"""
    return x.repeat_interleave(H // x.size(1), dim=1)


def eager(q, k, v, log_w):
    """The definition of attention with a soft mask."""
    H, N, d = q.shape[1:]
    k = repeat_heads(k, H)  # (B, H, N, d)
    v = repeat_heads(v, H)
    M = torch.full((N, N), -torch.inf, device=q.device).triu(1)  # -inf where key j > query i, else 0
    bias = M if log_w is None else log_w[:, None, None, :] + M  # (N, N), or (B, 1, N, N) for all heads
    scores = (q / math.sqrt(d)) @ k.mT + bias.to(q.dtype)  # (B, H, N, N)
    return scores.softmax(-1).to(v.dtype) @ v  # under autocast, softmax returns float32


def augment(q, k, v, log_w):
    """Move log w into the dot product (appendix A), so that kernels without a bias can be used.

    q and k get one extra channel, q_extra = sqrt(d) and k_extra = log w. With the scale kept at 1/sqrt(d),

        q' . k' / sqrt(d) = q . k / sqrt(d) + log w,

    up to the rounding of sqrt(d) and of log w (reading note 4, docs/reading-notes.md). Kernels require a
    head dimension that is a multiple of 8, so q and k are padded with zeros to d'. They also require the
    same head dimension of v, which gets no extra channel, only padding.

    Args:
        q: (B, H, N, d).
        k, v: (B, G, N, d).
        log_w: (B, N), or None.

    Returns:
        q, k and v with d' in the place of d; unchanged if there is no log w.
    """
    if log_w is None:
        return q, k, v
    d = q.size(-1)
    padded_width = 8 * math.ceil((d + 1) / 8)
    padding = padded_width - (d + 1)
    q_extra = q.new_full((*q.shape[:-1], 1), math.sqrt(d))
    k_extra = log_w.to(k.dtype)[:, None, :, None].expand(*k.shape[:-1], 1)  # the same for all G key heads
    q = F.pad(torch.cat([q, q_extra], dim=-1), (0, padding))
    k = F.pad(torch.cat([k, k_extra], dim=-1), (0, padding))
    v = F.pad(v, (0, 1 + padding))
    return q, k, v


def sdpa(q, k, v, log_w):
    """PyTorch's fused kernels. Where one of them accepts these tensors, no N x N matrix is in memory."""
    H, _, d = q.shape[1:]
    q, k, v = augment(q, k, v, log_w)
    if q.dtype == torch.float32:
        # In float32 the fused kernels of a GPU do not share key heads: with enable_gqa, torch would fall back
        # to a form that holds the N x N scores.
        k = repeat_heads(k, H)
        v = repeat_heads(v, H)
    shares_heads = k.size(1) != H
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=1 / math.sqrt(d), enable_gqa=shares_heads
    )
    return out[..., :d]


def fa2(q, k, v, log_w):
    """The package flash-attn, whose layout is (B, N, H, d)."""
    if flash_attn_func is None:
        raise RuntimeError(
            "fa2 needs flash-attn, which is not installed: use sdpa, which gives the same result"
        )
    d = q.size(-1)
    q, k, v = (x.transpose(1, 2) for x in augment(q, k, v, log_w))
    out = flash_attn_func(q, k, v, causal=True, softmax_scale=1 / math.sqrt(d))
    return out.transpose(1, 2)[..., :d]


def auto(q, k, v, log_w):
    """The fastest form for these tensors. On a GPU that is sdpa: its kernels are at least as fast as fa2, and
    they take wider heads."""
    N = q.size(2)
    if q.device.type == "cpu" and N <= EAGER_MAX_SLOTS:
        return eager(q, k, v, log_w)
    return sdpa(q, k, v, log_w)


BACKENDS = {"auto": auto, "eager": eager, "sdpa": sdpa, "fa2": fa2}


def soft_mask_attention(q, k, v, log_w=None, backend=auto):
    """Causal attention in which every query sees key j with weight w_j (section 3.2.2).

    Args:
        q: (B, H, N, d).
        k, v: (B, G, N, d), where G divides H.
        log_w: (B, N), at most 0. None means w = 1 everywhere: plain causal attention.
        backend: one of the functions in BACKENDS, or any function of the same four arguments.

    Returns:
        (B, H, N, d), differentiable in q, k, v and log_w.

    Raises:
        ValueError: the shapes do not fit together.
    """
    B, H, N, d = q.shape
    G = k.size(1)
    if k.shape != (B, G, N, d) or v.shape != k.shape or H % G:
        raise ValueError(
            f"q, k and v have shapes {[*q.shape]}, {[*k.shape]} and {[*v.shape]}; q must be (B, H, N, d), "
            "and k and v (B, G, N, d), where G divides H"
        )
    if log_w is not None and log_w.shape != (B, N):
        raise ValueError(f"log_w has shape {[*log_w.shape]}; for this q it must be {[B, N]}")
    return backend(q, k, v, log_w)


def attend_to_cache(q, k, v, d):
    """Attention of the newest slot to all C slots so far, its own included, as decoding needs it.

    Args:
        q: (B, H, 1, d'), augmented if the keys are.
        k, v: (B, G, C, d'), as the cache holds them. Keys that have a log w hold it in an extra channel,
            see `augment`.
        d: the head dimension before augmentation.

    Returns:
        (B, H, 1, d).
    """
    B, H, _, width = q.shape
    G = k.size(1)
    # No mask is needed, since the newest slot sees all others, and log w is in the augmented keys. The H/G
    # query heads that share a key head are treated as query positions, since repeating the keys would copy
    # the cache.
    q = q.reshape(B, G, H // G, width)
    out = F.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(d))  # (B, G, H/G, d')
    return out[..., :d].reshape(B, H, 1, d)
