"""What a model scores on texts: perplexity and bits per byte, soft and as it decodes.

Bits per byte count the bytes of the texts, not of what a tokenizer would write. The validation
tokens of a run are one long text, in which ends of documents are predicted like other tokens.

name            per token                  meaning
loss            nats                       -log p(token | tokens before), mean
perplexity      exp(loss)                  depends on the tokenizer
bits_per_byte   loss * tokens / bytes / ln 2   does not
"""

import math
from pathlib import Path

import torch

from baselines import find
from baselines.cost import cost
from corpus.preparation import read_texts
from corpus.tokenizers import load_tokenizer
from evaluation.scoring import cut, score
from runtime import UserError
from training.config import validation_windows


def texts_of(data, tokenizer):
    """The texts of a file or folder as ids, each behind what texts begin with, and their bytes."""
    path = Path(data)
    texts = [text for _, text in read_texts(path) if text.strip()] if path.exists() else []
    if not texts:
        raise UserError(f"--data {data}: no such file or folder, or one without text")
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    before = tokenizer.begin or end  # without any, the first token is not predicted
    return [before + tokenizer.encode(text) for text in texts], b"".join(texts)


def score_texts(model, directory, data, tau, windows, batch_tokens, other=None):
    """Score the texts of `data`, or without any the run's validation tokens -> what is reported.

    `other`: a model with the same tokenizer, whose losses are subtracted.

    Raises:
        UserError: no text, or a run without its corpus.
    """
    if data is None:
        _, _, val = validation_windows(directory)
        texts, name = [val.tokens[:].tolist()], f"validation tokens of {directory}"
        size = val.tokens.bytes
    else:
        tokenizer = load_tokenizer(directory / "tokenizer.json")
        (texts, raw), name = texts_of(data, tokenizer), data
        size = len(raw)
    cuts = [window for ids in texts for window in cut(ids, model.config.block_size)]
    if not cuts:
        raise UserError(f"{name} has no token to predict; give more text")
    complete = windows is None or windows >= len(cuts)
    cuts = cuts if complete else cuts[:: len(cuts) // windows][:windows]
    print(f"scoring {len(cuts):,} windows; fewer with --windows", flush=True)
    scores = score(model, cuts, tau, batch_tokens)
    result = summarise(scores, model.config)
    if other:
        theirs = score(other, cuts, tau, batch_tokens)
        for kind in ("soft", "hard"):
            found = getattr(scores, kind) - getattr(theirs, kind)
            result[kind] |= dict(zip(("difference", "interval"), paired(found, cuts), strict=True))
    result |= {"run": str(directory), "text": name, "tau": tau}
    if size is not None and complete:
        result["bytes"] = size
        for kind in ("soft", "hard"):
            nats = result[kind]["loss"] * result["tokens"]
            result[kind]["bits_per_byte"] = nats / size / math.log(2)
    return result


def paired(differences, cuts):
    """The mean over tokens of a difference (n,) of two models, and half of its 95 % interval by the
    windows that it comes from: a ratio estimate."""
    sizes = [len(window.ids) - window.first for window in cuts]
    mean = differences.double().mean()
    sums = torch.stack([part.sum() for part in (differences - mean).split(sizes)])
    deviation = sums.norm() / (len(sums) - 1) ** 0.5  # of a window's sum
    return mean.item(), float(1.96 * deviation * len(sums) ** 0.5 / len(differences))


def summarise(scores, config):
    """Scores -> what is reported of them: means, perplexities, costs."""
    K = config.ponder_steps
    result = {"method": config.method, "K": K, "tokens": len(scores.soft)}
    for kind in ("soft", "hard"):
        losses, steps = getattr(scores, kind), scores.steps.double().mean().item()
        if kind == "soft" and find(config.method).has_router:
            steps = K
        loss = losses.double().mean().item()
        result[kind] = {
            "loss": loss,
            "perplexity": math.exp(loss),
            "steps": steps,
            "paper_flops": cost(config, steps).paper_flops,
        }
    return result


def show(result):
    """Print what `score_texts` reports."""
    bytes_ = f", {result['bytes']:,} bytes" if "bytes" in result else ""
    print(f"{result['run']} ({result['method']}, K = {result['K']}) on {result['text']}")
    print(f"{result['tokens']:,} tokens predicted{bytes_}\n")
    print("                        loss  perplexity  bits/byte  steps  6N, MFLOPs")
    for kind in ("soft", "hard"):
        row = result[kind]
        title = "soft, all steps" if kind == "soft" else f"decoded, tau {result['tau']:g}"
        bits = f"{row['bits_per_byte']:.4f}" if "bits_per_byte" in row else "-"
        print(
            f"{title:20}{row['loss']:8.4f}{row['perplexity']:12.3f}{bits:>11}"
            f"{row['steps']:7.2f}{row['paper_flops'] / 1e6:12.2f}"
        )
        if "difference" in row:
            print(f"  minus the other: {row['difference']:+.4f} ± {row['interval']:.4f} (95 %)")
