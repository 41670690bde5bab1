"""Further forms of soft-mask attention, what is installed, and which form is fastest here.

Each has the arguments of `attention.eager` and is tested against it.

    dense          the softmax is kept for the backward pass; short texts on a CPU
    cudnn, flash   torch's kernel of that name
    flex           compiled by torch's FlexAttention, where the bias needs no channel
"""

import math
from functools import lru_cache
from statistics import median

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention import HALF, attend_causally, augment, eager, fa2, sdpa
from runtime import UserError

ANYWHERE = ("eager", "dense", "sdpa")  # on every device, in every precision
SHORT = 512  # slots up to which a CPU trains faster in half precision with `dense`
COMPILED = 64  # forms of one function that torch.compile may make, one for each shape; usually 8


def dense(q, k, v, key_bias):
    return attend_densely(*augment(q, k, v, key_bias), q.size(-1))


def attend_densely(q, k, v, d):
    """As attention.attend_causally; also of n N keys, see attend_to_slots."""
    (B, H, N, _), shared = q.shape, q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))  # (B, H, n N, d')
    q, k, v = (x.reshape(B * H, -1, x.size(-1)) for x in (q, k, v))
    return DenseSoftmax.apply(q, k, v, 1 / math.sqrt(d)).view(B, H, N, -1)[..., :d]


