"""Causal attention with a soft mask on keys: its definition, and the same through fast kernels.

    Attn(Q, K, V) = softmax(Q K^T / sqrt(d) + M + log w) V        (section 3.2.2)

M is the causal mask. log w, the key bias, is one number per key: the log of how visible that key is
to every later query. At w = 1 nothing changes. As w -> 0 the key fades out. The bias is
differentiable, so that the model can learn which keys nobody needs.

    code        paper    shape
    q           Q        (B, H, N, d)   queries, after RoPE
    k, v        K, V     (B, G, N, d)   keys (after RoPE) and values; H is a multiple of G
    key_bias    log w    (B, N)         bias of each key, <= 0
    MASKED               scalar         the bias of a key that must not be seen at all

The fast forms use the paper's trick (appendix A): a bias that depends on the key alone is one more
channel of the dot product. Append sqrt(d) to each query and log w to each key and keep the scale
1/sqrt(d): then a flash kernel that knows nothing of biases adds log w to every score. In half
precision two channels carry it (key_channels), so that little is lost.

    eager    the definition, with the N x N scores in memory
    sdpa     torch's fused attention, on every device
    fa2      the package flash-attn, on a GPU

A backend is one of these functions, or one of kernels/ with the same arguments.

    python attention.py      the soft mask as a matrix
"""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
import tyro
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime import command_line

MASKED = -1e4  # exp(-1e4) is 0, and -1e4 in a key's channels is finite in float16, too
HALF = (torch.float16, torch.bfloat16)


def eager(q, k, v, key_bias):
    """The definition, with the N x N scores written out. The reference for the other forms."""
    N, d = q.shape[-2:]
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))  # (B, H, N, d)
    scores = q @ k.mT / math.sqrt(d)  # (B, H, N, N)
    if key_bias is not None:
        scores = scores + key_bias[:, None, None, :]
    causal = torch.ones(N, N, dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~causal, -torch.inf).softmax(-1).to(v.dtype) @ v


def padded_width(d):
    """d': the head width with room for the bias, a multiple of 8, which the kernels want."""
    return d + 1 + -(d + 1) % 8


def bias_unit(d):
    """The power of two nearest to sqrt(d), which every precision holds exactly."""
    return 2.0 ** round(math.log2(d) / 2)


def query_channels(d, dtype, device=None):
    """What every query carries behind its d numbers, (d'-d,)."""
    channels = torch.zeros(padded_width(d) - d, dtype=dtype, device=device)
    channels[:2] = bias_unit(d)
    return channels


def key_channels(key_bias, d, dtype):
    """What a key with that bias carries behind its d numbers, (...) -> (..., d'-d).

    Multiplied by the query's channels it makes sqrt(d) log w. In half precision the second channel
    holds what the rounding of the first one loses, so that 16 bits of log w arrive in bfloat16.
    """
    x = key_bias.to(torch.promote_types(torch.float32, dtype)) * (math.sqrt(d) / bias_unit(d))
    if x.dtype == dtype:  # nothing is rounded
        return F.pad(x[..., None], (0, padded_width(d) - d - 1))
    high = x.to(dtype)
    low = (x - high).detach().to(dtype)  # all of the gradient flows through `high`
    return F.pad(torch.stack([high, low], dim=-1), (0, padded_width(d) - d - 2))


def augment(q, k, v, key_bias):
    """Move the bias into the dot product: q' . k' = q . k + sqrt(d) log w.

    A key carries its own bias, also into a cache; MASKED there hides it.
    (B, *, N, d) -> (B, *, N, d'); None changes nothing.
    """
    if key_bias is None:
        return q, k, v
    # Reading note 4: the printed (QK^T + q_extra k_extra^T) / sqrt(d + 1) rescales QK^T as well.
    # With sqrt(d) log w from the extra channels and the scale kept at 1/sqrt(d) it is exact.
    d = q.size(-1)
    of_keys = key_channels(key_bias, d, k.dtype)[:, None]  # (B, 1, N, d'-d), for all G key heads
    q = _append(q, query_channels(d, q.dtype, q.device))
    return q, _append(k, of_keys), F.pad(v, (0, padded_width(d) - d))


def _append(x, channels):
    """(B, *, N, d) -> (B, *, N, d'), in a single copy."""
    return torch.cat([x, channels.expand(*x.shape[:-1], -1)], dim=-1)


def sdpa(q, k, v, key_bias):
    """Through torch's fused kernels: no N x N matrix in memory, neither forward nor backward."""
    return attend_causally(*augment(q, k, v, key_bias), q.size(-1))


