"""Causal attention with a soft mask on keys: one function, in several implementations.

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
1/sqrt(d): then a flash kernel that knows nothing of biases adds log w to every score. (The code
shares the product out among factors that half precision holds exactly: key_channels.)

    backend        kernel
    eager          none: the definition, with the N x N scores in memory
    kept           none: their softmax is kept for the backward pass; short texts on a CPU
    sdpa           the one that torch takes
    cudnn, flash   the one of that name in torch
    fa2            the package flash-attn
    fa4            the package flash-attn-4, called by torch
    flex           compiled by torch's FlexAttention, where the bias needs no channel

    python attention.py      the soft mask as a matrix; the forms that run here compared
"""

import math
import pkgutil
from contextlib import nullcontext
from functools import lru_cache
from statistics import median

import torch
import torch.nn.functional as F
import tyro
from torch.autograd.function import once_differentiable
from torch.nn import attention as kernels
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from runtime import UserError, command_line

MASKED = -1e4  # exp(-1e4) is 0, and what a key carries of it is finite in float16, too
BACKENDS = ("auto", "eager", "kept", "sdpa", "cudnn", "flash", "fa2", "fa4", "flex")
ANYWHERE = ("eager", "kept", "sdpa")  # on every device, in every precision
HALF = (torch.float16, torch.bfloat16)
SHORT = 512  # slots up to which a CPU trains faster in half precision with `kept`
COMPILED = 64  # forms of one function that torch.compile may make, one for each shape; usually 8


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
    """The power of two next to sqrt(d): what a query's channels hold is exact in any precision."""
    return 2.0 ** round(math.log2(d) / 2)


def query_channels(d, dtype, device=None):
    """What every query carries behind its d numbers, (d'-d,)."""
    channels = torch.zeros(padded_width(d) - d, dtype=dtype, device=device)
    channels[:2] = bias_unit(d)
    return channels


def key_channels(key_bias, d, dtype):
    """What a key with that bias carries behind its d numbers, (...) -> (..., d'-d).

    By the query's channels it makes sqrt(d) log w. In half precision the second channel holds what
    the rounding of the first one loses, so that 16 bits of log w arrive in bfloat16.
    """
    x = key_bias.to(torch.promote_types(torch.float32, dtype)) * (math.sqrt(d) / bias_unit(d))
    if x.dtype == dtype:  # nothing is rounded
        return F.pad(x[..., None], (0, padded_width(d) - d - 1))
    high = x.to(dtype)
    low = (x - high).detach().to(dtype)  # all of the gradient flows through `high`
    return F.pad(torch.stack([high, low], dim=-1), (0, padded_width(d) - d - 2))


def augment(q, k, v, key_bias):
    """Move the bias into the dot product: q' . k' = q . k + sqrt(d) log w.

    Only keys carry their bias, so a cached key brings it along, and one with the channels of MASKED
    is hidden. (B, *, N, d) -> (B, *, N, d'); None changes nothing.
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


def attend_causally(q, k, v, d):
    """Attention of q (B, H, N, d') and k, v (B, G, N, d') that `augment` made of width d."""
    grouped = q.size(1) != k.size(1)
    if grouped and q.is_cuda and q.dtype not in HALF:
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


def soft_mask_attention(q, k, v, key_bias=None, backend="sdpa"):
    """Causal attention in which key j is visible with weight w_j to every query (section 3.2.2).

    Args:
        q: (B, H, N, d). k, v: (B, G, N, d), with H a multiple of G.
        key_bias: (B, N), log w, at most 0; None is w = 1 everywhere, plain causal attention.
        backend: one of BACKENDS; 'auto' is fa2 where it can run, else sdpa.

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
    if backend not in ANYWHERE:
        backend = pick_backend(backend, q.device, q.dtype)
    return FORMS[backend](q, k, v, key_bias)


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


# -- More forms, and which is the fastest ----------------------------------------------------------


