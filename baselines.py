"""Other ways to spend K more computations on every token, on PonderLM-3's own backbone.

Each class changes what a token's K+1 computations are: in `states` for all tokens at once, and in
`ponder_token` for one token behind a cache. Blocks, initialisation, loss and files are inherited.

code        symbol     shape
x           H_i, e_i   (B, T, D)      what goes into the stack of layers
h           h^(0..K)   (B, T, S, D)   the normed states after each of the S = K+1 computations
h^(K)                  (B, T, D)      the one that predicts the next token (AlwaysRouter: s_K = 1)

PonderLM-2, the fourth of this family, is PonderLM itself with router 'always'.
"""

import torch
from torch import nn

from model import PonderLM
from router import upcast


class LoopedLM(PonderLM):
    """H_0 = x, H_i = Stack(H_{i-1}), i = 1 .. K+1; logits = lm_head(norm(H_{K+1})).

    The raw residual stream is carried from loop to loop: no norm, no second look at the input, no
    loss in between. Giannou et al., 2023, arXiv 2301.13196, as PonderLM-2's code compares with it.
    """

    methods = ("looped",)

    def states(self, idx, iters=None, tau=None, alpha=0.0):
        x, h = self.embed(idx), []
        positions = torch.arange(idx.size(1), device=idx.device)
        for _ in range(self.config.ponder_steps + 1):
            x = self.transform(x, positions, norm=False)
            h.append(self.model.norm(x))
        h = torch.stack(h, dim=2)  # (B, T, S, D)
        return h, *self.router(h[:, :, 0])

    def new_cache(self):
        """A loop's queries see the keys of that loop only, so each loop has a cache of its own."""
        return [super(LoopedLM, self).new_cache() for _ in range(self.config.ponder_steps + 1)]

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        x, positions = self.place(token, position)
        for loop in cache:
            x = self.model.stack(x, positions, None, cache=loop)
        return self.lm_head(self.model.norm(x))[0, 0], self.config.ponder_steps


class Pause(PonderLM):
    """K copies of a learned vector behind every token; the last one's state predicts.

    One pass over S slots a token, which share its position. Goyal et al., 2023, arXiv 2310.02226,
    put pauses at random places and behind the prompt; behind every token is how the PonderLM
    papers compare with it. `--pause-token ID` takes an unused row of the embedding instead.
    """

    methods = ("pause",)

    def __init__(self, config):
        super().__init__(config)
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

    def states(self, idx, iters=None, tau=None, alpha=0.0):
        (B, T), S = idx.shape, self.config.ponder_steps + 1
        positions = torch.arange(T, device=idx.device).repeat_interleave(S)
        h = self.transform(self.interleave(idx), positions).view(B, T, S, -1)
        return h, *self.router(h[:, :, 0])

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        idx = torch.tensor([[token]], device=self.lm_head.weight.device)
        positions = torch.full((self.config.ponder_steps + 1,), position, device=idx.device)
        h = self.model(self.interleave(idx), positions, None, cache=cache)  # (1, S, D)
        return self.lm_head(h[0, -1]), self.config.ponder_steps


class PonderLM1(PonderLM):
    """e_i = e_{i-1} + softmax(lm_head(F(e_{i-1}))) E, i = 1 .. K; logits = lm_head(F(e_K)).

    E is the scaled table. What is fed back is the embedding that the model expects next, over the
    full vocabulary. Each pass sees its own keys only. arXiv 2505.20674. The LLaMA form in
    PonderLM-2's code does not accumulate, e_i = e_0 + ..: `--no-accumulate`.
    """

    methods = ("ponderlm1",)

    def next_input(self, e, e0, h):
        """e_{i-1}, e_0 and h = F(e_{i-1}), (B, T, D) each -> e_i."""
        p = upcast(self.lm_head(h)).softmax(-1)  # (B, T, V)
        table = self.model.embed_tokens.weight
        mixture = (p.to(h.dtype) @ table.to(h.dtype)) * self.config.scale
        return (e if self.config.accumulate else e0) + mixture

    def states(self, idx, iters=None, tau=None, alpha=0.0):
        e0 = e = self.embed(idx)
        positions = torch.arange(idx.size(1), device=idx.device)
        h = [self.transform(e, positions)]
        for _ in range(self.config.ponder_steps):
            e = self.next_input(e, e0, h[-1])
            h.append(self.transform(e, positions))
        h = torch.stack(h, dim=2)  # (B, T, S, D)
        return h, *self.router(h[:, :, 0])

    def new_cache(self):
        """A cache for each pass."""
        return [super(PonderLM1, self).new_cache() for _ in range(self.config.ponder_steps + 1)]

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        e0, positions = self.place(token, position)
        e = e0
        h = self.model(e, positions, None, cache=cache[0])
        for layers in cache[1:]:
            e = self.next_input(e, e0, h)
            h = self.model(e, positions, None, cache=layers)
        return self.lm_head(h)[0, 0], self.config.ponder_steps
