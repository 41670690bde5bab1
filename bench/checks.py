"""Is what this machine computes right? Against float64, against a CPU, with graphs and without.

environment   what the machine is and can do, and which attention kernels run there
forms         each form of attention.py against `eager` in float64
steps         the losses of some training steps against those on a CPU
decoder       the tokens with CUDA graphs and without; how long the first passes take
"""

import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice, product
from pathlib import Path
from typing import Literal

import pydantic
import torch

from attention import eager, soft_mask_attention
from baselines import build
from bench.kernels import FORMS, runnable
from bench.timing import Some, largest, machine, print_table, reason, seconds_of, write_results
from bench.training_step import matmul_peak
from engine.batching import Engine
from model import Count
from runtime import autocast, commit, pick_device, progress
from train import objective, train
from training.config import PRESETS
from training.runs import read_lines

DOCS = Path(__file__).parent.parent / "docs"  # texts that are there without a network
DTYPES = torch.bfloat16, torch.float32
PACKAGES = ("numpy", "triton", "transformers", "flash-attn", "flash-attn-4")
# What the names of fused attention kernels have in them, of torch, cuDNN, flash-attn and Triton.
OF_ATTENTION = ("attention", "fmha", "flash", "sdpa", "cudnn")


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver():
    """The version of NVIDIA's driver; None where its tool is not on the path."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return None


def copy_speed(device):
    """Bytes a second that a copy reads and writes, the best of some."""
    source = torch.zeros(2**31 if device.type == "cuda" else 2**26, dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    best = min(seconds_of(partial(target.copy_, source), device) for _ in range(6))
    return 2 * source.numel() / best


def small_shape(preset, **changes):
    return replace(PRESETS[preset].model, vocab_size=257, **changes)


def decided(shape):
    """A new model whose router has random weights, so that tokens take different steps."""
    torch.manual_seed(0)
    model = build(shape).eval()
    torch.nn.init.normal_(model.router.proj.weight, std=5 / shape.hidden_size**0.5)
    return model


def attention_kernels(run, device):
    names = [row["name"] for row in largest(run, device, 1000)]
    return [name[:120] for name in names if any(word in name.lower() for word in OF_ATTENTION)]


def kernels_of_width(d, dtype, device):
    """The attention kernels of a training step and of decoding, by names of the profiler."""
    shape = small_shape("tiny", hidden_size=128, head_dim=d, num_hidden_layers=1)
    model = decided(shape).to(device)
    idx = torch.randint(257, (2, shape.block_size), device=device)

    def step():
        with autocast(device, dtype):
            objective(model, idx, idx, 1)[0].backward()

    engine = Engine(model, 2, dtype=dtype, graphs=False)
    decode = partial(engine.generate, [[1, 2, 3], [4]], 4, seed=0)
    step(), decode()  # what is loaded and planned at the first call
    row = {"d": d, "dtype": str(dtype)[6:]}
    row["training"] = attention_kernels(step, device)
    return row | {"decoding": attention_kernels(decode, device)}


@pydantic.validate_call
def environment(
    widths: Some[Count] = (56, 64, 120, 128),
    device: str = "auto",
    out: Path = Path("out/bench"),
):
    """What the machine is, its ceilings, and which attention kernels run there.

    Args:
        widths: d of a head
        device: auto, cpu, cuda
        out: folder for env.json
    """
    device = pick_device(device)
    found = {"machine": machine(device), "python": sys.version.split()[0], "commit": commit()}
    found |= {"packages": {name: installed(name) for name in PACKAGES}}
    if device.type == "cuda":
        found |= {"driver": driver(), "cuda": torch.version.cuda}
        found |= {"cudnn": torch.backends.cudnn.version()}
    found["bytes_per_second"] = copy_speed(device)
    found["operations_per_second"] = {str(t)[6:]: matmul_peak(device, t) for t in DTYPES}
    file = write_results(out / "env.json", found)
    cases = progress(list(product(widths, DTYPES)), "kernels", leave=False)
    found["kernels"] = [kernels_of_width(d, dtype, device) for d, dtype in cases]
    write_results(file, found)
    print(found)


def gradients(form, leaves, weights):
    """The output of a form of attention and its gradients, in float64."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = form(*leaves)
    found = [out, *torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)]
    return [x.detach().double() for x in found]


