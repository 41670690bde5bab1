"""A pondering warm-up: extra steps at the beginning of training only, then a plain transformer.

What remains of extra steps that end early? K is lowered as in lowered.py, but to 0: the last stage trains a
plain transformer, and the model decodes as one.

method           how the stages with extra steps are trained
warmup           on the grid
warmup-jacobi    by Jacobi iteration, as PonderLM-2
"""

from typing import Literal

from lab.methods.grid import FixedGrid
from lab.methods.lowered import LoweredConfig, Lowering
from lab.methods.ponderlm2 import PonderLM2
from model import validated_dataclass


@validated_dataclass
class WarmupConfig(LoweredConfig):
    # what an extra step reads: state, the output of the step before; embedding, the token's embedding again,
    # a control that computes as much and passes nothing on
    fed_back: Literal["state", "embedding"] = "state"


class WarmingUp(Lowering):
    """What both methods share. It precedes FixedGrid or PonderLM2 among the bases."""

    Config = WarmupConfig
    last = 0

    def feed_back(self, h, e):
        if self.config.fed_back == "embedding":
            return e.expand_as(h)
        return super().feed_back(h, e)


class Warmup(WarmingUp, FixedGrid):
    method = "warmup"
    title = "pondering warm-up, grid"


class WarmupJacobi(WarmingUp, PonderLM2):
    method = "warmup-jacobi"
    title = "pondering warm-up"
