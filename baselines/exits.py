"""What looped methods share whose tokens leave the loop one by one: ouro.py and adaponder.py.

After step k a gate says with which probability g_k a token goes on. From these comes w, and it goes
on while w_k >= tau, as in PonderLM-3. The last state that has run predicts. In the loops that a
token does not run it keeps the keys and values of its last one: what Continuous Depth Batching
(arXiv 2608.09444) calls `last_exited`, and what lets an exit save anything.

code       symbol          shape
h          h^(0..K)        (B, T, S, D)    states, each the output of a pass
log_g      log g_0..K-1    (B, T, K)       see Gate
s, log_w   s, log w        (B, T, S)       see router.py
"""

import torch
import torch.nn.functional as F
from torch import nn

from attention import soft_mask_attention
from baselines.looped import LoopedLM
from router import upcast


class Gate(nn.Module):
    """log g_k by h^(k): a linear map, the same for all k."""

    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, 1)

    def start(self):
        nn.init.zeros_(self.proj.bias)

    def logit(self, h, k):
        return F.linear(h, *map(upcast, self.proj.parameters()))

    def forward(self, h, k, alpha=0.0):
        """h^(k) (..., D) -> log g_k (...), at least float32."""
        with torch.autocast(h.device.type, enabled=False):
            return F.logsigmoid(self.logit(upcast(h), k)[..., 0] + alpha)


def last_alone(s, steps):
    """One-hot at `steps` (...), None for K: (..., S) as s (..., S)."""
    steps = torch.full_like(s[..., 0], s.size(-1) - 1) if steps is None else steps
    return F.one_hot(steps.long(), s.size(-1)).to(s.dtype)


class KeptKeys:
    """One layer's attention in a pass in which tokens that have left keep their last keys."""

    def __init__(self, backend, runs, before):
        self.backend, self.runs, self.before = backend, runs[:, None, :, None], before

    def attend(self, q, k, v, key_bias):
        if self.before is not None:
            pairs = zip((k, v), self.before, strict=True)
            k, v = (torch.where(self.runs, new, old) for new, old in pairs)
        self.seen = k, v
        return soft_mask_attention(q, k, v, key_bias, self.backend)


class Exits(LoopedLM):
    """Loops that tokens may leave; the next one begins from the normed state."""

    has_router, mixes = True, False
    unused = ("router_offset", "penalty", "penalty_weight")

    def __init__(self, config, *backbone):
        super().__init__(config, *backbone)
        self.router.start()

    def make_router(self):
        return Gate(self.config)

    def next_input(self, x, h, log_g):
        """By this pass's input x, its state h and what the gate says of it."""
        return h

    def accumulate(self, log_w, log_g):
        """log w_{k+1} from log w_k and log g_k, (...) each."""
        return log_w + log_g

    def states(self, idx, R=None, tau=None, alpha=0.0):
        x = self.embed(idx)
        positions = torch.arange(idx.size(1), device=idx.device)
        h, log_w = [], [torch.zeros_like(upcast(x[..., 0]))]
        seen, layers = [None] * len(self.model.layers), None
        for k in range(self.config.ponder_steps + 1):
            if tau is not None:
                runs = self.executed(torch.stack(log_w, dim=-1), tau) == k  # w_k >= tau
                layers = [KeptKeys(self.backend, runs, pair) for pair in seen]
            h.append(self.transform(x, positions, cache=layers))
            seen = [layer.seen for layer in layers or ()]
            if k < self.config.ponder_steps:
                log_g = self.router(h[-1], k, alpha)
                log_w.append(self.accumulate(log_w[-1], log_g))
                x = self.next_input(x, h[-1], log_g)  # of no use to those that left
        log_w = torch.stack(log_w, dim=-1)  # (B, T, S)
        w = log_w.exp()
        return torch.stack(h, dim=2), w - F.pad(w[..., 1:], (0, 1)), log_w

    def step_weights(self, s, steps=None):
        return last_alone(s, steps)

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        x, positions = self.embed_token(token, position)
        log_w = torch.zeros(1, 1, device=x.device)
        for k, layers in enumerate(cache):
            h = self.model(x, positions, None, cache=layers)
            if k < self.config.ponder_steps:
                log_g = self.router(h, k, alpha)
                log_w = self.accumulate(log_w, log_g)
                if self.executed(log_w[..., None], tau) < 0:
                    break
                x = self.next_input(x, h, log_g)
        for later in cache[k + 1 :]:
            for mine, layer in zip(layers, later, strict=True):
                layer.append(mine.keys[:, :, -1:], mine.values[:, :, -1:])
        return self.lm_head(h)[0, 0], k
