"""One slot of each of several sequences through the backbone: what a decoding pass spends its time on.

SlotStep computes what Llama.forward computes for one query per row, but is made for small products, where
starting an operation takes longer than doing it. What can be done once for all passes is done when the
weights are copied; what can be done once for all layers is done before the loop over layers; and the loop
itself has few operations.

code        shape                  meaning
B                                  rows of the batch
A                                  rows that run a slot in this pass, at most B
layers      L of (B, 2G, M, d')    keys and values of earlier slots, see cache.py
d, d'                              head width without and with the channels of log w
F                                  inner width of SwiGLU
"""

import math
from inspect import getattr_static
from typing import NamedTuple

import torch
import torch.nn.functional as F

from attention import attend_to_cache
from common import UserError
from lab.common import autocast
from lab.engine.cache import cache_width
from lab.kernels import query_channels
from model import Llama

LARGE = 2**21  # products of at least this many multiplications are faster in oneDNN
onednn = torch.ops.mkldnn


class Product:
    """The product of an input with a weight that does not change, x W^T: (A, D) -> (A, O). It can include the
    operation that follows the product.

    On a CPU such a product takes as long as reading its weight, so the layout of the weight in memory
    matters. For one row, the layout (D, O) is up to 8 times as fast as (O, D); for 8 rows, oneDNN's blocked
    layout is up to 3 times as fast as (D, O). The choice depends on sizes alone, by rules that were measured
    once. It depends on no clock, so a model gives the same results every time. A compiled program cannot use
    the blocked layout, and fuses operations itself.

    Args:
        weight: (O, D), the weight of a Linear.
        dtype: the dtype of the product.
        rows: B, the number of rows for which the layout is chosen.
        compiled: whether the product is part of a compiled program.
    """

    def __init__(self, weight, dtype, rows, compiled):
        weight = weight.detach().to(dtype)
        self.compiled = compiled
        can_pack = weight.is_cpu and torch.backends.mkldnn.is_available() and not compiled
        if can_pack and dtype == torch.bfloat16:
            self.packed = onednn._is_mkldnn_bf16_supported()
        elif can_pack and dtype == torch.float32:
            is_large = rows * weight.numel() >= LARGE
            self.packed = is_large and (rows > 1 or torch.get_num_threads() > 1)
        else:
            self.packed = False
        if self.packed:
            self.weight = onednn._reorder_linear_weight(weight.contiguous(), rows)
        else:
            self.weight = weight.T.contiguous()  # (D, O)

    def __call__(self, x, then="none", other=None):
        """Compute the product, and then one more operation on it.

        Args:
            x: (A, D).
            then: the operation after the product: "none", "swish" (SiLU), or "add" or "mul" with `other`.
            other: (A, O).

        Returns:
            (A, O).
        """
        if then == "add" and self.compiled:
            return other + self(x)  # the compiler fuses the sum itself
        if then == "add" and other.dtype != x.dtype:
            return other + self(x)  # a fused sum needs one dtype, but the residual stream stays in float32
        if self.packed and other is None:
            return onednn._linear_pointwise(x, self.weight, None, then, [], "")
        if self.packed:
            return onednn._linear_pointwise.binary(x, other, self.weight, None, then)
        if then == "add":
            return torch.addmm(other, x, self.weight)
        y = torch.mm(x, self.weight)
        if then == "swish":
            return F.silu(y)
        if then == "mul":
            return y * other
        return y


class Layer(NamedTuple):
    """The products of one block. Queries, keys and values are one product, and the weight of a norm is
    multiplied into the matrices that read its output."""

    qkv: Product  # D -> (H + 2G) d
    out: Product  # H d -> D
    gate: Product  # D -> F
    up: Product  # D -> F
    down: Product  # F -> D

    @classmethod
    def of(cls, block, dtype, rows, compiled):
        """The products of a model.Block. The other arguments are those of Product."""
        attention = block.self_attn
        mlp = block.mlp
        before = block.input_layernorm.weight
        between = block.post_attention_layernorm.weight
        q_k_v = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        how = dtype, rows, compiled
        return cls(
            qkv=Product(torch.cat(q_k_v) * before, *how),
            out=Product(attention.o_proj.weight, *how),
            gate=Product(mlp.gate_proj.weight * between, *how),
            up=Product(mlp.up_proj.weight * between, *how),
            down=Product(mlp.down_proj.weight, *how),
        )


