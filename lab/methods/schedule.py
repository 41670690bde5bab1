"""Methods that change in the course of their training, by a schedule in training steps.

A training step may be one micro-batch or many, on one process or several, so a model cannot count training
steps by its forward passes. The optimizer steps once in each training step; these steps are counted.
"""

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Scheduled:
    """A model that knows how many training steps it has taken. It precedes PonderLM3 or FixedDepth among the
    bases.

    Attributes:
        seen: (1,) training steps so far. It is a buffer, which checkpoints keep, so that a resumed training
            continues the schedule.
    """

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("seen", torch.zeros(1))
        self.register_load_state_dict_post_hook(has_loaded)

    def follow(self, step):
        """Change the model to what it is in training step `step` (0, 1, ..). A method overrides this."""

    def count_step(self):
        """Note that a training step is done, and change the model to what it is in the next one."""
        self.seen += 1
        self.follow(int(self.seen))


def has_loaded(model, incompatible_keys):
    """Follow the schedule to the training step that was loaded, where a training is resumed. It may have no
    step left, so this cannot wait for the next one. In evaluation mode a model stays as its config.json
    says."""
    if model.training:
        model.follow(int(model.seen))


def count_steps(model):
    """Let a Scheduled model count the steps of the optimizer that trains it. The caller need not have that
    optimizer: the steps of all optimizers are watched.

    Returns:
        A handle, whose remove() ends this.
    """
    parameter = next(model.parameters())

    def after_step(optimizer, *_):
        for group in optimizer.param_groups:
            if any(other is parameter for other in group["params"]):
                model.count_step()

    return register_optimizer_step_post_hook(after_step)
