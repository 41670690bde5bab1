"""Measure speed, as ratios of medians, and on CUDA the peak memory.

    python -m lab bench attention     forms of soft-mask attention against plain attention
    python -m lab bench step          a training step against that of a plain Llama on equally long sequences
    python -m lab bench profile       where the time of one training step goes, and how long compiling takes
    python -m lab bench memory        memory of a training step by formula, what fits, and how long it takes
    python -m lab bench decoding      early exit against all steps, and this engine against transformers
    python -m lab bench goals         whether the results of the others meet this project's targets for a GPU

Things that are compared take turns, so that a machine that slows down slows all of them. Tables are printed,
and written to <out>/attention-<device>.json, train-<preset>-<device>.json, profile-<preset>-<device>.json,
decode-<run>-<device>.json or memory-<preset>-cpu.json.
"""

import math
import platform
import statistics
import sys
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import pandas as pd
import torch
import torch.nn.functional as F
import tyro
from pydantic import Field
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

import sample
from attention import BACKENDS, auto, sdpa
from common import UserError, command_line, one_line, read_json, user_error_if_unreadable, write_json
from hardware import compile_for_training, pick_device, pick_precision
from lab import kernels  # noqa: F401 - which adds `exact` to BACKENDS
from lab.common import autocast, progress
from lab.engine.batching import Engine, serves
from lab.engine.choosing import check_request
from lab.evaluation.texts import validation_windows
from lab.interop.warm_start import BACKBONE
from lab.interop.weights import find_model, load, to_others
from lab.memory import bytes_of_step, slots_of_passes
from lab.methods import PonderConfig, build
from model import Count, PonderLM, validated_dataclass
from router import TAU
from train import compiled_graphs, objective, preset_settings

Some = Annotated[tuple[TypeVar("T"), ...], Field(min_length=1)]  # for a flag: Some[int]
Preset = Literal["tiny", "small", "70m", "410m"]
MOST_SLOTS = {"eager": 4096}  # for which a form is measured: its N x N matrices take gigabytes
WINDOWS = {"tiny": 256, "small": 64, "70m": 4, "410m": 1}  # of a training step that fits into 80 GB
PEAK = 989e12  # FLOP/s of an H100 in bfloat16
# The fraction of PEAK that a training step should reach. Models this narrow are limited by memory bandwidth
# (docs/training.md), so it is far below the 0.4 of wide ones.
MFU = {"small": 0.15, "70m": 0.18, "410m": 0.28}
# Most that attention with a soft mask may take, relative to plain attention, by head width. A head of 64 has
# 65 channels with log w, for which flash kernels use a form of width 96.
MASK_COST = {56: 1.1, 64: 1.5, 120: 1.1}
MOST_STEPS = 2.9  # that the preset small may execute per token, of its 3
LEAST_SAVED = 0.9  # saved fraction of time divided by saved fraction of slots
LEAST_GRAPH_SPEED_UP = 2  # of decoding one text
MIB = 2**20


@validated_dataclass
class Options:
    repeats: Count = 3  # number of rounds; the median over the rounds is reported
    device: str = "auto"  # cpu or cuda; auto is a GPU if there is one, else the CPU
    out: Path = Path("out/bench")  # folder for the results


def measure(runs, repeats, device, calls=1):
    """Measure functions in turns.

    Args:
        runs: {name: function}.
        repeats: rounds, of which the median counts.
        device: on which they run; the clock waits for a GPU.
        calls: in each round.

    Returns:
        By name the seconds of a call, the MiB that it takes at its peak (None on a CPU), and why functions
        cannot run.
    """
    timers = {}
    memory = {}
    refused = {}
    for name, run in runs.items():
        try:
            run()  # the first call may compile
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                run()
                memory[name] = (torch.cuda.max_memory_allocated() - before) / MIB
        except Exception as error:  # too little memory, or any error of a kernel
            refused[name] = one_line(error)
        else:
            timers[name] = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    rounds = {name: [] for name in timers}
    for _ in range(repeats):
        for name, timer in timers.items():
            rounds[name].append(timer.timeit(calls).mean)
    seconds = {name: statistics.median(found) for name, found in rounds.items()}
    return seconds, {name: memory.get(name) for name in timers}, refused


