"""What looped methods share whose tokens leave the loop one by one: ouro.py and adaponder.py.

Gates after each step are those of adaptivecot.py, too, which does not loop.

A token goes on to loop k while w_k >= tau, as in PonderLM-3; the last state that has run predicts.
In the loops that it does not run it keeps the keys and values of its last one.

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
from router import upcast


class Gates(nn.Module):
    """h^(0..n-1) (B, T, n, D) -> s, log_w (B, T, S), of which log_w is known up to step n.

    A method gives step(k, h, log_w, alpha): log w_{k+1} by h^(k) (..., D) and log w_k (...), k < K.
    """

    def __init__(self, config):
        super().__init__()
        self.K = config.ponder_steps

    def forward(self, h, alpha=0.0):
        log_w = [torch.zeros_like(h[:, :, 0, 0], dtype=torch.promote_types(h.dtype, torch.float32))]
        for k in range(self.K):
            known = k < h.size(2)
            log_w.append(self.step(k, h[:, :, k], log_w[-1], alpha) if known else log_w[-1])
        log_w = torch.stack(log_w, dim=-1)
        w = log_w.exp()
        return w - F.pad(w[..., 1:], (0, 1)), log_w


class LinearGate(Gates):
    def __init__(self, config):
        super().__init__(config)
        self.proj = nn.Linear(config.hidden_size, 1)

    def logit(self, h):
        """(..., D) -> (...), at least float32."""
        with torch.autocast(h.device.type, enabled=False):
            return F.linear(upcast(h), *map(upcast, self.proj.parameters()))[..., 0]


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


class LoopWithExits(LoopedLM):
    has_router, mixes = True, False
    unused = ("router_offset", "penalty", "penalty_weight")

    def update(self, x, y, log_w):
        """The residual stream after a loop, from x before it and y = Stack(x); log w_k (...)."""
        return y

    def states(self, idx, R=None, tau=None, alpha=0.0):
        x, h = self.embed(idx), []
        positions = torch.arange(idx.size(1), device=idx.device)
        layers = None if tau is None else [KeptKeys(self.backend) for _ in self.model.layers]
        runs, log_w = torch.ones_like(idx, dtype=torch.bool), None
        for k in range(self.config.ponder_steps + 1):
            if layers is None:
                y = self.transform(x, positions, norm=False)
            else:
                for layer in layers:
                    layer.runs = runs
                y = self.model.stack(x, positions, None, self.backend, layers)
            x = self.update(x, y, log_w[..., k]) if k else y  # of no use to those that left
            h.append(self.model.norm(x))
            s, log_w = self.router(torch.stack(h, dim=2), alpha)
            runs = self.executed(log_w, tau) > k
        return torch.stack(h, dim=2), s, log_w

    def step_weights(self, s, steps=None):
        steps = torch.full_like(s[..., 0], s.size(-1) - 1) if steps is None else steps
        return F.one_hot(steps.long(), s.size(-1)).to(s.dtype)

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        x, positions = self.embed_token(token, position)
        log_w = torch.zeros(1, 1, device=x.device)
        for k, loop in enumerate(cache):
            y = self.model.stack(x, positions, None, cache=loop)
            x = self.update(x, y, log_w) if k else y
            h = self.model.norm(x)
            if k < self.config.ponder_steps:
                log_w = self.router.step(k, h, log_w, alpha)
                if self.executed(log_w, tau) < 0:
                    break
        for later in cache[k + 1 :]:
            for mine, layer in zip(loop, later, strict=True):
                kept = mine.keys[:, :, -1:], mine.values[:, :, -1:]
                if layer.keys is not None:
                    before = layer.keys, layer.values
                    kept = (torch.cat(p, dim=2) for p in zip(before, kept, strict=True))
                layer.keys, layer.values = kept
        return self.lm_head(h)[0, 0], k
