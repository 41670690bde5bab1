"""Soft-mask attention against plain causal attention: time and memory, forward and backward."""

from itertools import cycle, product
from pathlib import Path

import pandas as pd
import pydantic
import torch
import torch.nn.functional as F
from tqdm import tqdm

from attention import pick_backend, soft_mask_attention
from bench.timing import Some, machine, measure, print_table, write_results
from model import Count
from runtime import pick_device

EAGER_LIMIT = 4096  # beyond, its N x N matrices take gigabytes


def attention_case(backend, N, d, heads, device, dtype):
    """A function that runs forward and backward once. 'plain' is causal attention without bias."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, N, d, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    bias = (-9 * torch.rand(1, N, device=device)).requires_grad_()
    gradient = torch.randn(1, heads, N, d, device=device, dtype=dtype)

    def run():
        if backend == "plain":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = soft_mask_attention(q, k, v, bias, backend)
        out.backward(gradient)
        q.grad = k.grad = v.grad = bias.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


@pydantic.validate_call
def attention(
    lengths: Some[Count] = (1024, 4096, 8192, 16384),
    widths: Some[Count] = (56, 64, 128),
    heads: Count = 4,
    repeats: Count = 5,
    device: str = "auto",
    out: Path = Path("out/bench"),
):
    """Soft-mask attention against plain causal attention: time and peak memory as ratios.

    Each ratio is one of medians. bfloat16 on CUDA, float32 elsewhere.

    Args:
        lengths: N, in slots
        widths: d of a head
        heads: number of heads, batch 1
        repeats: rounds
        device: auto, cpu, cuda
        out: folder for the results
    """
    device = pick_device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backends = ["plain", "sdpa", "eager"]
    if pick_backend("auto", device, dtype) == "fa2":
        backends.insert(2, "fa2")
    rows = []
    for d, N in tqdm(list(product(widths, lengths)), "attention", unit=" sizes", leave=False):
        cases = {b: (b, N, d, heads, device, dtype) for b in backends}
        if N > EAGER_LIMIT:
            del cases["eager"]
        warm_up = ("sdpa", 64, d, heads, device, dtype)
        time_of, memory = measure(attention_case, cases, repeats, warm_up)
        for b in cases:
            row = {"backend": b, "N": N, "d": d}
            row |= {"milliseconds": 1e3 * time_of[b], "MiB": memory[b]}
            row |= {"time_ratio": time_of[b] / time_of["plain"]}
            rows.append(row | {"memory_ratio": memory[b] / (memory["plain"] or float("nan"))})
    results = {"machine": machine(device), "heads": heads, "dtype": str(dtype), "rows": rows}
    file = write_results(out / f"attention-{device.type}.json", results)
    print(results["machine"], results["dtype"], f"{heads} heads, median of {repeats}")
    columns = {"d": "d", "N": "N", "backend": "backend", "ms": "milliseconds:.1f"}
    columns |= {"MiB": "MiB:.1f", "time / plain": "time_ratio:.2f"}
    print_table(rows, columns | {"memory / plain": "memory_ratio:.2f"})
    draw_attention(results, file.with_suffix(".png"))
    print(f"written: {file} and {file.with_suffix('.png').name}")


def draw_attention(results, file):
    from matplotlib.figure import Figure

    colors = {"plain": "#555555", "sdpa": "#0072B2", "fa2": "#009E73", "eager": "#D55E00"}
    frame = pd.DataFrame(results["rows"])
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots(1, 2)
    titles = ("time_ratio", "time / plain causal attention"), ("MiB", "peak memory, MiB")
    for axis, (key, title) in zip(axes, titles, strict=True):
        for b, color in colors.items():
            curves = frame[frame.backend == b].groupby("d", sort=False)
            for (d, curve), style in zip(curves, cycle(["-", "--", ":"]), strict=False):
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
