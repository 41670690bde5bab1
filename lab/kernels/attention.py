"""Further forms of soft-mask attention, what is installed, and which form is fastest here.

Each has the arguments of `attention.eager` and is tested against it.

    exact          sdpa with log w to 16 bits in half precision
    cudnn, flash   the same through torch's kernel of that name
    flex           compiled by torch's FlexAttention, where log w needs no channel
"""

import math
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import BACKENDS, SHORT, fa2, has_flash_attn
from lab.kernels.channels import HALF, attend, augment
from model import UserError


def exact(q, k, v, log_w):
    """As attention.sdpa, with log w to 16 bits in half precision."""
    return attend(*augment(q, k, v, log_w), q.size(-1))


def cudnn(q, k, v, log_w):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return exact(q, k, v, log_w)


def flash(q, k, v, log_w):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return exact(q, k, v, log_w)


def flex(q, k, v, log_w):
    """Through FlexAttention: compiled for the GPU, without N x N scores and without a channel. Also of n N
    keys, see attend_to_slots."""
    from lab.kernels import flex  # here, since it takes seconds

    run, N = flex.compiled() if q.is_cuda else flex.biased, q.size(2)
    return run(q, k, v, log_w, flex.causal_blocks(N, q.device, k.size(2) // N))


def attend_to_slots(q, k, v, log_w, backend=None):
    """One slot of all tokens against all slots so far: token t sees those of the tokens up to t.

    Args:
        q: (B, H, T, d). k, v: (B, G, n T, d), log_w: (B, n T): slot 0 of all tokens, then slot 1, ..
        backend: `flex` leaves out the half that nobody sees. Any other one: on a CPU a short text attends
            by the definition, else it is torch's fused attention with a mask, which runs everywhere.

    Returns:
        (B, H, T, d).
    """
    (_, H, T, d), G, n = q.shape, k.size(1), k.size(2) // q.size(2)
    if backend is flex and n > 1:
        return flex(q, k, v, log_w)
    if q.device.type == "cpu" and n * T <= SHORT:
        k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
        M = torch.full((T, T), -torch.inf).triu(1).repeat(1, n)
        scores = q @ k.mT / math.sqrt(d) + (log_w[:, None, None, :] + M)
        return scores.softmax(-1).to(v.dtype) @ v
    mask = None if n == 1 else torch.ones(T, T, dtype=torch.bool, device=q.device).tril().repeat(1, n)
    return attend(*augment(q, k, v, log_w), d, mask)


# -- Which of them ---------------------------------------------------------------------------------

ON_CUDA = dict(cudnn=cudnn, flash=flash, fa2=fa2, flex=flex)
FORMS = BACKENDS | dict(exact=exact) | ON_CUDA


def missing(name, device, dtype):
    """What a backend lacks for tensors of `dtype` on `device`, in words."""
    if name not in ON_CUDA:
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
        raise UserError(f"attention backend {name!r} is not one of {', '.join(FORMS)}")
    if needs := missing(name, device, dtype):
        raise UserError(f"attention backend {name!r} needs {' and '.join(needs)}; use 'sdpa', or 'auto'")
    return FORMS[name]


def fastest(shape, G, device, dtype, *, biased=True, compiled=False, slots=1):
    """The name of the fastest form, forward and backward: measured on CUDA; elsewhere `auto` knows it.

    Args:
        shape: (B, H, N, d) of the queries. G: key heads. biased: whether keys have a log w.
        compiled: whether it will be part of a compiled block, which flex breaks into pieces.
        slots: n of `attend_to_slots`; 1 for plain causal attention.

    Raises:
        UserError: none of them runs.
    """
    if device.type != "cuda":
        return "auto"
    names = [name for name in ("exact", *ON_CUDA) if not missing(name, device, dtype)]
    if compiled or (slots == 1 and (shape[-1] % 64 or not biased)):
        # To compile takes a minute: only where one more channel makes the heads of the others wider, or
        # where the others have a mask to read.
        names.remove("flex")
    if slots > 1:
        names = [name for name in names if name in ("exact", "flex")]
    times, failed = {}, {}
    for name in names:
        try:
            times[name] = median(milliseconds(name, shape, G, biased, slots, device=device, dtype=dtype))
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
        form = lambda *inputs: attend_to_slots(*inputs, FORMS[name])  # noqa: E731
    sizes = (H, N), (G, slots * N), (G, slots * N)
    leaves = [torch.randn(B, *size, d, **of_tensors).requires_grad_() for size in sizes]
    gradient, log_w = torch.randn_like(leaves[0]), None
    if biased or slots > 1:  # the grid asks for one always, of zeros
        log_w = (-5 * torch.rand(B, slots * N, device=gradient.device)).requires_grad_(biased)
    inputs, pairs = [*leaves, log_w], []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.grad(form(*inputs), inputs if biased else leaves, gradient)
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs[3:]]  # the first ones plan and compile
