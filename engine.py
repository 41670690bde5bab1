"""Early-exit decoding of many sequences at once, so that every skipped slot saves time.

What `sample.stream` does for one sequence, with the same results. Three things make it fast:

- Slot-level batching. Tokens stop at different depths, so sequences drift apart. A forward pass
  advances each by one slot, whichever that is: nobody waits for the slowest, and a sequence that
  ends makes room for one that waits.

      pass       1   2   3   4   5   6   7         sequence a: K-hat = 1 0 2,  b: K-hat = 2 2
      a         x1  h1  x2  x3  h3  h3  x4
      b         x1  h1  h1  x2  h2  h2  x3

- A cache that is there from the start, of executed slots only. An empty place has a bias that
  hides it, so that rows of different lengths need no mask.
- Prompts are read in parallel (compact.py), and the step of one slot has nothing in it that could
  be done once before (slot.py).

code       shape                  meaning
A                                 sequences that run now, rows 0 .. A-1; at most `batch_size`
kv         L of (B, 2G, M, d')    a layer's cache: keys of G heads, with their bias, and values
x          (B, D)                 input of each row's next slot
k                                 which slot of its token that is; `stop` is K-hat
s, bias    (B, S)                 step distribution, and the key bias of each slot
h_hat      (B, D)                 s_0 h^(0) + .. + s_k h^(k), as far as it has come
"""

import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attention import MASKED, attend_causally, augment
from choose import Sample, check, choose, uniform
from compact import settle
from config import PONDER
from device import autocast
from graph import StaticStep
from router import mask_score
from slot import SlotStep

BLOCK = 256  # places by which the cache grows


class PromptCache:
    """One layer's attention while prompts are read: causal, and what it sees goes to the cache."""

    def __init__(self, engine, layer, at):
        self.engine, self.layer, self.at = engine, layer, at  # at: the prompts' rows in the cache
        self.rows = None  # of these, the ones that settle() is running

    def attend(self, q, k, v, log_w):
        d, N = q.size(-1), q.size(2)
        if log_w is None:
            log_w = k.new_zeros(k.size(0), N)
        q, k, v = augment(q, k, v, log_w)
        self.engine.reserve(N)
        kv = self.engine.kv[self.layer]
        kv[self.at[self.rows], :, :N] = torch.cat([k, v], dim=1).to(kv.dtype)
        return attend_causally(q, k, v, d)


@dataclass
class Sequence:
    index: int  # which prompt
    context: list[int]  # the tokens of its window, some of them not read yet
    uniform: list[float]  # a random number for each token to be chosen
    read: list[int]  # steps of every token read
    new: bool = True  # nothing of the context is in the cache
    position: int = 0  # of the token that is being read
    k: int = 0  # the slot of it that runs next
    stop: int = 0  # K-hat of that token
    length: int = 0  # places used in the cache
    chosen: int = 0  # tokens


@dataclass
class Stats:
    """What was done, summed over the calls of an engine."""

    prompt_passes: int = 0  # in parallel
    seconds: float = 0.0  # of all else: slot by slot
    passes: int = 0
    slots: int = 0


