"""Go on from a text, thinking about each token as long as its router asks for (section 3.3).

    python sample.py                                   the newest run in out/
    echo "Return the" | python sample.py --prompt - --tau 0
    python sample.py --prompt "Return the" --show-steps --seed 1 --max-new-tokens 47

The last prints, as long as there is no run, with a digit for the steps before a token was chosen:

    Return the ₂t₁e₂s₂t₂ ₂t₁o₁ ₁p₁r₁o₁c₂e₁s₂s₂e₂s₂ ₂t₁h₂e₁ ₂f₁u₁n₁c₁t₂i₂o₂n₂,₂ ₁o₁r₂ ₁r₁e₁t₂u₂r₁n₁s₂ ₂t₁h₂e₁

    1.48 of 3 pondering steps per token, prompt included, 38% of the slots saved; 71.3 tokens/s
"""

import codecs
import os
import sys
import time
from pathlib import Path

import torch
import tyro

from data import load_tokenizer
from model import UserError, command_line, load, newest_run, pick_device

INCLUDED = Path(__file__).parent / "models/docstrings"
BLUES = 231, 225, 153, 117, 75, 33, 26, 19  # pale to dark, of a terminal's 256 colours


def stream(
    model, prompt, max_new_tokens, tau=1e-4, alpha=0.0, temperature=0.8, top_k=None, seed=None,
    end=None, read=None,
):  # fmt: skip
    """Yield (token, steps) for each new token: the steps were executed before it was chosen.

    A context that outgrows the model's window starts anew from its last half window.

    Args:
        prompt: token ids, a list or a tensor.
        tau: stop pondering as soon as w_k < tau; 0 always runs all K steps.
        alpha: shifts the router to more or fewer steps (router.py).
        temperature: 0 takes the most probable token.
        top_k: choose among the k most probable tokens; None: among all.
        seed: of the random choices; None: other ones at every call.
        end: the token after which to stop.
        read: a list that gets the steps of every token that is read, the prompt's too.

    Raises:
        UserError: a value out of its range, or logits that are not finite.
    """
    context, window, done = [*map(int, prompt)], model.config.block_size, 0
    check(model, context, tau, temperature, top_k, seed)
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    for _ in range(max_new_tokens):
        if len(context) > window:
            context, done = context[-max(window // 2, 1) :], 0
        if done == 0:
            cache = model.new_cache()
        while done < len(context):
            logits, steps = model.ponder_token(context[done], done, cache, tau, alpha)
            done += 1
            if read is not None:
                read.append(steps)
        token = choose(logits, temperature, top_k, generator)
        context.append(token)
        yield token, steps
        if token == end:
            return


def generate(model, prompt, max_new_tokens, **choice):
    """All of `stream` at once -> the new tokens, and the steps before each."""
    pairs = list(stream(model, prompt, max_new_tokens, **choice))
    return [token for token, _ in pairs], [steps for _, steps in pairs]


def choose(logits, temperature, top_k, generator):
    """A token by its logits (V,). On the CPU, so that a seed chooses alike whatever the device."""
    logits = logits.float().cpu()
    if not logits.isfinite().all():
        raise UserError("the logits are not finite: the weights, or alpha, are too large")
    if temperature < 1e-6:  # as good as 0, and the quotient could overflow
        return int(logits.argmax())
    logits, tokens = logits.topk(min(top_k or len(logits), len(logits)))
    return int(tokens[torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)])


def check(model, prompt, tau, temperature, top_k, seed):
    """Refuse what nothing can be sampled with. UserError"""
    if not prompt or not 0 <= min(prompt) <= max(prompt) < model.config.vocab_size:
        raise UserError(f"the prompt has to be ids below {model.config.vocab_size}, one at least")
    for name, value, least, most in (
        ("tau", tau, 0, 1),
        ("temperature", temperature, 0, 1e6),
        ("top_k", top_k, 1, 2**63 - 1),
        ("seed", seed, 0, 2**63 - 1),
    ):
        if value is not None and not least <= value <= most:
            raise UserError(f"{name} = {value}: give a number from {least} to {most:g}")


def mark(text, steps, K, color):
    """A token's text with its steps: on pale (0) to dark blue (K), or with a small digit."""
    if not color:
        line, newline, rest = text.partition("\n")
        return line + "".join(chr(0x2080 + int(digit)) for digit in str(steps)) + newline + rest
    shade = BLUES[round(7 * steps / max(K, 1))]
    on, off = f"\x1b[48;5;{shade};38;5;{16 if shade > 60 else 231}m", "\x1b[0m"
    return on + text.replace("\n", f"↵{off}\n{on}") + off  # else a terminal colours the rest of the line


def open_model(run, device):
    """The model and the tokenizer of a run: the one given, the newest, or the one beside this file."""
    try:
        directory = newest_run() if run is None else Path(run)
    except UserError:
        if not INCLUDED.is_dir():
            raise
        print("there is no run in out/ yet: this is the model that comes with the code")
        directory = INCLUDED
    print(f"model: {directory}")
    return load(directory).to(pick_device(device)), load_tokenizer(directory / "tokenizer.json")


def read_prompt(prompt):
    try:
        given = sys.stdin.buffer.read().removesuffix(b"\n") if prompt == "-" else os.fsencode(prompt)
        return given.decode()
    except UnicodeError as error:
        raise UserError(f"the prompt is not UTF-8 text: {error}") from None


def main(
    run: str | None = None, prompt: str = "", max_new_tokens: int = 200, num_samples: int = 1,
    tau: float = 1e-4, alpha: float = 0.0, temperature: float = 0.8, top_k: int | None = None,
    seed: int | None = None, show_steps: bool = False, device: str = "auto",
):  # fmt: skip
    """Print continuations of a text.

    Args:
        run: directory of a model; by default the newest run in out/
        prompt: text to go on from; - reads it from standard input; without one a document begins
        max_new_tokens: tokens to generate
        num_samples: how many continuations; the i-th, from 0 on, has seed + i
        tau: stop pondering when the mask score is below; 0: never
        alpha: shift the router to more (> 0) or fewer (< 0) steps
        temperature: 0 takes the most probable token
        top_k: choose among the k most probable tokens
        seed: makes the random choices repeatable
        show_steps: mark each token by the steps taken before it was chosen
        device: auto, cpu, cuda or mps
    """
    if min(max_new_tokens, num_samples) < 1:
        raise UserError("max_new_tokens and num_samples have to be 1 or more")
    text = read_prompt(prompt)
    model, tokenizer = open_model(run, device)
    K, window, end = model.config.ponder_steps, model.config.block_size, tokenizer.end_of_text
    ids = tokenizer.encode(text) or [end or 0]
    check(model, ids, tau, temperature, top_k, seed)
    if len(ids) > window:
        print(f"note: of {len(ids)} tokens the last {max(window // 2, 1)} are read: the window is {window}")
    color, read, new, start = sys.stdout.isatty(), [], 0, time.perf_counter()
    if show_steps:
        legend = " ".join(mark(f" {k} ", k, K, True) for k in range(K + 1)) if color else "small digits"
        print(f"steps before each token was chosen: {legend}")
    for i in range(num_samples):
        print(f"\n--- sample {i + 1} of {num_samples}" if num_samples > 1 else "")
        print(text, end="", flush=True)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may take several tokens
        choice = dict(temperature=temperature, top_k=top_k, seed=None if seed is None else seed + i)
        for token, steps in stream(model, ids, max_new_tokens, tau, alpha, **choice, end=end, read=read):
            piece = "" if token == end else decoder.decode(tokenizer.decode([token]))
            print(mark(piece, steps, K, color) if show_steps and piece else piece, end="", flush=True)
            new += 1
        print(decoder.decode(b"", final=True))
    steps, speed = sum(read) / len(read), new / (time.perf_counter() - start)
    saved = f"{1 - (1 + steps) / (1 + K):.0%} of the slots saved"
    print(f"\n{steps:.2f} of {K} pondering steps per token, prompt included, {saved}; {speed:.1f} tokens/s")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, description=__doc__))
