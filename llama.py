"""The backbone: LLaMA, as Hugging Face's transformers has it, with names of weights like theirs.

What is not in every Llama: a bias on each key (the soft mask), position ids that several inputs may
share, and inputs that are vectors, tokens and fed-back states alike.

code        shape                  meaning
x           (B, N, D)              inputs, N = T*S slots
positions   (N,) or (B, N)         position ids, for RoPE
q, k, v     (B, H|G, N, d)         H query heads share G key and value heads
log_w       (B, N) or None         bias on each key, see attention.py
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from attention import attend_to_cache, augment, soft_mask_attention


def rotary(positions, config):
    """Position ids (N,) or (B, N) -> cos, sin (1, N, d/2) or (B, 1, N, d/2) of RoPE, in float32."""
    d = config.head_width
    frequency = config.rope_theta ** -(torch.arange(0, d, 2, device=positions.device) / d)  # (d/2,)
    if config.rope_scaling:
        frequency = stretch(frequency, *config.rope_scaling)
    angle = positions.float()[..., None, :, None] * frequency  # the same for all heads
    return angle.cos(), angle.sin()


def stretch(frequency, factor, low, high, window):
    """Llama 3's RoPE for longer texts: slow rotations get `factor` times slower, fast ones do not.

    A rotation counts by how many turns it makes in the first `window` of the training: below `low`
    it is slow, above `high` fast, between them a mean of both by how far it is.
    """
    turns = window * frequency / (2 * math.pi)
    fast = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (fast + (1 - fast) / factor)


def rotate(x, cos, sin):
    """Turn the halves of x (B, H, N, d) against each other: RoPE in its half-split form."""
    a, b = x.chunk(2, dim=-1)  # (B, H, N, d/2) each
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        D, d = config.hidden_size, config.head_width
        self.d, H, G = d, config.num_attention_heads, config.key_value_heads
        self.q_proj = nn.Linear(D, H * d, bias=False)
        self.k_proj = nn.Linear(D, G * d, bias=False)
        self.v_proj = nn.Linear(D, G * d, bias=False)
        self.o_proj = nn.Linear(H * d, D, bias=False)

    def forward(self, x, cos, sin, log_w, backend, cache):
        B, N, _ = x.shape
        projections = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (p.view(B, N, -1, self.d).transpose(1, 2) for p in projections)  # (B, H|G, N, d)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is None:
            out = soft_mask_attention(q, k, v, log_w, backend)
        else:
            out = cache.attend(q, k, v, log_w)
        return self.o_proj(out.transpose(1, 2).reshape(B, N, -1))  # (B, N, D)


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        D, F_ = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, F_, bias=False)
        self.up_proj = nn.Linear(D, F_, bias=False)
        self.down_proj = nn.Linear(F_, D, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos, sin, log_w, backend, cache):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, log_w, backend, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, positions, log_w, backend="auto", cache=None):
        """Input vectors (B, N, D), positions (N,) or (B, N), key bias (B, N) or None -> (B, N, D).

        `cache`, one LayerCache a layer, holds the keys and values of all slots before these N.
        """
        return self.norm(self.stack(x, positions, log_w, backend, cache))

    def stack(self, x, positions, log_w, backend="auto", cache=None):
        """The same without the final norm: what LoopedLM and MoR apply again and again."""
        cos, sin = rotary(positions, self.config)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, log_w, backend, cache and cache[i])
        return x


class LayerCache:
    """Keys and values of the slots executed so far in one layer, (B, G, M, d') each."""

    def __init__(self):
        self.keys = self.values = None

    def attend(self, q, k, v, log_w):
        """New slots against all so far. The bias enters the cache as a channel of the key."""
        d = q.size(-1)
        q, k, v = augment(q, k, v, log_w)
        if self.keys is not None:
            k, v = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        self.keys, self.values = k, v
        return attend_to_cache(q, k, v, d)
