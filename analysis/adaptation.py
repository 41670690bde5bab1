"""Do steps go where they are needed, and do different trainings agree where that is?

word           meaning
tau            where each run stops: chosen by cost at its end, or the same for all
permuted       what it costs to give each token the step distribution of another one, nats
outside loss   of each token, by the run without pondering that has the same seed: its difficulty
easy .. hard   thirds of the tokens by outside loss; the mean of their executed steps
correlation    Spearman's, over tokens, of outside loss with executed steps K-hat, and with the
               steps that s expects, w_1 + .. + w_K, which has few ties
agreement      the same of two seeds' K-hat, and of their expectations; mean over pairs of seeds
"""

from itertools import combinations

import numpy as np
import pandas as pd
import torch

from analysis.comparing import group_runs, over_seeds
from analysis.measuring import BUCKETS, open_subject, thirds
from runtime import UserError, pick_device, progress
from training.validation import evaluate

WHAT = ("steps", "expected")


@torch.no_grad()
def token_columns(run, tau, device):
    """Of each token of the reported windows: loss, executed and expected steps, at tau -> frame."""
    subject = open_subject(run.path, None, tau, device, needs="")
    model, found = subject.model, []
    for x, y in subject.batches(run.path.name):
        h, s, log_w = model.states(x, tau=tau if model.has_router else None)
        steps = model.executed(log_w, tau)
        loss = model.token_losses(model.integrate(h, s, steps), y)
        columns = torch.stack([loss, steps.to(loss.dtype), log_w[..., 1:].exp().sum(-1)])
        found.append(columns.flatten(1).cpu())
    return pd.DataFrame(dict(zip(("loss", *WHAT), torch.cat(found, dim=1).numpy(), strict=True)))


def correlation(a, b):
    """Spearman's: of ranks, equal values sharing theirs. nan where one of them never changes."""
    return pd.DataFrame({"a": a, "b": b}).rank().corr().loc["a", "b"]


def adaptation_rows(runs, tau, device):
    """One row for each method with a router and K, over the seeds.

    Args:
        tau: None: the one that each run chose.

    Raises:
        UserError: no run with a router, one that chose no tau, or a seed without vanilla.
    """
    learned = [run for run in runs if run.method.has_router]
    plain = {run.config.seed: run for run in runs if run.shape.method == "vanilla"}
    if not learned:
        raise UserError("none of the runs has a learned router: give some of PonderLM-3")
    for run in learned:
        if run.config.seed not in plain:
            raise UserError(f"{run.path}: no vanilla run of seed {run.config.seed} is given")
        if tau is None and not run.results.get("chosen"):
            raise UserError(f"{run.path} chose no tau when it was trained: give --tau")
    taus = {run.path: run.results["chosen"]["tau"] if tau is None else tau for run in learned}
    wanted = [*learned, *plain.values()]
    tokens = {
        run.path: token_columns(run, taus.get(run.path, 1.0), device)
        for run in progress(wanted, desc="runs")
    }

    def numbers(run):
        mine, outside = tokens[run.path], tokens[plain[run.config.seed].path].loss
        subject = open_subject(run.path, None, taus[run.path], device)
        args = subject.model, subject.val, len(subject.rows), device
        permuted = evaluate(*args, tau=subject.tau, permute=True)["loss"]
        by_third = mine.steps.groupby(np.asarray(thirds(torch.tensor(outside.to_numpy())))).mean()
        return [
            {"tau": taus[run.path], "steps": mine.steps.mean(), "loss": mine.loss.mean()}
            | {"permuted": permuted - mine.loss.mean()}
            | {bucket: by_third[bucket] for bucket in BUCKETS}
            | {f"{what}_difficulty": correlation(mine[what], outside) for what in WHAT}
        ]

    frame = over_seeds(learned, numbers)
    for what in WHAT:
        column = f"{what}_agreement"
        pairs = [
            [correlation(tokens[a.path][what], tokens[b.path][what]) for a, b in pairs]
            for pairs in (list(combinations(group, 2)) for group in group_runs(learned).values())
        ]
        frame[column] = [np.mean(row) if row else np.nan for row in pairs]
    return frame


def write_adaptation(study):
    columns = {"method": "method", "K": "K:.0f", "seeds": "seeds:.0f", "τ": "tau:.3g"}
    columns |= {"extra steps": "steps:.2f", "loss": "loss:.4f", "s permuted, +": "permuted:.3f"}
    columns |= {f"steps, {bucket}": f"{bucket}:.2f" for bucket in BUCKETS}
    columns |= {"K̂ and difficulty": "steps_difficulty:.2f"}
    columns |= {"expected steps and difficulty": "expected_difficulty:.2f"}
    columns |= {"K̂ of two seeds": "steps_agreement:.2f"}
    columns |= {"expected steps of two seeds": "expected_agreement:.2f"}

    def rows(runs):
        return adaptation_rows(runs, study.tau, pick_device(study.device))

    study.frame("adaptation", columns, rows)
    print(f"written: {study.out / 'adaptation'}.csv, .md")
