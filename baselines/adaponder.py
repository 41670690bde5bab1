"""AdaPonderLM: a gate for each loop, and tokens that have halted stay as they are.

    x_1 = Stack(e), g_k = sigmoid(MLP_k(norm(x_k))), w_k = min(g_1, .., g_k)
    x_{k+1} = x_k + w_k (Stack(x_k) - x_k) while w_k >= tau, else x_k
    L = CE + lambda sum_k mean(the lowest share of all w_k)

Song et al., 2026, arXiv 2603.01914. The full text could not be read here, only its abstract and
notes on it. Taken from there: an MLP for each iteration, a mask that never rises again, halted
tokens that keep their keys and values, in training as in decoding, and a loss on the lowest
scores. Assumed: the loop of LoopedLM; how the gates learn, namely by scaling what a loop changes;
MLPs of a hidden layer of D / 4; the constants of a third party's implementation, lambda = 0.02, the
lowest twentieth, tau = 1e-4 in training; scores that begin at sigmoid(2). See exits.py.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from baselines.exits import Gates, LoopWithExits
from model import PonderConfig
from router import upcast
from runtime import strict_dataclass

Share = Annotated[float, Field(ge=0, le=1)]


@strict_dataclass
class AdaPonderConfig(PonderConfig):
    halting_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.02  # lambda
    halting_share: Annotated[float, Field(gt=0, le=1)] = 0.05  # of the scores, which are lowered
    halting_tau: Share = 1e-4  # in training


class HaltingGates(Gates):
    def __init__(self, config):
        super().__init__(config)
        D = config.hidden_size
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(D, D // 4), nn.SiLU(), nn.Linear(D // 4, 1))
            for _ in range(self.K)
        )

    def step(self, k, h, log_w, alpha):
        with torch.autocast(h.device.type, enabled=False):
            first, _, last = self.mlps[k]
            hidden = F.silu(F.linear(upcast(h), *map(upcast, first.parameters())))
            score = F.linear(hidden, *map(upcast, last.parameters()))[..., 0]
        return torch.minimum(log_w, F.logsigmoid(score + alpha))


class AdaPonder(LoopWithExits):
    method, title = "adaponder", "AdaPonderLM"
    Config = AdaPonderConfig

    def __init__(self, config, *backbone):
        super().__init__(config, *backbone)
        self.router = HaltingGates(config)
        self.router.apply(self._init_weights)
        for first, _, last in self.router.mlps:
            nn.init.zeros_(first.bias)
            nn.init.constant_(last.bias, 2.0)

    def update(self, x, y, log_w):
        return x + log_w.exp()[..., None].to(x.dtype) * (y - x)

    def states(self, idx, R=None, tau=None, alpha=0.0):
        tau = self.config.halting_tau if self.training else tau
        return super().states(idx, R, tau, alpha)

    def forward(self, idx, targets=None, **kwargs):
        """As PonderLM.forward. In training `auxiliary` is the loss on the lowest scores."""
        out = super().forward(idx, targets, **kwargs)
        if self.training:
            w = out.log_w[..., 1:].exp().flatten(0, 1)  # (B*T, K)
            lowest = w.topk(max(1, int(self.config.halting_share * len(w))), dim=0, largest=False)
            out.auxiliary = self.config.halting_weight * lowest.values.mean(0).sum()
        return out
