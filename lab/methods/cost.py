"""What a token costs, by method: in the paper's unit, and in those it leaves out.

name                unit, per token        formula
paper_flops         FLOPs                  6 N (1 + steps): the paper's unit (section 4.2). 6 N is
                                           what a token costs in training; decoding takes 2 N.
cache_entries       keys a layer           1 + steps
training_forwards   passes of the stack    slots that run for it in all passes of a training step

N are all parameters, the embedding table's too; steps are those executed beyond the first
computation, a mean over tokens (for MoR: mean depth - 1).
"""

from dataclasses import dataclass

import torch

from lab.methods import build, find


@dataclass
class Cost:
    """Of one token; the units are in the table above."""

    parameters: int
    paper_flops: float
    cache_entries: float
    training_forwards: float


def parameters(config):
    """How many a model of this config has."""
    with torch.device("meta"):  # shapes only, no memory
        model = build(config)
    return sum(p.numel() for p in model.parameters())


def cost(config, steps):
    """The Cost of a model (PonderConfig) that executes so many extra steps a token."""
    N = parameters(config)
    return Cost(
        parameters=N,
        paper_flops=6 * N * (1 + steps),
        cache_entries=1 + steps,
        training_forwards=find(config.method).training_forwards(config, steps),
    )
