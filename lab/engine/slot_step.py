"""The step of decoding: one slot of each of several sequences through the backbone.

As Llama.forward with one query a row, but made for small products, where starting an operation
takes longer than doing it. What can be done once for all steps is done when the weights are copied,
what can be done once for all layers before their loop, and what is left takes few operations.

code        shape                  meaning
A                                  rows: sequences that each run one slot
layers      L of (B, 2G, M, d')    keys and values of the slots before, see cache.py
d, d'                              head width without and with the channels of log w
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from attention import attend_to_cache
from lab.common import autocast
from lab.engine.cache import cache_width
from lab.engine.products import gated, matrix
from lab.kernels.channels import HALF, query_channels
from model import Llama, UserError


class Layer(NamedTuple):
    """The products of a block as one slot wants them, see products.py.

    Projections of one input are one, and the weight of a norm is part of the matrix behind it.
    """

    qkv: Callable  # D -> (H + 2G) d
    out: Callable  # H d -> D
    gate: Callable  # D -> F
    up: Callable  # D -> F
    down: Callable  # F -> D

    @classmethod
    def of(cls, block, *how):
        a, m = block.self_attn, block.mlp

        def product(*linears, norm=None):
            w = torch.cat([linear.weight for linear in linears])  # (out, in)
            return matrix(w if norm is None else w * norm.weight, *how)

        return cls(
            qkv=product(a.q_proj, a.k_proj, a.v_proj, norm=block.input_layernorm),
            out=product(a.o_proj),
            gate=product(m.gate_proj, norm=block.post_attention_layernorm),
            up=product(m.up_proj, norm=block.post_attention_layernorm),
            down=product(m.down_proj),
        )


class SlotStep:
    """A model's backbone for `batch_size` rows or fewer; see products.matrix for dtype, weights."""

    compiled = False

    def __init__(self, model, batch_size, dtype, weights="float32"):
        config, device = model.config, model.lm_head.weight.device
        self.H, self.G = config.num_attention_heads, config.G
        self.d, self.width = config.d, cache_width(model)
        how = dtype, batch_size, weights, self.compiled
        self.layers = [Layer.of(block, *how) for block in model.model.layers]
        self.weight, self.dtype = model.model.norm.weight, dtype
        self.eps = self.weight.new_tensor(config.rms_norm_eps)

        # One more: a row that has read its last token points behind it.
        positions = torch.arange(config.block_size + 1, device=device)
        cos, sin = model.model.angles(positions, dtype)  # (T+1, d) each
        # rotate_half in one operation: the halves change places, and the minus is part of sin.
        sin = torch.cat([-sin[:, : self.d // 2], sin[:, self.d // 2 :]], dim=-1)
        turned = torch.stack([cos, sin])  # (2, T+1, d)
        as_it_is = torch.stack([torch.ones_like(cos), torch.zeros_like(sin)])
        # Queries and keys are turned (kind 0), values are not (kind 1): (2, T+1, 2, 2, d/2).
        self.angles = torch.stack([turned, as_it_is], dim=2).unflatten(-1, (2, -1))
        self.kind = torch.tensor([0] * (self.H + self.G) + [1] * self.G, device=device)
        # Queries, keys and values of a slot. Behind each head is what augment appends: a number to
        # queries, log w to keys, zeros to values.
        shape = (batch_size, self.H + 2 * self.G, self.width)
        self.new = torch.zeros(shape, dtype=dtype, device=device)
        self.new[:, : self.H, self.d : self.d + 2] = query_channels(self.d, dtype)[:2]
        self.heads = torch.arange(batch_size * 2 * self.G, device=device).view(batch_size, -1)

    def norm(self, x):
        """RMSNorm without its weight, at the precision of the residual stream x (A, D)."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self.eps, length, length, value=1 / x.size(-1)).rsqrt()

    def __call__(self, x, cache, places, position, length, of_key, of_query=None):
        """(A, D) -> (A, D); the keys and values of the slot go into the cache.

        Args:
            x: (A, D) the slot's input.
            cache: of which each row sees the first `places`, more than any length.
            position, length: (A,) the token's place in the text, the slot's in the cache.
            of_key: (A, 1, c) channels of the slot's own key: log w, and on the grid the slot.
            of_query: (A, 1, c) channels of its query; None: the same for all.
        """
        (A, _), H, G, d, dtype = x.shape, self.H, self.G, self.d, self.dtype
        # Once for all layers. Values are turned by no angle: see self.kind.
        cos, sin = self.angles[:, position[:, None], self.kind]  # (A, H+2G, 2, d/2)
        new = self.new[:A]  # (A, H+2G, d')
        turned = new[..., :d].unflatten(-1, (2, -1))  # (A, H+2G, 2, d/2)
        q, k_v = new[:, :H].view(A, G, H // G, -1), new[:, H:]  # a group's heads are its queries
        k_v[:, :G, d : d + of_key.size(-1)] = of_key
        if of_query is not None:
            new[:, :H, d : d + of_query.size(-1)] = of_query
        heads = self.heads[:A] * cache.layers[0].size(2)
        at = (heads + length[:, None]).flatten()  # (A*2G,) the slot's places
        views = cache.views(A, places)
        for weights, kv, (keys, values) in zip(self.layers, cache.layers, views, strict=True):
            y = weights.qkv(self.norm(x).to(dtype)).view(A, H + 2 * G, 2, -1)
            torch.addcmul(y * cos, y.flip(2), sin, out=turned)  # RoPE, as model.apply_rotary
            kv.view(-1, self.width).index_copy_(0, at, k_v.reshape(-1, self.width))
            out = F.scaled_dot_product_attention(q, keys, values, scale=1 / math.sqrt(d))
            x = weights.out.added(x, out[..., :d].reshape(A, H * d))
            y = gated(weights.gate, weights.up, self.norm(x).to(dtype))
            x = weights.down.added(x, y)
        return self.norm(x) * self.weight


class CompiledStep(SlotStep):
    """As SlotStep, in operations that the compiler makes few loops of: nothing is written but the
    cache, and attention is spelled out."""

    compiled = True

    def __call__(self, x, cache, places, position, length, of_key, of_query=None):
        (A, _), H, G, d, width = x.shape, self.H, self.G, self.d, self.width
        cos, sin = self.angles[:, position[:, None], self.kind]  # (A, H+2G, 2, d/2)
        of_query = self.new[:A, :1, d:] if of_query is None else of_query

        def channels(y, heads):  # (A, 1, c) -> (A, heads, d'-d)
            return F.pad(y, (0, width - d - y.size(-1))).expand(A, heads, -1)

        behind = channels(of_query, H), channels(of_key, G), x.new_zeros(A, G, width - d)
        behind = torch.cat(behind, dim=1)  # (A, H+2G, d'-d)
        rows, heads = (torch.arange(n, device=x.device) for n in (A, 2 * G))
        for weights, kv in zip(self.layers, cache.layers, strict=True):
            y = weights.qkv(self.norm(x)).view(A, H + 2 * G, 2, -1)
            y = torch.cat([(y * cos + y.flip(2) * sin).flatten(2), behind], dim=-1)
            kv.index_put_((rows[:, None], heads, length[:, None]), y[:, H:])
            q, keys, values = y[:, :H].view(A, G, -1, 1, width), kv[:A, :G], kv[:A, G:]
            scores = (q * keys[:, :, None, :places]).sum(-1) / math.sqrt(d)  # (A, G, H/G, M)
            p = scores.softmax(-1)[..., None]
            out = (p * values[:, :, None, :places, :d]).sum(-2)  # (A, G, H/G, d)
            x = x + weights.out(out.reshape(A, H * d))
            y = self.norm(x)
            x = x + weights.down(F.silu(weights.gate(y)) * weights.up(y))
        return self.norm(x) * self.weight


class BackboneStep:
    """As SlotStep for any other backbone, through its own blocks: right, and slower."""

    def __init__(self, model, dtype):
        self.backbone, self.dtype = model.model, dtype

    def __call__(self, x, cache, places, position, length, of_key, of_query=None):
        views = cache.views(len(x), places)
        layers = [SlotLayer(*kv, length, of_key, of_query) for kv in views]
        with autocast(x.device, self.dtype if self.dtype in HALF else torch.float32):
            return self.backbone(x[:, None], position[:, None], None, cache=layers)[:, 0].to(x)


class SlotLayer:
    """One layer's attention of BackboneStep, where a LayerCache stands when one token is decoded.

    keys, values (A, G, M, d'): of the cache; length (A,): the slot's place in them.
    """

    def __init__(self, keys, values, length, of_key, of_query):
        self.keys, self.values, self.length = keys, values, length
        self.of_key, self.of_query = of_key, of_query

    def attend(self, q, k, v, log_w):
        """q (A, H, 1, d), k and v (A, G, 1, d) -> (A, H, 1, d). log w is in the channels already."""
        d, rows = q.size(-1), torch.arange(len(q), device=q.device)
        for places, new in ((self.keys, k), (self.values, v)):
            places[rows, :, self.length, :d] = new[:, :, 0].to(places.dtype)
        self.keys[rows, :, self.length, d : d + self.of_key.size(-1)] = self.of_key
        of_query = query_channels(d, q.dtype, q.device)[:2].expand(len(q), 1, 2)
        of_query = of_query if self.of_query is None else self.of_query.to(q.dtype)  # (A, 1, c)
        q = torch.cat([q, of_query[:, :, None].expand(*q.shape[:-1], -1)], dim=-1)
        q = F.pad(q, (0, self.keys.size(-1) - q.size(-1)))
        return attend_to_cache(q.to(self.keys.dtype), self.keys, self.values, d)


def make_step(model, batch_size, dtype, weights="float32", compiled=False):
    """The step of a model's backbone; see products.matrix for dtype and weights.

    Raises:
        UserError: weights of few bits, or a compiled pass, for another backbone than LLaMA.
    """
    if model.model.Block is Llama.Block:
        kind = CompiledStep if compiled else SlotStep
        return kind(model, batch_size, dtype, weights)
    if weights != "float32" or compiled:
        what = "compile" if compiled else f"weights = {weights}"
        raise UserError(f"{what} is for llama, not {model.model.name}; leave it")
    return BackboneStep(model, dtype)
