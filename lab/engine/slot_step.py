"""The step of decoding: one slot of each of several sequences through the backbone.

As Llama.forward with one query a row, but made for small products, where starting an operation takes longer
than doing it. What can be done once for all steps is done when the weights are copied, what can be done once
for all layers before their loop, and what is left takes few operations.

code        shape                  meaning
A                                  rows: sequences that each run one slot
layers      L of (B, 2G, M, d')    keys and values of the slots before, see cache.py
d, d'                              head width without and with the channels of log w
"""

import math
from inspect import getattr_static
from typing import NamedTuple

import torch
import torch.nn.functional as F

from attention import attend_to_cache
from data import UserError
from lab.common import autocast
from lab.engine.cache import cache_width
from lab.kernels import HALF, query_channels
from model import Llama

LARGE = 2**21  # products from so many multiplications on are worth the call of oneDNN
onednn = torch.ops.mkldnn


class Product:
    """x W for weights (O, D) that stay: (A, D) -> (A, O), with what follows it in the same operation.

    On a CPU such a product takes as long as reading its weights, so it matters how they lie in memory: as
    (D, O), with one row up to 8 times as fast as (O, D); or in blocks of oneDNN, with 8 rows up to 3 times as
    fast as that. Which is the fastest was measured; it goes by sizes, not by a clock, so that a model says
    the same every time. A program that is compiled knows no blocks, and joins operations itself.
    """

    def __init__(self, weight, dtype, rows, compiled):
        weight = weight.detach().to(dtype)
        large = rows * weight.numel() >= LARGE and (rows > 1 or torch.get_num_threads() > 1)
        self.compiled = compiled
        has_blocks = weight.is_cpu and torch.backends.mkldnn.is_available() and not compiled
        in_half = dtype == torch.bfloat16 and has_blocks and onednn._is_mkldnn_bf16_supported()
        self.packed = in_half or (has_blocks and large and dtype == torch.float32)
        if self.packed:
            self.weight = onednn._reorder_linear_weight(weight.contiguous(), rows)
        else:
            self.weight = weight.T.contiguous()

    def __call__(self, x, then="none", other=None):
        """then: "none", "swish" (SiLU), or "add" or "mul" with `other` (A, O)."""
        if then == "add" and (self.compiled or other.dtype != x.dtype):
            return other + self(x)
        if self.packed and other is None:
            return onednn._linear_pointwise(x, self.weight, None, then, [], "")
        if self.packed:
            return onednn._linear_pointwise.binary(x, other, self.weight, None, then)
        if then == "add":
            return torch.addmm(other, x, self.weight)
        y = torch.mm(x, self.weight)
        return F.silu(y) if then == "swish" else y * other if then == "mul" else y


class Layer(NamedTuple):
    """The products of a block: those of one input are one, and a norm's weight is in the matrix behind it."""

    qkv: Product  # D -> (H + 2G) d
    out: Product  # H d -> D
    gate: Product  # D -> F
    up: Product  # D -> F
    down: Product  # F -> D

    @classmethod
    def of(cls, block, *how):
        a, m = block.self_attn, block.mlp
        before, between = block.input_layernorm.weight, block.post_attention_layernorm.weight
        qkv = torch.cat([linear.weight for linear in (a.q_proj, a.k_proj, a.v_proj)])
        weights = qkv * before, a.o_proj.weight, m.gate_proj.weight * between, m.up_proj.weight * between
        return cls(*(Product(w, *how) for w in (*weights, m.down_proj.weight)))


