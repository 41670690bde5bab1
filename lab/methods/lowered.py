"""PonderLM-2 on the grid with K lowered during the training, to 1: the control of annealing by hand."""

import torch

from lab.methods import PonderConfig
from lab.methods.grid import FixedGrid
from model import Count, settings


@settings
class LoweredConfig(PonderConfig):
    stage: Count = 1000  # micro-batches of training with each K


class Lowered(FixedGrid):
    method, title = "lowered", "PonderLM-2 with K lowered, grid"
    Config = LoweredConfig

    def __init__(self, config):
        super().__init__(config)
        self.first = config.ponder_steps
        self.register_buffer("seen", torch.zeros(1))  # micro-batches; a resumed training goes on with it

    def objective(self, x, y, R, price=0.0):
        self.config.ponder_steps = max(1, self.first - int(self.seen) // self.config.stage)
        self.seen += 1
        return super().objective(x, y, R)
