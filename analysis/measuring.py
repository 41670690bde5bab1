"""One trained PonderLM, token by token: what each token costs and gains, and statistics over them.

code         paper         shape           meaning
x, y                       (n,)            the tokens that are read, and those that follow them
steps        K-hat         (n,)            steps executed after reading x, at tau
s, w         s, w          (n, K+1)        step distribution and mask score
ce           CE_i          (n, K+1)        loss, integration truncated after step i, renormalised
difficulty   l_t           (n,)            loss before any additional computation
gain         Delta CE_i    (n, K)          CE_{i-1} - CE_i, the marginal utility of step i

n counts the tokens of all windows. Losses are in nats, in float32, at the fixed point. Statistics
are pandas frames, one row for each line of a table; the mean of nothing is NaN.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from corpus.preparation import Windows
from corpus.tokenizers import Tokenizer
from engine.prefill import stopped_states
from interop import load
from model import PonderLM
from runtime import UserError, progress
from training.config import validation_windows
from training.runs import read_results
from training.validation import truncate

BATCH = 32  # windows at a time
BUCKETS = ("easy", "medium", "hard")


@dataclass
class Subject:
    """A trained model and the validation windows that it is measured on."""

    path: Path
    model: PonderLM
    tokenizer: Tokenizer
    val: Windows
    rows: torch.Tensor  # (windows, T+1) token ids
    tau: float

    def batches(self):
        """Inputs and targets (B, T) of the windows, with a progress bar."""
        for rows in progress(self.rows.split(BATCH), desc="windows", leave=False):
            yield rows[:, :-1], rows[:, 1:]


def open_subject(path, windows=256, tau=None, device="cpu", data=None):
    """A run's model with the first `windows` of its validation windows.

    Args:
        tau: None: where the run was scored.
        data: a prepared corpus whose windows take the place of its own.

    Raises:
        UserError: there is no run, or its corpus has changed.
    """
    config, tokenizer, val = validation_windows(path, data)
    tau = config.tau if tau is None else tau
    rows = np.stack([val.window(i) for i in range(min(windows, val.count))])
    rows = torch.from_numpy(rows).to(device)
    return Subject(Path(path), load(path).to(device), tokenizer, val, rows, tau)


# -- Tokens ----------------------------------------------------------------------------------------


class Measured(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    steps: torch.Tensor
    s: torch.Tensor
    w: torch.Tensor
    ce: torch.Tensor

    @property
    def difficulty(self):
        """l_t of section 4.3: the loss of h_t^(0) alone. CE_0 renormalised is the same."""
        return self.ce[:, 0]


@torch.no_grad()
def measure(subject):
    """What each token costs and takes -> Measured, on the CPU.

    All K steps run, with soft masks, so that CE_i is known beyond the step where a token stops;
    `steps` is where its mask score says to stop.
    """
    model, batches = subject.model, []
    for x, y in subject.batches():
        # Of the iteration's default tolerance the mean keeps nothing, a single token 0.01 nats.
        h, s, log_w = model.fixed_point(x, tolerance=1e-6)
        ce = [model.cross_entropy(truncate(h, s, i), y) for i in range(s.size(-1))]
        steps = model.executed(log_w, subject.tau)
        batch = (x, y, steps, s, log_w.exp(), torch.stack(ce, dim=-1))
        batches.append([values.flatten(0, 1).cpu() for values in batch])
    return Measured(*map(torch.cat, zip(*batches, strict=True)))


@torch.no_grad()
def stopped(subject, tau, alpha=0.0):
    """The windows as decoding has them, hard-stopped at tau: x, y, h_hat and the executed steps."""
    model = subject.model
    for x, y in subject.batches():
        h, s, steps = stopped_states(model, x, tau, alpha)
        yield x, y, model.integrate(h, s, steps), steps


@torch.no_grad()
def decoded(subject, tau, alpha=0.0):
    """Loss and executed steps of each token, by the arguments of `stopped` -> (n,) each."""
    losses, executed = [], []
    for _, y, h_hat, steps in stopped(subject, tau, alpha):
        losses.append(subject.model.cross_entropy(h_hat, y).flatten().cpu())
        executed.append(steps.flatten().cpu())
    return torch.cat(losses), torch.cat(executed)


def mean(values):
    """The mean of a tensor as a number, in float64."""
    return values.double().mean().item()


# -- Easy and hard tokens (section 4.3) ------------------------------------------------------------


def thirds(difficulty):
    """The bucket of each token: three equal parts by rank. (n,) -> pandas.Categorical (n,)."""
    rank = pd.Series(difficulty.numpy()).rank(method="first") - 1
    thirds = (rank * len(BUCKETS) // max(len(rank), 1)).astype(int)
    return pd.Categorical.from_codes(thirds, BUCKETS)


def means(tokens, by):
    """How many rows of a frame have each value of `by`, and the mean of each column over them.

    `by` (n,) is a Categorical; a category without rows has NaN.
    """
    groups = tokens.groupby(by, observed=False)
    frame = groups.mean()
    frame.insert(0, "tokens", groups.size())
    return frame


def by_each(difficulties, rows):
    """What `rows` makes of each difficulty of {name: (n,)}: one frame of all."""
    frames = {name: rows(difficulty) for name, difficulty in difficulties.items()}
    return pd.concat(frames, names=["difficulty_by"]).reset_index()


def reference_losses(subject, path):
    """The loss of each token by another model, on the same windows -> (n,).

    Raises:
        UserError: its text, tokenizer or windows are others.
    """
    other = open_subject(path, len(subject.rows), device=subject.rows.device)
    if not torch.equal(other.rows, subject.rows):
        raise UserError(f"{path} and {subject.path} differ in corpus, tokenizer or window")
    return decoded(other, other.tau)[0]


def bucket_rows(measured, difficulty):
    """Marginal utility of each step in each bucket of a difficulty (n,) -> frame.

    Bucketing by the loss of h^(0) itself, which also enters Delta CE_1, regresses to the mean:
    a token that h^(0) got wrong by chance counts as hard, and any step seems to help it. By
    another model's loss it does not.
    """
    ce = measured.ce.double().T  # (K+1, n)
    columns = {"difficulty": difficulty.double(), "steps": measured.steps}
    columns |= {f"ce_{i}": loss for i, loss in enumerate(ce)}
    columns |= {f"gain_{i}": ce[i - 1] - ce[i] for i in range(1, len(ce))}
    return means(pd.DataFrame(columns), thirds(difficulty)).rename_axis("bucket")


def difficulty_rows(measured, difficulty):
    """How difficult are the tokens that stop after k steps? By a difficulty (n,) -> frame."""
    steps = pd.Categorical(measured.steps.numpy(), categories=range(measured.ce.size(-1)))
    return means(pd.DataFrame({"difficulty": difficulty.double()}), steps).rename_axis("steps")


def shifted(subject, alphas):
    """Loss and steps of each token with the router shifted by 0 and by each alpha, {alpha: ..}."""
    return {alpha: decoded(subject, subject.tau, alpha) for alpha in sorted({0, *alphas})}


def shift_rows(found, difficulty):
    """Loss and steps of easy and hard tokens (n,) as `shifted` found them -> frame."""
    frames, (base, _) = {}, found[0]
    for alpha, (loss, steps) in found.items():
        tokens = pd.DataFrame({"steps": steps, "loss_change": (loss - base).double()})
        frames[alpha] = means(tokens, thirds(difficulty)).assign(all_steps=mean(steps))
    return pd.concat(frames, names=["alpha", "bucket"])


# -- Where to stop (section 3.3) -------------------------------------------------------------------


def tau_rows(subject, taus):
    """Loss and executed steps hard-stopped at each tau -> rows.

    change is the difference of the mean loss to that of all K steps, moved the mean over tokens of
    the absolute difference, chosen 1 at the tau that the training chose by its cost.
    """
    results = read_results(subject.path) if (subject.path / "results.json").exists() else {}
    chosen = (results.get("chosen") or {}).get("tau")  # None of a checkpoint
    full, _ = decoded(subject, 0.0)
    rows = []
    for tau in sorted({*taus, chosen} - {None}):
        loss, steps = decoded(subject, tau)
        row = {"tau": tau, "loss": mean(loss), "perplexity": math.exp(mean(loss))}
        row |= {"steps": mean(steps), "change": mean(loss - full)}
        rows.append(row | {"moved": mean((loss - full).abs()), "chosen": int(tau == chosen)})
    return rows
