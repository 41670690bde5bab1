"""Shared depth, the control for deciding token by token: PonderLM-3 whose router reads a constant.

The router learns one s, and so one number of steps, for all tokens. During training this number may fall, as
PonderLM-3's does, but the router cannot tell one token from another.
"""

import torch

from lab.methods import PonderLM3
from lab.methods.grid import Grid


class SharedDepth:
    """What both methods share. It precedes PonderLM3 or Grid among the bases."""

    def route(self, h, alpha=0.0):
        return super().route(torch.ones_like(h), alpha)  # ones have the RMS of a normed state


class Shared(SharedDepth, PonderLM3):
    method = "shared"
    title = "shared depth"


class SharedGrid(SharedDepth, Grid):
    method = "shared-grid"
    title = "shared depth, grid"
