"""Train a PonderLM-3: next-token cross-entropy plus the bottom-mass penalty (section 3.4.2).

    python train.py                                       'tiny' on a CPU, 'small' on a GPU
    python train.py --data my_texts/ --steps 2000
    python train.py --preset tiny --ponder-steps 0        the same transformer without pondering
    python train.py --resume                              go on with the newest run, exactly
    torchrun --nproc_per_node=2 train.py --micro-batch-size 4          two processes share each step

Every flag and its default: python train.py --help. Ctrl-C saves. A run is a directory:

    config.json, model.safetensors, tokenizer.json    a model, as sample.py and analyze.py read it
    trainer.pt      the checkpoint: weights, optimizer, step; replaced whole or not at all
    train.json      every setting and what its corpus is known by
    log.jsonl       a line of numbers each --log-every steps
    results.json    the final evaluation

The last lines that python train.py --steps 40 prints on a CPU (at such losses the printed penalty chooses no
token, see bottom_mass_penalty):

    step 40/40  loss 2.722  ce 2.722  penalty 0.000  K-hat 3.00  1,039 tok/s  left 0:00
    step 40/40  validation 2.782
    validation loss in nats per token, 512 windows of 64 tokens
      as trained, R = 1               2.8317
      at the fixed point              2.8316
      hard-stopped at tau = 0.0001    2.8316
    executed steps per token: 3.00 of 3
      depth                                0       1       2       3
      mean of s                        0.000   0.006   0.936   0.058
      tokens that stop there           0.000   0.000   0.000   1.000
    unigram entropy 3.414
    next: python sample.py --run out/tiny-1126-193438
"""

import argparse
import json
import math
import os
import shlex
import signal
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import filelock
import numpy as np
import torch
import torch.distributed as dist
import tyro

from data import Windows, is_prepared, open_corpus, unigram_entropy
from model import (
    Config,
    PonderLM,
    UserError,
    check_types,
    command_line,
    from_json,
    newest_run,
    pick_device,
    read_json,
    save,
    write_json,
    write_whole,
)
from router import bottom_mass_penalty, executed_steps

# -- Settings --------------------------------------------------------------------------------------


@dataclass
class TrainConfig:
    """All that is not the model."""

    program = "python {}.py"  # which runs train and sample

    preset: Literal["tiny", "small", "70m", "410m"] = "tiny"  # what the other flags change
    name: str | None = None  # of the run, in --out; None: preset and time
    out: str = "out"  # where runs are kept
    resume: bool = False  # go on with the run --name, or the newest, with its settings
    data: str = "pydocs"  # or pysource, a file, a folder of texts, or one of .bin files
    tokenizer: str = "auto"  # bytes, bpe, gpt2; auto: a .bin folder's own, else by the preset

    steps: int = 1000  # optimizer steps
    batch_size: int = 8  # windows a step
    micro_batch_size: int | None = None  # windows at a time, to save memory; None: all
    learning_rate: float = 4e-3  # peak; cosine to a tenth of it
    router_rate: float = 3.0  # learning rate of the router, times that of the rest (reading note 6)
    warmup: float = 0.05  # share of the steps in which the learning rate rises
    weight_decay: float = 0.1  # on matrices, without the router's
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    clip: float = 1.0  # gradient norm; 0: off
    step_price: float = 0.0  # nats for an executed step (router.executed_steps); 0: steps are free
    price_from: float = 0.0  # share of the steps after which they cost something
    seed: int = 0  # of weights, batches and R

    log_every: int = 20  # steps between log lines
    eval_every: int = 250  # steps between checkpoints, each of which is evaluated
    eval_windows: int = 512  # validation windows of the final evaluation
    tau: float = 1e-4  # where executed steps are counted and hard stopping is scored

    device: str = "auto"  # auto, cpu, cuda, mps
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where there is hardware
    recompute: bool = False  # compute each pass again in the backward pass, to save memory

    def __post_init__(self):
        check_types(self)
        if self.name is not None and (Path(self.name).name != self.name or self.name in ("", "..")):
            raise ValueError(f"name = {self.name!r}: give a plain name; --out says where the run goes")
        ranges = dict.fromkeys(("warmup", "weight_decay", "tau", "price_from"), (0, 1))
        ranges |= dict.fromkeys(("learning_rate", "router_rate", "clip", "step_price"), (0, 1e30))
        ranges |= {"seed": (0, 2**63 - 1)}
        for name, value in vars(self).items():
            low, high = ranges.get(name, (1, 2**31))
            if type(value) in (int, float) and not low <= value <= high:
                raise ValueError(f"{name} = {value}: it must lie in {low} .. {high}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas}: they must lie in [0, 1)")


