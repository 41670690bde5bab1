"""Train a PonderLM-3: next-token cross-entropy plus the bottom-mass penalty (section 3.4.2), and, where
--step-price asks for it, as `small` does, a price on executed steps, which is not the paper's.

    python train.py                                       'tiny' on a CPU, 'small' on a GPU
    python train.py --data my_texts/ --steps 2000
    python train.py --preset tiny --ponder-steps 0        the same transformer without pondering
    python train.py --resume                              go on with the newest run, exactly
    torchrun --nproc_per_node=2 train.py                  two processes share each step

Every flag and its default: python train.py --help. Ctrl-C saves. A run is a directory:

    config.json, model.safetensors, tokenizer.json    a model, as sample.py and analyze.py read it
    trainer.pt      the checkpoint: weights, optimizer, step, log; replaced whole or not at all
    train.json      every setting, and hashes of its corpus
    log.jsonl       settings of each start, then numbers each --log-every steps, as of the last checkpoint
    results.json    the final evaluation
"""

import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import filelock
import numpy as np
import torch
import torch.distributed as dist
import tyro
from pydantic import Field
from safetensors import SafetensorError
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from attention import BACKENDS, auto, flash_attn_func
from data import (
    UserError,
    Windows,
    command_line,
    is_prepared,
    newest_run,
    one_line,
    open_corpus,
    pick_device,
    read_json,
    reading,
    unigram_entropy,
    write_json,
    write_whole,
)
from model import Config, Count, NotNegative, PonderLM, Seed, Share, from_json, save, settings
from router import TAU, bottom_mass_penalty, relaxed_steps, stop_step

# -- Settings --------------------------------------------------------------------------------------

Beta = Annotated[float, Field(ge=0, lt=1)]


@settings
class TrainConfig:
    """All that is not the model. What stands beside a field, or right above it, is its --help."""

    program = "python {}.py"  # as messages name the commands

    preset: Literal["tiny", "small", "70m", "410m"] = "tiny"  # the defaults, which other flags change
    name: str | None = None  # of the run, a folder in --out; None: preset and time
    out: str = "out"  # where runs are kept
    resume: bool = False  # go on with the run --name, or the newest, with its settings
    data: str = "pydocs"  # pydocs, pysource, a file, a folder of texts, or one of .bin files
    tokenizer: str = "auto"  # bytes, bpe, gpt2; auto: a .bin folder's own, else by the preset

    steps: Count = 1000  # optimizer steps
    batch_size: Count = 8  # windows a step
    micro_batch_size: Count | None = None  # windows at a time; None: all on a CPU, on a GPU what fits
    learning_rate: NotNegative = 4e-3  # peak; cosine to a tenth of it
    router_rate: NotNegative = 3.0  # learning rate of the router, times that of the rest (reading note 6)
    warmup: Share = 0.05  # share of the steps in which the learning rate rises
    weight_decay: Share = 0.1  # on matrices, without the router's
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # of AdamW
    clip: NotNegative = 1.0  # gradient norm; 0: off
    step_price: NotNegative = 0.0  # nats for a pondering step (router.relaxed_steps); 0: they are free
    price_from: Share = 0.0  # share of the training after which they cost that
    seed: Seed = 0  # of weights, batches and R

    log_every: Count = 20  # steps between log lines
    eval_every: Count = 250  # steps between checkpoints, each of which is evaluated
    eval_windows: Count = 512  # validation windows of the final evaluation
    tau: Share = TAU  # where executed steps are counted and hard stopping is scored

    device: str = "auto"  # auto, cpu, cuda, mps
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where there is hardware
    attention: Literal["auto", "eager", "sdpa", "fa2"] = "auto"  # see attention.py
    compile: bool | None = None  # compile the blocks: faster steps, after a minute; None: on CUDA
    recompute: bool = False  # compute each pass again in the backward pass, to save memory

    def __post_init__(self):
        if self.name is not None and (self.name in ("", ".", "..") or "/" in self.name):
            raise ValueError(f"name = {self.name!r} is no name of a folder")


