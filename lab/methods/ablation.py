"""PonderLM-3 with one part missing, or as the paper prints it: what is each part good for?

method                  what is missing
ablation-mask           log w in attention: soft masks are not seen, hard stopping is
ablation-integration    s in the prediction: the last executed state predicts alone
ablation-router         a learned s: it stays uniform
ablation-index          (nothing) the paper's index of the mask: w_k on the key of slot k+1
ablation-price          the price on what decoding executes: it is on what s expects, or on a share of both
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
    """A bias on the keys of slots, with those beyond K-hat hidden, as router.mask_keys does."""
    return bias if tau is None else bias.masked_fill(mask_keys(log_w, tau) <= LOG_W_HIDDEN, LOG_W_HIDDEN)


class NoMask(PonderLM3):
    method, title = "ablation-mask", "PonderLM-3, no mask"

    def mask_keys(self, log_w, tau=None):
        return hide(torch.zeros_like(log_w), log_w, tau)


class NoIntegration(PonderLM3):
    method, title = "ablation-integration", "PonderLM-3, no integration"

    def integrate(self, h, s, steps):
        return last_alone(h, steps)


class UniformRouter(PonderLM3):
    method, title = "ablation-router", "PonderLM-3, uniform s"
    unused = ("router_offset",)

    def __init__(self, config):
        super().__init__(config)
        self.router.requires_grad_(False)  # its weights start at 0, and stay there
        self.router.offset.zero_()


class PrintedIndex(PonderLM3):
    """Reading note 1: a slot that inference never runs stays visible in training."""

    method, title = "ablation-index", "PonderLM-3, printed mask index"

    def mask_keys(self, log_w, tau=None):
        return hide(F.pad(log_w[..., :-1], (1, 0)), log_w, tau)


@validated_dataclass
class PriceConfig(PonderConfig):
    by_probability: Fraction = 1.0  # share of the price that is on w_1 + .. + w_K


class ByProbability:
    """A price on the steps that s expects, as ACT's ponder cost (Graves, arXiv 1603.08983)."""

    Config = PriceConfig

    def objective(self, x, y, R, price=0.0):
        loss, penalty, out = super().objective(x, y, R)
        log_w, share = out.log_w[y != -100], self.config.by_probability
        steps = share * log_w[:, 1:].exp().sum(-1) + (1 - share) * relaxed_steps(log_w)
        return loss + price * steps.mean(), penalty, out


class ExpectedPrice(ByProbability, PonderLM3):
    method, title = "ablation-price", "PonderLM-3, price by probability"


class ExpectedPriceGrid(ByProbability, Grid):
    method, title = "ablation-price-grid", "PonderLM-3, grid, price by probability"
