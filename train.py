"""Train a PonderLM-3: next-token cross-entropy plus the bottom-mass penalty (section 3.4.2).

    python train.py                                  'tiny' on a CPU, 'small' on a GPU
    python train.py --preset tiny --ponder-steps 0   the same transformer without pondering
    python train.py --data my_texts/ --steps 2000
    python train.py --resume                         go on with the newest run, exactly
    torchrun --nproc_per_node=4 train.py             the same training by 4 processes

Every flag and its default: python train.py --help
"""

import argparse
import math
import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
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
    append_line,
    best_checkpoint,
    checkpoints,
    draw_losses,
    find_training,
    new_run,
    publish,
    read_lines,
    read_trainer,
    resume_command,
    save_checkpoint,
    trim_log,
    write_json,
)
from data import Windows, describe, is_prepared, load_tokens, prepare, unigram_entropy
from device import (
    any_process,
    autocast,
    command_line,
    from_first,
    join_processes,
    pick_device,
    pick_precision,
    rank_and_size,
    reduce,
)
from model import PonderConfig, PonderLM
from router import stop_step


@dataclass
class TrainConfig:
    preset: Literal["auto", "tiny", "small", "70m", "410m"] = "auto"  # auto: small on a GPU
    name: str | None = None  # of the run, in --out; by default preset and time
    out: str = "out"  # where runs are kept
    resume: bool = False  # go on with the run --name, or the newest, with its settings
    data: str = "pydocs"  # pydocs, pysource, shakespeare, a file, or a folder of texts or .bin
    # auto: a .bin folder's own; for text, bytes with tiny, bpe with small, gpt2 with 70m and 410m
    tokenizer: Literal["auto", "bytes", "bpe", "gpt2"] = "auto"
    model: Annotated[PonderConfig, tyro.conf.arg(name="")] = field(default_factory=PonderConfig)

    steps: int = 1000  # optimizer steps
    batch_size: int = 8  # windows a step
    micro_batch_size: int | None = None  # windows at a time, to save memory; None: the whole batch
    learning_rate: float = 4e-3  # peak; cosine down to a tenth of it
    warmup: float = 0.05  # share of the steps in which the learning rate rises
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
    first.add_argument("--device", default="auto")
    first.add_argument("--out", default="out")
    first.add_argument("--name")
    first.add_argument("--resume", action="store_true")
    known = first.parse_known_args(argv)[0]
    if known.resume:
        run, config = resumed_settings(known.out, known.name)[:2]
        defaults = replace(config, out=known.out, name=run.name, resume=True)
    else:
        preset = known.preset
        if preset not in PRESETS:  # 'auto', or a wrong one, which tyro refuses below
            preset = "small" if pick_device(known.device).type == "cuda" else "tiny"
        defaults = PRESETS[preset]
    config = tyro.cli(TrainConfig, description=__doc__, default=defaults, args=argv)
    return replace(config, preset=defaults.preset) if config.preset == "auto" else config