# Values of settings that older runs did not record.
OLD_DEFAULTS = {"router_rate": 1.0, "step_price": 0.0, "price_from": 0.0}
OLD_DEFAULTS |= {"attention": "auto", "compile": False}
CHECKPOINT_WINDOWS = 64  # of validation, at each checkpoint
# What a resumed training may change: anything else would make it another training. The corpus may
# have moved, but must be the same.
MAY_CHANGE = {"steps", "learning_rate", "clip", "log_every", "eval_every", "eval_windows", "tau"}
MAY_CHANGE |= {"data", "device", "precision", "attention", "compile", "recompute"}
PRESETS = {  # Config(V, D, width of the MLP, layers, H, ..)
    # A 2-core CPU, minutes.
    "tiny": (TrainConfig(), Config(257, 96, 256, 3, 2, head_dim=24, block_size=64, refinements=(1, 1))),
    # One GPU, minutes, its text read once. With d = 56 the channel of log w fits into a kernel of width 64.
    # Without a price all of its tokens take all steps (docs/results.md).
    "small": (
        TrainConfig("small", data="pysource", steps=1500, batch_size=64, learning_rate=1e-3, step_price=0.1,
                    eval_every=500),
        Config(4096, 384, 1032, 6, 6, head_dim=56, block_size=256),
    ),
    # The paper's two sizes, with the recipe of the released PonderLM-2 and Pythia scripts: 15 B and 10 B
    # tokens.
    "70m": (
        TrainConfig("70m", steps=28_610, batch_size=256, learning_rate=1e-3, router_rate=1.0,
                    warmup=0.01, weight_decay=0.01, eval_every=1000),
        Config(50_304, 512, 1376, 6, 8, block_size=2048),
    ),
    "410m": (
        TrainConfig("410m", steps=19_073, batch_size=256, learning_rate=3e-4, router_rate=1.0,
                    warmup=0.02, eval_every=1000),
        Config(50_304, 1024, 2752, 24, 16, block_size=2048),
    ),
}  # fmt: skip


def first_flags(
    preset: str | None = None, device: str = "auto", out: str = "out", name: str | None = None,
    resume: bool = False,
):  # fmt: skip
    """Flags that are read first, since the defaults of the others depend on them."""
    return preset, device, out, name, resume


def usual_preset(device):
    """The preset of a device, by its name. Asks the driver, and opens no device yet."""
    on_gpu = device.partition(":")[0] in ("auto", "cuda") and torch.cuda.is_available()
    return "small" if on_gpu else "tiny"


def parse(argv=None):
    """The command line -> (TrainConfig, Config). --preset, or the run that goes on, has the defaults.
    UserError: what --resume must not change. pydantic.ValidationError: a value out of its range."""
    how = dict(args=argv, return_unknown_args=True, add_help=False)
    (preset, device, out, name, resume), _ = tyro.cli(first_flags, **how)
    if resume:
        run = Path(out, name) if name else newest_run(out)
        config, shape, _ = read_run(run)
        if (method := shape.pop("method", None)) != PonderLM.method:
            raise UserError(f"{run} is of the method {method!r}: go on with python -m lab train")
        with reading(run / "train.json"):
            before = replace(config, out=out, name=run.name, resume=True), from_json(Config, shape)
    else:
        before = PRESETS.get(preset or usual_preset(device), PRESETS["tiny"])  # a wrong one is refused below

    flat = tyro.conf.arg(name="")  # --steps, and not --config.steps
    both = tuple[Annotated[TrainConfig, flat], Annotated[Config, flat]]
    now = tyro.cli(both, default=before, description=__doc__, args=argv)
    if resume:
        refuse_changes(run, before, now)
    return now


def refuse_changes(run, before, now):
    """UserError: settings, a TrainConfig and a Config each, that make a resumed training another one."""
    before, now = (asdict(config) | asdict(shape) for config, shape in (before, now))
    odd = [name for name in now if before[name] != now[name] and name not in MAY_CHANGE]
    if odd:
        odd = "; ".join(f"{name}: {before[name]} -> {now[name]}" for name in odd)
        raise UserError(f"{run} has other settings: train anew without --resume, or undo {odd}")


