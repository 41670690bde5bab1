"""`python -m lab bench decode`: does every skipped slot save its time? Ratios of medians of one run.

exit     adaptive against always running K steps: time against slots, of decoding alone
others   tokens a second: against decoding without CUDA graphs, and at K = 0 against the Llama of
         transformers, and of CTranslate2 where that is installed
prompt   seconds to read a prompt: in parallel and slot by slot
"""

import tempfile
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import pydantic
import torch
from pydantic import Field

from lab.bench.timing import Some, bandwidth, machine, medians, print_table, write_results
from lab.common import Count, progress
from lab.engine.batching import Engine, Stats, serves
from lab.engine.products import WEIGHTS, weight_count
from lab.engine.request import check_request
from lab.evaluation.texts import validation_windows
from lab.interop import find_model, load, save
from lab.interop.warm_start import BACKBONE
from lab.methods import PonderConfig, build
from model import UserError, pick_device

PARTS = ("prompt", "others", "exit")
SPECIAL = ("bos_token", "eos_token", "unk_token")


def cells(label, *axes):
    """All combinations, with a progress bar."""
    return progress(list(product(*axes)), label, unit=" cells", leave=False)


def prompts_of(val, n, length):
    """n prompts from validation text, as far apart as it goes."""
    if len(val) <= length:
        raise UserError(f"prompts = {length}: the validation text has only {len(val)} tokens")
    starts = torch.linspace(0, len(val) - length - 1, n).long().tolist()
    return [val[start : start + length].tolist() for start in starts]


def timed(engine, prompts, new_tokens, **choice):
    """Generate -> the seconds from the first new token on, which are those that count."""
    before = engine.stats.seconds
    engine.generate(prompts, new_tokens, **choice)
    return engine.stats.seconds - before


def exit_rows(model, val, batch_sizes, lengths, new_tokens, tau, alphas, repeats, **how):
    """Adaptive against always K: which share of the skipped slots is saved time? (target: 0.9)

    The router is shifted by each alpha. Twice as many sequences as run at once are decoded, so that
    some wait for a free row.
    """
    rows = []
    for B, length in cells("early exit", batch_sizes, lengths):
        prompts = 2 * B * prompts_of(val, 1, length)
        make = partial(Engine, model, B, prefill="jacobi", **how)
        engines = {alpha: make(tau=tau, alpha=alpha) for alpha in alphas}
        engines["always"] = make(tau=0)
        runs = {name: partial(timed, engine, prompts, new_tokens, seed=0) for name, engine in engines.items()}
        seconds = medians(runs, repeats)
        tokens = 2 * B * (new_tokens - 1)  # the first is chosen when the prompt has been read
        for alpha in alphas:
            slots = engines[alpha].stats.slots / (repeats + 1)  # of one round
            steps = slots / tokens - 1
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
    shape = {name: getattr(config, name) for name in (*BACKBONE, "block_size")}
    vanilla = build(PonderConfig(**shape, method="vanilla", ponder_steps=0))
    with tempfile.TemporaryDirectory() as directory:
        save(vanilla, directory)
        return AutoModelForCausalLM.from_pretrained(directory).eval(), vanilla.eval()


def in_ctranslate2(theirs, kind):
    """A Llama of transformers in CTranslate2, which is C++: a function of prompts and the number of
    new tokens. `kind`: float32 or int8. ImportError without the package."""
    from ctranslate2 import Generator
    from ctranslate2.converters.transformers import LlamaLoader

    loader = LlamaLoader()
    spec = loader.get_model_spec(deepcopy(theirs))  # which it takes apart
    loader.set_config(spec.config, theirs, SimpleNamespace(**dict.fromkeys(SPECIAL, "0")))
    spec.register_vocabulary([str(i) for i in range(theirs.config.vocab_size)])
    spec.validate()
    spec.optimize(quantization=kind if kind == "int8" else None)
    with tempfile.TemporaryDirectory() as directory:
        spec.save(directory)
        how = dict(compute_type=kind, intra_threads=torch.get_num_threads())
        generator = Generator(directory, **how)

    def run(prompts, new_tokens):
        prompts = [[str(token) for token in prompt] for prompt in prompts]
        how = dict(max_length=new_tokens, end_token=[], include_prompt_in_result=False)
        return [r.sequences_ids[0] for r in generator.generate_batch(prompts, **how)]

    return run


