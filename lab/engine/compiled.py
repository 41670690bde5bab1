"""Compiled passes. On a CPU the pass of a small model is a hundred operations, and starting an operation
takes longer than doing it.

PyTorch writes the pass of all rows (Rows.advance) as one C++ program, once for each way to choose tokens.
That takes ten seconds to a minute. One program serves any number of places. It also computes rows that hold
no text, which does no harm (cuda_graphs.py says why). Where weights are frozen, the compiler stores them in a
packed layout, as slot_step.Product does. torch.compile of the same pass would be half as fast for small
models, because it checks its inputs in Python at every call.
"""

import shutil
import sys
import tempfile
import warnings
from copy import copy

import torch
from torch import nn

from common import UserError
from lab.engine.rows import STATE

# Weights are packed if there are more than so many bytes of them, for a batch of so many rows or more. In
# other cases packed weights are slower.
PACKED_BYTES = 2**26
PACKED_ROWS = 4


class Pass(nn.Module):
    """Rows.advance as a function of tensors: the tensors of STATE, then the layers of the cache, and at last
    a tensor (M,), of which only the length is used: the number of places that the pass sees. The pass changes
    the state and the layers in place."""

    def __init__(self, rows, choice):
        super().__init__()
        self.rows = rows
        self.choice = choice
        # export accepts the router, which turns autocast off inside, only as a submodule.
        self.router = rows.model.router

    def forward(self, *tensors):
        state = tensors[: len(STATE)]
        layers = tensors[len(STATE) : -1]
        places = tensors[-1].size(0)
        rows = copy(self.rows)
        for name, tensor in zip(STATE, state, strict=True):
            setattr(rows, name, tensor)
        rows.cache = copy(rows.cache)
        rows.cache.layers = layers
        rows.cache.seen = None
        return [rows.advance(len(rows.x), places, self.choice)]


class Compiled:
    """Runs the passes of a Rows as compiled programs: it takes the place of the Rows for `advance`.

    Raises:
        UserError: there is no C++ compiler.
    """

    def __init__(self, rows):
        from torch._inductor import config  # here, since the import takes seconds

        self.rows = rows
        self.programs = {}  # {way to choose tokens: the program}
        weights = sum(m.weight.numel() for m in rows.model.modules() if isinstance(m, nn.Linear))
        self.frozen = len(rows.x) >= PACKED_ROWS and 4 * weights > PACKED_BYTES  # 4 bytes in float32
        compiler = config.cpp.cxx[-1].split()[0]
        if not shutil.which(compiler):
            raise UserError(
                f"--compile needs a C++ compiler, but {compiler} was not found: install it, or omit --compile"
            )

    def advance(self, A, places, choice):
        """As Rows.advance; but all rows run, whatever A is."""
        return self.programs[choice](self.tensors(places))[0]

    def prepare(self, choice):
        """Compile the program for a way to choose tokens, unless that has been done."""
        if choice not in self.programs:
            self.programs[choice] = self.compile(choice)

    def tensors(self, places):
        """The arguments of Pass."""
        state = [getattr(self.rows, name) for name in STATE]
        return [*state, *self.rows.cache.layers, torch.empty(places)]

    def compile(self, choice):
        """Compile the pass for a way to choose tokens.

        Returns:
            The program: a function of one list, the arguments of Pass. It returns a list of one result.
        """
        from torch._inductor import aoti_compile_and_package, aoti_load_package, config

        print("compiling the decoding step (this takes 10 to 60 seconds)", file=sys.stderr, flush=True)
        places = torch.export.Dim("places")
        capacity = torch.export.Dim("capacity")
        sizes = [None] * len(STATE) + [{2: capacity}] * len(self.rows.cache.layers) + [{0: places}]
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what a later torch will change
            example = tuple(self.tensors(2))  # export would specialise the program on 0 places, or on 1
            program = torch.export.export(Pass(self.rows, choice), example, dynamic_shapes=[tuple(sizes)])
            # The output path is temporary. Without one, a copy of the weights would stay in the compiler's
            # cache folder.
            with config.patch({"freezing": self.frozen, "aot_inductor.output_path": folder}):
                file = aoti_compile_and_package(program, package_path=f"{folder}/pass.pt2")
            # The loader is called, not the package: the package sorts its arguments at every call, which
            # takes as long as a layer.
            return aoti_load_package(file).loader.boxed_run
