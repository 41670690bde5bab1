"""GPT-NeoX (arXiv 2204.06745): the transformer of Pythia, and of the released PonderLM-2 models.

Modules have the names that they have in Hugging Face's transformers. GPT-NeoX differs from LLaMA in these
parts:

norms         LayerNorm, with biases; rms_norm_eps is their eps
projections   one matrix for q, k and v, head after head; all projections have biases
RoPE          rotates the first components of each head, the fraction rotary_pct, and leaves the others
MLP           two layers with GELU between them
residual      with parallel_residual, x + attention(norm_1(x)) + mlp(norm_2(x)): both read the same x
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from attention import soft_mask_attention
from common import UserError
from model import Finite, Llama, apply_rope, validated_dataclass


@validated_dataclass
class Options:
    rotary_pct: Annotated[float, Field(gt=0, le=1)] = 1.0  # fraction of each head that RoPE rotates
    # 1: attention and MLP read the same x; 0: one after the other. A number, since --backbone-options holds
    # numbers.
    parallel_residual: Finite = 1.0


def rotary_width(config):
    """How many components of a head RoPE rotates.

    Raises:
        UserError: it is an odd number, or 0.
    """
    rotary_pct = Options(**config.backbone_options).rotary_pct
    width = int(config.head_width * rotary_pct)
    if width % 2 or not width:
        raise UserError(
            f"--backbone-options rotary_pct {rotary_pct:g} would rotate {width} of the {config.head_width} "
            "components of a head, but RoPE rotates pairs: choose a rotary_pct for which that number is even "
            "and above 0"
        )
    return width


class NeoXAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        D = config.hidden_size
        self.d = config.head_width
        self.rotated = rotary_width(config)
        self.query_key_value = nn.Linear(D, 3 * D)
        self.dense = nn.Linear(D, D)

    def forward(self, x, angles, log_w, backend, cache):
        B, N, D = x.shape
        qkv = self.query_key_value(x).view(B, N, -1, 3 * self.d).transpose(1, 2)
        q, k, v = qkv.split(self.d, dim=-1)  # (B, H, N, d) each
        q = self.rotate_first(q, angles)
        k = self.rotate_first(k, angles)
        if cache:
            out = cache.attend(q, k, v, log_w)
        else:
            out = soft_mask_attention(q, k, v, log_w, backend)
        return self.dense(out.transpose(1, 2).reshape(B, N, D))

    def rotate_first(self, x, angles):
        """Apply RoPE to the first `rotated` components of each head. (B, H, N, d) -> (B, H, N, d)"""
        rotated = apply_rope(x[..., : self.rotated], *angles)
        return torch.cat([rotated, x[..., self.rotated :]], dim=-1)


class NeoXMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class NeoXBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.parallel = bool(Options(**config.backbone_options).parallel_residual)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = NeoXAttention(config)
        self.mlp = NeoXMLP(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, x, angles, log_w, backend, cache):
        y = x + self.attention(self.input_layernorm(x), angles, log_w, backend, cache)
        return y + self.mlp(self.post_attention_layernorm(x if self.parallel else y))


class Backbone(Llama):
    name = "gpt_neox"
    unused = ("num_key_value_heads", "head_dim")
    Options = Options
    Block = NeoXBlock
    Norm = nn.LayerNorm
    residual_projections = "attention.dense.weight", "mlp.dense_4h_to_h.weight"

    def inverse_frequencies(self, device):
        d = rotary_width(self.config)
        return self.config.rope_theta ** -(torch.arange(0, d, 2, device=device) / d)  # (d/2,)
