"""Continue many prompts at once: what `python sample.py` does for one after the other.

    python -m engine --prompts prompts.txt --num-samples 4 --out samples.jsonl
    python -m engine --prompt "Return the" --num-samples 8 --batch-size 8

With float32, the default, the same tokens come out for the same seeds. Without --out it prints the
samples in the order of the prompts, each as soon as all before it are finished.
"""

import time
from typing import Annotated, Literal

import tyro

from engine.batching import Engine
from engine.request import Options, Request, Sample, new_file, summary
from model import Count
from runtime import command_line, pick_precision, progress, strict_dataclass


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


def show_many(events, n, max_new_tokens, end, show):
    """A progress bar; `show(i, sample)` in the order of the prompts. -> the tokens generated"""
    samples, finished, shown = [Sample([], []) for _ in range(n)], set(), 0
    with progress(total=n * max_new_tokens, unit=" tokens", leave=False) as bar:
        for i, token, steps in events:
            samples[i].tokens.append(token)
            samples[i].steps.append(steps)
            left = max_new_tokens - len(samples[i].tokens)
            if token == end or not left:
                finished.add(i)
                bar.update(left)
            bar.update()
            while shown in finished:
                show(shown, samples[shown], bar)
                shown += 1
    return sum(len(sample.tokens) for sample in samples)


def main(options: Annotated[ManyOptions, tyro.conf.arg(name="")]):
    request, o = Request(options), options
    model, n = request.model, len(request.ids)
    dtype = pick_precision(o.precision, request.device)
    engine = Engine(
        model, min(o.batch_size, n), dtype=dtype, tau=request.choice["tau"], alpha=o.alpha,
        prefill=o.prefill, weights=o.weights, compile=o.compile,
    )  # fmt: skip
    engine.prepare(o.temperature, o.top_k, o.top_p)
    start = time.perf_counter()
    events = engine.stream(
        request.ids, o.max_new_tokens, end=request.end, read=request.read, seed=o.seed,
        temperature=o.temperature, top_k=o.top_k, top_p=o.top_p,
    )  # fmt: skip
    how = f"precision {str(dtype)[6:]}, weights {o.weights}{', compiled' * o.compile}"
    request.describe(f"engine, {how}")

    def show(i, sample, bar):
        if not file:
            bar.clear()
        request.show(i, zip(sample.tokens, sample.steps, strict=True), file)

    with new_file(o.out, n) as file:
        if n == 1 and not file:
            total = request.show(0, ((token, steps) for _, token, steps in events), file)
        else:
            total = show_many(events, n, o.max_new_tokens, request.end, show)
    summary(request.read, model.config.ponder_steps, total, start)


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m engine", description=__doc__))
