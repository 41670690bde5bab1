"""What a model costs, in the paper's unit. Slots that run in training: a method's `training_forwards`."""

import torch

from lab.methods import build


def parameters(config):
    """How many a model of this config has, those of the embedding table, too."""
    with torch.device("meta"):  # shapes only, no memory
        model = build(config)
    return sum(p.numel() for p in model.parameters())


def paper_flops(config, steps):
    """FLOPs of a token as the paper counts them (section 4.2): 6 N (1 + steps), with N parameters.

    `steps` are those executed beyond the first computation, a mean over tokens (for MoR: mean depth - 1). 6 N
    is what a token costs in training; decoding takes 2 N.
    """
    return 6 * parameters(config) * (1 + steps)
