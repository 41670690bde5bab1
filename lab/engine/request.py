"""A request: what is asked of a model, the choice of a token, prompts, and how samples are shown.

Both decoders share it: simple.py, which decodes one sequence, and the engine, which decodes many.
"""

import json
import os
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from operator import index
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field

import sample
from data import UserError, pick_device
from lab.corpora.tokenizers import begin_of, load_tokenizer
from lab.interop.weights import INCLUDED, find_model, load
from model import Count, settings

# -- Choosing a token ------------------------------------------------------------------------------


@settings
class Sampling(sample.Sampling):
    """As the root's, and top_p: the keywords of every `generate`."""

    # choose among the fewest tokens that hold this probability
    top_p: Annotated[float, Field(ge=1e-30, le=1)] | None = None


@dataclass
class Sample:
    tokens: list[int]  # the generated ids
    steps: list[int]  # pondering steps executed before each of them was chosen


def gather(events, n):
    """(i, token, steps) of each token of n sequences, as they come -> a Sample each."""
    samples = [Sample([], []) for _ in range(n)]
    for i, token, steps in events:
        samples[i].tokens.append(token)
        samples[i].steps.append(steps)
    return samples


def uniform(seed, i, n):
    """n random numbers in [0, 1) for sequence i, in float64; seed None: others at every call.

    They are drawn in advance. So what is chosen depends on the logits alone, not on which decoder computes
    them, nor on who else is decoded beside it.
    """
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed + i)
    return torch.rand(n, generator=generator, dtype=torch.float64)


def choose(logits, u, temperature=1.0, top_k=None, top_p=None):
    """The token at which the cumulative probability passes u. (..., V), (...) -> (...).

    Temperature 0 takes the most probable one. top_k and top_p leave the k most probable, and the fewest
    whose probabilities reach top_p. -1 where the logits are not finite.
    """
    if temperature < 1e-6:  # so low it is greedy, too, and the quotient would overflow
        best = logits.max(-1)
        return best.indices.where(best.values.abs() < torch.inf, -1)
    logits, order = logits.float() / temperature, None
    if top_k is not None:
        logits, order = logits.topk(min(top_k, logits.size(-1)))
    elif top_p is not None:
        logits, order = logits.sort(dim=-1, descending=True)
    if top_p is not None:
        p = logits.softmax(-1)
        logits = logits.masked_fill(p.cumsum(-1) - p >= top_p, -torch.inf)
    total = logits.softmax(-1).double().cumsum(-1)
    u = (u.to(total.device) * total[..., -1])[..., None]
    token = torch.searchsorted(total, u, right=True)  # (..., 1), the first with total > u
    if order is not None:
        token = order.gather(-1, token.clamp(max=order.size(-1) - 1))
    return token[..., 0].where(total[..., -1] > 0, -1)  # not if it is nan


def choose_finite(logits, u, temperature=1.0, top_k=None, top_p=None):
    """As `choose`. Logits that are not finite raise a UserError."""
    token = choose(logits, u, temperature, top_k, top_p)
    if (token < 0).any():
        raise not_finite()
    return token


def not_finite():
    return UserError("the logits are not finite: the weights, or alpha, are too large")


def check_request(model, prompts, **choice):
    """Refuse what this model cannot sample from: the errors of every `generate`.

    Returns:
        The prompts as lists of ids, and the Sampling.

    Raises:
        UserError: a prompt that is empty, an id outside the vocabulary, or a shift without a router.
        pydantic.ValidationError: a setting that is unknown, or out of its range.
    """
    choice, V, prompts = Sampling(**choice), model.config.vocab_size, [[*map(index, p)] for p in prompts]
    for i, prompt in enumerate(prompts):
        if not prompt or not 0 <= min(prompt) <= max(prompt) < V:
            which = f"prompt {i + 1} of {len(prompts)}" if len(prompts) > 1 else "the prompt"
            raise UserError(f"{which} has to be ids below {V}, one at least")
    if choice.alpha and model.router is None:
        raise UserError(f"alpha = {choice.alpha}: only the router of a PonderLM-3 can be shifted; leave it")
    return prompts, choice


# -- What a command line asks for ------------------------------------------------------------------


@settings
class Options(sample.Options, Sampling):
    # directory of a model, or its name on the Hub; None: the newest run, else models/docstrings
    run: str | None = None
    num_samples: Count = 1  # how many continuations of each prompt; sample i, from 0 on, has seed + i
    prompts: str | None = None  # file of prompts, one a line; empty lines do not count
    out: Path | None = None  # write the samples to this new file, one JSON a line, and print none
    batch_size: Count | None = None  # how many sequences run at once; None: 8
    precision: Literal["auto", "float32", "bfloat16"] = "float32"  # auto: bfloat16 where it is fast
    # jacobi: prompts in parallel; sequential: slot by slot, which auto takes on a CPU for four or more at
    # once, except on the grid
    prefill: Literal["jacobi", "sequential", "auto"] = "auto"
    compile: bool = False  # on a CPU: up to three times as fast, after 10 to 60 seconds