def weight_bytes(engine):
    """Bytes of the weights that a pass reads: those of the products."""
    size = min(engine.dtype.itemsize, dict(float32=4, bfloat16=2, int8=1)[engine.weights])
    return size * weight_count(engine.model)


def other_rows(model, val, batch_sizes, lengths, new_tokens, repeats, **how):
    """Tokens a second and how many times that of the other way: on CUDA, after the prompt, of
    always K without graphs; of transformers and CTranslate2, prompt included. And what share of
    the memory's speed a pass of the engine has, which reads each weight of a product once."""
    rows, device = [], model.lm_head.weight.device
    speed = bandwidth(device)

    def compare(against, B, length, tokens, engine, ours, other):
        engine.stats = Stats()  # of these runs alone
        seconds = medians({"ours": ours, "theirs": other}, repeats, device=device)
        row = {"against": against, "batch": B, "prompt": length}
        row |= {f"{name}_tokens_per_second": B * tokens / seconds[name] for name in seconds}
        row["memory"] = weight_bytes(engine) * engine.stats.passes / engine.stats.seconds / speed
        rows.append(row | {"ratio": seconds["theirs"] / seconds["ours"]})

    for B, length in cells("no graphs", batch_sizes, lengths) if device.type == "cuda" else ():
        prompts = B * prompts_of(val, 1, length)
        options = dict(tau=0, prefill="jacobi")
        engines = [Engine(model, B, graphs=on, **options, **how) for on in (True, False)]
        both = [partial(timed, e, prompts, new_tokens, temperature=0) for e in engines]
        compare("no graphs", B, length, new_tokens - 1, engines[0], *both)
    try:
        theirs, ours = (m.to(device) for m in llama(model.config))
        theirs.to(how.get("dtype"))
    except ImportError:
        print("transformers is not installed: the comparison with its generate is left out")
        return rows
    peer = None
    if device.type == "cpu" and how.get("dtype", torch.float32) == torch.float32:
        try:
            peer = in_ctranslate2(theirs, how.get("weights", "float32"))
        except (ImportError, ValueError) as error:  # ValueError: it has no such weights
            print(f"the comparison with CTranslate2 is left out: {error}")
    for B, length in cells("others", batch_sizes, lengths):
        prompts = prompts_of(val, B, length)
        idx = torch.tensor(prompts, device=device)
        settings = dict(do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(idx))
        settings |= dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
        engine = Engine(ours, B, **how)
        mine = partial(engine.generate, prompts, new_tokens, temperature=0)
        generate = partial(theirs.generate, idx, **settings)
        compare("transformers", B, length, new_tokens, engine, mine, generate)
        if peer:
            other = partial(peer, prompts, new_tokens)
            compare("CTranslate2", B, length, new_tokens, engine, mine, other)
    return rows


def prompt_rows(model, val, lengths, repeats, **how):
    """Seconds to read one prompt in parallel, and how many times as long it takes slot by slot."""
    rows, device = [], model.lm_head.weight.device
    for (length,) in cells("prompts", lengths):
        (prompt,) = prompts_of(val, 1, length)
        engines = {p: Engine(model, 1, prefill=p, **how) for p in ("jacobi", "sequential")}
        runs = {p: partial(e.generate, [prompt], 1, temperature=0) for p, e in engines.items()}
        # The first call may load libraries, or compile.
        warm_up = int(device.type == "cuda" or how.get("compile", False))
        seconds = medians(runs, repeats, warm_up, device)
        slots = engines["sequential"].stats.slots / (repeats + warm_up)
        row = {"prompt": length, "slot_ratio": slots / (length * (model.config.ponder_steps + 1))}
        row["passes"] = engines["jacobi"].stats.prompt_passes // (repeats + warm_up)
        row |= {f"{name}_seconds": value for name, value in seconds.items()}
        rows.append(row | {"sequential_ratio": seconds["sequential"] / seconds["jacobi"]})
    return rows


