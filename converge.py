"""How fast the Jacobi iteration converges (appendix C): distance to the fixed point, by pass."""

import math
from copy import deepcopy

import numpy as np
import torch
from tqdm import tqdm


def rmse(a, b):
    """Root-mean-square difference within each token, (B, T, ..) -> its mean over tokens."""
    return (a - b).square().flatten(2).mean(-1).sqrt().mean().item()


@torch.no_grad()
def convergence_rows(model, idx, refinements=12):
    """RMSE to the fixed point after n = 0 .. `refinements` refinements of the ladder's latents.

    In float64; the fixed point is where the iteration stands still, which it does after K (T-1)
    refinements at the latest. -> rows {refinements, latents, router}.
    """
    model, K = deepcopy(model).double(), model.config.ponder_steps

    def iterates():  # the ladder's last pass is n = 0: the first that makes latents of all K slots
        for n, (h, s, _) in enumerate(model.passes(idx), start=1 - K):
            if n >= 0:
                yield n, h[:, :, :K], s

    fixed, rows = None, []
    for n, latents, s in tqdm(iterates(), desc="fixed point", leave=False):
        before, fixed, fixed_s = fixed, latents, s
        if (n and (fixed - before).norm() <= 1e-14 * fixed.norm()) or n >= K * (idx.size(1) - 1):
            break
    for n, latents, s in iterates():
        errors = {"latents": rmse(latents, fixed), "router": rmse(s, fixed_s)}
        rows.append({"refinements": n, **errors})
        if n == refinements:
            return rows


def exponential_fit(n, errors):
    """errors = A L^n by least squares on log(errors) -> L, A and R^2 of the logarithms.

    Errors below 1e-12 of the largest, which rounding makes, are left out; (None, None, None) where
    less than two are left.
    """
    floor = 1e-12 * max(errors)
    points = [(i, math.log(e)) for i, e in zip(n, errors, strict=True) if e > floor]
    if len(points) < 2:
        return None, None, None
    x, y = np.array(points, dtype=float).T
    slope, intercept = np.polyfit(x, y, 1)
    spread = ((y - y.mean()) ** 2).sum()
    r2 = 1 - ((y - slope * x - intercept) ** 2).sum() / spread if spread else 1.0
    return math.exp(slope), math.exp(intercept), float(r2)
