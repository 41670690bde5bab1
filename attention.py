"""Causal attention with a soft mask on keys: three implementations of one function.

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
1/sqrt(d): then a flash kernel that knows nothing of biases adds log w to every score.

    python attention.py      the soft mask as a matrix; the three forms compared
"""

import math
from functools import lru_cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from runtime import UserError

MASKED = -1e4  # exp(-1e4) is 0; times sqrt(d) it stays finite in float32 and bfloat16
BACKENDS = ("auto", "eager", "sdpa", "fa2")


def eager(q, k, v, key_bias):
    """The definition, with the N x N scores written out. The reference for the other forms."""
    N, d = q.shape[-2:]
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))  # (B, H, N, d)
    scores = q @ k.mT / math.sqrt(d)  # (B, H, N, N)
    if key_bias is not None:
        scores = scores + key_bias[:, None, None, :]
    causal = torch.ones(N, N, dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~causal, -torch.inf).softmax(-1).to(v.dtype) @ v


def augment(q, k, v, key_bias):
    """Move the bias into the dot product: q' . k' = q . k + sqrt(d) log w.

    d' is d + 1 rounded up to a multiple of 8, which the kernels want. Only keys carry their bias,
    so a cached key brings it along. (B, *, N, d) -> (B, *, N, d'); None changes nothing.
    """
    if key_bias is None:
        return q, k, v
    # Reading note 4: the printed (QK^T + q_extra k_extra^T) / sqrt(d + 1) rescales QK^T as well.
    # With sqrt(d) in the query's extra channel and the scale kept at 1/sqrt(d) it is exact.
    d = q.size(-1)
    pad = -(d + 1) % 8
    bias = key_bias[:, None, :, None].to(k.dtype)  # (B, 1, N, 1), the same for all G key heads
    q = _append(q, q.new_full((1, 1, 1, 1), math.sqrt(d)), pad)
    return q, _append(k, bias, pad), F.pad(v, (0, pad + 1))


def _append(x, channel, pad):
    """(B, *, N, d) -> (B, *, N, d + 1 + pad): one more feature, then zeros, in a single copy."""
    zeros = x.new_zeros(()).expand(*x.shape[:-1], pad)
    return torch.cat([x, channel.expand(*x.shape[:-1], 1), zeros], dim=-1)


def sdpa(q, k, v, key_bias):
    """Through torch's fused kernels: no N x N matrix in memory, neither forward nor backward."""
    return attend_causally(*augment(q, k, v, key_bias), q.size(-1))


def attend_causally(q, k, v, d):
    """Attention of q (B, H, N, d') and k, v (B, G, N, d') that `augment` made of width d."""
    grouped = q.size(1) != k.size(1)
    if grouped and q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        # Only the half-precision CUDA kernel shares keys; float32 would fall to N x N scores.
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=1 / math.sqrt(d), enable_gqa=grouped
    )
    return out[..., :d]


def fa2(q, k, v, key_bias):
    """The same through the flash-attn package, whose layout is (B, N, H, d)."""
    from flash_attn import flash_attn_func

    d = q.size(-1)
    q, k, v = (x.transpose(1, 2) for x in augment(q, k, v, key_bias))
    out = flash_attn_func(q, k, v, causal=True, softmax_scale=1 / math.sqrt(d))
    return out.transpose(1, 2)[..., :d]