def attend_causally(q, k, v, d, mask=None):
    """Attention of q (B, H, N, d') and k, v (B, G, N, d') that `augment` made of width d. With a
    mask (.., N, M), which says who sees whom of M keys, it is that instead of causal."""
    grouped = q.size(1) != k.size(1)
    if grouped and q.is_cuda and (q.dtype not in HALF or mask is not None):
        # On CUDA the kernel that shares keys is for half precision, and knows no mask: without
        # it there would be N x N scores.
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=1 / math.sqrt(d), enable_gqa=grouped
    )
    return out[..., :d]


def fa2(q, k, v, key_bias):
    """The same through the flash-attn package, whose layout is (B, N, H, d)."""
    from flash_attn import flash_attn_func

    d = q.size(-1)
    q, k, v = (x.transpose(1, 2) for x in augment(q, k, v, key_bias))
    out = flash_attn_func(q, k, v, causal=True, softmax_scale=1 / math.sqrt(d))
    return out.transpose(1, 2)[..., :d]


BACKENDS = {"eager": eager, "sdpa": sdpa, "fa2": fa2}


def soft_mask_attention(q, k, v, key_bias=None, backend=sdpa):
    """Causal attention in which key j is visible with weight w_j to every query (section 3.2.2).

    Args:
        q: (B, H, N, d). k, v: (B, G, N, d), with H a multiple of G.
        key_bias: (B, N), log w, at most 0; None is w = 1 everywhere, plain causal attention.
        backend: a function that is called with these four.

    Returns:
        (B, H, N, d), differentiable in q, k, v and key_bias.

    Raises:
        ValueError: shapes that do not fit together.
    """
    (B, H, N, d), G = q.shape, k.size(1)
    if k.shape != (B, G, N, d) or v.shape != k.shape:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit")
    if H % G:
        raise ValueError(f"{H} query heads cannot share {G} key heads: {H} % {G} != 0")
    if key_bias is not None and key_bias.shape != (B, N):
        raise ValueError(f"key_bias has shape {tuple(key_bias.shape)}, but q needs {(B, N)}")
    return backend(q, k, v, key_bias)


def attend_to_cache(q, k, v, d):
    """The last Q slots against all M cached ones, their own included: the form decoding uses.

    Args:
        q: (B, H, Q, d') and k, v: (B, G, M, d'), as they come out of `augment`.
        d: the head width before it was augmented.

    Returns:
        (B, H, Q, d).
    """
    (B, H, Q, width), (G, M) = q.shape, k.shape[1:3]
    q = q.reshape(B, G, -1, width)  # (B, G, H/G*Q, d'): a group's heads become queries
    mask = None  # one query sees everything
    if Q > 1:
        mask = torch.ones(Q, M, dtype=torch.bool, device=q.device).tril(M - Q).repeat(H // G, 1)
    with decoding_kernels(q.device):
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=1 / math.sqrt(d))
    return out[..., :d].reshape(B, H, Q, d)


def decoding_kernels(device):
    """The context in which decoding attends: on CUDA any kernel but cuDNN's, which plans each new
    shape for 0.4 s. Training has a handful of shapes, decoding a new one for almost every slot."""
    if device.type != "cuda":
        return nullcontext()
    kinds = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    return sdpa_kernel(list(kinds))


def show():
    """The paper's figure of the soft mask: 3 tokens, K = 2, ours and the printed index."""
    T, S = 3, 3
    N = T * S
    log_w = torch.tensor([[1, 0.7, 0.1], [1, 0.4, 1e-9], [1, 0.9, 0.6]]).log()  # (T, K+1)
    printed = F.pad(log_w[:, :-1], (1, 0))  # reading note 1: one slot later
    names = [name for t in (1, 2, 3) for name in (f"x{t}", f"h{t}0", f"h{t}1")]
    figures = []
    for bias in (log_w, printed):
        q = torch.zeros(1, 1, N, N)  # with k = q and v = I the mask comes out, normalised
        out = eager(q, q, torch.eye(N)[None, None], bias.reshape(1, N))[0, 0]
        figures.append(out / out[:, :1])  # x1 is always fully visible
    print(f"{'our index: slot k is masked by w_k':52}the printed index: h(k) is masked by w_k")
    print("   ".join(4 * " " + "".join(f"{name:>5}" for name in names) for _ in figures))
    for i, name in enumerate(names):
        rows = ["".join(f"{m:5.1f}" for m in figure[i, : i + 1]) for figure in figures]
        print(f"{name:4}{rows[0]:45}   {name:4}{rows[1]}")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(show, description=__doc__))
