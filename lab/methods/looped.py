"""LoopedLM: the stack of layers runs K more times on its own output.

    H_0 = x, H_i = Stack(H_{i-1}), i = 1 .. K+1; logits = lm_head(norm(H_{K+1}))

The raw residual stream is carried from loop to loop: no norm, no second look at the input, no loss
in between. Giannou et al., 2023, arXiv 2301.13196, as PonderLM-2's code compares with it.

code     symbol     shape
x, y     H_i        (B, T, D)       the residual stream before and after a loop
h        h^(0..K)   (B, T, S, D)    its normed states; h^(K) predicts the next token
"""

import torch
from torch.utils.checkpoint import checkpoint

from lab.methods import FixedDepth


class LoopedLM(FixedDepth):
    """Also what other methods of K+1 passes, each with keys of its own, override."""

    method, title = "looped", "LoopedLM"
    iterates = False

    def next_input(self, x, e, y, h):
        """The input of the next loop; e are the embeddings. (B, T, D) each."""
        return y

    def states(self, idx, R=None, tau=None, alpha=0.0):
        (x, K), h = (self.embed(idx), self.config.ponder_steps), []
        e, positions = x, torch.arange(idx.size(1), device=idx.device)
        for k in range(K + 1):
            y = self.stack(x, positions)
            h.append(self.model.norm(y))
            x = self.next_input(x, e, y, h[-1]) if k < K else None
        h = torch.stack(h, dim=2)  # (B, T, S, D)
        return h, *self.route(h)

    def stack(self, x, positions, cache=None):
        """The blocks without the final norm, (B, N, D) -> (B, N, D)."""
        arguments = x, positions, None, self.backend, cache
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.model.stack, *arguments, use_reentrant=False, preserve_rng_state=False)
        return self.model.stack(*arguments)

    def read(self, token, position):
        """A token's embedding (1, 1, D) and its position (1,)."""
        device = self.lm_head.weight.device
        e = self.embed(torch.tensor([[token]], device=device))
        return e, torch.tensor([position], device=device)

    def new_cache(self):
        """A loop's queries see the keys of that loop only, so each loop has a cache of its own."""
        return [super(LoopedLM, self).new_cache() for _ in range(self.config.ponder_steps + 1)]

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        (e, positions), K = self.read(token, position), self.config.ponder_steps
        x = e
        for k, layers in enumerate(cache):
            y = self.stack(x, positions, layers)
            h = self.model.norm(y)
            x = self.next_input(x, e, y, h) if k < K else None
        return self.lm_head(h)[0, 0], K
