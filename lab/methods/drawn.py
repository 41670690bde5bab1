"""Tokens whose depth is drawn: what could deciding gain, and can h^(0) be kept able to predict?

In training a share of the tokens does not take the steps that its router says, but 0 .. K at random. With
`drawn` 1, to the end, the model is good at every depth, and lab/figures/depth.py gives its tokens any steps
afterwards. With a share that falls to 0 the router decides between depths that can all predict.
"""

import torch
import torch.nn.functional as F

from attention import MASKED
from lab.methods.ablation import ByProbability, PriceConfig
from lab.methods.grid import Grid
from lab.methods.shared import OneForAll
from model import Count, NotNegative, Share, settings


@settings
class DrawnConfig(PriceConfig):
    by_probability: Share = 0.0  # share of a price on steps that is on w_1 + .. + w_K
    drawn: Share = 0.5  # share of the tokens whose depth is drawn
    drawn_until: Count | None = None  # micro-batches until which that share falls to 0; None: it stays
    entropy: NotNegative = 0.0  # what a nat of the entropy of s takes off the loss


def imposed(steps, s, log_w):
    """s and log_w (B, T, S) of tokens that take `steps` (B, T), whatever their router says."""
    k = torch.arange(s.size(-1), device=s.device)
    visible = torch.zeros_like(log_w).masked_fill(k > steps[..., None], MASKED)
    return F.one_hot(steps, s.size(-1)).to(s.dtype), visible


class Drawn(ByProbability, Grid):
    method, title = "drawn", "PonderLM-3 of drawn depth, grid"
    Config = DrawnConfig

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("seen", torch.zeros(1))  # micro-batches; a resumed training goes on with it

    def route(self, h, alpha=0.0):
        s, log_w = super().route(h, alpha)  # (B, T, S)
        if not self.training:
            return s, log_w
        generator = torch.Generator().manual_seed(int(self.seen))
        steps = torch.randint(s.size(-1), s.shape[:-1], generator=generator).to(s.device)
        drawn = torch.rand(s.shape[:-1], generator=generator)[..., None].to(s.device) < self.share()
        one_hot, visible = imposed(steps, s, log_w)
        return torch.where(drawn, one_hot, s), torch.where(drawn, visible, log_w)

    def share(self):
        """Of the tokens whose depth is drawn in this micro-batch."""
        end = self.config.drawn_until
        return self.config.drawn * (1 if end is None else max(0.0, 1 - float(self.seen) / end))

    def objective(self, x, y, R, price=0.0):
        self.seen += 1
        loss, penalty, out = super().objective(x, y, R, price)
        return loss - self.config.entropy * torch.special.entr(out.s).sum(-1).mean(), penalty, out


class DrawnForAll(OneForAll, Drawn):
    method, title = "drawn-shared", "one s for all, of drawn depth, grid"
