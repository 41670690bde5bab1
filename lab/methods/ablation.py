"""PonderLM-3 with one part taken out or changed, to see what each part is good for.

Each method follows the paper (arXiv 2603.02023) in everything but this part. The last two methods change what
--step-price charges; the price is ours, not the paper's. They charge, in whole or in part, the expected
number of steps under the step distribution s, as ACT's ponder cost does (Graves, arXiv 1603.08983). ACT's
halting is left out.

method                  what is changed
ablation-mask           no log w in attention: soft masks have no effect; keys beyond K-hat are still hidden
ablation-integration    no mixture: the last executed state alone predicts
ablation-router         no learned router: s stays uniform
ablation-index          the index of the mask as the paper prints it: w_k on the key of slot k+1
ablation-price          the price: on the expected steps, not on the steps that decoding executes
ablation-price-grid     the same on the grid
"""

import torch
import torch.nn.functional as F

from attention import LOG_W_HIDDEN
from lab.methods import PonderConfig, PonderLM3, last_alone
from lab.methods.grid import Grid
from model import Fraction, validated_dataclass
from router import mask_keys, relaxed_steps


def hide(bias, log_w, tau):
    """Hide the keys of slots beyond K-hat, as router.mask_keys does.

    Args:
        bias: (..., S), what attention adds to the scores of these keys.
        log_w: (..., S).
        tau: None hides nothing.

    Returns:
        (..., S), the bias with LOG_W_HIDDEN beyond K-hat.
    """
    if tau is None:
        return bias
    return bias.masked_fill(mask_keys(log_w, tau) <= LOG_W_HIDDEN, LOG_W_HIDDEN)


class NoMask(PonderLM3):
    method = "ablation-mask"
    title = "PonderLM-3, no mask"

    def mask_keys(self, log_w, tau=None):
        return hide(torch.zeros_like(log_w), log_w, tau)


class NoIntegration(PonderLM3):
    method = "ablation-integration"
    title = "PonderLM-3, no integration"

    def integrate(self, h, s, steps):
        return last_alone(h, steps)


class UniformRouter(PonderLM3):
    method = "ablation-router"
    title = "PonderLM-3, uniform s"
    unused = ("router_offset", "router_rate")

    def __init__(self, config):
        super().__init__(config)
        self.router.requires_grad_(False)  # its weights start at 0, and stay there
        self.router.offset.zero_()


class PrintedIndex(PonderLM3):
    """log w_k lies on slot k+1. So slot K-hat + 1, which decoding never runs, has the mask score of step
    K-hat, which is needed, and stays visible in training (reading note 1)."""

    method = "ablation-index"
    title = "PonderLM-3, printed mask index"

    def mask_keys(self, log_w, tau=None):
        shifted = F.pad(log_w[..., :-1], (1, 0))  # slot 0: 0, slot k+1: log w_k
        return hide(shifted, log_w, tau)


@validated_dataclass
class PriceConfig(PonderConfig):
    # share of --step-price charged on the router's expected number of steps, w_1 + .. + w_K; the rest is
    # charged on the steps that decoding would execute
    by_probability: Fraction = 1.0


class ByProbability:
    """A price on the expected steps under s, w_1 + .. + w_K. It precedes PonderLM3 or Grid among the
    bases."""

    Config = PriceConfig

    def objective(self, x, y, R, price=0.0):
        loss, penalty, out = super().objective(x, y, R)
        log_w = out.log_w[y != -100]
        fraction = self.config.by_probability
        expected_steps = log_w[:, 1:].exp().sum(-1)
        steps = fraction * expected_steps + (1 - fraction) * relaxed_steps(log_w)
        return loss + price * steps.mean(), penalty, out


class ExpectedPrice(ByProbability, PonderLM3):
    method = "ablation-price"
    title = "PonderLM-3, price by probability"


class ExpectedPriceGrid(ByProbability, Grid):
    method = "ablation-price-grid"
    title = "PonderLM-3, grid, price by probability"
