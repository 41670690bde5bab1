"""How fast the Jacobi iteration converges (appendix C): distance to the fixed point, by pass."""

import math
from copy import deepcopy
from itertools import islice

import numpy as np
import torch

from runtime import progress


def rmse(a, b):
    """Root-mean-square difference within each token, (B, T, ..) -> its mean over tokens."""
    return (a - b).square().flatten(2).mean(-1).sqrt().mean().item()


def refinements(model, idx):
    """n, the latents (B, T, K, D) and s (B, T, S) after n refinements, without end.

    n = 0 is the ladder's last pass, the first that makes latents of all K slots.
    """
    K = model.config.ponder_steps
    passes = enumerate(model.iterate(model.embed(idx), None, 0.0), start=1 - K)
    return ((n, h[:, :, :K], s) for n, (_, (h, s, _)) in passes if n >= 0)


@torch.no_grad()
def convergence_rows(model, idx, most=12):
    """RMSE to the fixed point after n = 0 .. `most` refinements of the ladder's latents.

    In float64; the fixed point is where the iteration stands still, which it does after K (T-1)
    refinements at the latest. -> rows {refinements, latents, router}.
    """
    model, K = deepcopy(model).double(), model.config.ponder_steps
    fixed = None
    for n, latents, s in progress(refinements(model, idx), desc="fixed point", leave=False):
        before, fixed, fixed_s = fixed, latents, s
        if (n and (fixed - before).norm() <= 1e-14 * fixed.norm()) or n >= K * (idx.size(1) - 1):
            break
    return [  # the iteration again, so that few of its states are kept in memory
        {"refinements": n, "latents": rmse(latents, fixed), "router": rmse(s, fixed_s)}
        for n, latents, s in islice(refinements(model, idx), most + 1)
    ]


def exponential_fit(n, errors):
    """errors = A L^n by least squares on log(errors) -> L, A and R^2 of the logarithms.

    Errors below 1e-12 of the largest, which rounding makes, are left out.
    """
    n, errors = np.array(n, dtype=float), np.array(errors, dtype=float)
    kept = errors > 1e-12 * errors.max()
    if kept.sum() < 2:  # an s that nobody learned has no errors
        return math.nan, math.nan, math.nan
    x, y = n[kept], np.log(errors[kept])
    slope, intercept = np.polyfit(x, y, 1)
    r2 = 1 - ((y - slope * x - intercept) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    return math.exp(slope), math.exp(intercept), float(r2)
