"""Passes compiled: on a CPU a small model's pass is a hundred operations, and starting one takes longer than
doing it.

PyTorch writes the pass of all rows (Rows.advance) as one C++ program, once for each way to choose, which
takes ten seconds to a minute. Any number of places is the same program. A row that nobody is in is computed,
too, and does not matter, as in a CUDA graph. Weights that are frozen are packed by the compiler, as
slot_step.Product does it. torch.compile of the same pass has half the speed where a model is small: it checks
its inputs in Python at each call.
"""

import shutil
import sys
import tempfile
import warnings
from copy import copy

import torch
from torch import nn

from data import UserError
from lab.engine.rows import STATE

FROZEN = 2**26  # bytes of weights beyond which the compiler packs them, from FEW rows on: else that is slower
FEW = 4


class Pass(nn.Module):
    """Rows.advance as a function of what it changes, the state of the rows and the layers of the
    cache, and of a tensor (M,) with a number for each place that it sees."""

    def __init__(self, rows, choice):
        super().__init__()
        self.rows, self.choice = rows, choice
        self.router = rows.model.router  # the compiler has to know it as a part: it ends autocast

    def forward(self, *tensors):
        rows = copy(self.rows)
        vars(rows).update(zip(STATE, tensors[: len(STATE)], strict=True))
        rows.cache = copy(rows.cache)
        rows.cache.layers, rows.cache.seen = tensors[len(STATE) : -1], None
        return [rows.advance(len(rows.x), tensors[-1].size(0), self.choice)]


class Compiled:
    """Stands in for Rows.advance. UserError: there is no C++ compiler."""

    def __init__(self, rows):
        from torch._inductor import config  # here, since it takes seconds

        self.rows, self.programs = rows, {}
        weights = sum(m.weight.numel() for m in rows.model.modules() if isinstance(m, nn.Linear))
        self.frozen = len(rows.x) >= FEW and 4 * weights > FROZEN
        if not shutil.which(compiler := config.cpp.cxx[-1].split()[0]):
            raise UserError(f"to compile takes a C++ compiler: install {compiler}")

    def advance(self, A, places, choice):
        """As Rows.advance, for all rows."""
        return self.programs[choice](self.tensors(places))[0]

    def prepare(self, choice):
        """Before the first pass with that way to choose."""
        if choice not in self.programs:
            self.programs[choice] = self.compile(choice)

    def tensors(self, places):
        return [*(getattr(self.rows, name) for name in STATE), *self.rows.cache.layers, torch.empty(places)]

    def compile(self, choice):
        """-> a function of a list of the tensors of Pass."""
        from torch._inductor import aoti_compile_and_package, aoti_load_package, config

        print("compiling the pass, 10 to 60 seconds", file=sys.stderr, flush=True)
        places, capacity = map(torch.export.Dim, ("places", "capacity"))
        sizes = *[None] * len(STATE), *[{2: capacity}] * len(self.rows.cache.layers), {0: places}
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a later torch will change
            example, whole = (*self.tensors(2),), Pass(self.rows, choice)
            program = torch.export.export(whole, example, dynamic_shapes=[sizes])
            # Where it writes, or a copy of the weights would stay in the compiler's own folder.
            with config.patch({"freezing": self.frozen, "aot_inductor.output_path": folder}):
                file = aoti_compile_and_package(program, package_path=f"{folder}/pass.pt2")
            # Not the model: it sorts its arguments in each call, which takes as long as a layer.
            return aoti_load_package(file).loader.boxed_run
