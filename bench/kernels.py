"""Soft-mask attention against plain causal attention: time and memory, forward and backward."""

from itertools import cycle, product
from pathlib import Path
from typing import Literal

import pandas as pd
import pydantic
import torch

from attention import BACKENDS, pick_backend, soft_mask_attention
from bench.timing import Some, machine, measure, print_table, write_results
from model import Count
from runtime import UserError, pick_device, progress

FORMS = (*(name for name in BACKENDS if name not in ("auto", "eager")), "eager")
# The N x N matrices of eager take gigabytes beyond, and flex compiles each size for half a minute.
LENGTHS = {"eager": range(4097), "flex": (4096,)}
NOT_PLAIN = ("eager", "flex")  # what would not be called plain attention
# By device: lengths, widths, heads, slots of all sequences (None: of one), calls between two looks
# at the clock. On a GPU it takes so many that the kernels are measured, and not Python.
DEFAULTS = {
    "cpu": ((1024, 4096, 8192, 16384), (56, 64, 128), 4, None, 1),
    "cuda": ((1024, 2048, 4096, 8192, 16384), (56, 64, 120, 128), 16, 16384, 10),
}


def attention_case(backend, masked, B, N, d, heads, device, dtype):
    """A function that runs forward and backward once, with the mask or without any bias."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(B, heads, N, d, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    bias = (-9 * torch.rand(B, N, device=device)).requires_grad_() if masked else None
    gradient = torch.randn(B, heads, N, d, device=device, dtype=dtype)
    leaves = [x for x in (q, k, v, bias) if x is not None]

    def run():
        soft_mask_attention(q, k, v, bias, backend).backward(gradient)
        for x in leaves:
            x.grad = None

    return run


def runnable(names, device, dtype):
    """Those of the backends that can run here, and {name: why not} of the others."""
    found, refused = [], {}
    for name in names:
        try:
            found.append(pick_backend(name, device, dtype))
        except UserError as error:
            refused[name] = str(error)
    return found, refused


def measure_size(backends, B, N, d, heads, repeats, calls, device, dtype):
    """One row for each backend, after that of the fastest kernel without bias; and those refused.

    Plain attention is what the same kernels do without a bias.
    """
    cases = {}
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
    lengths: Some[Count] | None = None,
    widths: Some[Count] | None = None,
    heads: Count | None = None,
    slots: Count | None = None,
    backends: Some[Literal[FORMS]] | None = None,
    repeats: Count = 5,
    device: str = "auto",
    out: Path = Path("out/bench"),
):
    """Soft-mask attention against plain causal attention: time and peak memory as ratios.

    Each ratio is one of medians. bfloat16 on CUDA, float32 elsewhere. The results are written after
    each size.

    Args:
        lengths: N, in slots; by default 1024 to 16384
        widths: d of a head; by default 56, 64 and 128, on CUDA 120, too
        heads: number of heads; by default 4, on CUDA 16
        slots: of all sequences of a batch; by default those of one, on CUDA 16384
        backends: forms of attention.py; by default all that can run, on a CPU sdpa and eager
        repeats: rounds
        device: auto, cpu, cuda
        out: folder for the results
    """
    device = pick_device(device)
    on_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    of_device = DEFAULTS["cuda" if on_cuda else "cpu"]
    lengths, widths, heads = lengths or of_device[0], widths or of_device[1], heads or of_device[2]
    slots, calls = slots or of_device[3], of_device[4]
    backends = backends or (FORMS if on_cuda else ("sdpa", "eager"))
    backends, refused = runnable(backends, device, dtype)
    results = {"machine": machine(device), "heads": heads, "dtype": str(dtype), "slots": slots}
    results |= {"auto": pick_backend("auto", device, dtype), "rows": []}
    results["refused"] = [{"backend": name, "why": why} for name, why in refused.items()]
    file = out / f"attention-{device.type}.json"
    for d, N in progress(list(product(widths, lengths)), "attention", unit=" sizes", leave=False):
        B = max((slots or N) // N, 1)
        rows, refused = measure_size(backends, B, N, d, heads, repeats, calls, device, dtype)
        results["rows"] += rows
        results["refused"] += refused
        write_results(file, results)
    print(results["machine"], results["dtype"], f"{heads} heads, median of {repeats}")
    columns = {"d": "d", "N": "N", "backend": "backend", "ms": "milliseconds:.1f"}
    columns |= {"MiB": "MiB:.1f", "time / plain": "time_ratio:.2f"}
    print_table(results["rows"], columns | {"memory / plain": "memory_ratio:.2f"})
    for row in results["refused"]:
        print("not run:", ", ".join(f"{key} {value}" for key, value in row.items()))
    draw_attention(results, file.with_suffix(".png"))
    print(f"written: {file} and {file.with_suffix('.png').name}")


def draw_attention(results, file):
    from matplotlib.figure import Figure

    colors = {"plain": "#555555", "sdpa": "#0072B2", "fa2": "#009E73", "eager": "#D55E00"}
    colors |= {"cudnn": "#56B4E9", "flash": "#CC79A7", "fa4": "#000000", "flex": "#E69F00"}
    frame = pd.DataFrame(results["rows"])
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots(1, 2)
    titles = ("time_ratio", "time / plain causal attention"), ("MiB", "peak memory, MiB")
    for axis, (key, title) in zip(axes, titles, strict=True):
        for b, color in colors.items():
            curves = frame[frame.backend == b].groupby("d", sort=False)
            for (d, curve), style in zip(curves, cycle(["-", "--", ":", "-."]), strict=False):
                look = {"color": color, "marker": "o", "label": f"{b}, d={d}"}
                axis.plot(curve.N, curve[key], style, **look)
        axis.set(xscale="log", yscale="log", xlabel="N, slots", title=title)
        lengths = sorted(frame.N.unique())
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    ticks = (1, 1.15, 2, 4, 8)
    axes[0].set_yticks(ticks, [str(t) for t in ticks])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", handlelength=3)
    figure.savefig(file, dpi=150)
