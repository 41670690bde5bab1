"""Several processes that share a training, as `torchrun` starts them. Without torchrun there is one, of
rank 0."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from common import default_signals
from hardware import pick_device


def was_launched():
    """True if torchrun, or a launcher like it, has started this process. Some environments keep a RANK
    that was left over, so one variable alone does not count."""
    return all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def init_distributed(device_name):
    """Meet the other processes, and open the device of this one.

    Args:
        device_name: --device. On 'auto' and 'cuda' each process takes a GPU of its own.

    Returns:
        This process's rank, the number of processes, and the device.

    Raises:
        UserError: the device cannot be used.
    """
    if not was_launched():
        if os.environ.get("RANK"):
            print("note: RANK is set but not WORLD_SIZE and MASTER_ADDR: training in one process")
        return 0, 1, pick_device(device_name)

    if device_name in ("auto", "cuda") and torch.cuda.is_available():
        device_name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    device = pick_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():  # it is already, if this process has trained before
        # DistributedDataParallel imports torch._dynamo. Imported after the process group exists, it keeps
        # gloo's threads alive at exit, and they may abort; so import it first.
        from torch import _dynamo  # noqa: F401

        # Objects and barriers go through gloo: through NCCL they would wait for the GPU.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        patience = timedelta(days=1)  # the others wait while the first prepares a corpus
        with default_signals():  # so that Ctrl-C ends the wait, in which Python runs no handlers
            print(f"waiting for {os.environ['WORLD_SIZE']} processes", flush=True)
            dist.init_process_group(backend, timeout=patience)
    rank, world_size = rank_and_world_size()
    if rank > 0:  # only the first process prints
        sys.stdout = open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    return rank, world_size, device


def rank_and_world_size():
    """This process's rank, and the number of processes."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather(value):
    """The value of each process, as a list in the order of ranks. The value must not be on a GPU."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def wait_for_all():
    """Wait until every process has come here."""
    gather(None)
