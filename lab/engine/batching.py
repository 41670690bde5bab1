"""Early-exit decoding of many sequences at once, so that every skipped slot saves time.

What sample.stream does for one sequence, with the same results. Five things make it fast:

- Slot-level batching. Tokens stop at different depths, so sequences drift apart. A forward pass advances each
  by one slot, whichever that is: nobody waits for the slowest, and a sequence that ends makes room for one
  that waits.

      pass       1   2   3   4   5   6   7         sequence a: K-hat = 1 0 2,  b: K-hat = 2 2
      a         x1  h1  x2  x3  h3  h3  x4
      b         x1  h1  h1  x2  h2  h2  x3

- A cache of executed slots only, that is there from the start (cache.py).
- Prompts are read in parallel (states.py), and the step of one slot has nothing in it that could be done once
  before (slot_step.py).
- On a CPU the pass can be compiled to one program (compiled.py).
- A GPU does not wait for the host: the state of the rows stays there (rows.py), a pass is replayed as one
  graph (cuda_graphs.py), and the host reads what came out of it two passes later.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch

from data import UserError
from lab.common import autocast
from lab.engine.cache import GridPrompt, PromptLayer
from lab.engine.compiled import Compiled
from lab.engine.cuda_graphs import Fetched, Graphs, rounded
from lab.engine.request import check_request, choose_finite, gather, not_finite, uniform
from lab.engine.rows import Rows
from lab.engine.slot_step import overridden
from lab.engine.states import read_on_grid, settle
from lab.kernels import HALF
from lab.methods import PonderLM3
from lab.methods.grid import Grid

PLACES = 16  # a CPU's passes see multiples of so many places
MANY = 4  # from so many rows on, a CPU iterates over prompts for longer than slot by slot takes

# What a method may do otherwise: what the engine asks the model for, and what is not about decoding.
FOLLOWED = {"embed", "route", "mask_keys", "feed_back", "integrate"}
BESIDE = {"method", "title", "Config", "defaults", "unused", "priced", "has_router", "iterates", "grid"}
BESIDE |= {"feedback_rate", "objective", "training_forwards", "param_groups", "init_weights", "__init__"}
BESIDE |= {"cross_entropy", "partial_losses", "tie"}


def serves(model):
    """Whether the Engine decodes models of this method: one that iterates, or on the grid, and does otherwise
    only what is FOLLOWED, or BESIDE decoding. simple.py decodes all."""
    known = Grid if model.grid else PonderLM3
    return (model.iterates or model.grid) and overridden(type(model), known) <= FOLLOWED | BESIDE


@dataclass
class Sequence:
    """A text that grows, in one row, as far as the host knows it."""

    index: int  # which prompt
    context: list[int]  # the tokens of its window, some of them not read yet
    uniform: torch.Tensor  # (max_new_tokens,) a random number for each token that is chosen
    read: list[int]  # steps of every token read
    chosen: int = 0  # tokens chosen so far
    position: int = 0  # tokens of the context that are read
    length: int = 0  # places that it may have used in the cache
    state: Literal["new", "running", "ended"] = "new"  # new: its context is to be read (again)


@dataclass
class Stats:
    """What was done, summed over the calls of an engine."""

    passes: int = 0  # slot by slot, without those that read prompts in parallel
    slots: int = 0  # that these passes ran


class Engine:
    """Decodes with PonderLM-3, PonderLM-2, both on the grid, and vanilla.

    Args:
        model: in evaluation mode. Part of it is copied: do not change it afterwards.
        batch_size: sequences that run at once.
        dtype: of the matrix products and the cache; None: that of the weights.
        tau, alpha: as PonderLM.ponder_token.
        prefill: how prompts are read: in parallel (jacobi), slot by slot (sequential), or (auto) in parallel
            where that is faster.
        tolerance: of the first, see states.settle.
        graphs: replay each pass as a CUDA graph; None: where there is CUDA. Elsewhere True runs passes of the
            same static shapes.
        compile: the pass as one program, see compiled.py; of a Llama on a CPU, in float32.

    Raises:
        UserError: a method that only simple.py decodes, a device without float64 (MPS), or a compiled pass
            where that cannot be.
    """

    @torch.inference_mode()
    def __init__(
        self, model, batch_size=8, *, dtype=None, tau=1e-4, alpha=0.0, prefill="auto", tolerance=None,
        graphs=None, compile=False,
    ):  # fmt: skip
        weight = model.lm_head.weight
        if not serves(model):
            raise UserError(
                f"{model.config.method} decodes in a way that the engine does not know: take simple.generate"
            )
        check_request(model, [], tau=tau, alpha=alpha)
        self.model, self.batch_size, self.tau, self.alpha = model, batch_size, tau, alpha
        self.prefill, self.tolerance = prefill, tolerance
        self.device, self.dtype = weight.device, dtype or weight.dtype
        on_gpu = self.device.type != "cpu"
        if self.device.type == "mps":
            raise UserError("the engine chooses tokens in float64, which MPS has not: --device cpu")
        if compile and (on_gpu or self.dtype in HALF or self.dtype != weight.dtype):
            raise UserError("compile is for float32 on a CPU: leave it out, or take that precision")
        self.precision = autocast(self.device, self.dtype if self.dtype in HALF else torch.float32)
        self.ahead = 2 if on_gpu else 0  # passes that may be under way when one is looked at
        graphs = on_gpu if graphs is None else graphs
        self.static = on_gpu or graphs or compile  # a pass computes everything, of all rows
        self.few_shapes = on_gpu or graphs  # rows and places are rounded up to few numbers
        self.rows = Rows(model, batch_size, self.dtype, tau, alpha, self.static, compile)
        self.cache = self.rows.cache
        self.passes = (
            Compiled(self.rows) if compile else Graphs(self.rows, graphs) if self.few_shapes else self.rows
        )
        self.most = self.places(model.config.block_size)
        self.running = []  # Sequence number i runs in row i
        self.stats = Stats()

    # -- Texts -------------------------------------------------------------------------------------

    def generate(self, prompts, max_new_tokens, **kwargs):
        """Continue each prompt; arguments and results as simple.generate, but for tau and alpha, which are
        the engine's. -> a Sample a prompt."""
        prompts = list(prompts)
        return gather(self.stream(prompts, max_new_tokens, **kwargs), len(prompts))

    @torch.inference_mode()  # also saves a fifth of the time of small operations
    def stream(self, prompts, max_new_tokens, *, begin=(), ends=(), read=None, **choice):
        """Yield (i, token, steps) for each token of prompt i, as they come; see `generate`.

        `read`, a list for each prompt, receives the steps of every token that is read.
        """
        prompts, choice = check_request(self.model, prompts, tau=self.tau, alpha=self.alpha, **choice)
        how, T = (choice.temperature, choice.top_k, choice.top_p), self.model.config.block_size
        waiting = deque(range(len(prompts) if max_new_tokens else 0))
        self.prepare(*how)
        self.running, under_way = [], deque()
        if self.static:
            longest = max(map(len, prompts), default=0) + max_new_tokens
            self.cache.reserve(self.places(min(longest, T)))

        while self.running or waiting:
            while waiting and len(self.running) < self.batch_size:
                i = waiting.popleft()
                numbers = uniform(choice.seed, i, max_new_tokens)
                self.running.append(Sequence(i, prompts[i], numbers, [] if read is None else read[i]))
            new = [row for row, q in enumerate(self.running) if q.state == "new"]
            found = self.begin(new, how, begin) if new else []
            if not found:
                under_way.append(self.launch(how))
                found = self.collect(*under_way.popleft()) if len(under_way) > self.ahead else []
            for q, token in found:
                q.context.append(token)
                q.chosen += 1
                if token in ends or q.chosen == max_new_tokens:
                    q.state = "ended"
                elif len(q.context) > T:
                    q.state = "new"
            events = [(q.index, token, q.read[-1]) for q, token in found]
            for row in reversed(range(len(self.running)) if found else ()):
                if self.running[row].state == "ended":
                    self.drop(row)
            yield from events

    @torch.inference_mode()
    def prepare(self, temperature=1.0, top_k=None, top_p=None):
        """Compile the pass for a way to choose, where that is asked for and has not been done."""
        if isinstance(self.passes, Compiled):
            self.cache.reserve(1)  # an empty cache is no example of others
            self.passes.prepare((temperature, top_k, top_p))

    def drop(self, row):
        """A sequence has ended: the last one moves to its row."""
        last = self.running.pop()
        if row < len(self.running):
            self.running[row] = last
            self.rows.move(len(self.running), row, last.length)

    # -- Prompts -----------------------------------------------------------------------------------

    def reads_in_parallel(self):
        """Whether that is the way to read prompts. K+1 passes are always fast, ten or more not."""
        iterates = self.model.iterates and self.model.config.ponder_steps > 0
        slow = iterates and self.device.type == "cpu" and len(self.running) >= MANY
        return dict(jacobi=True, sequential=False, auto=not slow)[self.prefill]

    def begin(self, new, choice, before):
        """Rows begin with contexts of which nothing is in the cache; `before`, the tokens before each text.

        Those that are read in parallel -> [(sequence, its next token)]; the others start on their first
        token -> [].
        """
        T, K = self.model.config.block_size, self.model.config.ponder_steps
        contexts, u = torch.zeros(len(new), T, dtype=torch.long), torch.zeros(len(new), T).double()
        sequences, found = [self.running[row] for row in new], []
        for q, context, numbers in zip(sequences, contexts, u, strict=True):
            if len(q.context) > T:  # as sample.stream slides the window
                q.context = [*before, *q.context[-max(T // 2, 1) :]][-T:]
            q.position, q.length, q.state = 0, 0, "running"
            context[: len(q.context)] = torch.tensor(q.context)
            left = q.uniform[q.chosen :][:T]
            numbers[: len(left)] = left
        if self.reads_in_parallel():
            logits = self.read_each_once(new, contexts)
            tokens = choose_finite(logits, u[:, 0], *choice)
            found = list(zip(sequences, tokens.tolist(), strict=True))
        else:
            tokens = contexts[:, 0]
        for row, q in zip(new, sequences, strict=True):
            self.cache.clear(row, q.length)  # what was written behind its slots
        counters = []  # in the order of rows.py
        for q in sequences:
            given = len(q.context)
            limit = min(T, given + len(q.uniform) - q.chosen - 1)
            counters.append([0, K, q.position, q.length, given, limit])
        self.rows.begin(new, tokens, torch.tensor(counters), u, contexts)
        return found

    def read_each_once(self, rows, contexts):
        """Read the contexts (R, T) of rows, of which some may be the same. -> logits at their ends (R, V)"""
        first = {}  # of each context: the number of the row that reads it
        for i, row in enumerate(rows):
            first.setdefault(tuple(self.running[row].context), i)
        of = [first[tuple(self.running[row].context)] for row in rows]
        reading = [*first.values()]
        steps, logits = self.read_prompts([rows[i] for i in reading], contexts[reading])
        for row, i in zip(rows, of, strict=True):
            q, n = self.running[row], len(self.running[row].context)
            mine = steps[reading.index(i)][:n]
            q.read += mine
            q.position, q.length = n, n + sum(mine)
            if row != rows[i]:
                self.cache.copy(rows[i], row, q.length)
        return logits[[reading.index(i) for i in of]]

    def read_prompts(self, rows, contexts):
        """Read contexts (R, T) into rows of the cache, in parallel. -> the steps of each, logits (R, V)"""
        lengths = torch.tensor([len(self.running[row].context) for row in rows])
        idx = contexts[:, : lengths.max()]
        at, lengths, idx = (x.to(self.device) for x in (torch.tensor(rows), lengths, idx))
        how = dict(tau=self.tau, alpha=self.alpha, lengths=lengths)
        layers = range(len(self.cache.layers))
        with self.precision:
            if self.model.grid:
                prompts = [GridPrompt() for _ in layers]
                found, slot, executed = read_on_grid(self.model, idx, **how, cache=prompts)
                order = (~executed).sort(dim=1, stable=True).indices  # behind them what hides itself
                self.cache.reserve(order.size(1))
                for i, prompt in enumerate(prompts):
                    prompt.write(self.cache, i, at, order, self.rows.slot_keys[slot])
            else:
                prompts = [PromptLayer(self.cache, i, at) for i in layers]
                found = settle(self.model, idx, **how, tolerance=self.tolerance, cache=prompts)
        last = torch.arange(len(rows), device=self.device), lengths - 1
        h_hat = self.model.integrate(found.h[last], found.s[last], found.steps[last])
        return found.steps.tolist(), self.rows.head(h_hat.to(self.dtype))

    # -- One slot ----------------------------------------------------------------------------------

    def places(self, tokens):
        """Places of the cache that so many tokens may take, and one to write to behind them."""
        return tokens * (self.model.config.ponder_steps + 1) + 1

    def launch(self, choice):
        """One pass: every running sequence by one slot. -> its result, and whose it is"""
        A, places = len(self.running), max(q.length for q in self.running) + 1
        if places > self.most + self.ahead:
            raise RuntimeError("a bug: a row stands still, and its sequence does not end")
        if self.few_shapes:
            A = min(rounded(A), self.batch_size)
            places = min(max(rounded(places), self.cache.block), self.cache.layers[0].size(2))
        else:
            places = -(-places // PLACES) * PLACES
            if places > self.cache.layers[0].size(2):
                self.cache.reserve(places)
        out = self.passes.advance(A, places, choice)
        for q in self.running:
            q.length += 1
        self.stats.passes += 1
        self.stats.slots += len(self.running)
        return Fetched(out) if out.is_cuda else out, list(self.running)

    def collect(self, out, sequences):
        """Read what came out of a pass -> [(sequence, token)] where a token was chosen."""
        found = []
        for q, steps, token in zip(sequences, *out.tolist(), strict=False):
            if steps >= 0 and q.state == "running":
                q.read.append(steps)
                q.position += 1
                if q.position == len(q.context):
                    if token < 0:
                        raise not_finite()
                    found.append((q, token))
        return found
