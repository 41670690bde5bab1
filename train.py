"""Train a PonderLM-3: next-token cross-entropy plus the bottom-mass penalty (section 3.4.2).

    python train.py                                  'tiny' on a CPU, 'small' on a GPU
    python train.py --preset tiny --method vanilla   the same transformer without pondering
    python train.py --data my_texts/ --steps 2000
    python train.py --init-from DIR_OR_NAME          go on with a Llama, and teach it to ponder
    python train.py --resume                         go on with the newest run, exactly
    torchrun --nproc_per_node=2 train.py --micro-batch-size 4     by 2 processes

Every flag and its default: python train.py --help
"""

import argparse
import hashlib
import math
import os
import shlex
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.nn.parallel import DistributedDataParallel

from attention import BACKENDS, pick_backend
from checkpoint import (
    Stopped,
    StopSignal,
    begin_log,
    best_checkpoint,
    check_finite,
    publish,
    read_trainer,
    save_checkpoint,
    unreadable,
)
from config import PonderConfig
from data import (
    Windows,
    describe,
    is_prepared,
    load_tokens,
    prepare,
    unigram_entropy,
)
from device import (
    any_process,
    autocast,
    command_line,
    commit,
    first_process_first,
    from_first,
    join_processes,
    pick_device,
    pick_precision,
    rank_and_size,
    reduce,
)
from methods import SETTINGS, build, load
from run import (
    append_line,
    changes,
    checkpoints,
    draw_losses,
    locked,
    open_run,
    read_lines,
    read_settings,
    resume_command,
    step_of,
    write_json,
)
from start import adapt, offset_at, start_defaults, start_from, tokenizer_beside
from tokenizer import DataError
from validation import evaluate, final_report
from weights import later, locate


@dataclass
class TrainConfig:
    preset: Literal["auto", "tiny", "small", "70m", "410m"] = "auto"  # auto: small on a GPU
    name: str | None = None  # of the run, in --out; by default preset and time
    out: str = "out"  # where runs are kept
    resume: bool = False  # go on with the run --name, or the newest, with its settings
    # Begin from a model: a directory (Hugging Face Llama, PonderLM-2, a run) or a name of the Hub.
    # Its shape, tokenizer and window (as far as the preset's goes) become the defaults.
    init_from: str | None = later(None)
    data: str = "pydocs"  # or pysource, shakespeare, hops, a file, a folder of texts or .bin
    # bytes, bpe, gpt2 or a model that has one. auto: that of --init-from, of a .bin folder or hops;
    # else bytes with tiny, bpe with small, gpt2
    tokenizer: str = "auto"
    model: Annotated[PonderConfig, tyro.conf.arg(name="")] = field(default_factory=PonderConfig)

    steps: int = 1000  # optimizer steps
    batch_size: int = 8  # windows a step
    micro_batch_size: int | None = None  # windows at a time, to save memory; None: the whole batch
    learning_rate: float = 4e-3  # peak; cosine down to a tenth of it
    warmup: float = 0.05  # share of the steps in which the learning rate rises
    # steps that lead the router from hardly any pondering to where it starts (start.py); with
    # --init-from and a model that does not ponder 3 in 10, else 0
    ponder_warmup: int = later(0)
    weight_decay: float = 0.1  # on matrices only
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    clip: float = 1.0  # gradient norm; 0: off
    seed: int = 0

    log_every: int = 20  # steps between log lines
    eval_every: int = 250  # steps between checkpoints, each of which is evaluated
    eval_windows: int = 512  # validation windows of the final evaluation
    tau: float = 1e-4  # where executed steps are counted and hard stopping is scored

    device: str = "auto"  # auto, cpu, cuda, mps
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where it is fast
    backend: Literal[BACKENDS] = "auto"  # attention
    compile: bool = False  # compile the blocks: faster steps, after a minute
    recompute: bool = False  # compute each pass again in the backward pass, to save memory