# What a run has whose train.json is older than a setting.
BEFORE = {"router_rate": 1.0, "step_price": 0.0, "price_from": 0.0}
# What a resumed training may change: anything else would make it another training. The corpus may
# have moved, but must be the same.
MAY_CHANGE = {"steps", "learning_rate", "clip", "log_every", "eval_every", "eval_windows", "tau"}
MAY_CHANGE |= {"data", "device", "precision", "recompute"}
PRESETS = {  # Config(V, D, width of the MLP, layers, H, ..)
    # A 2-core CPU, minutes.
    "tiny": (TrainConfig(), Config(257, 96, 256, 3, 2, head_dim=24, block_size=64, refinements=(1, 1))),
    # One GPU, minutes. With d = 56 the channel of log w fits into a kernel of width 64.
    "small": (
        TrainConfig("small", steps=1500, batch_size=64, micro_batch_size=16, learning_rate=1e-3,
                    eval_every=500),
        Config(4096, 384, 1032, 6, 6, head_dim=56, block_size=256),
    ),
    # The paper's two sizes, with the recipe of the released PonderLM-2 and Pythia scripts: 15 B and 10 B
    # tokens.
    "70m": (
        TrainConfig("70m", steps=28_610, batch_size=256, micro_batch_size=4, learning_rate=1e-3,
                    router_rate=1.0, warmup=0.01, weight_decay=0.01, eval_every=1000),
        Config(50_304, 512, 1376, 6, 8, block_size=2048),
    ),
    "410m": (
        TrainConfig("410m", steps=19_073, batch_size=256, micro_batch_size=1, learning_rate=3e-4,
                    router_rate=1.0, warmup=0.02, eval_every=1000),
        Config(50_304, 1024, 2752, 24, 16, block_size=2048),
    ),
}  # fmt: skip


