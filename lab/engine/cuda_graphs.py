"""Passes as CUDA graphs: a pass is a hundred small kernels, and Python takes longer to launch them
one by one than the GPU to run them.

A graph is recorded once for each number of rows, each size of the cache and each way to choose, and
replayed in one launch. Both sizes are rounded up (`rounded`), so that there are few: what a row
does that nobody is in does not matter, and places behind a row's end hide themselves. All graphs
share one pool of memory: no two run at once, what passes hand on (rows.py) lies outside of it, and
a result is copied before the next pass.
"""

import torch


def rounded(n):
    """n, up to the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, .."""
    power = 1 << max(n - 1, 0).bit_length()  # 2^j >= n
    return 3 * power // 4 if power > 2 and n <= 3 * power // 4 else power


class Graphs:
    """Stands in for Rows.advance. Off CUDA it runs the same passes of the same sizes."""

    def __init__(self, rows):
        self.rows, self.recorded, self.pool, self.current = rows, {}, None, None
        # One for all: CUDA's libraries keep working memory for each stream that they meet.
        self.stream = torch.cuda.Stream() if rows.x.is_cuda else None

    def advance(self, *key):
        """As Rows.advance. The result is overwritten by the next pass."""
        current = self.rows.cache.layers[0].size(2), key[2:]
        if current != self.current:
            # The cache has grown into other tensors, or tokens are chosen otherwise. A pool of
            # memory ends with its last graph.
            self.recorded, self.pool, self.current = {}, None, current
        if key not in self.recorded:
            self.recorded[key] = self.record(key)
        replay, out = self.recorded[key]
        result = replay()
        return result if out is None else out

    def record(self, key):
        """-> what replays the pass, and where its result will be; None: it returns it itself."""
        rows = self.rows
        if not rows.x.is_cuda:
            return lambda: rows.advance(*key), None
        before = [tensor.clone() for tensor in rows.state]
        rows.counters[:, 5] = 0  # nobody moves: each row writes again and again to its next place
        side = self.stream  # a recording needs kernels that have run before, elsewhere
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                rows.advance(*key)
        torch.cuda.current_stream().wait_stream(side)
        for tensor, value in zip(rows.state, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=side):
            out = rows.advance(*key)
        self.pool = graph.pool()
        return graph.replay, out


class Fetched:
    """A small result of the device on its way to the host, which does not wait for it yet."""

    def __init__(self, out):
        self.out, self.event = out, None
        if torch.is_tensor(out) and out.is_cuda:
            self.out = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
            self.out.copy_(out, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def tolist(self):
        if self.event is not None:
            self.event.synchronize()
        return self.out.tolist() if torch.is_tensor(self.out) else self.out
