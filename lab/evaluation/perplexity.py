"""What a model scores on texts: perplexity and bits per byte, soft and as it decodes.

Bits per byte count the bytes of the texts, not of what a tokenizer would write.

name            per token                  meaning
loss            nats                       -log p(token | tokens before), mean
perplexity      exp(loss)                  depends on the tokenizer
bits_per_byte   loss * tokens / bytes / ln 2   does not
"""

import math

from data import UserError
from lab.corpora.tokenizers import load_tokenizer
from lab.evaluation.scoring import cut, score
from lab.intervals import LEAST, of_text
from lab.methods import find
from lab.methods.cost import cost
from lab.train import read_run

KINDS = "soft", "hard"


def check_pair(run, place, model, other, data=None):
    """Refuse a comparison of a run with the model in `place` that would not be one of like with like.

    Raises:
        UserError: another tokenizer or a smaller window; or, on the validation text of the run (no `data`),
            another training text, which may have had that in it.
    """
    one, two = (load_tokenizer(x / "tokenizer.json").digest for x in (run, place))
    if one != two:
        raise UserError(f"--against {place} has another tokenizer than {run}")
    ours, theirs = model.config.block_size, other.config.block_size
    if theirs < ours:
        raise UserError(f"--against {place} has a window of {theirs} tokens, {run} one of {ours}: swap them")
    if not data:
        one, two = (read_run(x)[2] | {"name": ""} for x in (run, place))
        if one != two:
            raise UserError(f"--against {place} was trained on another corpus than {run}: give --data")


def score_texts(model, name, texts, size, tau, *, windows=None, batch_tokens=4096, other=None):
    """Score texts -> what is reported.

    Args:
        texts: ids of each, arrays. size: their bytes, if they are known.
        windows: score only so many, evenly spread. other: a model whose losses are subtracted.

    Raises:
        UserError: nothing to predict, or too little for an interval.
    """
    cuts = cut(texts, model.config.block_size, windows)
    if not len(cuts):
        raise UserError(f"{name} has no token to predict; give more text")
    if (largest := max(int(ids.max()) for ids in texts if len(ids))) >= model.config.vocab_size:
        raise UserError(
            f"{name} has token id {largest}, beyond the model's vocabulary of {model.config.vocab_size}: the "
            "tokenizer beside it is another model's"
        )
    if other and len(cuts) < LEAST:
        raise UserError(f"{len(cuts)} windows are too few to compare models on: give {LEAST} or more")
    print(f"scoring {len(cuts):,} windows; fewer with --windows", flush=True)
    scores = score(model, cuts, tau, batch_tokens)
    result = {"text": name, "tau": tau} | summarise(scores, model.config)
    if size and len(scores.soft) == sum(len(ids) - 1 for ids in texts if len(ids)):
        result["bytes"] = size
        for kind in KINDS:
            result[kind]["bits_per_byte"] = result[kind]["loss"] * result["tokens"] / size / math.log(2)
    if other:
        theirs = score(other, cuts, tau, batch_tokens)
        for kind in KINDS:
            mean, half = of_text((getattr(scores, kind) - getattr(theirs, kind)).double(), cuts.sizes)
            result[kind] |= {"difference": mean, "interval": half}
    return result


def summarise(scores, config):
    """Scores -> what is reported of them: means, perplexities, costs."""
    K = config.ponder_steps
    result = {"method": config.method, "K": K, "tokens": len(scores.soft)}
    for kind in KINDS:
        loss, steps = getattr(scores, kind).double().mean(), scores.steps.double().mean().item()
        if kind == "soft" and find(config.method).has_router:
            steps = K
        result[kind] = {"loss": loss.item(), "perplexity": loss.exp().item(), "steps": steps}
        result[kind]["paper_flops"] = cost(config, steps).paper_flops
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
    if not result["hard"]["perplexity"] < 1e6:
        print(f"a loss of {result['hard']['loss']:.4g} nats is no language model's: are the weights damaged?")