def parse(argv=None):
    """The command line -> (TrainConfig, Config). --preset, or the run that goes on, has the defaults."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag, default in (("--preset", None), ("--device", "auto"), ("--out", "out"), ("--name", None)):
        first.add_argument(flag, default=default)
    first.add_argument("--resume", action="store_true")
    known = first.parse_known_args(argv)[0]
    if known.resume:
        run = Path(known.out, known.name) if known.name else newest_run(known.out)
        config, shape, _ = read_run(run)
        if (method := shape.pop("method")) != PonderLM.method:
            raise UserError(f"{run} is of the method {method!r}: go on with python -m lab train")
        defaults = replace(config, out=known.out, name=run.name, resume=True)
        model_defaults = from_json(Config, shape, run / "train.json")
    else:
        on_gpu = known.device.partition(":")[0] in ("auto", "cuda") and torch.cuda.is_available()
        preset = known.preset or ("small" if on_gpu else "tiny")  # without touching the GPU yet
        defaults, model_defaults = PRESETS.get(preset, PRESETS["tiny"])  # tyro refuses a wrong one below

    def flags(
        config: Annotated[TrainConfig, tyro.conf.arg(name="")] = defaults,
        model_config: Annotated[Config, tyro.conf.arg(name="")] = model_defaults,
    ):
        return config, model_config

    try:
        return tyro.cli(flags, description=__doc__, args=argv)
    except ValueError as error:
        raise UserError(error) from None


# -- Training --------------------------------------------------------------------------------------


def objective(model, x, y, R, price=0.0):
    """The loss of one micro-batch:

        L = CE + lambda sum_k mean(Bottom_{d_rho_k}(w_k)) + price mean(executed(w))

    Args:
        x, y: (B, T) tokens, and those that follow them; -100 where there is none to predict.
        R: Jacobi refinements.
        price: of an executed step in nats, which is not the paper's.

    Returns:
        L, the penalty without lambda, and the model's Output, whose loss is CE.
    """
    out, config, has_target = model(x, y, R=R), model.config, y != -100
    loss, penalty, log_w = out.loss, torch.zeros_like(out.loss), out.log_w[has_target]  # (n, K+1) of n tokens
    if not (config.ponder_steps and len(log_w)):
        return loss, penalty, out
    if config.penalty_weight:
        ce = model.partial_losses(out.h, out.s, y)  # (B, T, K): integrated up to step 0 .. K-1
        ce = torch.cat([ce, out.ce.detach()[..., None]], dim=-1)  # (B, T, K+1)
        penalty, _ = bottom_mass_penalty(log_w, ce[has_target], config.penalty)
        loss = loss + config.penalty_weight * penalty
    if price:
        loss = loss + price * executed_steps(log_w).mean()
    return loss, penalty, out


def learning_rate(step, config):
    """Linear warm-up, then a cosine from the peak to a tenth of it."""
    warmup = max(1, round(config.warmup * config.steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def step_price(step, config):
    """Free at first: a router that starts flat, and pays from the first step, never learns to think."""
    return config.step_price if step >= config.price_from * config.steps else 0.0


def pick_precision(name, device):
    """'auto' -> bfloat16 where the hardware multiplies it, else float32."""
    by_cpu = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    by_gpu = partial(torch.cuda.is_bf16_supported, including_emulation=False)
    has_it = {"cuda": by_gpu, "cpu": by_cpu}.get(device.type, lambda: False)
    return name if name != "auto" else "bfloat16" if has_it() else "float32"


def pick_tokenizer(config):
    """'auto' -> that of the preset; None, a .bin folder's own."""
    of_preset = {"tiny": "bytes", "small": "bpe"}.get(config.preset, "gpt2")
    automatic = None if is_prepared(config.data) else of_preset
    return automatic if config.tokenizer == "auto" else config.tokenizer


