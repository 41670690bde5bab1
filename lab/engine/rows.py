"""The rows of a batch on the device, and the pass that moves each of them on by one slot.

All that a pass decides, it decides here: which slot is next, how far a token goes, which token follows. What
a model does otherwise than others it is asked for: embed, route, mask_keys, feed_back, integrate. The host
only reads what came out. So a GPU can run passes ahead of the host, and replay each as one CUDA graph
(cuda_graphs.py), and a CPU can run a pass as one compiled program (compiled.py).

code        shape        meaning
A                        rows that run, 0 .. A-1; compiled, all B
e           (B, D)       embedding of each row's token
x           (B, D)       input of its next slot
h           (B, S, D)    outputs of the slots of its token, as far as it has come
s           (B, S)       step distribution of each row's token
channels    (B, S, c)    log w of the keys of its slots, see kernels.log_w_channels; on the grid K more, see
                         cache.slot_channels
counters    (B, 6)       k          which slot of its token is next, 0 .. K-hat
                         steps      K-hat of the token
                         position   of the token in the text
                         length     places that the row has used in the cache
                         given      tokens that it begins with; behind them tokens are chosen
                         limit      tokens that it reads, then it stands still
context     (B, T)       the tokens that it begins with
uniform     (B, T)       a random number for each token that is chosen
"""

import torch

from lab.engine.cache import SlotCache, slot_channels
from lab.engine.request import choose
from lab.engine.slot_step import Product, make_step
from lab.kernels import log_w_channels, query_channels
from router import stop_step

STATE = ("e", "x", "h", "s", "channels", "counters", "context", "uniform")  # of a row; what may change


class Rows:
    """State of `batch_size` rows of a model.

    Args:
        dtype: of the matrix products and the cache. tau, alpha: as PonderLM.ponder_token.
        static: no value is looked at, since that would wait for a GPU, or end a compiled program: everything
            is computed. Else what no row needs is left out.
        compiled: the products are those of a compiled program.
    """

    def __init__(self, model, batch_size, dtype, tau, alpha, static=False, compiled=False):
        config, weight = model.config, model.lm_head.weight
        B, T, D, S = batch_size, config.block_size, config.hidden_size, config.ponder_steps + 1
        make = dict(device=weight.device)
        self.model, self.dtype, self.tau, self.alpha, self.static = model, dtype, tau, alpha, static
        self.cache = SlotCache(model, B, dtype, weight.device)
        self.step = make_step(model, B, dtype, compiled)
        self.head = Product(weight, dtype, B, compiled)  # D -> V
        self.e, self.x, self.h = (weight.new_zeros(B, *shape) for shape in ((D,), (D,), (S, D)))
        self.s = torch.zeros_like(model.route(self.h)[0])
        self.channels = torch.zeros(B, S, 2, dtype=dtype, **make)
        self.queries = None  # (S, c) on the grid
        if model.grid:
            queries, self.slot_keys = slot_channels(S - 1, config.d, dtype, weight.device)  # (S, K) each
            self.channels = torch.cat([self.channels, self.slot_keys.expand(B, -1, -1)], dim=-1)
            of_log_w = query_channels(config.d, dtype, weight.device)[:2].expand(S, 2)
            self.queries = torch.cat([of_log_w, queries], dim=-1)
        self.counters = torch.zeros(B, 6, dtype=torch.long, **make)
        self.context = torch.zeros(B, T, dtype=torch.long, **make)
        self.uniform = torch.zeros(B, T, dtype=torch.float64, **make)
        self.numbers, self.slots = torch.arange(B, **make), S * torch.arange(B, **make)  # slot 0 of each row
        self.nothing = torch.full((2, B), -1, **make)

    # -- Rows come and go --------------------------------------------------------------------------

    def begin(self, rows, tokens, counters, uniform, contexts):
        """Texts begin in `rows`, a list of numbers.

        Args:
            tokens: (R,) which each row reads next. counters: (R, 6). uniform, contexts: (R, T), padded.
        """
        at, *values = (x.to(self.x.device) for x in (torch.tensor(rows), counters, uniform, contexts))
        for state, value in zip((self.counters, self.uniform, self.context), values, strict=True):
            state[at] = value
        self.x[at] = self.e[at] = self.model.embed(tokens.to(self.x.device)[:, None])[:, 0]

    def move(self, source, target, length):
        """Row `target` becomes row `source`, which has used at most `length` places."""
        for name in STATE:
            getattr(self, name)[target] = getattr(self, name)[source]
        self.cache.copy(source, target, length)

    # -- A pass ------------------------------------------------------------------------------------

    def advance(self, A, places, choice):
        """The next slot of rows 0 .. A-1, which see the first `places` of the cache.

        Args:
            choice: temperature, top_k and top_p, see request.choose.

        Returns:
            (2, A): the steps of the token that has now been read, -1 where none has; and the token behind it,
            -1 where the logits are not finite.
        """
        model, e, x, s = self.model, self.e[:A], self.x[:A], self.s[:A]
        k, steps, position, length, given, limit = self.counters[:A].unbind(1)
        if (cache := self.cache).seen != (A, places):
            views = [x[:A, :, :places].split(cache.G, dim=1) for x in cache.layers]
            cache.seen, cache.views = (A, places), views  # keys and values, (A, G, places, d') each
        slot = self.slots[:A] + k  # among those of all rows
        of_key = self.channels.flatten(0, 1).index_select(0, slot)[:, None]  # (A, 1, c)
        of_query = None if self.queries is None else self.queries[k][:, None]
        h = self.step(x, cache, position, length, of_key, of_query)
        self.h.view(-1, h.size(1)).index_copy_(0, slot, h)

        begins = k == 0
        if self.static or begins.any():  # how far does the token go?
            new, log_w = model.route(h[:, None], self.alpha)  # (A, S)
            s.copy_(torch.where(begins[:, None], new, s))
            steps.copy_(torch.where(begins, stop_step(log_w, self.tau), steps))
            if (key_log_w := model.mask_keys(log_w)) is not None:
                channels = self.channels[:A, :, :2]
                new = log_w_channels(key_log_w, model.config.d, self.dtype)
                channels.copy_(torch.where(begins[:, None, None], new, channels))

        moves = (position < limit).long() if self.static else 1  # else only rows that move run
        length += moves
        k += moves
        done = k > steps  # a token has been read
        x.copy_(model.feed_back(h, e))
        if not (self.static or done.any()):
            return self.nothing[:, :A]
        k.masked_fill_(done, 0)
        position += done
        number = position - given  # of the next token among those that are chosen; below 0: it is given
        token = self.context[self.numbers[:A], position.clamp(max=self.context.size(1) - 1)]
        chosen = done & (number >= 0)
        if self.static or chosen.any():
            at = slice(A) if self.static or chosen.all() else chosen.nonzero()[:, 0]
            h_hat = model.integrate(self.h[at], s[at], steps[at])
            logits, u = self.head(h_hat.to(self.dtype)), self.uniform[self.numbers[at], number[at]]
            token[at] = torch.where(chosen[at], choose(logits, u, *choice), token[at])
        new, of_row = model.embed(token.clamp(min=0)[:, None])[:, 0], done[:, None]
        e.copy_(torch.where(of_row, new, e))
        x.copy_(torch.where(of_row, new, x))
        return torch.where(done, torch.stack([steps, token]), -1)
