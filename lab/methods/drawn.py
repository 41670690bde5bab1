"""Tokens whose depth is drawn: what could deciding gain, and can h^(0) be kept able to predict?

In training, a fraction of the tokens does not take as many steps as the router says, but a random number from
0 to K. If this fraction is 1 to the end of training, the model predicts well at every depth, and
lab/figures/depth.py can then give each token any number of steps. If the fraction falls to 0, the router
decides between depths all of which can predict.
"""

import zlib

import torch
import torch.nn.functional as F

from attention import LOG_W_HIDDEN
from lab.methods.ablation import ByProbability, PriceConfig
from lab.methods.grid import Grid
from lab.methods.schedule import Scheduled
from lab.methods.shared import SharedDepth
from model import Count, Fraction, NonNegative, validated_dataclass


@validated_dataclass
class DrawnConfig(PriceConfig):
    # share of --step-price charged on the router's expected number of steps, w_1 + .. + w_K; the rest is
    # charged on the steps that decoding would execute
    by_probability: Fraction = 0.0
    drawn: Fraction = 0.5  # fraction of the tokens that take a random number of steps in training
    # training step by which --drawn has fallen linearly to 0; None: it stays constant
    drawn_until: Count | None = None
    # weight of the entropy of the step distribution, a term that is subtracted from the loss
    entropy: NonNegative = 0.0


def imposed(steps, s, log_w):
    """The step distribution and the log of the mask scores of tokens that take a fixed number of steps.

    Args:
        steps: (B, T), the numbers of steps.
        s, log_w: (B, T, S) of the router, of which only the shapes and dtypes are used.

    Returns:
        s and log_w, (B, T, S) each.
    """
    k = torch.arange(s.size(-1), device=s.device)
    visible = torch.zeros_like(log_w).masked_fill(k > steps[..., None], LOG_W_HIDDEN)
    return F.one_hot(steps, s.size(-1)).to(s.dtype), visible


def draw(windows, step, S):
    """Draw a depth and a uniform random number for each token.

    The seed depends only on the training step and on the tokens of the window. So a window's draws are the
    same, however a batch is split into micro-batches or among processes.

    Args:
        windows: (B, T) tokens.
        step: the training step.
        S: how many depths there are.

    Returns:
        (B, T) depths in 0 .. S-1, and (B, T) random numbers in [0, 1).
    """
    depths = []
    uniform = []
    for window in windows.cpu().numpy():
        generator = torch.Generator().manual_seed(zlib.crc32(window.tobytes(), step))
        depths.append(torch.randint(S, window.shape, generator=generator))
        uniform.append(torch.rand(window.shape, generator=generator))
    return torch.stack(depths).to(windows.device), torch.stack(uniform).to(windows.device)


class Drawn(Scheduled, ByProbability, Grid):
    method = "drawn"
    title = "PonderLM-3 of drawn depth, grid"
    Config = DrawnConfig
    # The inputs of the micro-batch, (B, T), while `objective` runs; None otherwise, and then no depth is
    # drawn.
    windows = None

    def route(self, h, alpha=0.0):
        s, log_w = super().route(h, alpha)  # (B, T, S)
        if self.windows is None:
            return s, log_w
        steps, uniform = draw(self.windows, int(self.seen), s.size(-1))
        is_drawn = uniform[..., None] < self.fraction_drawn()  # (B, T, 1)
        imposed_s, imposed_log_w = imposed(steps, s, log_w)
        return torch.where(is_drawn, imposed_s, s), torch.where(is_drawn, imposed_log_w, log_w)

    def fraction_drawn(self):
        """The fraction of the tokens whose depth is drawn in this training step."""
        end = self.config.drawn_until
        if end is None:
            return self.config.drawn
        return self.config.drawn * max(0.0, 1 - float(self.seen) / end)

    def objective(self, x, y, R, price=0.0):
        self.windows = x
        loss, penalty, out = super().objective(x, y, R, price)
        self.windows = None
        if self.config.entropy > 0:
            s = out.s.clamp(min=torch.finfo(out.s.dtype).tiny)  # the gradient of entr is infinite at 0
            loss = loss - self.config.entropy * torch.special.entr(s).sum(-1).mean()
        return loss, penalty, out


class DrawnShared(SharedDepth, Drawn):
    method = "drawn-shared"
    title = "shared depth, drawn, grid"
