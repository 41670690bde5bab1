"""`python -m bench decode`: does every skipped slot save its time? Ratios of medians of one run.

exit     adaptive against always running K steps: time against slots, of decoding alone
others   tokens a second: against decoding without a cache, and transformers' Llama at K = 0
prompt   seconds to read a prompt: in parallel, slot by slot, and without leaving slots out
context  milliseconds for a token with more and more slots before it
"""

import tempfile
import time
from collections import deque
from dataclasses import fields, replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Annotated

import pandas as pd
import pydantic
import torch
from pydantic import Field
from tqdm import tqdm

from baselines import build, find
from bench.timing import Some, machine, medians, print_table, write_results
from engine.batching import Engine, Sequence
from engine.choosing import check_request
from engine.prefill import settle
from interop import find_model, load, save
from model import Count, LlamaConfig
from runtime import UserError, pick_device
from sample import stream
from training.settings import validation_windows

COLORS = {1: "#0072B2", 8: "#009E73", 32: "#D55E00"}


def cells(label, *axes):
    """All combinations, with a progress bar."""
    return tqdm(list(product(*axes)), label, unit=" cells", leave=False)


def prompts_of(val, n, length):
    """n prompts from validation text, as far apart as it goes."""
    if len(val) <= length:
        raise UserError(f"prompts = {length}: the validation text has only {len(val)} tokens")
    starts = torch.linspace(0, len(val) - length - 1, n).long().tolist()
    return [val[start : start + length].tolist() for start in starts]


class SamePrompt(Engine):
    """All sequences go on from one prompt, which is read once and then copied."""

    known = None

    def read_prompts(self, rows):
        if self.known is None:
            first = self.running[rows[0]]
            before = len(first.read)
            logits = super().read_prompts(rows[:1])
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


def timed(engine, *args, **kwargs):
    """Generate; the seconds that count are those from the first new token on."""
    before = engine.stats.seconds
    engine.generate(*args, **kwargs)
    return engine.stats.seconds - before


def exit_rows(model, val, batch_sizes, lengths, new_tokens, tau, alphas, repeats):
    """Adaptive against always K: which share of the skipped slots is saved time? (target: 0.9)

    The router is shifted by each alpha. Twice as many sequences as run at once are decoded, so that
    some wait for a free row.
    """
    rows = []
    for B, length in cells("early exit", batch_sizes, lengths):
        prompts = 2 * B * prompts_of(val, 1, length)
        engines = {alpha: SamePrompt(model, B, tau=tau, alpha=alpha) for alpha in alphas}
        engines["always"] = always = SamePrompt(model, B, tau=0)
        runs = {k: partial(timed, e, prompts, new_tokens, seed=0) for k, e in engines.items()}
        seconds = medians(runs, repeats)
        tokens = 2 * B * (new_tokens - 1)  # the first is chosen when the prompt has been read
        for alpha in alphas:
            slots = engines[alpha].stats.slots  # as many in each round, and in the warm-up
            time_ratio, slot_ratio = seconds[alpha] / seconds["always"], slots / always.stats.slots
            row = {"batch": B, "prompt": length, "alpha": alpha}
            row |= {"steps": slots / (repeats + 1) / tokens - 1}
            row |= {"tokens_per_second": tokens / seconds[alpha]}
            row |= {"slot_ratio": slot_ratio, "time_ratio": time_ratio}
            saved = (1 - time_ratio) / (1 - slot_ratio) if slot_ratio < 0.9 else None
            rows.append(row | {"saved": saved})
    return rows


def llama(config):
    """A vanilla model of the same shape, untrained, and the same as transformers' Llama."""
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    shape = {f.name: getattr(config, f.name) for f in fields(LlamaConfig)}
    vanilla = build(find("vanilla").Config(**shape, method="vanilla", ponder_steps=0))
    with tempfile.TemporaryDirectory() as directory:
        save(vanilla, directory)
        return LlamaForCausalLM.from_pretrained(directory).eval(), vanilla.eval()


def other_rows(model, val, batch_sizes, lengths, new_tokens, repeats):
    """Tokens a second and how many times that of the other way: of recomputing all for each token
    (after the prompt), and of transformers (prompt included)."""
    rows, few = [], min(4, new_tokens)
    device = model.lm_head.weight.device

    def compare(against, B, length, tokens, cache, other):
        seconds = medians({"cache": cache, "other": other}, repeats)
        row = {"against": against, "batch": B, "prompt": length, "tokens": tokens}
        row |= {f"{name}_tokens_per_second": B * tokens / seconds[name] for name in seconds}
        rows.append(row | {"ratio": seconds["other"] / seconds["cache"]})

    @torch.no_grad()
    def recompute(prompt):
        idx = torch.tensor([prompt], device=device)
        for _ in range(few):
            found = settle(model, idx)
            h_hat = model.integrate(found.h[:, -1:], found.s[:, -1:], found.steps[:, -1:])
            idx = torch.cat([idx, model.lm_head(h_hat).argmax(-1)], dim=1)

    for (length,) in cells("no cache", lengths):
        prompts = prompts_of(val, 1, length)
        cached = partial(timed, SamePrompt(model, 1), prompts, few + 1, temperature=0)
        compare("no cache", 1, length, few, cached, partial(recompute, *prompts))
    try:
        theirs, ours = (m.to(device) for m in llama(model.config))
    except ImportError:
        print("transformers is not installed: the comparison with its generate is left out")
        return rows
    for B, length in cells("transformers", batch_sizes, lengths):
        prompts = prompts_of(val, B, length)
        idx = torch.tensor(prompts, device=device)
        settings = dict(do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(idx))
        settings |= dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
        cached = partial(Engine(ours, B).generate, prompts, new_tokens, temperature=0)
        generate = partial(theirs.generate, idx, **settings)
        compare("transformers", B, length, new_tokens, cached, generate)
    return rows


