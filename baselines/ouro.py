"""LoopedLM with Ouro's exit gate: each loop says how likely it is the last one that is needed.

    H_0 = x, H_i = Stack(H_{i-1}); h^(k) = norm(H_{k+1}), lambda_k = sigmoid(g . h^(k) + b)
    w_k = (1 - lambda_0) .. (1 - lambda_{k-1}), s_k = lambda_k w_k, and s_K = w_K
    L = mean over tokens of s_0 ce_0 + .. + s_K ce_K - beta H(s),  ce_k of h^(k) alone

Zhu et al., 2025, arXiv 2510.25741. Decoding leaves after the first loop at which the accumulated
probability s_0 + .. + s_k reaches q. That is PonderLM-3's rule, go on while w >= tau, at
tau = 1 - q. That a token keeps its last keys is how Ouro shares them in decoding. See exits.py.

The full text could not be read here, only its summary and what others say of it. Taken from there:
gate, loss with an entropy, exit. Assumed: beta = 0.1 throughout. Left out: Ouro's second norm
around attention and MLP, since all methods here have one backbone, and the second stage, which
trains the gate alone on whether a loop helped.
"""

import torch
import torch.nn.functional as F
from torch import nn

from baselines.exits import LinearGate, LoopWithExits
from model import PonderConfig, Positive
from runtime import strict_dataclass


@strict_dataclass
class OuroConfig(PonderConfig):
    exit_entropy: Positive = 0.1  # beta


class ExitGate(LinearGate):
    def step(self, k, h, log_w, alpha):
        return log_w + F.logsigmoid(alpha - self.logit(h))  # 1 - sigmoid(x) = sigmoid(-x)


class Ouro(LoopWithExits):
    method, title = "ouro", "LoopedLM, exit gate"
    Config = OuroConfig

    def __init__(self, config, *backbone):
        super().__init__(config, *backbone)
        self.router = ExitGate(config)
        self.router.apply(self._init_weights)
        nn.init.zeros_(self.router.proj.bias)

    def forward(self, idx, targets=None, **kwargs):
        """As PonderLM.forward. In training the loss is the expected one over the exits, and
        `auxiliary` -beta H(s)."""
        out = super().forward(idx, targets, **kwargs)
        if self.training and targets is not None:
            ce = [self.cross_entropy(out.h[:, :, k], targets) for k in range(out.h.size(2))]
            out.ce = (out.s * torch.stack(ce, dim=-1)).sum(-1)
            out.loss = out.ce.sum() / (targets != -100).sum()
            entropy = torch.special.entr(out.s).sum(-1)
            out.auxiliary = -self.config.exit_entropy * entropy.mean()
        return out
