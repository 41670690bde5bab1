"""PonderLM-1 (arXiv 2505.20674): the embedding that the model expects next is fed back, K times.

    e_i = e_{i-1} + softmax(lm_head(F(e_{i-1}))) E, i = 1 .. K; logits = lm_head(F(e_K))

E is the scaled table, and the softmax is over the full vocabulary. Each pass sees its own keys
only. The LLaMA form in PonderLM-2's code does not accumulate, e_i = e_0 + ..: `--no-accumulate`.
"""

import torch

from baselines import FixedDepth
from model import PonderConfig
from router import upcast
from runtime import strict_dataclass


@strict_dataclass
class PonderLM1Config(PonderConfig):
    accumulate: bool = True  # add each mixture to the last input, not to the first


class PonderLM1(FixedDepth):
    method, title = "ponderlm1", "PonderLM-1"
    Config = PonderLM1Config
    iterates = interleaves = False

    def next_input(self, e, e0, h):
        """e_{i-1}, e_0 and h = F(e_{i-1}), (B, T, D) each -> e_i."""
        p = upcast(self.lm_head(h)).softmax(-1)  # (B, T, V)
        table = self.model.embed_tokens.weight
        mixture = (p.to(h.dtype) @ table.to(h.dtype)) * self.config.scale
        return (e if self.config.accumulate else e0) + mixture

    def states(self, idx, R=None, tau=None, alpha=0.0):
        e0 = e = self.embed(idx)
        positions = torch.arange(idx.size(1), device=idx.device)
        h = [self.transform(e, positions)]
        for _ in range(self.config.ponder_steps):
            e = self.next_input(e, e0, h[-1])
            h.append(self.transform(e, positions))
        h = torch.stack(h, dim=2)  # (B, T, S, D)
        return h, *self.route(h)

    def new_cache(self):
        """A cache for each pass."""
        return [super(PonderLM1, self).new_cache() for _ in range(self.config.ponder_steps + 1)]

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        e0, positions = self.embed_token(token, position)
        e = e0
        h = self.model(e, positions, None, cache=cache[0])
        for layers in cache[1:]:
            e = self.next_input(e, e0, h)
            h = self.model(e, positions, None, cache=layers)
        return self.lm_head(h)[0, 0], self.config.ponder_steps

    @staticmethod
    def training_forwards(config, steps):
        return config.ponder_steps + 1

    @staticmethod
    def vocabulary_products(steps):
        return 1 + 2 * steps  # a head, and a mixture of rows, after each pass but the last
