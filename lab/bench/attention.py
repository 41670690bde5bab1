"""Soft-mask attention against plain causal attention: time and memory, forward and backward."""

from itertools import product
from pathlib import Path
from typing import Literal

import pydantic
import torch

from lab.bench.timing import Some, machine, measure, print_table, write_results
from lab.common import Count, progress
from lab.kernels.attention import FORMS, find
from model import UserError, pick_device

# The N x N matrices of eager take gigabytes beyond, and flex compiles each size for half a minute.
LENGTHS = {"eager": range(4097), "flex": (4096,)}
NOT_PLAIN = ("eager", "flex")  # what would not be called plain attention
# By device: heads, slots of all sequences (0: of one), calls between two looks at the clock. On a
# GPU it takes so many that the kernels are measured, and not Python.
SIZES = {"cpu": (4, 0, 1), "cuda": (16, 16384, 10)}


def attention_case(backend, masked, B, N, d, heads, device, dtype):
    """A function that runs forward and backward once, with the mask or without."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, heads, N, d, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    log_w = (-9 * torch.rand(B, N, device=device)).requires_grad_() if masked else None
    gradient = torch.randn(B, heads, N, d, device=device, dtype=dtype)
    leaves = [x for x in (q, k, v, log_w) if x is not None]
    attend = find(backend, device, dtype)

    def run():
        attend(q, k, v, log_w).backward(gradient)
        for x in leaves:
            x.grad = None

    return run


def runnable(names, device, dtype):
    """Those of the backends that can run here; says why others cannot."""
    found = []
    for name in names:
        try:
            find(name, device, dtype)
            found.append(name)
        except UserError as error:
            print("not run:", error)
    return found


def measure_size(backends, N, d, repeats, device, dtype):
    """One row for each backend, after that of the fastest kernel without a mask; and those refused.

    Plain attention is what the same kernels do without log w.
    """
    heads, slots, calls = SIZES["cuda" if device.type == "cuda" else "cpu"]
    cases, B = {}, max(slots // N, 1)
    for name in backends:
        if N in LENGTHS.get(name, (N,)):
            shape = (B, N, d, heads, device, dtype)
            cases[name] = (name, True, *shape)
            if name not in NOT_PLAIN:
                cases[f"plain {name}"] = (name, False, *shape)
    warm_up = ("sdpa", True, 1, 64, d, heads, device, dtype)
    time_of, memory, refused = measure(attention_case, cases, repeats, warm_up, calls)
    refused = [{"backend": name, "N": N, "d": d, "why": why} for name, why in refused.items()]
    plain = [name for name in time_of if name.startswith("plain")]
    if not plain:
        raise UserError(f"no plain attention of {N} slots, d = {d}: {refused}; try fewer slots")
    best, rows = min(plain, key=time_of.get), []
    for name in (best, *(name for name in time_of if name not in plain)):
        row = {"backend": "plain" if name == best else name, "N": N, "d": d}
        row |= {"milliseconds": 1e3 * time_of[name], "MiB": memory[name]}
        row |= {"time_ratio": time_of[name] / time_of[best]}
        row |= {"memory_ratio": memory[name] / (memory[best] or float("nan"))}
        rows.append(row | {"kernel": name.removeprefix("plain ")})
    return rows, refused


@pydantic.validate_call
def attention(
    lengths: Some[Count] = (1024, 4096, 8192, 16384),
    widths: Some[Count] = (56, 64, 128),
    backends: Some[Literal[tuple(FORMS)]] | None = None,
    repeats: Count = 5,
    device: str = "auto",
    out: Path = Path("out/bench"),
):
    """Soft-mask attention against plain causal attention: time and peak memory as ratios.

    Each ratio is one of medians. On a CPU one sequence of 4 heads in float32; on CUDA 16,384 slots
    of 16 heads in bfloat16. The results are written after each size.

    Args:
        lengths: N, in slots
        widths: d of a head
        backends: forms of attention; by default sdpa and eager, on CUDA all that can run
        repeats: rounds
        device: auto, cpu, cuda
        out: folder for the results
    """
    device = pick_device(device)
    on_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    backends = runnable(backends or (tuple(FORMS) if on_cuda else ("sdpa", "eager")), device, dtype)
    results = {"machine": machine(device), "dtype": str(dtype), "rows": [], "refused": []}
    file = out / f"attention-{device.type}.json"
    for d, N in progress(list(product(widths, lengths)), "attention", unit=" sizes", leave=False):
        rows, refused = measure_size(backends, N, d, repeats, device, dtype)
        results["rows"] += rows
        results["refused"] += refused
        write_results(file, results)
    print(results["machine"], results["dtype"], f"median of {repeats}")
    columns = {"d": "d", "N": "N", "backend": "backend", "ms": "milliseconds:.1f"}
    columns |= {"MiB": "MiB:.1f", "time / plain": "time_ratio:.2f"}
    print_table(results["rows"], columns | {"memory / plain": "memory_ratio:.2f"})
    for row in results["refused"]:
        print("not run: {backend}, N = {N}, d = {d}: {why}".format(**row))
    print(f"written: {file}")
