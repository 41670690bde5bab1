"""Early-exit decoding of many sequences at once, so that every skipped slot saves time.

What `sample.stream` does for one sequence, with the same results. Three things make it fast:

- Slot-level batching. Tokens stop at different depths, so sequences drift apart. A forward pass
  advances each by one slot, whichever that is: nobody waits for the slowest, and a sequence that
  ends makes room for one that waits.

      pass       1   2   3   4   5   6   7         sequence a: K-hat = 1 0 2,  b: K-hat = 2 2
      a         x1  h1  x2  x3  h3  h3  x4
      b         x1  h1  h1  x2  h2  h2  x3

- A cache of executed slots only, that is there from the start (cache.py).
- Prompts are read in parallel (prefill.py), and the step of one slot has nothing in it that could
  be done once before (slot_step.py).

code       shape                  meaning
A                                 sequences that run now, rows 0 .. A-1; at most B = batch_size
x          (B, D)                 input of each row's next slot
k          0 .. K-hat             which slot of its token that is
s          (B, S)                 step distribution of each row's token, 0 beyond K-hat
key_bias   (B, S)                 of the keys of its slots
h_hat      (B, D)                 s_0 h^(0) + .. + s_k h^(k), as far as the token has come
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from engine.cache import PromptLayer, SlotCache
from engine.choosing import Sample, check_request, choose, uniform
from engine.cuda_graphs import StaticStep
from engine.prefill import settle
from engine.slot_step import SlotStep
from model import Count, settings
from router import mask_score
from runtime import UserError, autocast


@dataclass
class Sequence:
    """A text that grows, in one row. It is `length` 0 before its context is read, and again when
    the context has outgrown the window."""

    index: int  # which prompt
    context: list[int]  # the tokens of its window, some of them not read yet
    uniform: deque[float]  # a random number for each token that is still to be chosen
    read: list[int]  # steps of every token read
    steps: int = 0  # K-hat of the token that is being read
    position: int = 0  # of that token
    k: int = 0  # the slot of it that runs next
    length: int = 0  # places used in the cache


@dataclass
class Stats:
    """What was done, summed over the calls of an engine."""

    prompt_passes: int = 0  # in parallel
    passes: int = 0  # slot by slot
    slots: int = 0  # that these passes ran
    seconds: float = 0.0  # that they took, with the choice of tokens


@settings
class EngineOptions:
    batch_size: Count = 8  # sequences that run at once
    tau: float = 1e-4  # as PonderLM.ponder_token
    alpha: float = 0.0
    prefill: Literal["jacobi", "sequential"] = "jacobi"  # prompts in parallel, or slot by slot
    # of the former, see prefill.settle. None: 1e-5; in half precision, whose rounding keeps the
    # latents moving by 3e-3, it is 1e-2
    tolerance: Annotated[float, Field(ge=0, lt=1)] | None = None
    max_passes: Count = 100
    graphs: bool = False  # the slot step with static shapes, one launch on CUDA: cuda_graphs.py


class Engine:
    """Decodes with a PonderLM whose latents are a fixed point: PonderLM-3, PonderLM-2 and vanilla.

    Args:
        model: in evaluation mode. Part of it is copied: do not change it afterwards.
        dtype: of the matrix products and the cache; None: that of the weights.
        batch_size, options: see EngineOptions.

    Raises:
        UserError: a method that only sample.py decodes.
        pydantic.ValidationError: an option out of its range.
    """

    @torch.inference_mode()
    def __init__(self, model, batch_size=8, *, dtype=None, **options):
        config, weight = model.config, model.lm_head.weight
        if not model.iterates:
            raise UserError(
                f"{config.method} keeps a cache of its own kind, which the engine does not know: "
                "decode it with python sample.py"
            )
        self.model, self.options = model, EngineOptions(batch_size=batch_size, **options)
        check_request(model, [], 0, tau=self.options.tau, alpha=self.options.alpha)
        self.device, self.dtype = weight.device, dtype or weight.dtype
        self.cache = SlotCache(config, batch_size, self.dtype, self.device)
        self.step = SlotStep(model, batch_size, self.dtype)
        if self.options.graphs:
            self.step = StaticStep(self.step, self.cache.block)
        self.head = weight.to(self.dtype).T.contiguous()  # (D, V), see slot_step.Layer
        self.x, self.h_hat = weight.new_zeros(2, batch_size, config.hidden_size)
        s, _ = model.router(self.x)
        self.s, self.key_bias = s.clone(), torch.zeros_like(s)  # all, without a learned router
        if model.has_router:
            self.router = model.router.proj.weight.T.contiguous()  # (D, S)
            slots = torch.arange(s.size(-1), device=self.device)
            self.shift = model.router.offset + self.options.alpha * slots  # (S,)
        self.running = []  # Sequence number i runs in row i
        self.stats = Stats()

    # -- Texts -------------------------------------------------------------------------------------

    def generate(self, prompts, max_new_tokens, **kwargs):
        """Continue each prompt; arguments and results as sample.generate. -> a Sample a prompt."""
        prompts = list(prompts)
        samples = [Sample([], []) for _ in prompts]
        for i, token, steps in self.stream(prompts, max_new_tokens, **kwargs):
            samples[i].tokens.append(token)
            samples[i].steps.append(steps)
        return samples

    @torch.inference_mode()  # also saves a fifth of the time of small operations
    def stream(self, prompts, max_new_tokens, *, end=None, until=None, read=None, **choice):
        """Yield (i, token, steps) for each token of prompt i, as they come; see `generate`.

        A sequence also ends where `until`, called with (i, token) once for each token, says so.
        `read`, a list for each prompt, receives the steps of every token that is read.

        Raises:
            RuntimeError: another stream of this engine has begun, which has only one cache.
        """
        prompts, o = list(prompts), self.options
        choice = check_request(
            self.model, prompts, max_new_tokens, end=end, tau=o.tau, alpha=o.alpha, **choice
        )
        waiting = deque(range(len(prompts) if max_new_tokens else 0))
        running = self.running = []
        while running or waiting:
            if running is not self.running:
                raise RuntimeError("another stream of this engine has begun: it takes two engines")
            while waiting and len(running) < o.batch_size:
                i = waiting.popleft()
                seed = None if choice.seed is None else choice.seed + i
                numbers = deque(uniform(seed, max_new_tokens).tolist())
                context = [int(token) for token in prompts[i]]
                running.append(Sequence(i, context, numbers, [] if read is None else read[i]))
            rows, logits = self.begin()
            start = time.perf_counter()  # reading prompts in parallel does not count
            if not rows:
                rows, logits = self.advance()
            if rows:
                u = [running[row].uniform.popleft() for row in rows]
                u = torch.tensor(u, dtype=torch.float64)
                tokens = choose(logits, u, choice.temperature, choice.top_k, choice.top_p)
                self.feed(rows, tokens)
                events = self.append(rows, tokens.tolist(), end, until)
            self.stats.seconds += time.perf_counter() - start
            if rows:
                yield from events

    def begin(self):
        """Begin with the contexts of which nothing is in the cache.

        Read in parallel -> their rows, logits (R, V) after them. Else they start on their first
        token -> [], None.
        """
        rows, window = [], self.model.config.block_size
        for row, q in enumerate(self.running):
            if q.length == 0:
                if len(q.context) > window:
                    q.context = q.context[-max(window // 2, 1) :]
                q.position, q.k, q.steps = 0, 0, self.model.config.ponder_steps
                self.cache.clear(row)
                rows.append(row)
        if rows and self.options.prefill == "jacobi":
            return rows, self.read_prompts(rows)
        if rows:
            self.feed(rows, [self.running[row].context[0] for row in rows])
        return [], None

    def append(self, rows, tokens, end, until):
        """A token more for each of these rows; some end with it. -> [(prompt, token, steps)]"""
        events, ended = [], []
        for row, token in zip(rows, tokens, strict=True):
            q = self.running[row]
            q.context.append(token)
            events.append((q.index, token, q.read[-1]))
            stop = until is not None and until(q.index, token)
            if stop or token == end or not q.uniform:
                ended.append(row)
            elif len(q.context) > self.model.config.block_size:
                q.length = 0
        for row in reversed(ended):
            self.drop(row)
        return events

    def drop(self, row):
        """A sequence has ended: the last one moves to its row."""
        last = self.running.pop()
        if row < len(self.running):
            self.running[row] = last
            self.cache.copy(len(self.running), row, last.length)
            for state in (self.x, self.h_hat, self.s, self.key_bias):
                state[row] = state[len(self.running)]

    # -- Prompts -----------------------------------------------------------------------------------

    def read_prompts(self, rows):
        """Read the contexts of some rows in parallel -> logits (R, V) after their last tokens."""
        sequences = [self.running[row] for row in rows]
        lengths = torch.tensor([len(q.context) for q in sequences])
        idx = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
        for i, q in enumerate(sequences):
            idx[i, : len(q.context)] = torch.tensor(q.context)
        at, lengths, idx = (x.to(self.device) for x in (torch.tensor(rows), lengths, idx))
        half, o = self.dtype in (torch.bfloat16, torch.float16), self.options
        tolerance = (1e-2 if half else 1e-5) if o.tolerance is None else o.tolerance
        with autocast(self.device, self.dtype if half else torch.float32):
            found = settle(
                self.model, idx, o.tau, o.alpha, lengths=lengths, tolerance=tolerance,
                max_passes=o.max_passes,
                cache=[PromptLayer(self.cache, i, at) for i in range(len(self.cache.layers))],
            )  # fmt: skip
        for row, q, steps in zip(rows, sequences, found.steps.tolist(), strict=True):
            q.position = len(q.context)
            q.read += steps[: q.position]
            q.length = q.position + sum(steps)
            self.cache.clear(row, q.length)  # what earlier passes wrote behind its slots
        self.stats.prompt_passes += found.passes
        h_hat = self.model.integrate(found.h, found.s, found.steps)
        return self.logits(h_hat[torch.arange(len(rows)), lengths - 1])

    # -- One slot ----------------------------------------------------------------------------------

    def advance(self):
        """One pass: every running sequence by one slot.

        -> the rows that have read all of their contexts, and logits (R, V) after them; or [], None.
        """
        running, A = self.running, len(self.running)
        plan = [(q.position, q.length, q.k, q.k > 0) for q in running]
        position, length, k, pondering = torch.tensor(plan).to(self.device).unbind(1)
        k, pondering = k[:, None], pondering[:, None]
        places = max(q.length for q in running) + 1
        self.cache.reserve(places)
        key_bias = self.key_bias[:A].gather(1, k)  # 0 of every slot 0, whichever token's it is
        h = self.step(self.x[:A], self.cache.layers, places, position, length, key_bias)
        if self.model.has_router:
            self.route([row for row, q in enumerate(running) if q.k == 0], h)
        self.h_hat[:A].mul_(pondering).addcmul_(self.s[:A].gather(1, k), h)
        self.x[:A] = self.model.feed_back(h)
        self.stats.passes += 1
        self.stats.slots += A
        return self.next_slots()

    def route(self, rows, h):
        """How far the tokens of these rows will go, by their h^(0) in h (A, D)."""
        if not rows:
            return
        at = self.at(rows)
        log_s = torch.addmm(self.shift, h[at], self.router).log_softmax(-1)  # as Router.forward
        log_w = mask_score(log_s)
        steps = self.model.executed(log_w, self.options.tau)
        self.s[at] = self.model.step_weights(log_s.exp(), steps)
        self.key_bias[at] = self.model.key_bias(log_w)
        for row, K_hat in zip(rows, steps.tolist(), strict=True):
            self.running[row].steps = K_hat

    def next_slots(self):
        """Every sequence goes on to its next slot, of the same token or the next; see `advance`."""
        done, reading = [], []
        for row, q in enumerate(self.running):
            q.length += 1
            q.k += 1
            if q.k > q.steps:
                q.read.append(q.steps)
                q.position, q.k = q.position + 1, 0
                (done if q.position == len(q.context) else reading).append(row)
        if reading:  # a prompt that is read slot by slot
            tokens = [self.running[row].context[self.running[row].position] for row in reading]
            self.feed(reading, tokens)
        return done, self.logits(self.h_hat[self.at(done)]) if done else None

    def feed(self, rows, tokens):
        """The embeddings of tokens become the next inputs of rows."""
        tokens = torch.as_tensor(tokens, device=self.device)
        e = F.embedding(tokens, self.model.model.embed_tokens.weight)  # as PonderLM.embed
        self.x[self.at(rows)] = e * self.model.config.scale

    def logits(self, h_hat):
        return h_hat.to(self.dtype) @ self.head

    def at(self, rows):
        """An index of ascending rows, a slice where it can be: that is faster."""
        if rows[-1] - rows[0] == len(rows) - 1:
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, device=self.device)
