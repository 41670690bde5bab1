"""The grid: PonderLM-3 and -2 where slot k sees slots 0 .. k of the tokens so far, none deeper.

    slot (t, k) sees slot (t', k')  <=>  t' <= t and k' <= k

This is the 2-D causal mask of adaptive latent chain-of-thought (arXiv 2602.08220). Step k of all tokens
then needs nothing but steps up to k, so that K+1 passes of one slot a token compute all states exactly,
where Jacobi iteration needs more and longer ones to come near. There is no R and no fixed point. Router,
log w on keys, mixture and early exit are PonderLM-3's. What is lost: slot 0 of a token no longer sees what
its predecessors thought.
"""

import torch

from attention import attend_to_cache, augment
from lab.kernels import attend_to_slots
from lab.methods import FixedDepth, PonderLM3
from model import LayerCache


class OnGrid:
    """What both forms share, before PonderLM3 or FixedDepth in the order of bases."""

    iterates, grid = False, True

    def states(self, idx, R=None, tau=None, alpha=0.0):
        e = x = self.embed(idx)
        h, seen = [], [None] * self.config.num_hidden_layers
        positions = torch.arange(idx.size(1), device=idx.device)
        log_w = torch.zeros_like(x[..., :1], dtype=torch.float32)  # of slot 0
        for k in range(self.config.ponder_steps + 1):
            key_log_w = self.mask_keys(log_w, tau)  # (B, T, S), or None
            key_log_w = None if key_log_w is None else key_log_w[..., k]
            layers = [SlotOfTokens(before) for before in seen]
            h.append(self.transform(x, positions, key_log_w, layers))
            seen = [layer.seen for layer in layers]
            if k == 0:
                s, log_w = self.route(h[0][:, :, None], alpha)  # (B, T, S)
            x = self.feed_back(h[-1], e)
        return torch.stack(h, dim=2), s, log_w

    def ponder_token(self, token, position, cache, tau=1e-4, alpha=0.0):
        for layer in cache:
            layer.k = 0  # a token begins
        return super().ponder_token(token, position, cache, tau, alpha)

    def new_cache(self):
        return [SlotCache(self.config.ponder_steps + 1) for _ in self.model.layers]


class SlotOfTokens:
    """One layer's attention of slot k of all tokens. A new one for each pass, which leaves the last one's
    keys as they were: a pass can be computed again in the backward pass."""

    def __init__(self, before):
        self.before = before  # keys, values and log w of the slots before k

    def attend(self, q, k, v, log_w):
        self.seen = k, v, k.new_zeros(k.size(0), k.size(2)) if log_w is None else log_w
        if self.before:
            pairs = zip(self.before, self.seen, (2, 2, 1), strict=True)
            self.seen = tuple(torch.cat([a, b], dim) for a, b, dim in pairs)
        return attend_to_slots(q, *self.seen)


class SlotCache:
    """One layer's keys and values, by slot number: slot k of a token sees those of slots 0 .. k so far."""

    def __init__(self, S):
        self.slots, self.k = [LayerCache() for _ in range(S)], 0

    def attend(self, q, k, v, log_w):
        d = q.size(-1)
        q, k, v = augment(q, k, v, log_w)
        self.slots[self.k].append(k, v)
        self.k += 1
        k, v = (torch.cat([getattr(x, name) for x in self.slots[: self.k]], 2) for name in ("keys", "values"))
        return attend_to_cache(q, k, v, d)


class Grid(OnGrid, PonderLM3):
    method, title = "grid", "PonderLM-3, grid"


class FixedGrid(OnGrid, FixedDepth):
    method, title = "grid-fixed", "PonderLM-2, grid"
