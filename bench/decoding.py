"""`python -m bench decode`: does every skipped slot save its time? Ratios of medians of one run.

exit     adaptive against always running K steps: time against slots, of decoding alone
others   tokens a second: against decoding without a cache, without CUDA graphs, and at K = 0
         against transformers' Llama
prompt   seconds to read a prompt: in parallel, slot by slot, and without leaving slots out
context  milliseconds for a token with more and more slots before it
"""

import tempfile
from collections import deque
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import pandas as pd
import pydantic
import torch
from pydantic import Field

from baselines import build, find
from bench.timing import Some, machine, medians, print_table, write_results
from engine.batching import Engine, serves
from engine.prefill import settle
from engine.products import WEIGHTS
from engine.request import check_request
from interop import find_model, load, save
from model import Count, LlamaConfig
from runtime import UserError, autocast, pick_device, progress
from sample import stream
from training.config import validation_windows

PARTS = ("context", "prompt", "others", "exit")


class How(NamedTuple):
    """In which numbers to decode."""

    precision: str = "float32"
    weights: str = "float32"  # or of fewer bits, on a CPU, see engine/products.py

    @property
    def dtype(self):
        return getattr(torch, self.precision)

    def engine(self, model, batch_size, kind=Engine, **options):
        return kind(model, batch_size, dtype=self.dtype, weights=self.weights, **options)


HOW = How()


def cells(label, *axes):
    """All combinations, with a progress bar."""
    return progress(list(product(*axes)), label, unit=" cells", leave=False)


def prompts_of(val, n, length):
    """n prompts from validation text, as far apart as it goes."""
    if len(val) <= length:
        raise UserError(f"prompts = {length}: the validation text has only {len(val)} tokens")
    starts = torch.linspace(0, len(val) - length - 1, n).long().tolist()
    return [val[start : start + length].tolist() for start in starts]


class AtOnce(Engine):
    """Prompts are given to read_prompts."""

    def reads_in_parallel(self, sequences):
        return True


class SamePrompt(AtOnce):
    """All sequences go on from one prompt, which is read once and then copied."""

    known = None

    def read_prompts(self, rows, contexts):
        if self.known is None:
            first = self.running[rows[0]]
            before = len(first.read)
            logits = super().read_prompts(rows[:1], contexts[:1])
            kv = [layer[rows[0], :, : first.length].clone() for layer in self.cache.layers]
            self.known = logits, kv, first.read[before:], first.length
        logits, kv, steps, length = self.known
        self.cache.reserve(length)
        for row in rows:
            q = self.running[row]
            q.read[:], q.position, q.length = steps, len(q.context), length
            for layer, known in zip(self.cache.layers, kv, strict=True):
                layer[row, :, :length] = known
        return logits.expand(len(rows), -1)


class Unread(AtOnce):
    """A prompt's slots are in the cache, all that it may take, but nobody has computed them."""

    def read_prompts(self, rows, contexts):
        for row in rows:
            q, K = self.running[row], self.model.config.ponder_steps
            q.read[:], q.position = len(q.context) * [K], len(q.context)
            q.length = q.position * (K + 1)
            self.cache.reserve(q.length)
        V = self.model.config.vocab_size
        return torch.zeros(len(rows), V, device=self.device)


def timed(engine, prompts, new_tokens, samples=None, **choice):
    """Generate; the seconds that count are those from the first new token on. `samples`, a list,
    receives what is generated."""
    before, made = engine.stats.seconds, engine.generate(prompts, new_tokens, **choice)
    if samples is not None:
        samples[:] = made
    return engine.stats.seconds - before