class Engine:
    """Decodes with a PonderLM: any of PonderLM-3, PonderLM-2 and vanilla.

    Args:
        model: a PonderLM, in evaluation mode. Part of it is copied: do not change it afterwards.
        batch_size: sequences that run at once.
        tau, alpha: as PonderLM.ponder_token.
        prefill: 'jacobi' reads prompts in parallel; 'sequential' slot by slot, which is exact.
        tolerance, max_passes: of the former, see compact.settle. A tolerance of None is 1e-5; in
            half precision, whose rounding keeps the latents moving by 3e-3, it is 1e-2.
        dtype: of the matrix products and the cache; None: that of the weights.
        graphs: the slot step with static shapes, a single launch on CUDA; see graph.py.

    Raises:
        ValueError: another method, or a setting out of its range.
    """

    @torch.inference_mode()
    def __init__(
        self, model, batch_size=8, *, tau=1e-4, alpha=0.0, prefill="jacobi", tolerance=None,
        max_passes=100, dtype=None, graphs=False,
    ):  # fmt: skip
        config = model.config
        if config.method not in PONDER:
            raise ValueError(f"{config.method} has caches of its own kind: use sample.generate")
        check(model, [], 0, tau=tau, alpha=alpha)
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size}: it must be at least 1")
        if prefill not in ("jacobi", "sequential"):
            raise ValueError(f"prefill = {prefill!r} is neither 'jacobi' nor 'sequential'")
        weight = model.lm_head.weight
        self.device, self.dtype = weight.device, dtype or weight.dtype
        self.half = self.dtype in (torch.bfloat16, torch.float16)
        if tolerance is None:
            tolerance = 1e-2 if self.half else 1e-5
        if not 0 <= tolerance < 1 or max_passes < 1:
            raise ValueError(
                f"tolerance = {tolerance}, max_passes = {max_passes}: a tolerance lies in [0, 1), "
                "and there has to be a pass"
            )
        self.model, self.batch_size, self.tau, self.alpha = model, batch_size, tau, alpha
        self.prefill, self.tolerance, self.max_passes = prefill, tolerance, max_passes
        self.head = weight.to(self.dtype).T.contiguous()  # (D, V), see slot.Layer
        slot = SlotStep(model, batch_size, self.dtype)
        self.G, self.d, self.width = slot.G, slot.d, slot.width
        self.step = StaticStep(slot, BLOCK) if graphs else slot
        B, D, S = batch_size, config.hidden_size, config.ponder_steps + 1
        self.x, self.h_hat = torch.zeros(2, B, D, dtype=weight.dtype, device=self.device)
        s, bias = model.router(self.x, 0.0)  # all there is to know without a learned router
        self.s, self.bias = s.clone(), torch.zeros_like(bias)
        self.depth = 0 if model.masks else S - 1
        if model.masks:
            self.router = model.router.proj.weight.T.contiguous()  # (D, S)
            self.shift = model.router.offset + alpha * torch.arange(S, device=self.device)
        self.kv = self.empty(0)
        self.stats, self.streams = Stats(), 0

    # -- The cache ---------------------------------------------------------------------------------

    def empty(self, places):
        """Cache with nothing in it: the bias channel of all keys says that they are not there."""
        shape = (self.batch_size, 2 * self.G, places, self.width)
        kv = torch.zeros(shape, dtype=self.dtype, device=self.device)
        kv[:, : self.G, :, self.d] = MASKED
        return [kv.clone() for _ in self.model.model.layers]

    def reserve(self, places):
        """Let every row have room for so many places."""
        before = self.kv[0].size(2)
        if places > before:
            places = -(-places // BLOCK) * BLOCK
            larger = self.empty(places)
            for new, old in zip(larger, self.kv, strict=True):
                new[:, :, :before] = old
            self.kv = larger

    def clear(self, row, first=0):
        """Forget what a row holds from place `first` on."""
        for kv in self.kv:
            kv[row, : self.G, first:, self.d] = MASKED

    # -- One slot ----------------------------------------------------------------------------------

    def advance(self, running):
        """One pass: every sequence by one slot -> the rows whose token is done, logits (R, V)."""
        A = len(running)
        plan = [(q.position, q.length, q.k, q.k > 0) for q in running]
        position, length, k, going = torch.tensor(plan).to(self.device).unbind(1)
        k, going = k[:, None], going[:, None]
        places = max(q.length for q in running) + 1
        self.reserve(places)
        h = self.step(self.x[:A], self.kv, places, position, length, self.bias[:A].gather(1, k))
        if self.model.masks:  # otherwise s, bias and K-hat are the same for every token
            starting = [row for row, q in enumerate(running) if q.k == 0]
            if starting:
                self.route(starting, h, running)
        self.h_hat[:A].mul_(going).addcmul_(self.s[:A].gather(1, k), h)
        self.x[:A] = self.model.feed_back(h)
        done, following = [], []
        for row, q in enumerate(running):
            q.length += 1
            q.k += 1
            if q.k > q.stop:
                q.read.append(q.stop)
                q.position, q.k = q.position + 1, 0
                (done if q.position == len(q.context) else following).append(row)
        if following:  # a prompt that is read slot by slot
            self.feed(following, [running[row].context[running[row].position] for row in following])
        self.stats.passes += 1
        self.stats.slots += A
        return done, self.logits(self.h_hat[self.at(done)]) if done else None

    def route(self, starting, h, running):
        """How far the tokens of these rows will go, by their h^(0), in h (A, D)."""
        rows = self.at(starting)
        log_s = torch.addmm(self.shift, h[rows], self.router).log_softmax(-1)  # as router.Router
        log_w = mask_score(log_s)
        steps = self.model.executed(log_w, self.tau)
        self.s[rows] = self.model.step_weights(log_s.exp(), steps)
        self.bias[rows] = self.model.key_bias(log_w)
        for row, stop in zip(starting, steps.tolist(), strict=True):
            running[row].stop = stop

    def at(self, rows):
        """An index of ascending rows, a slice where it can be: that is faster."""
        if rows[-1] - rows[0] == len(rows) - 1:
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, device=self.device)

    def logits(self, h_hat):
        return h_hat.to(self.dtype) @ self.head

    def feed(self, rows, tokens):
        """The embeddings of tokens become the next inputs of rows."""
        tokens = torch.as_tensor(tokens, device=self.device)
        e = F.embedding(tokens, self.model.model.embed_tokens.weight)
        self.x[self.at(rows)] = e * self.model.config.scale

    # -- Prompts -----------------------------------------------------------------------------------

    def read_prompts(self, rows, sequences):
        """Read the contexts of some rows in parallel -> logits (R, V) after their last tokens."""
        contexts = [sequences[row].context for row in rows]
        lengths = torch.tensor([len(c) for c in contexts])
        idx = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
        for i, context in enumerate(contexts):
            idx[i, : len(context)] = torch.tensor(context)
        lengths, idx = lengths.to(self.device), idx.to(self.device)
        at = torch.tensor(rows, device=self.device)
        with autocast(self.device, self.dtype if self.half else torch.float32):
            found = settle(
                self.model, idx, self.tau, self.alpha, lengths=lengths, tolerance=self.tolerance,
                max_passes=self.max_passes,
                cache=[PromptCache(self, i, at) for i in range(len(self.kv))],
            )  # fmt: skip
        h_hat = self.model.integrate(found.h, found.s, found.steps)
        for i, row in enumerate(rows):
            q = sequences[row]
            q.read += found.steps[i, : len(q.context)].tolist()
            q.position, q.k = len(q.context), 0
            q.length = q.position + int(found.steps[i].sum())
            self.clear(row, q.length)
        self.stats.prompt_passes += found.passes
        return self.logits(h_hat[torch.arange(len(rows)), lengths - 1])

    # -- Sequences ---------------------------------------------------------------------------------

    def begin(self, rows, running):
        """Rows whose context is new: read it in parallel, or start on its first token."""
        for row in rows:
            q, window = running[row], self.model.config.block_size
            if len(q.context) > window:
                q.context = q.context[-max(window // 2, 1) :]
            q.new, q.position, q.k, q.length = False, 0, 0, 0
            self.clear(row)
        if self.prefill == "jacobi":
            return rows, self.read_prompts(rows, running)
        self.feed(rows, [running[row].context[0] for row in rows])
        return [], None

    def drop(self, row, running):
        """A sequence has ended: the last row moves to its place."""
        last = len(running) - 1
        if row < last:
            places = running[last].length
            for kv in self.kv:
                kv[row, :, :places] = kv[last, :, :places]
            self.clear(row, places)
            for state in (self.x, self.h_hat, self.s, self.bias):
                state[row] = state[last]
            running[row] = running[last]
        running.pop()

    @torch.inference_mode()  # also saves a fifth of the time of small operations
    def stream(
        self, prompts, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, seed=None,
        end=None, until=None, read=None,
    ):  # fmt: skip
        """Yield (i, token, steps) for each token of prompt i, as they come; see `generate`.

        A sequence also ends where `until`, called with (i, token) once for each token, says so.
        `read`, a list for each prompt, receives the steps of every token that is read. An engine
        has one cache: a new stream ends the one before.
        """
        prompts, self.streams = list(prompts), self.streams + 1
        mine = self.streams
        check(
            self.model, prompts, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            end=end,
        )  # fmt: skip
        waiting = deque(range(len(prompts) if max_new_tokens else 0))
        running = []  # sequence number i runs in row i
        while running or waiting:
            while waiting and len(running) < self.batch_size:
                i = waiting.popleft()
                u = uniform(None if seed is None else seed + i, max_new_tokens).tolist()
                context = [int(token) for token in prompts[i]]
                steps = [] if read is None else read[i]
                running.append(Sequence(i, context, u, steps, stop=self.depth))
            if mine != self.streams:
                raise RuntimeError("another stream of this engine has begun: it takes two engines")
            start = time.perf_counter()
            new = [row for row, q in enumerate(running) if q.new]
            done, logits = self.begin(new, running) if new else self.advance(running)
            if new:
                start = time.perf_counter()  # reading prompts does not count
            if not done:
                self.stats.seconds += time.perf_counter() - start
                continue
            u = torch.tensor(
                [running[row].uniform[running[row].chosen] for row in done], dtype=torch.float64
            )
            tokens = choose(logits, u, temperature, top_k, top_p)
            self.feed(done, tokens)
            events, ended = [], []
            for row, token in zip(done, tokens.tolist(), strict=True):
                q = running[row]
                q.context.append(token)
                q.chosen += 1
                events.append((q.index, token, q.read[-1]))
                over = q.chosen == max_new_tokens or token == end
                over |= until is not None and until(q.index, token)
                q.new = not over and len(q.context) > self.model.config.block_size
                if over:
                    ended.append(row)
            for row in reversed(ended):
                self.drop(row, running)
            self.stats.seconds += time.perf_counter() - start
            yield from events

    def generate(self, prompts, max_new_tokens, **kwargs):
        """Continue each prompt; arguments and results as sample.generate. -> a Sample a prompt."""
        prompts = list(prompts)
        samples = [Sample([], []) for _ in prompts]
        for i, token, steps in self.stream(prompts, max_new_tokens, **kwargs):
            samples[i].tokens.append(token)
            samples[i].steps.append(steps)
        return samples
