"""LoopedLM: the stack of layers runs K more times on its own output (Giannou et al., 2023, arXiv 2301.13196).

    H_0 = x, H_i = Stack(H_{i-1}), i = 1 .. K+1; logits = lm_head(norm(H_{K+1}))

This is the form with which PonderLM-2's code compares: the raw residual stream is carried from loop to loop.
There is no norm between loops, the input is not read again, and earlier loops have no loss.

code     symbol     shape
x, y     H_i        (B, T, D)       the residual stream before and after a loop
h        h^(0..K)   (B, T, S, D)    its normed states; h^(K) predicts the next token
"""

import torch
from torch.utils.checkpoint import checkpoint

from lab.methods import FixedDepth


class LoopedLM(FixedDepth):
    """LoopedLM, and the base of all methods whose K+1 passes have keys of their own each."""

    method = "looped"
    title = "LoopedLM"
    iterates = False

    def next_input(self, x, e, y, h):
        """The input of the next loop.

        Args:
            x: (B, T, D) the input of this loop.
            e: (B, T, D) the embeddings.
            y: (B, T, D) the output of this loop.
            h: (B, T, D) the same, normed.
        """
        return y

    def states(self, idx, R=None, tau=None, alpha=0.0):
        e = self.embed(idx)
        x = e
        K = self.config.ponder_steps
        positions = torch.arange(idx.size(1), device=idx.device)
        h = []
        for k in range(K + 1):
            y = self.stack(x, positions)
            h.append(self.model.norm(y))
            if k < K:
                x = self.next_input(x, e, y, h[-1])
        h = torch.stack(h, dim=2)  # (B, T, S, D)
        s, log_w = self.route(h)
        return h, s, log_w

    def stack(self, x, positions, cache=None):
        """The blocks without the final norm, (B, N, D) -> (B, N, D)."""
        arguments = x, positions, None, self.backend, cache
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.model.stack, *arguments, use_reentrant=False, preserve_rng_state=False)
        return self.model.stack(*arguments)

    def read(self, token, position):
        """A token's embedding (1, 1, D) and its position (1,), for `ponder_token`."""
        device = self.lm_head.weight.device
        e = self.embed(torch.tensor([[token]], device=device))
        return e, torch.tensor([position], device=device)

    def new_cache(self):
        """A cache for each loop, since queries see the keys of their own loop only."""
        return [super(LoopedLM, self).new_cache() for _ in range(self.config.ponder_steps + 1)]

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        e, positions = self.read(token, position)
        x = e
        K = self.config.ponder_steps
        for k, layers in enumerate(cache):
            y = self.stack(x, positions, layers)
            h = self.model.norm(y)
            if k < K:
                x = self.next_input(x, e, y, h)
        return self.lm_head(h)[0, 0], K
