"""Speed, as ratios of medians of one run, and on CUDA the memory at the peak.

    python -m lab bench attention     the forms of soft-mask attention against plain attention
    python -m lab bench step          a training step against plain passes over as many slots
    python -m lab bench memory        what a training step takes, by lab/memory.py; what fits; hours
    python -m lab bench decoding      early exit against all steps; against transformers
    python -m lab bench goals         which of a GPU's goals the results of the others meet

Things that are compared take turns, so that a machine that slows down slows all of them. Tables are printed,
and written to <out>/attention-<device>.json, train-<preset>-<device>.json, decode-<run>-<device>.json or
memory-<preset>-cpu.json.
"""

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
from torch.utils.benchmark import Timer

import sample
from attention import BACKENDS, auto, sdpa
from common import UserError, command_line, one_line, read_json, user_error_if_unreadable, write_json
from hardware import compile_blocks, pick_device, pick_precision
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
from train import objective, preset_settings

Some = Annotated[tuple[TypeVar("T"), ...], Field(min_length=1)]  # for a flag: Some[int]
Preset = Literal["tiny", "small", "70m", "410m"]
SHORT = {"eager": 4096}  # slots up to which a form is measured: its N x N matrices take gigabytes
WINDOWS = {"tiny": 256, "small": 64, "70m": 4, "410m": 1}  # of a step in 80 GB
PEAK = 989e12  # FLOP/s of an H100 in bfloat16
MFU = {"small": 0.25, "410m": 0.35}  # share of it that a training step should reach
MIB = 2**20


@validated_dataclass
class Options:
    repeats: Count = 3  # rounds
    device: str = "auto"  # auto, cpu, cuda
    out: Path = Path("out/bench")  # folder for the results


def measure(runs, repeats, device, calls=1):
    """{name: a function} -> by name the median seconds of a call, and the MiB that it takes at its peak (None
    on a CPU); and why others cannot run. The clock waits for a GPU."""
    timers, memory, refused = {}, {}, {}
    for name, run in runs.items():
        try:
            run()  # which may compile
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                run()
                memory[name] = (torch.cuda.max_memory_allocated() - before) / MIB
        except Exception as error:  # too little memory; a kernel of others fails in any way
            refused[name] = one_line(error)
        else:
            how = dict(globals={"run": run}, num_threads=torch.get_num_threads())
            timers[name] = Timer("run()", **how)
    rounds = [{name: timer.timeit(calls).mean for name, timer in timers.items()} for _ in range(repeats)]
    seconds = {name: statistics.median(found[name] for found in rounds) for name in timers}
    return seconds, {name: memory.get(name) for name in timers}, refused


