"""A training step against plain forward and backward over as many slots: time and memory."""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import torch
import torch.nn.functional as F

from attention import pick_backend
from bench.timing import machine, measure, print_table, write_results
from model import Count, PonderLM, slots_of_passes
from runtime import autocast, pick_device, pick_precision
from train import objective
from training.settings import PRESETS


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
    slots = slots_of_passes(shape.ponder_steps, R)
    inputs = [torch.randn(B, T * n, D, device=device) for n in slots] if plain else []

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
                loss, _, _ = objective(model, x, y, R)
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
    D, d, V, L = shape.hidden_size, shape.head_width, shape.vocab_size, shape.num_hidden_layers
    H, G = shape.num_attention_heads, shape.key_value_heads
    T, K = shape.block_size, shape.ponder_steps
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


@pydantic.validate_call
def train(
    preset: Literal["tiny", "small", "70m", "410m"] = "small",
    windows: Count | None = None,
    iters: Annotated[int, pydantic.Field(ge=0)] = 2,
    repeats: Count = 5,
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
    B = windows or (32 if device.type == "cuda" else 2)
    shape = PRESETS[preset].model
    two, one = (replace(shape, backprop_passes=n) for n in (2, 1))
    variants = {  # shape, plain, recompute, compiled
        "plain": (shape, True, False, False),
        "PonderLM-3": (shape, False, False, False),
        "--recompute": (shape, False, True, False),
        "--backprop-passes 2": (two, False, False, False),
        "--backprop-passes 1": (one, False, False, False),
    }
    if compile:
        variants["plain, --compile"] = (shape, True, False, True)
        variants["--compile"] = (shape, False, False, True)
    cases = {name: (s, B, iters, *flags, device, dtype) for name, (s, *flags) in variants.items()}
    warm_up = (replace(PRESETS["tiny"].model, block_size=16), 1, 0, *3 * (False,), device, dtype)
    peak = matmul_peak(device, dtype)
    time_of, memory = measure(train_case, cases, repeats, warm_up)
    flops, tokens = step_flops(shape, B, iters), B * shape.block_size
    rows = []
    for name, seconds in time_of.items():
        row = {"case": name, "seconds": seconds, "tokens_per_second": tokens / seconds}
        row |= {"MiB": memory[name], "time_ratio": seconds / time_of["plain"]}
        rows.append(row | {"mfu": None if "backprop" in name else flops / seconds / peak})
    results = {"machine": machine(device), "dtype": str(dtype), "preset": preset, "windows": B}
    results |= {"iters": iters, "flops": flops, "matmul_peak": peak, "rows": rows}
    results["shape"] = asdict(shape)
    file = write_results(out / f"train-{preset}-{device.type}.json", results)
    print(results["machine"], results["dtype"], f"matrix products {peak / 1e12:.2f} TFLOP/s")
    print(f"{preset}, {B} windows of {shape.block_size} tokens, R = {iters}, median of {repeats}")
    columns = {"": "case", "seconds": "seconds:.3f", "tokens/s": "tokens_per_second:,.0f"}
    print_table(
        rows, columns | {"MiB": "MiB:.0f", "time/plain": "time_ratio:.2f", "MFU": "mfu:.0%"}
    )
    print(f"written: {file}")
