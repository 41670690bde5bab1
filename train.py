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
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist

from corpus.preparation import describe, unigram_entropy
from router import bottom_mass_penalty, expected_steps
from runtime import autocast, average_gradients, clock, command_line
from training.config import open_training, parse
from training.runs import Session
from training.validation import evaluate, final_report

FEEDBACK_RATE = 3e-3  # peak learning rate of g, which has to grow from 0 in a trained Llama


def objective(model, x, y, R):
    """The loss of one micro-batch: L = CE + lambda sum_k mean(Bottom_{d_rho_k}(w_k)), or with the
    penalty `mean` L = CE + lambda sum_k mean(w_k).

    Without a router L = CE, plus a loss of the method's own (MoR's routers) if it has one.

    Args:
        model: any method.
        x, y: (B, T) tokens, and those that follow them. R: Jacobi refinements.

    Returns:
        The loss, the penalty or the method's own loss (0 without one), and the PonderOutput, whose
        loss is CE.
    """
    out, config = model(x, y, R=R), model.config
    if out.auxiliary is not None:
        return out.loss + out.auxiliary, out.auxiliary, out
    if model.router is None or not config.penalty_weight:
        return out.loss, torch.zeros_like(out.loss), out
    if config.penalty == "mean":
        penalty = expected_steps(out.log_w)
    else:
        depths = model.partial_losses(out.h, out.s, y)  # (B, T, K): integrated up to step 0 .. K-1
        depths = torch.cat([depths, out.ce.detach()[..., None]], dim=-1)  # (B, T, K+1)
        penalty, _ = bottom_mass_penalty(out.log_w, depths, config.penalty)
    return out.loss + config.penalty_weight * penalty, penalty, out


def draw_refinements(step, config):
    """R of a step: a function of (seed, step), the same in all processes and after a resume."""
    low, high = config.model.refinements
    return int(np.random.default_rng((config.seed, step)).integers(low, high + 1))


def learning_rate(step, config, peak):
    """Linear warm-up, then a cosine from the peak to a tenth of it."""
    warmup = max(1, round(config.warmup * config.steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


def make_optimizer(model, config):
    learned = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in learned if p.dim() >= 2]
    feedback = None if model.feedback is None else model.feedback.weight  # g
    vectors = [p for p in learned if p.dim() < 2 and p is not feedback]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if feedback is not None:
        groups.append({"params": [feedback], "weight_decay": 0.0, "peak": FEEDBACK_RATE})
    fused = learned[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


def train(config):
    """Train as `config` says.

    Returns:
        The run's directory and the final evaluation, or None if the training was stopped before.
    """
    # Whatever is left open (device, precision, kernels, corpus, model) is decided behind this door.
    t = open_training(config)
    config, model, device = t.config, t.model, t.device
    optimizer = make_optimizer(model, config)
    share = config.batch_size // t.processes  # windows of this process
    micro = config.micro_batch_size or share
    results = None
    with Session(t, optimizer) as session:
        print(f"{describe(t.folder)}\n{t.windows.count:,} windows", flush=True)
        for step in session.steps():
            rows = t.windows.rows(step, share, t.rank, t.processes)
            rows = to_device(rows, device)  # (share, T+1)
            x, y = rows[:, :-1], rows[:, 1:]  # (share, T)
            R = draw_refinements(step, config)
            model.progress = step / config.steps  # for the ramp of adaponder
            logged = dict.fromkeys(("loss", "ce", "penalty", "K_hat"), 0.0)
            for xs, ys in zip(x.split(micro), y.split(micro), strict=True):
                with autocast(device, t.dtype):
                    loss, penalty, out = objective(model, xs, ys, R)
                (loss * (micro / share)).backward()
                K_hat = model.executed(out.log_w, config.tau).float().mean()
                for name, value in zip(logged, (loss, out.loss, penalty, K_hat), strict=True):
                    logged[name] += value.detach() * (micro / share)
            average_gradients(model)  # over the processes
            clip = config.clip or math.inf
            logged["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for group in optimizer.param_groups:
                peak = group.get("peak", config.learning_rate)
                group["lr"] = learning_rate(step, config, peak)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            session.log(step, logged)
            if session.is_due(step):
                count = min(64, t.val.count)
                most = max(config.model.refinements)
                loss = evaluate(model, t.val, count, device, R=most)["loss"]
                session.log_validation(step, loss, count)
                session.save(step)
        print(f"trained in {clock(session.seconds)} minutes; evaluating", flush=True)
        report = final_report(model, t.val, config, device)
        entropy = unigram_entropy(t.val.tokens, model.config.vocab_size)
        print(f"unigram entropy {entropy:.3f}")
        session.finish({**report, "unigram_entropy": entropy})
        results = report  # none, if it was stopped before
    return t.run, results


def to_device(rows, device):
    """(batch, T+1) tokens to the device, without a wait for what it is still doing."""
    pinned = device.type == "cuda"
    return (rows.pin_memory() if pinned else rows).to(device, non_blocking=pinned)


def main():
    _, results = train(parse(description=__doc__))
    if results is None:  # stopped; once more, and it ends without a word
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if dist.is_initialized():
        dist.destroy_process_group()
    if results is None:  # what a script has behind it has to wait
        sys.exit(130)


if __name__ == "__main__":
    command_line(main)
