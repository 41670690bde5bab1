"""Generate text, spending on each token as many pondering steps as the router asks for (section 3.3).

    python sample.py                                   the newest run in out/, else the included model
    python sample.py --run models/docstrings --prompt "Return the" --show-steps --seed 1
    echo "Return the" | python sample.py --prompt - --tau 0

--show-steps marks each token with the number of steps that were taken before it was chosen: by a digit
behind it, or by its colour on a terminal.
"""

import codecs
import os
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from checkpoint import newest_run, open_model
from common import UserError, command_line, join, parse_groups, split_into
from model import Count, Finite, Fraction, Seed, validated_dataclass
from router import TAU

INCLUDED = Path(__file__).parent / "models/docstrings"  # the model that comes with the code
BLUES = 231, 225, 153, 117, 75, 33, 26, 19  # pale to dark, among a terminal's 256 colours


# -- Decoding --------------------------------------------------------------------------------------


@validated_dataclass
class Sampling:
    """How long to ponder, and how to choose a token."""

    tau: Fraction = (
        TAU  # early-exit threshold: stop pondering when the mask score w is below; 0 takes every step
    )
    alpha: Finite = 0.0  # shift the router to more (> 0) or fewer (< 0) steps
    temperature: Annotated[float, Field(ge=0, le=1e6)] = (
        0.8  # randomness; 0 always takes the most probable token
    )
    top_k: Count | None = None  # choose among the k most probable tokens only
    seed: Seed | None = None  # random seed, which makes the text repeatable