@lru_cache
def pick_backend(name, device, dtype=torch.bfloat16):
    """Resolve 'auto' for tensors of `dtype` on `device`, and refuse what cannot run there.

    Raises:
        ValueError: an unknown name.
        UserError: 'fa2' where the flash-attn kernels cannot run.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not one of {', '.join(BACKENDS)}")
    if name not in ("auto", "fa2"):
        return name
    needs = []
    if torch.device(device).type != "cuda":
        needs.append(f"a CUDA device (this is {torch.device(device).type})")
    if dtype not in (torch.float16, torch.bfloat16):
        needs.append(f"half precision (this is {dtype})")
    if find_spec("flash_attn") is None:
        needs.append("the package flash-attn (not installed)")
    if name == "fa2" and needs:
        raise UserError(f"attention backend 'fa2' needs {' and '.join(needs)}; use 'sdpa'")
    return "sdpa" if needs else "fa2"


def soft_mask_attention(q, k, v, key_bias=None, backend="sdpa"):
    """Causal attention in which key j is visible with weight w_j to every query (section 3.2.2).

    Args:
        q: (B, H, N, d). k, v: (B, G, N, d), with H a multiple of G.
        key_bias: (B, N), log w, at most 0; None is w = 1 everywhere, plain causal attention.
        backend: 'eager', 'sdpa', 'fa2', or 'auto' (fa2 where it can run, else sdpa).

    Returns:
        (B, H, N, d), differentiable in q, k, v and key_bias.

    Raises:
        ValueError: shapes that do not fit together.
        UserError: a backend that cannot run here.
    """
    (B, H, N, d), G = q.shape, k.size(1)
    if k.shape != (B, G, N, d) or v.shape != k.shape:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit")
    if H % G:
        raise ValueError(f"{H} query heads cannot share {G} key heads: {H} % {G} != 0")
    if key_bias is not None and key_bias.shape != (B, N):
        raise ValueError(f"key_bias has shape {tuple(key_bias.shape)}, but q needs {(B, N)}")
    if backend not in ("eager", "sdpa"):
        backend = pick_backend(backend, q.device, q.dtype)
    return {"eager": eager, "sdpa": sdpa, "fa2": fa2}[backend](q, k, v, key_bias)


def attend_to_cache(q, k, v, d):
    """The last Q slots against all M cached ones, their own included: the form decoding uses.

    Args:
        q: (B, H, Q, d') and k, v: (B, G, M, d'), as they come out of `augment`.
        d: the head width before it was augmented.

    Returns:
        (B, H, Q, d).
    """
    (B, H, Q, width), (G, M) = q.shape, k.shape[1:3]
    q = q.reshape(B, G, -1, width)  # (B, G, H/G*Q, d'): the heads of a group are its queries
    mask = None  # one query sees everything
    if Q > 1:
        mask = torch.ones(Q, M, dtype=torch.bool, device=q.device).tril(M - Q).repeat(H // G, 1)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=1 / math.sqrt(d))
    return out[..., :d].reshape(B, H, Q, d)


def print_mask_figure():
    """The paper's figure of the soft mask: 3 tokens, K = 2, ours and the printed index."""
    T, S = 3, 3
    N = T * S
    log_w = torch.tensor([[1, 0.7, 0.1], [1, 0.4, 1e-9], [1, 0.9, 0.6]]).log()  # (T, K+1)
    printed = F.pad(log_w[:, :-1], (1, 0))  # reading note 1: one slot later
    names = [name for t in (1, 2, 3) for name in (f"x{t}", f"h{t}0", f"h{t}1")]
    figures = []
    for bias in (log_w, printed):
        q = torch.zeros(1, 1, N, N)  # q = k = 0 and v = 1: what comes out is the mask, normalised
        out = eager(q, q, torch.eye(N)[None, None], bias.reshape(1, N))[0, 0]
        figures.append(out / out[:, :1])  # x1 is always fully visible
    print(f"{'our index: slot k is masked by w_k':52}the printed index: h(k) is masked by w_k")
    print("   ".join(4 * " " + "".join(f"{name:>5}" for name in names) for _ in figures))
    for i, name in enumerate(names):
        rows = ["".join(f"{m:5.1f}" for m in figure[i, : i + 1]) for figure in figures]
        print(f"{name:4}{rows[0]:45}   {name:4}{rows[1]}")


def print_comparison(N=1024):
    """Every backend that runs here against `eager`: differences, and memory kept for backward."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, N, 56), torch.randn(1, 2, N, 56), torch.randn(1, 2, N, 56)
    inputs = [q, k, v, -5 * torch.rand(1, N)]
    print(f"\nMaximum difference from eager (N={N}, H=4, G=2, d=56), and memory kept for backward")
    print(f"{'':8}{'out':>10}{'dq':>10}{'dk':>10}{'dv':>10}{'dbias':>10}{'MiB':>8}")
    reference = None
    for backend in ("eager", "sdpa", "fa2"):
        device, dtype = ("cuda", torch.bfloat16) if backend == "fa2" else ("cpu", torch.float32)
        if backend == "fa2" and not (torch.cuda.is_available() and find_spec("flash_attn")):
            print("fa2     needs CUDA and the package flash-attn: not run")
            continue
        leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
        saved = {}

        def pack(x, saved=saved):
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = soft_mask_attention(*leaves, backend=backend)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        results = [x.cpu().float() for x in (out, *grads)]
        reference = reference or results
        gaps = [(a - b).abs().max() for a, b in zip(results, reference, strict=True)]
        print(
            f"{backend:8}"
            + "".join(f"{g:10.1e}" for g in gaps)
            + f"{sum(saved.values()) / 2**20:8.1f}"
        )


if __name__ == "__main__":
    print_mask_figure()
    print_comparison()
