"""Ouro: the stack runs K more times on its own normed output, and a gate says after which loop a token leaves
(Zhu et al., 2025, arXiv 2510.25741).

    h^(0) = norm(Stack(x)), h^(k) = norm(Stack(h^(k-1)))
    1 - lambda_k = sigmoid(a . h^(k) + b), w_k = (1 - lambda_0) .. (1 - lambda_{k-1})
    s_k = lambda_k w_k, and s_K = w_K: the probability that the token leaves after loop k
    L = mean over tokens of s_0 ce_0 + .. + s_K ce_K - beta H(s); ce_k: the cross-entropy of h^(k) alone

The gate, the loss, and beta = 0.05 with four loops are the paper's. So is the exit: a token leaves where
s_0 + .. + s_k reaches q. That is PonderLM-3's rule, continue while w >= tau, at tau = 1 - q. The norm between
loops is that of the released inference code.

Decoding differs from the released code, which runs all loops and reads the keys of the last loop only, so
that leaving early saves nothing. Here the last state that has run predicts. In the loops that a token does
not run, the token keeps the keys and values of its last loop, which Continuous Depth Batching (arXiv
2608.09444) calls `last_exited`.

Two things are left out: the second stage of training, in which only the gate learns; and the second norm
around attention and MLP, since all methods here have the same backbone.

code       symbol         shape
h          h^(0..K)       (B, T, S, D)    states, each the output of a loop
s, log_w   s, log w       (B, T, S)       see router.py
"""

import torch
import torch.nn.functional as F
from torch import nn

from attention import soft_mask_attention
from lab.methods import PonderConfig, last_alone
from lab.methods.looped import LoopedLM
from model import NonNegative, validated_dataclass
from router import stop_step, upcast


@validated_dataclass
class OuroConfig(PonderConfig):
    # weight (beta) of the entropy of the exit distribution, a term that is subtracted from the loss
    exit_entropy: NonNegative = 0.05


class Gate(nn.Module):
    """The gate, a . h + b, which is the same after all loops."""

    def __init__(self, D):
        super().__init__()
        self.proj = nn.Linear(D, 1)

    def forward(self, h, alpha=0.0):
        """log(1 - lambda_k), in float32 at least: h^(k) (..., D) -> (...)."""
        with torch.autocast(h.device.type, enabled=False):
            logit = F.linear(upcast(h), upcast(self.proj.weight), upcast(self.proj.bias))[..., 0]
            return F.logsigmoid(logit + alpha)


class KeptKeys:
    """One layer's attention in a loop in which tokens that have left keep their last keys and values.

    Args:
        backend: the form of attention, one of attention.BACKENDS.
        runs: (B, T) which tokens run this loop.
        before: keys and values of the loop before, (B, G, T, d) each; None in the first loop.
    """

    def __init__(self, backend, runs, before):
        self.backend = backend
        self.runs = runs[:, None, :, None]
        self.before = before
        self.seen = None  # keys and values of this loop, once `attend` has run

    def attend(self, q, k, v, log_w):
        if self.before is not None:
            keys, values = self.before
            k = torch.where(self.runs, k, keys)
            v = torch.where(self.runs, v, values)
        self.seen = k, v
        return soft_mask_attention(q, k, v, log_w, self.backend)


class Ouro(LoopedLM):
    method = "ouro"
    title = "Ouro"
    Config = OuroConfig
    has_router = True
    unused = ("router_offset", "penalty", "penalty_weight")

    def __init__(self, config):
        super().__init__(config)
        self.router = Gate(config.hidden_size).apply(self.init_weights)
        nn.init.zeros_(self.router.proj.bias)

    def states(self, idx, R=None, tau=None, alpha=0.0):
        x = self.embed(idx)
        positions = torch.arange(idx.size(1), device=idx.device)
        h = []
        log_w = [torch.zeros_like(upcast(x[..., 0]))]  # w_0 = 1
        seen = [None] * len(self.model.layers)
        layers = None  # without tau, all tokens run all loops
        for k in range(self.config.ponder_steps + 1):
            if tau is not None:
                runs = stop_step(torch.stack(log_w, dim=-1), tau) == k  # w_k >= tau
                layers = [KeptKeys(self.backend, runs, pair) for pair in seen]
            x = self.transform(x, positions, cache=layers)  # outputs of tokens that have left are not used
            h.append(x)
            seen = [layer.seen for layer in layers or ()]
            if k < self.config.ponder_steps:
                log_w.append(log_w[-1] + self.router(x, alpha))
        log_w = torch.stack(log_w, dim=-1)  # (B, T, S)
        w = log_w.exp()
        s = w - F.pad(w[..., 1:], (0, 1))  # s_k = w_k - w_{k+1}
        return torch.stack(h, dim=2), s, log_w

    def integrate(self, h, s, steps):
        return last_alone(h, steps)

    def objective(self, x, y, R, price=0.0):
        """The expected cross-entropy over the exits, minus beta H(s)."""
        out = self(x, y)
        ce = torch.stack([self.cross_entropy(h, y) for h in out.h.unbind(2)], dim=-1)  # (B, T, S)
        out.ce = (out.s * ce).sum(-1)
        out.loss = out.ce.sum() / (y != -100).sum().clamp(min=1)
        s = out.s.clamp(min=torch.finfo(out.s.dtype).tiny)  # the gradient of entr is infinite at 0
        entropy = torch.special.entr(s).sum(-1)
        penalty = -self.config.exit_entropy * entropy.mean()
        return out.loss + penalty, penalty, out

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        x, positions = self.read(token, position)
        log_w = torch.zeros(1, 1, device=x.device)
        for k, layers in enumerate(cache):
            x = self.model(x, positions, None, cache=layers)
            if k < self.config.ponder_steps:
                log_w = log_w + self.router(x, alpha)
                if stop_step(log_w[..., None], tau) < 0:  # w_{k+1} < tau
                    break
        for later in cache[k + 1 :]:
            for own, layer in zip(layers, later, strict=True):
                layer.append(own.keys[:, :, -1:], own.values[:, :, -1:])
        return self.lm_head(x)[0, 0], k
