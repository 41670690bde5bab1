"""Continue many texts at once, with a model of any method.

    python -m lab sample --prompts prompts.txt --num-samples 4 --out samples.jsonl
    python -m lab sample --prompt "Return the" --num-samples 8 --batch-size 8

Without --out, samples are printed in the order of the prompts, each as soon as all samples before it are
finished. A seed gives the same text in any batch, up to rounding. Models of methods that the engine does not
know are decoded one text after the other.
"""

import time
from typing import Annotated

import torch
import tyro

from common import UserError, command_line
from hardware import pick_precision
from lab.common import progress
from lab.engine import simple
from lab.engine.batching import Engine, serves
from lab.engine.choosing import Sample
from lab.engine.request import Options, Request, new_file


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    request = Request(options)
    if serves(request.model) and request.device.type != "mps":
        decoder, events = by_engine(request, options)
    else:
        decoder, events = one_by_one(request, options)
    request.describe(decoder)
    n = len(request.ids)
    start = time.perf_counter()

    with new_file(options.out, n) as file:
        if n == 1 and not file:  # print each token as it comes
            new_tokens = request.show(0, ((token, steps) for _, token, steps in events), file)
        else:

            def show(i, sample, bar):
                if not file:
                    bar.clear()
                request.show(i, zip(sample.tokens, sample.steps, strict=True), file)

            new_tokens = show_many(events, n, options.max_new_tokens, request.ends, show)
    request.summarize(new_tokens, start)


def by_engine(request, options):
    """Decode in batches.

    Returns:
        The name of the decoder, and its events as they arrive: (index of the text, token, steps).
    """
    precision = pick_precision(options.precision, request.device)
    arguments = dict(request.arguments)
    engine = Engine(
        request.model,
        min(options.batch_size or 8, len(request.ids)),
        dtype=getattr(torch, precision),
        tau=arguments.pop("tau"),
        alpha=arguments.pop("alpha"),
        prefill=options.prefill,
        compile=options.compile,
    )
    engine.prepare(options.temperature, options.top_k, options.top_p)
    events = engine.stream(request.ids, options.max_new_tokens, **arguments)
    name = f"engine, precision {precision}"
    if options.compile:
        name += ", compiled"
    return name, events


def one_by_one(request, options):
    """Decode one text after the other, by the simple decoder.

    Returns:
        What by_engine returns.

    Raises:
        UserError: a flag is given that the simple decoder does not follow.
    """
    default = Options()
    names = ("batch_size", "precision", "prefill", "compile")
    given = [name for name in names if getattr(options, name) != getattr(default, name)]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        method = request.model.config.method
        raise UserError(
            f"models of the method {method} are decoded one text at a time and in float32 on "
            f"{request.device.type}, so {flags} cannot be used: omit {flags}"
        )
    return "simple", simple.stream(request.model, request.ids, options.max_new_tokens, **request.arguments)


def show_many(events, n, max_new_tokens, ends, show):
    """Show a progress bar, and samples in the order of the prompts.

    Args:
        events: (index of the text, token, steps) as they arrive.
        n: how many texts there are.
        max_new_tokens: after so many tokens a text ends.
        ends: the tokens that end a text.
        show: a function of the index of a sample, the Sample and the progress bar.

    Returns:
        How many tokens were generated.
    """
    samples = [Sample([], []) for _ in range(n)]
    finished = set()
    shown = 0
    with progress(total=n * max_new_tokens, unit=" tokens", leave=False) as bar:
        for i, token, steps in events:
            samples[i].tokens.append(token)
            samples[i].steps.append(steps)
            left = max_new_tokens - len(samples[i].tokens)
            bar.update()
            if token in ends or not left:
                finished.add(i)
                bar.update(left)
            while shown in finished:
                show(shown, samples[shown], bar)
                shown += 1
    return sum(len(sample.tokens) for sample in samples)


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab sample", description=__doc__))
