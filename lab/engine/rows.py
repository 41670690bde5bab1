"""The rows of a batch on the device, and the pass that advances each of them by one slot.

Everything that a pass decides is decided here, on the device: which slot is next, how many steps a token
takes, which token follows. What differs between methods is asked of the model: embed, route, mask_keys,
feed_back, integrate. The host only reads the result. So a GPU can run passes ahead of the host and replay
each one as a CUDA graph (cuda_graphs.py), and a CPU can run a pass as one compiled program (compiled.py).

code        shape        meaning
B                        rows of the batch
A                        rows that run, 0 .. A-1; a compiled pass runs all B
e           (B, D)       embedding of each row's token
x           (B, D)       input of its next slot
h           (B, S, D)    outputs of the slots of its token that have run
s           (B, S)       step distribution of its token
channels    (B, S, c)    log w of the keys of its slots, see kernels.log_w_channels; on the grid K more, see
                         cache.slot_channels
counters    (B, 6)       k          which slot of its token is next, 0 .. K-hat
                         steps      K-hat of its token
                         position   of its token in the text
                         length     places of the cache that the row has filled
                         given      tokens that the row begins with; the tokens behind them are chosen
                         limit      tokens that the row reads; then it stands still
context     (B, T)       the tokens that the row begins with
uniform     (B, T)       a random number for each token that is chosen
"""

import torch

from lab.engine.cache import SlotCache, slot_channels
from lab.engine.choosing import choose
from lab.engine.slot_step import Product, make_step
from lab.kernels import log_w_channels, query_channels
from router import stop_step

STATE = ("e", "x", "h", "s", "channels", "counters", "context", "uniform")  # the tensors of the table


