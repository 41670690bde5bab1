"""What makes a training step of a Llama faster: fewer and larger operations in each block.

    attention    one product for queries, keys and values, and RoPE of all heads at once, at the
                 precision of the products
    swiglu       its input is cast to half precision once, where autocast casts for each product
    norm         on a CPU, the gradient of an RMSNorm in one piece

Only what the modules do in training is replaced; weights and names stay what they are, and a model
in evaluation mode computes as a loaded one does, to the last bit.
"""

from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from attention import soft_mask_attention
from kernels.attention import COMPILED
from model import Attention, Llama, SwiGLU


def use_fast_blocks(model, norms=True):
    """Let a model compute each block in fewer operations. Other backbones keep their own."""
    fast = {Attention: attention, SwiGLU: swiglu} | ({nn.RMSNorm: norm} if norms else {})
    if model.model.Block is Llama.Block:
        model.model.angles = MethodType(angles_of_all_heads, model.model)
        for module in model.modules():
            if type(module) in fast:
                module.forward = MethodType(fast[type(module)], module)


def compile_blocks(model):
    """Compile the blocks, for each length of a pass on its own: it has a few, and what is known of
    a shape makes the kernels faster."""
    torch._dynamo.config.recompile_limit = COMPILED
    for block in model.model.layers:
        block.compile(dynamic=False)


def angles_of_all_heads(llama, positions, dtype):
    """As the backbone has them in evaluation mode; in training side by side for all query and key
    heads, (.., N, (H+G)*d) each."""
    found = type(llama).angles(llama, positions, dtype)
    if not llama.training:
        return found
    heads = llama.config.num_attention_heads + llama.config.key_value_heads
    return [for_products(x.squeeze(1) if positions.dim() == 2 else x).tile(heads) for x in found]


def for_products(x):
    """x at the precision of the matrix products."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def attention(self, x, angles, key_bias, backend, cache):
    if not self.training:
        return Attention.forward(self, x, angles, key_bias, backend, cache)
    (B, N, _), d = x.shape, self.d
    weights = [linear.weight for linear in (self.q_proj, self.k_proj, self.v_proj)]
    qkv = F.linear(x, torch.cat(weights))  # (B, N, (H+2G)*d)
    qk, v = qkv.split(((self.H + self.G) * d, self.G * d), dim=-1)
    cos, sin = angles
    exchanged = qk.unflatten(-1, (-1, d)).roll(d // 2, -1).flatten(-2)
    qk = torch.addcmul(qk * cos, exchanged, sin).view(B, N, -1, d)
    q, k = qk.transpose(1, 2).split((self.H, self.G), dim=1)  # (B, heads, N, d)
    v = v.view(B, N, -1, d).transpose(1, 2)
    if cache is None:
        out = soft_mask_attention(q, k, v, key_bias, backend)
    else:
        out = cache.attend(q, k, v, key_bias)
    return self.o_proj(out.transpose(1, 2).reshape(B, N, -1))  # (B, N, D)


def swiglu(self, x):
    x = for_products(x) if self.training else x
    return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def norm(self, x):
    if not (self.training and torch.is_grad_enabled()):
        return nn.RMSNorm.forward(self, x)
    return FusedNorm.apply(x, self.weight, self.eps)


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
