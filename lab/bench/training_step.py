"""A training step against plain forward and backward over as many slots: time and memory."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import torch
import torch.nn.functional as F

from lab.bench.timing import machine, measure, print_table, write_results
from lab.common import COMPILED, Count
from lab.kernels.attention import fastest, find
from lab.train import check_compiler
from model import PonderLM, UserError, pick_device
from train import PRESETS, objective, pick_precision

WINDOWS = {"tiny": 256, "small": 64, "70m": 8, "410m": 1}  # a step, in 140 GB


def slots_of_passes(K, R):
    """How many slots a token has in each pass of a training step: the ladder, then R + 1 whole passes."""
    return [*range(1, K + 1), *[K + 1] * (R + 1)]


def train_case(shape, B, R, plain, recompute, compiled, backend, device, dtype):
    """A function that runs forward and backward on B windows once.

    `plain` is what the passes would cost as ordinary sequences of a Llama of the same shape, each with its
    own backward pass: same slots, no log w, no router, no penalty, one head.
    """
    torch.manual_seed(0)
    model = PonderLM(shape).to(device).train()
    model.backend, model.recompute = find(backend, device, dtype), recompute
    if compiled:
        torch._dynamo.config.recompile_limit = COMPILED
        for block in model.model.layers:
            block.compile(dynamic=False)
    T, D = shape.block_size, shape.hidden_size
    rows = torch.randint(shape.vocab_size, (B, T + 1), device=device)
    x, y = rows[:, :-1], rows[:, 1:]
    slots = slots_of_passes(shape.ponder_steps, R)
    inputs = [torch.randn(B, T * n, D, device=device) for n in slots] if plain else []
    half = torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)

    def run():
        for i, e in enumerate(inputs):
            positions = torch.arange(T, device=device).repeat_interleave(e.size(1) // T)
            e.grad = None
            with half:
                h = model.model(e.requires_grad_(), positions, None, model.backend)
                if i == 0:
                    loss = F.cross_entropy(model.lm_head(h).float().flatten(0, 1), y.flatten())
            loss.backward() if i == 0 else h.backward(e)  # any gradient takes as long
        if not plain:
            with half:
                loss, _, _ = objective(model, x, y, R)
            loss.backward()
        model.zero_grad()

    return run


@pydantic.validate_call
def train(
    preset: Literal["tiny", "small", "70m", "410m"] = "small",
    windows: Count | None = None,
    R: Annotated[int, pydantic.Field(ge=0)] = 2,
    repeats: Count = 5,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    compile: bool = False,
    device: str = "auto",
    out: Path = Path("out/bench"),
):
    """A training step against plain forward and backward over as many slots: time and memory.

    Each ratio is one of medians.

    Args:
        preset: the shape
        windows: a step; by default 2 on a CPU, on a GPU what one of 140 GB holds
        R: R
        repeats: rounds
        precision: auto is bfloat16 where it is fast
        compile: also with compiled blocks
        device: auto, cpu, cuda
        out: folder for the results
    """
    device = pick_device(device)
    dtype = getattr(torch, pick_precision(precision, device))
    B = windows or (WINDOWS[preset] if device.type == "cuda" else 2)
    shape = PRESETS[preset][1]
    variants = {  # plain, recompute, compiled
        "plain": (True, False, False),
        "PonderLM-3": (False, False, False),
        "--recompute": (False, True, False),
    }
    if compile:
        check_compiler()
        variants |= {"plain, --compile": (True, False, True), "--compile": (False, False, True)}
    size = (B, shape.num_attention_heads, shape.block_size * (shape.ponder_steps + 1))
    size = (*size, shape.d), shape.G, device, dtype
    backends = {plain: fastest(*size, biased=not plain) for plain in (True, False)}
    cases = {
        name: (shape, B, R, plain, *flags, backends[plain], device, dtype)
        for name, (plain, *flags) in variants.items()
    }
    warm_up = replace(PRESETS["tiny"][1], block_size=16), 1, 0, *3 * (False,)
    warm_up = *warm_up, "sdpa", device, dtype
    calls = 3 if device.type == "cuda" else 1
    time_of, memory, refused = measure(train_case, cases, repeats, warm_up, calls)
    if "plain" in refused:
        raise UserError(f"the plain step: {refused['plain']}; try fewer --windows than {B}")
    rows = [
        {"case": name, "seconds": seconds, "MiB": memory[name]}
        | {"tokens_per_second": B * shape.block_size / seconds}
        | {"time_ratio": seconds / time_of["plain"]}
        for name, seconds in time_of.items()
    ]
    results = {"machine": machine(device), "dtype": str(dtype), "preset": preset, "windows": B}
    results |= {"R": R, "shape": asdict(shape), "rows": rows}
    results |= {"backends": {"plain": backends[True], "soft mask": backends[False]}}
    file = write_results(out / f"train-{preset}-{device.type}.json", results)
    print(results["machine"], results["dtype"])
    print(f"{preset}, {B} windows of {shape.block_size} tokens, R = {R}, median of {repeats}")
    print("attention:", results["backends"])
    columns = {"": "case", "seconds": "seconds:.3f", "tokens/s": "tokens_per_second:,.0f"}
    print_table(rows, columns | {"MiB": "MiB:.0f", "time/plain": "time_ratio:.2f"})
    for name, why in refused.items():
        print(f"not run: {name}, {why}")
    print(f"written: {file}")
