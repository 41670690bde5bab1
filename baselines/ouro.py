"""LoopedLM with Ouro's exit gate: each loop says how likely it is the last one that is needed.

    H_0 = x, H_i = Stack(H_{i-1}); h^(k) = norm(H_{k+1}), lambda_k = sigmoid(g . h^(k) + b)
    w_k = (1 - lambda_0) .. (1 - lambda_{k-1}), s_k = lambda_k w_k, and s_K = w_K
    L = mean over tokens of s_0 ce_0 + .. + s_K ce_K - beta H(s),  ce_k of h^(k) alone

Zhu et al., 2025, arXiv 2510.25741. Decoding leaves after the first loop at which the accumulated
probability s_0 + .. + s_k reaches q. That is PonderLM-3's rule, go on while w >= tau, at
tau = 1 - q; the last state that has run predicts. In the loops that it does not run, a token keeps
the keys and values of its last one, as Ouro shares them in decoding.

The full text could not be read here, only its summary and what others say of it. Taken from there:
gate, loss with an entropy, exit. Assumed: beta = 0.1 throughout. Left out: Ouro's second norm
around attention and MLP, since all methods here have one backbone, and the second stage, which
trains the gate alone on whether a loop helped.

code       symbol      shape
x          H_i         (B, T, D)       the residual stream
h          h^(0..K)    (B, T, S, D)    its normed states
s, log_w   s, log w    (B, T, S)       see router.py
runs                   (B, T)          of bool: the tokens that have not left
"""

import torch
import torch.nn.functional as F
from torch import nn

from attention import soft_mask_attention
from baselines.looped import LoopedLM
from model import PonderConfig, Positive, settings
from router import upcast


@settings
class OuroConfig(PonderConfig):
    exit_entropy: Positive = 0.1  # beta


class ExitGate(nn.Module):
    """h^(0..n-1) (B, T, n, D) -> s, log_w (B, T, S), of which log_w is known up to step n."""

    def __init__(self, config):
        super().__init__()
        self.S, self.proj = config.ponder_steps + 1, nn.Linear(config.hidden_size, 1)

    def stays(self, h, alpha):
        """log(1 - lambda) of states (..., D) -> (...)."""
        with torch.autocast(h.device.type, enabled=False):
            logit = F.linear(upcast(h), *map(upcast, self.proj.parameters()))
        return F.logsigmoid(alpha - logit[..., 0])

    def forward(self, h, alpha=0.0):
        stays = self.stays(h[:, :, : self.S - 1], alpha)
        log_w = F.pad(stays, (1, self.S - 1 - stays.size(-1))).cumsum(-1)
        w = log_w.exp()
        return w - F.pad(w[..., 1:], (0, 1)), log_w


class KeptKeys:
    """Attention of one layer in which tokens that have left keep their last keys and values."""

    def __init__(self, backend):
        self.backend, self.runs, self.kept = backend, None, None

    def attend(self, q, k, v, key_bias):
        if self.kept is not None:
            runs = self.runs[:, None, :, None]
            k, v = (torch.where(runs, new, old) for new, old in zip((k, v), self.kept, strict=True))
        self.kept = k, v
        return soft_mask_attention(q, k, v, key_bias, self.backend)


class Ouro(LoopedLM):
    method, title = "ouro", "LoopedLM, exit gate"
    color, marker = "#009E73", "P"
    Config, has_router = OuroConfig, True
    unused = ("router_offset", "penalty", "penalty_weight")

    def __init__(self, config, *backbone):
        super().__init__(config, *backbone)
        self.router = ExitGate(config)
        self.router.apply(self._init_weights)
        nn.init.zeros_(self.router.proj.bias)

    def states(self, idx, iters=None, tau=None, alpha=0.0):
        x, h = self.embed(idx), []
        positions = torch.arange(idx.size(1), device=idx.device)
        runs, layers = torch.ones_like(idx, dtype=torch.bool), None
        if tau is not None:
            layers = [KeptKeys(self.backend) for _ in self.model.layers]
        for k in range(self.config.ponder_steps + 1):
            if layers is None:
                x = self.transform(x, positions, norm=False)
            else:
                for layer in layers:
                    layer.runs = runs
                y = self.model.stack(x, positions, None, self.backend, layers)
                x = torch.where(runs[..., None], y, x)
            h.append(self.model.norm(x))
            s, log_w = self.router(torch.stack(h, dim=2), alpha)
            runs = self.executed(log_w, tau) > k
        return torch.stack(h, dim=2), s, log_w

    def step_weights(self, s, steps=None):
        """The last state that has run predicts."""
        steps = torch.full_like(s[..., 0], s.size(-1) - 1) if steps is None else steps
        return F.one_hot(steps.long(), s.size(-1)).to(s.dtype)

    def forward(self, idx, targets=None, *, iters=None, tau=None, alpha=0.0):
        """As PonderLM.forward. In training the loss is the expected one over the exits, and
        `auxiliary` -beta H(s)."""
        out = super().forward(idx, targets, iters=iters, tau=tau, alpha=alpha)
        if self.training and targets is not None:
            ce = [self.cross_entropy(out.h[:, :, k], targets) for k in range(out.h.size(2))]
            out.ce = (out.s * torch.stack(ce, dim=-1)).sum(-1)
            out.loss = out.ce.sum() / (targets != -100).sum()
            entropy = torch.special.entr(out.s).sum(-1)
            out.auxiliary = -self.config.exit_entropy * entropy.mean()
        return out

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        (x, positions), log_w = self.place(token, position), 0.0
        for k, loop in enumerate(cache):
            x = self.model.stack(x, positions, None, cache=loop)
            h = self.model.norm(x)
            if k < self.config.ponder_steps:
                log_w = log_w + self.router.stays(h, alpha)  # of the next loop
                if self.executed(log_w, tau) < 0:
                    break
        for later in cache[k + 1 :]:  # loops that do not run keep its last keys and values
            for mine, layer in zip(loop, later, strict=True):
                new = [y[:, :, -1:] for y in (mine.keys, mine.values)]
                old = (layer.keys, layer.values)
                layer.keys, layer.values = (
                    b if a is None else torch.cat([a, b], dim=2)
                    for a, b in zip(old, new, strict=True)
                )
        return self.lm_head(h)[0, 0], k
