"""Tokens whose depth is drawn: what could deciding gain, and can h^(0) be kept able to predict?

In training a share of the tokens does not take the steps that its router says, but 0 .. K at random. With
`drawn` 1, to the end, the model is good at every depth, and lab/figures/depth.py gives its tokens any steps
afterwards. With a share that falls to 0 the router decides between depths that can all predict.
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
    # fraction of --step-price that is charged on the expected number of steps, w_1 + .. + w_K; the rest is
    # charged as in train.py, on the steps that decoding executes
    by_probability: Fraction = 0.0
    drawn: Fraction = 0.5  # fraction of the tokens that take a random number of steps in training
    # training step by which --drawn has fallen linearly to 0; None: it stays constant
    drawn_until: Count | None = None
    # weight of the entropy of the step distribution, a term that is subtracted from the loss
    entropy: NonNegative = 0.0


def imposed(steps, s, log_w):
    """s and log_w (B, T, S) of tokens that take `steps` (B, T), whatever their router says."""
    k = torch.arange(s.size(-1), device=s.device)
    visible = torch.zeros_like(log_w).masked_fill(k > steps[..., None], LOG_W_HIDDEN)
    return F.one_hot(steps, s.size(-1)).to(s.dtype), visible


def draw(windows, step, S):
    """Draw a depth and a number for each token.

    They follow from the training step and the tokens of the window alone: however a batch is split, into
    micro-batches or among processes, a window's draws are the same.

    Args:
        windows: (B, T) tokens.
        step: the training step.
        S: how many depths there are.

    Returns:
        (B, T) depths in 0 .. S-1, and (B, T) numbers in [0, 1).
    """
    depths, numbers = [], []
    for window in windows.cpu().numpy():
        generator = torch.Generator().manual_seed(zlib.crc32(window.tobytes(), step))
        depths.append(torch.randint(S, window.shape, generator=generator))
        numbers.append(torch.rand(window.shape, generator=generator))
    return torch.stack(depths).to(windows.device), torch.stack(numbers).to(windows.device)


class Drawn(Scheduled, ByProbability, Grid):
    method, title = "drawn", "PonderLM-3 of drawn depth, grid"
    Config = DrawnConfig
    windows = None  # (B, T) tokens that the objective is about; outside of it no depth is drawn

    def route(self, h, alpha=0.0):
        s, log_w = super().route(h, alpha)  # (B, T, S)
        if self.windows is None:
            return s, log_w
        steps, numbers = draw(self.windows, int(self.seen), s.size(-1))
        drawn = numbers[..., None] < self.share()
        one_hot, visible = imposed(steps, s, log_w)
        return torch.where(drawn, one_hot, s), torch.where(drawn, visible, log_w)

    def share(self):
        """Of the tokens whose depth is drawn in this training step."""
        end = self.config.drawn_until
        return self.config.drawn * (1 if end is None else max(0.0, 1 - float(self.seen) / end))

    def objective(self, x, y, R, price=0.0):
        self.windows = x
        loss, penalty, out = super().objective(x, y, R, price)
        self.windows = None
        return loss - self.config.entropy * torch.special.entr(out.s).sum(-1).mean(), penalty, out


class DrawnShared(SharedDepth, Drawn):
    method, title = "drawn-shared", "shared depth, drawn, grid"
