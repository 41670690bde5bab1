"""Train a PonderLM-3: next-token cross-entropy plus the bottom-mass penalty (section 3.4.2).

    python train.py                                  'tiny' on a CPU, 'small' on a GPU
    python train.py --preset tiny --method vanilla   the same transformer without pondering
    python train.py --data my_texts/ --steps 2000
    python train.py --init-from DIR_OR_NAME          go on with a Llama, and teach it to ponder
    python train.py --resume                         go on with the newest run, exactly
    torchrun --nproc_per_node=2 train.py --micro-batch-size 4     by 2 processes

Every flag and its default: python train.py --help
"""

import math
import shlex
import time
from contextlib import nullcontext
from dataclasses import asdict, replace

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from attention import pick_backend
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
from methods import build, load
from run import (
    append_line,
    changes,
    checkpoints,
    draw_losses,
    locked,
    open_run,
    read_lines,
    resume_command,
    step_of,
    write_json,
)
from settings import MAY_CHANGE, check, describe_corpus, open_corpus, parse
from start import adapt, offset_at, start_from
from validation import evaluate, final_report
from weights import locate
from windows import Windows, describe, unigram_entropy


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
            count = min(64, val.count)
            loss = evaluate(model, val, count, device, iters=high)["loss"]
            print(
                f"step {done}/{config.steps}  validation {loss:.3f} ({count} windows)", flush=True
            )
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
    flags = f" --tau {config.tau:g} --show-steps" if config.model.ponder_steps else ""
    print(f"next: python sample.py --run {shlex.quote(str(run))}{flags}")
    return run, results


def main():
    train(parse(description=__doc__))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    command_line(main)
