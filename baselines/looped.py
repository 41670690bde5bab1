"""LoopedLM: the stack of layers runs K more times on its own output.

    H_0 = x, H_i = Stack(H_{i-1}), i = 1 .. K+1; logits = lm_head(norm(H_{K+1}))

The raw residual stream is carried from loop to loop: no norm, no second look at the input, no loss
in between. Giannou et al., 2023, arXiv 2301.13196, as PonderLM-2's code compares with it.

code     symbol     shape
x        H_i        (B, T, D)       the residual stream
h        h^(0..K)   (B, T, S, D)    its normed states; h^(K) predicts the next token
"""

import torch

from baselines import FixedDepth


class LoopedLM(FixedDepth):
    method, title = "looped", "LoopedLM"
    iterates = interleaves = False

    def states(self, idx, R=None, tau=None, alpha=0.0):
        x, h = self.embed(idx), []
        positions = torch.arange(idx.size(1), device=idx.device)
        for _ in range(self.config.ponder_steps + 1):
            x = self.transform(x, positions, norm=False)
            h.append(self.model.norm(x))
        h = torch.stack(h, dim=2)  # (B, T, S, D)
        return h, *self.route(h)

    def new_cache(self):
        """A loop's queries see the keys of that loop only, so each loop has a cache of its own."""
        return [super(LoopedLM, self).new_cache() for _ in range(self.config.ponder_steps + 1)]

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        x, positions = self.embed_token(token, position)
        for loop in cache:
            x = self.model.stack(x, positions, None, cache=loop)
        return self.lm_head(self.model.norm(x))[0, 0], self.config.ponder_steps

    @staticmethod
    def training_forwards(config, steps):
        return config.ponder_steps + 1