def write(out, name, device, **results):
    """Print tables, those of the results that are lists of rows, and write all to a new file of `out`."""
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
    """A function that runs a form forward and backward once; inputs: q, k, v and log w, or None."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in inputs]
    gradient = torch.randn_like(inputs[0])

    def run():
        form(*leaves).backward(gradient)
        for x in leaves:
            if x is not None:
                x.grad = None

    return run


@validated_dataclass
class Attention(Options):
    lengths: Some[Count] = (1024, 4096, 8192, 16384)  # N, in slots
    widths: Some[Count] = (56, 64, 128)  # d of a head


def attention(o: Annotated[Attention, tyro.conf.arg(name="")]):
    """Soft-mask attention against plain causal attention, forward and backward.

    On a CPU one sequence of 4 heads in float32; on CUDA 16,384 slots of 16 heads in bfloat16.
    """
    device, rows, refused = pick_device(o.device), [], []
    on_cuda = device.type == "cuda"
    make = dict(device=device, dtype=torch.bfloat16 if on_cuda else torch.float32)
    for d, N in progress(list(product(o.widths, o.lengths)), "attention", unit=" sizes", leave=False):
        B, H = (max(16384 // N, 1), 16) if on_cuda else (1, 4)
        q, k, v = torch.randn(3, B, H, N, d, **make)
        log_w = -9 * torch.rand(B, N, device=device)
        runs = {"plain": attention_run(sdpa, q, k, v, None)}
        for name in ("sdpa", "exact", "eager"):
            if SHORT.get(name, N) >= N:
                runs[name] = attention_run(BACKENDS[name], q, k, v, log_w)
        seconds, memory, failed = measure(runs, o.repeats, device, 10 if on_cuda else 1)
        refused += [{"backend": name, "N": N, "d": d, "why": why} for name, why in failed.items()]
        if "plain" not in seconds:
            raise UserError(f"plain attention of lengths = {N}, widths = {d}: {failed['plain']}")
        for name, time_ in seconds.items():
            row = {"backend": name, "N": N, "d": d, "milliseconds": 1e3 * time_, "MiB": memory[name]}
            row["time_ratio"] = time_ / seconds["plain"]
            row["memory_ratio"] = memory[name] and memory[name] / memory["plain"]
            rows.append(row)
    write(o.out, "attention", device, dtype=str(make["dtype"]), rows=rows, refused=refused)


# -- A training step -------------------------------------------------------------------------------


def step_run(shape, B, R, device, dtype, *, plain=False, compiled=False, recompute=False):
    """A function that runs forward and backward on B windows once.

    `plain` is what the passes would cost as ordinary sequences of a Llama of the same shape, each with its
    own backward pass: same slots, no log w, no router, no penalty, one head.
    """
    torch.manual_seed(0)
    model = PonderLM(shape).to(device).train()
    model.recompute = recompute
    if compiled:
        compile_blocks(model)
    T, D = shape.block_size, shape.hidden_size
    rows = torch.randint(shape.vocab_size, (B, T + 1), device=device)
    x, y = rows[:, :-1], rows[:, 1:]
    slots = slots_of_passes(shape.ponder_steps, R)
    inputs = [torch.randn(B, T * n, D, device=device) for n in slots] if plain else []

    def run():
        for i, e in enumerate(inputs):
            positions = torch.arange(T, device=device).repeat_interleave(e.size(1) // T)
            e.grad = None
            with autocast(device, dtype):
                h = model.model(e.requires_grad_(), positions, None, auto)
                loss = (
                    F.cross_entropy(model.lm_head(h).float().flatten(0, 1), y.flatten()) if i == 0 else None
                )
            h.backward(e) if loss is None else loss.backward()  # any gradient takes as long
        if not plain:
            with autocast(device, dtype):
                loss, _, _ = objective(model, x, y, R)
            loss.backward()
        model.zero_grad()

    return run


@validated_dataclass
class Step(Options):
    preset: Preset = "small"  # the shape
    windows: Count | None = None  # a step; None: 2 on a CPU, on a GPU what one of 80 GB holds
    R: Annotated[int, Field(ge=0)] = 2  # refinements
    compile: bool = False  # also with compiled blocks


def step(o: Annotated[Step, tyro.conf.arg(name="")]):
    """A training step against plain forward and backward over as many slots, in bfloat16 where it is fast."""
    device, shape = pick_device(o.device), preset_settings(o.preset)[1]
    dtype = getattr(torch, pick_precision("auto", device))
    B = o.windows or (WINDOWS[o.preset] if device.type == "cuda" else 2)
    cases = {"plain": dict(plain=True), "PonderLM-3": {}, "--recompute": dict(recompute=True)}
    if o.compile:
        cases |= {"plain, --compile": dict(plain=True, compiled=True), "--compile": dict(compiled=True)}
    runs = {name: step_run(shape, B, o.R, device, dtype, **how) for name, how in cases.items()}
    seconds, memory, failed = measure(runs, o.repeats, device)
    if "plain" not in seconds:
        raise UserError(f"the plain step: {failed['plain']}; try fewer --windows than {B}")
    rows = []
    flops = B * shape.block_size * flops_of_token(replace(shape, refinements=(o.R, o.R)))
    for name, time_ in seconds.items():
        row = {"case": name, "seconds": time_, "tokens_per_second": B * shape.block_size / time_}
        row |= {"MiB": memory[name], "time_ratio": time_ / seconds["plain"]}
        rows.append(row | {"MFU": flops / time_ / PEAK if device.type == "cuda" else None})
    about = {"dtype": str(dtype), "preset": o.preset, "windows": B, "R": o.R, "shape": asdict(shape)}
    refused = [{"case": name, "why": why} for name, why in failed.items()]
    write(o.out, f"train-{o.preset}", device, **about, rows=rows, refused=refused)


# -- The memory of a training step -----------------------------------------------------------------


def fits(c, share, R, gib, **how):
    """How many of `share` windows a GPU of so many GiB takes at once, as train.py splits them; 0: not one."""
    room = 0.9 * gib * 2**30
    sizes = range(share, 0, -1)
    most = next((n for n in sizes if sum(bytes_of_step(c, n, R, **how).values()) < room), 0)
    return most and -(-share // -(-share // most))


def flops_of_token(c):
    """FLOPs of a token of training, forward and backward, at the mean of R: products with weights, and scores
    and values of half of all pairs of slots."""
    D, Hd, Gd, R = (
        c.hidden_size,
        c.num_attention_heads * c.head_width,
        c.kv_heads * c.head_width,
        sum(c.refinements) / 2,
    )
    layer, ladder = 2 * D * (Hd + Gd) + 3 * D * c.intermediate_size, range(1, c.ponder_steps + 1)
    slots, pairs = (sum(n**e for n in ladder) + (R + 1) * (c.ponder_steps + 1) ** e for e in (1, 2))
    return 6 * (c.num_hidden_layers * (slots * layer + pairs * c.block_size * Hd) + c.vocab_size * D)


@validated_dataclass
class Memory:
    preset: Preset = "small"  # the shape
    micro_batch_size: Count | None = None  # windows at a time; None: a step's
    out: Path = Path("out/bench")  # folder for the results


def memory(o: Annotated[Memory, tyro.conf.arg(name="")]):
    """What a training step takes on a GPU, by the formula of lab/memory.py, in bfloat16 through fused
    attention; what fits; how long it takes."""
    config, c = preset_settings(o.preset)
    R, B = c.refinements[1], o.micro_batch_size or config.batch_size  # the most refinements
    tokens, rows = config.steps * config.batch_size * c.block_size, []
    for compiled, recompute in product((False, True), (False, True)):
        how = dict(recompute=recompute, compiled=compiled)
        parts = {name: n / MIB for name, n in bytes_of_step(c, B, R, **how).items()}
        row = how | parts | {"MiB": sum(parts.values())}
        for gib in (24, 40, 80):
            row[f"fits_{gib}_GB"] = fits(c, config.batch_size, R, gib, **how)
        rows.append(row)
    flops = flops_of_token(c)
    hours = [
        {"GPUs": n, "MFU": mfu, "hours": flops * tokens / (n * mfu * PEAK) / 3600}
        for n, mfu in product((1, 8), (0.25, 0.35))
    ]
    about = {"preset": o.preset, "windows": B, "block_size": c.block_size, "R": R, "tokens": tokens}
    about |= {"flops_of_token": flops}
    write(o.out, f"memory-{o.preset}", torch.device("cpu"), **about, rows=rows, hours=hours)


# -- Decoding --------------------------------------------------------------------------------------


def prompts_of(ids, n, length):
    """n prompts from a text, as far apart as it goes."""
    if len(ids) <= length:
        raise UserError(f"prompts = {length}: the validation text has only {len(ids)} tokens")
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
    """Ratios to all steps. saved: saved time by saved slots, where a tenth of them is (goal: 0.9)."""
    B, K, device = len(prompts), model.config.ponder_steps, model.lm_head.weight.device
    how["prefill"] = "sequential"  # of prompts in parallel the time does not go by slots
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
            list(ways[name].stream(prompts, new_tokens, seed=0, read=read))
            steps = sum(map(sum, read)) / sum(map(len, read))
            share = (1 + steps) / (1 + K)
            row |= {"steps": steps, "slot_ratio": share}
            row["saved"] = (1 - row["time_ratio"]) / (1 - share) if share < 0.9 else None
        rows.append(row)
    return rows


def llama(config):
    """A model without thinking of the same shape, untrained, and the same in transformers."""
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
    run: str | None = None  # directory of a trained PonderLM-3; None: the newest in out/
    data: str | None = None  # the text that it was scored on, if that is no corpus with a name
    batch_sizes: Some[Count] = (1, 8, 32)  # sequences that run at once
    prompts: Some[Count] = (32,)  # lengths of prompts, in tokens
    new_tokens: Count = 64  # to generate for each
    tau: float = 1e-4  # where early exit stops
    alphas: Some[float] = (0.0, -2.0, -4.0)  # shifts of the router, which sweep the executed steps
    precision: Literal["float32", "bfloat16"] = "float32"  # of the engine's products, and of transformers
    compile: bool = True  # measure compiled passes beside plain ones, on a CPU in float32


def decoding(o: Annotated[Decoding, tyro.conf.arg(name="")]):
    """Early exit against all steps and sample.py; a Llama of the shape against transformers."""
    device, directory = pick_device(o.device), find_model(o.run)
    model, dtype = load(directory).to(device), getattr(torch, o.precision)
    if not (serves(model) and model.has_router):
        raise UserError(f"{directory} is of method {model.config.method}: give a PonderLM-3")
    for alpha in o.alphas:
        check_request(model, [], tau=o.tau, alpha=alpha)
    _, _, windows = validation_windows(directory, o.data)
    val = torch.from_numpy(windows.tokens[:2_000_000].astype("int64"))
    # Times do not depend on what is said beyond the window, and RoPE knows no end.
    window = max(model.config.block_size, max(o.prompts) + o.new_tokens)
    model.config, rows, others = replace(model.config, block_size=window), [], []
    both = [m.to(device) for m in llama(model.config)]
    both[0].to(dtype)
    compile = o.compile and device.type == "cpu" and dtype == torch.float32
    sizes = list(product(o.batch_sizes, o.prompts))
    for B, length in progress(sizes, "decoding", unit=" sizes", leave=False):
        texts, how = prompts_of(val, B, length), dict(compile=compile, dtype=dtype)
        rows += exit_rows(model, texts, o.new_tokens, o.tau, o.alphas, o.repeats, **how)
        others += other_rows(both, texts, o.new_tokens, o.repeats, **how)
    about = {"run": directory.name, "parameters": sum(p.numel() for p in model.parameters()), "tau": o.tau}
    about |= {"precision": o.precision, "compile": compile}
    write(o.out, f"decode-{directory.name}", device, **about, exit=rows, others=others)


# -- The goals of a GPU ----------------------------------------------------------------------------


@validated_dataclass
class Goals:
    out: Path = Path("out/bench")  # folder of the results
    run: Path | None = None  # a training of `small`, too


def goals(o: Annotated[Goals, tyro.conf.arg(name="")]):
    """Which goals the results in --out meet: a row for each, of those that have been measured."""
    rows = []

    def goal(what, value, least=None, most=None):
        passed = value >= least if most is None else value <= most
        bound = f"at least {least}" if most is None else f"at most {most}"
        rows.append({"goal": what, "found": value, "bound": bound, "": "passed" if passed else "FELL SHORT"})

    if o.run:
        with user_error_if_unreadable(file := o.run / "results.json"):
            goal(f"{o.run.name}, executed steps", read_json(file)["hard"]["steps"], most=2.9)
    for file in sorted(o.out.glob("*.json")):
        found = read_json(file)
        with user_error_if_unreadable(file):
            for row in found.get("rows", []):
                if row.get("backend") == "sdpa" and row["d"] in (56, 120):
                    what = f"soft mask, time / plain attention, d = {row['d']}, {row['N']} slots"
                    goal(what, row["time_ratio"], most=1.1)
                if row.get("case") == "--compile" and found["preset"] in MFU:
                    goal(f"{found['preset']}, compiled step, MFU", row["MFU"], least=MFU[found["preset"]])
            for row in found.get("exit", []):
                what = f"{found['run']}, batch {row['batch']}, {row['way']}: "
                if row.get("saved"):
                    goal(what + "saved time / saved slots", row["saved"], least=0.9)
                if row["way"] == "all steps, no graphs" and row["batch"] == 1:
                    goal(what + "time / that with graphs", row["time_ratio"], least=2)
    if not rows:
        raise UserError(f"{o.out} has no results of attention, step or decoding: run those first")
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    commands = {command.__name__: command for command in (attention, step, memory, decoding, goals)}
    how = dict(prog="python -m lab bench", description=__doc__)
    command_line(lambda: tyro.extras.subcommand_cli_from_dict(commands, **how))
