"""The slot step with static shapes, so that a GPU can replay it as one CUDA graph.

A step of one slot is a hundred small kernels, and launching them from Python takes longer than
running them. A graph is recorded once for each number of rows and each size of the cache, in blocks
of it, and then replayed in one launch. What lies behind a sequence's end in the cache hides itself,
so that looking at the rest of a block changes nothing.
"""

import torch


class StaticStep:
    """Stands in for a SlotStep. Off CUDA it runs the same on the same static buffers."""

    def __init__(self, step, block):
        self.step, self.block, self.recorded, self.kv = step, block, {}, None

    def __call__(self, x, kv, places, position, length, bias):
        if kv is not self.kv:  # the cache has grown: it lies elsewhere
            self.recorded, self.kv = {}, kv
        key = len(x), -(-places // self.block) * self.block
        inputs = x, position, length, bias
        if key not in self.recorded:
            self.recorded[key] = self.record(inputs, kv, key[1])
        buffers, out, replay = self.recorded[key]
        for buffer, value in zip(buffers, inputs, strict=True):
            buffer.copy_(value)
        replay()
        return out

    def record(self, inputs, kv, places):
        """-> input buffers, the output, and what computes it from them."""
        x, position, length, bias = buffers = [value.clone() for value in inputs]

        def run():  # writes the same slot into the cache each time
            return self.step(x, kv, places, position, length, bias)

        if not x.is_cuda:
            out = run()
            return buffers, out, lambda: out.copy_(run())
        side = torch.cuda.Stream()  # a recording wants kernels that have run before, elsewhere
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        return buffers, out, graph.replay
