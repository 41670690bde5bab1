"""Where tests run: on the CPU, also where there is a GPU.

With PONDERLM_TEST_DEVICE=cuda the equivalence tests run there, and no others:

    PONDERLM_TEST_DEVICE=cuda python -m pytest

Then what these tests make lies on the device, and what the program makes lies where it says.
PONDERLM_TEST_DEVICE=pretended does the same on a GPU that is not there (pretended_cuda.py).
"""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from pretended_cuda import pretended_cuda
from torch.overrides import TorchFunctionMode

TESTS = str(Path(__file__).parent)
DEVICE = os.environ.get("PONDERLM_TEST_DEVICE", "cpu")
if DEVICE != "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of processes that tests start, too
TEST_DEVICE = torch.device("cpu" if DEVICE == "cpu" else "cuda")
EQUIVALENCE = {f"root/test_{name}.py" for name in ("attention", "golden", "model", "router")}
EQUIVALENCE |= {"lab/test_kernels.py", "methods/test_grid.py", "methods/test_equivalence.py"}
EQUIVALENCE |= {"engine/test_batching.py", "engine/test_states.py"}
# Tests in these files that make modules of their own, that are about files, other devices or the
# compiler, or that count what runs: on a GPU more does, so that nobody has to wait.
ON_CPU = {"test_initialisation", "test_tolerance_by_type"}
ON_CPU |= {"test_files", "test_damaged_files", "test_k0_is_llama"}
ON_CPU |= {"test_what_cannot_be", "test_compiled", "test_frozen"}
ON_CPU |= {"test_bfloat16", "test_bias_in_half_precision", "test_nobody_waits"}
ON_CPU |= {"test_alpha_shifts_and_a_scalar_would_not"}
ON_CPU |= {"test_router_keeps_float32_under_autocast", "test_decoding_kernels"}
ON_CPU |= {"test_steps_that_fall_and_rise", "test_keys_that_heads_share"}
FACTORIES = {torch.tensor, torch.arange, torch.zeros, torch.ones, torch.full, torch.empty}
FACTORIES |= {torch.eye, torch.rand, torch.randn, torch.randint, torch.logspace, torch.linspace}


class OnDevice(TorchFunctionMode):
    """Puts what a test makes on its device, with the numbers that it has on a CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or func not in FACTORIES or "device" in kwargs:
            return func(*args, **kwargs)
        if not sys._getframe(1).f_code.co_filename.startswith(TESTS):  # made by the program
            return func(*args, **kwargs)
        grad = kwargs.pop("requires_grad", False)
        return func(*args, **kwargs).to(TEST_DEVICE).requires_grad_(grad)


MODES = ExitStack()  # for as long as the tests run
if DEVICE == "pretended":
    MODES.enter_context(pretended_cuda())
if DEVICE != "cpu":
    MODES.enter_context(OnDevice())
