"""Keys and values of the slots that ran: one row per running text, with room for more.

An empty place has a key too; the log w of that key hides it from every query. So rows of different lengths
need no mask: a row does not see the places after its end.

code       shape                  meaning
B                                 rows: texts that run at once
M                                 places of a row; every slot that runs fills one
layers     L of (B, 2G, M, d')    for each layer the keys of G heads, with their log w, and then the values
views      L of two (A, G, M, d') keys and values of the rows and places that a pass sees
d, d'                             head width without and with the channels of log w, see kernels.py
"""

import math

import torch
import torch.nn.functional as F

from attention import LOG_W_HIDDEN
from lab.kernels import UNIT, attend, augment, key_channels, padded_width

BLOCK = 256  # the cache grows by multiples of this many places


def cache_width(model):
    """d': the width of a key or value in the cache of a model."""
    d = model.config.head_width
    if model.grid:
        return padded_width(d, more=model.config.ponder_steps)  # see slot_channels
    return padded_width(d)


def slot_channels(K, d, dtype, device):
    """The mask of the grid as part of the dot product.

    On the grid, slot k sees slots up to k only (methods/grid.py), but this cache holds the keys of all slots
    side by side. So queries and keys have K more channels, 1 .. K. The key of slot k holds LOG_W_HIDDEN (up
    to a factor) in channel k, and a query of slot k holds 1 (up to a factor) in the channels after k; their
    other components are 0. A query of slot k thus adds LOG_W_HIDDEN to the scores of keys of later slots, and
    0 to the scores of the others.

    Returns:
        The channels of queries and those of keys, by slot: (S, K) each.
    """
    slot = torch.arange(K + 1, device=device)[:, None]
    channel = torch.arange(1, K + 1, device=device)
    queries = (slot < channel) * UNIT
    keys = (slot == channel) * (LOG_W_HIDDEN * math.sqrt(d) / UNIT)
    return queries.to(dtype), keys.to(dtype)


class SlotCache:
    """The cache of a batch.

    Args:
        model: the model that computes the keys and values.
        rows: B, texts that run at once.
        dtype: the dtype of keys and values.
        device: the device that holds them.
    """

    def __init__(self, model, rows, dtype, device):
        config = model.config
        self.G = config.kv_heads
        self.d = config.head_width
        self.width = cache_width(model)
        self.shape = config.num_hidden_layers, rows, 2 * self.G, self.width
        self.dtype = dtype
        self.device = device
        self.block = BLOCK
        masked = key_channels(torch.tensor(LOG_W_HIDDEN, device=device), self.d, dtype)
        # The channels of a hidden key, (d'-d,).
        self.masked = F.pad(masked, (0, self.width - self.d - len(masked)))
        self.layers = self.empty(0)
        self.seen = None  # how many rows and places `views` were made for
        self.views = None

    def empty(self, places):
        """New layers with so many places in each row, all of them empty."""
        L, rows, heads, width = self.shape
        layers = torch.zeros(L, rows, heads, places, width, dtype=self.dtype, device=self.device)
        layers[:, :, : self.G, :, self.d :] = self.masked
        return list(layers)

    def reserve(self, places):
        """Give every row room for so many places. `layers` may be new tensors afterwards."""
        before = self.layers[0].size(2)
        if places <= before:
            return
        larger = self.empty(math.ceil(places / self.block) * self.block)
        for new, old in zip(larger, self.layers, strict=True):
            new[:, :, :before] = old
        self.layers = larger
        self.seen = None

    def see(self, rows, places):
        """Set `views` to the first so many rows and places. Views are kept: making them takes time."""
        if self.seen == (rows, places):
            return
        self.views = [layer[:rows, :, :places].split(self.G, dim=1) for layer in self.layers]
        self.seen = rows, places

    def clear(self, row, first=0):
        """Empty a row from place `first` on. A row without a text is not empty: passes write into it."""
        for layer in self.layers:
            layer[row, : self.G, first:, self.d :] = self.masked

    def copy(self, source, target, length):
        """Replace row `target` by the first `length` places of row `source`."""
        for layer in self.layers:
            layer[target, :, :length] = layer[source, :, :length]
        self.clear(target, length)


class PromptLayer:
    """One layer's attention while prompts are read in parallel. It is causal, and writes its keys and values
    into the cache.

    It takes the place of a model.LayerCache, which serves the decoding of one token at a time.

    Args:
        cache: the SlotCache.
        layer: the number of the layer.
        at: (R,) the rows of the cache into which the R prompts are read.
    """

    def __init__(self, cache, layer, at):
        self.cache = cache
        self.layer = layer
        self.at = at
        self.rows = None  # which of the R prompts are in the next pass; states.settle sets this

    def attend(self, q, k, v, log_w):
        """Causal attention of N slots. q (R, H, N, d), k and v (R, G, N, d) -> (R, H, N, d)."""
        d = q.size(-1)
        N = q.size(2)
        if log_w is None:
            log_w = k.new_zeros(k.size(0), N)
        q, k, v = augment(q, k, v, log_w)
        self.cache.reserve(N)
        kv = torch.cat([k, v], dim=1)  # (R, 2G, N, d')
        self.cache.layers[self.layer][self.at[self.rows], :, :N] = kv.to(self.cache.dtype)
        return attend(q, k, v, d)


class GridPrompt:
    """One layer's attention while prompts are read in parallel on the grid, where pass k runs slot k of some
    tokens.

    states.read_on_grid chooses these tokens, and sets `mask` to what each of them sees. Keys and values stay
    here until `write` copies them into the cache.
    """

    def __init__(self):
        self.slots = []  # for slots 0 .. k the keys and values, (R, G, N, d') each
        self.mask = None  # (R, 1, N, keys so far), True where a query sees a key

    def attend(self, q, k, v, log_w):
        """Attention of slot k to all slots so far. Shapes as PromptLayer.attend."""
        d = q.size(-1)
        q, k, v = augment(q, k, v, log_w)
        self.slots.append((k, v))
        keys, values = self.so_far()
        return attend(q, keys, values, d, self.mask)

    def so_far(self):
        """Keys and values of all slots so far, (R, G, keys so far, d') each."""
        keys = torch.cat([k for k, _ in self.slots], dim=2)
        values = torch.cat([v for _, v in self.slots], dim=2)
        return keys, values

    def write(self, cache, layer, rows, key_of_place, channels):
        """Write into rows of the cache.

        Args:
            cache: the SlotCache.
            layer: the number of the layer.
            rows: (R,) rows of the cache.
            key_of_place: (R, n) for each of the first n places of a row, which of all keys it receives.
            channels: (all keys, K) the channels that say to which slot a key belongs, see slot_channels.
        """
        kv = torch.cat(self.so_far(), dim=1).to(cache.dtype)
        kv = F.pad(kv, (0, cache.width - kv.size(-1)))  # (R, 2G, all keys, d')
        first = cache.d + 2  # after the two channels of log w
        kv[:, : cache.G, :, first : first + channels.size(-1)] = channels
        n = key_of_place.size(1)
        index = key_of_place[:, None, :, None].expand(-1, kv.size(1), -1, kv.size(-1))  # (R, 2G, n, d')
        cache.layers[layer][rows, :, :n] = kv.gather(2, index)
