"""Early-exit decoding of many sequences at once, so that every skipped slot saves time.

The Engine computes for many sequences what simple.stream computes for one, with the same results. Five things
make it fast:

- Slot-level batching. Tokens stop at different depths, so sequences drift apart. A pass advances each
  sequence by one slot, whichever slot that is. No sequence waits for the slowest one, and a sequence that
  ends makes room for one that waits.

      pass          1   2   3   4   5   6   7        K-hat of tokens 1, 2, 3
      row 0, a     x1  h1  x2  x3  h3  h3  x4        1  0  2
      row 1, b     x1  h1  h1  x2  h2  h2  x3        2  2

      x3: slot 0 of token 3, whose input is the embedding of the token
      h3: a later slot of token 3, whose input is the output of its slot before

- The cache holds executed slots only. Its memory is reserved in blocks: on a GPU and for compiled passes all
  blocks at the start of a call, otherwise as the texts grow (cache.py).
- Prompts are read in parallel (states.py). In the step of one slot, nothing is computed that can be computed
  once in advance (slot_step.py).
- On a CPU the pass can be compiled to one program (compiled.py).
- A GPU does not wait for the host. The state of the rows stays on the GPU (rows.py), a pass is replayed as
  one graph (cuda_graphs.py), and the host reads the result of a pass two passes later.

word        meaning
row         a line of the batch, which holds one running text: row i of the tensors in rows.py and of the
            cache belongs to running[i]
slot        one token once through the network; a token takes 1 + K-hat slots
place       an entry of the cache in a row; each slot that runs fills the next place of its row
pass        the network once, for the next slot of every row
read        a token has been read when all its slots have run; the token after it is then known: it is given,
            or it is chosen
stand still a row whose text has ended stands still until the host frees it: passes run it, but each writes to
            the same next place, and nothing is chosen

`Engine.stream` is the loop. Free rows take texts (`admit`), and the contexts of new texts are read, or begin
to be read (`start_texts`). Then a pass runs (`launch`), its result is looked at (`collect`), chosen tokens
are appended (`append`), and the rows of texts that have ended are freed (`release`).
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

PLACES = 16  # on a CPU, passes see a multiple of this many places, so that few of them need new views
PREFILL = "jacobi", "sequential", "auto"
MANY = 4  # with this many rows or more, a CPU reads prompts faster slot by slot than by the Jacobi iteration

# What a method may override: the engine calls what is FOLLOWED, and calls nothing that is BESIDE decoding.
FOLLOWED = {"embed", "route", "mask_keys", "feed_back", "integrate"}
BESIDE = {"method", "title", "Config", "defaults", "unused", "priced", "has_router", "iterates", "grid"}
BESIDE |= {"feedback_rate", "objective", "training_forwards", "param_groups", "init_weights", "__init__"}
BESIDE |= {"cross_entropy", "partial_losses", "tie_head"}


def serves(model):
    """Whether the Engine decodes models of this method. simple.py decodes models of all methods.

    The states of the method must be a Jacobi fixed point or those of the grid, and the method may override
    nothing but what is FOLLOWED, or BESIDE decoding.
    """
    known = Grid if model.grid else PonderLM3
    if not (model.iterates or model.grid):
        return False
    return overridden(type(model), known) <= FOLLOWED | BESIDE


@dataclass
class Sequence:
    """A text that grows in one row, as far as the host knows it."""

    index: int  # which prompt the text continues
    context: list[int]  # the tokens in the window; the last ones may not have been read yet
    uniform: torch.Tensor  # (max_new_tokens,) a random number for each token that is chosen
    read: list[int]  # pondering steps of every token that has been read
    chosen: int = 0  # how many tokens have been chosen
    position: int = 0  # how many tokens of the context have been read
    length: int = 0  # at most so many places of the cache are filled
    state: Literal["new", "running", "ended"] = "new"  # new: nothing of the context is in the cache

    def left(self, T):
        """The random numbers of the tokens that are still to be chosen, at most T of them."""
        return self.uniform[self.chosen :][:T]


@dataclass
class Stats:
    """What an engine has run, summed over its calls."""

    passes: int = 0  # passes slot by slot; the passes that read prompts in parallel do not count
    slots: int = 0  # slots that ran in these passes


class Engine:
    """Decodes PonderLM-3, PonderLM-2, both on the grid, vanilla models, and methods derived from these.

    Args:
        model: a model in evaluation mode. Some of its weights are copied: do not change them afterwards.
        batch_size: the most sequences that run at once.
        dtype: the dtype of the matrix products and the cache; None: that of the weights.
        tau, alpha: as in PonderLM.ponder_token.
        prefill: how prompts are read: in parallel ("jacobi"), slot by slot ("sequential"), or in parallel
            where that is faster ("auto").
        tolerance: the tolerance of reading in parallel, see states.settle.
        graphs: whether to replay each pass as a CUDA graph; None: on CUDA only. On a CPU, True runs passes of
            the same static shapes without graphs, which is for tests.
        compile: whether to compile the pass to one program (compiled.py). This needs a CPU, a Llama, and the
            precision of its weights, which must not be half precision.

    Raises:
        UserError: only simple.py decodes the method, the device has no float64 (MPS), or the pass cannot be
            compiled.
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
        self.precision = autocast(self.device, self.dtype)
        self.ahead = 2 if on_gpu else 0  # how many passes may be under way while the host goes on
        self.static = on_gpu or graphs or compile  # a pass computes everything for all rows, see Rows
        # Numbers of rows and places are rounded up, so that few shapes occur.
        self.few_shapes = on_gpu or graphs
        self.rows = Rows(model, batch_size, self.dtype, tau, alpha, self.static, compile)
        self.cache = self.rows.cache
        if compile:
            self.passes = Compiled(self.rows)
        elif self.few_shapes:
            self.passes = Graphs(self.rows, graphs)
        else:
            self.passes = self.rows
        self.most_places = self.places_of(model.config.block_size)
        self.running = []  # running[i] is the text in row i
        self.under_way = deque()  # for each pass not yet looked at: its result, and the texts in its rows
        self.stats = Stats()

    def check(self, compile):
        """Refuse what the engine cannot do with this model on this device.

        Raises:
            UserError: see the class.
            ValueError: `prefill` is none of PREFILL.
        """
        if not serves(self.model):
            method = self.model.config.method
            raise UserError(
                f"the engine does not support the method {method}: use lab.engine.simple.generate"
            )
        check_request(self.model, [], tau=self.tau, alpha=self.alpha)
        if self.prefill not in PREFILL:
            raise ValueError(f"prefill = {self.prefill!r} is unknown: use one of {', '.join(PREFILL)}")
        if self.device.type == "mps":
            raise UserError("the engine chooses tokens in float64, which MPS does not have: use --device cpu")
        of_weights = self.model.lm_head.weight.dtype
        can_compile = self.device.type == "cpu" and self.dtype == of_weights and self.dtype not in HALF
        if compile and not can_compile:
            asked = f"{self.dtype} on {self.device.type} (weights in {of_weights})".replace("torch.", "")
            raise UserError(
                f"decoding in {asked} cannot be compiled: omit --compile, or add --device cpu "
                "--precision float32"
            )

    # -- Texts -------------------------------------------------------------------------------------

    def generate(self, prompts, max_new_tokens, **kwargs):
        """Continue each prompt. The arguments are those of simple.generate, except tau and alpha, which
        belong to the engine.

        Returns:
            One Sample per prompt.
        """
        prompts = list(prompts)
        return gather(self.stream(prompts, max_new_tokens, **kwargs), len(prompts))

    @torch.inference_mode()  # small operations take a fifth less time than under no_grad
    def stream(self, prompts, max_new_tokens, *, begin=(), ends=(), read=None, **sampling):
        """Continue each prompt, and yield tokens as they are chosen.

        Args:
            prompts, max_new_tokens, begin, ends, sampling: as in simple.generate.
            read: a list for each prompt, to which the steps of every token that is read are appended.

        Yields:
            (i, token, steps): a new token of prompt i, and the steps that were taken before it was chosen.
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
            chosen = self.start_texts(choice, begin)
            # Where starting has chosen tokens, these may end texts, whose rows are freed before a pass runs.
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
            self.cache.reserve(1)  # the compiler would specialise on the size of an empty cache
            self.passes.prepare((temperature, top_k, top_p))

    def admit(self, waiting, seed, max_new_tokens):
        """Give free rows to texts that wait.

        Args:
            waiting: a deque of (index, prompt, list for its steps).
            seed: see simple.generate.
            max_new_tokens: how many tokens each text may get.
        """
        while waiting and len(self.running) < self.batch_size:
            i, prompt, read = waiting.popleft()
            self.running.append(Sequence(i, prompt, uniform(seed, i, max_new_tokens), read))

    def append(self, sequence, token, ends):
        """Append a chosen token. With this token, the text may end, or outgrow its window and start anew."""
        sequence.context.append(token)
        sequence.chosen += 1
        if token in ends or sequence.chosen == len(sequence.uniform):
            sequence.state = "ended"
        elif len(sequence.context) > self.model.config.block_size:
            sequence.state = "new"

    def release(self):
        """Free the rows of texts that have ended: the last row moves into each of them.

        Rows are looked at from the last to the first. So the texts in the rows after a freed one have not
        ended, and the row that moves is one of these.
        """
        for row in reversed(range(len(self.running))):
            if self.running[row].state != "ended":
                continue
            last = self.running.pop()
            if row < len(self.running):
                self.running[row] = last
                self.rows.move(len(self.running), row, last.length)

    # -- Prompts -----------------------------------------------------------------------------------

    def reads_in_parallel(self):
        """Whether prompts are read in parallel. On the grid or without steps this takes K+1 passes, which is
        always fast. The Jacobi iteration takes ten passes or more, which is slow on a CPU with many rows."""
        if self.prefill == "auto":
            iterates = self.model.iterates and self.model.config.ponder_steps > 0
            return not (iterates and self.device.type == "cpu" and len(self.running) >= MANY)
        return self.prefill == "jacobi"

    def start_texts(self, choice, begin):
        """Start the texts that are new, or that have outgrown their window.

        If contexts are read in parallel, the next token of each is chosen right away. Otherwise the rows
        start at the first token of their context, and the passes read the context slot by slot.

        Args:
            choice: temperature, top_k and top_p.
            begin: the tokens that begin each text, which stay when the window slides.

        Returns:
            [(sequence, chosen token)].
        """
        rows = [row for row, sequence in enumerate(self.running) if sequence.state == "new"]
        if not rows:
            return []
        T = self.model.config.block_size
        sequences = [self.running[row] for row in rows]
        contexts = torch.zeros(len(rows), T, dtype=torch.long)
        random_numbers = torch.zeros(len(rows), T, dtype=torch.float64)
        for i, sequence in enumerate(sequences):
            if len(sequence.context) > T:  # start anew with the tokens of `begin`, then the last half
                tail = sequence.context[-max(T // 2, 1) :]
                sequence.context = [*begin, *tail][-T:]
            sequence.position = 0
            sequence.length = 0
            sequence.state = "running"
            contexts[i, : len(sequence.context)] = torch.tensor(sequence.context)
            left = sequence.left(T)
            random_numbers[i, : len(left)] = left

        chosen = []
        if self.reads_in_parallel():
            logits = self.read_contexts(rows, contexts)
            # These tokens used random number 0. They follow the `given` tokens of the context, so the row
            # reads them next and chooses its next token with random number 1.
            tokens = choose_finite(logits, random_numbers[:, 0], *choice)
            chosen = list(zip(sequences, tokens.tolist(), strict=True))
        else:
            tokens = contexts[:, 0]
        for row, sequence in zip(rows, sequences, strict=True):
            self.cache.clear(row, sequence.length)  # what an earlier text has left
        counters = torch.tensor([self.counters_of(sequence) for sequence in sequences])
        self.rows.begin(rows, tokens, counters, random_numbers, contexts)
        return chosen

    def counters_of(self, sequence):
        """The row of `counters` (rows.py) of a sequence that starts."""
        given = len(sequence.context)
        left = len(sequence.uniform) - sequence.chosen
        limit = min(self.model.config.block_size, given + left - 1)  # the last chosen token is not read
        K = self.model.config.ponder_steps
        # In the order of the table: k, steps (K until the router of the first token says less), ..
        return [0, K, sequence.position, sequence.length, given, limit]

    def read_contexts(self, rows, contexts):
        """Read the contexts of some rows in parallel, each distinct context once.

        Args:
            rows: a list of R row indices.
            contexts: (R, T) their contexts, padded.

        Returns:
            (R, V): the logits of the token after each context.
        """
        distinct = {}  # {context: its index among the distinct contexts}
        first = []  # for each distinct context, the index in `rows` of the first row that has it
        for i, row in enumerate(rows):
            context = tuple(self.running[row].context)
            if context not in distinct:
                distinct[context] = len(first)
                first.append(i)
        steps, logits = self.read_distinct([rows[i] for i in first], contexts[first])

        which = []  # for each row, the index of its context among the distinct ones
        for row in rows:
            sequence = self.running[row]
            index = distinct[tuple(sequence.context)]
            which.append(index)
            tokens = len(sequence.context)
            steps_of_tokens = steps[index][:tokens]  # without those of the padding
            sequence.read += steps_of_tokens
            sequence.position = tokens
            sequence.length = tokens + sum(steps_of_tokens)
            source = rows[first[index]]
            if row != source:
                self.cache.copy(source, row, sequence.length)
        return logits[which]

    def read_distinct(self, rows, contexts):
        """Read contexts into rows of the cache, in parallel. The arguments are those of `read_contexts`.

        Returns:
            For each context a list of the steps of its tokens, padded; and the logits of the token after each
            context, (R, V).
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
        """Read contexts into rows of the cache, on the grid.

        Args:
            at: (R,) the rows.
            idx: (R, N) token ids, padded.
            lengths: (R,) the number of tokens of each row.

        Returns:
            Settled.
        """
        prompts = [GridPrompt() for _ in self.cache.layers]
        found, slot, executed = read_on_grid(
            self.model, idx, self.tau, self.alpha, lengths=lengths, cache=prompts
        )
        # Places receive the keys of executed slots first, then those of padding, which their log w hides.
        key_of_place = (~executed).sort(dim=1, stable=True).indices  # (R, all keys)
        self.cache.reserve(key_of_place.size(1))
        for i, prompt in enumerate(prompts):
            prompt.write(self.cache, i, at, key_of_place, self.rows.slot_keys[slot])
        return found

    # -- Passes ------------------------------------------------------------------------------------

    def places_of(self, tokens):
        """The most places that so many tokens may fill, and one after them: a row that stands still writes
        there."""
        return tokens * (self.model.config.ponder_steps + 1) + 1

    def launch(self, choice):
        """Start a pass, which runs the next slot of every running sequence. `collect` looks at its result."""
        A = len(self.running)
        places = max(sequence.length for sequence in self.running) + 1
        if places > self.most_places + self.ahead:
            raise RuntimeError("internal error: a row stopped before its text ended; please report this")
        capacity = self.cache.layers[0].size(2)
        if self.few_shapes:
            # There is one graph for each A and number of places, so both are rounded up to few values. Short
            # texts share the graphs of one block of places.
            A = min(rounded(A), self.batch_size)
            places = min(max(rounded(places), self.cache.block), capacity)
        else:
            # The views of the cache stay the same until this number grows, see SlotCache.see.
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
        # On a GPU A is rounded up, so the result has rows after the last sequence; strict=False drops them.
        for sequence, steps, token in zip(sequences, *result.tolist(), strict=False):
            if steps < 0:  # the row has not finished a token
                continue
            # The text may have ended after this pass was launched. (A text that has started anew since then
            # is "running" again. But in this pass its row stood still at `limit`, so its steps are -1.)
            if sequence.state != "running":
                continue
            sequence.read.append(steps)
            sequence.position += 1
            if sequence.position == len(sequence.context):
                if token < 0:
                    raise not_finite()
                chosen.append((sequence, token))
        return chosen