@pydantic.validate_call
def decode(
    run: str | None = None,
    data: str | None = None,
    parts: Some[Literal[PARTS]] = PARTS,
    batch_sizes: Some[Count] | None = None,
    prompts: Some[Count] = (32, 512),
    new_tokens: Annotated[int, Field(ge=2)] = 32,
    tau: float = 1e-4,
    alphas: Some[float] = (0.0, -2.0, -4.0),
    precision: Literal["float32", "bfloat16"] = "float32",
    weights: Literal[WEIGHTS] = "float32",
    compile: bool = False,
    repeats: Count = 3,
    device: str = "auto",
    out: Path = Path("out/bench"),
):
    """Early-exit decoding: what skipped slots save, and how fast the rest is.

    The results are written as they come.

    Args:
        run: directory of a trained PonderLM-3; by default the newest in out/
        data: the text that it was scored on, if that is no corpus with a name
        parts: what is measured
        batch_sizes: sequences that run at once; by default 1, 8, 32, on CUDA 128, too
        prompts: lengths of prompts, in tokens
        new_tokens: to generate for each
        tau: where early exit stops, in the comparison with always K
        alphas: shifts of the router, which sweep the executed steps
        precision: of the matrix products
        weights: how an engine on a CPU keeps them
        compile: its passes, for each batch size, prompt and alpha anew
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
    _, _, windows = validation_windows(directory, data)
    val = torch.from_numpy(windows.tokens[:2_000_000].astype("int64"))
    # Times do not depend on what is said beyond the window, and RoPE knows no end.
    window = max(model.config.block_size, max(prompts) + new_tokens)
    model.config = replace(model.config, block_size=window)
    how = dict(dtype=getattr(torch, precision), weights=weights, compile=compile)
    sizes = batch_sizes, prompts, new_tokens
    measurements = {
        "prompt": partial(prompt_rows, model, val, prompts),
        "others": partial(other_rows, model, val, *sizes),
        "exit": partial(exit_rows, model, val, *sizes, tau, alphas),
    }
    results = {"machine": machine(device), "run": directory.name, "tau": tau}
    results |= {"precision": precision, "weights": weights, "compile": compile}
    results["parameters"] = sum(p.numel() for p in model.parameters())
    file = out / f"decode-{directory.name}-{device.type}.json"
    for part in parts:
        results[part] = measurements[part](repeats, **how)
        write_results(file, results)
    print(results["machine"], results["run"], f"{results['parameters']:,} parameters, tau {tau:g}")
    print(f"{precision}, weights {weights}{', compiled' * compile}, median of {repeats}")
    for part in parts:
        title, columns = TABLES[part]
        print(f"\n{title}")
        print_table(results[part], columns)
    print(f"written: {file}")


TABLES = {
    "exit": (
        "early exit against always K, after the prompt: ratios to always K\n"
        "saved: saved time / saved slots, where a tenth is saved",
        {"batch": "batch", "prompt": "prompt", "alpha": "alpha:g"}
        | {"steps": "steps:.2f", "tok/s": "tokens_per_second:.0f", "slots": "slot_ratio:.2f"}
        | {"time": "time_ratio:.2f", "saved": "saved:.2f"},
    ),
    "others": (
        "no graphs: after the prompt; others: K = 0, untrained, prompt included\n"
        "of memory: the share of its speed at which our passes read their weights",
        {"against": "against", "batch": "batch", "prompt": "prompt"}
        | {"tok/s": "ours_tokens_per_second:.1f", "theirs": "theirs_tokens_per_second:.1f"}
        | {"ratio": "ratio:.2f", "of memory": "memory:.2f"},
    ),
    "prompt": (
        "seconds to read a prompt in parallel; slot by slot the ratio to it",
        {"prompt": "prompt", "slots": "slot_ratio:.2f", "passes": "passes"}
        | {"parallel": "jacobi_seconds:.3f", "slot by slot": "sequential_ratio:.2f"},
    ),
}
