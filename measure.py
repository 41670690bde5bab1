"""One trained PonderLM, token by token: what each token costs and gains, and statistics over them.

code         paper         shape           meaning
x, y                       (n,)            the tokens that are read, and those that follow them
steps        K-hat         (n,)            steps executed after reading x, at tau
s, w         s, w          (n, K+1)        step distribution and mask score
ce           CE_i          (n, K+1)        loss, integration truncated after step i, renormalised
raw_ce       ce_i          (n, K+1)        the same not renormalised, as in the training penalty
difficulty   l_t           (n,)            loss before any additional computation
gain         Delta CE_i    (n, K)          CE_{i-1} - CE_i, the marginal utility of step i

n counts the tokens of all windows. Losses are in nats, in float32, at the fixed point.
"""

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from compact import settle
from config import read_config
from device import autocast
from hops import hops_asked
from methods import load
from model import PonderLM
from router import bottom_mass_penalty
from settings import TrainConfig, describe_corpus, open_corpus, read_run
from tokenizer import Tokenizer
from validation import truncate
from windows import Windows

BATCH = 32  # windows at a time
BUCKETS = ("easy", "medium", "hard")


def validation_windows(path):
    """The corpus that a run was trained on -> its config, tokenizer and validation windows.

    Raises:
        FileNotFoundError, ValueError: it is no run, or its corpus is another one now.
    """
    run, config, corpus = read_run(path)
    # Its own tokenizer, as when it is resumed: a model that it began from may be gone.
    here = replace(config, resume=True, out=str(run.parent), name=run.name)
    folder, tokenizer, train, val = open_corpus(here)
    now = describe_corpus(folder, train, val)
    if any(now[key] != corpus[key] for key in ("train_tokens", "val_tokens", "sha256")):
        raise ValueError(f"{path} was trained with another corpus than {config.data} is now")
    return config, tokenizer, Windows(val, config.model.block_size, seed=0)


@dataclass
class Subject:
    """A trained model and the validation windows that it is measured on."""

    path: Path
    config: TrainConfig
    model: PonderLM
    tokenizer: Tokenizer
    val: Windows
    rows: torch.Tensor  # (windows, T+1) token ids
    tau: float

    def batches(self, label):
        """Inputs and targets (B, T) of the windows, with a progress bar."""
        for rows in tqdm(self.rows.split(BATCH), desc=label, leave=False):
            yield rows[:, :-1], rows[:, 1:]


def check_taus(taus):
    for tau in taus:
        if not 0 <= tau <= 1:
            raise ValueError(f"tau = {tau} is not a probability: it must lie in [0, 1]")


def open_subject(path, windows=256, tau=None, device="cpu", labels=("ponderlm3",)):
    """A run's model with the first `windows` of its validation windows.

    Raises:
        FileNotFoundError, ValueError: no such run, another corpus, or none of the methods `labels`.
    """
    if windows < 1:
        raise ValueError(f"windows = {windows}: it must be at least 1")
    label = read_config(path).label
    if label not in labels:
        raise ValueError(f"{path} is of method {label}; this figure is for {' and '.join(labels)}")
    config, tokenizer, val = validation_windows(path)
    tau = config.tau if tau is None else tau
    check_taus([tau])
    rows = np.stack([val.window(i) for i in range(min(windows, val.count))])
    rows = torch.from_numpy(rows).to(device)
    return Subject(Path(path), config, load(path).to(device), tokenizer, val, rows, tau)


# -- Tokens ----------------------------------------------------------------------------------------


@dataclass
class Measured:
    x: torch.Tensor
    y: torch.Tensor
    steps: torch.Tensor
    s: torch.Tensor
    w: torch.Tensor
    ce: torch.Tensor
    raw_ce: torch.Tensor

    @property
    def difficulty(self):
        """l_t of section 4.3: the loss of h_t^(0) alone. CE_0 renormalised is the same."""
        return self.ce[:, 0]


