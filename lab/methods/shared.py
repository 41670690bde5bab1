"""The control of deciding: PonderLM-3 that learns one s for all tokens, since its router reads a constant.

It may lower its steps during the training, as PonderLM-3 does, but not tell one token from another.
"""

import torch

from lab.methods import PonderLM3
from lab.methods.grid import Grid


class OneForAll:
    """What both forms share, before PonderLM3 or Grid in the order of bases."""

    def route(self, h, alpha=0.0):
        return super().route(torch.ones_like(h), alpha)  # of the RMS of a normed state


class Shared(OneForAll, PonderLM3):
    method, title = "shared", "one s for all"


class SharedGrid(OneForAll, Grid):
    method, title = "shared-grid", "one s for all, grid"