def read_run(run, kind=TrainConfig):
    """train.json of a run -> its TrainConfig, the settings of its model (a dict), fingerprint of its corpus.
    UserError: it is not a run, or damaged."""
    file = Path(run, "train.json")
    if not file.is_file():
        raise UserError(f"{run} is no run, it has no train.json: train one, without --resume")
    content = read_json(file)
    with reading(file, "; go on with the program that began it"):
        config, shape, corpus = (dict(content[part]) for part in ("config", "model", "corpus"))
        return from_json(kind, OLD_DEFAULTS | config), shape, corpus


# -- Training --------------------------------------------------------------------------------------


def objective(model, x, y, R, price=0.0):
    """The loss of one micro-batch:

        L = CE + lambda sum_k mean(Bottom_{d_rho_k}(w_k)) + price mean(relaxed(w))

    As printed the penalty of n tokens is 0 where all CE_k are above 0.5 + log(n) / 10, 1.1 nats for n = 512
    (reading note 2). There CE alone teaches the router, through log w, and through s, which weighs what
    predicts.

    Args:
        x, y: (B, T) tokens, and those that follow them; -100 where there is none to predict.
        R: Jacobi refinements. price: of a pondering step in nats, which is not the paper's.

    Returns:
        L, the penalty without lambda, and the model's Output, whose loss is CE.
    """
    out, config, has_target = model(x, y, R=R), model.config, y != -100
    loss, penalty, log_w = out.loss, torch.zeros_like(out.loss), out.log_w[has_target]  # (n, K+1)
    if not (config.ponder_steps and len(log_w)):
        return loss, penalty, out
    if config.penalty_weight:
        ce = model.partial_losses(out.h, out.s, y)  # (B, T, K): integrated up to step 0 .. K-1
        ce = torch.cat([ce, out.ce[..., None]], dim=-1)  # (B, T, K+1)
        penalty, _ = bottom_mass_penalty(log_w, ce[has_target], config.penalty)
        loss = loss + config.penalty_weight * penalty
    if price:
        loss = loss + price * relaxed_steps(log_w).mean()
    return loss, penalty, out


class Objective(nn.Module):
    """An objective of rows of tokens (n, T+1), as a module: DistributedDataParallel wraps nothing else."""

    def __init__(self, model, objective, precision):
        super().__init__()
        self.model, self.objective, self.precision = model, objective, precision

    def forward(self, rows, R, price=0.0):
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            return self.objective(self.model, rows[:, :-1], rows[:, 1:], R, price)


