"""Shared depth, the control of deciding: PonderLM-3 whose router reads a constant.

It learns one s, and so one number of steps, for all tokens. During the training this number may fall, as
PonderLM-3's does, but the model cannot tell one token from another.
"""

import torch

from lab.methods import PonderLM3
from lab.methods.grid import Grid


class SharedDepth:
    """What both forms share, before PonderLM3 or Grid in the order of bases."""

    def route(self, h, alpha=0.0):
        return super().route(torch.ones_like(h), alpha)  # of the RMS of a normed state


class Shared(SharedDepth, PonderLM3):
    method, title = "shared", "shared depth"


class SharedGrid(SharedDepth, Grid):
    method, title = "shared-grid", "shared depth, grid"
