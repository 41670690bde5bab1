"""Go on from a text, thinking about each token as long as its router asks for (section 3.3).

    python sample.py                                   the newest run in out/, else the included model
    echo "Return the" | python sample.py --prompt - --tau 0
    python sample.py --prompt "Return the" --show-steps --seed 1 --max-new-tokens 47

The last one counts the steps before each token was chosen, as a digit behind it or by its colour.
"""

import codecs
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import tyro
from pydantic import Field

from data import UserError, command_line, load_tokenizer, newest_run, pick_device, reading
from model import Count, Finite, Seed, Share, load, settings
from router import TAU

INCLUDED = Path(__file__).parent / "models/docstrings"
BLUES = 231, 225, 153, 117, 75, 33, 26, 19  # pale to dark, of a terminal's 256 colours


@settings
class Sampling:
    """How long to ponder, and which token to take."""

    tau: Share = TAU  # stop when the mask score is below; 0: never
    alpha: Finite = 0.0  # shift the router to more (> 0) or fewer (< 0) steps
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 0.8  # 0 takes the most probable token
    top_k: Count | None = None  # choose among the k most probable tokens
    seed: Seed | None = None  # makes the random choices repeatable


def stream(model, prompt, max_new_tokens, *, choose=None, begin=(), ends=(), read=None, **sampling):
    """Yield (token, steps) for each new token: the steps were executed before it was chosen.

    A context that outgrows the model's window starts anew from its last half window.

    Args:
        prompt: token ids, a list or a tensor.
        choose: logits (V,) -> a token; None: as `sampling` says, see Sampling.
        begin: the tokens before each text, which stay. ends: those after which to stop.
        read: a list that gets the steps of every token that is read, the prompt's too.

    UserError: a prompt that cannot be read, or logits that are not finite. pydantic.ValidationError: a value
    out of its range.
    """
    o, context, window, done = Sampling(**sampling), [*map(int, prompt)], model.config.block_size, 0
    if not context or not 0 <= min(context) <= max(context) < model.config.vocab_size:
        raise UserError(f"the prompt has to be ids below {model.config.vocab_size}, one at least")
    choose = choose or chooser(o)
    for _ in range(max_new_tokens):
        if len(context) > window:
            context, done = [*begin, *context[-max(window // 2, 1) :]][-window:], 0
        if done == 0:
            cache = model.new_cache()
        while done < len(context):
            logits, steps = model.ponder_token(context[done], done, cache, o.tau, o.alpha)
            done += 1
            if read is not None:
                read.append(steps)
        token = choose(logits)
        context.append(token)
        yield token, steps
        if token in ends:
            return


def chooser(o):
    """A function that takes a token by its logits (V,). On the CPU: a seed says the same everywhere."""
    generator = torch.Generator()
    generator.seed() if o.seed is None else generator.manual_seed(o.seed)

    def choose(logits):
        logits = logits.float().cpu()
        if not logits.isfinite().all():
            raise UserError("the logits are not finite: the weights, or alpha, are too large")
        if o.temperature < 1e-6:  # as good as 0, and the quotient could overflow
            return int(logits.argmax())
        logits, tokens = logits.topk(min(o.top_k or len(logits), len(logits)))
        p = (logits / o.temperature).softmax(-1)
        return int(tokens[torch.multinomial(p, 1, generator=generator)])

    return choose


def mark(text, steps, K, color):
    """A token's text with its steps: on pale (0) to dark blue (K), or with a small digit."""
    if not color:
        line, newline, rest = text.partition("\n")
        return line + "".join(chr(0x2080 + int(digit)) for digit in str(steps)) + newline + rest
    shade = BLUES[round(7 * steps / max(K, 1))]
    on, off = f"\x1b[48;5;{shade};38;5;{16 if shade > 60 else 231}m", "\x1b[0m"
    return on + text.replace("\n", f"↵{off}\n{on}") + off  # else a terminal colours the rest of the line


def show(pairs, tokenizer, K, hidden=(), marked=False):
    """Print the text of pairs (token, steps) as they come, without `hidden` tokens. -> how many came"""
    decoder, n = codecs.getincrementaldecoder("utf-8")("replace"), 0  # a character may take several tokens
    for n, (token, steps) in enumerate(pairs, start=1):  # noqa: B007
        piece = "" if token in hidden else decoder.decode(tokenizer.decode([token]))
        print(mark(piece, steps, K, sys.stdout.isatty()) if marked and piece else piece, end="", flush=True)
    print(decoder.decode(b"", final=True))
    return n


def open_model(directory, device="auto"):
    """A model and its tokenizer. UserError: files that are missing, damaged, or of another kind."""
    with reading(directory, ": give the directory of a model, or train one"):
        model = load(directory)
    return model.to(pick_device(device)), load_tokenizer(Path(directory, "tokenizer.json"))


@settings
class Options(Sampling):
    run: str | None = None  # directory of a model; None: the newest run in out/
    prompt: str = ""  # text to go on from; - reads it from standard input; without one a document begins
    max_new_tokens: Count = 200  # tokens to generate
    num_samples: Count = 1  # how many continuations; the i-th, from 0 on, has seed + i
    show_steps: bool = False  # mark each token by the steps taken before it was chosen
    device: str = "auto"  # auto, cpu, cuda or mps


def main(o: Annotated[Options, tyro.conf.arg(name="")]):
    text = sys.stdin.buffer.read().removesuffix(b"\n") if o.prompt == "-" else os.fsencode(o.prompt)
    directory = Path(o.run) if o.run else newest_run(otherwise=INCLUDED)
    print(f"model: {directory}")
    model, tokenizer = open_model(directory, o.device)
    K, window, end = model.config.ponder_steps, model.config.block_size, tokenizer.end_of_text
    ids = tokenizer.encode(text) or [end]
    if len(ids) > window:
        last = max(window // 2, 1)
        print(f"note: the prompt has {len(ids)} tokens, the window {window}: only its last {last} are read")
    if o.show_steps:
        levels = " ".join(mark(f" {k} ", k, K, True) for k in range(K + 1))
        print(f"steps before each token was chosen: {levels if sys.stdout.isatty() else 'small digits'}")
    read, new, start = [], 0, time.perf_counter()
    for i in range(o.num_samples):
        print(f"\n--- sample {i + 1} of {o.num_samples}" if o.num_samples > 1 else "")
        print(text.decode("utf-8", "replace"), end="", flush=True)
        sampling = {name: getattr(o, name) for name in Sampling.__dataclass_fields__}
        sampling["seed"] = None if o.seed is None else o.seed + i
        pairs = stream(model, ids, o.max_new_tokens, ends={end}, read=read, **sampling)
        new += show(pairs, tokenizer, K, {end}, o.show_steps)
    steps, speed = sum(read) / len(read), new / (time.perf_counter() - start)
    saved = f"{1 - (1 + steps) / (1 + K):.0%} of the slots saved"
    print(f"\n{steps:.2f} of {K} pondering steps per token read, {saved}; {speed:.1f} tokens/s")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, description=__doc__))
