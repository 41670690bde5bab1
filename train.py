"""Train a PonderLM-3: next-token cross-entropy plus the bottom-mass penalty (section 3.4.2).

    python train.py                                  'tiny' on a CPU, 'small' on a GPU
    python train.py --preset tiny --method vanilla   the same transformer without pondering
    python train.py --data my_texts/ --steps 2000
    python train.py --init-from DIR_OR_NAME          go on with a Llama, and teach it to ponder
    python train.py --resume                         go on with the newest run, exactly
    python train.py --grow 1:300,2:300,3:400         one step a token at first, then two, then three
    torchrun --nproc_per_node=2 train.py --micro-batch-size 4     by 2 processes

Every flag and its default: python train.py --help
"""

import math
import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from attention import COMPILED, fastest_backend, pick_backend
from baselines import build, find
from corpus.preparation import Windows, describe, unigram_entropy
from interop import load, locate
from model import PonderLM
from router import bottom_mass_penalty, expected_steps
from runtime import (
    UserError,
    any_process,
    autocast,
    clock,
    command_line,
    commit,
    first_process_first,
    from_first,
    join_processes,
    pick_device,
    pick_precision,
    pick_threads,
    rank_and_size,
    reduce,
    write_json,
)
from training import on_cpu, runs
from training.config import TrainConfig, check, describe_corpus, open_corpus, open_run, parse
from training.growing import grows, stages
from training.validation import evaluate, final_report
from training.warm_start import adapt, offset_at, start_from


def objective(model, x, y, R):
    """The loss of one micro-batch: L = CE + lambda sum_k mean(Bottom_{d_rho_k}(w_k)), or with the
    penalty `mean` L = CE + lambda sum_k mean(w_k).

    Without a router L = CE, plus a loss of the method's own (MoR's routers) if it has one.

    Args:
        model: any method, or one in DistributedDataParallel.
        x, y: (B, T) tokens, and those that follow them. R: Jacobi refinements.

    Returns:
        The loss, the penalty or the method's own loss (0 without one), and the PonderOutput, whose
        loss is CE.
    """
    out = model(x, y, R=R)
    model = getattr(model, "module", model)
    if out.auxiliary is not None:
        return out.loss + out.auxiliary, out.auxiliary, out
    if not (model.has_router and model.config.penalty_weight):
        return out.loss, torch.zeros_like(out.loss), out
    if model.config.penalty == "mean":
        penalty = expected_steps(out.log_w)
        return out.loss + model.config.penalty_weight * penalty, penalty, out
    depths = model.partial_losses(out.h, out.s, y)  # (B, T, K): integrated up to step 0 .. K-1
    depths = torch.cat([depths, out.ce.detach()[..., None]], dim=-1)  # (B, T, K+1)
    penalty, _ = bottom_mass_penalty(out.log_w, depths, model.config.penalty)
    return out.loss + model.config.penalty_weight * penalty, penalty, out