# What a resumed training may change: anything else would make it another training. The corpus may
# have moved, but must be the same.
MAY_CHANGE = {"steps", "learning_rate", "clip", "log_every", "eval_every", "eval_windows", "tau"}
MAY_CHANGE |= {"data", "device", "precision", "backend", "compile", "recompute"}


PRESETS = {
    # A 2-core CPU, minutes.
    "tiny": TrainConfig(
        preset="tiny",
        model=PonderConfig(257, 96, 256, 3, 2, head_dim=24, block_size=64, iters=(1, 1)),
    ),
    # One GPU, minutes. d = 56 leaves room for the bias channel in a kernel of width 64.
    "small": TrainConfig(
        preset="small",
        model=PonderConfig(4096, 384, 1032, 6, 6, head_dim=56, block_size=256),
        steps=2000,
        batch_size=64,
        micro_batch_size=16,
        learning_rate=1e-3,
        eval_every=500,
    ),
    # The paper's two sizes, with the recipe of the released PonderLM-2 and Pythia scripts.
    "70m": TrainConfig(
        preset="70m",
        model=PonderConfig(50_304, 512, 1376, 6, 8, block_size=2048),
        steps=28_610,  # 15 B tokens
        batch_size=256,
        micro_batch_size=4,
        learning_rate=1e-3,
        warmup=0.01,
        weight_decay=0.01,
        eval_every=1000,
    ),
    "410m": TrainConfig(
        preset="410m",
        model=PonderConfig(50_304, 1024, 2752, 24, 16, block_size=2048),
        steps=19_073,  # 10 B tokens
        batch_size=256,
        micro_batch_size=1,
        learning_rate=3e-4,
        warmup=0.02,
        eval_every=1000,
    ),
}


