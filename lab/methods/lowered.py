"""PonderLM-2 on the grid with K lowered during the training, to 1: the control of annealing by hand."""

from lab.methods import PonderConfig
from lab.methods.grid import FixedGrid
from lab.methods.schedule import Scheduled
from model import Count, settings


@settings
class LoweredConfig(PonderConfig):
    stage: Count = 1000  # training steps with each number of extra steps


class Lowered(Scheduled, FixedGrid):
    method, title = "lowered", "PonderLM-2 with K lowered, grid"
    Config = LoweredConfig
    last = 1  # extra steps of the last stage, which has no end

    def __init__(self, config):
        super().__init__(config)
        self.first = config.ponder_steps

    def follow(self, step):
        self.config.ponder_steps = self.extra_steps(self.config, self.first, step)

    @classmethod
    def extra_steps(kind, config, first, step):
        """How many extra steps a token takes in a training step, if it takes `first` in the first stage."""
        return max(kind.last, first - step // config.stage)

    @classmethod
    def training_forwards(kind, config, steps, training_steps):
        first = config.ponder_steps
        taken = [kind.extra_steps(config, first, step) for step in range(training_steps)]
        return 1 + sum(taken) / training_steps