def exit_rows(model, val, batch_sizes, lengths, new_tokens, tau, alphas, repeats, how=HOW):
    """Adaptive against always K: which share of the skipped slots is saved time? (target: 0.9)

    The router is shifted by each alpha. Twice as many sequences as run at once are decoded, so that
    some wait for a free row.
    """
    rows = []
    for B, length in cells("early exit", batch_sizes, lengths):
        prompts = 2 * B * prompts_of(val, 1, length)
        make = partial(how.engine, model, B, SamePrompt)
        engines = {alpha: make(tau=tau, alpha=alpha) for alpha in alphas}
        engines["always"] = make(tau=0)
        samples = {name: [] for name in engines}  # the same in each round
        runs = {
            name: partial(timed, engine, prompts, new_tokens, samples[name], seed=0)
            for name, engine in engines.items()
        }
        seconds = medians(runs, repeats)
        tokens = 2 * B * (new_tokens - 1)  # the first is chosen when the prompt has been read
        for alpha in alphas:
            steps = sum(sum(sample.steps[1:]) for sample in samples[alpha]) / tokens
            slot_ratio = (1 + steps) / (1 + model.config.ponder_steps)
            time_ratio = seconds[alpha] / seconds["always"]
            row = {"batch": B, "prompt": length, "alpha": alpha}
            row |= {"steps": steps, "tokens_per_second": tokens / seconds[alpha]}
            row |= {"always_tokens_per_second": tokens / seconds["always"]}
            row |= {"slot_ratio": slot_ratio, "time_ratio": time_ratio}
            saved = (1 - time_ratio) / (1 - slot_ratio) if slot_ratio < 0.9 else None
            rows.append(row | {"saved": saved})
    return rows