def kept(q, k, v, key_bias):
    (B, H, N, d), shared = q.shape, q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))  # (B, H, N, d)
    q, k, v = (x.reshape(B * H, N, -1) for x in augment(q, k, v, key_bias))
    return KeptSoftmax.apply(q, k, v, 1 / math.sqrt(d)).view(B, H, N, -1)[..., :d]


class KeptSoftmax(torch.autograd.Function):
    """Causal attention of q, k, v (B*H, N, d'), with P = softmax(scale q k^T + M) in memory.

    Its backward pass is four products where flash kernels compute P again. In half precision scores
    are float32, P and the products are not, as in these kernels.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale):
        wide, N = torch.promote_types(q.dtype, torch.float32), q.size(1)
        with torch.autocast(q.device.type, enabled=False):
            M = torch.full((N, N), -torch.inf, dtype=wide, device=q.device).triu(1)
            scores = torch.baddbmm(M, q.to(wide), k.to(wide).mT, alpha=scale)
            P = scores.softmax(-1).to(v.dtype)
            out = P @ v
        ctx.save_for_backward(q, k, v, P, out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, P, out = ctx.saved_tensors
        # dS = P (grad v^T - D), D the sum of grad out, which is a channel of that product.
        D = (grad * out).sum(-1, keepdim=True)
        grad_D, v_1 = torch.cat([grad, D], dim=-1), torch.cat([v, -torch.ones_like(D)], dim=-1)
        dS = (grad_D @ v_1.mT).mul_(P).mul_(ctx.scale)
        return dS @ k, dS.mT @ q, P.mT @ grad, None


def cudnn(q, k, v, key_bias):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v, key_bias)


def flash(q, k, v, key_bias, version=None):
    """Through torch's flash kernel: its own, or the 'FA4' of a package."""
    use_flash(version)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q, k, v, key_bias)


def use_flash(version):
    """Make 'FA4' torch's flash kernel, or, None, its own again. The backward pass takes it, too."""
    if has_versions() and kernels.current_flash_attention_impl() != version:
        if version:
            kernels.activate_flash_attention_impl(version)
        else:
            kernels.restore_flash_attention_impl()


def fa4(q, k, v, key_bias):
    return flash(q, k, v, key_bias, "FA4")


def flex(q, k, v, key_bias):
    """Through FlexAttention: compiled for the GPU, without N x N scores and without a channel."""
    run = compiled_flex() if q.is_cuda else biased_flex
    return run(q, k, v, key_bias, causal_blocks(q.size(2), q.device))


def biased_flex(q, k, v, key_bias, blocks):
    def add_bias(score, b, h, i, j):
        return score + key_bias[b, j]

    bias = None if key_bias is None else add_bias
    return flex_attention(q, k, v, bias, blocks, enable_gqa=q.size(1) != k.size(1))


@lru_cache
def compiled_flex():
    torch._dynamo.config.recompile_limit = COMPILED
    return torch.compile(biased_flex, dynamic=False)


@torch.compiler.disable  # made once, not in every compiled block
@lru_cache
def causal_blocks(N, device):
    """Which blocks of an N x N score matrix have anything to see."""
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device=device)


FORMS = dict(eager=eager, kept=kept, sdpa=sdpa, cudnn=cudnn, flash=flash)
FORMS |= dict(fa2=fa2, fa4=fa4, flex=flex)


def has_versions():
    """Whether this torch can change the version of its flash kernel, and back."""
    return hasattr(kernels, "restore_flash_attention_impl")


