"""Pause tokens: K copies of a learned vector behind every token; the last one's state predicts.

One pass over S slots a token, which share its position. Goyal et al., 2023, arXiv 2310.02226, put
pauses at random places and behind the prompt; behind every token is how the PonderLM papers compare
with it.
"""

import torch
from torch import nn

from lab.methods import FixedDepth


class Pause(FixedDepth):
    method, title = "pause", "Pause"
    iterates = False

    def __init__(self, config):
        super().__init__(config)
        self.pause = nn.Embedding(1, config.hidden_size)
        self.pause.apply(self.init_weights)

    def interleave(self, idx):
        """(B, T) -> (B, T*S, D): each token's embedding and K times the pause's."""
        (B, T), K = idx.shape, self.config.ponder_steps
        e = self.embed(idx)[:, :, None]  # (B, T, 1, D)
        pause = self.pause.weight[0] * self.config.scale
        return torch.cat([e, pause.expand(B, T, K, -1)], dim=2).flatten(1, 2)

    def states(self, idx, R=None, tau=None, alpha=0.0):
        (B, T), S = idx.shape, self.config.ponder_steps + 1
        positions = torch.arange(T, device=idx.device).repeat_interleave(S)
        h = self.transform(self.interleave(idx), positions).view(B, T, S, -1)
        return h, *self.route(h)

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        idx = torch.tensor([[token]], device=self.lm_head.weight.device)
        position = torch.tensor([position], device=idx.device)
        for x in self.interleave(idx).split(1, dim=1):  # (1, 1, D): slot after slot
            h = self.model(x, position, None, cache=cache)
        return self.lm_head(h[0, 0]), self.config.ponder_steps