def resumed_settings(out, name):
    """The run to go on with -> its directory, TrainConfig and corpus."""
    run, saved, corpus = find_training(out, name)
    try:
        config = from_json(TrainConfig, {**saved, "model": from_json(PonderConfig, saved["model"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{run}/train.json is not of this version: {error}") from None
    return run, config, corpus


def from_json(kind, settings):
    """A dataclass from what JSON kept of it, which has no tuples."""
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})


def changes(before, now):
    """The settings that differ: {name: (before, now)}."""
    found = {}
    for name in asdict(before).keys() - {"name", "out", "resume"}:  # these tell where the run is
        a, b = getattr(before, name), getattr(now, name)
        found |= changes(a, b) if name == "model" else {name: (a, b)} if a != b else {}
    return dict(sorted(found.items()))


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
    fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


class PermutedRouter(torch.nn.Module):
    """The step distributions of a batch, handed out to other tokens of the batch."""

    def __init__(self, s, log_w):
        super().__init__()
        order = torch.randperm(s[..., 0].numel(), generator=torch.Generator().manual_seed(0))
        order = order.to(s.device)
        self.s, self.log_w = (x.flatten(0, 1)[order].view_as(x) for x in (s, log_w))

    def forward(self, h0, alpha=0.0):
        return self.s, self.log_w


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # compiling for these shapes would take longer
def evaluate(
    model,
    windows,
    count,
    device,
    iters=None,
    tau=None,
    tau_steps=1e-4,
    permute=False,
    batch_size=32,
):
    """Mean losses over the first `count` windows, in float32.

    iters and tau as in PonderLM.jacobi; iters None is the fixed point, which decoding computes.
    permute gives each token another one's s and w: as many steps, but not where the router wants.

    Returns:
        dict: loss; steps, the mean executed at `tau_steps`; and per depth 0..K `truncated` (the
        loss of the integration truncated after step i and renormalised), `alone` (of h^(i)
        alone), `stopped` (share of the tokens that stop there).
    """
    was_training, backend = model.training, model.backend
    model.eval()
    model.backend = "auto"  # one that can do float32
    S, total = model.config.ponder_steps + 1, 0
    sums = torch.zeros(1 + 3 * S, dtype=torch.float64)
    rank, processes = rank_and_size()
    for first in range(rank * batch_size, count, processes * batch_size):
        rows = [windows.window(i) for i in range(first, min(first + batch_size, count))]
        rows = torch.from_numpy(np.stack(rows)).to(device)
        x, y = rows[:, :-1], rows[:, 1:]
        h, s, log_w = model.jacobi(x, iters, tau)
        if permute:
            router, model.router = model.router, PermutedRouter(s, log_w)
            h, s, log_w = model.jacobi(x, iters, tau)
            model.router = router
        steps = stop_step(log_w, tau_steps)
        h_hat = model.integrate(h, s, steps if tau else None)
        losses = [model.token_losses(h_hat, y).sum()]
        for i in range(S):
            partial = (s[..., : i + 1, None] * h[:, :, : i + 1]).sum(2)
            partial = partial / s[..., : i + 1].sum(-1, keepdim=True).clamp(
                min=torch.finfo(s.dtype).tiny
            )
            losses.append(model.token_losses(partial.to(h.dtype), y).sum())
        losses += [model.token_losses(h[:, :, i], y).sum() for i in range(S)]
        losses += [(steps == i).sum() for i in range(S)]
        sums += torch.stack([loss.cpu().double() for loss in losses])
        total += y.numel()
    model.train(was_training)
    model.backend = backend
    sums, total = reduce(sums.to(device)), reduce(torch.tensor(total, device=device))
    loss, *per_depth = (sums / total).tolist()
    truncated, alone, stopped = per_depth[:S], per_depth[S : 2 * S], per_depth[2 * S :]
    steps = sum(i * share for i, share in enumerate(stopped))
    return dict(loss=loss, steps=steps, truncated=truncated, alone=alone, stopped=stopped)


def final_report(model, windows, config, device):
    """The losses that count, printed and returned: as trained, at the fixed point, hard-stopped."""
    R = max(config.model.iters)
    count = min(config.eval_windows, windows.count)

    def measure(**kwargs):
        return evaluate(model, windows, count, device, tau_steps=config.tau, **kwargs)

    trained, fixed = measure(iters=R), measure()
    hard = permuted = fixed
    if model.masks:  # otherwise nothing is masked and all tokens take as many steps
        hard, permuted = measure(tau=config.tau), measure(tau=config.tau, permute=True)
    print(f"\nvalidation loss in nats per token, {count} windows of {windows.block_size} tokens")
    print(f"  as trained, {R} refinements      {trained['loss']:.4f}")
    print(f"  at the fixed point            {fixed['loss']:.4f}")
    if model.masks:
        print(f"  hard-stopped at tau = {config.tau:<7g} {hard['loss']:.4f}")
        print(f"  the same, s permuted          {permuted['loss']:.4f}  (as many steps elsewhere)")
    print(f"executed steps per token: {hard['steps']:.2f} of {model.config.ponder_steps}")
    print("depth i                      " + "".join(f"{i:8d}" for i in range(len(hard["alone"]))))
    rows = {"loss, integrated up to i": fixed["truncated"]} if model.masks else {}
    rows |= {"loss of h^(i) alone": fixed["alone"], "tokens that stop here": hard["stopped"]}
    for title, row in rows.items():
        print(f"  {title:27}" + "".join(f"{x:8.3f}" for x in row))
    return dict(trained=trained, fixed=fixed, hard=hard, permuted=permuted, iters=R)


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}"


def check(config, processes=1):
    """Refuse settings that would fail hours later, or train nothing."""
    for name in ("steps", "batch_size", "log_every", "eval_every", "eval_windows"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: it must be at least 1")
    if config.seed < 0 or not 0 <= config.tau <= 1:
        raise ValueError(f"seed = {config.seed}, tau = {config.tau}: seed >= 0 and 0 <= tau <= 1")
    compilers = (os.environ.get("CXX", "g++"), "clang++", "cl")
    if config.compile and not any(map(shutil.which, compilers)):
        raise ValueError("--compile needs a C++ compiler, and found none; install g++ or leave it")
    batch, micro = config.batch_size, config.micro_batch_size
    if micro is not None and (micro < 1 or batch % micro):
        raise ValueError(f"micro_batch_size {micro} does not divide batch_size {batch}")
    if batch % ((micro or batch) * processes):
        fits = [m for m in range(1, batch + 1) if batch % (m * processes) == 0]
        raise ValueError(
            f"{processes} processes cannot share {batch} windows a step in micro-batches of "
            f"{micro or batch}; "
            + (f"--micro-batch-size {fits[-1]} would do" if fits else "change --batch-size")
        )


def open_corpus(config):
    """The corpus of a config -> folder, tokenizer, train and validation tokens."""
    name, V = config.tokenizer, config.model.vocab_size
    if name == "auto":
        of_preset = {"tiny": "bytes", "small": "bpe"}.get(config.preset, "gpt2")
        name = None if is_prepared(config.data) else of_preset
    folder, tokenizer = prepare(config.data, name, V)
    tokens = [
        load_tokens(folder, split, tokenizer.vocab_size, config.model.block_size)
        for split in ("train", "val")
    ]
    return folder, tokenizer, *tokens


def open_run(config, corpus):
    """The run's directory, the checkpoint to go on from (or None), and what changed since."""
    if not config.resume:
        run = new_run(config.out, config.name, config.preset)
        write_json(run / "train.json", {"config": asdict(config), "corpus": corpus})
        return run, None, {}
    run, before, corpus_before = resumed_settings(config.out, config.name)
    changed = changes(before, config)
    if corpus != corpus_before:
        changed["corpus"] = corpus_before, corpus
    refused = [
        f"{name}: {old} -> {new}" for name, (old, new) in changed.items() if name not in MAY_CHANGE
    ]
    if refused:
        raise ValueError(
            f"{run} was trained with other settings; leave them as they were, or train anew "
            f"without --resume. Changed: {'; '.join(refused)}"
        )
    return run, next(iter(checkpoints(run)[::-1]), None), changed


def optimize(model, optimizer, x, y, R, config, precision):
    """One optimizer step on this process's share x, y (batch, T). Returns what is logged of it.

    `model` is a PonderLM, or one in DistributedDataParallel, which averages the gradients over the
    processes in the backward pass of the last micro-batch.
    """
    micro = config.micro_batch_size or config.batch_size
    share, logged = micro / len(x), dict(loss=0.0, ce=0.0, penalty=0.0, steps=0.0)
    for i, (xs, ys) in enumerate(zip(x.split(micro), y.split(micro), strict=True), start=1):
        wait = dist.is_initialized() and i * micro < len(x)
        with model.no_sync() if wait else nullcontext():
            with precision:
                out = model(xs, ys, iters=R)
            (share * out.loss).backward()
        steps = stop_step(out.log_w, config.tau).float().mean()
        parts = dict(loss=out.loss, ce=out.ce, penalty=out.penalty, steps=steps)
        for name, value in parts.items():
            logged[name] += 0.0 if value is None else share * value.detach()
    logged["grad_norm"] = torch.nn.utils.clip_grad_norm_(
        model.parameters(), config.clip or math.inf
    )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return logged


def train(config):
    """Train as `config` says.

    Returns:
        The run's directory and the final evaluation, or None if the training was stopped before.
    """
    rank, processes, device = join_processes(pick_device(config.device))
    check(config, processes)
    dtype = from_first(pick_precision(config.precision, device))  # it may have been measured
    backend = pick_backend(config.backend, device, dtype)
    if rank:
        from_first(None)  # waits until the first process has prepared the corpus
    folder, tokenizer, train_tokens, val_tokens = open_corpus(config)
    if not rank:
        from_first(None)
    V, T = tokenizer.vocab_size, config.model.block_size
    V = V if V < 1024 else -(-V // 64) * 64  # large tables padded, for the GPU's matrix products
    windows, val = Windows(train_tokens, T, config.seed), Windows(val_tokens, T, seed=0)
    entropy = unigram_entropy(val_tokens, V)

    config = replace(config, precision=str(dtype)[6:])
    corpus = {"name": folder.name, "train_tokens": len(train_tokens), "val_tokens": len(val_tokens)}
    run, latest, changed = from_first(open_run(config, corpus) if not rank else None)
    torch.manual_seed(config.seed)
    if latest is None:
        model = PonderLM(replace(config.model, vocab_size=V))
    else:
        model = PonderLM.from_pretrained(latest)
    model.to(device).train()
    model.backend, model.recompute = backend, config.recompute
    if config.compile:
        for block in model.model.layers:  # each pass has another length, hence dynamic
            block.compile(dynamic=True)
    optimizer = make_optimizer(model, config, device)
    start, seconds = read_trainer(latest, optimizer) if latest else (0, 0.0)
    if start > config.steps:
        raise ValueError(f"{run} has trained for {start} steps; go on with a larger --steps")
    machine = {"torch": torch.__version__, "device": device.type, "processes": processes}
    if not rank:
        tokenizer.save(run / "tokenizer.json")
        write_json(run / "train.json", {"config": asdict(config), "corpus": corpus})
        trim_log(run, start)
        append_line(run / "log.jsonl", {"step": start, "changed": changed, **machine})
        if latest:
            publish(latest)
    size = sum(p.numel() for p in model.parameters())
    print(
        f"{run}: {size:,} parameters, precision {config.precision}, attention {backend}, ", end=""
    )
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(
        f"{describe(folder)}\n{len(train_tokens):,} tokens, {windows.count:,} windows of {T}; ",
        end="",
    )
    print(f"unigram entropy of validation {entropy:.3f} nats")
    if latest:
        old = "".join(f"; {name}: {a} -> {b}" for name, (a, b) in changed.items())
        print(f"resumed at step {start}{old}", flush=True)
    try:
        with StopSignal() as stop:
            loop(config, run, model, optimizer, windows, val, start, seconds, stop)
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
    print(f"next: python sample.py --run {run} --tau {config.tau:g} --show-steps")
    return run, results


def loop(config, run, model, optimizer, windows, val, start, seconds, stop):
    """Steps `start` to the last; `seconds` is what earlier ones took. All of a step is a function
    of its number, the weights and the optimizer, so that a resumed training is the same one."""
    rank, processes = rank_and_size()
    device = model.lm_head.weight.device
    precision = autocast(device, getattr(torch, config.precision))
    net = DistributedDataParallel(model) if dist.is_initialized() else model
    (low, high), now = model.config.iters, 0.0  # seconds of training since `start`
    evaluated = from_first({row["step"] for row in read_lines(run / "log.jsonl") if "val" in row})
    for done in range(start, config.steps + 1):
        due = done == config.steps or (done > 0 and done % config.eval_every == 0)
        stopped = any_process(stop.received)
        if (due or stopped) and done > start and not rank:
            save_checkpoint(run, model, optimizer, done, seconds + now)
        if stopped:
            raise Stopped
        stop.saved = due
        if due and done not in evaluated:
            loss = evaluate(model, val, min(64, val.count), device, iters=high)["loss"]
            print(f"step {done}/{config.steps}  validation {loss:.3f}", flush=True)
            if not rank:
                append_line(run / "log.jsonl", {"step": done, "val": loss})
        if done == config.steps:
            return
        stop.saved, began, step = False, time.time(), done + 1
        rate = learning_rate(done, config)
        for group in optimizer.param_groups:
            group["lr"] = rate
        # Drawn as a function of (seed, step), R is the same in all processes and after a resume.
        R = int(np.random.default_rng((config.seed, done)).integers(low, high + 1))
        x, y = windows.batch(done, config.batch_size // processes, rank, processes)  # (batch, T)
        logged = optimize(net, optimizer, x.to(device), y.to(device), R, config, precision)
        if not math.isfinite(logged["loss"] + logged["grad_norm"]):
            raise ValueError(not_finite(run, step, logged))
        now += time.time() - began
        if step % config.log_every == 0 or step == config.steps:
            row = {k: float(reduce(torch.as_tensor(v))) / processes for k, v in logged.items()}
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


def not_finite(run, step, logged):
    values = ", ".join(f"{name} {float(value):.4g}" for name, value in logged.items())
    message = f"step {step} is not finite ({values}), so nothing of it is kept; "
    if not checkpoints(run):
        return message + "there is no checkpoint yet: start again with a lower --learning-rate"
    rate = "--learning-rate LOWER"
    return (
        message
        + f"the last good checkpoint is {checkpoints(run)[-1]}; to go on from it: "
        + (f"{resume_command(run)} {rate}")
    )


def main():
    train(parse())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    command_line(main)
