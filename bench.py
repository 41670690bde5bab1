"""Speed and memory, as ratios of two things measured in one run.

    python bench.py attention                 forward and backward of each backend, against plain
    python bench.py attention --lengths 1024 --repeats 9
    python bench.py train                     a training step against plain forward and backward
    python bench.py decode                    early exit against no exit, the cache, transformers

Writes <out>/attention-<device>.json, train-<preset>-<device>.json or decode-<run>-<device>.json,
for the first and the last a picture, too, and prints the table.
"""

import sys
import time
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from tqdm import tqdm

from attention import pick_backend, soft_mask_attention
from bench_decode import decode
from cost import slots_of_passes
from device import autocast, command_line, pick_device, pick_precision
from model import PonderLM
from settings import PRESETS
from timing import machine, medians, write_results

EAGER_LIMIT = 4096  # beyond, its N x N matrices take gigabytes


def attention_case(backend, N, d, heads, device, dtype):
    """A function that runs forward and backward once. 'plain' is causal attention without bias."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, N, d, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    log_w = (-9 * torch.rand(1, N, device=device)).requires_grad_()
    gradient = torch.randn(1, heads, N, d, device=device, dtype=dtype)

    def run():
        if backend == "plain":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = soft_mask_attention(q, k, v, log_w, backend)
        out.backward(gradient)
        q.grad = k.grad = v.grad = log_w.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def peak_memory(arguments):
    """MiB that one run of `make(*case)` needs beyond its inputs, in a process of its own."""
    make, warm_up, case = arguments
    make(*warm_up)()  # loads the libraries
    run, device = make(*case), case[-2]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def measure(make, cases, repeats, warm_up):
    """Median seconds of each case and its peak memory in MiB (nan where it cannot be told)."""
    runs = {name: make(*case) for name, case in cases.items()}
    seconds = medians(runs, repeats)
    del runs
    memory = dict.fromkeys(cases, float("nan"))
    if all(case[-2].type == "cuda" for case in cases.values()) or sys.platform == "linux":
        tasks = [(make, warm_up, case) for case in cases.values()]
        with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            memory = dict(zip(cases, pool.map(peak_memory, tasks, 1), strict=True))
    return seconds, memory


def resident(field):
    """MiB in memory now (VmRSS) or at the peak (VmHWM), from Linux's account of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) / 2**10


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
        raise ValueError("lengths, widths, heads and repeats are 1 or more")
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