def llama(config):
    """A vanilla model of the same shape, untrained, and the same in transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    shape = {f.name: getattr(config, f.name) for f in fields(LlamaConfig)}
    vanilla = build(find("vanilla").Config(**shape, method="vanilla", ponder_steps=0))
    with tempfile.TemporaryDirectory() as directory:
        save(vanilla, directory)
        return AutoModelForCausalLM.from_pretrained(directory).eval(), vanilla.eval()


def other_rows(model, val, batch_sizes, lengths, new_tokens, repeats, how=HOW):
    """Tokens a second and how many times that of the other way: after the prompt of recomputing all
    for each token and, on CUDA, of always K without graphs; of transformers prompt included."""
    rows, few = [], min(4, new_tokens)
    device = model.lm_head.weight.device

    def compare(against, B, length, tokens, cache, other):
        runs = {"cache": cache, "other": other}
        seconds = medians(runs, repeats, device=device)
        row = {"against": against, "batch": B, "prompt": length}
        row |= {f"{name}_tokens_per_second": B * tokens / seconds[name] for name in seconds}
        rows.append(row | {"ratio": seconds["other"] / seconds["cache"]})

    @torch.no_grad()
    @autocast(device, how.dtype)
    def recompute(prompt):
        idx = torch.tensor([prompt], device=device)
        for _ in range(few):
            found = settle(model, idx)
            h_hat = model.integrate(found.h[:, -1:], found.s[:, -1:], found.steps[:, -1:])
            idx = torch.cat([idx, model.lm_head(h_hat).argmax(-1)], dim=1)

    for (length,) in cells("no cache", lengths):
        prompts = prompts_of(val, 1, length)
        cached = how.engine(model, 1, SamePrompt)
        cached = partial(timed, cached, prompts, few + 1, temperature=0)
        compare("no cache", 1, length, few, cached, partial(recompute, *prompts))
    for B, length in cells("no graphs", batch_sizes, lengths) if device.type == "cuda" else ():
        prompts = B * prompts_of(val, 1, length)
        engines = [how.engine(model, B, SamePrompt, tau=0, graphs=on) for on in (True, False)]
        both = [partial(timed, e, prompts, new_tokens, temperature=0) for e in engines]
        compare("no graphs", B, length, new_tokens - 1, *both)
    try:
        theirs, ours = (m.to(device) for m in llama(model.config))
        theirs.to(how.dtype)
    except ImportError:
        print("transformers is not installed: the comparison with its generate is left out")
        return rows
    for B, length in cells("transformers", batch_sizes, lengths):
        prompts = prompts_of(val, B, length)
        idx = torch.tensor(prompts, device=device)
        settings = dict(do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(idx))
        settings |= dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
        cached = how.engine(ours, B)
        cached = partial(cached.generate, prompts, new_tokens, temperature=0)
        generate = partial(theirs.generate, idx, **settings)
        compare("transformers", B, length, new_tokens, cached, generate)
    return rows


def prompt_rows(model, val, lengths, alphas, repeats, how=HOW):
    """Seconds to read one prompt: compacted Jacobi iteration against the other ways."""
    rows, device = [], model.lm_head.weight.device

    @autocast(device, how.dtype)  # an engine has a precision of its own
    def simple(prompt, alpha):
        deque(stream(model, prompt, 1, temperature=0, alpha=alpha), maxlen=0)

    @torch.no_grad()
    @autocast(device, how.dtype)
    def full(*args, **kwargs):
        model.fixed_point(*args, **kwargs)

    for length, alpha in cells("prompts", lengths, dict.fromkeys((0.0, *alphas[-1:]))):
        (prompt,) = prompts_of(val, 1, length)
        idx, ways = torch.tensor([prompt], device=device), ("jacobi", "sequential")
        engines = {p: how.engine(model, 1, alpha=alpha, prefill=p) for p in ways}
        runs = {p: partial(e.generate, [prompt], 1, temperature=0) for p, e in engines.items()}
        runs["simple"] = partial(simple, prompt, alpha)
        near = 1e-5 if how.precision == "float32" else 1e-2  # as an engine's
        runs["full"] = partial(full, idx, tau=1e-4, alpha=alpha, tolerance=near)
        warm_up = int(device.type == "cuda")  # where the first call loads libraries
        seconds = medians(runs, repeats, warm_up, device)
        slots = engines["sequential"].stats.slots / (repeats + warm_up)
        row = {"prompt": length, "alpha": alpha}
        row["passes"] = engines["jacobi"].stats.prompt_passes // (repeats + warm_up)
        row["slot_ratio"] = slots / (length * (model.config.ponder_steps + 1))
        row |= {f"{name}_seconds": value for name, value in seconds.items()}
        others = ("sequential", "simple", "full")
        rows.append(row | {f"{n}_ratio": seconds[n] / seconds["jacobi"] for n in others})
    return rows


def context_rows(model, contexts, repeats, how=HOW):
    """Milliseconds for a token of K+1 slots, with so many slots before it: the mean of eight."""
    engine, S = how.engine(model, 1, Unread, tau=0), model.config.ponder_steps + 1
    prompts = {n: [max(n // S, 1) * [0]] for n in contexts}
    runs = {n: partial(timed, engine, prompts[n], 9, temperature=0) for n in contexts}
    seconds = medians(runs, repeats)
    first = seconds[contexts[0]]
    return [
        {"slots": n, "milliseconds": 1e3 * seconds[n] / 8, "ratio": seconds[n] / first}
        for n in contexts
    ]


@pydantic.validate_call
def decode(
    run: str | None = None,
    parts: Some[Literal[PARTS]] = PARTS,
    batch_sizes: Some[Count] | None = None,
    prompts: Some[Count] = (32, 512),
    new_tokens: Annotated[int, Field(ge=2)] = 32,
    tau: float = 1e-4,
    alphas: Some[float] = (0.0, -2.0, -4.0),
    contexts: Some[Count] = (64, 512, 1024, 2048, 4096, 8192),
    precision: Literal["float32", "bfloat16"] = "float32",
    weights: Literal[WEIGHTS] = "float32",
    repeats: Count = 3,
    device: str = "auto",
    out: Path = Path("out/bench"),
):
    """Early-exit decoding: what skipped slots save, and how fast the rest is.

    The results are written as they come; early exit is drawn, too.

    Args:
        run: directory of a trained PonderLM-3; by default the newest in out/
        parts: what is measured
        batch_sizes: sequences that run at once; by default 1, 8, 32, on CUDA 128, too
        prompts: lengths of prompts, in tokens
        new_tokens: to generate for each
        tau: where early exit stops, in the comparison with always K
        alphas: shifts of the router, which sweep the executed steps
        contexts: slots in the cache, for the cost of a context
        precision: of the matrix products
        weights: how an engine on a CPU keeps them
        repeats: rounds
        device: auto, cpu, cuda
        out: folder for the results
    """
    device, directory = pick_device(device), find_model(run)
    batch_sizes = batch_sizes or ((1, 8, 32, 128) if device.type == "cuda" else (1, 8, 32))
    model = load(directory).to(device)
    if not (serves(model) and model.has_router):
        raise UserError(f"{directory} is of method {model.config.method}: give a PonderLM-3")
    for alpha in alphas:
        check_request(model, [], tau=tau, alpha=alpha)
    _, _, windows = validation_windows(directory)
    val = torch.from_numpy(windows.tokens[:2_000_000].astype("int64"))
    # Times do not depend on what is said beyond the window, and RoPE knows no end.
    trained, longest = model.config.block_size, max(contexts) // (model.config.ponder_steps + 1)
    window = max(trained, max(prompts) + new_tokens, longest + 9)
    model.config = replace(model.config, block_size=window)
    how, sizes = How(precision, weights), (batch_sizes, prompts, new_tokens)
    measurements = {
        "context": partial(context_rows, model, contexts),
        "prompt": partial(prompt_rows, model, val, prompts, alphas),
        "others": partial(other_rows, model, val, *sizes),
        "exit": partial(exit_rows, model, val, *sizes, tau, alphas),
    }
    results = {"machine": machine(device), "run": directory.name, "tau": tau, **how._asdict()}
    results["parameters"] = sum(p.numel() for p in model.parameters())
    file = out / f"decode-{directory.name}-{device.type}.json"
    for part in parts:
        results[part] = measurements[part](repeats, how)
        write_results(file, results)
    print(results["machine"], results["run"], f"{results['parameters']:,} parameters, tau {tau:g}")
    print(f"{precision}, weights {weights}, median of {repeats}")
    for part in parts:
        title, columns = TABLES[part]
        print(f"\n{title}")
        print_table(results[part], columns)
    print(f"written: {file}")
    if "exit" in results:
        draw(results["exit"], file.with_suffix(".png"))
        print(f"drawn: {file.with_suffix('.png')}")


TABLES = {
    "exit": (
        "early exit against always K, after the prompt: ratios to always K\n"
        "saved: saved time / saved slots, where a tenth is saved",
        {"batch": "batch", "prompt": "prompt", "alpha": "alpha:g"}
        | {"steps": "steps:.2f", "tok/s": "tokens_per_second:.0f", "slots": "slot_ratio:.2f"}
        | {"time": "time_ratio:.2f", "saved": "saved:.2f"},
    ),
    "others": (
        "no cache, no graphs: after the prompt; transformers: K = 0, untrained, prompt included",
        {"against": "against", "batch": "batch", "prompt": "prompt"}
        | {"tok/s": "cache_tokens_per_second:.1f", "theirs": "other_tokens_per_second:.1f"}
        | {"ratio": "ratio:.2f"},
    ),
    "prompt": (
        "seconds to read a prompt in parallel; of the other ways the ratio to it",
        {"prompt": "prompt", "alpha": "alpha:g", "slots": "slot_ratio:.2f", "passes": "passes"}
        | {"parallel": "jacobi_seconds:.3f", "slot by slot": "sequential_ratio:.2f"}
        | {"simple": "simple_ratio:.2f", "full": "full_ratio:.2f"},
    ),
    "context": (
        "milliseconds for a token of K+1 slots",
        {"slots before it": "slots", "ms": "milliseconds:.2f", "ratio": "ratio:.2f"},
    ),
}


def draw(rows, file):
    """Early exit: what is left of the time against what is left of the slots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.axline((0, 0), slope=1, color="#999999", lw=1, label="all skipped slots are saved time")
    for (batch, prompt), mine in pd.DataFrame(rows).groupby(["batch", "prompt"]):
        axis.plot(mine.slot_ratio, mine.time_ratio, "o", label=f"batch {batch}, prompt {prompt}")
    axis.set(xlabel="slots / always K", ylabel="time / always K", xlim=(0, None), ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(file, dpi=150)
