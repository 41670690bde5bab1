"""Continue many prompts at once: what `python sample.py` does for one after the other.

    python -m engine --prompts prompts.txt --num-samples 4 --out samples.jsonl
    python -m engine --prompt "Return the" --num-samples 8 --batch-size 8

The same tokens come out for the same seeds. With a text it prints the samples in the order of the
prompts, each as soon as all before it are finished.
"""

import time
from dataclasses import dataclass
from typing import Literal

import tyro
from tqdm import tqdm

from engine.batching import Engine
from engine.choosing import Sample
from engine.printing import replacing, show_one, write_sample
from runtime import UserError, command_line
from sample import Options, Request


@dataclass
class ManyOptions(Options):
    batch_size: int = 8  # how many sequences run at once
    prefill: Literal["jacobi", "sequential"] = "jacobi"  # prompts in parallel, or slot by slot
    graphs: bool = False  # on CUDA, replay the step of a slot as one graph


def show_many(events, n, max_new_tokens, end, show):
    """A progress bar; `show(i, sample)` in the order of the prompts. -> the tokens generated

    When it is interrupted, all samples that are finished are shown.
    """
    samples, finished, shown = [Sample([], []) for _ in range(n)], set(), 0
    try:
        with tqdm(total=n * max_new_tokens, unit=" tokens", leave=False) as bar:
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
    finally:
        for i in range(shown, n):
            if i in finished or not max_new_tokens:
                show(i, samples[i], None)
    return sum(len(sample.tokens) for sample in samples)


def main(options):
    o = options
    if o.batch_size < 1:
        raise UserError(f"batch_size = {o.batch_size}: it must be at least 1")
    request, start = Request(o), time.perf_counter()
    model, ids, read = request.model, request.ids, request.read
    n, half = len(ids), max(model.config.block_size // 2, 1)
    engine = Engine(
        model, min(o.batch_size, n), tau=o.tau, alpha=o.alpha, prefill=o.prefill,
        dtype=request.dtype, graphs=o.graphs,
    )  # fmt: skip
    events = engine.stream(ids, o.max_new_tokens, seed=o.seed, read=read, **request.settings)
    request.describe("engine")

    def show(i, sample, bar):
        text = request.texts[i]
        if file:
            write_sample(file, text, sample, request.tokenizer, request.end)
            return
        if bar is not None:
            bar.clear()
        print(f"\n--- sample {i + 1} of {n}")
        pairs = zip(sample.tokens, sample.steps, strict=True)
        long = len(ids[i]) > model.config.block_size
        show_one(pairs, request.printer(), text, ids[i], read[i][: half if long else len(ids[i])])

    with replacing(o.out, n) as file:
        if n == 1 and not file:
            print()
            pairs = ((token, steps) for _, token, steps in events)
            total = show_one(pairs, request.printer(), request.texts[0], ids[0], read[0])
        else:
            total = show_many(events, n, o.max_new_tokens, request.end, show)
    request.summarise(total, start)


if __name__ == "__main__":
    command_line(lambda: main(tyro.cli(ManyOptions, description=__doc__)))
