"""Passes as CUDA graphs. A pass is a hundred small kernels, and launching them one by one from Python takes
longer than running them.

A graph is recorded once for each number of rows, each number of places and each way to choose tokens, and
then replayed in one launch. The numbers of rows and places are rounded up (`rounded`), so that there are few
graphs. That changes no result: a row that holds no text affects no other row, and the keys of empty places
are hidden by their log w. All graphs share one pool of memory. That is safe: two graphs never run at once,
the state that one pass leaves to the next lies outside the pool (rows.py), and a result is copied before the
next pass.
"""

import torch

from lab.engine.rows import STATE
from lab.kernels import decoding_kernels

LIMIT = 5  # the column of `limit` in Rows.counters


def rounded(n):
    """n rounded up to the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, .."""
    power = 1 << max(n - 1, 0).bit_length()  # the smallest power of two that is at least n
    three_quarters = 3 * power // 4
    if power > 2 and n <= three_quarters:
        return three_quarters
    return power


class Graphs:
    """Runs the passes of a Rows as graphs: it takes the place of the Rows for `advance`.

    Args:
        rows: the Rows.
        on: whether to record graphs. If not, and on devices other than CUDA, passes of the same sizes run
            without a graph.
    """

    def __init__(self, rows, on=True):
        self.rows = rows
        self.recorded = {}  # {(A, places, choice): a function that replays the pass, and its result}
        self.pool = None
        self.recorded_for = None  # the capacity of the cache and the choice for which `recorded` holds graphs
        self.on = on and rows.x.is_cuda
        # One stream for all graphs: CUDA's libraries keep working memory for each stream they have seen.
        self.stream = torch.cuda.Stream() if self.on else None

    def advance(self, A, places, choice):
        """As Rows.advance. The next pass overwrites the result."""
        capacity = self.rows.cache.layers[0].size(2)
        if self.recorded_for != (capacity, choice):
            # The cache has grown, and so consists of other tensors, or tokens are chosen in another way. The
            # recorded graphs are of no more use. Their memory is freed with the last of them.
            self.recorded = {}
            self.pool = None
            self.recorded_for = capacity, choice
        key = A, places, choice
        if not self.on:
            with decoding_kernels(self.rows.x.device):
                return self.rows.advance(*key)
        if key not in self.recorded:
            with decoding_kernels(self.rows.x.device):
                self.recorded[key] = self.record(key)
        replay, result = self.recorded[key]
        replay()
        return result

    def record(self, key):
        """Record a pass.

        Args:
            key: its A, places and choice.

        Returns:
            A function that replays the pass, and the tensor into which each replay writes the result.
        """
        rows = self.rows
        state = [getattr(rows, name) for name in STATE]
        before = [tensor.clone() for tensor in state]
        rows.counters[:, LIMIT] = 0  # rows stand still: each writes to its next place again and again
        side = self.stream
        # Before kernels are recorded they have to run a few times, on a stream other than the current one.
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                rows.advance(*key)
        torch.cuda.current_stream().wait_stream(side)
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=side):
            result = rows.advance(*key)
        self.pool = graph.pool()
        return graph.replay, result


class Fetched:
    """A small result on its way from the device to the host. The host waits for it in `tolist`, not
    before."""

    def __init__(self, result):
        self.result = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        self.event = torch.cuda.Event()
        self.result.copy_(result, non_blocking=True)
        self.event.record()

    def tolist(self):
        self.event.synchronize()
        return self.result.tolist()