@torch.no_grad()
def measure(subject, label="tokens"):
    """What each token costs and takes -> Measured, on the CPU.

    All K steps run, with soft masks, so that CE_i is known beyond the step where a token stops;
    `steps` is where its mask score says to stop.
    """
    model, batches = subject.model, []
    for x, y in subject.batches(label):
        h, s, log_w = model.states(x)
        depths = range(s.size(-1))
        ce, raw_ce = (
            torch.stack([model.token_losses(truncate(h, s, i, norm), y) for i in depths], dim=-1)
            for norm in (True, False)
        )
        steps = model.executed(log_w, subject.tau)
        batch = Measured(x, y, steps, s, log_w.exp(), ce, raw_ce)
        batches.append([getattr(batch, field.name).flatten(0, 1).cpu() for field in fields(batch)])
    return Measured(*map(torch.cat, zip(*batches, strict=True)))


@torch.no_grad()
def decoded(subject, tau, alpha=0.0, dtype=torch.float32, label="tokens"):
    """Loss and executed steps of each token as decoding has them: hard-stopped at tau -> (n,) each.

    In bfloat16 rounding keeps the iteration moving by 3e-3 a pass, which sets its tolerance.
    """
    model, losses, executed = subject.model, [], []
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for x, y in subject.batches(label):
        with autocast(x.device, dtype):
            found = settle(model, x, tau, alpha, tolerance=tolerance)
            h_hat = model.integrate(found.h, found.s, found.steps)
            losses.append(model.token_losses(h_hat, y).flatten().cpu())
        executed.append(found.steps.flatten().cpu())
    return torch.cat(losses), torch.cat(executed)


def mean(values):
    """The mean of a tensor as a number; None of nothing."""
    return values.double().mean().item() if len(values) else None


# -- Easy and hard tokens (section 4.3) ------------------------------------------------------------


def thirds(difficulty):
    """Bucket 0 (easy), 1 or 2 (hard) of each token: three equal parts by rank. (n,) -> (n,)."""
    rank = torch.empty_like(difficulty, dtype=torch.long)
    rank[difficulty.argsort(stable=True)] = torch.arange(len(difficulty))
    return rank * 3 // max(len(difficulty), 1)


@torch.no_grad()
def reference_losses(subject, path):
    """The loss of each token by another model, on the same windows -> (n,).

    Raises:
        ValueError: it is no vanilla model, or was trained on another text or with other windows.
    """
    if (label := read_config(path).label) != "vanilla":
        raise ValueError(f"--reference {path} is of method {label}: it has to be a vanilla model")
    config, _, _ = validation_windows(path)
    mine, other = subject.config, load(path).to(subject.rows.device)
    same = (config.data, config.tokenizer, config.model.block_size)
    if same != (mine.data, mine.tokenizer, mine.model.block_size):
        raise ValueError(f"{path} and {subject.path} differ in corpus, tokenizer or window")
    batches = [
        other.token_losses(other.integrate(*other.states(x)[:2]), y).flatten().cpu()
        for x, y in subject.batches("the other model")
    ]
    return torch.cat(batches)


def bucket_rows(measured, difficulties):
    """Marginal utility of each step in each bucket, {name: difficulty (n,)} -> rows.

    Bucketing by the loss of h^(0) itself, which also enters Delta CE_1, regresses to the mean:
    a token that h^(0) got wrong by chance counts as hard, and any step seems to help it. By
    another model's loss it does not.
    """
    rows, K = [], measured.ce.size(-1) - 1
    for name, difficulty in difficulties.items():
        for b, bucket in enumerate(BUCKETS):
            mine = thirds(difficulty) == b
            row = {"difficulty_by": name, "bucket": bucket, "tokens": int(mine.sum())}
            row |= {"difficulty": mean(difficulty[mine]), "steps": mean(measured.steps[mine])}
            for form, ce in (("", measured.ce[mine]), ("raw_", measured.raw_ce[mine])):
                row |= {f"{form}ce_{i}": mean(ce[:, i]) for i in range(K + 1)}
                row |= {f"{form}gain_{i}": mean(ce[:, i - 1] - ce[:, i]) for i in range(1, K + 1)}
            rows.append(row)
    return rows


