"""Soft-mask attention against plain causal attention: time and memory, forward and backward."""

from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from attention import pick_backend, soft_mask_attention
from bench.timing import machine, measure, write_results
from runtime import UserError, pick_device

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


def attention(
    lengths: tuple[int, ...] = (1024, 4096, 8192, 16384),
    widths: tuple[int, ...] = (56, 64, 128),
    heads: int = 4,
    repeats: int = 5,
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
    if min(*lengths, *widths, heads, repeats) < 1:
        raise UserError("lengths, widths, heads and repeats are 1 or more")
    device = pick_device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backends = ["plain", "sdpa", "eager"]
    if pick_backend("auto", device, dtype) == "fa2":
        backends.insert(2, "fa2")
    cells = [(N, d) for d in widths for N in lengths]
    rows = []
    for N, d in tqdm(cells, "attention", unit=" sizes", leave=False):
        cases = {b: (b, N, d, heads, device, dtype) for b in backends}
        if N > EAGER_LIMIT:
            del cases["eager"]
        warm_up = ("sdpa", 64, d, heads, device, dtype)
        time_of, memory = measure(attention_case, cases, repeats, warm_up)
        rows += [
            {
                "backend": b,
                "N": N,
                "d": d,
                "milliseconds": 1e3 * time_of[b],
                "MiB": memory[b],
                "time_ratio": time_of[b] / time_of["plain"],
                "memory_ratio": memory[b] / (memory["plain"] or float("nan")),
            }
            for b in cases
        ]
    results = {"machine": machine(device), "heads": heads, "dtype": str(dtype), "rows": rows}
    file = write_results(out / f"attention-{device.type}.json", results)
    print(results["machine"], results["dtype"], f"{heads} heads, median of {repeats}")
    print(f"{'':40}ratio to plain")
    print(f"{'d':>4}{'N':>7}  {'backend':8}{'ms':>9}{'MiB':>9}{'time':>8}{'memory':>8}")
    for r in rows:
        print(
            f"{r['d']:4}{r['N']:7}  {r['backend']:8}{r['milliseconds']:9.1f}{r['MiB']:9.1f}"
            f"{r['time_ratio']:8.2f}{r['memory_ratio']:8.2f}"
        )
    draw_attention(results, file.with_suffix(".png"))
    print(f"written: {file} and {file.with_suffix('.png').name}")


def draw_attention(results, file):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = {"plain": "#555555", "sdpa": "#0072B2", "fa2": "#009E73", "eager": "#D55E00"}
    styles = ["-", "--", ":"]
    widths = list(dict.fromkeys(r["d"] for r in results["rows"]))
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    titles = ("time_ratio", "time / plain causal attention"), ("MiB", "peak memory, MiB")
    for axis, (key, title) in zip(axes, titles, strict=True):
        for b, color in colors.items():
            for d, style in zip(widths, styles * len(widths), strict=False):
                rows = [r for r in results["rows"] if (r["backend"], r["d"]) == (b, d)]
                x, y = [r["N"] for r in rows], [r[key] for r in rows]
                if rows:
                    axis.plot(x, y, style, color=color, marker="o", label=f"{b}, d={d}")
        axis.set(xscale="log", yscale="log", xlabel="N, slots", title=title)
        lengths = sorted({r["N"] for r in results["rows"]})
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    ticks = (1, 1.15, 2, 4, 8)
    axes[0].set_yticks(ticks, [str(t) for t in ticks])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", handlelength=3)
    figure.savefig(file, dpi=150)
    plt.close(figure)