def train_case(shape, B, R, plain, recompute, compiled, device, dtype):
    """A function that runs forward and backward on B windows once.

    `plain` is what the passes would cost as ordinary sequences of a Llama of the same shape, each
    with its own backward pass: same slots, no bias, no router, no penalty, one head.
    """
    torch.manual_seed(0)
    model = PonderLM(shape).to(device).train()
    model.backend, model.recompute = pick_backend("auto", device, dtype), recompute
    if compiled:
        for block in model.model.layers:
            block.compile(dynamic=True)
    T, D = shape.block_size, shape.hidden_size
    rows = torch.randint(shape.vocab_size, (B, T + 1), device=device)
    x, y = rows[:, :-1], rows[:, 1:]
    inputs = [
        torch.randn(B, T * n, D, device=device) for n in slots_of_passes(shape.ponder_steps, R)
    ]

    def run():
        if plain:
            for i, e in enumerate(inputs):
                positions = torch.arange(T, device=device).repeat_interleave(e.size(1) // T)
                with autocast(device, dtype):
                    h = model.model(e.requires_grad_(), positions, None, model.backend)
                    if i == 0:
                        logits = model.lm_head(h).float().flatten(0, 1)
                        loss = F.cross_entropy(logits, y.flatten())
                loss.backward() if i == 0 else h.backward(e)  # any gradient takes as long
        else:
            with autocast(device, dtype):
                loss = model(x, y, iters=R).loss
            loss.backward()
        model.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def step_flops(shape, B, R):
    """Floating-point operations of forward and backward without any recomputation.

    A matrix product takes 2 operations a weight and slot forward and 4 backward, causal attention
    2 N^2 d H forward and twice that backward; the penalty's K heads are forward only.
    """
    D, d, H, V = shape.hidden_size, shape.head_width, shape.num_attention_heads, shape.vocab_size
    G, L, T, K = (
        shape.key_value_heads,
        shape.num_hidden_layers,
        shape.block_size,
        shape.ponder_steps,
    )
    weights = L * (2 * D * (H + G) * d + 3 * D * shape.intermediate_size)
    total = (6 + 2 * K) * D * V * T
    for n in slots_of_passes(K, R):
        total += 6 * weights * T * n + 6 * (T * n) ** 2 * d * H * L
    return B * total


def matmul_peak(device, dtype):
    """Operations a second of square matrix products, the best of some sizes."""
    best = 0
    for n in (4096, 8192, 16384) if device.type == "cuda" else (1024, 2048):
        a = torch.randn(n, n, device=device, dtype=dtype)
        for _ in range(6):
            start = time.perf_counter()
            a @ a
            if device.type == "cuda":
                torch.cuda.synchronize()
            best = max(best, 2 * n**3 / (time.perf_counter() - start))
    return best


def train(
    preset: Literal["tiny", "small", "70m", "410m"] = "small",
    windows: int | None = None,
    iters: int = 2,
    repeats: int = 5,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    compile: bool = False,
    device: str = "auto",
    out: Path = Path("out/bench"),
):
    """A training step against plain forward and backward over as many slots: time and memory.

    The model FLOPs utilisation (MFU) is the share of the speed of large square matrix products of
    the same precision, measured here. Each ratio is one of medians.

    Args:
        preset: the shape
        windows: a step; by default 2 on a CPU, 32 on a GPU
        iters: R
        repeats: rounds
        precision: auto is bfloat16 where it is fast
        compile: also with compiled blocks
        device: auto, cpu, cuda
        out: folder for the results
    """
    device = pick_device(device)
    dtype = pick_precision(precision, device)
    B = (32 if device.type == "cuda" else 2) if windows is None else windows
    if B < 1 or iters < 0:
        raise ValueError(f"windows = {B}, iters = {iters}: windows >= 1 and iters >= 0")
    shape = PRESETS[preset].model
    last = lambda n: replace(shape, backprop_passes=n)  # noqa: E731
    variants = {  # shape, plain, recompute, compiled
        "plain": (shape, True, False, False),
        "PonderLM-3": (shape, False, False, False),
        "--recompute": (shape, False, True, False),
        "--backprop-passes 2": (last(2), False, False, False),
        "--backprop-passes 1": (last(1), False, False, False),
    }
    if compile:
        variants["plain, --compile"] = (shape, True, False, True)
        variants["--compile"] = (shape, False, False, True)
    cases = {name: (s, B, iters, *flags, device, dtype) for name, (s, *flags) in variants.items()}
    small = replace(PRESETS["tiny"].model, block_size=16)
    peak = matmul_peak(device, dtype)
    time_of, memory = measure(
        train_case, cases, repeats, (small, 1, 0, False, False, False, device, dtype)
    )
    flops, tokens = step_flops(shape, B, iters), B * shape.block_size
    rows = [
        {
            "case": name,
            "seconds": time_of[name],
            "tokens_per_second": tokens / time_of[name],
            "MiB": memory[name],
            "time_ratio": time_of[name] / time_of["plain"],
            "mfu": None if "backprop" in name else flops / time_of[name] / peak,
        }
        for name in cases
    ]
    results = {"machine": machine(device), "dtype": str(dtype), "preset": preset, "windows": B}
    results |= {"iters": iters, "flops": flops, "matmul_peak": peak, "rows": rows}
    results |= {"shape": asdict(shape)}
    file = write_results(out / f"train-{preset}-{device.type}.json", results)
    print(results["machine"], results["dtype"], f"matrix products {peak / 1e12:.2f} TFLOP/s")
    print(f"{preset}, {B} windows of {shape.block_size} tokens, R = {iters}, median of {repeats}")
    print(f"{'':22}{'seconds':>9}{'tokens/s':>10}{'MiB':>9}{'time/plain':>12}{'MFU':>7}")
    for r in rows:
        mfu = "" if r["mfu"] is None else f"{r['mfu']:7.0%}"
        print(
            f"{r['case']:22}{r['seconds']:9.3f}{r['tokens_per_second']:10,.0f}{r['MiB']:9.0f}"
            f"{r['time_ratio']:12.2f}{mfu}"
        )
    print(f"written: {file}")


if __name__ == "__main__":
    commands = {"attention": attention, "train": train, "decode": decode}
    command_line(lambda: tyro.extras.subcommand_cli_from_dict(commands, description=__doc__))
