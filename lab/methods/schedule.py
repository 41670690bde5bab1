"""What a method needs that changes in the course of its training, by training steps.

A training step may be one micro-batch or many, on one process or several: a model cannot count its steps by
what it computes. The optimizer steps once in each, so that its step is what is counted.
"""

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Scheduled:
    """A model that knows how many training steps it has taken: put it before PonderLM3 or FixedDepth in the
    order of bases.

    seen        (1,) training steps so far: a buffer, which checkpoints keep, so that a resumed training
                continues the schedule
    """

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("seen", torch.zeros(1))
        self.register_load_state_dict_post_hook(has_loaded)

    def follow(self, step):
        """Become what the training step `step` (0, 1, ..) trains. A method overrides this."""

    def count_step(self):
        """Note that a training step is done, and become what the next one trains."""
        self.seen += 1
        self.follow(int(self.seen))


def has_loaded(model, incompatible_keys):
    """Follow the schedule to the step that was read. A resumed training may have no step left to do."""
    model.follow(int(model.seen))


def count_steps(model):
    """Tell a Scheduled model of each step of the optimizer that trains it, whoever makes that.

    Returns:
        A handle, whose remove() ends this.
    """
    parameter = next(model.parameters())

    def after_step(optimizer, *_):
        for group in optimizer.param_groups:
            if any(other is parameter for other in group["params"]):
                model.count_step()

    return register_optimizer_step_post_hook(after_step)
