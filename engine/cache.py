"""Keys and values of executed slots, one row a sequence, with room for more.

An empty place has a key bias that hides it. So rows of different lengths need no mask, and whatever
lies behind a row's end does not matter to it.

code       shape                  meaning
layers     L of (B, 2G, M, d')    a layer: the keys of G heads, with their bias, then values
d, d'                             head width without and with the bias channel, see attention
"""

import torch

from attention import MASKED, attend_causally, augment, key_channels, padded_width

BLOCK = 256  # places by which the cache grows


class SlotCache:
    def __init__(self, config, rows, dtype, device):
        self.G, self.d = config.key_value_heads, config.head_width
        self.width = padded_width(self.d)
        self.shape = config.num_hidden_layers, rows, 2 * self.G, self.width
        self.dtype, self.device, self.block = dtype, device, BLOCK
        masked = torch.tensor(MASKED, device=device)
        self.masked = key_channels(masked, self.d, dtype)  # (d'-d,) of a key that is not there
        self.layers, self.seen = self.empty(0), {}
        self.used = 0  # places that any row has used so far: behind them all are empty

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
            self.used = max(self.used, places)
            views = [x[:rows, :, :places].split(self.G, dim=1) for x in self.layers]
            self.seen = {(rows, places): views}
        return self.seen[rows, places]

    def clear(self, row, first=0):
        """Forget what a row holds from place `first` on."""
        for layer in self.layers:
            layer[row, : self.G, first : self.used, self.d :] = self.masked

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
        self.cache.used = max(self.cache.used, N)
        kv = torch.cat([k, v], dim=1)  # (R, 2G, N, d')
        self.cache.layers[self.layer][self.at[self.rows], :, :N] = kv.to(self.cache.dtype)
        return attend_causally(q, k, v, d)