class Rows:
    """The state of `batch_size` rows.

    Args:
        model: what they decode with.
        batch_size: B.
        dtype: of the matrix products and the cache.
        tau, alpha: as PonderLM.ponder_token.
        static: compute everything for all rows, and look at no value: looking would make the host wait for a
            GPU, and cannot be compiled. Otherwise a pass leaves out what no row needs.
        compiled: whether the pass will be compiled.
    """

    def __init__(self, model, batch_size, dtype, tau, alpha, static=False, compiled=False):
        config = model.config
        weight = model.lm_head.weight
        on_device = dict(device=weight.device)
        B = batch_size
        T = config.block_size
        D = config.hidden_size
        S = config.ponder_steps + 1
        self.model = model
        self.dtype = dtype
        self.tau = tau
        self.alpha = alpha
        self.static = static
        self.cache = SlotCache(model, B, dtype, weight.device)
        self.step = make_step(model, B, dtype, compiled)
        self.head = Product(weight, dtype, B, compiled)  # (.., D) -> (.., V)

        self.e = weight.new_zeros(B, D)
        self.x = weight.new_zeros(B, D)
        self.h = weight.new_zeros(B, S, D)
        self.s = torch.zeros_like(model.route(self.h)[0])
        self.channels = torch.zeros(B, S, 2, dtype=dtype, **on_device)
        self.queries = None  # (S, c) channels of the queries of each slot, on the grid
        if model.grid:
            queries, self.slot_keys = slot_channels(
                S - 1, config.head_width, dtype, weight.device
            )  # (S, K) each
            self.channels = torch.cat([self.channels, self.slot_keys.expand(B, -1, -1)], dim=-1)
            of_log_w = query_channels(config.head_width, dtype, weight.device)[:2].expand(S, 2)
            self.queries = torch.cat([of_log_w, queries], dim=-1)
        self.counters = torch.zeros(B, 6, dtype=torch.long, **on_device)
        self.context = torch.zeros(B, T, dtype=torch.long, **on_device)
        self.uniform = torch.zeros(B, T, dtype=torch.float64, **on_device)

        self.numbers = torch.arange(B, **on_device)
        self.first_slots = S * self.numbers  # where slot 0 of each row stands among the B*S slots
        self.nothing_read = torch.full((2, B), -1, **on_device)

    # -- Rows come and go --------------------------------------------------------------------------

    def begin(self, rows, tokens, counters, uniform, contexts):
        """Let texts begin in some rows.

        Args:
            rows: a list of R row numbers.
            tokens: (R,) the token that each row reads next.
            counters: (R, 6).
            uniform, contexts: (R, T), padded.
        """
        device = self.x.device
        at = torch.tensor(rows).to(device)
        self.counters[at] = counters.to(device)
        self.uniform[at] = uniform.to(device)
        self.context[at] = contexts.to(device)
        e = self.model.embed(tokens.to(device)[:, None])[:, 0]
        self.e[at] = e
        self.x[at] = e

    def move(self, source, target, length):
        """Replace row `target` by row `source`, which has filled at most `length` places of the cache."""
        for name in STATE:
            state = getattr(self, name)
            state[target] = state[source]
        self.cache.copy(source, target, length)

    # -- A pass ------------------------------------------------------------------------------------

    def advance(self, A, places, choice):
        """Run the next slot of rows 0 .. A-1.

        Args:
            A: how many rows run.
            places: how many places of the cache they see.
            choice: temperature, top_k and top_p, see choosing.choose.

        Returns:
            (2, A): the steps of the token that the row has now read, -1 where it has not finished one; and
            the token that follows it, -1 where the logits are not finite.
        """
        # Views of the state of these rows, which are changed in place.
        k, steps, position, length, given, limit = self.counters[:A].unbind(1)
        e = self.e[:A]
        x = self.x[:A]
        self.cache.see(A, places)
        h = self.run_slot(x, k, position, length)
        begins = k == 0
        if self.static or begins.any():
            self.route(A, h, begins, steps)

        moves = (position < limit).long() if self.static else 1  # otherwise only rows that move run
        length += moves
        k += moves
        done = k > steps  # the token has been read
        x.copy_(self.model.feed_back(h, e))
        if not (self.static or done.any()):
            return self.nothing_read[:, :A]

        k.masked_fill_(done, 0)
        position += done
        token = self.next_token(A, done, steps, position, given, choice)
        of_token = self.model.embed(token.clamp(min=0)[:, None])[:, 0]  # (A, D)
        of_done = done[:, None]
        e.copy_(torch.where(of_done, of_token, e))
        x.copy_(torch.where(of_done, of_token, x))
        return torch.where(done, torch.stack([steps, token]), -1)

    # Its parts. k, steps, position, length and given are the columns of the counters, (A,) each.

    def run_slot(self, x, k, position, length):
        """Run the slots of inputs x (A, D) through the backbone. -> the outputs (A, D), also kept in `h`"""
        slot = self.first_slots[: len(x)] + k  # among the B*S slots of all rows
        of_key = self.channels.flatten(0, 1).index_select(0, slot)[:, None]  # (A, 1, c)
        of_query = None if self.queries is None else self.queries[k][:, None]
        h = self.step(x, self.cache, position, length, of_key, of_query)
        self.h.view(-1, h.size(1)).index_copy_(0, slot, h)
        return h

    def route(self, A, h, begins, steps):
        """Set s, steps and the log w of the keys of each row that `begins` (A,) a token, by h (A, D), which
        is the output of slot 0 in these rows."""
        s = self.s[:A]
        new_s, log_w = self.model.route(h[:, None], self.alpha)  # (A, S) each
        s.copy_(torch.where(begins[:, None], new_s, s))
        steps.copy_(torch.where(begins, stop_step(log_w, self.tau), steps))
        key_log_w = self.model.mask_keys(log_w)
        if key_log_w is not None:
            channels = self.channels[:A, :, :2]
            new_channels = log_w_channels(key_log_w, self.model.config.head_width, self.dtype)
            channels.copy_(torch.where(begins[:, None, None], new_channels, channels))

    def next_token(self, A, done, steps, position, given, choice):
        """The token at each row's position, (A,): one that the row begins with or, in rows that are `done`
        (A,) with all of those, one that is chosen by the states of the token before."""
        token = self.context[self.numbers[:A], position.clamp(max=self.context.size(1) - 1)]
        number = position - given  # among the tokens that are chosen; negative: it is given
        chosen = done & (number >= 0)
        if not (self.static or chosen.any()):
            return token
        at = slice(A) if self.static or chosen.all() else chosen.nonzero()[:, 0]
        h_hat = self.model.integrate(self.h[at], self.s[at], steps[at])
        logits = self.head(h_hat.to(self.dtype))
        uniform = self.uniform[self.numbers[at], number[at]]  # of given tokens any number, which is not used
        token[at] = torch.where(chosen[at], choose(logits, uniform, *choice), token[at])
        return token
