"""What the hardware decides: device, precision, whether to compile, and how much fits into memory."""

import math
import os
import platform
import shutil
import subprocess
import sysconfig
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch

from attention import flash_attn_func
from common import UserError, is_out_of_memory, one_line

# -- The device ------------------------------------------------------------------------------------


def pick_device(name="auto"):
    """The device of a name. 'auto' takes CUDA, else MPS, else the CPU.

    Raises:
        UserError: the device cannot be used.
    """
    if name != "auto":
        way_out = "omit --device or use --device cpu"
    elif torch.cuda.is_available():
        name = "cuda"
        way_out = "use --device cpu"
    elif torch.backends.mps.is_available():
        name = "mps"
        way_out = "use --device cpu"
    else:
        note_unusable_gpu()
        return torch.device("cpu")

    try:
        torch.zeros(1, device=name).cpu()
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise UserError(
                f"device {name!r} has no free memory: wait until it is free, or {way_out}"
            ) from None
        reason = one_line(error)[:120]
        raise UserError(f"device {name!r} is not available: {way_out} (torch: {reason})") from None


def note_unusable_gpu():
    """Where torch was built for GPUs and finds none that it can use, pass on its reason."""
    if torch.version.cuda is None:
        return
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        print(f"note: computing on the CPU, because torch cannot use a GPU: {one_line(error)[:200]}")