@pydantic.validate_call
def forms(
    widths: Some[Count] = (56, 64, 128),
    length: Count = 515,
    device: str = "auto",
    out: Path = Path("out/bench"),
):
    """The errors of each form of attention.py that runs here, of its output and its gradients.

    An error is the norm of the difference from `eager` in float64, on the same rounded q, k and v,
    as a share of the norm.

    Args:
        widths: d of a head
        length: N, in slots; an odd one leaves the last block of a kernel half empty
        device: auto, cpu, cuda
        out: folder for forms.json
    """
    device = pick_device(device)
    results = {"machine": machine(device), "rows": [], "failed": [], "refused": []}
    for dtype, d in progress(list(product(DTYPES, widths)), "forms", leave=False):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, heads, length, d).to(device, dtype) for heads in (4, 2, 2))
        log_w, weights = -9 * torch.rand(2, length).to(device), torch.randn(q.shape).to(device)
        weights = weights.to(dtype)
        exact = gradients(eager, [x.double() for x in (q, k, v, log_w)], weights)
        found, refused = runnable(FORMS, device, dtype)
        for backend in found:
            row = {"backend": backend, "dtype": str(dtype)[6:], "d": d}
            try:
                near = gradients(
                    partial(soft_mask_attention, backend=backend), [q, k, v, log_w], weights
                )
            except Exception as error:  # a kernel of others fails in any way
                results["failed"].append(row | {"why": reason(error)})
                continue
            names = ("out", "dq", "dk", "dv", "dlog_w")
            for name, a, b in zip(names, near, exact, strict=True):
                row[name] = float((a - b).norm() / b.norm())
            results["rows"].append(row)
        for name, why in refused.items():
            results["refused"].append({"backend": name, "dtype": str(dtype), "d": d, "why": why})
        write_results(out / "forms.json", results)
    columns = {name: name for name in ("backend", "dtype", "d")}
    errors = {name: f"{name}:.1e" for name in ("out", "dq", "dk", "dv", "dlog_w")}
    print_table(results["rows"], columns | errors)
    for row in results["failed"]:
        print("failed: {backend}, {dtype}, d = {d}: {why}".format(**row))


@pydantic.validate_call
def steps(
    preset: Literal["tiny", "small"] = "small",
    count: Count = 20,
    device: str = "auto",
    out: Path = Path("out/bench"),
):
    """The losses of the first training steps in float32, here and on a CPU.

    Args:
        preset: the shape
        count: steps
        device: auto, cpu, cuda
        out: folder for steps.json
    """
    device = pick_device(device)
    results = {"machine": machine(device), "preset": preset, "losses": {}}
    for name in dict.fromkeys((device.type, "cpu")):
        with tempfile.TemporaryDirectory() as runs:
            run, _ = train(
                replace(
                    PRESETS[preset], data=str(DOCS), tokenizer="bytes", out=runs, name=name,
                    steps=count, batch_size=2, micro_batch_size=None, log_every=1, eval_every=count,
                    eval_windows=1, device=name, precision="float32",
                )
            )  # fmt: skip
            losses = [row["loss"] for row in read_lines(run / "log.jsonl") if "loss" in row]
        results["losses"][name] = losses
        write_results(out / "steps.json", results)


@pydantic.validate_call
def decoder(
    preset: Literal["tiny", "small"] = "small",
    device: str = "auto",
    out: Path = Path("out/bench"),
):
    """Tokens with graphs and without in float64, and the time of the first passes in bfloat16.

    Args:
        preset: the shape
        device: auto, cpu, cuda
        out: folder for decoder.json
    """
    device = pick_device(device)
    results = {"machine": machine(device), "preset": preset}
    model = decided(small_shape(preset)).to(device).double()
    lengths = torch.randint(1, 40, (12,)).tolist()
    prompts = [torch.randint(257, (n,)).tolist() for n in lengths]
    samples = {}
    for graphs in (True, False):
        engine = Engine(model, 4, graphs=graphs, tau=0.3)
        samples[graphs] = engine.generate(prompts, 24, seed=0)
    pairs = zip(samples[True], samples[False], strict=True)
    results["tokens"] = sum(len(sample.tokens) for sample in samples[True])
    results["steps"] = sorted({k for sample in samples[True] for k in sample.steps})
    results["samples_that_differ"] = sum(a != b for a, b in pairs)
    write_results(out / "decoder.json", results)
    model.float()
    for graphs in (True, False):
        engine = Engine(model, 8, dtype=torch.bfloat16, graphs=graphs, tau=0.3)
        engine.generate([[1, 2]], 2, seed=0)  # loads the libraries
        stream = engine.stream(8 * [list(range(32))], 24, seed=0)
        deque(islice(stream, 8), maxlen=0)  # the prompts are read
        start, before = time.perf_counter(), engine.stats.passes
        for _ in stream:
            if engine.stats.passes >= before + 10:
                break
        results["graphs_seconds" if graphs else "eager_seconds"] = time.perf_counter() - start
    file = write_results(out / "decoder.json", results)
    print(results, file)
