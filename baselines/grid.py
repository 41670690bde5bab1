"""The grid: PonderLM-3 and -2 where slot k sees slots 0 .. k of the tokens so far, none deeper.

    slot (t, k) sees slot (t', k')  <=>  t' <= t and k' <= k

This is the 2-D causal mask of adaptive latent chain-of-thought (arXiv 2602.08220). Step k of all
tokens then needs nothing but steps up to k, so that K+1 passes of one slot a token compute all
states exactly, where Jacobi iteration needs more and longer ones to come near. There is no R and no
fixed point. Router, log w on keys, mixture and early exit are PonderLM-3's, as printed.

What is lost: slot 0 of a token no longer sees what its predecessors thought.

code       symbol      shape
x                      (B, T, D)       inputs of slot k of all tokens
h          h^(0..k)    (B, T, D) each  states so far
seen                   L of (k, v)     keys and values of the slots so far, (B, G, (k+1) T, d') each
"""

import math

import torch

from attention import MASKED, attend_to_cache, augment, bias_unit
from baselines import FixedDepth, PonderLM3
from kernels.attention import attend_to_slots


class OnGrid:
    """What both forms share, before PonderLM3 or FixedDepth in the order of bases."""

    iterates, grid = False, True

    def states(self, idx, R=None, tau=None, alpha=0.0):
        e = x = self.embed(idx)
        h, seen = [], [None] * self.config.num_hidden_layers
        positions = torch.arange(idx.size(1), device=idx.device)
        log_w = torch.zeros_like(x[..., :1], dtype=torch.float32)  # of slot 0, before any routing
        for k in range(self.config.ponder_steps + 1):
            bias = self.key_bias(log_w, tau)  # (B, T, S), or None
            bias = None if bias is None else bias[..., k]
            layers = [TokensLayer(self.backend, pair) for pair in seen]
            h.append(self.transform(x, positions, bias, layers))
            seen = [layer.seen for layer in layers]
            if k == 0:
                s, log_w = self.route(h[0][:, :, None], alpha)  # (B, T, S)
            x = self.feed_back(h[-1], e)
        return torch.stack(h, dim=2), s, log_w

    def new_cache(self):
        """A cache for each slot number; slot k looks into those of 0 .. k."""
        return [super(OnGrid, self).new_cache() for _ in range(self.config.ponder_steps + 1)]

    def run_slot(self, k, x, positions, bias, cache):
        layers = [TokenLayer(slots) for slots in zip(*cache[: k + 1], strict=True)]
        return self.model(x, positions, bias, cache=layers)


def slot_channels(K, d, dtype, device):
    """The mask as part of the dot product, for a cache in which keys of all slots lie side by side:
    K more channels of queries and keys by their slots, (S, K) each."""
    slot = torch.arange(K + 1, device=device)[:, None]
    channel = torch.arange(1, K + 1, device=device)
    queries = (slot < channel) * bias_unit(d)
    keys = (slot == channel) * (MASKED * math.sqrt(d) / bias_unit(d))
    return queries.to(dtype), keys.to(dtype)


class TokensLayer:
    """One layer's attention of slot k of all tokens. A new one for each pass, which leaves the last
    one's keys as they were: a pass can be computed again in the backward pass."""

    def __init__(self, backend, before):
        self.backend, self.before, self.seen = backend, before, None

    def attend(self, q, k, v, key_bias):
        d = q.size(-1)
        q, k, v = augment(q, k, v, key_bias)
        if self.before is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.before, (k, v), strict=True))
        self.seen = k, v
        return attend_to_slots(q, k, v, d, self.backend)


class TokenLayer:
    """One layer's attention of slot k of one token: its key joins those of slot k."""

    def __init__(self, slots):
        self.slots = slots  # a LayerCache each, of slots 0 .. k

    def attend(self, q, k, v, key_bias):
        d = q.size(-1)
        q, k, v = augment(q, k, v, key_bias)
        self.slots[-1].append(k, v)
        k, v = (torch.cat([getattr(x, name) for x in self.slots], 2) for name in ("keys", "values"))
        return attend_to_cache(q, k, v, d)


class Grid(OnGrid, PonderLM3):
    method, title = "grid", "PonderLM-3, grid"


class FixedGrid(OnGrid, FixedDepth):
    method, title = "grid-fixed", "PonderLM-2, grid"
