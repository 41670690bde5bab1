"""Adaptive latent chain-of-thought: after each step the newest state says whether to go on.

    q_k = sigmoid(g . h^(k) + b), w_k = q_0 .. q_{k-1}, s_k = w_k - w_{k+1}, s_K = w_K
    h_hat = sum_k s_k h^(k), log w_k on the key of slot k, as in PonderLM-3

Zeng et al., 2026, arXiv 2602.08220. PonderLM-3 decides by h^(0) how far a token goes; this, step by
step, as Ouro (ouro.py) and Graves' ACT do.

The full text could not be read here, only its abstract and a summary. Taken from there: latent
steps before each token, none where it is easy; masks with which all tokens train in parallel; a
router of halting probabilities, which multiply; a loss by which tokens that are right early stop
early. Assumed: the gate, linear; the mask and the mixture, PonderLM-3's; b = 2 at first, so that
two thirds of s lie on the last of three steps; as that loss PonderLM-3's penalties, off like them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from baselines import PonderLM3
from baselines.exits import LinearGate


class ContinueGate(LinearGate):
    def step(self, k, h, log_w, alpha):
        return log_w + F.logsigmoid(self.logit(h) + alpha)


class AdaptiveCoT(PonderLM3):
    method, title = "adaptivecot", "Adaptive latent CoT"
    unused = ("router_offset",)
    routes_first = False

    def __init__(self, config, *backbone):
        super().__init__(config, *backbone)
        self.router = ContinueGate(config)
        self.router.apply(self._init_weights)
        nn.init.constant_(self.router.proj.bias, 2.0)

    def route(self, h, alpha=0.0):
        return self.router(h, alpha)

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=1e-4, alpha=0.0):
        x, positions = self.embed_token(token, position)
        log_w, h_hat = torch.zeros(1, 1, device=x.device), 0
        for k in range(self.config.ponder_steps + 1):
            h = self.model(x, positions, log_w, cache=cache)
            last = k == self.config.ponder_steps
            after = log_w - torch.inf if last else self.router.step(k, h, log_w, alpha)
            h_hat = h_hat + (log_w.exp() - after.exp())[..., None] * h
            if self.executed(after, tau) < 0:
                break
            x, log_w = self.feed_back(h), after
        return self.lm_head(h_hat.to(h.dtype))[0, 0], k
