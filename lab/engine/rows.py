"""The rows of a batch on the device, and the pass that advances each of them by one slot.

A pass decides everything here, on the device: which slot is next, how many steps a token takes, and which
token follows. Where methods differ, the model's own methods are called: embed, route, mask_keys, feed_back
and integrate. The host only reads the result. So a GPU can run passes ahead of the host and replay each one
as a CUDA graph (cuda_graphs.py), and a CPU can run a pass as one compiled program (compiled.py).

code        shape        meaning
B                        rows of the batch
A                        rows that run, 0 .. A-1; a compiled pass runs all B
e           (B, D)       embedding of each row's token, the one that the row is reading
x           (B, D)       input of the row's next slot
h           (B, S, D)    outputs of the slots of the row's token that have run
s           (B, S)       step distribution of the row's token
channels    (B, S, c)    channels of the keys of the token's slots: two for log w (kernels.log_w_channels); on
                         the grid (methods/grid.py: slot k sees slots up to k only) K more, which say to which
                         slot a key belongs (cache.slot_channels)
counters    (B, 6)       k          which slot of the row's token is next, 0 .. K-hat
                         steps      K-hat of the row's token
                         position   of the row's token in the text
                         length     places of the cache that the row has filled
                         given      tokens with which the row begins; the tokens after them are chosen
                         limit      tokens that the row reads; then it stands still
context     (B, T)       the tokens with which the row begins
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
        model: the model that decodes.
        batch_size: B.
        dtype: the dtype of the matrix products and the cache.
        tau, alpha: as in PonderLM.ponder_token.
        static: whether a pass computes everything for all rows, and looks at no value: looking at a value
            would make the host wait for a GPU, and cannot be compiled. A pass that is not static leaves out
            what no row needs.
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
        s, _ = model.route(self.h)
        self.s = torch.zeros_like(s)  # (B, S), in the precision of the router
        self.channels = torch.zeros(B, S, 2, dtype=dtype, **on_device)
        self.queries = None  # (S, c) channels of the queries of each slot, on the grid
        if model.grid:
            # (S, K) each
            queries, self.slot_keys = slot_channels(S - 1, config.head_width, dtype, weight.device)
            self.channels = torch.cat([self.channels, self.slot_keys.expand(B, -1, -1)], dim=-1)
            of_log_w = query_channels(config.head_width, dtype, weight.device)[:2].expand(S, 2)
            self.queries = torch.cat([of_log_w, queries], dim=-1)
        self.counters = torch.zeros(B, 6, dtype=torch.long, **on_device)
        self.context = torch.zeros(B, T, dtype=torch.long, **on_device)
        self.uniform = torch.zeros(B, T, dtype=torch.float64, **on_device)

        self.row_index = torch.arange(B, **on_device)
        self.first_slots = S * self.row_index  # the index of each row's slot 0 among the B*S slots
        self.nothing_read = torch.full((2, B), -1, **on_device)

    # -- Rows come and go --------------------------------------------------------------------------

    def begin(self, rows, tokens, counters, uniform, contexts):
        """Let texts begin in some rows.

        Args:
            rows: a list of R row indices.
            tokens: (R,) the token that each row reads next.
            counters: (R, 6), as in the table.
            uniform, contexts: (R, T), as in the table, padded.
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
        """Replace row `target` by row `source`. Row `source` has filled at most `length` places of the
        cache."""
        for name in STATE:
            state = getattr(self, name)
            state[target] = state[source]
        self.cache.copy(source, target, length)

    # -- A pass ------------------------------------------------------------------------------------

    def advance(self, A, places, choice):
        """Run the next slot of rows 0 .. A-1.

        Args:
            A: how many rows run.
            places: how many places of the cache these rows see.
            choice: temperature, top_k and top_p, see choosing.choose.

        Returns:
            (2, A). In rows that have finished reading a token: its steps, and the token that follows it,
            which is -1 if the logits are not finite. In other rows: -1 and -1.
        """
        # These are views of the state of the rows. What follows changes them in place.
        k, steps, position, length, given, limit = self.counters[:A].unbind(1)
        e = self.e[:A]
        x = self.x[:A]
        self.cache.see(A, places)
        h = self.run_slot(x, k, position, length)
        begins = k == 0
        if self.static or begins.any():
            self.route(A, h, begins, steps)

        if self.static:
            moves = (position < limit).long()
        else:
            # All rows have something left to read: `stream` releases a row as soon as its text ends.
            moves = 1
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

    # The parts of a pass. k, steps, position, length and given are columns of the counters, (A,) each.

    def run_slot(self, x, k, position, length):
        """Run the slots with the inputs x (A, D) through the backbone, and keep their outputs in `h`.

        Returns:
            The outputs, (A, D).
        """
        slot = self.first_slots[: len(x)] + k  # (A,) the index of each slot among the B*S slots
        of_key = self.channels.flatten(0, 1).index_select(0, slot)[:, None]  # (A, 1, c)
        of_query = None if self.queries is None else self.queries[k][:, None]
        h = self.step(x, self.cache, position, length, of_key, of_query)
        self.h.view(-1, h.size(1)).index_copy_(0, slot, h)
        return h

    def route(self, A, h, begins, steps):
        """Apply the router to the rows that have just run slot 0 of a token. This overwrites their rows of
        `s` and `steps`, and the log w in their `channels`.

        Args:
            A: how many rows run.
            h: (A, D) the outputs of this pass.
            begins: (A,) whether a row has just run slot 0.
            steps: (A,) a column of the counters.
        """
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
        """The token at each row's position, (A,): the one in `context` as long as the context lasts. After
        that, in rows that are `done` (A,), a token that is chosen by the states of the token just read."""
        token = self.context[self.row_index[:A], position.clamp(max=self.context.size(1) - 1)]
        chosen_before = position - given  # how many tokens have been chosen; negative: this one is given
        chosen = done & (chosen_before >= 0)
        if not (self.static or chosen.any()):
            return token
        at = slice(A) if self.static or chosen.all() else chosen.nonzero()[:, 0]
        h_hat = self.model.integrate(self.h[at], self.s[at], steps[at])
        logits = self.head(h_hat.to(self.dtype))
        # Where the token is given, the index is negative; the number that it reads there is not used.
        uniform = self.uniform[self.row_index[at], chosen_before[at]]
        token[at] = torch.where(chosen[at], choose(logits, uniform, *choice), token[at])
        return token
