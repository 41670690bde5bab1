"""Continue texts: many at once, of any method.

    python -m lab sample --prompts prompts.txt --num-samples 4 --out samples.jsonl
    python -m lab sample --prompt "Return the" --num-samples 8 --batch-size 8

Without --out it prints the samples in the order of the prompts, each as soon as all before it are finished.
A seed says the same whatever the batch, up to rounding. Methods that the engine does not know are decoded one
text after the other.
"""

import time
from typing import Annotated

import torch
import tyro

from data import UserError, command_line
from lab.common import progress
from lab.engine import simple
from lab.engine.batching import Engine, serves
from lab.engine.request import Options, Request, Sample, new_file
from train import pick_precision


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    request = Request(options)
    known = serves(request.model) and request.device.type != "mps"
    decoder, events = (by_engine if known else one_by_one)(request, options)
    request.describe(decoder)
    n, start = len(request.ids), time.perf_counter()

    def show(i, sample, bar):
        if not file:
            bar.clear()
        request.show(i, zip(sample.tokens, sample.steps, strict=True), file)

    with new_file(options.out, n) as file:
        if n == 1 and not file:
            total = request.show(0, ((token, steps) for _, token, steps in events), file)
        else:
            total = show_many(events, n, options.max_new_tokens, request.ends, show)
    request.summarize(total, start)


def by_engine(request, o):
    """-> how, and (which text, token, steps) as they come."""
    precision, how = pick_precision(o.precision, request.device), dict(request.how)
    engine = Engine(
        request.model, min(o.batch_size or 8, len(request.ids)), dtype=getattr(torch, precision),
        tau=how.pop("tau"), alpha=how.pop("alpha"), prefill=o.prefill, compile=o.compile,
    )  # fmt: skip
    engine.prepare(o.temperature, o.top_k, o.top_p)
    events = engine.stream(request.ids, o.max_new_tokens, **how)
    return f"engine, precision {precision}{', compiled' * o.compile}", events


def one_by_one(request, o):
    """As by_engine, by the simple decoder. UserError: what it would not follow."""
    default, flags = Options(), ("batch_size", "precision", "prefill", "compile")
    if names := [name for name in flags if getattr(o, name) != getattr(default, name)]:
        what = f"{request.model.config.method} on {request.device.type} is decoded one by one, in float32"
        raise UserError(f"{what}: leave out --{', --'.join(names).replace('_', '-')}")
    return "simple", simple.stream(request.model, request.ids, o.max_new_tokens, **request.how)


def show_many(events, n, max_new_tokens, ends, show):
    """A progress bar; `show(i, sample)` in the order of the prompts. -> the tokens generated"""
    samples, finished, shown = [Sample([], []) for _ in range(n)], set(), 0
    with progress(total=n * max_new_tokens, unit=" tokens", leave=False) as bar:
        for i, token, steps in events:
            samples[i].tokens.append(token)
            samples[i].steps.append(steps)
            left = max_new_tokens - len(samples[i].tokens)
            if token in ends or not left:
                finished.add(i)
                bar.update(left)
            bar.update()
            while shown in finished:
                show(shown, samples[shown], bar)
                shown += 1
    return sum(len(sample.tokens) for sample in samples)


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab sample", description=__doc__))