def has_fast_bfloat16(device):
    """True if the hardware multiplies bfloat16, rather than emulating it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        return supported is not None and supported()
    return False


def pick_precision(name, device):
    """The precision of matrix products. 'auto' takes bfloat16 where the hardware has it, else float32."""
    if name != "auto":
        return name
    return "bfloat16" if has_fast_bfloat16(device) else "float32"


def check_attention(name, device, precision, head_width):
    """Refuse `--attention fa2` where the package flash-attn cannot be used.

    Raises:
        UserError: it says why.
    """
    if name != "fa2":
        return
    if flash_attn_func is None:
        reason = "the package flash-attn is not installed"
    elif device.type != "cuda":
        reason = f"flash-attn needs a GPU, and the device is {device.type}"
    elif precision != "bfloat16":
        reason = f"flash-attn needs half precision, and --precision is {precision}"
    elif head_width > 248:
        # Its limit is 256. The channel of log w and the padding to a multiple of 8 take 8 of them.
        reason = (
            f"flash-attn takes heads up to 248 wide, since log w needs a channel; these are {head_width} wide"
        )
    else:
        return
    raise UserError(
        f"--attention fa2 cannot be used: {reason}. Use --attention sdpa, which gives the same result"
    )


# -- Compilation -----------------------------------------------------------------------------------


def why_not_compile(device):
    """Why torch.compile would fail, or not be worth it, on a device; None if it should work.

    Triton, which compiles for a GPU, builds a small C program on first use. So it needs a C compiler and
    Python's header, which slim images and some Pythons lack.
    """
    if device.type != "cuda":
        return "it pays on a GPU only"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return "triton needs a GPU of compute capability 7.0 or newer"
    compiler = os.environ.get("CC") or "cc"
    if not any(shutil.which(name) for name in (compiler, "gcc", "clang")):
        return "triton needs a C compiler, and there is none: install gcc"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"triton needs {header.name}, which is missing: install python3-dev"
    return None


def should_compile(choice, device):
    """Whether to compile the blocks: 'on', 'off', or 'auto', which compiles on a GPU where that can work."""
    if choice != "auto":
        return choice == "on"
    reason = why_not_compile(device)
    if reason and device.type == "cuda":
        print(f"note: the blocks are not compiled: {reason}")
    return reason is None


def compile_for_training(model):
    """Compile the blocks and the cross-entropy of a model. Evaluation, whose shapes differ, stays uncompiled.

    One graph of a block is compiled for each number of slots that a Jacobi pass can have, K+1 in all. The
    compiled cross-entropy keeps 3 bytes per logit instead of 12 (measured on a CPU in bfloat16).
    """
    # More than K+1. With torch's own limit of 8, some would stay uncompiled from K = 8 on.
    torch._dynamo.config.recompile_limit = max(64, model.config.ponder_steps + 2)
    # DistributedDataParallel would split each block at its buckets. That gains nothing here, because every
    # pass uses all weights, so their gradients are complete only at the end.
    torch._dynamo.config.optimize_ddp = False

    def compiled_in_training(module, plain):
        compiled = torch.compile(plain, dynamic=False)

        def run(*inputs):
            return compiled(*inputs) if module.training else plain(*inputs)

        return run

    for block in model.model.layers:
        block.forward = compiled_in_training(block, block.forward)
    model.cross_entropy = compiled_in_training(model, model.cross_entropy)


# -- Memory ----------------------------------------------------------------------------------------


def eval_batch_size(T, vocab_size, device):
    """How many windows of T tokens to evaluate at once. On a CPU, a few at once are twice as fast as many; on
    a GPU, a few would leave it idle, and there the logits decide: they take at most 1 GiB in float32."""
    if device.type == "cuda":
        tokens = min(16_384, 2**28 // vocab_size)
    else:
        tokens = 1024
    return max(1, tokens // T)


def micro_batch_that_fits(share, most):
    """The size of a micro-batch, in windows: at most `most`, for a process that has `share` windows per step.

    If the size divides the share, all micro-batches are equal, and only one set of shapes is compiled. But
    if no divisor of the share is at least half of `most`, the last micro-batch is smaller than the others.
    """
    if most >= share:
        return share
    divisors = [n for n in range(1, most + 1) if share % n == 0]
    if 2 * divisors[-1] >= most:
        return divisors[-1]
    parts = math.ceil(share / most)
    return math.ceil(share / parts)


def memory_budget(model):
    """How many bytes this process is allowed to hold at the peak of a training step, weights and gradients
    included. A tenth is kept in reserve."""
    device = next(model.parameters()).device
    free, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)  # what torch holds already, the weights included
    # AdamW makes its two numbers per weight in the first step.
    adamw = 8 * sum(p.numel() for p in model.parameters())
    return 0.9 * (free + reserved) - adamw


def peak_memory(model, loss_of, n):
    """Bytes that the forward and backward pass of n windows take at most; inf if they do not fit.

    Args:
        loss_of: a function from a number of windows to their loss.
    """
    device = next(model.parameters()).device
    torch.cuda.reset_peak_memory_stats(device)
    try:
        loss_of(n).backward()
        return torch.cuda.max_memory_allocated(device)
    except torch.OutOfMemoryError:
        return math.inf
    finally:
        model.zero_grad()


def windows_that_fit(model, loss_of):
    """How many windows a GPU can train on at once, extrapolated from the memory that one and two take.

    Raises:
        UserError: not even one fits.
    """
    room = memory_budget(model)
    one = peak_memory(model, loss_of, 1)
    if one > room:
        gigabytes = f"{max(room, 0) / 1e9:.1f} GB"
        raise UserError(
            f"not even one window fits into the {gigabytes} that are free on this GPU: use --recompute, or a "
            "smaller --block-size"
        )
    two = peak_memory(model, loss_of, 2)
    if two == math.inf:
        return 1
    per_window = max(two - one, 1)
    return 1 + int((room - one) / per_window)


# -- The machine -----------------------------------------------------------------------------------


def describe_machine(device, precision):
    """Where a training runs, as its log records it: the same seed gives other losses elsewhere.

    Args:
        device: a torch.device.
        precision: of the training, "float32" or "bfloat16".

    Returns:
        A dict for JSON: the type and name of the device, how many CPU cores this process may use, threads,
        precision, versions of Python and torch, and the commit of this code (None outside of git).
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "device": device.type,
        "machine": name,
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "precision": precision,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "commit": current_commit(),
    }


def usable_cores():
    """How many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on Windows and macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cpu_name():
    """The CPU as Linux names it, with its family and model numbers: "AMD EPYC" alone is many CPUs."""
    found = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    if "model name" not in found:  # not every architecture has one
        return platform.machine()
    return f"{found['model name']} (family {found.get('cpu family')}, model {found.get('model')})"


def current_commit():
    """The commit that this file is of, followed by -dirty where a tracked file differs from it, or None."""
    # A hook of git sets variables that name its own repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments):
        command = ["git", *arguments]
        how = {"cwd": Path(__file__).parent, "env": environment, "capture_output": True, "text": True}
        return subprocess.run(command, check=True, **how).stdout.strip()

    with suppress(OSError, subprocess.SubprocessError):
        # A copy of this code may lie in a repository that does not have it.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        # --exclude=* ignores all tags, so that --always prints the hash.
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