def learning_rate(step, config):
    """Linear warm-up, then a cosine from the peak to a tenth of it."""
    warmup = max(1, round(config.warmup * config.steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def make_optimizer(model, config, device):
    learned = [p for p in model.parameters() if p.requires_grad]
    matrices, gains = [p for p in learned if p.dim() >= 2], [p for p in learned if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    if config.ponder_warmup:  # the router waits: the last group, with a learning rate of its own
        router = model.router.proj.weight
        groups[0]["params"] = [p for p in matrices if p is not router]
        alone = [p for p in matrices if p is router]  # none, if it does not learn
        groups.append({"params": alone, "weight_decay": config.weight_decay})
    fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


def compile_blocks(model):
    """Compile the blocks, for each length of a pass on its own: it has a few, and what is known of
    a shape makes the kernels faster."""
    torch._dynamo.config.recompile_limit = COMPILED
    for block in model.model.layers:
        block.compile(dynamic=False)


def to_device(rows, device):
    """(batch, T+1) tokens to the device, without a wait for what it is still doing."""
    pinned = device.type == "cuda"
    return (rows.pin_memory() if pinned else rows).to(device, non_blocking=pinned)


@dataclass
class Training:
    config: TrainConfig
    run: Path
    model: PonderLM
    optimizer: torch.optim.Optimizer
    step: int  # optimizer steps done
    seconds: float  # that they took
    device: torch.device


def optimize(training, net, x, y, R):
    """One optimizer step on this process's share x, y (batch, T). Returns what is logged of it,
    scalars on the device: a GPU has hardly begun with the step when this returns.

    `net` is the model, or the model in DistributedDataParallel, which averages the gradients over
    the processes in the backward pass of the last micro-batch.
    """
    config, model = training.config, training.model
    precision = autocast(training.device, getattr(torch, config.precision))
    micro = config.micro_batch_size or config.batch_size
    share, logged = micro / len(x), dict(loss=0.0, ce=0.0, penalty=0.0, K_hat=0.0)
    for i, (xs, ys) in enumerate(zip(x.split(micro), y.split(micro), strict=True), start=1):
        wait = dist.is_initialized() and i * micro < len(x)
        with net.no_sync() if wait else nullcontext():
            with precision:
                loss, penalty, out = objective(net, xs, ys, R)
            (share * loss).backward()
        steps = model.executed(out.log_w, config.tau).float().mean()
        for name, value in zip(logged, (loss, out.loss, penalty, steps), strict=True):
            logged[name] += share * value.detach()
    logged["grad_norm"] = torch.nn.utils.clip_grad_norm_(
        model.parameters(), config.clip or math.inf
    )
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    return logged


def loop(training, windows, val, stop):
    """The steps that are left.

    All of a step is a function of its number, the weights and the optimizer, so that a resumed
    training is the same one. A GPU that is at a step is not waited for: the next one is prepared
    meanwhile, and only behind that does `watch` look at what the first has logged.
    """
    config, run = training.config, training.run
    model, optimizer = training.model, training.optimizer
    rank, processes = rank_and_size()
    net = DistributedDataParallel(model) if dist.is_initialized() else model
    (low, high), first, before = model.config.refinements, training.step, training.seconds
    rows = runs.read_lines(run / "log.jsonl")
    evaluated = from_first({row["step"] for row in rows if "val" in row})
    watch = runs.Watch(run)
    for done in range(first, config.steps + 1):
        training.step = done
        if config.ponder_warmup:
            model.set_offset(offset_at(done, config))
        due = done == config.steps or (done > 0 and done % config.eval_every == 0)
        stopped = any_process(stop.received)
        if due or stopped:
            watch.look()  # before anything is saved
        if (due or stopped) and done > first and not rank:
            runs.save_checkpoint(run, model, optimizer, done, training.seconds)
        if stopped:
            raise runs.Stopped
        stop.at_once(due)  # all is saved: a signal raises Stopped, now and until the next step
        if due and done not in evaluated:
            count = min(64, val.count)
            loss = evaluate(model, val, count, training.device, R=high)["loss"]
            print(
                f"step {done}/{config.steps}  validation {loss:.3f} ({count} windows)", flush=True
            )
            runs.check_finite(run, done, validation=loss)
            if not rank:
                runs.append_line(run / "log.jsonl", {"step": done, "val": loss})
        if done == config.steps:
            return
        stop.at_once(False)
        began, step = time.time(), done + 1
        rate = learning_rate(done, config)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if done < config.ponder_warmup:
            optimizer.param_groups[-1]["lr"] = 0.0
        # Drawn as a function of (seed, step), R is the same in all processes and after a resume.
        R = int(np.random.default_rng((config.seed, done)).integers(low, high + 1))
        rows = windows.rows(done, config.batch_size // processes, rank, processes)
        rows = to_device(rows, training.device)  # (batch, T+1)
        x, y = rows[:, :-1], rows[:, 1:]  # (batch, T)
        watch.add(step, optimize(training, net, x, y, R))
        to_log = step % config.log_every == 0 or step == config.steps
        logged = watch.look() if to_log else {}
        training.seconds += time.time() - began
        if to_log:
            values = torch.tensor([*logged.values()])
            values = (reduce(values, training.device) / processes).tolist()
            row = dict(zip(logged, values, strict=True))
            a_step = (training.seconds - before) / (step - first)
            row["tokens_per_second"] = x.numel() * processes / a_step
            print(
                f"step {step}/{config.steps}  loss {row['loss']:.3f}  ce {row['ce']:.3f}  "
                f"penalty {row['penalty']:.4f}  K-hat {row['K_hat']:.2f}  "
                f"{row['tokens_per_second']:,.0f} tok/s  "
                f"left {clock(a_step * (config.steps - step))}",
                flush=True,
            )
            if not rank:
                runs.append_line(run / "log.jsonl", {"step": step, **row})


def open_training(config, run, vocab_size, checkpoint, device):
    """The model and its optimizer, new or as in a checkpoint."""
    shape = replace(config.model, vocab_size=vocab_size)
    torch.manual_seed(config.seed)
    if checkpoint:
        try:
            model = load(checkpoint)
            if config.ponder_warmup:
                shape = replace(shape, router_offset=offset_at(runs.step_of(checkpoint), config))
            if model.config != shape:
                raise UserError(f"{checkpoint}/config.json: {runs.changes(shape, model.config)}")
        except UserError as error:
            raise runs.unreadable(checkpoint, error) from None
    else:
        model = start_from(locate(config.init_from), shape) if config.init_from else build(shape)
    model.to(device).train()
    model.recompute = config.recompute
    if device.type == "cpu":
        on_cpu.keep_freed_memory()
    if config.compile:
        compile_blocks(model)
    elif device.type == "cpu":
        on_cpu.use_fused_norms(model)
    optimizer = make_optimizer(model, config, device)
    step, seconds = runs.read_trainer(checkpoint, optimizer) if checkpoint else (0, 0.0)
    if step > config.steps:
        raise UserError(f"{checkpoint} is beyond step {config.steps}; go on with a larger --steps")
    if checkpoint and not rank_and_size()[0]:
        runs.publish(checkpoint)
    return Training(config, run, model, optimizer, step, seconds, device)


def choose_backend(config, processes, device, dtype):
    """The attention backend. 'auto' is the fastest in the longest pass of this training."""
    if config.backend != "auto":
        return pick_backend(config.backend, device, dtype)
    model, method = config.model, find(config.model.method)
    B = config.micro_batch_size or config.batch_size // processes
    N = model.block_size * (model.ponder_steps + 1 if method.interleaves else 1)
    shape = B, model.num_attention_heads, N, model.head_width
    biased, G = method.has_router, model.key_value_heads
    return fastest_backend(shape, G, device, dtype, biased=biased, compiled=config.compile)


def train(config):
    """Train as `config` says.

    Returns:
        The run's directory and the final evaluation, or None if the training was stopped before.
    """
    rank, processes, device = join_processes(pick_device(config.device))
    check(config, processes)
    threads = pick_threads(config.threads, device)
    dtype = from_first(pick_precision(config.precision, device))  # it may have been measured
    backend = from_first(choose_backend(config, processes, device, dtype))
    config = replace(config, threads=threads, precision=str(dtype)[6:], backend=backend)
    with first_process_first():
        folder, tokenizer, train_tokens, val_tokens = open_corpus(config)
    V, T = tokenizer.vocab_size, config.model.block_size
    # Large tables are padded, for the GPU's matrix products; a trained one is as it is.
    V = config.model.vocab_size if config.init_from else V if V < 1024 else -(-V // 64) * 64
    windows, val = Windows(train_tokens, T, config.seed), Windows(val_tokens, T, seed=0)
    entropy = unigram_entropy(val_tokens, V)
    config = from_first(adapt(config, Windows(train_tokens, T, seed=0)))  # the same for all seeds

    corpus = describe_corpus(folder, tokenizer, train_tokens, val_tokens)
    run, latest, changed = from_first(None if rank else open_run(config, corpus))
    with nullcontext() if rank else runs.locked(run):
        training = open_training(config, run, V, latest, device)
        training.model.backend = backend
        machine = {"torch": torch.__version__, "device": device.type, "processes": processes}
        machine |= {"threads": threads, "commit": commit()}
        if not rank:
            tokenizer.save(run / "tokenizer.json")
            write_json(run / "train.json", {"config": asdict(config), "corpus": corpus})
            runs.begin_log(run, training.step, changed, machine)
        size = sum(p.numel() for p in training.model.parameters())
        print(f"{run}: {size:,} parameters, {config.precision}, {backend}, {machine}")
        print(describe(folder))
        print(f"{len(train_tokens):,} tokens, {windows.count:,} windows of {T}; ", end="")
        print(f"unigram entropy of validation {entropy:.3f} nats", flush=True)
        if config.model.feedback_scale:
            print(f"states are fed back times {config.model.feedback_scale:g}")
        if config.resume:
            print(f"resumed at step {training.step}, changed: {changed or 'nothing'}", flush=True)
        try:
            with runs.StopSignal() as stop:
                loop(training, windows, val, stop)
                print(f"trained in {clock(training.seconds)} minutes; evaluating", flush=True)
                results = final_report(training.model, val, config, device)
                if not rank:
                    write_json(run / "results.json", {**results, "unigram_entropy": entropy})
                    runs.draw_losses(run)
        except runs.Stopped:
            print(f"stopped; go on with: {runs.resume_command(run)}")
            return run, None
    print(f"unigram entropy {entropy:.3f}")
    best = runs.best_checkpoint(run)
    if best != runs.checkpoints(run)[-1]:
        print(f"an earlier checkpoint had a better validation loss: {best}")
    flags = f" --tau {config.tau:g} --show-steps" if config.model.ponder_steps else ""
    print(f"next: python sample.py --run {shlex.quote(str(run))}{flags}")
    return run, results


def main():
    results = {}  # should no stage be left
    for flags in stages(sys.argv[1:]):
        _, results = train(parse(flags, description=__doc__))
        if results is None:
            if grows(sys.argv):
                print("it is a stage of --grow: the same command goes on with it and the rest")
            break
    if dist.is_initialized():
        dist.destroy_process_group()
    if results is None:  # stopped: what a script has behind it has to wait
        sys.exit(130)


if __name__ == "__main__":
    command_line(main)
