"""Continue a prompt, thinking about each token only as long as its router asks for (section 3.3).

    python sample.py                                   the newest run, from an empty prompt
    python sample.py --prompt "Return the" --show-steps
    echo "Return the" | python sample.py --prompt - --tau 0

This is the simple form: one sequence, one slot at a time, see PonderLM.ponder_token. Each executed
slot leaves one key and one value a layer in the cache; a skipped one leaves and costs nothing.
"""

import codecs
import math
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch
import tyro

from checkpoint import find_run
from choose import Sample, check, choose, uniform
from device import autocast, command_line, pick_device, pick_precision
from methods import load
from tokenizer import load_tokenizer


def stream(
    model, prompt, max_new_tokens, *, tau=1e-4, alpha=0.0, temperature=1.0, top_k=None, top_p=None,
    seed=None, end=None, read=None,
):  # fmt: skip
    """Yield (token, steps) for each generated token. Arguments as `generate`, for one prompt.

    A context that outgrows the model's window starts anew from its last half window.
    `read`, a list, receives the steps of every token that is read, the prompt's too.
    """
    context = [int(token) for token in prompt]
    window = model.config.block_size
    check(
        model, [context], max_new_tokens, tau=tau, alpha=alpha, temperature=temperature,
        top_k=top_k, top_p=top_p, end=end,
    )  # fmt: skip
    done = 0  # tokens of the context that are in the cache
    for u in uniform(seed, max_new_tokens):
        if len(context) > window:
            context, done = context[-max(window // 2, 1) :], 0
        if done == 0:
            cache = model.new_cache()
        while done < len(context):
            logits, steps = model.ponder_token(context[done], done, cache, tau, alpha)
            done += 1
            if read is not None:
                read.append(steps)
        token = int(choose(logits, u, temperature, top_k, top_p))
        context.append(token)
        yield token, steps
        if token == end:
            return


def generate(model, prompts, max_new_tokens, *, seed=None, **kwargs):
    """Continue each prompt by early-exit decoding with a cache of executed slots (section 3.3).

    Args:
        prompts: lists or tensors of token ids, at least one id each.
        max_new_tokens: tokens to generate for each.
        tau: stop pondering as soon as w_k < tau; 0 always runs all K steps.
        alpha: shifts the router to more or fewer steps (reading note 3).
        temperature: 0 is greedy. top_k, top_p: keep the most probable tokens only; None keeps all.
        seed: of the random choices; prompt i uses seed + i. None: different at every call.
        end: the token after which a sequence ends. None: none does.

    Returns:
        One Sample a prompt.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary, or a setting out of its range.
    """
    samples = []
    for i, prompt in enumerate(prompts):
        one = None if seed is None else seed + i
        pairs = list(stream(model, prompt, max_new_tokens, seed=one, **kwargs))
        samples.append(Sample([token for token, _ in pairs], [steps for _, steps in pairs]))
    return samples


# -- The command line ----------------------------------------------------------------------------


def paint(text, steps, K, color):
    """Text in the colour of its steps, from pale (0) to dark (K); without colours, subscripts."""
    if not color:
        return text + "".join(chr(0x2080 + int(digit)) for digit in str(steps))
    shade = (231, 225, 153, 117, 75, 33, 26, 19)[round(7 * steps / max(K, 1))]
    return f"\x1b[48;5;{shade};38;5;{16 if shade > 60 else 231}m{text}\x1b[0m"


def main(
    run: str | None = None,
    prompt: str = "",
    max_new_tokens: int = 200,
    num_samples: int = 1,
    tau: float = 1e-4,
    alpha: float = 0.0,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    show_steps: bool = False,
    device: str = "auto",
    precision: Literal["auto", "float32", "bfloat16"] = "float32",
):
    """Continue a prompt, with early exit.

    Args:
        run: directory of a trained model; by default the newest in out/
        prompt: text to go on from; - reads it from standard input
        max_new_tokens: tokens to generate
        num_samples: how many continuations
        tau: stop pondering when the mask score falls below it; 0 always runs all K steps
        alpha: shift the router towards more (> 0) or fewer (< 0) steps
        temperature: 0 is greedy
        top_k: choose among the k most probable tokens
        top_p: choose among the fewest tokens that hold this probability
        seed: makes the choices repeatable
        show_steps: colour each token by the steps taken before it was chosen, or read (prompt)
        device: auto, cpu, cuda or mps
        precision: of the computation; one query at a time gains little from bfloat16
    """
    directory = find_run(run)
    device = pick_device(device)
    dtype = pick_precision(precision, device)
    model = load(directory).to(device)
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    K, window = model.config.ponder_steps, model.config.block_size
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(f"{directory}: the tokenizer has more tokens than the model; not its own?")
    text = sys.stdin.read() if prompt == "-" else prompt
    ids = tokenizer.encode(text)
    if not ids:  # an empty prompt: where a document begins
        ids = [tokenizer.end_of_text or 0]
    check(model, ids, max_new_tokens, tau, alpha, temperature, top_k, top_p)
    if num_samples < 1:
        raise ValueError(f"num_samples = {num_samples}: it must be at least 1")
    color = sys.stdout.isatty()
    print(f"{directory}: K = {K}, tau = {tau:g}, device {device.type}, precision {str(dtype)[6:]}")
    if len(ids) > window:
        print(
            f"note: of {len(ids)} prompt tokens the last {window // 2} are read (window {window})"
        )
    if show_steps:
        print("steps: " + " ".join(paint(f" {k} ", k, K, color) for k in range(K + 1)))

    def show(token, steps):
        piece = decoder.decode(tokenizer.decode([token]))
        painted = show_steps and piece and steps is not None
        print(paint(piece, steps, K, color) if painted else piece, end="", flush=True)

    read, total, start = [], 0, time.perf_counter()
    for i in range(num_samples):
        print(f"\n--- sample {i + 1} of {num_samples}" if num_samples > 1 else "")
        paint_prompt = show_steps and text and max_new_tokens
        print("" if paint_prompt else text, end="", flush=True)
        before, decoder = len(read), codecs.getincrementaldecoder("utf-8")("replace")
        one = None if seed is None else seed + i
        with autocast(device, dtype):
            pairs = stream(
                model, ids, max_new_tokens, tau=tau, alpha=alpha, temperature=temperature,
                top_k=top_k, top_p=top_p, seed=one, read=read,
            )  # fmt: skip
            for n, (token, steps) in enumerate(pairs):
                if n == 0 and paint_prompt:  # now that it has been read, its steps are known
                    known = read[before:-1]
                    for pair in zip(ids, [None] * (len(ids) - len(known)) + known, strict=True):
                        show(*pair)
                show(token, steps)
                total += 1
        print(decoder.decode(b"", final=True))
    seconds = time.perf_counter() - start
    if total:
        slots, most = len(read) + sum(read), len(read) * (K + 1)
        print(
            f"\n{sum(read) / len(read):.2f} of {K} pondering steps per token, prompt included; "
            f"{1 - slots / most:.0%} of the slots saved against always running {K}; "
            f"{total / seconds:.1f} tokens/s"
        )


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main))