def train(config, model_config, make_model=PonderLM, objective=objective, corpus=open_corpus):
    """Train as the settings say.

    Args:
        make_model: model_config -> model. objective: as above. corpus: as data.open_corpus.

    Returns:
        The run's directory, and its final evaluation, or None if the training was stopped before.
    """
    rank, processes, device = join_processes(config.device)
    micro = micro_batch(config, processes)
    share = config.batch_size // processes  # windows a step of this process
    names = [config.name or f"{config.preset}-{time.strftime('%m%d-%H%M%S')}"]
    if processes > 1:
        dist.broadcast_object_list(names)  # the first process's clock
    run = Path(config.out, names[0])
    if not (config.resume or rank):  # before minutes of reading text
        check_free(run)
    if rank:  # the first process prepares the corpus, the others find it
        dist.barrier()
    text = corpus(config.data, pick_tokenizer(config), model_config.vocab_size)
    if processes > 1 and not rank:
        dist.barrier()
    T = model_config.block_size
    windows, val = Windows(text.train, T, config.seed), Windows(text.val, T, seed=0)

    torch.manual_seed(config.seed)
    model = make_model(replace(model_config, vocab_size=text.vocab_size)).to(device).train()
    model.recompute = config.recompute
    optimizer = torch.optim.AdamW(
        model.param_groups(config.router_rate), config.learning_rate, config.betas,
        weight_decay=config.weight_decay, fused=device.type in ("cpu", "cuda"),
    )  # fmt: skip
    precision = pick_precision(config.precision, device)
    config = replace(config, name=run.name, micro_batch_size=micro, precision=precision)
    settings = {"config": asdict(config), "model": {"method": model.method, **asdict(model_config)}}
    settings["corpus"] = text.known_by
    (low, high), results = model_config.refinements, None

    with nullcontext() if rank else locked(run), Interrupt() as interrupt, suppress(KeyboardInterrupt):
        changed, first, seconds_before = {}, 0, 0.0
        if config.resume:
            changed = changes(run, config, settings)
            first, seconds_before = load_checkpoint(run, model, optimizer)
        elif not rank:
            check_free(run)  # once more: another training may have taken it while this one read text
        if first > config.steps:
            raise UserError(f"{run} has done {first} steps already: go on with a larger --steps")
        if not rank:
            write_json(run / "train.json", settings)
            text.tokenizer.save(run / "tokenizer.json")
            start_log(run, first)
            if first:
                save(model, run)  # a kill may have come between the checkpoint and this
        about = {"torch": torch.__version__, "device": device.type, "processes": processes}
        write_log(run, rank, step=first, changed=changed, **about)
        size = sum(p.numel() for p in model.parameters())
        print(f"{text.source}\n{windows.count:,} windows of {T} tokens; {size:,} parameters, {precision}")
        print(f"{run}: resumed at step {first}" if first else f"{run}: a new training", flush=True)

        seconds = seconds_before
        for step in range(first, config.steps):
            began = time.monotonic()
            rows = windows.rows(step, share, rank, processes)  # (share, T+1)
            if device.type == "cuda":
                rows = rows.pin_memory()  # so that the copy does not wait for the step before
            rows = rows.to(device, non_blocking=True)
            R = int(np.random.default_rng((config.seed, step)).integers(low, high + 1))
            logged = dict.fromkeys(("loss", "ce", "penalty", "K_hat", "executed"), 0.0)
            for part in rows.split(micro):
                x, y = part[:, :-1], part[:, 1:]  # (micro, T)
                with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                    loss, penalty, out = objective(model, x, y, R, step_price(step, config))
                (loss * (micro / share)).backward()
                K_hat = model.executed(out.log_w, config.tau).float().mean()
                values = {"loss": loss, "ce": out.loss, "penalty": penalty, "K_hat": K_hat}
                values["executed"] = executed_steps(out.log_w.detach()).mean()
                for key, value in values.items():
                    logged[key] += value.detach() * (micro / share)
            average_gradients(model)  # over the processes
            logged["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * learning_rate(step, config)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

            done, is_last = step + 1, step + 1 == config.steps
            if is_logged := is_last or done % config.log_every == 0:
                numbers = add_up(torch.stack([*logged.values()]), device) / processes  # waits for a GPU
            seconds += time.monotonic() - began
            if is_logged:
                row = dict(zip(logged, numbers.tolist(), strict=True))
                check_finite(run, done, **row)
                a_step = (seconds - seconds_before) / (done - first)
                speed, left = config.batch_size * T / a_step, int(a_step * (config.steps - done))
                print(
                    f"step {done}/{config.steps}  loss {row['loss']:.3f}  ce {row['ce']:.3f}  "
                    f"penalty {row['penalty']:.3f}  K-hat {row['K_hat']:.2f}  {speed:,.0f} tok/s  "
                    f"left {left // 60}:{left % 60:02d}",
                    flush=True,
                )
                write_log(run, rank, step=done, **row, tokens_per_second=speed)
            if is_due := is_last or done % config.eval_every == 0:
                loss = evaluate(model, val, min(64, val.count), R=high)["loss"]
                check_finite(run, done, validation=loss)
                print(f"step {done}/{config.steps}  validation {loss:.3f}", flush=True)
                write_log(run, rank, step=done, val=loss)
            stop = add_up(torch.tensor(int(interrupt.received)), device)  # a signal to any of the processes
            if (is_due or stop) and not rank:
                save_checkpoint(run, model, optimizer, done, seconds)
            if stop:
                raise KeyboardInterrupt

        interrupt.at_once = True  # all is saved: a signal ends the evaluation
        if interrupt.received:  # one that came just before
            raise KeyboardInterrupt
        report = final_report(model, val, config)
        report["unigram_entropy"] = unigram_entropy(text.val, text.vocab_size)
        if not rank:
            write_json(run / "results.json", report)
        results = report
        print(f"unigram entropy {report['unigram_entropy']:.3f}")
        print(f"next: {config.program.format('sample')} --run {shlex.quote(str(run))}", flush=True)
    if results is None:
        print(f"stopped; go on with: {config.program.format('train')} {resume_flags(run)}", flush=True)
    return run, results


# -- Evaluation ------------------------------------------------------------------------------------


def windows_at_a_time(T, device):
    """How many windows of T tokens to evaluate at once: a CPU is twice as fast with few, a GPU idles."""
    return max(1, (16_384 if device.type == "cuda" else 1024) // T)


@torch.no_grad()
def evaluate(model, windows, count, R=None, tau=None, first=0):
    """Means over the tokens of `count` windows from the `first` on, in float32.

    Args:
        R, tau: as in PonderLM.forward. Without them: soft masks at the fixed point.

    Returns:
        dict: loss in nats; steps, executed at tau (1e-4 without one); and by depth k = 0 .. K `stopped`,
        the share of tokens whose last step is k, and `weight`, the mean of s_k.
    """
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    S, end = model.config.ponder_steps + 1, first + count
    size = windows_at_a_time(windows.block_size, device)
    rank, processes = rank_and_size()
    sums = torch.zeros(2 + 2 * S, dtype=torch.float64)  # tokens, loss, stopped, weight
    for i in range(first + rank * size, end, processes * size):
        rows = windows.stack(i, min(i + size, end)).to(device)
        out = model(rows[:, :-1], rows[:, 1:], R=R, tau=tau)
        steps = model.executed(out.log_w, 1e-4 if tau is None else tau)
        stopped = torch.stack([(steps == k).sum() for k in range(S)])
        found = torch.cat([out.ce.sum()[None], stopped, out.s.sum((0, 1))])
        sums += torch.cat([torch.tensor([out.ce.numel()]), found.cpu()])
    model.train(was_training)
    tokens, *sums = add_up(sums, device).tolist()
    loss, *by_depth = [x / tokens for x in sums]
    stopped, weight = by_depth[:S], by_depth[S:]
    steps = sum(k * share for k, share in enumerate(stopped))
    return {"loss": loss, "steps": steps, "stopped": stopped, "weight": weight}


def final_report(model, windows, config):
    """The losses that count, printed as they come -> what results.json holds of them."""
    R, count = max(model.config.refinements), min(config.eval_windows, windows.count)
    ways = {"trained": {"R": R}, "fixed": {}, "hard": {"tau": config.tau}}
    titles = f"as trained, R = {R}", "at the fixed point", f"hard-stopped at tau = {config.tau:g}"
    results = {"R": R}
    print(f"validation loss in nats per token, {count} windows of {windows.block_size} tokens")
    for (name, how), title in zip(ways.items(), titles, strict=True):
        results[name] = evaluate(model, windows, count, **how)
        print(f"  {title:30}{results[name]['loss']:8.4f}", flush=True)
    hard = results["hard"]
    print(f"executed steps per token: {hard['steps']:.2f} of {model.config.ponder_steps}")
    print(f"  {'depth':30}" + "".join(f"{k:8d}" for k in range(len(hard["weight"]))))
    print(f"  {'mean of s':30}" + "".join(f"{x:8.3f}" for x in hard["weight"]))
    print(f"  {'tokens that stop there':30}" + "".join(f"{x:8.3f}" for x in hard["stopped"]))
    return results


# -- A run and its files ---------------------------------------------------------------------------


def read_run(run, kind=TrainConfig):
    """train.json of a run -> its TrainConfig, the settings of its model (a dict), known_by of its corpus.

    Raises:
        UserError: it is not a run, one of an earlier version, or damaged.
    """
    file = Path(run, "train.json")
    if any(file.parent.glob("step-" + 8 * "[0-9]")):
        raise UserError(f"{run} is of an earlier version: it can be sampled as it is, but not be resumed")
    if not file.is_file():
        raise UserError(f"{run} is no run, it has no train.json: train one, without --resume")
    content = read_json(file)
    config, model, corpus = (content.get(name) for name in ("config", "model", "corpus"))
    if not all(isinstance(x, dict) for x in (config, model, corpus)) or "method" not in model:
        raise UserError(f"{file} does not hold the settings of a run; train anew under another --name")
    return from_json(kind, BEFORE | config, file), model, corpus


def changes(run, config, settings):
    """What --resume changes, {name: [before, now]}. UserError: something that is not in MAY_CHANGE."""
    read_run(run, type(config))  # which refuses what is damaged
    kept = read_json(run / "train.json")
    if "router_rate" not in kept["config"]:  # its optimizer has the weights in another order
        raise UserError(f"{run} is of an earlier version: it can be sampled as it is, but not be resumed")
    before, now = (
        BEFORE | part["config"] | part["model"] | {"corpus": part["corpus"] | {"name": ""}}
        for part in (kept, json.loads(json.dumps(settings)))
    )
    names = [x for x in now if before.get(x) != now[x] and x not in ("name", "out", "resume")]
    if odd := [f"{x}: {before.get(x)} -> {now[x]}" for x in names if x not in MAY_CHANGE]:
        raise UserError(f"{run} has other settings: train anew without --resume, or undo {'; '.join(odd)}")
    return {x: [before.get(x), now[x]] for x in names}


def check_free(run):
    """Refuse a folder that has anything but a training that ended before its first checkpoint."""
    names = {file.name.removesuffix(".tmp") for file in run.glob("*")} - {".lock"}
    if names and not {"train.json"} <= names <= {"train.json", "tokenizer.json", "log.jsonl"}:
        raise UserError(f"{run} exists: go on with --resume, or choose another --name")


@contextmanager
def locked(run):
    """Keep a run for this process. The lock ends with the process, however that ends."""
    run.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(run / ".lock", blocking=False):
            yield
    except filelock.Timeout:
        raise UserError(f"another process is training {run}; stop that one first") from None


def save_checkpoint(run, model, optimizer, step, seconds):
    """Replace the checkpoint, then the model that others read: a kill between the two loses nothing.

    Raises:
        UserError: the disk is full, or the weights are not finite; what was saved before is there.
    """
    norm = torch.stack([p.detach().norm() for p in model.parameters()]).norm()
    check_finite(run, step, weights=norm.item())
    checkpoint = {"step": step, "seconds": seconds}  # and no random state: batches and R are of the step
    checkpoint |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    write_whole(run / "trainer.pt", lambda file: torch.save(checkpoint, file))
    save(model, run)


def load_checkpoint(run, model, optimizer):
    """Restore what `save_checkpoint` kept -> steps done, and the seconds they took.

    Raises:
        UserError: trainer.pt is damaged, of another model, or has code in it, which is not run.
    """
    file = run / "trainer.pt"
    if not file.exists():  # the training ended before its first checkpoint
        return 0, 0.0
    try:
        kept = torch.load(file, map_location="cpu", weights_only=True)
        step, seconds = kept["step"], kept["seconds"]
        if not (0 < int(step) == step and 0 <= seconds < math.inf):
            raise ValueError(f"it says step {step} after {seconds} seconds")
        model.load_state_dict(kept["model"])
        state = {}
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            of_p = kept["optimizer"]["state"][i]
            # AdamW's kernels trust shapes and strides: copies have those of the parameter.
            state[i] = {x: torch.empty_like(p).copy_(of_p[x].view_as(p)) for x in ("exp_avg", "exp_avg_sq")}
            state[i]["step"] = torch.tensor(float(of_p["step"]))
        # Its groups are this training's: a resumed one may have another learning rate.
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        return step, seconds
    except Exception as error:  # a foreign file fails in any way
        reason = (str(error) or repr(error)).splitlines()[0]
        raise UserError(
            f"{file} is damaged or of another model ({reason}): the training cannot go on, but its weights "
            f"are still in {run}/model.safetensors; train anew under another --name"
        ) from None


def start_log(run, step):
    """Take back what was logged after `step`, a line that a kill has cut short, and stale files."""
    rows, file = [], run / "log.jsonl"
    for line in file.read_text("utf-8", "replace").splitlines() if step and file.exists() else []:
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            rows += [line + "\n"] if json.loads(line)["step"] <= step else []
    write_whole(file, lambda part: part.write_text("".join(rows), encoding="utf-8"))
    for stale in (run / "results.json", *run.glob("*.tmp")):
        stale.unlink(missing_ok=True)


def write_log(run, rank, **row):
    """One more line of the log, by the first process."""
    try:
        with open(os.devnull if rank else run / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {run}/log.jsonl ({error.strerror}): {way_back(run)}") from None


def check_finite(run, step, **values):
    if not all(math.isfinite(value) for value in values.values()):
        found = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        raise UserError(f"step {step} is not finite ({found}); lower --learning-rate: {way_back(run)}")


def way_back(run):
    saved = (run / "trainer.pt").exists()
    return f"go on from the last checkpoint, {resume_flags(run)}" if saved else "nothing is saved yet"


def resume_flags(run):
    out = [] if str(run.parent) == "out" else ["--out", str(run.parent)]
    return shlex.join(["--resume", *out, "--name", run.name])


class Interrupt:
    """SIGINT and SIGTERM: the first is noted, and the same a second time ends the process."""

    def __enter__(self):
        self.received = self.at_once = False  # at_once: all is saved, there is nothing to wait for
        signals = signal.SIGINT, signal.SIGTERM
        self.before = {number: signal.signal(number, self.receive) for number in signals}
        return self

    def receive(self, number, frame):
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"\nstopping; once more to exit at once\n")
        self.received = True
        if self.at_once:
            raise KeyboardInterrupt

    def __exit__(self, *_):
        for number, handler in self.before.items():
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
        patience = timedelta(days=1)  # the others wait while the first prepares a corpus
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
    rank, processes = rank_and_size()
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return rank, processes, device


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def micro_batch(config, processes):
    """How many windows a process takes at a time: what is asked for, else its share of a step."""
    batch = config.batch_size
    micro = config.micro_batch_size or max(1, batch // processes)
    if batch % (micro * processes):
        fits = [m for m in range(1, batch + 1) if batch % (m * processes) == 0]
        way_out = f"--micro-batch-size {fits[-1]} would do" if fits else "change --batch-size"
        if config.resume:
            way_out = "go on with as many processes as before"
        raise UserError(
            f"{batch} windows a step are no multiple of {micro} x {processes} processes; {way_out}"
        )
    return micro


def add_up(tensor, device):
    """The sum of a tensor over all processes, on the CPU."""
    if dist.is_initialized():
        tensor = tensor.to(device)
        dist.all_reduce(tensor)
    return tensor.cpu()


def average_gradients(model):
    """Let all processes have the mean of their gradients."""
    if dist.is_initialized():
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(mean.view_as(g))


def main(parse=parse, train=train):
    _, results = train(*parse())
    if results is None:  # stopped; once more, and it ends without a word
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if dist.is_initialized():
        dist.destroy_process_group()
    if results is None:  # what a script has behind it has to wait
        sys.exit(130)


if __name__ == "__main__":
    command_line(main)
