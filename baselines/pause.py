"""Pause tokens: K copies of a learned vector behind every token; the last one's state predicts.

One pass over S slots a token, which share its position. Goyal et al., 2023, arXiv 2310.02226, put
pauses at random places and behind the prompt; behind every token is how the PonderLM papers compare
with it. `--pause-token ID` takes an unused row of the embedding instead of a vector of its own.
"""

import torch
from pydantic import NonNegativeInt
from torch import nn

from baselines import FixedDepth
from model import PonderConfig
from runtime import strict_dataclass


@strict_dataclass
class PauseConfig(PonderConfig):
    pause_token: NonNegativeInt | None = None  # an unused id of the vocabulary; None: its own row

    def __post_init__(self):
        super().__post_init__()
        if self.pause_token is not None and self.pause_token >= self.vocab_size:
            raise ValueError(f"pause_token = {self.pause_token} is outside the vocabulary")


class Pause(FixedDepth):
    method, title = "pause", "Pause"
    Config = PauseConfig
    iterates = False

    def __init__(self, config, *backbone):
        super().__init__(config, *backbone)
        if config.pause_token is None:
            self.pause = nn.Embedding(1, config.hidden_size)
            self.pause.apply(self._init_weights)

    def interleave(self, idx):
        """(B, T) -> (B, T*S, D): each token's embedding and K times the pause's."""
        (B, T), K = idx.shape, self.config.ponder_steps
        e = self.embed(idx)[:, :, None]  # (B, T, 1, D)
        token = self.config.pause_token
        row = self.pause.weight[0] if token is None else self.model.embed_tokens.weight[token]
        return torch.cat([e, (row * self.config.scale).expand(B, T, K, -1)], dim=2).flatten(1, 2)

    def states(self, idx, R=None, tau=None, alpha=0.0):
        (B, T), S = idx.shape, self.config.ponder_steps + 1
        positions = torch.arange(T, device=idx.device).repeat_interleave(S)
        h = self.transform(self.interleave(idx), positions).view(B, T, S, -1)
        return h, *self.route(h)

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        idx = torch.tensor([[token]], device=self.lm_head.weight.device)
        positions = torch.full((self.config.ponder_steps + 1,), position, device=idx.device)
        h = self.model(self.interleave(idx), positions, None, cache=cache)  # (1, S, D)
        return self.lm_head(h[0, -1]), self.config.ponder_steps

    @staticmethod
    def training_forwards(config, steps):
        return config.ponder_steps + 1
