"""What a model scores on texts: perplexity and bits per byte, soft and as it decodes, by depth.

Bits per byte count the bytes of the texts, not of what a tokenizer would write. The validation
tokens of a run are one long text, in which ends of documents are predicted like other tokens.

name            per token                  meaning
loss            nats                       -log p(token | tokens before), mean
perplexity      exp(loss)                  depends on the tokenizer
bits_per_byte   loss * tokens / bytes / ln 2   does not
interval        of the loss                95 % of bootstrap samples of windows, see `bootstrap`
"""

import hashlib
import math
from pathlib import Path

from baselines import find
from baselines.cost import cost
from corpus.preparation import read_texts
from corpus.tokenizers import load_tokenizer
from evaluation.scoring import bootstrap, cut, score
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


def score_texts(model, directory, *, data, tau, stride, windows, batch_tokens):
    """Score the texts of `data`, or without any the run's validation tokens -> what is reported.

    Raises:
        UserError: a stride beyond the window, no text, or a run without its corpus.
    """
    T = model.config.block_size
    stride = max(T // 2, 1) if stride is None else stride
    if not 1 <= stride <= T:
        raise UserError(f"stride = {stride}: 1 to the window of {T} tokens")
    if data is None:
        _, tokenizer, val = validation_windows(directory)
        texts, name = [val.tokens[:].tolist()], f"validation tokens of {directory}"
        size, sha256 = val.tokens.bytes, None
    else:
        tokenizer = load_tokenizer(directory / "tokenizer.json")
        (texts, raw), name = texts_of(data, tokenizer), data
        size, sha256 = len(raw), hashlib.sha256(raw).hexdigest()
    cuts = [w for ids in texts for w in cut(ids, T, stride)]
    complete = windows is None or windows >= len(cuts)
    cuts = [w for w in cuts[:windows] if len(w.ids) > w.first]
    if not cuts:
        raise UserError(f"{name} has no token to predict; give more text")
    print(f"scoring {len(cuts):,} windows; fewer with --windows", flush=True)
    result = summarise(score(model, cuts, tau, batch_tokens), model.config)
    result |= {"run": str(directory), "text": name, "tau": tau, "stride": stride}
    if size is not None and complete:
        result |= {"bytes": size, "sha256": sha256}
        for kind in ("soft", "hard"):
            nats = result[kind]["loss"] * result["tokens"]
            result[kind]["bits_per_byte"] = nats / size / math.log(2)
    return result


def summarise(scores, config):
    """Scores -> what is reported of them: means, perplexities, intervals, costs."""
    K = config.ponder_steps
    result = {"method": config.method, "K": K, "tokens": len(scores.soft)}
    for kind in ("soft", "hard"):
        losses, steps = getattr(scores, kind), scores.steps.double().mean().item()
        if kind == "soft" and find(config.method).has_router:
            steps = K
        loss, costs = losses.double().mean().item(), cost(config, steps)
        result[kind] = {
            "loss": loss,
            "interval": bootstrap(scores.window, losses),
            "perplexity": math.exp(loss),
            "steps": steps,
            "token_computations": costs.token_computations,
            "paper_flops": costs.paper_flops,
        }
    result["depths"] = scores.depths.double().mean(0).tolist()
    return result


def show(result):
    """Print what `score_texts` reports."""
    bytes_ = f", {result['bytes']:,} bytes" if "bytes" in result else ""
    print(f"{result['run']} ({result['method']}, K = {result['K']}) on {result['text']}")
    print(f"{result['tokens']:,} tokens predicted{bytes_}, stride {result['stride']}\n")
    print("                        loss    95 % interval  perplexity  bits/byte  steps  6N, MFLOPs")
    for kind in ("soft", "hard"):
        row = result[kind]
        title = "soft, all steps" if kind == "soft" else f"decoded, tau {result['tau']:g}"
        low_high = "{:.4f}..{:.4f}".format(*row["interval"]) if row["interval"] else "-"
        bits = f"{row['bits_per_byte']:.4f}" if "bits_per_byte" in row else "-"
        print(
            f"{title:20}{row['loss']:8.4f}{low_high:>17}{row['perplexity']:12.3f}{bits:>11}"
            f"{row['steps']:7.2f}{row['paper_flops'] / 1e6:12.2f}"
        )
    method = find(result["method"])
    title = "integrated up to i" if method.has_router and method.mixes else "h^(i) alone"
    print(f"{title:20}" + "".join(f"{loss:8.4f}" for loss in result["depths"]))
