"""Passes as CUDA graphs: a pass is a hundred small kernels, and Python takes longer to launch them
one by one than the GPU to run them.

A graph is recorded once for each number of rows, each size of the cache and each way to choose, and
replayed in one launch. Both sizes are rounded up (`rounded`), so that there are few: what a row
does that nobody is in does not matter, and places behind a row's end hide themselves. All graphs
share one pool of memory: no two run at once, what passes hand on (rows.py) lies outside of it, and
a result is copied before the next pass.
"""

import torch

from lab.engine.rows import STATE
from lab.kernels import decoding_kernels


def rounded(n):
    """n, up to the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, .."""
    power = 1 << max(n - 1, 0).bit_length()  # 2^j >= n
    return 3 * power // 4 if power > 2 and n <= 3 * power // 4 else power


class Graphs:
    """Stands in for Rows.advance. Off CUDA, and if not `on`, it runs the same passes of the same sizes."""

    def __init__(self, rows, on=True):
        self.rows, self.recorded, self.pool, self.current = rows, {}, None, None
        self.on = on and rows.x.is_cuda
        # One for all: CUDA's libraries keep working memory for each stream that they meet.
        self.stream = torch.cuda.Stream() if self.on else None

    def advance(self, *key):
        """As Rows.advance. The result is overwritten by the next pass."""
        current = self.rows.cache.layers[0].size(2), key[2:]
        if current != self.current:
            # The cache has grown into other tensors, or tokens are chosen otherwise. A pool of memory ends
            # with its last graph.
            self.recorded, self.pool, self.current = {}, None, current
        if not self.on:
            with decoding_kernels(self.rows.x.device):
                return self.rows.advance(*key)
        if key not in self.recorded:
            with decoding_kernels(self.rows.x.device):
                self.recorded[key] = self.record(key)
        replay, out = self.recorded[key]
        replay()
        return out

    def record(self, key):
        """-> what replays the pass, and where its result will be."""
        rows, state = self.rows, [getattr(self.rows, name) for name in STATE]
        before = [tensor.clone() for tensor in state]
        rows.counters[:, 5] = 0  # nobody moves: each row writes again and again to its next place
        side = self.stream  # a recording needs kernels that have run before, elsewhere
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                rows.advance(*key)
        torch.cuda.current_stream().wait_stream(side)
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=side):
            out = rows.advance(*key)
        self.pool = graph.pool()
        return graph.replay, out


class Fetched:
    """A small result of the device on its way to the host, which does not wait for it yet."""

    def __init__(self, out):
        self.out, self.event = torch.empty(out.shape, dtype=out.dtype, pin_memory=True), torch.cuda.Event()
        self.out.copy_(out, non_blocking=True)
        self.event.record()

    def tolist(self):
        self.event.synchronize()
        return self.out.tolist()
