"""What makes a training step faster on a CPU. On a GPU torch's own kernels do it."""

import ctypes
import sys
from types import MethodType

import torch
from torch import nn
from torch.autograd.function import once_differentiable

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
GIB, MOST = 2**30, 2**25  # bytes; an older glibc takes no more than MOST for the latter


def keep_freed_memory():
    """Freed memory stays with the process, for the next tensor. On Linux with glibc.

    By default a large tensor is given back to the system, which clears every page of the next one.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, GIB)
        libc.mallopt(M_MMAP_THRESHOLD, GIB) or libc.mallopt(M_MMAP_THRESHOLD, MOST)


def use_fused_norms(model):
    """Let each RMSNorm of a model compute its gradient in one piece."""
    for norm in model.modules():
        if isinstance(norm, nn.RMSNorm):
            norm.forward = MethodType(fused_norm, norm)


def fused_norm(norm, x):
    """As norm(x)."""
    if not torch.is_grad_enabled():
        return nn.RMSNorm.forward(norm, x)
    return FusedNorm.apply(x, norm.weight, norm.eps)


class FusedNorm(torch.autograd.Function):
    """n w with n = x r, r = 1 / sqrt(mean x^2 + eps), of x (..., D) and w (D,)."""

    @staticmethod
    def forward(ctx, x, w, eps):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = length.square().div_(x.size(-1)).add_(eps).rsqrt_()
        n = x * r
        ctx.save_for_backward(n, r, w)
        return n * w

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        n, r, w = ctx.saved_tensors
        along = (grad * n).flatten(0, -2)  # (.., D)
        mean = torch.mv(along, w).view(r.shape) / w.numel()  # of grad w n
        return torch.addcmul(grad * w, n, mean, value=-1).mul_(r), along.sum(0), None