def prompt_rows(model, val, lengths, alphas, repeats):
    """Seconds to read one prompt: compacted Jacobi iteration against the other ways."""

    def simple(prompt, alpha):
        deque(stream(model, prompt, 1, temperature=0, alpha=alpha), maxlen=0)

    rows, full = [], torch.no_grad()(model.fixed_point)
    for length, alpha in cells("prompts", lengths, (0.0, *alphas[-1:])):
        (prompt,) = prompts_of(val, 1, length)
        idx = torch.tensor([prompt], device=model.lm_head.weight.device)
        engines = {p: Engine(model, 1, alpha=alpha, prefill=p) for p in ("jacobi", "sequential")}
        runs = {p: partial(e.generate, [prompt], 1, temperature=0) for p, e in engines.items()}
        runs["simple"] = partial(simple, prompt, alpha)
        runs["full"] = partial(full, idx, tau=1e-4, alpha=alpha, tolerance=1e-5)
        seconds = medians(runs, repeats, warm_up=0)
        slots = engines["sequential"].stats.slots / repeats
        row = {"prompt": length, "alpha": alpha}
        row["passes"] = engines["jacobi"].stats.prompt_passes // repeats
        row["slot_ratio"] = slots / (length * (model.config.ponder_steps + 1))
        row |= {f"{name}_seconds": value for name, value in seconds.items()}
        others = ("sequential", "simple", "full")
        rows.append(row | {f"{n}_ratio": seconds[n] / seconds["jacobi"] for n in others})
    return rows


