"""`python -m bench decode`: does every skipped slot save its time? Ratios of medians of one run.

exit     adaptive against always running K steps: time against slots, of decoding alone
others   tokens a second: against decoding without a cache, and transformers' Llama at K = 0
prompt   seconds to read a prompt: in parallel, slot by slot, and without leaving slots out
context  milliseconds for a token with more and more slots before it
"""

import itertools
import tempfile
import time
from collections import deque
from dataclasses import fields, replace
from pathlib import Path

import torch
from tqdm import tqdm

from baselines import build, find
from bench.timing import machine, medians, write_results
from engine.batching import Engine, Sequence
from engine.choosing import check_request
from engine.prefill import settle
from interop import find_model, load, save
from model import LlamaConfig
from runtime import UserError, pick_device
from sample import stream
from training.settings import validation_windows

COLORS = {1: "#0072B2", 8: "#009E73", 32: "#D55E00"}


def cells(label, *axes):
    """All combinations, with a progress bar."""
    return tqdm(list(itertools.product(*axes)), label, unit=" cells", leave=False)


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


def exit_rows(model, val, batch_sizes, lengths, new_tokens, tau, alphas, repeats):
    """Adaptive against always K: which share of the skipped slots is saved time? (target: 0.9)

    The router is shifted by each alpha. Counted is the time from the first new token on, of twice
    as many sequences as run at once, so that some wait for a free row.
    """
    rows = []
    for B, length in cells("early exit", batch_sizes, lengths):
        prompts = 2 * B * prompts_of(val, 1, length)
        engines = {"always": SamePrompt(model, B, tau=0)}
        for alpha in alphas:
            engines[alpha] = SamePrompt(model, B, tau=tau, alpha=alpha)
        slots = {}

        def run(name, B=B, prompts=prompts, engines=engines, slots=slots):
            stats = engines[name].stats
            before = stats.seconds, stats.slots
            engines[name].generate(prompts, new_tokens, seed=0)
            slots[name] = stats.slots - before[1]
            return stats.seconds - before[0]

        runs = {name: lambda name=name: run(name) for name in engines}
        seconds = medians(runs, repeats)
        tokens = 2 * B * (new_tokens - 1)  # the first is chosen when the prompt has been read
        for alpha in alphas:
            time_ratio = seconds[alpha] / seconds["always"]
            slot_ratio = slots[alpha] / slots["always"]
            row = {"batch": B, "prompt": length, "alpha": alpha, "steps": slots[alpha] / tokens - 1}
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
    for (length,) in cells("no cache", lengths):
        (prompt,) = prompts_of(val, 1, length)

        @torch.no_grad()
        def recompute(prompt=prompt):
            idx = torch.tensor([prompt], device=device)
            for _ in range(few):
                found = settle(model, idx)
                h_hat = model.integrate(found.h[:, -1:], found.s[:, -1:], found.steps[:, -1:])
                idx = torch.cat([idx, model.lm_head(h_hat).argmax(-1)], dim=1)

        engine = SamePrompt(model, 1)

        def cached(engine=engine, prompt=prompt):  # without reading the prompt
            before = engine.stats.seconds
            engine.generate([prompt], few + 1, temperature=0)
            return engine.stats.seconds - before

        seconds = medians({"cache": cached, "other": recompute}, repeats)
        row = {"against": "no cache", "batch": 1, "prompt": length, "tokens": few}
        rows.append(row | compared(seconds, few))
    try:
        theirs, ours = (m.to(device) for m in llama(model.config))
    except ImportError:
        print("transformers is not installed: the comparison with its generate is left out")
        return rows
    for B, length in cells("transformers", batch_sizes, lengths):
        prompts, engine = prompts_of(val, B, length), Engine(ours, B)
        idx = torch.tensor(prompts, device=device)
        settings = dict(do_sample=False, pad_token_id=0, max_new_tokens=new_tokens)

        def generate(idx=idx, settings=settings):
            mask = torch.ones_like(idx)
            theirs.generate(idx, attention_mask=mask, min_new_tokens=new_tokens, **settings)

        def run(engine=engine, prompts=prompts):
            engine.generate(prompts, new_tokens, temperature=0)

        seconds = medians({"cache": run, "other": generate}, repeats)
        row = {"against": "transformers", "batch": B, "prompt": length, "tokens": new_tokens}
        rows.append(row | compared(seconds, B * new_tokens))
    return rows


