"""GPT-NeoX (arXiv 2204.06745): the transformer of Pythia, and of the released PonderLM-2 models.

What is not as in LLaMA, module names as in Hugging Face's transformers:

norms         LayerNorm, with biases; rms_norm_eps is their eps
projections   one matrix for q, k and v, head after head; all have biases
RoPE          turns the first rotary_pct of each head's numbers and leaves the others
MLP           two layers with GELU between them
residual      parallel_residual: x + attention(norm_1(x)) + mlp(norm_2(x)), both read the same x
"""

import torch
import torch.nn.functional as F
from torch import nn

from attention import soft_mask_attention
from model import Llama, apply_rotary


class NeoXAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        D, self.d, self.rotated = config.hidden_size, config.head_width, config.rotary_width
        self.query_key_value, self.dense = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, angles, key_bias, backend, cache):
        B, N, D = x.shape
        qkv = self.query_key_value(x).view(B, N, -1, 3, self.d)  # of each head q, k and v
        qk, v = qkv.split((2, 1), dim=3)
        turned, left = qk.tensor_split([self.rotated], dim=-1)
        turned = apply_rotary(turned.flatten(2), angles, self.rotated).view_as(turned)
        q, k = torch.cat([turned, left], dim=-1).transpose(1, 2).unbind(3)  # (B, H, N, d) each
        v = v.squeeze(3).transpose(1, 2)
        if cache is None:
            out = soft_mask_attention(q, k, v, key_bias, backend)
        else:
            out = cache.attend(q, k, v, key_bias)
        return self.dense(out.transpose(1, 2).reshape(B, N, D))


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
        self.parallel = config.parallel_residual
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
        self.attention, self.mlp = NeoXAttention(config), NeoXMLP(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def writers(self):
        return self.attention.dense, self.mlp.dense_4h_to_h

    def forward(self, x, angles, key_bias, backend, cache):
        y = x + self.attention(self.input_layernorm(x), angles, key_bias, backend, cache)
        return y + self.mlp(self.post_attention_layernorm(x if self.parallel else y))


class Backbone(Llama):
    name, unused = "gpt_neox", ("num_key_value_heads", "head_dim")
    Block, Norm = NeoXBlock, nn.LayerNorm
