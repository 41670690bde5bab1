"""The rows of a batch on the device, and the pass that moves each of them on by one slot.

All that a pass decides, it decides here: which slot is next, how far a token goes, which token
follows. The host only reads what came out. So a GPU can run passes ahead of the host, and replay
each as one CUDA graph (cuda_graphs.py).

code        shape        meaning
A                        rows that run, 0 .. A-1; compiled, all B
e           (B, D)       embedding of each row's token
x           (B, D)       input of its next slot
h_hat       (B, D)       s_0 h^(0) + .. + s_k h^(k), as far as the token has come
s           (B, S)       step distribution of each row's token, 0 beyond K-hat
channels    (B, S, c)    log w of the keys of its slots, as channels.key_channels writes it in two
                         channels; on the grid K more, see cache.slot_channels
k           (B,)         which slot of its token is next, 0 .. K-hat
steps       (B,)         K-hat of the token
position    (B,)         of the token in the text
length      (B,)         places that the row has used in the cache
given       (B,)         tokens that it begins with; behind them tokens are chosen
limit       (B,)         tokens that it reads, then it stands still
context     (B, T)       the tokens that it begins with
uniform     (B, T)       a random number for each token that is chosen
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from lab.engine.cache import SlotCache, slot_channels
from lab.engine.products import matrix
from lab.engine.request import choose
from lab.engine.slot_step import make_step
from lab.kernels.channels import key_channels, query_channels
from router import mask_score, upcast

# What belongs to a row and may change.
STATE = ("e", "x", "h_hat", "s", "channels", "counters", "context", "uniform")


@dataclass
class Counters:
    """Of a row; see the table above."""

    k: int
    steps: int
    position: int
    length: int
    given: int
    limit: int


class Rows:
    """State of `batch_size` rows of a model, and a pass without a value that the host must know.

    Every pass computes everything for all rows, and selects.

    Args:
        dtype: of the matrix products and the cache. tau, alpha: as PonderLM.ponder_token.
        weights, compiled: see products.matrix.
    """

    def __init__(self, model, batch_size, dtype, tau, alpha, weights="float32", compiled=False):
        config, weight = model.config, model.lm_head.weight
        B, T, S, device = batch_size, config.block_size, config.ponder_steps + 1, weight.device
        self.model, self.tau, self.dtype, self.d = model, tau, dtype, config.d
        self.cache = SlotCache(model, B, dtype, device)
        self.step = make_step(model, B, dtype, weights, compiled)
        self.head = matrix(weight, dtype, B, weights, compiled)  # D -> V
        self.e, self.x = (weight.new_zeros(B, config.hidden_size) for _ in range(2))
        s, _ = model.route(self.x[:, None])
        self.h_hat = torch.zeros_like(self.x, dtype=s.dtype)
        self.s = s.clone()  # for good, without a learned router; so are the channels
        self.channels = torch.zeros(B, S, 2, dtype=dtype, device=device)
        self.queries = None  # (S, c) on the grid
        if model.grid:
            queries, self.slot_keys = slot_channels(S - 1, self.d, dtype, device)  # (S, K) each
            self.channels = torch.cat([self.channels, self.slot_keys.expand(B, -1, -1)], dim=-1)
            of_log_w = query_channels(self.d, dtype, device)[:2].expand(S, 2)
            self.queries = torch.cat([of_log_w, queries], dim=-1)
        if model.router is not None:
            self.router = upcast(model.router.proj.weight).T.contiguous()  # (D, S)
            self.shift = model.router.offset + alpha * torch.arange(S, device=device)  # (S,)
        self.counters = torch.zeros(B, 6, dtype=torch.long, device=device)
        self.context = torch.zeros(B, T, dtype=torch.long, device=device)
        self.uniform = torch.zeros(B, T, dtype=torch.float64, device=device)
        self.numbers = torch.arange(B, device=device)
        self.state = [getattr(self, name) for name in STATE]

    # -- Rows come and go --------------------------------------------------------------------------

    def begin(self, rows, tokens, counters, uniform, contexts):
        """Texts begin in `rows`, a list of numbers.

        Args:
            tokens: (R,) which each row reads next. counters: (R, 6), in the order of Counters.
            uniform, contexts: (R, T), padded.
        """
        at, *values = (x.to(self.x.device) for x in (torch.tensor(rows), counters, uniform, contexts))
        for state, value in zip((self.counters, self.uniform, self.context), values, strict=True):
            state[at] = value
        self.x[at] = self.e[at] = self.embed(tokens.to(self.x.device))

    def move(self, source, target, length):
        """Row `target` becomes row `source`, which has used at most `length` places."""
        for state in self.state:
            state[target] = state[source]
        self.cache.copy(source, target, length)

    # -- A pass ------------------------------------------------------------------------------------

    def advance(self, A, places, choice):
        """The next slot of rows 0 .. A-1, which see the first `places` of the cache.

        Args:
            choice: temperature, top_k and top_p, see request.choose.

        Returns:
            (2, A): the steps of the token that has now been read, -1 where none has; and the token
            behind it, -1 where the logits are not finite.
        """
        counters = self.counters[:A]
        k, steps, position, length, given, limit = counters.unbind(1)
        h = self.run(A, places, position, length, k)
        if self.model.router is not None:
            first = (k == 0)[:, None]
            s, channels, found = self.route(h)
            self.s[:A] = torch.where(first, s, self.s[:A])
            before = self.channels[:A, :, :2]
            self.channels[:A, :, :2] = torch.where(first[..., None], channels, before)
            steps = torch.where(first[:, 0], found, steps)
        self.integrate(h, k)

        active = position < limit
        done = active & (k == steps)
        position, number = position + done, position + done - given
        u = self.uniform[self.numbers[:A], number]  # below 0, of a prompt, it is not used
        chosen = choose(self.logits(self.h_hat[:A]), u, *choice)
        prompt = self.context[self.numbers[:A], position.clamp(max=self.context.size(1) - 1)]
        tokens = torch.where(number < 0, prompt, chosen)
        following = self.model.feed_back(h, self.e[:A])
        self.e[:A] = torch.where(done[:, None], self.embed(tokens.clamp(min=0)), self.e[:A])
        self.x[:A] = torch.where(done[:, None], self.e[:A], following)
        k = torch.where(done, 0, k + active)
        counters.copy_(torch.stack([k, steps, position, length + active, given, limit], dim=1))
        return torch.stack([torch.where(done, steps, -1), tokens])

    # -- Its parts ---------------------------------------------------------------------------------

    def run(self, A, places, position, length, k):
        """The slot k of each row through the backbone. Counters (A,) -> (A, D)."""
        at = k[:, None, None].expand(A, 1, self.channels.size(-1))
        channels = self.channels[:A].gather(1, at)
        of_query = None if self.queries is None else self.queries[k][:, None]
        return self.step(self.x[:A], self.cache, places, position, length, channels, of_query)

    def route(self, h):
        """How far tokens go, by their h^(0) (R, D). -> s (R, S), channels (R, S, 2), K-hat (R,)"""
        log_s = torch.addmm(self.shift, upcast(h), self.router).log_softmax(-1)  # as Router.forward
        log_w = mask_score(log_s)
        steps = self.model.executed(log_w, self.tau)
        channels = key_channels(self.model.mask_keys(log_w), self.d, self.dtype)[..., :2]
        return self.model.step_weights(log_s.exp(), steps), channels, steps

    def integrate(self, h, k):
        """h_hat = s_0 h^(0) + .. + s_k h^(k). h (A, D), k (A,)."""
        k = k[:, None]
        h_hat = self.h_hat[: len(h)].mul_(k > 0)
        h_hat.addcmul_(self.s[: len(h)].gather(1, k), h)

    def embed(self, tokens):
        """(R,) -> (R, D), as PonderLM.embed."""
        return F.embedding(tokens, self.model.model.embed_tokens.weight) * self.model.config.scale

    def logits(self, h_hat):
        return self.head(h_hat.to(self.dtype))


class HostRows(Rows):
    """The same where looking at a value costs nothing: a pass computes only what it needs.

    Counters, contexts and random numbers are lists of the host.
    """

    def __init__(self, model, batch_size, *args):
        super().__init__(model, batch_size, *args)
        del self.state[5:]  # what lists take the place of
        self.counters = [Counters(*[0] * 6) for _ in range(batch_size)]
        self.context, self.uniform = [[[] for _ in range(batch_size)] for _ in range(2)]

    def begin(self, rows, tokens, counters, uniform, contexts):
        for i, row in enumerate(rows):
            self.counters[row] = Counters(*counters[i].tolist())
            self.uniform[row], self.context[row] = uniform[i].tolist(), contexts[i].tolist()
        self.x[rows] = self.e[rows] = self.embed(tokens)

    def move(self, source, target, length):
        super().move(source, target, length)
        self.counters[target] = replace(self.counters[source])
        self.context[target], self.uniform[target] = self.context[source], self.uniform[source]

    def advance(self, A, places, choice):
        counters = self.counters[:A]
        now = torch.tensor([(c.position, c.length, c.k) for c in counters])
        position, length, k = now.unbind(1)
        h = self.run(A, places, position, length, k)
        first = [row for row, c in enumerate(counters) if c.k == 0]
        if first and self.model.router is not None:
            at = index(first)
            self.s[at], self.channels[at, :, :2], steps = self.route(h[at])
            for row, K_hat in zip(first, steps.tolist(), strict=True):
                counters[row].steps = K_hat
        self.integrate(h, k)
        self.x[:A] = self.model.feed_back(h, self.e[:A])

        read, tokens, chosen, prompt = [-1] * A, [-1] * A, [], []
        for row, c in enumerate(counters):
            c.length += 1
            c.k += 1
            if c.k > c.steps:
                read[row], c.k = c.steps, 0
                c.position += 1
                (prompt if c.position < c.given else chosen).append(row)
        for row in prompt:
            tokens[row] = self.context[row][counters[row].position]
        if chosen:
            u = [self.uniform[row][counters[row].position - counters[row].given] for row in chosen]
            u = torch.tensor(u, dtype=torch.float64)
            found = choose(self.logits(self.h_hat[index(chosen)]), u, *choice)
            for row, token in zip(chosen, found.tolist(), strict=True):
                tokens[row] = token
        if prompt or chosen:
            rows = sorted(prompt + chosen)
            e = self.embed(torch.tensor([max(tokens[row], 0) for row in rows]))
            self.x[index(rows)] = self.e[index(rows)] = e
        return read, tokens


def index(rows):
    """An index of ascending rows, a slice where it can be: that is faster."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows)
