"""The grid: PonderLM-3 and PonderLM-2 with the mask of adaptive latent chain-of-thought (arXiv 2602.08220).

    slot (t, k) sees slot (t', k')  <=>  t' <= t and k' <= k

Slot k of all tokens then depends only on slots up to k. So K+1 passes of one slot per token compute all
states exactly, where the Jacobi iteration needs more and longer passes to come near. There is no R and no
fixed point. Only the mask is taken from that paper: router, log w on keys, mixture and early exit are
PonderLM-3's.
The grid has a cost: slot 0 of a token no longer sees the extra steps of the tokens before it.
"""

import torch

from attention import attend_to_cache, augment
from lab.kernels import attend_to_slots
from lab.methods import FixedDepth, PonderLM3
from model import LayerCache


class OnGrid:
    """What both methods on the grid share. It precedes PonderLM3 or FixedDepth among the bases."""

    iterates = False
    grid = True

    def states(self, idx, R=None, tau=None, alpha=0.0):
        e = self.embed(idx)  # (B, T, D)
        x = e
        h = []  # for each slot (B, T, D)
        seen = [None] * self.config.num_hidden_layers  # for each layer what SlotOfTokens.seen holds
        positions = torch.arange(idx.size(1), device=idx.device)
        log_w = torch.zeros_like(x[..., :1], dtype=torch.float32)  # (B, T, 1) of slot 0
        for k in range(self.config.ponder_steps + 1):
            key_log_w = self.mask_keys(log_w, tau)  # (B, T, S), or None
            if key_log_w is not None:
                key_log_w = key_log_w[..., k]
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
        return [CacheBySlot(self.config.ponder_steps + 1) for _ in self.model.layers]


class SlotOfTokens:
    """One layer's attention of slot k of all tokens.

    Each pass has a new object, and does not change the keys of earlier passes. So a pass can be recomputed
    during backpropagation.

    Args:
        before: keys, values and log w of the slots before k; None for slot 0.
    """

    def __init__(self, before):
        self.before = before
        self.seen = None  # keys, values and log w of the slots up to k, once `attend` has run

    def attend(self, q, k, v, log_w):
        """q (B, H, T, d), k and v (B, G, T, d), log_w (B, T) or None -> (B, H, T, d)."""
        if log_w is None:
            log_w = k.new_zeros(k.size(0), k.size(2))
        if self.before:
            keys, values, earlier_log_w = self.before
            k = torch.cat([keys, k], dim=2)
            v = torch.cat([values, v], dim=2)
            log_w = torch.cat([earlier_log_w, log_w], dim=1)
        self.seen = k, v, log_w
        return attend_to_slots(q, k, v, log_w)


class CacheBySlot:
    """One layer's keys and values, stored by slot: slot k of a token sees those of slots 0 .. k so far."""

    def __init__(self, S):
        self.slots = [LayerCache() for _ in range(S)]
        self.k = 0  # which slot is next

    def attend(self, q, k, v, log_w):
        """As LayerCache.attend."""
        d = q.size(-1)
        q, k, v = augment(q, k, v, log_w)
        self.slots[self.k].append(k, v)
        self.k += 1
        visible = self.slots[: self.k]
        keys = torch.cat([slot.keys for slot in visible], dim=2)
        values = torch.cat([slot.values for slot in visible], dim=2)
        return attend_to_cache(q, keys, values, d)


class Grid(OnGrid, PonderLM3):
    method = "grid"
    title = "PonderLM-3, grid"


class FixedGrid(OnGrid, FixedDepth):
    method = "grid-fixed"
    title = "PonderLM-2, grid"