def compared(seconds, tokens):
    found = {f"{name}_tokens_per_second": tokens / seconds[name] for name in seconds}
    return found | {"ratio": seconds["other"] / seconds["cache"]}


def prompt_rows(model, val, lengths, alphas, repeats):
    """Seconds to read one prompt: compacted Jacobi iteration against the other ways."""
    rows = []
    for length, alpha in cells("prompts", lengths, (0.0, *alphas[-1:])):
        (prompt,) = prompts_of(val, 1, length)
        idx = torch.tensor([prompt], device=model.lm_head.weight.device)
        engines = [Engine(model, 1, alpha=alpha, prefill=p) for p in ("jacobi", "sequential")]

        def read(i, prompt=prompt, engines=engines):
            engines[i].generate([prompt], 1, temperature=0)

        def full(idx=idx, alpha=alpha):
            with torch.no_grad():
                model.fixed_point(idx, tau=1e-4, alpha=alpha, tolerance=1e-5)

        def simple(prompt=prompt, alpha=alpha):
            deque(stream(model, prompt, 1, temperature=0, alpha=alpha), maxlen=0)

        runs = {"jacobi": lambda: read(0), "sequential": lambda: read(1)}
        seconds = medians(runs | {"simple": simple, "full": full}, repeats, warm_up=0)
        row = {"prompt": length, "alpha": alpha, "passes": engines[0].stats.prompt_passes}
        row["passes"] //= repeats
        full_slots = length * (model.config.ponder_steps + 1)
        row["slot_ratio"] = engines[1].stats.slots / repeats / full_slots
        row |= {f"{name}_seconds": value for name, value in seconds.items()}
        row |= {
            f"{n}_ratio": seconds[n] / seconds["jacobi"] for n in ("sequential", "simple", "full")
        }
        rows.append(row)
    return rows


