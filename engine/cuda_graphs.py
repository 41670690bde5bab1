"""The slot step with static shapes, so that a GPU can replay it as one CUDA graph.

A step of one slot is a hundred small kernels, and launching them from Python takes longer than
running them. A graph is recorded once for each number of rows and each size of the cache, in whole
blocks, and replayed in one launch. Places of a block behind a sequence's end hide themselves, so
that attending to all of the block changes nothing.
"""

import torch


class StaticStep:
    """Stands in for a SlotStep. Off CUDA it runs the same step on the same static buffers."""

    def __init__(self, step, block):
        self.step, self.block = step, block
        self.recorded, self.layers = {}, None

    def __call__(self, x, layers, places, position, length, key_bias):
        if layers is not self.layers:  # the cache has grown: its tensors are others
            self.recorded, self.layers = {}, layers
        key = len(x), -(-places // self.block) * self.block
        inputs = x, position, length, key_bias
        if key not in self.recorded:
            self.recorded[key] = self.record(inputs, layers, key[1])
        buffers, out, replay = self.recorded[key]
        for buffer, value in zip(buffers, inputs, strict=True):
            buffer.copy_(value)
        replay()
        return out

    def record(self, inputs, layers, places):
        """-> input buffers, the output, and the function that computes it from them."""
        x, position, length, key_bias = buffers = [value.clone() for value in inputs]

        def run():  # writes the same slot into the cache each time
            return self.step(x, layers, places, position, length, key_bias)

        if not x.is_cuda:
            out = run()
            return buffers, out, lambda: out.copy_(run())
        side = torch.cuda.Stream()  # a recording needs kernels that have run before, elsewhere
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        return buffers, out, graph.replay
