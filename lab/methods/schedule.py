"""Methods that change in the course of their training, by a schedule in training steps.

A training step may be one micro-batch or many, on one process or several, so a model cannot count training
steps by its forward passes. The optimizer steps once in each training step; these steps are counted.
"""

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Scheduled:
    """A model that knows how many training steps it has taken. It precedes PonderLM3 or FixedDepth among the
    bases.

    The model changes where a training step begins, not where one ends: so it is evaluated, saved and decoded
    as it was in the last training step.

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

    def objective(self, x, y, R, price=0.0):
        """The loss of a micro-batch, after the model has become what it is in this training step."""
        self.follow(int(self.seen))
        loss, penalty, out = super().objective(x, y, R, price)
        if self.feedback is not None and self.config.ponder_steps == 0:
            # g is not used any more, but DistributedDataParallel wants every weight to get a gradient.
            loss = loss + 0 * self.feedback.weight.sum()
        return loss, penalty, out


def has_loaded(model, incompatible_keys):
    """Where a training is resumed, make the model what it was in the last training step. In evaluation mode
    a model stays as its config.json says."""
    if model.training:
        model.follow(max(int(model.seen) - 1, 0))


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
                model.seen += 1

    return register_optimizer_step_post_hook(after_step)
