"""The soft mask through torch's FlexAttention, see flex in attention.py."""

from functools import lru_cache

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lab.common import COMPILED


def biased(q, k, v, log_w, blocks):
    def add_log_w(score, b, h, i, j):
        return score + log_w[b, j]

    added = None if log_w is None else add_log_w
    return flex_attention(q, k, v, added, blocks, enable_gqa=q.size(1) != k.size(1))


@lru_cache
def compiled():
    torch._dynamo.config.recompile_limit = COMPILED
    return torch.compile(biased, dynamic=False)


@torch.compiler.disable  # made once, not in every compiled block
@lru_cache
def causal_blocks(N, device, n=1):
    """Which blocks of an N x n N score matrix have anything to see."""
    return create_block_mask(lambda b, h, i, j: i >= j % N, None, None, N, n * N, device=device)