class Heads(NamedTuple):
    """Queries, keys and values of A slots: one tensor, and three views of it. Each head holds its d
    components, then its channels."""

    all: torch.Tensor  # (A, H+2G, d')
    components: torch.Tensor  # (A, H+2G, 2, d/2) without the channels, in the halves that RoPE swaps
    q: torch.Tensor  # (A, G, H/G, d') the queries, grouped by the key head that they share
    k_v: torch.Tensor  # (A, 2G, d') keys and values

    @classmethod
    def of(cls, heads, G, d):
        """The views of heads (A, H+2G, d')."""
        A, n, _ = heads.shape
        H = n - 2 * G
        return cls(
            all=heads,
            components=heads[..., :d].unflatten(-1, (2, -1)),
            q=heads[:, :H].view(A, G, H // G, -1),
            k_v=heads[:, H:],
        )


class SlotStep:
    """The step of a Llama.

    A program that is compiled computes five things in another form: `channels`, `places`, `rotate`, `write`
    and `attend` have both forms.

    Args:
        model: a PonderLM on a Llama.
        batch_size: B, the most rows that run.
        dtype: the dtype of the products and the cache.
        compiled: whether the step is part of a compiled program.
    """

    def __init__(self, model, batch_size, dtype, compiled=False):
        config = model.config
        device = model.lm_head.weight.device
        self.H = config.num_attention_heads
        self.G = config.kv_heads
        self.d = config.head_width
        self.width = cache_width(model)  # d'
        self.scale = 1 / math.sqrt(self.d)
        self.compiled = compiled
        self.dtype = dtype
        self.layers = [Layer.of(block, dtype, batch_size, compiled) for block in model.model.layers]
        self.weight = model.model.norm.weight  # of the final norm
        self.eps = self.weight.new_tensor(config.rms_norm_eps)

        # RoPE. One position more than the window has, since a row that has read its last token points to the
        # position after it.
        positions = torch.arange(config.block_size + 1, device=device)
        cos, sin = model.model.rope_cos_sin(positions, dtype)  # (T+1, d) each
        # Rotating is (a, b) cos + (-b, a) sin for the halves a and b. With the minus sign moved into sin, it
        # is y cos + flip(y) sin, where flip swaps the halves.
        sin = torch.cat([-sin[:, : self.d // 2], sin[:, self.d // 2 :]], dim=-1)
        rotated = torch.stack([cos, sin])  # (2, T+1, d): cos, sin
        unchanged = torch.stack([torch.ones_like(cos), torch.zeros_like(sin)])
        # Queries and keys are rotated (kind 0), values are unchanged (kind 1).
        angles = torch.stack([rotated, unchanged], dim=2)  # (cos | sin, position, kind, d)
        self.angles = angles.unflatten(
            -1, (2, -1)
        )  # (cos | sin, position, kind, half, d/2): (2, T+1, 2, 2, d/2)
        self.kind = torch.tensor([0] * (self.H + self.G) + [1] * self.G, device=device)  # (H+2G,)

        # Room for the queries, keys and values of a slot. Each head has its channels after its components: a
        # constant for queries, log w for keys, zeros for values.
        self.of_query = query_channels(self.d, dtype, device)[:2]
        self.new = torch.zeros(batch_size, self.H + 2 * self.G, self.width, dtype=dtype, device=device)
        self.new[:, : self.H, self.d : self.d + 2] = self.of_query
        heads = torch.arange(batch_size * 2 * self.G, device=device)
        self.head_index = heads.view(batch_size, -1)  # (B, 2G) of the heads of keys and values in a layer

    def norm(self, x):
        """RMSNorm without its weight, x / sqrt(eps + |x|^2 / D), in the precision of the residual stream x
        (A, D)."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # |x|, (A, 1)
        mean_square = torch.addcmul(self.eps, norm, norm, value=1 / x.size(-1))  # eps + |x|^2 / D
        return x * mean_square.rsqrt()

    def __call__(self, x, cache, position, length, of_key, of_query=None):
        """Run one slot of each row, and write its keys and values into the cache.

        Args:
            x: (A, D) inputs of the slots.
            cache: a SlotCache; each row sees cache.views.
            position: (A,) positions of the tokens in their texts.
            length: (A,) for each row the place of the cache that receives the slot's keys and values.
            of_key: (A, 1, c) channels of the slots' keys: log w and, on the grid, which slot it is.
            of_query: (A, 1, c) channels of the slots' queries; None: those of all queries, see `of_query`.

        Returns:
            (A, D) outputs of the slots.
        """
        A = len(x)
        H = self.H
        G = self.G
        # Angles, channels and places are the same in all layers.
        cos, sin = self.angles[:, position[:, None], self.kind]  # (A, H+2G, 2, d/2) each
        heads = Heads.of(self.channels(A, of_key, of_query), G, self.d)
        places = self.places(A, cache, length)
        for layer, kv, (keys, values) in zip(self.layers, cache.layers, cache.views, strict=True):
            y = layer.qkv(self.norm(x).to(self.dtype)).view(A, H + 2 * G, 2, -1)
            heads = self.rotate(y, cos, sin, heads)
            self.write(kv, heads.k_v, places)
            out = self.attend(heads.q, keys, values)  # (A, G, H/G, d)
            x = layer.out(out.reshape(A, H * self.d), "add", x)
            y = self.norm(x).to(self.dtype)
            x = layer.down(layer.up(y, "mul", layer.gate(y, "swish")), "add", x)
        return self.norm(x) * self.weight

    def channels(self, A, of_key, of_query):
        """Room for the queries, keys and values of A slots, with their channels filled in: (A, H+2G, d')."""
        H = self.H
        first = self.d
        last = self.d + of_key.size(-1)
        if self.compiled:
            new = of_key.new_zeros(A, H + 2 * self.G, self.width)
            new[:, :H, first:last] = self.of_query if of_query is None else of_query
        else:
            new = self.new[:A]
            if of_query is not None:
                new[:, :H, first:last] = of_query
        new[:, H : H + self.G, first:last] = of_key
        return new

    def places(self, A, cache, length):
        """The indices of place `length` (A,) in the 2G heads of each row, in the form that `write` takes."""
        if self.compiled:
            rows = torch.arange(A, device=length.device)[:, None]
            heads = torch.arange(2 * self.G, device=length.device)
            return rows, heads, length[:, None]
        M = cache.layers[0].size(2)
        return (self.head_index[:A] * M + length[:, None]).flatten()  # (A*2G,) among the B*2G*M places

    def rotate(self, y, cos, sin, heads):
        """Rotate the queries and keys in y by RoPE, and put y into `heads`, before the channels.

        Args:
            y: (A, H+2G, 2, d/2) queries, keys and values.
            cos, sin: of the same shape; for values they are 1 and 0.
            heads: Heads, whose components are overwritten.

        Returns:
            The Heads. In a compiled program they are new, since it should write to nothing but the cache.
        """
        if self.compiled:
            rotated = (y * cos + y.flip(2) * sin).flatten(2)  # (A, H+2G, d)
            return Heads.of(torch.cat([rotated, heads.all[..., self.d :]], dim=-1), self.G, self.d)
        torch.addcmul(y * cos, y.flip(2), sin, out=heads.components)
        return heads

    def write(self, kv, new, places):
        """Write the keys and values `new` (A, 2G, d') into a layer kv (B, 2G, M, d') of the cache, at
        `places`.

        In plain PyTorch, index_copy_ on a view is the fastest way. A compiled program would copy the whole
        cache, twice in each layer, to write through a view.
        """
        if self.compiled:
            kv.index_put_(places, new)
        else:
            kv.view(-1, self.width).index_copy_(0, places, new.reshape(-1, self.width))

    def attend(self, q, keys, values):
        """Attention of q (A, G, H/G, d') to keys and values (A, G, M, d'): (A, G, H/G, d)."""
        if self.compiled:  # spelled out, so that the compiler makes a few loops of it
            scores = (q[..., None, :] * keys[:, :, None]).sum(-1) * self.scale  # (A, G, H/G, M)
            p = scores.softmax(-1)
            return (p[..., None] * values[:, :, None, :, : self.d]).sum(-2)
        return F.scaled_dot_product_attention(q, keys, values, scale=self.scale)[..., : self.d]


class BackboneStep:
    """The step of any other backbone. It runs the backbone's own blocks, which is slower.

    Args:
        model: a PonderLM.
        dtype: the dtype of the products and the cache.
    """

    def __init__(self, model, dtype):
        self.backbone = model.model
        self.dtype = dtype

    def __call__(self, x, cache, position, length, of_key, of_query=None):
        """The arguments and the result are those of SlotStep."""
        layers = [SlotLayer(keys, values, length, of_key, of_query) for keys, values in cache.views]
        with autocast(x.device, self.dtype):
            out = self.backbone(x[:, None], position[:, None], None, cache=layers)  # (A, 1, D)
        return out[:, 0].to(x)


class SlotLayer:
    """One layer's attention in BackboneStep. It takes the place of a model.LayerCache.

    Args:
        keys, values: (A, G, M, d'), views of the cache.
        length, of_key, of_query: as in SlotStep.__call__.
    """

    def __init__(self, keys, values, length, of_key, of_query):
        self.keys = keys
        self.values = values
        self.length = length
        self.of_key = of_key
        self.of_query = of_query

    def attend(self, q, k, v, log_w):
        """Attention of q (A, H, 1, d) to the cache and to the new k and v (A, G, 1, d): (A, H, 1, d). log_w
        is not used, since of_key contains it."""
        d = q.size(-1)
        c = self.of_key.size(-1)
        A = len(q)
        rows = torch.arange(A, device=q.device)
        self.keys[rows, :, self.length, :d] = k[:, :, 0].to(self.keys.dtype)
        self.values[rows, :, self.length, :d] = v[:, :, 0].to(self.values.dtype)
        self.keys[rows, :, self.length, d : d + c] = self.of_key
        if self.of_query is None:
            of_query = query_channels(d, q.dtype, q.device)[:2].expand(A, 1, 2)
        else:
            of_query = self.of_query.to(q.dtype)  # (A, 1, c)
        q = torch.cat([q, of_query[:, :, None].expand(*q.shape[:-1], -1)], dim=-1)
        q = F.pad(q, (0, self.keys.size(-1) - q.size(-1)))  # (A, H, 1, d')
        return attend_to_cache(q.to(self.keys.dtype), self.keys, self.values, d)


def overridden(kind, base):
    """The attributes that the class `kind` defines otherwise than `base`, by name."""

    def differing(other):
        return {name for name in dir(base) if getattr_static(other, name) is not getattr_static(base, name)}

    # Even a subclass that defines nothing differs from its base: every class has a __module__ of its own, and
    # some more such attributes with several bases. These do not count.
    mixin = type("Mixin", (), {})
    empty_subclass = type("Empty", (mixin, base), {})
    return differing(kind) - differing(empty_subclass)


def make_step(model, batch_size, dtype, compiled=False):
    """The step for a model's backbone. The arguments are those of SlotStep.

    Raises:
        UserError: a compiled step of a backbone other than LLaMA.
    """
    # SlotStep copies the weights and asks the backbone for RoPE's angles, so these may differ from Llama's.
    if overridden(type(model.model), Llama) <= {"__init__", "inverse_frequencies", "rope_cos_sin"}:
        return SlotStep(model, batch_size, dtype, compiled)
    if compiled:
        raise UserError(
            f"--compile supports only the backbone llama, not {model.config.backbone}: omit --compile"
        )
    return BackboneStep(model, dtype)
