"""Train a PonderLM-3: next-token cross-entropy plus the bottom-mass penalty (section 3.4.2).

    python train.py                                  'tiny' on a CPU, 'small' on a GPU
    python train.py --preset tiny --ponder-steps 0   the same transformer without pondering
    python train.py --data my_texts/ --steps 2000

Every flag and its default: python train.py --help
"""

import argparse
import math
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import tyro

from attention import BACKENDS, pick_backend
from checkpoint import append_line, draw_losses, new_run, write_json
from data import Windows, describe, is_prepared, load_tokens, prepare, unigram_entropy
from device import autocast, command_line, pick_device, pick_precision
from model import PonderConfig, PonderLM
from router import stop_step


@dataclass
class TrainConfig:
    preset: Literal["auto", "tiny", "small", "70m", "410m"] = "auto"  # auto: small on a GPU
    name: str | None = None  # of the run, in --out; by default preset and time
    out: str = "out"  # where runs are kept
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
    eval_every: int = 250  # steps between evaluations, after each of which the model is saved
    eval_windows: int = 512  # validation windows of the final evaluation
    tau: float = 1e-4  # where executed steps are counted and hard stopping is scored

    device: str = "auto"  # auto, cpu, cuda, mps
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where it is fast
    backend: Literal[BACKENDS] = "auto"  # attention


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
    known = first.parse_known_args(argv)[0]
    preset = known.preset
    if preset not in PRESETS:  # 'auto', or a wrong one, which tyro refuses below
        preset = "small" if pick_device(known.device).type == "cuda" else "tiny"
    config = tyro.cli(TrainConfig, description=__doc__, default=PRESETS[preset], args=argv)
    return replace(config, preset=preset)


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
    S, total, sums = model.config.ponder_steps + 1, 0, 0
    for first in range(0, count, batch_size):
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
        sums = sums + torch.stack([loss.cpu().double() for loss in losses])
        total += y.numel()
    model.train(was_training)
    model.backend = backend
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


def check(config):
    """Refuse settings that would fail hours later, or train nothing."""
    for name in ("steps", "batch_size", "log_every", "eval_every", "eval_windows"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: it must be at least 1")
    if config.seed < 0 or not 0 <= config.tau <= 1:
        raise ValueError(f"seed = {config.seed}, tau = {config.tau}: seed >= 0 and 0 <= tau <= 1")
    micro = config.batch_size if config.micro_batch_size is None else config.micro_batch_size
    if micro < 1 or config.batch_size % micro:
        raise ValueError(f"micro_batch_size {micro} does not divide batch_size {config.batch_size}")
    if config.name and (Path(config.out) / config.name / "model.safetensors").exists():
        raise FileExistsError(f"{config.out}/{config.name} exists: choose another --name")


def open_corpus(config):
    """The corpus of a config -> folder, tokenizer, train and validation tokens."""
    name, V = config.tokenizer, config.model.vocab_size
    if name == "auto":
        of_preset = {"tiny": "bytes", "small": "bpe"}.get(config.preset, "gpt2")
        name = None if is_prepared(config.data) else of_preset
    folder, tokenizer = prepare(config.data, name, V)
    tokens = [
        load_tokens(folder / file, tokenizer.vocab_size, config.model.block_size)
        for file in ("train.bin", "val.bin")
    ]
    return folder, tokenizer, *tokens


def optimize(model, optimizer, x, y, R, config, precision):
    """One optimizer step on the batch x, y (batch, T). Returns what is logged of it."""
    micro = config.micro_batch_size or config.batch_size
    share = micro / config.batch_size
    logged = dict(loss=0.0, ce=0.0, penalty=0.0, steps=0.0)
    for xs, ys in zip(x.split(micro), y.split(micro), strict=True):
        with precision:
            out = model(xs, ys, iters=R)
        (share * out.loss).backward()
        parts = dict(
            loss=out.loss, ce=out.ce, steps=stop_step(out.log_w, config.tau).float().mean()
        )
        if out.penalty is not None:
            parts["penalty"] = out.penalty
        for name, value in parts.items():
            logged[name] += share * value.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return logged | {"grad_norm": norm}


def train(config):
    """Train as `config` says. Returns the run's directory and the final evaluation."""
    check(config)
    device = pick_device(config.device)
    dtype = pick_precision(config.precision, device)
    backend = pick_backend(config.backend, device, dtype)
    folder, tokenizer, train_tokens, val_tokens = open_corpus(config)
    V = tokenizer.vocab_size
    V = V if V < 1024 else -(-V // 64) * 64  # large tables padded, for the GPU's matrix products
    config = replace(config, model=replace(config.model, vocab_size=V))
    T, (low, high) = config.model.block_size, config.model.iters
    windows, val = Windows(train_tokens, T, config.seed), Windows(val_tokens, T, seed=0)
    entropy = unigram_entropy(val_tokens, V)

    torch.manual_seed(config.seed)
    model = PonderLM(config.model).to(device).train()
    model.backend = backend
    optimizer = make_optimizer(model, config, device)
    run = new_run(config.out, config.name, config.preset)
    tokenizer.save(run / "tokenizer.json")
    write_json(run / "train.json", {**asdict(config), "dtype": str(dtype), "corpus": folder.name})
    size = sum(p.numel() for p in model.parameters())
    print(f"{run}: {size:,} parameters, device {device.type}, precision {str(dtype)[6:]}, ", end="")
    print(f"attention {backend}, torch {torch.__version__}\n{describe(folder)}")
    print(f"{len(train_tokens):,} tokens, {windows.count:,} windows of {T}; ", end="")
    print(f"unigram entropy of validation {entropy:.3f} nats", flush=True)

    seconds = 0.0  # of training, without evaluations
    for step in range(config.steps):
        start = time.time()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        # R is drawn as a function of (seed, step), not from the model's own random numbers.
        R = int(np.random.default_rng((config.seed, step)).integers(low, high + 1))
        x, y = (t.to(device) for t in windows.batch(step, config.batch_size))  # (batch, T)
        logged = optimize(model, optimizer, x, y, R, config, autocast(device, dtype))

        done, last, row = step + 1, step + 1 == config.steps, {}
        if done % config.log_every == 0 or last:
            row = {"step": done} | {name: float(value) for name, value in logged.items()}
            if not math.isfinite(row["loss"]):
                raise ValueError(f"the loss is {row['loss']} at step {done}; lower --learning-rate")
        seconds += time.time() - start
        if row:
            row["tokens_per_second"] = done * x.numel() / seconds
            print(
                f"step {done}/{config.steps}  loss {row['loss']:.3f}  ce {row['ce']:.3f}  "
                f"penalty {row['penalty']:.4f}  steps {row['steps']:.2f}  "
                f"{row['tokens_per_second']:,.0f} tok/s  "
                f"left {clock(seconds / done * (config.steps - done))}",
                flush=True,
            )
        if done % config.eval_every == 0 or last:
            model.save_pretrained(run)
            loss = evaluate(model, val, min(64, val.count), device, iters=high)["loss"]
            row |= {"step": done, "val": loss}
            print(f"step {done}/{config.steps}  validation {loss:.3f}", flush=True)
        if row:
            append_line(run / "log.jsonl", row)

    print(f"trained in {clock(seconds)} minutes; evaluating")
    results = final_report(model, val, config, device)
    write_json(run / "results.json", {**results, "unigram_entropy": entropy})
    draw_losses(run)
    print(f"unigram entropy {entropy:.3f}")
    print(f"next: python sample.py --run {run} --tau {config.tau:g} --show-steps")
    return run, results


if __name__ == "__main__":
    command_line(lambda: train(parse()))
