"""AdaPonderLM: PonderLM-1 with a gate for each step, and tokens that have halted stay as they are.

    E_0 = e(x), h_i = F(E_i), P_i = softmax(lm_head(h_i)), g_i = sigmoid(MLP_i(h_i))
    m_0 = 1, m_{i+1} = m_i [g_i >= tau], E_{i+1} = E_i + m_{i+1} g_i P_i V
    L = CE + lambda mean of the lowest share of all g_i, of all tokens and steps together

V is the scaled embedding table; the share rises linearly from 0 to 0.1. A token with m = 0 keeps
its keys and values, in training as in decoding, and its last state predicts. See exits.py.

Song et al., 2026, arXiv 2603.01914, of which a digest by others was read, not the text. From there:
all of the above, lambda = 0.1, tau = 1e-4, MLPs of two layers with a hidden width of 4 D. Assumed:
the share rises over the whole training; the activation, SiLU; scores that begin at sigmoid(2).
"""

import torch
import torch.nn.functional as F
from torch import nn

from baselines.exits import Exits, Gate
from baselines.ponderlm1 import mixture
from router import upcast

LAMBDA, SHARE, TAU = 0.1, 0.1, 1e-4  # in training; SHARE of the gates is lowered at its end


class MLPGates(Gate):
    """log g_k by h^(k), an MLP for each k."""

    def __init__(self, config):
        nn.Module.__init__(self)  # no linear map
        D = config.hidden_size
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 4 * D), nn.SiLU(), nn.Linear(4 * D, 1))
            for _ in range(config.ponder_steps)
        )

    def start(self):
        for first, _, last in self.mlps:
            nn.init.zeros_(first.bias)
            nn.init.constant_(last.bias, 2.0)

    def logit(self, h, k):
        first, _, last = self.mlps[k]
        hidden = F.silu(F.linear(h, *map(upcast, first.parameters())))
        return F.linear(hidden, *map(upcast, last.parameters()))


class AdaPonder(Exits):
    method, title = "adaponder", "AdaPonderLM"
    progress = 1.0  # of the training, which moves it from 0 on (train.py)

    def make_router(self):
        return MLPGates(self.config)

    def next_input(self, x, h, log_g):
        return x + log_g.exp()[..., None].to(x.dtype) * mixture(self, h)

    def accumulate(self, log_w, log_g):
        return torch.minimum(log_w, log_g)  # goes on while all g so far are at least tau

    def forward(self, idx, targets=None, *, tau=None, **kwargs):
        """As PonderLM.forward. In training tokens halt, too, and `auxiliary` is the loss on the
        lowest gates."""
        tau = TAU if self.training else tau
        out = super().forward(idx, targets, tau=tau, **kwargs)
        if self.training:
            gates = [self.router(out.h[:, :, k], k) for k in range(self.config.ponder_steps)]
            g = torch.stack(gates).exp().flatten()  # (K*B*T,)
            count = int(self.progress * SHARE * len(g))
            lowest = g.topk(count, largest=False).values
            out.auxiliary = LAMBDA * lowest.sum() / max(1, count)
        return out