def context_rows(model, contexts, repeats):
    """Milliseconds for a token of K+1 slots, with so many slots before it."""
    engine, S = Engine(model, 1, tau=0), model.config.ponder_steps + 1

    @torch.inference_mode()
    def run(n):
        engine.cache.reserve(n + S)
        for _ in range(8):
            q = Sequence(0, [0] * (n // S + 1), deque(), [], S - 1, position=n // S, length=n)
            engine.running = [q]
            engine.cache.clear(0, n)
            for _ in range(S):
                engine.advance()

    runs = {n: partial(run, n) for n in contexts}
    seconds = medians(runs, repeats)
    first = seconds[contexts[0]]
    return [
        {"slots": n, "milliseconds": 1e3 * seconds[n] / 8, "ratio": seconds[n] / first}
        for n in contexts
    ]


@pydantic.validate_call
def decode(
    run: str | None = None,
    batch_sizes: Some[Count] = (1, 8, 32),
    prompts: Some[Count] = (32, 512),
    new_tokens: Annotated[int, Field(ge=2)] = 32,
    tau: float = 1e-4,
    alphas: Some[float] = (0.0, -2.0, -4.0),
    contexts: Some[Count] = (64, 512, 1024, 2048, 4096, 8192),
    repeats: Count = 3,
    device: str = "auto",
    out: Path = Path("out/bench"),
):
    """Early-exit decoding: what skipped slots save, and how fast the rest is. In float32.

    Args:
        run: directory of a trained PonderLM-3; by default the newest in out/
        batch_sizes: sequences that run at once
        prompts: lengths of prompts, in tokens
        new_tokens: to generate for each
        tau: where early exit stops, in the comparison with always K
        alphas: shifts of the router, which sweep the executed steps
        contexts: slots in the cache for the last measurement
        repeats: rounds
        device: auto, cpu, cuda
        out: folder for the results
    """
    device, directory = pick_device(device), find_model(run)
    model = load(directory).to(device)
    if not (model.iterates and model.has_router):
        raise UserError(f"{directory} is of method {model.config.method}: give a PonderLM-3")
    for alpha in alphas:
        check_request(model, [], 0, tau=tau, alpha=alpha)
    _, _, windows = validation_windows(directory)
    val = torch.from_numpy(windows.tokens[:2_000_000].astype("int64"))
    # Times do not depend on what is said beyond the window, and RoPE knows no end.
    S, needed = model.config.ponder_steps + 1, max(prompts) + new_tokens
    trained = model.config.block_size
    model.config = replace(model.config, block_size=max(trained, needed, max(contexts) // S + 1))
    start = time.perf_counter()
    results = {"machine": machine(device), "run": directory.name, "window": trained, "tau": tau}
    results["parameters"] = sum(p.numel() for p in model.parameters())
    results["context"] = context_rows(model, contexts, repeats)
    results["prompt"] = prompt_rows(model, val, prompts, alphas, repeats)
    results["others"] = other_rows(model, val, batch_sizes, prompts, new_tokens, repeats)
    results["exit"] = exit_rows(model, val, batch_sizes, prompts, new_tokens, tau, alphas, repeats)
    results["minutes"] = (time.perf_counter() - start) / 60
    file = write_results(out / f"decode-{directory.name}-{device.type}.json", results)
    print_tables(results)
    draw(results, file.with_suffix(".png"))
    print(f"written: {file} and {file.with_suffix('.png').name}")


def print_tables(results):
    print(f"{results['machine']} float32, {results['run']}, {results['parameters']:,} parameters")
    print("\nearly exit against always K, after the prompt: ratios to always K")
    print("saved: saved time / saved slots, where a tenth is saved")
    columns = {"batch": "batch", "prompt": "prompt", "alpha": "alpha:g", "steps": "steps:.2f"}
    columns |= {"tok/s": "tokens_per_second:.0f", "slots": "slot_ratio:.2f"}
    print_table(results["exit"], columns | {"time": "time_ratio:.2f", "saved": "saved:.2f"})
    print("\nno cache: after the prompt; transformers: K = 0, untrained weights, prompt included")
    columns = {"against": "against", "batch": "batch", "prompt": "prompt"}
    columns |= {"tok/s": "cache_tokens_per_second:.1f", "theirs": "other_tokens_per_second:.1f"}
    print_table(results["others"], columns | {"ratio": "ratio:.2f"})
    print("\nseconds to read a prompt in parallel; of the other ways the ratio to it")
    columns = {"prompt": "prompt", "alpha": "alpha:g", "slots": "slot_ratio:.2f"}
    columns |= {"passes": "passes", "parallel": "jacobi_seconds:.3f"}
    columns |= {"slot by slot": "sequential_ratio:.2f", "simple": "simple_ratio:.2f"}
    print_table(results["prompt"], columns | {"full": "full_ratio:.2f"})
    print("\nmilliseconds for a token of K+1 slots")
    columns = {"slots before it": "slots", "ms": "milliseconds:.2f", "ratio": "ratio:.2f"}
    print_table(results["context"], columns)


def draw(results, file):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.5), layout="constrained")
    axes = figure.subplots(2, 2)
    exits, others, reading, after = axes.flat
    names = ("exit", "others", "prompt", "context")
    exit, other, prompt, context = (pd.DataFrame(results[name]) for name in names)
    markers = dict(zip(prompt.prompt.unique(), cycle("o^svD"), strict=False))
    exits.plot([0, 1], [0, 1], color="#999999", lw=1, label="all skipped slots are saved time")
    for (B, length), mine in exit.groupby(["batch", "prompt"], sort=False):
        look = {"linestyle": "none", "marker": markers[length], "color": COLORS.get(B, "#555555")}
        label = f"batch {B}, prompt {length}"
        exits.plot(mine.slot_ratio, mine.time_ratio, label=label, **look)
    exits.set(xlabel="slots / always K", ylabel="time / always K", title="early exit")
    exits.legend(fontsize="small")
    rows = zip(other.against, other.batch, other.prompt, strict=True)
    names = [f"{against}\nbatch {B}, prompt {length}" for against, B, length in rows]
    others.plot(other.ratio[::-1], names[::-1], "o", color="#0072B2")
    place = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
    for name, ratio in zip(names, other.ratio, strict=True):
        others.annotate(f"{ratio:.1f}", (ratio, name), **place)
    others.tick_params(axis="y", labelsize="small")
    others.axvline(1, color="#999999", lw=1)
    others.set(xlabel="times as many tokens a second", title="against other ways", xscale="log")
    others.set_xlim(min(0.8, *other.ratio), 2 * other.ratio.max())
    pairs = zip(prompt.prompt, prompt.alpha, strict=True)
    names = [f"{length} tokens\nalpha {alpha:g}" for length, alpha in pairs]
    kinds = {
        "jacobi": ("parallel, executed slots", "o", "#0072B2"),
        "full": ("parallel, all slots", "s", "#56B4E9"),
        "sequential": ("slot by slot", "^", "#E69F00"),
        "simple": ("the simple decoder", "D", "#777777"),
    }
    for kind, (label, marker, color) in kinds.items():
        reading.plot(names, prompt[f"{kind}_seconds"], marker, color=color, label=label)
    reading.set(ylabel="seconds", title="reading one prompt", yscale="log")
    reading.legend(fontsize="small")
    after.plot(context.slots, context.milliseconds, "o-", color="#0072B2")
    after.set(xlabel="slots before it", ylabel="milliseconds a token", title="always K, batch 1")
    after.set_ylim(bottom=0)
    after.set_xlim(left=0)
    for panel in axes.flat:
        panel.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