class SlotStep:
    """A Llama for `batch_size` rows or fewer; dtype: of the products and the cache."""

    def __init__(self, model, batch_size, dtype, compiled=False):
        config, device = model.config, model.lm_head.weight.device
        self.H, self.G = config.num_attention_heads, config.G
        self.d, self.width, self.compiled = config.d, cache_width(model), compiled
        self.layers = [Layer.of(block, dtype, batch_size, compiled) for block in model.model.layers]
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
        self.of_query = query_channels(self.d, dtype, device)[:2]
        # Queries, keys and values of a slot. Behind each head is what augment appends: a number to queries,
        # log w to keys, zeros to values.
        self.new = torch.zeros(batch_size, self.H + 2 * self.G, self.width, dtype=dtype, device=device)
        self.new[:, : self.H, self.d : self.d + 2] = self.of_query
        self.heads = torch.arange(batch_size * 2 * self.G, device=device).view(batch_size, -1)

    def norm(self, x):
        """RMSNorm without its weight, at the precision of the residual stream x (A, D)."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self.eps, length, length, value=1 / x.size(-1)).rsqrt()

    def __call__(self, x, cache, position, length, of_key, of_query=None):
        """(A, D) -> (A, D); the keys and values of the slot go into the cache.

        Args:
            x: (A, D) the slot's input.
            cache: of which each row sees cache.views.
            position, length: (A,) the token's place in the text, the slot's in the cache.
            of_key: (A, 1, c) channels of the slot's own key: log w, and on the grid the slot.
            of_query: (A, 1, c) channels of its query; None: the same for all.
        """
        (A, _), H, G, d, c = x.shape, self.H, self.G, self.d, of_key.size(-1)
        # Once for all layers. Values are turned by no angle: see self.kind.
        cos, sin = self.angles[:, position[:, None], self.kind]  # (A, H+2G, 2, d/2)
        new = of_key.new_zeros(A, H + 2 * G, self.width) if self.compiled else self.new[:A]  # (A, H+2G, d')
        if self.compiled or of_query is not None:
            new[:, :H, d : d + c] = self.of_query if of_query is None else of_query
        new[:, H : H + G, d : d + c] = of_key
        turned = new[..., :d].unflatten(-1, (2, -1))  # (A, H+2G, 2, d/2)
        at = self.heads[:A] * cache.layers[0].size(2) + length[:, None]  # (A, 2G) the slot's places
        at, scale = at.flatten(), 1 / math.sqrt(d)
        rows, heads = torch.arange(A, device=x.device)[:, None], torch.arange(2 * G, device=x.device)
        q, k_v = new[:, :H].view(A, G, H // G, -1), new[:, H:]  # a group's heads are its queries
        for layer, kv, (keys, values) in zip(self.layers, cache.layers, cache.views, strict=True):
            y = layer.qkv(self.norm(x).to(self.dtype)).view(A, H + 2 * G, 2, -1)
            if self.compiled:  # nothing is written but the cache
                y = torch.cat([(y * cos + y.flip(2) * sin).flatten(2), new[..., d:]], dim=-1)
                q, k_v = y[:, :H].view(A, G, H // G, -1), y[:, H:]
            else:
                torch.addcmul(y * cos, y.flip(2), sin, out=turned)  # RoPE, as model.rotate
            if self.compiled:  # written through a view, the compiler would copy the whole cache
                kv.index_put_((rows, heads, length[:, None]), k_v)
            else:
                kv.view(-1, self.width).index_copy_(0, at, k_v.reshape(-1, self.width))
            if (
                self.compiled
            ):  # spelled out, attention becomes a few loops: (A, G, H/G, M), then (A, G, H/G, d)
                p = ((q[..., None, :] * keys[:, :, None]).sum(-1) * scale).softmax(-1)
                out = (p[..., None] * values[:, :, None, :, :d]).sum(-2)
            else:
                out = F.scaled_dot_product_attention(q, keys, values, scale=scale)[..., :d]
            x = layer.out(out.reshape(A, H * d), "add", x)
            y = self.norm(x).to(self.dtype)
            x = layer.down(layer.up(y, "mul", layer.gate(y, "swish")), "add", x)
        return self.norm(x) * self.weight


class BackboneStep:
    """As SlotStep for any other backbone, through its own blocks: right, and slower."""

    def __init__(self, model, dtype):
        self.backbone, self.dtype = model.model, dtype

    def __call__(self, x, cache, position, length, of_key, of_query=None):
        layers = [SlotLayer(*kv, length, of_key, of_query) for kv in cache.views]
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


def overridden(kind, base):
    """The names that a class has otherwise than its base, of all that the base has."""

    def differing(other):
        return {name for name in dir(base) if getattr_static(other, name) is not getattr_static(base, name)}

    return differing(kind) - differing(type("Empty", (type("Mixin", (), {}), base), {}))  # what any class has


def make_step(model, batch_size, dtype, compiled=False):
    """The step of a model's backbone. UserError: a compiled one of another than LLaMA."""
    if overridden(type(model.model), Llama) <= {"__init__", "frequency", "angles"}:
        return SlotStep(model, batch_size, dtype, compiled)
    if compiled:
        raise UserError(f"compile is for llama, not {model.config.backbone}: leave it out")
    return BackboneStep(model, dtype)