def difficulty_rows(measured, difficulties):
    """How difficult are the tokens that stop after k steps? {name: difficulty (n,)} -> rows."""
    rows = []
    for name, difficulty in difficulties.items():
        for k in range(measured.ce.size(-1)):
            mine = measured.steps == k
            row = {"difficulty_by": name, "steps": k, "tokens": int(mine.sum())}
            rows.append(row | {"difficulty": mean(difficulty[mine])})
    return rows


def shift_rows(subject, difficulties, alphas):
    """Loss and steps of easy and hard tokens with the router shifted by each alpha -> rows."""
    for alpha in alphas:
        if not abs(alpha) <= 1e6:
            raise ValueError(f"alpha = {alpha} must be finite, and at most a million")
    measured = {
        alpha: decoded(subject, subject.tau, alpha, label=f"alpha {alpha:g}")
        for alpha in dict.fromkeys((0, *alphas))
    }
    rows = []
    for name, difficulty in difficulties.items():
        buckets = thirds(difficulty)
        for alpha in sorted(measured):
            loss, steps = measured[alpha]
            for b, bucket in enumerate(BUCKETS):
                mine = buckets == b
                change = mean((loss - measured[0][0])[mine])
                row = {"difficulty_by": name, "bucket": bucket, "alpha": alpha}
                row |= {"tokens": int(mine.sum()), "steps": mean(steps[mine])}
                rows.append(row | {"all_steps": mean(steps), "loss_change": change})
    return rows


# -- Where to stop (section 3.3) -------------------------------------------------------------------


def tau_rows(subject, taus):
    """Loss and executed steps hard-stopped at each tau; and how far bfloat16 moves them -> rows.

    change is the difference of the mean loss to that of all K steps in float32, moved the mean over
    tokens of the absolute difference.
    """
    check_taus(taus)
    full, _ = decoded(subject, 0.0, label="tau 0")
    rows = []
    for tau, dtype in [*((t, torch.float32) for t in sorted(taus)), (subject.tau, torch.bfloat16)]:
        base = full if dtype == torch.float32 else decoded(subject, tau)[0]
        loss, steps = decoded(subject, tau, dtype=dtype, label=f"tau {tau:g}")
        row = {"tau": tau, "precision": str(dtype)[6:], "loss": mean(loss)}
        row |= {"perplexity": math.exp(row["loss"]), "steps": mean(steps)}
        rows.append(row | {"change": mean(loss - base), "moved": mean((loss - base).abs())})
    return rows


# -- Known difficulty (hops.py) --------------------------------------------------------------------


@torch.no_grad()
def answers(subject):
    """Of each token that takes a known number of lookups: hops, whether the next token is predicted
    (the most probable one), and the executed steps -> (n,) each, decoded at tau."""
    model, found = subject.model, []
    for x, y in subject.batches("answers"):
        settled = settle(model, x, subject.tau, tolerance=1e-4)
        h_hat = model.integrate(settled.h, settled.s, settled.steps)
        right = model.lm_head(h_hat).argmax(-1) == y
        asked = hops_asked(x, subject.tokenizer)
        found.append([values[asked >= 0].cpu() for values in (asked, right, settled.steps)])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


# -- The penalty's ratio (section 3.4.2) -----------------------------------------------------------


def penalty_rows(measured, T, batch_size):
    """rho and how many w it penalises by both readings, of each batch of a training step -> rows.

    Reading note 2: 'token' is the mean of the sigmoids, 'batch' that of the mean, as printed.
    """
    rows, n = [], min(T * batch_size, len(measured.x))
    for b, (ce, w) in enumerate(zip(measured.raw_ce.split(n), measured.w.split(n), strict=True)):
        if len(ce) < n:
            continue  # the rest of the windows makes no whole batch
        found = {form: bottom_mass_penalty(w.log(), ce, form) for form in ("token", "batch")}
        for i in range(ce.size(-1)):
            row = {"batch": b, "depth": i, "tokens": n, "ce": mean(ce[:, i])}
            for form, (_, rho) in found.items():
                more = max((rho[i] - rho[i - 1]).item(), 0) if i else 0
                row |= {f"rho_{form}": rho[i].item(), f"count_{form}": math.floor(more * n)}
            rows.append(row)
    return rows