class DenseSoftmax(torch.autograd.Function):
    """Causal attention of q (B*H, N, d') and k, v (B*H, n N, d'), with P = softmax(scale q k^T + M)
    in memory.

    Its backward pass is four products where flash kernels compute P again. In half precision scores
    are float32, P and the products are not, as in these kernels.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale):
        wide, N = torch.promote_types(q.dtype, torch.float32), q.size(1)
        with torch.autocast(q.device.type, enabled=False):
            M = torch.full((N, N), -torch.inf, dtype=wide, device=q.device).triu(1)
            M = M.repeat(1, k.size(1) // N)
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
        grad_D, v_1 = torch.cat([grad, D], dim=-1), F.pad(v, (0, 1), value=-1.0)
        dS = (grad_D @ v_1.mT).mul_(P).mul_(ctx.scale)
        return dS @ k, dS.mT @ q, P.mT @ grad, None


def attend_to_slots(q, k, v, d, backend):
    """One slot of all tokens against all slots so far: token t sees those of the tokens up to t.

    Args:
        q: (B, H, T, d'). k, v: (B, G, n T, d'), slot 0 of all tokens, then slot 1, .. As `augment`
            made them, of width d.
        backend: `dense`, `flex`, or another one: then torch's fused attention with a mask of
            T x n T, which runs everywhere. On CUDA `fastest` measures it against `flex`, which
            leaves out the half that nobody sees.

    Returns:
        (B, H, T, d).
    """
    if backend is dense:
        return attend_densely(q, k, v, d)
    T, n = q.size(2), k.size(2) // q.size(2)
    if n == 1:
        return attend_causally(q, k, v, d)
    if backend is flex:
        run = compiled_flex() if q.is_cuda else biased_flex
        return run(q, k, v, None, causal_blocks(T, q.device, n), 1 / math.sqrt(d))[..., :d]
    mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().repeat(1, n)
    return attend_causally(q, k, v, d, mask)


def cudnn(q, k, v, key_bias):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v, key_bias)


def flash(q, k, v, key_bias):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q, k, v, key_bias)


def flex(q, k, v, key_bias):
    """Through FlexAttention: compiled for the GPU, without N x N scores and without a channel."""
    run = compiled_flex() if q.is_cuda else biased_flex
    return run(q, k, v, key_bias, causal_blocks(q.size(2), q.device))


def biased_flex(q, k, v, key_bias, blocks, scale=None):
    def add_bias(score, b, h, i, j):
        return score + key_bias[b, j]

    bias = None if key_bias is None else add_bias
    return flex_attention(q, k, v, bias, blocks, scale, enable_gqa=q.size(1) != k.size(1))


@lru_cache
def compiled_flex():
    torch._dynamo.config.recompile_limit = COMPILED
    return torch.compile(biased_flex, dynamic=False)


@torch.compiler.disable  # made once, not in every compiled block
@lru_cache
def causal_blocks(N, device, n=1):
    """Which blocks of an N x n N score matrix have anything to see, as in `attend_to_slots`."""
    return create_block_mask(lambda b, h, i, j: i >= j % N, None, None, N, n * N, device=device)


ON_CUDA = dict(cudnn=cudnn, flash=flash, fa2=fa2, flex=flex)
FORMS = dict(eager=eager, dense=dense, sdpa=sdpa) | ON_CUDA


@lru_cache
def has_flash_attn():
    try:
        from flash_attn import flash_attn_func  # noqa: F401
    except ImportError:
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
        found["the package flash-attn (not installed)"] = has_flash_attn()
    return [what for what, is_there in found.items() if not is_there]


def find(name, device, dtype=torch.bfloat16):
    """The form of attention of that name, for tensors of `dtype` on `device`.

    Raises:
        UserError: an unknown name, or a form that cannot run there.
    """
    if name not in FORMS:
        raise UserError(f"attention backend {name!r} is not one of auto, {', '.join(FORMS)}")
    if needs := missing(name, device, dtype):
        raise UserError(
            f"attention backend {name!r} needs {' and '.join(needs)}; use 'sdpa', or 'auto'"
        )
    return FORMS[name]


def fastest(shape, G, device, dtype, *, biased=True, compiled=False, slots=1):
    """The name of the fastest form, forward and backward: measured on CUDA, else by a rule.

    Args:
        shape: (B, H, N, d) of the queries. G: key heads. biased: whether keys have a bias.
        compiled: whether it will be part of a compiled block, which flex breaks into pieces.
        slots: n of `attend_to_slots`; 1 for plain causal attention.

    Raises:
        UserError: none of them runs.
    """
    if device.type != "cuda":
        short = device.type == "cpu" and dtype in HALF and shape[2] * slots <= SHORT
        return "dense" if short else "sdpa"
    names = [name for name in ("sdpa", *ON_CUDA) if not missing(name, device, dtype)]
    if compiled or (slots == 1 and (shape[-1] % 64 or not biased)):
        # To compile takes a minute: only where one more channel makes the others' heads wider, or
        # where the others have a mask to read.
        names.remove("flex")
    if slots > 1:
        names = [name for name in names if name in ("sdpa", "flex")]
    times, failed = {}, {}
    for name in names:
        try:
            how = dict(device=device, dtype=dtype)
            times[name] = median(milliseconds(name, shape, G, biased, slots, **how))
        except Exception as error:  # a kernel of others fails in any way
            failed[name] = (str(error).strip() or repr(error)).splitlines()[0]
    torch.cuda.empty_cache()
    measured = ", ".join(f"{name} {times[name]:.2f}" for name in sorted(times, key=times.get))
    reasons = "".join(f"; not {name}: {reason:.80}" for name, reason in failed.items())
    line = f"attention of {tuple(shape)}, ms forward and backward: {measured or 'none'}{reasons}"
    if not times:
        raise UserError(f"{line}; use a smaller --micro-batch-size")
    print(line, flush=True)
    return min(times, key=times.get)


def milliseconds(name, shape, G, biased, slots, **of_tensors):
    """Durations of some forward and backward passes, by the clock of the GPU."""
    (B, H, N, d), form = shape, FORMS[name]
    if slots > 1:
        form = lambda *inputs: attend_to_slots(*augment(*inputs), d, FORMS[name])  # noqa: E731
    sizes = (H, N), (G, slots * N), (G, slots * N)
    leaves = [torch.randn(B, *size, d, **of_tensors).requires_grad_() for size in sizes]
    bias = -5 * torch.rand(B, slots * N, device=leaves[0].device)
    bias = bias.requires_grad_() if biased else None
    inputs = [*leaves, bias]
    leaves = inputs if biased else leaves
    gradient, pairs = torch.randn_like(leaves[0]), []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.grad(form(*inputs), leaves, gradient)
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs[3:]]  # the first ones plan and compile
