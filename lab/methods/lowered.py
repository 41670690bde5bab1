"""PonderLM-2 whose K is lowered to 1 during training, by a fixed schedule: the control for annealing, which
needs no router."""

from collections import Counter
from dataclasses import replace

from lab.methods import PonderConfig
from lab.methods.grid import FixedGrid
from lab.methods.schedule import Scheduled
from model import Count, validated_dataclass


@validated_dataclass
class LoweredConfig(PonderConfig):
    stage: Count = 1000  # training steps after which the number of extra steps is lowered by one


class Lowering(Scheduled):
    """A model of fixed depth, whose depth falls during training. It precedes FixedGrid or PonderLM2 among the
    bases.

    `config.ponder_steps` always is the present K. So config.json holds the K of the last training step, with
    which the model decodes. A training that is resumed is built from train.json, which holds the first K.
    """

    Config = LoweredConfig
    last = 1  # extra steps of the last stage, which has no end

    def __init__(self, config):
        super().__init__(config)
        self.first = config.ponder_steps  # K in the first stage

    def follow(self, step):
        self.config.ponder_steps = self.extra_steps(self.config, self.first, step)

    @classmethod
    def extra_steps(kind, config, first, step):
        """How many extra steps a token takes in training step `step`, if it takes `first` in the first
        stage."""
        return max(kind.last, first - step // config.stage)

    @classmethod
    def training_forwards(kind, config, steps, training_steps):
        stages = Counter(
            kind.extra_steps(config, config.ponder_steps, step) for step in range(training_steps)
        )
        total = 0.0
        for K, count in stages.items():  # `count` training steps have K extra steps
            at_depth = replace(config, ponder_steps=K)
            total += count * super().training_forwards(at_depth, steps, training_steps)
        return total / training_steps


class Lowered(Lowering, FixedGrid):
    method = "lowered"
    title = "PonderLM-2 with K lowered, grid"