@lru_cache
def installed(name):
    """Whether 'module:name' can be imported. (To find the module is not enough: a part of
    flash-attn-4 stands where flash-attn would.)"""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def missing(name, device, dtype):
    """What a backend lacks for tensors of `dtype` on `device`, in words."""
    if name in ANYWHERE:
        return []
    found = {f"a CUDA device (this is {device.type})": device.type == "cuda"}
    if name != "flex":
        found[f"half precision (this is {dtype})"] = dtype in HALF
    if name == "fa2":
        package = installed("flash_attn:flash_attn_func")
        found["the package flash-attn (not installed)"] = package
    if name == "fa4":
        package = installed("flash_attn.cute.interface:_flash_attn_fwd")
        found["the package flash-attn-4 (not installed)"] = package
        found[f"torch 2.13 (this is {torch.__version__})"] = has_versions()
    return [what for what, is_there in found.items() if not is_there]


@torch.compiler.assume_constant_result  # in a compiled block
def pick_backend(name, device, dtype=torch.bfloat16):
    """Resolve 'auto' for tensors of `dtype` on `device`, and refuse what cannot run there.

    Raises:
        ValueError: an unknown name.
        UserError: a backend that cannot run there.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not one of {', '.join(BACKENDS)}")
    device = torch.device(device)
    if name == "auto":
        return "sdpa" if missing("fa2", device, dtype) else "fa2"
    if needs := missing(name, device, dtype):
        raise UserError(
            f"attention backend {name!r} needs {' and '.join(needs)}; use 'sdpa', or 'auto'"
        )
    return name


def fastest_backend(shape, G, device, dtype, *, biased=True, compiled=False):
    """The backend with the fastest forward and backward pass: measured on CUDA, else by a rule.

    Args:
        shape: (B, H, N, d) of the queries. G: key heads. biased: whether keys have a bias.
        compiled: whether it will be part of a compiled block, which flex breaks into pieces.

    Raises:
        UserError: none of them runs.
    """
    if device.type != "cuda":
        short = device.type == "cpu" and dtype in HALF and shape[2] <= SHORT
        return "kept" if short else "sdpa"
    names = [name for name in BACKENDS[3:] if not missing(name, device, dtype)]
    if shape[-1] % 64 or not biased or compiled:
        # To compile takes a minute: only where one more channel makes the others' heads wider.
        names.remove("flex")
    times, failed = {}, {}
    for name in names:
        try:
            times[name] = median(milliseconds(name, shape, G, biased, device=device, dtype=dtype))
        except Exception as error:  # a kernel of others fails in any way
            failed[name] = (str(error).strip() or repr(error)).splitlines()[0]
    use_flash(None)
    torch.cuda.empty_cache()
    measured = ", ".join(f"{name} {times[name]:.2f}" for name in sorted(times, key=times.get))
    reasons = "".join(f"; not {name}: {reason:.80}" for name, reason in failed.items())
    line = f"attention of {tuple(shape)}, ms forward and backward: {measured or 'none'}{reasons}"
    if not times:
        raise UserError(f"{line}; use a smaller --micro-batch-size")
    print(line, flush=True)
    return min(times, key=times.get)


def milliseconds(name, shape, G, biased, **of_tensors):
    """Durations of some forward and backward passes, by the clock of the GPU."""
    B, H, N, d = shape
    leaves = [torch.randn(B, heads, N, d, **of_tensors).requires_grad_() for heads in (H, G, G)]
    if biased:
        leaves.append((-5 * torch.rand(B, N, device=leaves[0].device)).requires_grad_())
    gradient, pairs = torch.randn_like(leaves[0]), []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.grad(soft_mask_attention(*leaves, backend=name), leaves, gradient)
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs[3:]]  # the first ones plan and compile


# -- What `python attention.py` shows --------------------------------------------------------------


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
    gpu = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for backend in BACKENDS[1:]:
        device, dtype = gpu, torch.bfloat16
        if backend in ANYWHERE:
            device, dtype = torch.device("cpu"), torch.float32
        if needs := missing(backend, device, dtype):
            print(f"{backend:8}needs {' and '.join(needs)}: not run")
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


def show():
    print_mask_figure()
    print_comparison()


if __name__ == "__main__":
    command_line(lambda: tyro.cli(show, description=__doc__))
