"""Ouro: the stack runs K more times on its own normed output, and a gate says when to leave.

    h^(0) = norm(Stack(x)), h^(k) = norm(Stack(h^(k-1)))
    1 - lambda_k = sigmoid(a . h^(k) + b), w_k = (1 - lambda_0) .. (1 - lambda_{k-1})
    s_k = lambda_k w_k, and s_K = w_K: where the token leaves
    L = mean over tokens of s_0 ce_0 + .. + s_K ce_K - beta H(s),  ce_k of h^(k) alone

Zhu et al., 2025, arXiv 2510.25741. From the paper: gate, loss, beta = 0.05 with four loops, and the
exit where s_0 + .. + s_k reaches q, which is PonderLM-3's rule, go on while w >= tau, at tau = 1-q.
From the released inference code: the norm between loops. Decoding as released runs all loops and
reads the last one's keys alone, so that its exits save nothing there; ours keeps a token's last
keys, see exits.py.

`--gate-only`, with --init-from a run of ouro, is the paper's second stage: the gate alone learns,
by binary cross-entropy, to go on where that lowered the loss, sigmoid(50 (gain - 0.005)). Left out
is the second norm around attention and MLP, since all methods here have one backbone.
"""

import torch
import torch.nn.functional as F

from baselines.exits import Exits
from model import PonderConfig, Positive
from runtime import strict_dataclass


@strict_dataclass
class OuroConfig(PonderConfig):
    exit_entropy: Positive = 0.05  # beta
    gate_only: bool = False  # the second stage


class Ouro(Exits):
    method, title = "ouro", "Ouro"
    Config = OuroConfig

    def __init__(self, config, *backbone):
        super().__init__(config, *backbone)
        if config.gate_only:
            self.requires_grad_(False).router.requires_grad_(True)

    def forward(self, idx, targets=None, **kwargs):
        """As PonderLM.forward. In training the loss is the expected one over the exits, and
        `auxiliary` -beta H(s); in the second stage the last loop's, without gradient, and
        `auxiliary` the gate's own."""
        out = super().forward(idx, targets, **kwargs)
        if self.training and targets is not None:
            S = self.config.ponder_steps + 1
            ce = [self.cross_entropy(out.h[:, :, k], targets) for k in range(S)]
            ce = torch.stack(ce, dim=-1)  # (B, T, S)
            if self.config.gate_only:
                out.loss, out.auxiliary = out.loss.detach(), self.gate_loss(out.log_w, ce)
                return out
            out.ce = (out.s * ce).sum(-1)
            out.loss = out.ce.sum() / (targets != -100).sum()
            entropy = torch.special.entr(out.s.clamp(min=torch.finfo(out.s.dtype).tiny)).sum(-1)
            out.auxiliary = -self.config.exit_entropy * entropy.mean()
        return out

    def gate_loss(self, log_w, ce):
        """Binary cross-entropy of going on against whether it helped, over T = S loops."""
        gain = (ce[..., :-1] - ce[..., 1:]).clamp(min=0).detach()  # (B, T, K)
        g = log_w.diff(dim=-1).exp().clamp(1e-6, 1 - 1e-6)  # 1 - lambda_k
        wanted = torch.sigmoid(50 * (gain - 0.005))
        return F.binary_cross_entropy(g, wanted, reduction="none").sum(-1).mean() / ce.size(-1)
