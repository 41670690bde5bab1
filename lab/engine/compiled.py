"""Compiled passes. On a CPU the pass of a small model is a hundred operations, and starting an operation
takes longer than doing it.

PyTorch writes the pass of all rows (Rows.advance) as one C++ program, once for each way to choose tokens.
That takes ten seconds to a minute. The program is the same for any number of places. It also computes rows
that no text is in, which does no harm, as in a CUDA graph. The compiler packs weights that are frozen, as
slot_step.Product does. torch.compile of the same pass is half as fast for small models, because it checks its
inputs in Python at every call.
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

# The compiler packs weights of more bytes than FROZEN for FEW rows or more; in other cases that is slower.
FROZEN = 2**26
FEW = 4


class Pass(nn.Module):
    """Rows.advance as a function of tensors: the state of the rows, the layers of the cache, both of which it
    changes, and a tensor (M,) whose length is the number of places that it sees."""

    def __init__(self, rows, choice):
        super().__init__()
        self.rows = rows
        self.choice = choice
        self.router = rows.model.router  # a submodule, as the compiler wants it to be, since it ends autocast

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
    """Takes the place of Rows for `advance`.

    Raises:
        UserError: there is no C++ compiler.
    """

    def __init__(self, rows):
        from torch._inductor import config  # here, since the import takes seconds

        self.rows = rows
        self.programs = {}  # by the way to choose tokens
        weights = sum(m.weight.numel() for m in rows.model.modules() if isinstance(m, nn.Linear))
        self.frozen = len(rows.x) >= FEW and 4 * weights > FROZEN
        compiler = config.cpp.cxx[-1].split()[0]
        if not shutil.which(compiler):
            raise UserError(f"no C++ compiler, which --compile needs: install {compiler}, or omit --compile")

    def advance(self, A, places, choice):
        """As Rows.advance, for all rows whatever A is."""
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
        """-> a function of a list of the arguments of Pass"""
        from torch._inductor import aoti_compile_and_package, aoti_load_package, config

        print("compiling the pass, 10 to 60 seconds", file=sys.stderr, flush=True)
        places = torch.export.Dim("places")
        capacity = torch.export.Dim("capacity")
        sizes = [None] * len(STATE) + [{2: capacity}] * len(self.rows.cache.layers) + [{0: places}]
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what a later torch will change
            example = tuple(self.tensors(2))
            program = torch.export.export(Pass(self.rows, choice), example, dynamic_shapes=[tuple(sizes)])
            # With a path to write to; otherwise a copy of the weights would stay in the compiler's own
            # folder.
            with config.patch({"freezing": self.frozen, "aot_inductor.output_path": folder}):
                file = aoti_compile_and_package(program, package_path=f"{folder}/pass.pt2")
            # Not the package itself: it sorts its arguments at every call, which takes as long as a layer.
            return aoti_load_package(file).loader.boxed_run
