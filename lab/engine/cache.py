"""Keys and values of executed slots, one row a sequence, with room for more.

The key of an empty place has a log w that hides it. So rows of different lengths need no mask, and
whatever lies behind a row's end does not matter to it.

code       shape                  meaning
layers     L of (B, 2G, M, d')    a layer: the keys of G heads, with their log w, then values
d, d'                             head width without and with channels, see kernels.py
"""

import math

import torch
import torch.nn.functional as F

from attention import MASKED
from lab.kernels import UNIT, attend, augment, key_channels, padded_width

BLOCK = 256  # places by which the cache grows


def cache_width(model):
    """d' of a model."""
    d = model.config.d
    return padded_width(d + model.config.ponder_steps + 1 if model.grid else d)


def slot_channels(K, d, dtype, device):
    """The mask of the grid as part of the dot product, since here keys of all slots lie side by side: K
    more channels of queries and keys by their slots, (S, K) each."""
    slot = torch.arange(K + 1, device=device)[:, None]
    channel = torch.arange(1, K + 1, device=device)
    queries = (slot < channel) * UNIT
    keys = (slot == channel) * (MASKED * math.sqrt(d) / UNIT)
    return queries.to(dtype), keys.to(dtype)


class SlotCache:
    def __init__(self, model, rows, dtype, device):
        config = model.config
        self.G, self.d, self.width = config.G, config.d, cache_width(model)
        self.shape = config.num_hidden_layers, rows, 2 * self.G, self.width
        self.dtype, self.device, self.block = dtype, device, BLOCK
        masked = key_channels(torch.tensor(MASKED, device=device), self.d, dtype)  # of no key
        self.masked = F.pad(masked, (0, self.width - self.d - len(masked)))  # (d'-d,)
        self.layers, self.seen = self.empty(0), None  # how many rows and places `views` are of

    def empty(self, places):
        """Layers in which every place is empty."""
        L, rows, heads, width = self.shape
        layers = torch.zeros(L, rows, heads, places, width, dtype=self.dtype, device=self.device)
        layers[:, :, : self.G, :, self.d :] = self.masked
        return list(layers)

    def reserve(self, places):
        """Give every row room for so many places. Tensors of layers may be new ones afterwards."""
        before = self.layers[0].size(2)
        if places > before:
            larger = self.empty(-(-places // self.block) * self.block)
            for new, old in zip(larger, self.layers, strict=True):
                new[:, :, :before] = old
            self.layers, self.seen = larger, None

    def clear(self, row, first=0):
        """Forget what a row holds from place `first` on, written with nobody in it or not."""
        for layer in self.layers:
            layer[row, : self.G, first:, self.d :] = self.masked

    def copy(self, source, target, length):
        """Row `target` becomes the first `length` places of row `source`."""
        for layer in self.layers:
            layer[target, :, :length] = layer[source, :, :length]
        self.clear(target, length)


class PromptLayer:
    """One layer's attention while prompts are read: causal, and all that it sees is written down.

    Stands where a LayerCache stands when a token is decoded.
    """

    def __init__(self, cache, layer, at):
        self.cache, self.layer = cache, layer
        self.at = at  # (R,) the rows of the cache that the prompts will have
        self.rows = None  # which of these prompts a pass is about: prefill.settle says it

    def attend(self, q, k, v, log_w):
        d, N = q.size(-1), q.size(2)
        q, k, v = augment(q, k, v, k.new_zeros(k.size(0), N) if log_w is None else log_w)
        self.cache.reserve(N)
        kv = torch.cat([k, v], dim=1)  # (R, 2G, N, d')
        self.cache.layers[self.layer][self.at[self.rows], :, :N] = kv.to(self.cache.dtype)
        return attend(q, k, v, d)


class GridPrompt:
    """The same on the grid, of slot k of some tokens after that of slot k-1: prefill.read_on_grid
    says which, and what each of them sees."""

    def __init__(self):
        self.slots = []  # keys and values of slots 0 .. k, (R, G, N, d') each
        self.mask = None  # (R, 1, N, all so far)

    def attend(self, q, k, v, log_w):
        d = q.size(-1)
        q, k, v = augment(q, k, v, log_w)
        self.slots.append((k, v))
        return attend(q, *self.so_far(), d, self.mask)

    def so_far(self):
        return [torch.cat(parts, dim=2) for parts in zip(*self.slots, strict=True)]

    def write(self, cache, layer, rows, order, channels):
        """Into rows of the cache.

        order: (R, N) the places of executed slots among all. channels: (N all, K) of their slots.
        """
        kv = torch.cat(self.so_far(), dim=1).to(cache.dtype)
        kv = F.pad(kv, (0, cache.width - kv.size(-1)))  # (R, 2G, N all, d')
        kv[:, : cache.G, :, cache.d + 2 : cache.d + 2 + channels.size(-1)] = channels
        places = order[:, None, :, None].expand(-1, kv.size(1), -1, kv.size(-1))
        cache.layers[layer][rows, :, : order.size(1)] = kv.gather(2, places)
