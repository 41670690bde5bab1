"""What a model scores on texts: perplexity and bits per byte, soft and as it decodes.

Bits per byte count the bytes of the texts, not of what a tokenizer would write.

name            per token                  meaning
loss            nats                       -log p(token | tokens before), mean
perplexity      exp(loss)                  depends on the tokenizer
bits_per_byte   loss * tokens / bytes / ln 2   does not
"""

import math

from data import UserError
from lab.evaluation.scoring import cut, score
from lab.intervals import LEAST, of_text
from lab.methods import find
from lab.methods.cost import paper_flops

KINDS = "soft", "hard"


def score_texts(model, name, texts, size, tau, *, windows=None, batch_tokens=4096, other=None):
    """Score texts -> what is reported.

    Args:
        texts: ids of each, arrays. size: their bytes, if they are known.
        windows: score only so many, evenly spread. other: a model whose losses are subtracted.

    Raises:
        UserError: nothing to predict, or too little for an interval.
    """
    T = min(one.config.block_size for one in (model, other) if one)
    cuts = cut(texts, T, windows)
    if len(cuts) < (least := LEAST if other else 1):
        raise UserError(f"{name} has {len(cuts)} windows to score, {least} are needed: give more text")
    print(f"scoring {len(cuts):,} windows of {T} tokens; fewer with --windows", flush=True)
    scores, config = score(model, cuts, tau, batch_tokens), model.config
    result = {"text": name, "tau": tau, "method": config.method, "K": config.ponder_steps}
    result["tokens"] = n = len(scores.soft)
    whole = n == sum(len(ids) - 1 for ids in texts if len(ids))
    if whole and size:
        result["bytes"] = size
    theirs = score(other, cuts, tau, batch_tokens) if other else None
    for kind in KINDS:
        loss, steps = getattr(scores, kind).double(), scores.steps.double().mean().item()
        if kind == "soft" and find(config.method).has_router:
            steps = config.ponder_steps
        mean = loss.mean()
        result[kind] = row = {"loss": mean.item(), "perplexity": mean.exp().item(), "steps": steps}
        row["paper_flops"] = paper_flops(config, steps)
        if "bytes" in result:
            row["bits_per_byte"] = row["loss"] * n / size / math.log(2)
        if other:
            row["difference"], row["interval"] = of_text(loss - getattr(theirs, kind).double(), cuts.sizes)
    return result


def show(result):
    """Print what was scored of a run."""
    bytes_ = f", {result['bytes']:,} bytes" if "bytes" in result else ""
    print(f"{result['run']} ({result['method']}, K = {result['K']}) on {result['text']}")
    print(f"{result['tokens']:,} tokens predicted{bytes_}\n")
    print("                        loss  perplexity  bits/byte  steps  6N, MFLOPs")
    for kind, title in zip(KINDS, ("soft, all steps", f"decoded, tau {result['tau']:g}"), strict=True):
        row = result[kind]
        bits = f"{row['bits_per_byte']:.4f}" if "bits_per_byte" in row else "-"
        print(
            f"{title:20}{row['loss']:8.4f}{row['perplexity']:12.3f}{bits:>11}"
            f"{row['steps']:7.2f}{row['paper_flops'] / 1e6:12.2f}"
        )
        if "difference" in row:
            print(f"  minus the other: {row['difference']:+.4f} ± {row['interval']:.4f} (95 %)")
