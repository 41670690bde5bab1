"""Where a script runs, in how many processes and how precisely; how it ends."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist


def pick_device(name="auto"):
    """'auto' -> CUDA, else MPS, else CPU. A name is taken if there is such a device here."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    available["cpu"] = True
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    if not available.get(name.split(":")[0]):
        there = [kind for kind, found in available.items() if found]
        raise ValueError(f"device {name!r} is not here; there is {', '.join(there)}")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name!r} is no device; write cpu, cuda, cuda:1 or mps") from None


def pick_precision(name, device):
    """'auto' -> bfloat16 where its matrix products are fast (on a CPU: measured), else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type != "cpu":
        return torch.float32

    dtypes = (torch.bfloat16, torch.float32)
    matrices = {dtype: torch.ones(1024, 1024, dtype=dtype) for dtype in dtypes}
    seconds = dict.fromkeys(dtypes, float("inf"))
    for _ in range(8):  # in turns, and the best of them, on a machine that may do other things
        for dtype, x in matrices.items():
            start = time.perf_counter()
            x @ x
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
    return min(dtypes, key=lambda d: seconds[d] * (1.3 if d == torch.bfloat16 else 1))


def autocast(device, dtype):
    """The context in which a model computes in `dtype`; its weights stay in float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def join_processes(device):
    """Meet the other processes that torchrun started -> rank, number of processes, own device.

    Without torchrun 0, 1 and `device`. Of several processes only the first prints.

    Raises:
        ValueError: more processes on this machine than GPUs.
    """
    if "RANK" not in os.environ:
        return 0, 1, device
    if device.type == "cuda":
        index, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if index >= count:
            raise ValueError(f"--nproc_per_node is more than the {count} GPUs of this machine")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return dist.get_rank(), dist.get_world_size(), device


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def reduce(tensor, device):
    """The sum of a tensor over all processes, which meet on `device`."""
    if not dist.is_initialized():
        return tensor
    tensor = tensor.to(device)
    dist.all_reduce(tensor)
    return tensor.cpu()


def any_process(flag):
    """Whether a flag is set in any of the processes."""
    flags = [flag]
    if dist.is_initialized():
        flags = [None] * dist.get_world_size()
        dist.all_gather_object(flags, flag)
    return any(flags)


def from_first(value):
    """What the first process has, in all of them."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


@contextmanager
def first_process_first():
    """The first process goes ahead, so that the others find what it made."""
    rank, _ = rank_and_size()
    if rank:
        from_first(None)
    yield
    if not rank:
        from_first(None)


def commit():
    """The commit of this code, with -dirty if it was changed since; None without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # no git here
        return None


def command_line(main):
    """Run a script: an error that the user can mend is one line, not a stack trace."""
    try:
        main()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.filename and error.strerror:
            error = f"{error.filename}: {error.strerror}"
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