def parse(argv=None):
    """The command line: --preset chooses the defaults that --help shows and other flags change."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="auto")
    first.add_argument("--method")
    first.add_argument("--init-from", "--init_from")
    first.add_argument("--steps", type=int)
    first.add_argument("--device", default="auto")
    first.add_argument("--out", default="out")
    first.add_argument("--name")
    first.add_argument("--resume", action="store_true")
    known = first.parse_known_args(argv)[0]
    if known.resume:
        run, config, _ = read_settings(TrainConfig, known.out, known.name)
        defaults = replace(config, out=known.out, name=run.name, resume=True)
    else:
        preset = known.preset
        if preset not in PRESETS:  # 'auto', or a wrong one, which tyro refuses below
            preset = "small" if pick_device(known.device).type == "cuda" else "tiny"
        defaults = PRESETS[preset]
        if known.init_from:
            defaults = start_defaults(defaults, known.init_from, known.method, known.steps)
        else:
            method = known.method or "ponderlm3"
            model = replace(defaults.model, method=method, **SETTINGS.get(method, {}))
            defaults = replace(defaults, model=model)
    config = tyro.cli(TrainConfig, description=__doc__, default=defaults, args=argv)
    if config.model.label != "ponderlm3" and config.ponder_warmup == defaults.ponder_warmup:
        config = replace(config, ponder_warmup=0)  # K = 0: nothing to warm up
    return replace(config, preset=defaults.preset) if config.preset == "auto" else config


def learning_rate(step, config):
    """Linear warm-up, then a cosine from the peak to a tenth of it."""
    warmup = max(1, round(config.warmup * config.steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def make_optimizer(model, config, device):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    if config.ponder_warmup:  # the router waits: the last group, with a learning rate of its own
        router = model.router.proj.weight
        groups[0]["params"] = [p for p in matrices if p is not router]
        groups.append({"params": [router], "weight_decay": config.weight_decay})
    fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}"


def check(config, processes=1):
    """Refuse settings that would fail hours later, or train nothing."""
    for name in ("steps", "batch_size", "log_every", "eval_every", "eval_windows"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: it must be at least 1")
    bounds = dict(
        seed=(0, 2**63), tau=(0, 1), warmup=(0, 1), weight_decay=(0, 1), clip=(0, math.inf)
    )
    for name, (low, high) in (bounds | {"learning_rate": (0, 1e30)}).items():
        if not low <= getattr(config, name) <= high:
            raise ValueError(f"{name} = {getattr(config, name)}: it must be in {low} .. {high:g}")
    if 0 < config.steps <= config.ponder_warmup:
        raise ValueError(
            f"ponder_warmup = {config.ponder_warmup}: it has to end before the training, of "
            f"{config.steps} steps"
        )
    if config.ponder_warmup < 0 or (config.ponder_warmup and config.model.label != "ponderlm3"):
        raise ValueError(
            f"ponder_warmup = {config.ponder_warmup}: 0 or more steps, and only for ponderlm3, "
            f"not {config.model.label}"
        )
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ValueError(f"betas = {config.betas}: they must be in 0 .. 1, without 1")
    compilers = (shlex.split(os.environ.get("CXX") or "g++")[0], "clang++", "cl")
    if config.compile and not any(map(shutil.which, compilers)):
        raise ValueError("--compile needs a C++ compiler, and found none; install g++ or leave it")
    batch, micro = config.batch_size, config.micro_batch_size
    if micro is not None and (micro < 1 or batch % micro):
        raise ValueError(f"micro_batch_size {micro} does not divide batch_size {batch}")
    if batch % ((micro or batch) * processes):
        fits = [m for m in range(1, batch + 1) if batch % (m * processes) == 0]
        way_out = f"--micro-batch-size {fits[-1]} would do" if fits else "change --batch-size"
        if config.resume:
            way_out = "go on with fewer processes: the penalty depends on the micro-batch"
        raise ValueError(
            f"{processes} processes cannot share {batch} windows a step in micro-batches of "
            f"{micro or batch}; {way_out}"
        )


def read_run(path):
    """A run's directory, TrainConfig and corpus; of a checkpoint, those of its run.

    Raises:
        FileNotFoundError, ValueError: it is no run, or its train.json is damaged.
    """
    place = Path(path).resolve()
    run = next((p for p in (place, place.parent) if (p / "train.json").is_file()), None)
    if run is None:
        raise FileNotFoundError(f"{path} is no run: no train.json says how it was trained")
    return read_settings(TrainConfig, run.parent, run.name)


def describe_corpus(folder, train, val):
    """Name, size and hash of a corpus. Its ends stand for the whole, which may be of gigabytes."""
    ends = np.concatenate([train[: 10**6], train[-(10**6) :]])
    corpus = {"name": folder.name, "train_tokens": len(train), "val_tokens": len(val)}
    return corpus | {"sha256": hashlib.sha256(ends.tobytes()).hexdigest()}


def open_corpus(config):
    """The corpus of a config -> folder, tokenizer, train and validation tokens."""
    name, V = config.tokenizer, config.model.vocab_size
    if name == "auto" and config.init_from:
        if config.resume:  # the first model may be gone
            place, _, _ = read_settings(TrainConfig, config.out, config.name)
        else:
            place = locate(config.init_from)
        name = tokenizer_beside(place, config.data)
    elif name == "auto":
        of_preset = {"tiny": "bytes", "small": "bpe"}.get(config.preset, "gpt2")
        name = None if is_prepared(config.data) or config.data == "hops" else of_preset
    if config.init_from and name == "bpe":
        raise DataError(
            f"--tokenizer bpe would be a new one, which {config.init_from} does not know; leave it "
            "out to take the model's own"
        )
    folder, tokenizer = prepare(config.data, name, V)
    if config.init_from and tokenizer.vocab_size > V and not tokenizer.padded:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, {config.init_from} only {V}; leave "
            "out --tokenizer to take the model's own"
        )
    V = min(tokenizer.vocab_size, V) if config.init_from else tokenizer.vocab_size
    tokens = [load_tokens(folder, split, V, config.model.block_size) for split in ("train", "val")]
    return folder, tokenizer, *tokens


def optimize(model, optimizer, x, y, R, config, precision):
    """One optimizer step on this process's share x, y (batch, T). Returns what is logged of it.

    `model` is one of methods.py, or one in DistributedDataParallel, which averages the gradients
    over the processes in the backward pass of the last micro-batch.
    """
    executed = getattr(model, "module", model).executed
    micro = config.micro_batch_size or config.batch_size
    share, logged = micro / len(x), dict(loss=0.0, ce=0.0, penalty=0.0, steps=0.0)
    for i, (xs, ys) in enumerate(zip(x.split(micro), y.split(micro), strict=True), start=1):
        wait = dist.is_initialized() and i * micro < len(x)
        with model.no_sync() if wait else nullcontext():
            with precision:
                out = model(xs, ys, iters=R)
            (share * out.loss).backward()
        steps = executed(out.log_w, config.tau).float().mean()
        parts = dict(loss=out.loss, ce=out.ce, penalty=out.penalty, steps=steps)
        for name, value in parts.items():
            logged[name] += 0.0 if value is None else share * value.detach()
    logged["grad_norm"] = torch.nn.utils.clip_grad_norm_(
        model.parameters(), config.clip or math.inf
    )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return logged


def open_model(config, vocab_size, checkpoint, device):
    """The model and its optimizer, new or as in a checkpoint, the steps done and their seconds."""
    shape = replace(config.model, vocab_size=vocab_size)
    torch.manual_seed(config.seed)
    if checkpoint:
        try:
            model = load(checkpoint)
            if config.ponder_warmup:
                shape = replace(shape, router_offset=offset_at(step_of(checkpoint), config))
            if model.config != shape:
                raise ValueError(f"{checkpoint}/config.json: {changes(shape, model.config)}")
        except (ValueError, OSError) as error:
            raise unreadable(checkpoint, error) from None
    else:
        model = start_from(locate(config.init_from), shape) if config.init_from else build(shape)
    model.to(device).train()
    model.recompute = config.recompute
    if config.compile:
        for block in model.model.layers:  # each pass has another length, hence dynamic
            block.compile(dynamic=True)
    optimizer = make_optimizer(model, config, device)
    start, seconds = read_trainer(checkpoint, optimizer) if checkpoint else (0, 0.0)
    if start > config.steps:
        raise ValueError(f"{checkpoint} is beyond step {config.steps}; go on with a larger --steps")
    if checkpoint and not rank_and_size()[0]:
        publish(checkpoint)
    return model, optimizer, start, seconds


def loop(config, run, model, optimizer, windows, val, start, seconds, stop):
    """Steps `start` to the last -> seconds of training, with those of the earlier steps.

    All of a step is a function of its number, the weights and the optimizer, so that a resumed
    training is the same one.
    """
    rank, processes = rank_and_size()
    device = model.lm_head.weight.device
    precision = autocast(device, getattr(torch, config.precision))
    net = DistributedDataParallel(model) if dist.is_initialized() else model
    (low, high), now = model.config.iters, 0.0  # seconds of training since `start`
    evaluated = from_first({row["step"] for row in read_lines(run / "log.jsonl") if "val" in row})
    for done in range(start, config.steps + 1):
        if config.ponder_warmup:
            model.set_offset(offset_at(done, config))
        due = done == config.steps or (done > 0 and done % config.eval_every == 0)
        stopped = any_process(stop.received)
        if (due or stopped) and done > start and not rank:
            save_checkpoint(run, model, optimizer, done, seconds + now)
        if stopped:
            raise Stopped
        stop.at_once(due)
        if due and done not in evaluated:
            loss = evaluate(model, val, min(64, val.count), device, iters=high)["loss"]
            print(f"step {done}/{config.steps}  validation {loss:.3f}", flush=True)
            check_finite(run, done, validation=loss)
            if not rank:
                append_line(run / "log.jsonl", {"step": done, "val": loss})
        if done == config.steps:
            return seconds + now
        stop.at_once(False)
        began, step = time.time(), done + 1
        rate = learning_rate(done, config)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if done < config.ponder_warmup:
            optimizer.param_groups[-1]["lr"] = 0.0
        # Drawn as a function of (seed, step), R is the same in all processes and after a resume.
        R = int(np.random.default_rng((config.seed, done)).integers(low, high + 1))
        x, y = windows.batch(done, config.batch_size // processes, rank, processes)  # (batch, T)
        logged = optimize(net, optimizer, x.to(device), y.to(device), R, config, precision)
        check_finite(run, step, **logged)
        now += time.time() - began
        if step % config.log_every == 0 or step == config.steps:
            values = torch.tensor([float(v) for v in logged.values()])
            row = dict(zip(logged, (reduce(values, device) / processes).tolist(), strict=True))
            row["tokens_per_second"] = (step - start) * x.numel() * processes / now
            print(
                f"step {step}/{config.steps}  loss {row['loss']:.3f}  ce {row['ce']:.3f}  "
                f"penalty {row['penalty']:.4f}  steps {row['steps']:.2f}  "
                f"{row['tokens_per_second']:,.0f} tok/s  "
                f"left {clock(now / (step - start) * (config.steps - step))}",
                flush=True,
            )
            if not rank:
                append_line(run / "log.jsonl", {"step": step, **row})


def train(config):
    """Train as `config` says.

    Returns:
        The run's directory and the final evaluation, or None if the training was stopped before.
    """
    rank, processes, device = join_processes(pick_device(config.device))
    check(config, processes)
    dtype = from_first(pick_precision(config.precision, device))  # it may have been measured
    config = replace(config, precision=str(dtype)[6:])
    backend = pick_backend(config.backend, device, dtype)
    with first_process_first():
        folder, tokenizer, train_tokens, val_tokens = open_corpus(config)
    V, T = tokenizer.vocab_size, config.model.block_size
    # Large tables are padded, for the GPU's matrix products; a trained one is as it is.
    V = config.model.vocab_size if config.init_from else V if V < 1024 else -(-V // 64) * 64
    windows, val = Windows(train_tokens, T, config.seed), Windows(val_tokens, T, seed=0)
    entropy = unigram_entropy(val_tokens, V)
    config = from_first(adapt(config, Windows(train_tokens, T, seed=0)))  # the same for all seeds

    corpus = describe_corpus(folder, train_tokens, val_tokens)  # the same after a resume?
    run, latest, changed = from_first(None if rank else open_run(config, corpus, MAY_CHANGE))
    with nullcontext() if rank else locked(run):
        model, optimizer, start, seconds = open_model(config, V, latest, device)
        model.backend = backend
        machine = {"torch": torch.__version__, "device": device.type, "processes": processes}
        machine["commit"] = commit()
        if not rank:
            tokenizer.save(run / "tokenizer.json")
            write_json(run / "train.json", {"config": asdict(config), "corpus": corpus})
            begin_log(run, start, changed, machine)
        size = sum(p.numel() for p in model.parameters())
        print(f"{run}: {size:,} parameters, {config.precision}, {backend}, {machine}")
        print(describe(folder))
        print(f"{len(train_tokens):,} tokens, {windows.count:,} windows of {T}; ", end="")
        print(f"unigram entropy of validation {entropy:.3f} nats", flush=True)
        if config.model.feedback_scale:
            print(f"states are fed back times {config.model.feedback_scale:g}")
        if config.resume:
            print(f"resumed at step {start}, changed: {changed or 'nothing'}", flush=True)
        try:
            with StopSignal() as stop:
                seconds = loop(config, run, model, optimizer, windows, val, start, seconds, stop)
                print(f"trained in {clock(seconds)} minutes; evaluating", flush=True)
                results = final_report(model, val, config, device)
                if not rank:
                    write_json(run / "results.json", {**results, "unigram_entropy": entropy})
                    draw_losses(run)
        except Stopped:
            print(f"stopped; go on with: {resume_command(run)}")
            return run, None
    print(f"unigram entropy {entropy:.3f}")
    best = best_checkpoint(run)
    if best != checkpoints(run)[-1]:
        print(f"an earlier checkpoint had a better validation loss: {best}")
    print(f"next: python sample.py --run {shlex.quote(str(run))} --tau {config.tau:g} --show-steps")
    return run, results


def main():
    train(parse())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    command_line(main)