def write(out, name, device, **results):
    """Write results to a file in the folder `out`, and print those that are lists of rows as tables."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    machine = {"device": f"{device.type} {gpu}".strip(), "threads": torch.get_num_threads()}
    machine |= {"torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M")}
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for title, rows in results.items():
        if isinstance(rows, list) and rows:
            table = pd.DataFrame(rows).dropna(axis=1, how="all")
            print(f"\n{title}\n{table.to_string(index=False, na_rep='', float_format='{:.4g}'.format)}")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{name}-{device.type}.json", {"machine": machine, **results})
    print(f"\nwritten: {out / name}-{device.type}.json")


# -- Attention -------------------------------------------------------------------------------------


def attention_run(form, *inputs):
    """A function that runs a form of attention forward and backward once.

    Args:
        form: one of attention.BACKENDS.
        inputs: q, k, v and log_w, which may be None.
    """
    leaves = [x if x is None else x.detach().requires_grad_() for x in inputs]
    gradient = torch.randn_like(inputs[0])

    def run():
        form(*leaves).backward(gradient)
        for x in leaves:
            if x is not None:
                x.grad = None

    return run


# The fused kernels that sdpa picks from on a GPU, which are also measured one by one.
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def sdpa_by(kernel):
    """The form of attention `sdpa`, by one kernel alone. It raises RuntimeError where that cannot run."""

    def form(q, k, v, log_w):
        with sdpa_kernel(kernel):
            return sdpa(q, k, v, log_w)

    return form


@validated_dataclass
class Attention(Options):
    # lengths of the sequence, in slots (tokens and their extra steps)
    lengths: Some[Count] = (1024, 4096, 8192, 16384)
    widths: Some[Count] = (56, 64, 128)  # head widths


def attention(o: Annotated[Attention, tyro.conf.arg(name="")]):
    """Measure attention with the router's bias on the keys (the soft mask) against plain causal attention,
    forward and backward.

    On a CPU: one sequence of 4 heads in float32. On CUDA: 16,384 slots of 16 heads in bfloat16, and sdpa also
    once with each of its kernels. (A slot is one position of the sequence: a token, or an extra step of one.)
    """
    device = pick_device(o.device)
    on_cuda = device.type == "cuda"
    make = dict(device=device, dtype=torch.bfloat16 if on_cuda else torch.float32)
    rows = []
    refused = []
    for d, N in progress(list(product(o.widths, o.lengths)), "attention", unit=" sizes", leave=False):
        B = max(16384 // N, 1) if on_cuda else 1
        H = 16 if on_cuda else 4
        q, k, v = torch.randn(3, B, H, N, d, **make)
        log_w = math.log(TAU) * torch.rand(B, N, device=device)  # between 0 and log of the usual tau
        runs = {"plain": attention_run(sdpa, q, k, v, None)}
        for name in ("sdpa", "exact", "eager"):
            if MOST_SLOTS.get(name, N) >= N:
                runs[name] = attention_run(BACKENDS[name], q, k, v, log_w)
        if on_cuda:
            for name, kernel in KERNELS.items():
                runs[f"plain, {name}"] = attention_run(sdpa_by(kernel), q, k, v, None)
                runs[f"sdpa, {name}"] = attention_run(sdpa_by(kernel), q, k, v, log_w)
        seconds, memory, failed = measure(runs, o.repeats, device, 10 if on_cuda else 1)
        refused += [{"backend": name, "N": N, "d": d, "why": why} for name, why in failed.items()]
        if "plain" not in seconds:
            raise UserError(
                f"plain attention failed at --lengths {N} --widths {d} ({failed['plain']}): if memory ran "
                "out, give smaller ones"
            )
        for name, time_ in seconds.items():
            row = {"backend": name, "N": N, "d": d, "milliseconds": 1e3 * time_, "MiB": memory[name]}
            row["time_ratio"] = time_ / seconds["plain"]
            row["memory_ratio"] = memory[name] and memory[name] / memory["plain"]
            rows.append(row)
    write(o.out, "attention", device, dtype=str(make["dtype"]), rows=rows, refused=refused)


# -- A training step -------------------------------------------------------------------------------


def step_run(shape, B, R, device, dtype, *, plain=False, compiled=False, recompute=False):
    """A function that runs a training step forward and backward once.

    Args:
        shape: a Config, the settings of a model.
        B: windows.
        R: refinements.
        device, dtype: where, and in which precision.
        plain: run the passes as ordinary sequences of a Llama of the same shape, each with its own backward
            pass: as many slots, but no log w, no router, no penalty, and the head once.
        compiled, recompute: run the step with these flags.
    """
    torch.manual_seed(0)
    model = PonderLM(shape).to(device).train()
    model.recompute = recompute
    if compiled:
        compile_for_training(model)
    T = shape.block_size
    rows = torch.randint(shape.vocab_size, (B, T + 1), device=device)
    x = rows[:, :-1]
    y = rows[:, 1:]
    slots = slots_of_passes(shape.ponder_steps, R)
    inputs = []
    if plain:
        inputs = [torch.randn(B, T * n, shape.hidden_size, device=device) for n in slots]

    def run_plain():
        for i, e in enumerate(inputs):
            positions = torch.arange(T, device=device).repeat_interleave(e.size(1) // T)
            e.grad = None
            with autocast(device, dtype):
                h = model.model(e.requires_grad_(), positions, None, auto)
                if i == 0:
                    logits = model.lm_head(h).float()
                    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            if i == 0:
                loss.backward()
            else:
                h.backward(e)  # with any gradient: all take as long
        model.zero_grad()

    def run_step():
        with autocast(device, dtype):
            loss, _, _ = objective(model, x, y, R)
        loss.backward()
        model.zero_grad()

    return run_plain if plain else run_step


@validated_dataclass
class Step(Options):
    preset: Preset = "small"  # preset whose model is measured
    windows: Count | None = None  # windows per step; None: 2 on a CPU; on a GPU, as many as fit into 80 GB
    R: Annotated[int, Field(ge=0)] = 2  # refinement passes of a training step (see train --refinements)
    compile: bool = False  # also measure compiled blocks


def step(o: Annotated[Step, tyro.conf.arg(name="")]):
    """Measure a training step of PonderLM-3 against forward and backward passes of a plain Llama of the
    same shape. PonderLM-3 makes several passes in a training step, and computes up to K+1 slots per token (a
    slot is a token, or an extra step of one). For each pass of PonderLM-3 over n slots, the Llama
    makes one pass over n tokens. So the ratio shows what the method costs beyond its extra slots. Both run in
    bfloat16 where the hardware is fast at it."""
    device = pick_device(o.device)
    _, shape = preset_settings(o.preset)
    dtype = getattr(torch, pick_precision("auto", device))
    B = o.windows or (WINDOWS[o.preset] if device.type == "cuda" else 2)
    cases = {"plain": dict(plain=True), "PonderLM-3": {}, "--recompute": dict(recompute=True)}
    if o.compile:
        cases |= {"plain, --compile": dict(plain=True, compiled=True), "--compile": dict(compiled=True)}
    runs = {name: step_run(shape, B, o.R, device, dtype, **how) for name, how in cases.items()}
    seconds, memory, failed = measure(runs, o.repeats, device)
    if "plain" not in seconds:
        raise UserError(
            f"the plain step failed ({failed['plain']}): if memory ran out, set --windows below {B}"
        )
    rows = []
    flops = B * shape.block_size * flops_of_token(replace(shape, refinements=(o.R, o.R)))
    for name, time_ in seconds.items():
        row = {"case": name, "seconds": time_, "tokens_per_second": B * shape.block_size / time_}
        row |= {"MiB": memory[name], "time_ratio": time_ / seconds["plain"]}
        rows.append(row | {"MFU": flops / time_ / PEAK if device.type == "cuda" else None})
    about = {"dtype": str(dtype), "preset": o.preset, "windows": B, "R": o.R, "shape": asdict(shape)}
    refused = [{"case": name, "why": why} for name, why in failed.items()]
    write(o.out, f"train-{o.preset}", device, **about, rows=rows, refused=refused)


# -- The profile of a training step ----------------------------------------------------------------


@validated_dataclass
class Profile(Options):
    preset: Preset = "small"  # preset whose model is measured
    windows: Count | None = None  # windows per step; None: 2 on a CPU; on a GPU, as many as fit into 80 GB
    R: Annotated[int, Field(ge=0)] = 2  # refinement passes of a training step (see train --refinements)
    compile: bool = False  # compile the blocks and the cross-entropy
    rows: Count = 20  # how many operations to list, slowest first


def profile(o: Annotated[Profile, tyro.conf.arg(name="")]):
    """Show which operations a training step spends its time in, and how long compiling it takes."""
    device = pick_device(o.device)
    _, shape = preset_settings(o.preset)
    dtype = getattr(torch, pick_precision("auto", device))
    B = o.windows or (WINDOWS[o.preset] if device.type == "cuda" else 2)
    run = step_run(shape, B, o.R, device, dtype, compiled=o.compile)

    def seconds_of_a_step():
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    first = seconds_of_a_step()
    graphs = compiled_graphs()
    warm = statistics.median(seconds_of_a_step() for _ in range(o.repeats))
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as seen:
        seconds_of_a_step()

    rows = []
    for event in seen.key_averages():
        microseconds = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        rows.append({"operation": event.key, "calls": event.count, "milliseconds": microseconds / 1000})
    total = sum(row["milliseconds"] for row in rows)
    rows.sort(key=lambda row: -row["milliseconds"])
    for row in rows:
        row["fraction"] = row["milliseconds"] / total
    about = {"dtype": str(dtype), "preset": o.preset, "windows": B, "R": o.R, "compiled": o.compile}
    step = {
        "seconds of the first step": first,
        "seconds of a later step": warm,
        "graphs": graphs,
        "graphs compiled after the first step": compiled_graphs() - graphs,
    }
    write(o.out, f"profile-{o.preset}", device, **about, step=[step], rows=rows[: o.rows])


# -- The memory of a training step -----------------------------------------------------------------


def fits(shape, share, R, gib, **how):
    """The micro-batch size for a GPU with `gib` of memory, if a step is split as train.py splits it.

    Args:
        shape: the settings of a model.
        share: windows of a step.
        R: refinements.
        gib: memory of the GPU, of which a tenth stays free.
        how: as memory.bytes_of_step.

    Returns:
        The size of the equal parts of `share` that fit; 0 if not even one window does.
    """
    room = 0.9 * gib * 2**30
    for most in range(share, 0, -1):
        if sum(bytes_of_step(shape, most, R, **how).values()) < room:
            parts = math.ceil(share / most)
            return math.ceil(share / parts)
    return 0


def flops_of_token(shape):
    """FLOPs per token of training, forward and backward, at the mean of R.

    A product with P weights takes 2 P FLOPs for each slot. Attention takes 2 products x 2 FLOPs x Hd for each
    key that a slot sees; with n slots per token, these are half of the n T keys on average. The backward pass
    takes twice as many as the forward pass.
    """
    D = shape.hidden_size
    Hd = shape.num_attention_heads * shape.head_width
    Gd = shape.kv_heads * shape.head_width
    S = shape.ponder_steps + 1
    whole_passes = sum(shape.refinements) / 2 + 1
    ladder = range(1, S)
    weights = 2 * D * (Hd + Gd) + 3 * D * shape.intermediate_size  # of a layer
    slots = sum(ladder) + whole_passes * S  # per token
    pairs = sum(n**2 for n in ladder) + whole_passes * S**2  # the sum of n slots x n slots over the passes
    layer = slots * weights + pairs * shape.block_size * Hd
    return 6 * (shape.num_hidden_layers * layer + shape.vocab_size * D)


@validated_dataclass
class Memory:
    preset: Preset = "small"  # preset whose training step is estimated
    micro_batch_size: Count | None = None  # windows at a time; None: all windows of a step
    out: Path = Path("out/bench")  # folder for the results


def memory(o: Annotated[Memory, tyro.conf.arg(name="")]):
    """Estimate by the formula in lab/memory.py how much memory a training step takes on a GPU, in bfloat16
    with fused attention, how many windows fit into GPUs of several sizes, and how long the training takes."""
    config, shape = preset_settings(o.preset)
    _, R = shape.refinements  # the most refinements
    B = o.micro_batch_size or config.batch_size
    tokens = config.steps * config.batch_size * shape.block_size
    rows = []
    for compiled, recompute in product((False, True), (False, True)):
        how = dict(recompute=recompute, compiled=compiled)
        parts = {name: n / MIB for name, n in bytes_of_step(shape, B, R, **how).items()}
        row = how | parts | {"MiB": sum(parts.values())}
        for gib in (24, 40, 80):
            row[f"fits_{gib}_GB"] = fits(shape, config.batch_size, R, gib, **how)
        rows.append(row)
    flops = flops_of_token(shape)
    hours = []
    for gpus, mfu in product((1, 8), (MFU["70m"], MFU["410m"])):  # assumed, not measured
        seconds = flops * tokens / (gpus * mfu * PEAK)
        hours.append({"GPUs": gpus, "MFU": mfu, "hours": seconds / 3600})
    about = {"preset": o.preset, "windows": B, "block_size": shape.block_size, "R": R, "tokens": tokens}
    about |= {"flops_of_token": flops}
    write(o.out, f"memory-{o.preset}", torch.device("cpu"), **about, rows=rows, hours=hours)


# -- Decoding --------------------------------------------------------------------------------------


def prompts_of(ids, n, length):
    """n prompts of some length from a text, as far apart as possible.

    Raises:
        UserError: the text is too short.
    """
    if len(ids) <= length:
        raise UserError(f"--prompts {length} is too long: the validation text has only {len(ids)} tokens")
    starts = torch.linspace(0, len(ids) - length - 1, n).long().tolist()
    return [ids[start : start + length].tolist() for start in starts]


def compiled_engine(model, batch_size, **how):
    """An engine with compiled passes; None, and a note on stderr, where these passes cannot be compiled."""
    try:
        return Engine(model, batch_size, compile=True, **how)
    except UserError as error:
        print(f"note: compiled passes are left out: {error}", file=sys.stderr)
        return None


def exit_rows(model, prompts, new_tokens, tau, alphas, repeats, compile=False, **how):
    """Measure early exit against taking all steps.

    Args:
        model: a PonderLM-3.
        prompts: lists of token ids, all of one length.
        new_tokens: tokens to generate for each prompt.
        tau: where early exit stops.
        alphas: shifts of the router, a row for each.
        repeats: rounds, of which the median counts.
        compile: whether to measure compiled passes, too.
        how: further arguments of the Engine.

    Returns:
        A row for each way. `saved` is the saved fraction of time divided by the saved fraction of slots, if
        at least a tenth of the slots is saved.
    """
    B = len(prompts)
    K = model.config.ponder_steps
    device = model.lm_head.weight.device
    how["prefill"] = "sequential"  # a parallel prefill takes the same time however many slots are skipped
    ways = {"all steps": Engine(model, B, tau=0, **how)}
    ways |= {f"alpha {alpha:g}": Engine(model, B, tau=tau, alpha=alpha, **how) for alpha in alphas}
    compiled = compiled_engine(model, B, tau=0, **how) if compile else None
    if compiled:
        ways["all steps, compiled"] = compiled
    if device.type == "cuda":
        ways["all steps, no graphs"] = Engine(model, B, tau=0, graphs=False, **how)

    runs = {name: lambda e=e: e.generate(prompts, new_tokens, seed=0) for name, e in ways.items()}
    if B == 1:
        alone = dict(tau=0.0, seed=0)
        runs["all steps, sample.py"] = lambda: list(sample.stream(model, prompts[0], new_tokens, **alone))
    seconds, _, _ = measure(runs, repeats, device)
    rows = []
    for name, time_ in seconds.items():
        row = {"batch": B, "prompt": len(prompts[0]), "way": name}
        row |= {"tokens_per_second": B * new_tokens / time_, "time_ratio": time_ / seconds["all steps"]}
        if name.startswith("alpha"):
            read = [[] for _ in prompts]
            list(
                ways[name].stream(prompts, new_tokens, seed=0, read=read)
            )  # fills it: the steps of each token
            steps = sum(map(sum, read)) / sum(map(len, read))
            share = (1 + steps) / (1 + K)
            row |= {"steps": steps, "slot_ratio": share}
            row["saved"] = (1 - row["time_ratio"]) / (1 - share) if share < 0.9 else None
        rows.append(row)
    return rows


def llama(config):
    """An untrained Llama of transformers, and a vanilla model of ours with the same weights."""
    shape = {name: getattr(config, name) for name in (*BACKBONE, "block_size")}
    vanilla = build(PonderConfig(**shape, method="vanilla", ponder_steps=0)).eval()
    return to_others(vanilla, {"bos_token_id": None, "eos_token_id": None}).eval(), vanilla


def other_rows(models, prompts, new_tokens, repeats, compile=False, **how):
    """Tokens a second of the engine, plain and compiled, and of transformers' generate, prompts included.

    Args:
        models: the two of `llama`, transformers' first.
        prompts: lists of token ids, all of one length.
        new_tokens: tokens to generate for each prompt.
        repeats: rounds, of which the median counts.
        compile: whether to measure compiled passes, too.
        how: further arguments of the Engine.

    Returns:
        One row. `ratio` is the plain engine's speed as a multiple of transformers', `compiled_ratio` the
        compiled engine's speed as a multiple of the plain engine's.
    """
    theirs, ours = models
    idx = torch.tensor(prompts, device=ours.lm_head.weight.device)
    options = dict(do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(idx))
    options |= dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    plain = Engine(ours, len(prompts), **how)
    compiled = compiled_engine(ours, len(prompts), **how) if compile else None
    runs = {"ours": lambda: plain.generate(prompts, new_tokens, temperature=0.0)}
    if compiled:
        runs["compiled"] = lambda: compiled.generate(prompts, new_tokens, temperature=0.0)
    runs["theirs"] = lambda: theirs.generate(idx, **options)
    seconds, _, _ = measure(runs, repeats, idx.device)
    row = {"against": "transformers", "batch": len(prompts), "prompt": idx.size(1)}
    row |= {f"{name}_tokens_per_second": len(prompts) * new_tokens / x for name, x in seconds.items()}
    row["ratio"] = seconds["theirs"] / seconds["ours"]
    if compiled:
        row["compiled_ratio"] = seconds["ours"] / seconds["compiled"]
    return [row]


@validated_dataclass
class Decoding(Options):
    run: str | None = None  # directory of a trained PonderLM-3; None: the newest run in out/
    # the text that the run was trained on, needed unless that was pydocs or pysource
    data: str | None = None
    batch_sizes: Some[Count] = (1, 8, 32)  # numbers of sequences that run at once
    prompts: Some[Count] = (32,)  # lengths of prompts, in tokens
    new_tokens: Count = 64  # tokens to generate for each prompt
    # early-exit threshold: a token takes no further pondering step once the router's probability that it
    # needs one falls below this; 0: take all steps
    tau: float = 1e-4
    # values of --alpha to measure (see python -m lab sample --help); lower ones take fewer steps
    alphas: Some[float] = (0.0, -2.0, -4.0)
    precision: Literal["float32", "bfloat16"] = "float32"  # precision of the engine and of transformers
    compile: bool = True  # also measure compiled passes (only on a CPU in float32)


def decoding(o: Annotated[Decoding, tyro.conf.arg(name="")]):
    """Measure decoding with early exit against decoding with all steps and against sample.py; and a plain
    Llama in this engine against the same model in transformers."""
    device = pick_device(o.device)
    dtype = getattr(torch, o.precision)
    directory = find_model(o.run)
    model = load(directory).to(device)
    if not (serves(model) and model.has_router):
        raise UserError(
            f"this benchmark needs a PonderLM-3 with a router, but {directory} uses the method "
            f"{model.config.method}: choose another run with --run"
        )
    for alpha in o.alphas:
        check_request(model, [], tau=o.tau, alpha=alpha)
    _, _, windows = validation_windows(directory, o.data)
    val = torch.from_numpy(windows.tokens[:2_000_000].astype("int64"))
    # The window may be larger than in training: speed does not depend on what the model predicts there.
    window = max(model.config.block_size, max(o.prompts) + o.new_tokens)
    model.config = replace(model.config, block_size=window)
    rows = []
    others = []
    theirs, ours = llama(model.config)
    both = theirs.to(device, dtype), ours.to(device)
    compile = o.compile and device.type == "cpu" and dtype == torch.float32
    sizes = list(product(o.batch_sizes, o.prompts))
    for B, length in progress(sizes, "decoding", unit=" sizes", leave=False):
        texts = prompts_of(val, B, length)
        how = dict(compile=compile, dtype=dtype)
        rows += exit_rows(model, texts, o.new_tokens, o.tau, o.alphas, o.repeats, **how)
        others += other_rows(both, texts, o.new_tokens, o.repeats, **how)
    about = {"run": directory.name, "parameters": sum(p.numel() for p in model.parameters()), "tau": o.tau}
    about |= {"precision": o.precision, "compile": compile}
    write(o.out, f"decode-{directory.name}", device, **about, exit=rows, others=others)


# -- The goals of a GPU ----------------------------------------------------------------------------


@validated_dataclass
class Goals:
    out: Path = Path("out/bench")  # folder of the results
    # also check that this run of the preset small takes at most 2.9 steps per token
    run: Path | None = None


def goals(o: Annotated[Goals, tyro.conf.arg(name="")]):
    """Check the results of the other benchmarks, in --out, against this project's targets for speed, memory
    and executed steps on a GPU. The targets are printed beside what was found."""
    rows = []

    def goal(what, value, least=None, most=None):
        if most is None:
            passed = value >= least
            bound = f"at least {least}"
        else:
            passed = value <= most
            bound = f"at most {most}"
        verdict = "passed" if passed else "FELL SHORT"
        rows.append({"goal": what, "found": value, "bound": bound, "": verdict})

    if o.run:
        file = o.run / "results.json"
        with user_error_if_unreadable(file):
            goal(f"{o.run.name}, executed steps", read_json(file)["hard"]["steps"], most=MOST_STEPS)
    for file in sorted(o.out.glob("*.json")):
        found = read_json(file)
        with user_error_if_unreadable(file):
            for row in found.get("rows", []):
                if row.get("backend") == "sdpa" and row["d"] in MASK_COST:
                    what = f"soft mask, time / plain attention, d = {row['d']}, {row['N']} slots"
                    goal(what, row["time_ratio"], most=MASK_COST[row["d"]])
                is_compiled = row.get("case") == "--compile" and found["preset"] in MFU
                if is_compiled and row["MFU"] is not None:  # it is known on a GPU only
                    goal(f"{found['preset']}, compiled step, MFU", row["MFU"], least=MFU[found["preset"]])
            for row in found.get("exit", []):
                what = f"{found['run']}, batch {row['batch']}, {row['way']}: "
                if row.get("saved"):
                    goal(what + "saved time / saved slots", row["saved"], least=LEAST_SAVED)
                if row["way"] == "all steps, no graphs" and row["batch"] == 1:
                    goal(what + "time / that with graphs", row["time_ratio"], least=LEAST_GRAPH_SPEED_UP)
    if not rows:
        raise UserError(
            f"--out {o.out} has none of the measurements that goals are for: run bench attention, step and "
            "decoding on a GPU first"
        )
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    commands = {command.__name__: command for command in (attention, step, profile, memory, decoding, goals)}
    how = dict(prog="python -m lab bench", description=__doc__)
    command_line(lambda: tyro.extras.subcommand_cli_from_dict(commands, **how))