def context_rows(model, contexts, repeats):
    """Milliseconds for a token of K+1 slots, with so many slots before it."""
    engine, S = Engine(model, 1, tau=0), model.config.ponder_steps + 1
    runs = {}
    for n in contexts:

        @torch.inference_mode()
        def run(n=n):
            engine.cache.reserve(n + S)
            for _ in range(8):
                q = Sequence(0, [0] * (n // S + 1), deque(), [], S - 1, position=n // S, length=n)
                engine.running = [q]
                engine.cache.clear(0, n)
                for _ in range(S):
                    engine.advance()

        runs[n] = run
    seconds = medians(runs, repeats)
    first = seconds[contexts[0]]
    return [
        {"slots": n, "milliseconds": 1e3 * seconds[n] / 8, "ratio": seconds[n] / first}
        for n in contexts
    ]


def decode(
    run: str | None = None,
    batch_sizes: tuple[int, ...] = (1, 8, 32),
    prompts: tuple[int, ...] = (32, 512),
    new_tokens: int = 32,
    tau: float = 1e-4,
    alphas: tuple[float, ...] = (0.0, -2.0, -4.0),
    contexts: tuple[int, ...] = (64, 512, 1024, 2048, 4096, 8192),
    repeats: int = 3,
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
    if new_tokens < 2:
        raise UserError(f"new_tokens = {new_tokens}: it must be at least 2")
    if not all((batch_sizes, prompts, alphas, contexts)):
        raise UserError("batch_sizes, prompts, alphas and contexts need a value each")
    if min(*batch_sizes, *prompts, *contexts, repeats) < 1:
        raise UserError("batch_sizes, prompts, contexts and repeats are 1 or more")
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
    print("\nearly exit against always K           ratio to always K  saved time / saved slots,")
    print("after the prompt                                         where a tenth is saved")
    print(f"{'batch':>5}{'prompt':>8}{'alpha':>7}{'steps':>7}{'tok/s':>8}{'slots':>8}{'time':>7}")
    for r in results["exit"]:
        saved = "" if r["saved"] is None else f"{r['saved']:14.2f}"
        print(
            f"{r['batch']:5}{r['prompt']:8}{r['alpha']:7g}{r['steps']:7.2f}"
            f"{r['tokens_per_second']:8.0f}{r['slot_ratio']:8.2f}{r['time_ratio']:7.2f}{saved}"
        )
    print("\nno cache: after the prompt; transformers: K = 0, untrained weights, prompt included")
    print(f"{'against':14}{'batch':>6}{'prompt':>8}{'tok/s':>9}{'theirs':>9}{'ratio':>8}")
    for r in results["others"]:
        print(
            f"{r['against']:14}{r['batch']:6}{r['prompt']:8}{r['cache_tokens_per_second']:9.1f}"
            f"{r['other_tokens_per_second']:9.1f}{r['ratio']:8.2f}"
        )
    print("\nseconds to read a prompt                       ratio to parallel")
    print(
        f"{'prompt':>6}{'alpha':>7}{'slots':>7}{'passes':>8}{'parallel':>10}{'slot by slot':>14}"
        f"{'simple':>8}{'full':>7}"
    )
    for r in results["prompt"]:
        print(
            f"{r['prompt']:6}{r['alpha']:7g}{r['slot_ratio']:7.2f}{r['passes']:8}"
            f"{r['jacobi_seconds']:10.3f}{r['sequential_ratio']:14.2f}{r['simple_ratio']:8.2f}"
            f"{r['full_ratio']:7.2f}"
        )
    print("\nslots before it   ms a token of K+1 slots   ratio")
    for r in results["context"]:
        print(f"{r['slots']:15}{r['milliseconds']:26.2f}{r['ratio']:8.2f}")


def draw(results, file):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 8.5), layout="constrained")
    exits, others, reading, after = axes.flat
    lengths = list(dict.fromkeys(r["prompt"] for r in results["prompt"]))
    exits.plot([0, 1], [0, 1], color="#999999", lw=1, label="all skipped slots are saved time")
    for key in dict.fromkeys((r["batch"], r["prompt"]) for r in results["exit"]):
        rows = [r for r in results["exit"] if (r["batch"], r["prompt"]) == key]
        exits.plot(
            [r["slot_ratio"] for r in rows], [r["time_ratio"] for r in rows], linestyle="none",
            marker="o^svD"[lengths.index(key[1]) % 5], color=COLORS.get(key[0], "#555555"),
            label=f"batch {key[0]}, prompt {key[1]}",
        )  # fmt: skip
    exits.set(xlabel="slots / always K", ylabel="time / always K", title="early exit")
    exits.legend(fontsize="small")
    names = [f"{r['against']}\nbatch {r['batch']}, prompt {r['prompt']}" for r in results["others"]]
    ratios = [r["ratio"] for r in results["others"]]
    others.plot(ratios[::-1], names[::-1], "o", color="#0072B2")
    for name, ratio in zip(names, ratios, strict=True):
        others.annotate(
            f"{ratio:.1f}", (ratio, name), (7, 0), textcoords="offset points", va="center"
        )
    others.tick_params(axis="y", labelsize="small")
    others.axvline(1, color="#999999", lw=1)
    others.set(xlabel="times as many tokens a second", title="against other ways", xscale="log")
    others.set_xlim(min(0.8, *ratios), 2 * max(ratios))
    names = [f"{r['prompt']} tokens\nalpha {r['alpha']:g}" for r in results["prompt"]]
    kinds = {
        "jacobi": ("parallel, executed slots", "o", "#0072B2"),
        "full": ("parallel, all slots", "s", "#56B4E9"),
        "sequential": ("slot by slot", "^", "#E69F00"),
        "simple": ("the simple decoder", "D", "#777777"),
    }
    for kind, (label, marker, color) in kinds.items():
        values = [r[f"{kind}_seconds"] for r in results["prompt"]]
        reading.plot(names, values, marker, color=color, label=label)
    reading.set(ylabel="seconds", title="reading one prompt", yscale="log")
    reading.legend(fontsize="small")
    rows = results["context"]
    after.plot([r["slots"] for r in rows], [r["milliseconds"] for r in rows], "o-", color="#0072B2")
    after.set(xlabel="slots before it", ylabel="milliseconds a token", title="always K, batch 1")
    after.set_ylim(bottom=0)
    after.set_xlim(left=0)
    for panel in axes.flat:
        panel.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
    plt.close(figure)