class Request:
    """What the command line asks for, opened and checked.

    texts, ids: of each sample's prompt. read: lists for the steps of the tokens that are read. how: what a
    decoder is asked for beside the ids.
    """

    def __init__(self, options):
        o = self.options = options
        texts = read_prompts(o.prompt, o.prompts)
        self.texts = [text for text in texts for _ in range(o.num_samples)]
        self.directory = find_model(o.run, otherwise=INCLUDED)
        self.device = pick_device(o.device)
        self.model = load(self.directory).to(self.device)
        self.tokenizer = load_tokenizer(self.directory / "tokenizer.json")
        self.begin, self.ends = begin_of(self.tokenizer), {self.tokenizer.end_of_text} - {None}
        self.ids = [self.encode(text) for text in self.texts]
        self.read = [[] for _ in self.texts]
        choice = {field.name: getattr(o, field.name) for field in fields(Sampling)}
        check_request(self.model, self.ids, **choice)
        self.how = choice | {"begin": self.begin, "ends": self.ends, "read": self.read}

    def encode(self, text):
        """A prompt's ids. An empty one is where a document begins."""
        ids = getattr(self.tokenizer, "encode_prompt", self.tokenizer.encode)(text)
        said = ids[: len(self.begin)] == self.begin  # as a chat template may
        return (ids if said else self.begin + ids) or [self.tokenizer.end_of_text or 0]

    def describe(self, decoder):
        """Print what is about to run."""
        K, window = self.model.config.ponder_steps, self.model.config.block_size
        tau, device = self.options.tau, self.device.type
        print(f"{self.directory}: K = {K}, tau = {tau:g}, device {device}, decoder {decoder}")
        if long := sum(len(ids) > window for ids in self.ids):
            print(
                f"note: {long} of {len(self.ids)} prompts do not fit the window of {window} tokens; of "
                f"these the last {max(window // 2, 1)} are read"
            )
        if self.options.show_steps and not self.options.out:
            color = sys.stdout.isatty()
            print("steps: " + " ".join(sample.mark(f" {k} ", k, K, color) for k in range(K + 1)))

    def show(self, i, pairs, file):
        """Print a sample as its pairs (token, steps) come, or write it. -> the tokens generated"""
        if file:
            return self.write(i, [*pairs], file)
        print(f"\n--- sample {i + 1} of {len(self.ids)}" if len(self.ids) > 1 else "")
        print(self.texts[i], end="", flush=True)
        hidden, K = {*self.begin, *self.ends}, self.model.config.ponder_steps
        return sample.show(pairs, self.tokenizer, K, hidden, self.options.show_steps)

    def write(self, i, pairs, file):
        """A sample as one line of JSON."""
        text = self.tokenizer.decode([token for token, _ in pairs if token not in self.ends])
        line = {"prompt": self.texts[i], "text": text.decode("utf-8", "replace")}
        line |= {"tokens": [token for token, _ in pairs], "steps": [steps for _, steps in pairs]}
        try:
            print(json.dumps(line, ensure_ascii=False), file=file, flush=True)
        except OSError as error:
            raise UserError(f"cannot write {file.name}: {error.strerror}") from None
        return len(pairs)

    def summarize(self, total, start):
        """Print what the decoder took: prompts and `total` new tokens, from `start` on."""
        speed = f"{total / (time.perf_counter() - start):.1f} tokens/s"
        if K := self.model.config.ponder_steps:
            steps = sum(map(sum, self.read)) / sum(map(len, self.read))
            saved = f"{1 - (1 + steps) / (K + 1):.0%} of the slots saved"
            speed = f"{steps:.2f} of {K} pondering steps per token read, {saved}; {speed}"
        print(f"\n{speed}")


def read_prompts(prompt, prompts):
    """The texts to go on from: one, or the lines of a file without the empty ones."""
    if prompt and prompts:
        raise UserError("--prompt and --prompts exclude each other: give one of them")
    try:
        if prompts is None:
            text = sys.stdin.buffer.read().removesuffix(b"\n") if prompt == "-" else os.fsencode(prompt)
            return [text.decode()]
        lines = Path(prompts).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeError as error:
        raise UserError(f"{prompts or 'the prompt'} is not UTF-8 text: {error}") from None
    texts = [line.rstrip("\r") for line in lines if line.strip()]
    if not texts:
        raise UserError(f"{prompts} has no prompt in it: write one a line")
    return texts


@contextmanager
def new_file(out, n):
    """A new file for n samples, which has whole lines in the end, whatever ends it; or None.

    Raises:
        FileExistsError: what is there already stays.
    """
    if out is None:
        yield None
        return
    file = out.open("x", encoding="utf-8")
    try:
        yield file
    finally:
        with suppress(OSError):  # of the line that a full disk did not take
            file.close()
        lines = out.read_bytes().split(b"\n")[:-1]
        os.truncate(out, sum(len(line) + 1 for line in lines))
        print(f"written: {out}, {len(lines)} of {n} samples")
