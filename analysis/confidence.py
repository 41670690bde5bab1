"""Stopping where a state looks sure enough, trained for nothing: what does the router buy over it?

rule           a token stops after step k < K when
router         w_{k+1} < c: as decoding has it, c = tau (PonderLM-3 alone)
probability    the largest probability of the next token, by what has been computed so far, is >= c
change         |h^(k) - h^(k-1)| <= c |h^(k)|, k >= 1

The keys of the steps that do not run are not there, as in decoding. PonderLM-2 predicts by the last
state that ran, PonderLM-3 by s_k h^(k) up to there. `probability` takes a product with the head for
each step, which is not counted; `router` and `change` take none.
"""

import torch
import torch.nn.functional as F

from analysis.comparing import method_of, over_seeds
from analysis.tables import LINES, MARKERS, new_figure, save_figure, tabulate
from attention import MASKED
from interop import load
from router import upcast
from runtime import UserError, pick_device, progress
from training.config import validation_windows
from training.validation import evaluate, reported

TAU = 1e-30  # below any w that is not hidden


def probability(model, h, s, k, c):
    """h (B, T, n, D), s (B, T, S) -> (B, T) of bool: does a token stop after step k?"""
    so_far = model.integrate(h[:, :, : k + 1], s[..., : k + 1]) if s is not None else h[:, :, k]
    return upcast(model.lm_head(so_far)).softmax(-1).amax(-1) >= c


def change(model, h, s, k, c):
    """As `probability`."""
    if not k:
        return torch.zeros_like(h[:, :, 0, 0], dtype=torch.bool)
    return (h[:, :, k] - h[:, :, k - 1]).norm(dim=-1) <= c * h[:, :, k].norm(dim=-1)


RULES = {"probability": probability, "change": change}


def stop_by(model, rule, c):
    """A PonderLM-2 or -3 that stops by a rule from here on, wherever its states are computed with
    tau = TAU: `route` hides what a sure token does not run."""
    route, learned, K = model.route, model.has_router, model.config.ponder_steps

    def stopping(h, alpha=0.0):
        s, log_w = route(h, alpha)
        known = min(h.size(2), K)
        sure = [RULES[rule](model, h, s if learned else None, k, c) for k in range(known)]
        ended = torch.stack(sure, dim=-1).cummax(-1).values  # after step 0, 1, ..
        ended = F.pad(ended, (1, K - known))  # step 0 always runs
        log_w = log_w.masked_fill(ended, MASKED)
        if not learned:
            s = F.one_hot(model.executed(log_w, TAU), K + 1).to(s.dtype)
        return s, log_w

    model.route, model.has_router = stopping, True
    return model


def confidence_rows(runs, thresholds, windows, device):
    """One row for each method, K, rule and threshold c: executed steps and loss.

    Args:
        thresholds: {rule: the c to try}
        windows: of the validation text, the first ones

    Raises:
        UserError: a run of another method.
    """
    for run in runs:
        if run.shape.method not in ("ponderlm2", "ponderlm3"):
            raise UserError(
                f"{run.path}: method {run.shape.method}; give PonderLM-2 and PonderLM-3"
            )
    left = progress(total=len(runs), desc="runs")

    def measure(run):
        _, _, val = validation_windows(run.path)
        count, found = min(windows, reported(run.config, val)), []
        for rule, cs in thresholds.items():
            if rule == "router" and not run.method.has_router:
                continue
            for c in cs:
                model = load(run.path).to(device)
                if rule != "router":
                    stop_by(model, rule, c)
                hard = evaluate(model, val, count, device, tau=c if rule == "router" else TAU)
                found.append({"rule": rule, "c": c, "steps": hard["steps"], "loss": hard["loss"]})
        left.update()
        return found

    frame = over_seeds(runs, measure, by=["rule", "c"])
    left.close()
    return frame


def confidence_table(frame):
    columns = {"method": "method", "K": "K:.0f", "rule": "rule", "c": "c:g", "seeds": "seeds:.0f"}
    return tabulate(frame, columns | {"extra steps": "steps:.2f", "loss": "loss:.4f"})


def draw_confidence(study):
    thresholds = {"router": study.taus, "probability": study.probabilities, "change": study.changes}

    def rows(runs):
        return confidence_rows(runs, thresholds, study.windows, pick_device(study.device))

    frame = study.frame("confidence", confidence_table, rows)
    figure, panels = new_figure("executed extra steps per token", "loss per token, nats", panels=2)
    curves = frame.groupby(["method", "K", "rule"], sort=False)
    for i, ((name, K, rule), curve) in enumerate(curves):
        curve = curve.sort_values("steps")
        for axes in panels:
            (line,) = axes.plot(
                curve.steps, curve.loss, color=method_of(name).color, linewidth=1.2,
                marker=MARKERS[i % len(MARKERS)], linestyle=LINES[i % len(LINES)],
            )  # fmt: skip
        line.set_label(f"{name}, K = {K}: {rule}")
    lowest = frame.loss.min()
    panels[1].set(title="near the lowest loss", ylim=(lowest - 0.005, lowest + 0.05))
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    save_figure(figure, study.out / "confidence.png")
