"""Pause tokens (Goyal et al., 2023, arXiv 2310.02226): K copies of a learned vector follow each token, and
the state of the last one predicts.

One pass runs all S slots of every token; the slots of a token share its position. The paper inserts pauses at
random places and after the prompt. Here they follow every token, which is how the PonderLM papers use them as
a baseline.
"""

import torch
from torch import nn

from lab.methods import FixedDepth


class Pause(FixedDepth):
    method = "pause"
    title = "Pause"
    iterates = False

    def __init__(self, config):
        super().__init__(config)
        self.pause = nn.Embedding(1, config.hidden_size)
        self.pause.apply(self.init_weights)

    def interleave(self, idx):
        """The inputs of all slots, (B, T) -> (B, T*S, D): each token's embedding, then that of the pause K
        times."""
        B, T = idx.shape
        e = self.embed(idx)[:, :, None]  # (B, T, 1, D)
        pause = self.pause.weight[0] * self.config.scale
        pauses = pause.expand(B, T, self.config.ponder_steps, -1)
        return torch.cat([e, pauses], dim=2).flatten(1, 2)

    def states(self, idx, R=None, tau=None, alpha=0.0):
        B, T = idx.shape
        S = self.config.ponder_steps + 1
        positions = torch.arange(T, device=idx.device).repeat_interleave(S)  # (T*S,)
        h = self.transform(self.interleave(idx), positions).view(B, T, S, -1)
        s, log_w = self.route(h)
        return h, s, log_w

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        idx = torch.tensor([[token]], device=self.lm_head.weight.device)
        position = torch.tensor([position], device=idx.device)
        for x in self.interleave(idx).split(1, dim=1):  # (1, 1, D), slot after slot
            h = self.model(x, position, None, cache=cache)
        return self.lm_head(h[0, 0]), self.config.ponder_steps