def learning_rate(step, config):
    """Linear warm-up, then a cosine from the peak to a tenth of it."""
    warmup = max(1, round(config.warmup * config.steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(config, model_config, make_model=PonderLM, objective=objective, open_text=open_corpus):
    """Train as the settings say -> the run's directory, and its final evaluation; None if it was stopped.

    make_model: model_config -> model. objective: as above. open_text: as data.open_corpus.
    """
    rank, processes, device = join_processes(config.device)
    name = config.name or f"{config.preset}-{time.strftime('%m%d-%H%M%S')}"
    run = Path(config.out, gather(name)[0])  # by the first process's clock
    if config.batch_size % processes:
        raise UserError(f"batch_size = {config.batch_size}: {processes} processes cannot share it equally")
    if not (config.resume or rank):  # before minutes of reading text
        check_free(run)
    if rank:  # the first process prepares the corpus, the others find it
        dist.barrier()
    tokenizer = pick_tokenizer(config.preset, config.data, config.tokenizer)
    corpus = open_text(config.data, tokenizer, model_config.vocab_size)
    if processes > 1 and not rank:
        dist.barrier()
    T, (low, high) = model_config.block_size, model_config.refinements
    windows, val = Windows(corpus.train, T, config.seed), Windows(corpus.val, T, seed=0)
    if config.resume:
        before, now = (x | {"name": ""} for x in (read_run(run, type(config))[2], corpus.fingerprint))
        if before != now:
            raise UserError(f"{config.data} is not the text of {run}, or in other tokens: give it by --data")

    torch.manual_seed(config.seed)
    model = make_model(replace(model_config, vocab_size=corpus.vocab_size)).to(device).train()
    precision = pick_precision(config.precision, device)
    if config.attention == "fa2" and (flash_attn_func is None or precision != "bfloat16"):
        raise UserError("--attention fa2 needs the package flash-attn, a GPU and bfloat16; sdpa is as exact")
    model.backend, model.recompute = BACKENDS[config.attention], config.recompute
    optimizer = torch.optim.AdamW(
        model.param_groups(config.router_rate), config.learning_rate, config.betas,
        weight_decay=config.weight_decay, fused=device.type in ("cpu", "cuda"),
    )  # fmt: skip
    losses = Objective(model, objective, precision)
    local = config.batch_size // processes  # windows a step of this process
    micro = pick_micro_batch(config, model, local, lambda n: losses(windows.stack(0, n).to(device), high)[0])
    if compiles := device.type == "cuda" if config.compile is None else config.compile:
        compile_blocks(model)
    if processes > 1:
        losses = DistributedDataParallel(losses)

    # More processes need smaller micro-batches; a later start with fewer has the first one's again.
    recorded = config.micro_batch_size if config.resume else micro
    config = replace(config, name=run.name, micro_batch_size=recorded, precision=precision)
    content = {"config": asdict(config), "model": {"method": model.method, **asdict(model_config)}}
    content["corpus"] = corpus.fingerprint
    with locked(run, rank):
        first, seconds, log = 0, 0.0, []
        if config.resume:
            first, log = load_checkpoint(run, model, optimizer)
        elif not rank:
            check_free(run)  # once more: another training may have taken it while this one read text
        if first > config.steps:
            raise UserError(f"{run} has done {first} steps already: go on with a larger --steps")
        machine = describe_machine(device, precision)
        log.append({"step": first, **machine, "processes": processes, "config": asdict(config)})
        if not rank:
            if first < config.steps:
                (run / "results.json").unlink(missing_ok=True)
            write_json(run / "train.json", content)
            corpus.tokenizer.save(run / "tokenizer.json")
            if first:  # a kill may have come between the checkpoint and what others read
                save_checkpoint(run, model, optimizer, first, log)
        size = sum(p.numel() for p in model.parameters())
        print(f"{corpus.source}\n{windows.count:,} windows of {T} tokens; {size:,} parameters, {precision}")
        print(f"{config.batch_size} windows a step, {micro} at a time{', blocks compiled' * compiles}")
        begins = f"resumed at step {first} of {config.steps}" if first else "a new training"
        print(f"{run}: {begins}", flush=True)

        with noted_signals() as received:
            for step in range(first, config.steps):
                began, at = time.monotonic(), (step * processes + rank) * local
                rows = windows.stack(at, at + local)
                if device.type == "cuda":
                    rows = rows.pin_memory()  # so that the copy does not wait for the step before
                R = int(np.random.default_rng((config.seed, step)).integers(low, high + 1))
                # A router that starts flat, and pays at once, never learns to think.
                price = config.step_price if step >= config.price_from * config.steps else 0.0
                parts, means = rows.to(device, non_blocking=True).split(micro), 0.0
                for part in parts:
                    is_last_part, weight = part is parts[-1], len(part) / local
                    # Processes share the sum over all parts.
                    with nullcontext() if is_last_part or processes == 1 else losses.no_sync():
                        loss, penalty, out = losses(part, R, price)
                        (loss * weight).backward()
                    numbers = {"loss": loss, "ce": out.loss, "penalty": penalty}
                    numbers["K_hat"] = stop_step(out.log_w, config.tau).float().mean()
                    numbers["relaxed"] = relaxed_steps(out.log_w).mean()
                    means += torch.stack([*numbers.values()]).detach() * weight
                norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
                for group in optimizer.param_groups:
                    group["lr"] = group["rate"] * learning_rate(step, config)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

                done, is_last = step + 1, step + 1 == config.steps
                if is_logged := is_last or done % config.log_every == 0:
                    logged = torch.cat([means, norm[None]]).cpu()  # waits for a GPU
                seconds += time.monotonic() - began
                if is_logged:
                    logged = (sum(gather(logged)) / processes).tolist()
                    row = dict(zip([*numbers, "grad_norm"], logged, strict=True))
                    check_finite(run, done, **row)
                    a_step = seconds / (done - first)
                    speed, left = config.batch_size * T / a_step, int(a_step * (config.steps - done))
                    print(
                        f"step {done}/{config.steps}  loss {row['loss']:.3f}  ce {row['ce']:.3f}  "
                        f"K-hat {row['K_hat']:.2f}  {speed:,.0f} tok/s  left {left // 60}:{left % 60:02d}",
                        flush=True,
                    )
                    log.append({"step": done, **row, "tokens_per_second": speed})
                if is_due := is_last or done % config.eval_every == 0:
                    count = min(CHECKPOINT_WINDOWS, val.count)
                    loss = evaluate(model, val, count, R=high)["loss"]
                    check_finite(run, done, validation=loss)
                    print(f"step {done}/{config.steps}  validation {loss:.3f}, {count} windows", flush=True)
                    log.append({"step": done, "val": loss})
                stop = any(gather(bool(received)))  # a signal to any of the processes
                if (is_due or stop) and not rank:
                    save_checkpoint(run, model, optimizer, done, log)
                if stop:
                    break
        stopped = f"stopped; go on with: {config.program.format('train')} {resume_flags(run)}"
        if any(gather(bool(received))):  # also one that came during the last save
            print(stopped, flush=True)
            return run, None

        try:
            report = final_report(model, val, config)
        except KeyboardInterrupt:
            print(f"\n{stopped}", flush=True)
            return run, None
        report["unigram_entropy"] = unigram_entropy(corpus.val, corpus.vocab_size)
        if not rank:
            write_json(run / "results.json", report)
    print(f"unigram entropy {report['unigram_entropy']:.3f}")
    print(f"next: {config.program.format('sample')} --run {shlex.quote(str(run))}", flush=True)
    return run, report


# -- What a step takes -----------------------------------------------------------------------------


def pick_precision(name, device):
    """'auto' -> bfloat16 where the hardware multiplies it, else float32."""
    if name != "auto":
        return name
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = device.type == "cpu" and getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
    return "bfloat16" if fast else "float32"


def describe_machine(device, precision):
    """Where a training runs, as its log records it: the same seed gives other losses elsewhere.

    Args:
        device: a torch.device.
        precision: of the training, "float32" or "bfloat16".

    Returns:
        A dict for JSON: the type and name of the device, how many CPU cores this process may use, threads,
        precision, versions of Python and torch, and the commit of this code (None outside of git).
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "device": device.type,
        "machine": name,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "precision": precision,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "commit": current_commit(),
    }


def cpu_name():
    """The CPU as Linux names it, with its family and model numbers: "AMD EPYC" alone is many CPUs."""
    found = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    if "model name" not in found:  # not every architecture has one
        return platform.machine()
    return f"{found['model name']} (family {found.get('cpu family')}, model {found.get('model')})"


def current_commit():
    """The commit that this file is of, followed by -dirty where a tracked file differs from it, or None."""
    ask = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(ask, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return said.stdout.strip()


def pick_tokenizer(preset, data, tokenizer):
    """'auto' -> the preset's, or None for a .bin folder, which has its own."""
    of_preset = {"tiny": "bytes", "small": "bpe"}.get(preset, "gpt2")
    automatic = None if is_prepared(data) else of_preset
    return automatic if tokenizer == "auto" else tokenizer


def pick_micro_batch(config, model, local, try_loss):
    """How many of the `local` windows of a step a process takes at once: what is asked for; else on a CPU
    all, on a GPU as many as fit, by the memory that one window and two take (try_loss: n -> a loss)."""
    asked = config.micro_batch_size or local
    if asked > local and config.resume:  # with more processes than before
        print(f"note: {local} windows at a time, not {asked}: a penalty, which is of these, differs a little")
    if config.micro_batch_size or local == 1 or not next(model.parameters()).is_cuda:
        return min(asked, local)
    peaks, most = [], 1
    with suppress(torch.OutOfMemoryError):  # if not even one fits, the first step says so
        for n in (1, 2):
            torch.cuda.reset_peak_memory_stats()
            try_loss(n).backward()
            peaks.append(torch.cuda.max_memory_allocated())
        room = 0.9 * (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
        room -= 8 * sum(p.numel() for p in model.parameters())  # AdamW's two numbers for each weight
        most = max(1, 1 + int((room - peaks[0]) / max(peaks[1] - peaks[0], 1)))
    model.zero_grad()
    parts = -(-local // min(gather(most)))
    return -(-local // parts)  # in parts of nearly the same size


def compile_blocks(model):
    """Compile the blocks for training: a form for each pass of the ladder. Evaluation, which has other
    shapes, stays plain."""
    torch._dynamo.config.recompile_limit = 64

    def both(plain, compiled, block):
        return lambda *inputs: (compiled if block.training else plain)(*inputs)

    for block in model.model.layers:
        block.forward = both(block.forward, torch.compile(block.forward, dynamic=False), block)


# -- Evaluation ------------------------------------------------------------------------------------


def windows_at_a_time(T, device):
    """How many windows of T tokens to evaluate at once: a CPU is twice as fast with few, a GPU idles."""
    return max(1, (16_384 if device.type == "cuda" else 1024) // T)


@torch.no_grad()
def evaluate(model, windows, count, R=None, tau=None, first=0):
    """Means over the tokens of `count` windows from the `first` on, in float32. R, tau: as in forward.

    -> dict: loss, in nats; steps, the mean of K-hat at tau (TAU without one); and lists over the depths
    k = 0 .. K: `stopped`, the share of tokens whose K-hat is k, and `weight`, the mean of s_k.
    """
    was_training, backend, device = model.training, model.backend, next(model.parameters()).device
    model.eval()
    model.backend = auto  # fa2 has no float32
    S, end = model.config.ponder_steps + 1, first + count
    size, (rank, processes) = windows_at_a_time(windows.block_size, device), rank_and_size()
    sums = torch.zeros(1 + 2 * S, dtype=torch.float64)  # of the loss, of tokens that stop at k, and of s_k
    for i in range(first + rank * size, end, processes * size):
        rows = windows.stack(i, min(i + size, end)).to(device)
        out = model(rows[:, :-1], rows[:, 1:], R=R, tau=tau)
        steps = stop_step(out.log_w, TAU) if tau is None else out.steps
        stopped = nn.functional.one_hot(steps, S).sum((0, 1))
        sums += torch.cat([out.ce.sum()[None], stopped, out.s.sum((0, 1))]).cpu()
    model.train(was_training)
    model.backend = backend
    means = sum(gather(sums)) / (count * windows.block_size)
    loss, stopped, weight = (part.tolist() for part in means.split([1, S, S]))
    steps = sum(k * share for k, share in enumerate(stopped))
    return {"loss": loss[0], "steps": steps, "stopped": stopped, "weight": weight}


def final_report(model, windows, config):
    """The losses that count, printed as they come -> what results.json holds of them."""
    R, count = max(model.config.refinements), min(config.eval_windows, windows.count)
    ways = {"trained": {"R": R}, "fixed": {}, "hard": {"tau": config.tau}}
    titles = f"as trained, R = {R}", "at the fixed point", f"hard-stopped at tau = {config.tau:g}"
    results = {"R": R, "windows": count}
    print(f"validation loss in nats per token, {count} windows of {windows.block_size} tokens")
    for (name, how), title in zip(ways.items(), titles, strict=True):
        print(f"  {title:30}", end="", flush=True)  # before it is computed, which takes a while
        results[name] = evaluate(model, windows, count, **how)
        print(f"{results[name]['loss']:8.4f}", flush=True)
    hard = results["hard"]
    print(f"executed steps per token: {hard['steps']:.2f} of {model.config.ponder_steps}")
    print(f"  {'depth':30}" + "".join(f"{k:8d}" for k in range(len(hard["weight"]))))
    print(f"  {'mean of s':30}" + "".join(f"{x:8.3f}" for x in hard["weight"]))
    print(f"  {'tokens that stop there':30}" + "".join(f"{x:8.3f}" for x in hard["stopped"]))
    return results


# -- A run and its files ---------------------------------------------------------------------------


def check_free(run):
    """Refuse a folder that has anything but a training that ended before its first checkpoint."""
    names = {file.name.removesuffix(".tmp") for file in run.glob("*")} - {".lock"}
    if names not in (set(), {"train.json"}, {"train.json", "tokenizer.json"}):
        raise UserError(f"{run} exists: go on with --resume, or choose another --name")


@contextmanager
def locked(run, rank):
    """Keep a run for the first of these processes. The lock ends with the process, however that ends."""
    run.mkdir(parents=True, exist_ok=True)
    try:
        with nullcontext() if rank else filelock.FileLock(run / ".lock", blocking=False):
            yield
    except filelock.Timeout:
        raise UserError(f"another process is training {run}; stop that one first") from None


def save_checkpoint(run, model, optimizer, step, log):
    """Replace the checkpoint, then what others read: a kill between the two loses nothing.
    UserError: the disk is full, or the weights are not finite; what was saved before is there."""
    norm = torch.stack([p.detach().norm() for p in model.parameters()]).norm()
    check_finite(run, step, weights=norm.item())
    # No random state: batches and R are functions of the step.
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "log": log}
    write_whole(run / "trainer.pt", lambda part: torch.save(kept, part))
    try:
        save(model, run)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {run}: {one_line(error)}") from None
    lines = "".join(json.dumps(row) + "\n" for row in log)
    write_whole(run / "log.jsonl", lambda part: part.write_text(lines))


def load_checkpoint(run, model, optimizer):
    """Restore what `save_checkpoint` kept -> steps done, the log.
    UserError: trainer.pt is damaged, of another model, or has code in it, which is not run."""
    file = run / "trainer.pt"
    if not file.exists():  # the training ended before its first checkpoint
        return 0, []
    with reading(file, f"; its weights are in {run}/model.safetensors; train anew under another --name"):
        kept = torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(kept["model"])
        # The groups are this training's: a resumed one may run elsewhere.
        optimizer.load_state_dict(optimizer.state_dict() | {"state": kept["optimizer"]["state"]})
        return kept["step"], kept["log"]


def check_finite(run, step, **values):
    if not all(math.isfinite(value) for value in values.values()):
        found = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        way_out = f"the last checkpoint, if there is one, goes on by {resume_flags(run)}"
        raise UserError(f"step {step} is not finite ({found}): lower --learning-rate; {way_out}")


def resume_flags(run):
    out = [] if str(run.parent) == "out" else ["--out", str(run.parent)]
    return shlex.join(["--resume", *out, "--name", run.name])


@contextmanager
def noted_signals():
    """Ctrl-C, a kill or a closed terminal within it go into the list that it gives; a second one ends the
    process."""
    received = []

    def receive(number, frame):
        signal.signal(number, signal.SIG_DFL)
        received.append(number)
        if number == signal.SIGHUP:  # the terminal is gone, and who writes to it fails
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.write(2, b"\nstopping; once more to exit at once\n")

    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # as nohup has it
    usual = {number: signal.signal(number, receive) for number in heard}
    try:
        yield received
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


# -- Several processes -----------------------------------------------------------------------------


def join_processes(name):
    """Meet the processes that torchrun started -> rank, how many there are, this one's device.

    Without torchrun 0, 1 and the device. Of several processes only the first prints.
    """
    if "RANK" in os.environ and name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    device = pick_device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        # DistributedDataParallel imports it: after the group, it keeps the group's threads alive until the
        # exit, where they may abort.
        from torch import _dynamo  # noqa: F401

        patience = timedelta(days=1)  # the others wait while the first prepares a corpus
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
    rank, processes = rank_and_size()
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return rank, processes, device


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(value):
    """A value of each process, as a list."""
    values = [value] * rank_and_size()[1]
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def main(parse=parse, train=train):
    _, results = train(*parse())
    if dist.is_initialized():
        dist.destroy_process_group()
    if results is None:  # stopped: what a script has behind it has to wait
        sys.exit(130)


if __name__ == "__main__":
    command_line(main)
