"""Keys and values of executed slots, one row a sequence, with room for more.

An empty place has a key bias that hides it. So rows of different lengths need no mask, and whatever
lies behind a row's end does not matter to it.

code       shape                  meaning
layers     L of (B, 2G, M, d')    a layer: the keys of G heads, with their bias, then values
d, d'                             head width without and with the bias channel, see attention
"""

import torch
import torch.nn.functional as F

from attention import MASKED, attend_causally, augment, key_channels, padded_width

BLOCK = 256  # places by which the cache grows


def cache_width(model):
    """d' of a model."""
    d = model.config.head_width
    return padded_width(d + model.config.ponder_steps + 1 if model.grid else d)


class SlotCache:
    def __init__(self, model, rows, dtype, device):
        config = model.config
        self.G, self.d = config.key_value_heads, config.head_width
        self.width = cache_width(model)
        self.shape = config.num_hidden_layers, rows, 2 * self.G, self.width
        self.dtype, self.device, self.block = dtype, device, BLOCK
        masked = torch.tensor(MASKED, device=device)
        masked = key_channels(masked, self.d, dtype)  # of a key that is not there
        self.masked = F.pad(masked, (0, self.width - self.d - len(masked)))  # (d'-d,)
        self.layers, self.seen = self.empty(0), {}

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
            self.layers, self.seen = larger, {}

    def views(self, rows, places):
        """The first rows and places of each layer: [keys, values], each (rows, G, places, d')."""
        if (rows, places) not in self.seen:  # making them takes as long as a norm
            views = [x[:rows, :, :places].split(self.G, dim=1) for x in self.layers]
            self.seen = {(rows, places): views}
        return self.seen[rows, places]

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

    def attend(self, q, k, v, key_bias):
        d, N = q.size(-1), q.size(2)
        if key_bias is None:
            key_bias = k.new_zeros(k.size(0), N)
        q, k, v = augment(q, k, v, key_bias)
        self.cache.reserve(N)
        kv = torch.cat([k, v], dim=1)  # (R, 2G, N, d')
        self.cache.layers[self.layer][self.at[self.rows], :, :N] = kv.to(self.cache.dtype)
        return attend_causally(q, k, v, d)


class GridPrompt:
    """The same on the grid, of slot k of some tokens after that of slot k-1: prefill.read_on_grid
    says which, and what each of them sees."""

    def __init__(self):
        self.slots = []  # keys and values of slots 0 .. k, (R, G, N, d') each
        self.mask = None  # (R, 1, N, all so far)

    def attend(self, q, k, v, key_bias):
        d = q.size(-1)
        q, k, v = augment(q, k, v, key_bias)
        self.slots.append((k, v))
        k, v = (torch.cat(parts, dim=2) for parts in zip(*self.slots, strict=True))
        return attend_causally(q, k, v, d, self.mask)

    def write(self, cache, layer, rows, order, channels):
        """Into rows of the cache.

        order: (R, N) the places of executed slots among all. channels: (N all, K) of their slots.
        """
        kv = torch.cat([torch.cat(parts, dim=2) for parts in zip(*self.slots, strict=True)], dim=1)
        kv = F.pad(kv.to(cache.dtype), (0, cache.width - kv.size(-1)))  # (R, 2G, N all, d')
        kv[:, : cache.G, :, cache.d + 2 : cache.d + 2 + channels.size(-1)] = channels
        places = order[:, None, :, None].expand(-1, kv.size(1), -1, kv.size(-1))
        cache.layers[layer][rows, :, : order.size(1)] = kv.gather(2, places)
