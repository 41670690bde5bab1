"""Continue texts: many at once, of any method.

    python -m lab sample --prompts prompts.txt --num-samples 4 --out samples.jsonl
    python -m lab sample --prompt "Return the" --num-samples 8 --batch-size 8

Without --out it prints the samples in the order of the prompts, each as soon as all before it are
finished. A seed says the same whatever the batch, up to rounding. Methods that the engine does not know
are decoded one text after the other.
"""

import time
from typing import Annotated, Literal

import tyro

from lab.common import Count, command_line, pick_precision, progress, strict_dataclass
from lab.engine import simple
from lab.engine.batching import Engine, serves
from lab.engine.request import Options, Request, Sample, new_file
from model import UserError


@strict_dataclass
class ManyOptions(Options):
    batch_size: Count = 8  # how many sequences run at once
    precision: Literal["auto", "float32", "bfloat16"] = "float32"  # auto: bfloat16 where it is fast
    # jacobi: prompts in parallel; sequential: slot by slot, which auto takes on a CPU for four or
    # more at once, except on the grid
    prefill: Literal["jacobi", "sequential", "auto"] = "auto"
    # on a CPU: float32 is exact, bfloat16 and int8 are faster where reading the weights is what
    # takes time
    weights: Literal["float32", "bfloat16", "int8"] = "float32"
    compile: bool = False  # on a CPU: up to five times as fast, after 10 to 60 seconds


def main(options: Annotated[ManyOptions, tyro.conf.arg(name="")]):
    request = Request(options)
    known = serves(request.model) and request.device.type != "mps"
    decoder, events, start = (by_engine if known else one_by_one)(request, options)
    request.describe(decoder)
    n = len(request.ids)

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
    """-> how, (which text, token, steps) as they come, and when it began."""
    dtype, choice = pick_precision(o.precision, request.device), dict(request.choice)
    engine = Engine(
        request.model, min(o.batch_size, len(request.ids)), dtype=dtype, tau=choice.pop("tau"),
        alpha=choice.pop("alpha"), prefill=o.prefill, weights=o.weights, compile=o.compile,
    )  # fmt: skip
    engine.prepare(o.temperature, o.top_k, o.top_p)
    how = f"engine, precision {str(dtype)[6:]}, weights {o.weights}{', compiled' * o.compile}"
    start = time.perf_counter()
    choice |= {"begin": request.begin, "ends": request.ends, "read": request.read}
    events = engine.stream(request.ids, o.max_new_tokens, **choice)
    return how, events, start


def one_by_one(request, o):
    """As by_engine, by the simple decoder."""
    if o.compile or o.weights != "float32" or o.precision == "bfloat16":
        what = f"{request.model.config.method} on {request.device.type} is decoded one by one, in float32"
        raise UserError(f"{what}: leave out --compile, --weights and --precision")

    def stream():
        for i, (ids, read) in enumerate(zip(request.ids, request.read, strict=True)):
            choice = request.choice | {"seed": None if o.seed is None else o.seed + i}
            choice |= {"begin": request.begin, "ends": request.ends, "read": read}
            for pair in simple.stream(request.model, ids, o.max_new_tokens, **choice):
                yield i, *pair

    return "simple", stream(), time.perf_counter()


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