def stream(model, prompt, max_new_tokens, *, ends=(), read=None, **sampling):
    """Generate tokens one by one.

    A context that outgrows the model's context length starts anew from its last half.

    Args:
        model: a PonderLM.
        prompt: token ids, a list or a tensor.
        max_new_tokens: how many tokens to generate at most.
        ends: tokens that end the text.
        read: a list to which the steps of every token that is read are appended, the prompt's tokens
            included.
        sampling: fields of Sampling.

    Yields:
        (token, steps): a new token, and the pondering steps that were executed before it was chosen.

    Raises:
        UserError: the prompt is empty or has unknown ids, or the logits are not finite.
        pydantic.ValidationError: a field of Sampling is out of its range.
    """
    options = Sampling(**sampling)
    context = [int(token) for token in prompt]
    window = model.config.block_size
    check_prompt(context, model.config.vocab_size)
    choose = make_sampler(options)

    cache = model.new_cache()
    tokens_read = 0  # of the context
    for _ in range(max_new_tokens):
        if len(context) > window:  # start anew: positions change, so all keys do
            context = context[-max(window // 2, 1) :]
            cache = model.new_cache()
            tokens_read = 0
        # Read what has not been read: at first the prompt, then one token at a time.
        for position in range(tokens_read, len(context)):
            logits, steps = model.ponder_token(context[position], position, cache, options.tau, options.alpha)
            if read is not None:
                read.append(steps)
        tokens_read = len(context)
        token = choose(logits)
        context.append(token)
        yield token, steps
        if token in ends:
            return


def check_prompt(ids, vocab_size):
    """
    Raises:
        UserError: there are no ids, or one that the model does not have.
    """
    if not ids:
        raise UserError("the prompt is empty: it must contain at least one token")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise UserError(
            f"the prompt contains token id {wrong}: every id must be between 0 and {vocab_size - 1}"
        )


def make_sampler(options):
    """A function that draws a token from its logits (V,), as Sampling says. It computes on the CPU, where
    a seed gives the same tokens on every machine."""
    generator = torch.Generator()
    if options.seed is None:
        generator.seed()
    else:
        generator.manual_seed(options.seed)

    def choose(logits):
        logits = logits.float().cpu()
        if not logits.isfinite().all():
            raise UserError("the logits are not finite: the weights, or --alpha, are too large")
        if options.temperature < 1e-6:  # practically 0, and dividing by it could overflow
            return int(logits.argmax())
        k = min(options.top_k or len(logits), len(logits))
        logits, tokens = logits.topk(k)
        p = (logits / options.temperature).softmax(-1)
        return int(tokens[torch.multinomial(p, 1, generator=generator)])

    return choose


# -- Printing --------------------------------------------------------------------------------------


def mark(text, steps, K, color):
    """A token's text with its number of steps: on pale (0) to dark blue (K), or with a small digit behind
    it."""
    if not color:
        line, newline, rest = text.partition("\n")
        subscript = "".join(chr(ord("₀") + int(digit)) for digit in str(steps))
        return line + subscript + newline + rest
    shade = BLUES[round(7 * steps / max(K, 1))]
    foreground = 16 if shade > 60 else 231  # black on pale blue, white on dark blue
    on = f"\x1b[48;5;{shade};38;5;{foreground}m"
    off = "\x1b[0m"
    # Without this, a terminal would colour the rest of the line.
    text = text.replace("\n", f"↵{off}\n{on}")
    return on + text + off


def show(pairs, tokenizer, K, hidden=(), marked=False):
    """Print tokens as they come.

    Args:
        pairs: (token, steps), as `stream` yields them.
        K: the largest number of steps.
        hidden: tokens that are not printed.
        marked: mark each token with its steps.

    Returns:
        How many tokens came.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may take several tokens
    count = 0
    for token, steps in pairs:
        count += 1
        text = "" if token in hidden else decoder.decode(tokenizer.decode([token]))
        if marked and text:
            text = mark(text, steps, K, sys.stdout.isatty())
        print(text, end="", flush=True)
    print(decoder.decode(b"", final=True))
    return count


# -- The command -----------------------------------------------------------------------------------


@validated_dataclass
class Text:
    """What to write."""

    run: str | None = (
        None  # directory of a model or run; None: the newest run in out/, else the included model
    )
    prompt: str = ""  # text to continue; - reads it from standard input; if empty, a new document begins
    max_new_tokens: Count = 200  # number of tokens to generate
    num_samples: Count = 1  # number of texts; with --seed, the i-th text (from 0) uses seed + i
    show_steps: bool = False  # mark each token with the steps that were taken before it was chosen
    device: str = "auto"  # auto, cpu, cuda or mps


@validated_dataclass
class Options(Sampling, Text):
    """The flags."""


GROUPS = {"text": Text, "sampling": Sampling}


def parse(argv=None):
    """Read the command line. -> Options"""
    groups = split_into(GROUPS, Options())
    parsed = parse_groups(groups, argv, prog="python sample.py", description=__doc__)
    return join(Options, parsed.values())


def read_prompt(prompt):
    """The bytes of --prompt, or of standard input if it is "-"."""
    if prompt == "-":
        return sys.stdin.buffer.read().removesuffix(b"\n")
    return os.fsencode(prompt)


def main(options):
    """Generate and print texts, as the flags say."""
    prompt = read_prompt(options.prompt)
    directory = Path(options.run) if options.run else newest_run(default=INCLUDED)
    print(f"model: {directory}")
    model, tokenizer = open_model(directory, options.device)
    K = model.config.ponder_steps
    window = model.config.block_size
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    if len(ids) > window:
        half = max(window // 2, 1)
        print(
            f"note: the prompt has {len(ids)} tokens, more than the context length of {window}: only its "
            f"last {half} are read"
        )
    if options.show_steps:
        print_legend(K)

    read = []
    new_tokens = 0
    start = time.perf_counter()
    for i in range(options.num_samples):
        print(f"\n--- sample {i + 1} of {options.num_samples}" if options.num_samples > 1 else "")
        print(prompt.decode("utf-8", "replace"), end="", flush=True)
        sampling = {field.name: getattr(options, field.name) for field in fields(Sampling)}
        if options.seed is not None:
            sampling["seed"] = (options.seed + i) % 2**63
        pairs = stream(
            model, ids, options.max_new_tokens, ends={tokenizer.end_of_text}, read=read, **sampling
        )
        new_tokens += show(pairs, tokenizer, K, hidden={tokenizer.end_of_text}, marked=options.show_steps)
    seconds = time.perf_counter() - start

    mean_steps = sum(read) / len(read)
    saved = 1 - (1 + mean_steps) / (1 + K)
    print(
        f"\n{mean_steps:.2f} of {K} pondering steps per token read, {saved:.0%} of the slots saved; "
        f"{new_tokens / seconds:.1f} tokens/s"
    )


def print_legend(K):
    if sys.stdout.isatty():
        legend = " ".join(mark(f" {k} ", k, K, color=True) for k in range(K + 1))
    else:
        legend = "small digits"
    print(f"steps before each token was chosen: {legend}")


if __name__ == "__main__":
    command_line(lambda: main(parse()))
