"""`python -m bench throughput`: requests of mixed lengths, one number."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import torch
from pydantic import Field

from bench.decoding import How, llama, prompts_of
from bench.timing import machine, medians
from corpus.tokenizers import load_tokenizer
from engine.products import WEIGHTS
from engine.request import scored_tau
from interop import INCLUDED, find_model, load
from model import Count
from runtime import pick_device

TEXT = Path(__file__).parents[1] / "README.md"


def serve(engine, prompts, lengths):
    """Each prompt is continued by its own number of tokens; a row that is free takes the next."""
    left = list(lengths)

    def until(i, token):
        left[i] -= 1
        return left[i] == 0

    engine.generate(prompts, max(lengths), until=until, seed=0)


def serve_in_batches(theirs, prompts, lengths, size):
    """The same by transformers: batch after batch, each as long as its longest request."""
    for start in range(0, len(prompts), size):
        batch, most = prompts[start : start + size], max(lengths[start : start + size])
        longest = max(map(len, batch))
        idx = torch.tensor([[0] * (longest - len(p)) + p for p in batch], device=theirs.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
        wanted = dict(
            max_new_tokens=most, min_new_tokens=most, do_sample=True, pad_token_id=0, top_k=0
        )
        theirs.generate(idx, attention_mask=mask.to(idx.device), **wanted)


@pydantic.validate_call
def throughput(
    run: str | None = None,
    requests: Count = 64,
    longest: Annotated[int, Field(ge=2)] = 64,
    batch_size: Count = 8,
    tau: float | None = None,
    precision: Literal["float32", "bfloat16"] = "float32",
    weights: Literal[WEIGHTS] = "float32",
    transformers: bool = False,
    repeats: Count = 3,
    device: str = "auto",
):
    """Requests of mixed lengths, one number: tokens a second, prompts included.

    Args:
        run: directory of a model; by default the newest in out/, else the included one
        requests: pieces of README.md, to be continued, both of random lengths
        longest: prompt and output, in tokens; the shortest have an eighth of it
        batch_size: sequences that run at once
        tau: where early exit stops; by default where the run was scored
        precision: of the matrix products
        weights: how an engine on a CPU keeps them
        transformers: also an untrained Llama of the same shape, here and by transformers' generate
        repeats: rounds, of which the median counts
        device: auto, cpu, cuda
    """
    device, directory = pick_device(device), find_model(run, otherwise=INCLUDED)
    model, how = load(directory).to(device), How(precision, weights)
    tau = scored_tau(directory) if tau is None else tau
    window = max(model.config.block_size, 2 * longest)  # for times it does not matter
    model.config = replace(model.config, block_size=window)
    text = load_tokenizer(directory / "tokenizer.json").encode(TEXT.read_text())
    torch.manual_seed(0)
    sizes, lengths = torch.randint(max(longest // 8, 1), longest + 1, (2, requests)).tolist()
    whole = prompts_of(torch.tensor(text), requests, longest)
    prompts = [p[:n] for p, n in zip(whole, sizes, strict=True)]
    runs = {"this model": partial(serve, how.engine(model, batch_size, tau=tau), prompts, lengths)}
    if transformers:
        theirs, ours = (m.to(device) for m in llama(model.config))
        theirs.to(how.dtype)
        runs["a Llama"] = partial(serve, how.engine(ours, batch_size), prompts, lengths)
        theirs = partial(serve_in_batches, theirs, prompts, lengths, batch_size)
        runs["the Llama by transformers"] = torch.no_grad()(theirs)
    how_many = f"{requests} requests, {batch_size} at once, tau {tau:g}, {precision}, {weights}"
    print(machine(device), directory.name, how_many)
    seconds = medians(runs, repeats, device=device)
    for name in runs:
        print(f"{name:26}{sum(lengths) / seconds[name]:10.1f} tokens/s")
    if transformers:
        ratio = seconds["the Llama by transformers"] / seconds["a Llama"]
        print(f"the same Llama here: {ratio:.2f} times as fast as by transformers")
