"""Early-exit decoding of many sequences at once, so that every skipped slot saves time.

It computes what simple.stream computes for one sequence, with the same results. Five things make it fast:

- Slot-level batching. Tokens stop at different depths, so sequences drift apart. A pass advances each
  sequence by one slot, whichever slot that is. No sequence waits for the slowest one, and a sequence that
  ends makes room for one that waits.

      pass          1   2   3   4   5   6   7        K-hat of tokens 1, 2, 3
      row 0, a     x1  h1  x2  x3  h3  h3  x4        1  0  2
      row 1, b     x1  h1  h1  x2  h2  h2  x3        2  2

      x3: slot 0 of token 3, which reads its embedding; h3: its next slot, which reads the output of the last

- The cache holds executed slots only, and its memory is there from the start (cache.py).
- Prompts are read in parallel (states.py). The step of one slot does nothing that could have been done once
  before (slot_step.py).
- On a CPU the pass can be compiled to one program (compiled.py).
- A GPU does not wait for the host. The state of the rows stays on the GPU (rows.py), a pass is replayed as
  one graph (cuda_graphs.py), and the host reads the result of a pass two passes later.

word        meaning
row         a line of the batch, which holds one running text: row i of the tensors in rows.py and of the
            cache belongs to running[i]
slot        one token once through the network; a token takes 1 + K-hat slots
place       an entry of the cache in a row; each slot that runs fills the next place of its row
pass        the network once, for the next slot of every row
read        a token has been read when its slots have run; then the token behind it is given or chosen

`Engine.stream` is the loop: free rows take texts (`admit`), new texts are read or begin (`begin`), a pass
runs (`launch`), its result is looked at (`collect`), tokens are appended (`append`), and rows whose text has
ended are freed (`release`).
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch

from common import UserError
from lab.common import autocast
from lab.engine.cache import GridPrompt, PromptLayer
from lab.engine.choosing import check_request, choose_finite, gather, not_finite, uniform
from lab.engine.compiled import Compiled
from lab.engine.cuda_graphs import Fetched, Graphs, rounded
from lab.engine.rows import Rows
from lab.engine.slot_step import overridden
from lab.engine.states import read_on_grid, settle
from lab.kernels import HALF
from lab.methods import PonderLM3
from lab.methods.grid import Grid

PLACES = 16  # on a CPU, passes see a multiple of this many places
PREFILL = "jacobi", "sequential", "auto"
MANY = 4  # from so many rows on, a CPU reads prompts faster slot by slot than by the Jacobi iteration

# What a method may override: what the engine asks the model for, and what has nothing to do with decoding.
FOLLOWED = {"embed", "route", "mask_keys", "feed_back", "integrate"}
BESIDE = {"method", "title", "Config", "defaults", "unused", "priced", "has_router", "iterates", "grid"}
BESIDE |= {"feedback_rate", "objective", "training_forwards", "param_groups", "init_weights", "__init__"}
BESIDE |= {"cross_entropy", "partial_losses", "tie_head"}


def serves(model):
    """Whether the Engine decodes models of this method. simple.py decodes all methods.

    The Engine needs states that are a Jacobi fixed point, or the grid; and a method that overrides nothing
    but what is FOLLOWED, or BESIDE decoding.
    """
    known = Grid if model.grid else PonderLM3
    if not (model.iterates or model.grid):
        return False
    return overridden(type(model), known) <= FOLLOWED | BESIDE


@dataclass
class Sequence:
    """A text that grows, in one row, as far as the host knows it."""

    index: int  # the number of its prompt
    context: list[int]  # the tokens in its window; the last ones may not have been read yet
    uniform: torch.Tensor  # (max_new_tokens,) a random number for each token that is chosen
    read: list[int]  # pondering steps of every token that has been read
    chosen: int = 0  # tokens chosen so far
    position: int = 0  # tokens of the context that have been read
    length: int = 0  # places of the cache that it may have filled
    state: Literal["new", "running", "ended"] = "new"  # new: nothing of its context is in the cache

    def left(self, T):
        """The random numbers of the tokens that are still to be chosen, at most T."""
        return self.uniform[self.chosen :][:T]


@dataclass
class Stats:
    """What an engine has run, summed over its calls."""

    passes: int = 0  # slot by slot; those that read prompts in parallel do not count
    slots: int = 0  # in these passes


class Engine:
    """Decodes PonderLM-3, PonderLM-2, both on the grid, vanilla models, and methods derived from these.

    Args:
        model: in evaluation mode. Its weights are copied in part: do not change them afterwards.
        batch_size: sequences that run at once.
        dtype: of the matrix products and the cache; None: that of the weights.
        tau, alpha: as PonderLM.ponder_token.
        prefill: how prompts are read: in parallel ("jacobi"), slot by slot ("sequential"), or in parallel
            where that is faster ("auto").
        tolerance: of reading in parallel, see states.settle.
        graphs: whether to replay each pass as a CUDA graph; None: on CUDA. On a CPU, True runs passes of the
            same static shapes.
        compile: whether to compile the pass to one program (compiled.py); for a Llama on a CPU in float32.

    Raises:
        UserError: the method is one that only simple.py decodes, the device has no float64 (MPS), or the pass
            cannot be compiled.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model,
        batch_size=8,
        *,
        dtype=None,
        tau=1e-4,
        alpha=0.0,
        prefill="auto",
        tolerance=None,
        graphs=None,
        compile=False,
    ):
        weight = model.lm_head.weight
        self.model = model
        self.batch_size = batch_size
        self.tau = tau
        self.alpha = alpha
        self.prefill = prefill
        self.tolerance = tolerance
        self.device = weight.device
        self.dtype = dtype or weight.dtype
        self.check(compile)

        on_gpu = self.device.type != "cpu"
        if graphs is None:
            graphs = on_gpu
        self.precision = autocast(self.device, self.dtype if self.dtype in HALF else torch.float32)
        self.ahead = 2 if on_gpu else 0  # passes that may be under way when the result of one is looked at
        self.static = on_gpu or graphs or compile  # a pass computes everything for all rows, see Rows
        self.few_shapes = on_gpu or graphs  # numbers of rows and places are rounded up, to few different ones
        self.rows = Rows(model, batch_size, self.dtype, tau, alpha, self.static, compile)
        self.cache = self.rows.cache
        if compile:
            self.passes = Compiled(self.rows)
        elif self.few_shapes:
            self.passes = Graphs(self.rows, graphs)
        else:
            self.passes = self.rows
        self.most_places = self.places_of(model.config.block_size)
        self.running = []  # Sequence number i runs in row i
        self.under_way = deque()  # results of passes that have not been looked at, and whose they are
        self.stats = Stats()

    def check(self, compile):
        """Refuse what the engine cannot do with this model on this device.

        Raises:
            UserError: as the class says.
            ValueError: `prefill` is none of PREFILL.
        """
        if not serves(self.model):
            method = self.model.config.method
            raise UserError(f"{method} decodes in a way that the engine does not know: use simple.generate")
        check_request(self.model, [], tau=self.tau, alpha=self.alpha)
        if self.prefill not in PREFILL:
            raise ValueError(f"prefill = {self.prefill!r}: give one of {', '.join(PREFILL)}")
        if self.device.type == "mps":
            raise UserError("the engine chooses tokens in float64, which MPS does not have: use --device cpu")
        in_float32 = self.dtype not in HALF and self.dtype == self.model.lm_head.weight.dtype
        if compile and not (self.device.type == "cpu" and in_float32):
            found = f"{self.dtype} on {self.device.type}".removeprefix("torch.")
            raise UserError(
                f"passes are compiled in float32 on a CPU, not in {found}: omit --compile, or add "
                "--device cpu --precision float32"
            )

    # -- Texts -------------------------------------------------------------------------------------

    def generate(self, prompts, max_new_tokens, **kwargs):
        """Continue each prompt. Arguments and results are those of simple.generate, except that tau and alpha
        belong to the engine. -> one Sample per prompt"""
        prompts = list(prompts)
        return gather(self.stream(prompts, max_new_tokens, **kwargs), len(prompts))

    @torch.inference_mode()  # also saves a fifth of the time of small operations
    def stream(self, prompts, max_new_tokens, *, begin=(), ends=(), read=None, **sampling):
        """Continue each prompt, and yield tokens as they are chosen.

        Args:
            prompts, max_new_tokens, begin, ends, sampling: as simple.generate.
            read: a list for each prompt, which receives the steps of every token that is read.

        Yields:
            (i, token, steps) for each new token of prompt i; the steps were taken before it was chosen.
        """
        prompts, sampling = check_request(self.model, prompts, tau=self.tau, alpha=self.alpha, **sampling)
        if read is None:
            read = [[] for _ in prompts]
        choice = sampling.temperature, sampling.top_k, sampling.top_p
        waiting = deque()
        if max_new_tokens:
            for i, prompt in enumerate(prompts):
                waiting.append((i, prompt, read[i]))
        self.prepare(*choice)
        self.running = []
        self.under_way = deque()
        if self.static:
            longest = max(map(len, prompts), default=0) + max_new_tokens
            self.cache.reserve(self.places_of(min(longest, self.model.config.block_size)))

        while self.running or waiting:
            self.admit(waiting, sampling.seed, max_new_tokens)
            chosen = self.begin(choice, begin)
            if not chosen:
                self.launch(choice)
                chosen = self.collect()
            events = []
            for sequence, token in chosen:
                self.append(sequence, token, ends)
                events.append((sequence.index, token, sequence.read[-1]))
            if chosen:
                self.release()
            yield from events

    @torch.inference_mode()
    def prepare(self, temperature=1.0, top_k=None, top_p=None):
        """Compile the pass for a way to choose tokens, if the engine compiles and has not done so yet."""
        if isinstance(self.passes, Compiled):
            self.cache.reserve(1)  # the compiler takes an empty cache for a special case
            self.passes.prepare((temperature, top_k, top_p))

    def admit(self, waiting, seed, max_new_tokens):
        """Give free rows to texts that wait, each an (index, prompt, list for its steps)."""
        while waiting and len(self.running) < self.batch_size:
            i, prompt, read = waiting.popleft()
            self.running.append(Sequence(i, prompt, uniform(seed, i, max_new_tokens), read))

    def append(self, sequence, token, ends):
        """Append a chosen token. The text may end with it, or outgrow its window and start anew."""
        sequence.context.append(token)
        sequence.chosen += 1
        if token in ends or sequence.chosen == len(sequence.uniform):
            sequence.state = "ended"
        elif len(sequence.context) > self.model.config.block_size:
            sequence.state = "new"

    def release(self):
        """Free the rows of texts that have ended: the last row moves into each of them."""
        for row in reversed(range(len(self.running))):
            if self.running[row].state != "ended":
                continue
            last = self.running.pop()
            if row < len(self.running):
                self.running[row] = last
                self.rows.move(len(self.running), row, last.length)

    # -- Prompts -----------------------------------------------------------------------------------

    def reads_in_parallel(self):
        """Whether prompts are read in parallel. K+1 passes are always fast; the ten or more of the Jacobi
        iteration are not, on a CPU with many rows."""
        if self.prefill == "auto":
            iterates = self.model.iterates and self.model.config.ponder_steps > 0
            return not (iterates and self.device.type == "cpu" and len(self.running) >= MANY)
        return self.prefill == "jacobi"

    def begin(self, choice, before):
        """Begin the texts that are new, or that have outgrown their window.

        Contexts that are read in parallel yield a token right away. Other rows start with the first token of
        their context, which the passes then read slot by slot.

        Args:
            choice: temperature, top_k and top_p.
            before: the tokens before each text, which stay when the window slides.

        Returns:
            [(sequence, chosen token)].
        """
        rows = [row for row, sequence in enumerate(self.running) if sequence.state == "new"]
        if not rows:
            return []
        T = self.model.config.block_size
        sequences = [self.running[row] for row in rows]
        contexts = torch.zeros(len(rows), T, dtype=torch.long)
        numbers = torch.zeros(len(rows), T, dtype=torch.float64)
        for i, sequence in enumerate(sequences):
            if len(sequence.context) > T:  # as sample.stream slides the window
                sequence.context = [*before, *sequence.context[-max(T // 2, 1) :]][-T:]
            sequence.position = 0
            sequence.length = 0
            sequence.state = "running"
            contexts[i, : len(sequence.context)] = torch.tensor(sequence.context)
            left = sequence.left(T)
            numbers[i, : len(left)] = left

        chosen = []
        if self.reads_in_parallel():
            logits = self.read_contexts(rows, contexts)
            tokens = choose_finite(logits, numbers[:, 0], *choice)
            chosen = list(zip(sequences, tokens.tolist(), strict=True))
        else:
            tokens = contexts[:, 0]
        for row, sequence in zip(rows, sequences, strict=True):
            self.cache.clear(row, sequence.length)  # of what an earlier text has left
        counters = torch.tensor([self.counters_of(sequence) for sequence in sequences])
        self.rows.begin(rows, tokens, counters, numbers, contexts)
        return chosen

    def counters_of(self, sequence):
        """A row of `counters` (rows.py) for a sequence that begins."""
        given = len(sequence.context)
        left = len(sequence.uniform) - sequence.chosen
        limit = min(self.model.config.block_size, given + left - 1)  # the last chosen token is not read
        K = self.model.config.ponder_steps
        return [0, K, sequence.position, sequence.length, given, limit]

    def read_contexts(self, rows, contexts):
        """Read the contexts (R, T) of rows in parallel, each distinct context once.

        Returns:
            (R, V): the logits behind each context.
        """
        number_of = {}  # by context: its number among the distinct contexts
        readers = []  # for each distinct context, the index in `rows` of the row that reads it
        for i, row in enumerate(rows):
            context = tuple(self.running[row].context)
            if context not in number_of:
                number_of[context] = len(readers)
                readers.append(i)
        steps, logits = self.read_distinct([rows[i] for i in readers], contexts[readers])

        numbers = []
        for row in rows:
            sequence = self.running[row]
            number = number_of[tuple(sequence.context)]
            numbers.append(number)
            position = len(sequence.context)
            own_steps = steps[number][:position]
            sequence.read += own_steps
            sequence.position = position
            sequence.length = position + sum(own_steps)
            source = rows[readers[number]]
            if row != source:
                self.cache.copy(source, row, sequence.length)
        return logits[numbers]

    def read_distinct(self, rows, contexts):
        """Read contexts (R, T) into rows of the cache, in parallel.

        Returns:
            The steps of the tokens of each context, lists; and the logits behind each context, (R, V).
        """
        lengths = torch.tensor([len(self.running[row].context) for row in rows])
        idx = contexts[:, : lengths.max()].to(self.device)
        lengths = lengths.to(self.device)
        at = torch.tensor(rows).to(self.device)
        with self.precision:
            if self.model.grid:
                found = self.read_grid(at, idx, lengths)
            else:
                layers = range(len(self.cache.layers))
                found = settle(
                    self.model,
                    idx,
                    self.tau,
                    self.alpha,
                    lengths=lengths,
                    tolerance=self.tolerance,
                    cache=[PromptLayer(self.cache, i, at) for i in layers],
                )
        last = torch.arange(len(rows), device=self.device), lengths - 1
        h_hat = self.model.integrate(found.h[last], found.s[last], found.steps[last])  # (R, D)
        return found.steps.tolist(), self.rows.head(h_hat.to(self.dtype))

    def read_grid(self, at, idx, lengths):
        """Read idx (R, N) of some lengths (R,) into rows `at` (R,) of the cache, on the grid. -> Settled"""
        prompts = [GridPrompt() for _ in self.cache.layers]
        found, slot, executed = read_on_grid(
            self.model, idx, self.tau, self.alpha, lengths=lengths, cache=prompts
        )
        order = (~executed).sort(dim=1, stable=True).indices  # executed slots first; log w hides the others
        self.cache.reserve(order.size(1))
        for i, prompt in enumerate(prompts):
            prompt.write(self.cache, i, at, order, self.rows.slot_keys[slot])
        return found

    # -- Passes ------------------------------------------------------------------------------------

    def places_of(self, tokens):
        """The places that so many tokens may fill, and one behind them for rows that stand still."""
        return tokens * (self.model.config.ponder_steps + 1) + 1

    def launch(self, choice):
        """Start a pass: the next slot of every running sequence. `collect` looks at its result."""
        A = len(self.running)
        places = max(sequence.length for sequence in self.running) + 1
        if places > self.most_places + self.ahead:
            raise RuntimeError("a bug: a row stands still, but its text does not end")
        capacity = self.cache.layers[0].size(2)
        if self.few_shapes:
            A = min(rounded(A), self.batch_size)
            places = min(max(rounded(places), self.cache.block), capacity)
        else:
            places = math.ceil(places / PLACES) * PLACES
            if places > capacity:
                self.cache.reserve(places)
        result = self.passes.advance(A, places, choice)
        for sequence in self.running:
            sequence.length += 1
        self.stats.passes += 1
        self.stats.slots += len(self.running)
        self.under_way.append((Fetched(result) if result.is_cuda else result, list(self.running)))

    def collect(self):
        """Look at the result of the oldest pass, unless the host may still run ahead of it.

        Returns:
            [(sequence, chosen token)] of the sequences for which a token was chosen.
        """
        if len(self.under_way) <= self.ahead:
            return []
        result, sequences = self.under_way.popleft()
        chosen = []
        # strict=False: on a GPU, A is rounded up, and behind the sequences there are rows without one.
        for sequence, steps, token in zip(sequences, *result.tolist(), strict=False):
            if steps < 0 or sequence.state != "running":  # no token was read, or the text has ended meanwhile
                continue
            sequence.read.append(steps)
            sequence.position += 1
            if sequence.position == len(sequence.context):
                if token < 0:
                    raise not_finite()
                chosen.append((sequence, token))
        return chosen
