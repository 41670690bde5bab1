"""Measure the perplexity and the bits per byte of a model on texts.

    python -m lab evaluate                                the newest run, on its validation text
    python -m lab evaluate --run my_llama --data texts/   any model, any text

Texts are scored twice: with all steps, and with early exit at --tau, as in decoding. For benchmarks, write
the model with `python -m lab convert --transformers`: lm-evaluation-harness runs the result.
"""

import math
from pathlib import Path
from typing import Annotated

import tyro

from common import UserError, command_line, write_json
from hardware import pick_device
from lab.common import NonEmpty
from lab.corpora.tokenizers import load_tokenizer
from lab.evaluation.scoring import cut, score
from lab.evaluation.texts import own_texts, validation_text
from lab.interop.weights import INCLUDED, find_model, load
from lab.intervals import LEAST, of_text
from lab.train import read_run
from model import Count, Fraction, validated_dataclass

KINDS = "soft", "hard"


@validated_dataclass
class Options:
    # directory of a model, or its name on the Hugging Face Hub; None: the newest run, or else
    # models/docstrings
    run: NonEmpty | None = None
    data: NonEmpty | None = None  # text file or folder of text files; None: the validation text of the run
    # the text that the run was trained on, to score its validation part; needed if --data is omitted, unless
    # the run was trained on pydocs or pysource
    corpus: NonEmpty | None = None
    # early-exit threshold: a token takes no further pondering step once the router's probability that it
    # needs one falls below this; 0: take all steps
    tau: Fraction = 1e-4
    # another model with the same tokenizer: print the difference in loss, too; both then read windows of the
    # shorter context length of the two
    against: NonEmpty | None = None
    # number of windows (pieces as long as the model's context) to score, spread over the text; None: all
    windows: Count | None = None
    device: str = "auto"  # cpu, cuda or mps; auto is a GPU if there is one, else the CPU
    out: Path | None = None  # JSON file to write the numbers to


def check_pair(run, other, data):
    """Check that two models can be compared.

    Args:
        run, other: their directories.
        data: the text; None: the validation text of `run`.

    Raises:
        UserError: they have different tokenizers; or, on the validation text of a run, they were trained on
            different corpora, one of which may contain that text.
    """
    tokenizer = load_tokenizer(run / "tokenizer.json")
    if load_tokenizer(other / "tokenizer.json").digest != tokenizer.digest:
        raise UserError(
            f"--against {other} has a different tokenizer from {run}: choose a model with the same tokenizer"
        )
    if not data:
        for model in (run, other):
            if not (model / "train.json").is_file():
                raise UserError(
                    f"{model} has no train.json, which says what it was trained on: name a text with --data"
                )
        _, _, corpus = read_run(run)
        _, _, other_corpus = read_run(other)
        if corpus | {"name": ""} != other_corpus | {"name": ""}:
            raise UserError(
                f"--against {other} was trained on a different corpus from {run}: name a text with --data"
            )


def score_texts(model, name, texts, size, tau, windows=None, other=None):
    """Score texts.

    Args:
        model: to score.
        name: of the texts, for the result and for messages.
        texts: the ids of each text, arrays.
        size: their bytes; None: not known.
        tau: where decoding stops.
        windows: how many windows to score, evenly spread; None: all.
        other: a model whose losses are subtracted.

    Returns:
        What is reported, a dict. For each of KINDS it has a dict with

            loss            mean of -log p(token | tokens before), in nats
            perplexity      exp(loss), which depends on the tokenizer
            bits_per_byte   loss * tokens / bytes / ln 2, which does not; by the bytes of the texts themselves
            steps           extra steps per token
            paper_flops     per token, by section 4.2: 6 N (1 + steps) with N parameters; decoding takes 2 N
            difference      the loss minus that of `other`, with its 95 % `interval`

    Raises:
        UserError: there is nothing to predict, or too little for an interval.
    """
    T = model.config.block_size
    if other:
        T = min(T, other.config.block_size)
    places = cut(texts, T, windows)
    least = LEAST if other else 1
    if len(places) < least:
        way_out = "give more text" if windows is None else "give more text or larger --windows"
        raise UserError(f"{name} has {len(places)} windows, but at least {least} are needed: {way_out}")
    print(f"scoring {len(places):,} windows of {T} tokens (use --windows to score fewer)", flush=True)
    scores = score(model, texts, places, tau)
    config = model.config
    n = len(scores.soft)
    result = {"text": name, "tau": tau, "method": config.method, "K": config.ponder_steps, "tokens": n}
    is_whole = n == sum(len(ids) - 1 for ids in texts if len(ids))
    if is_whole and size:
        result["bytes"] = size
    theirs = score(other, texts, places, tau) if other else None
    parameters = sum(p.numel() for p in model.parameters())
    for kind in KINDS:
        loss = getattr(scores, kind).double()
        steps = scores.steps.double().mean().item()
        if kind == "soft" and model.has_router:  # without one, tau changes nothing
            steps = config.ponder_steps
        mean = loss.mean()
        row = {"loss": mean.item(), "perplexity": mean.exp().item(), "steps": steps}
        row["paper_flops"] = 6 * parameters * (1 + steps)
        if "bytes" in result:
            row["bits_per_byte"] = row["loss"] * n / size / math.log(2)
        if other:
            _, _, end, first = places.T
            sizes = end - first  # tokens that each window predicts
            row["difference"], row["interval"] = of_text(loss - getattr(theirs, kind).double(), sizes)
        result[kind] = row
    return result


def show(result):
    """Print a result of score_texts, to which the caller has added `run`."""
    size = f", {result['bytes']:,} bytes" if "bytes" in result else ""
    print(f"{result['run']} ({result['method']}, K = {result['K']}) on {result['text']}")
    print(f"{result['tokens']:,} tokens predicted{size}\n")
    print("                        loss  perplexity  bits/byte  steps  training MFLOPs/token")
    for kind, title in zip(KINDS, ("soft, all steps", f"decoded, tau {result['tau']:g}"), strict=True):
        row = result[kind]
        bits = f"{row['bits_per_byte']:.4f}" if "bits_per_byte" in row else "-"
        print(
            f"{title:20}{row['loss']:8.4f}{row['perplexity']:12.3f}{bits:>11}"
            f"{row['steps']:7.2f}{row['paper_flops'] / 1e6:23.2f}"
        )
        if "difference" in row:
            interval = f"{row['difference']:+.4f} ± {row['interval']:.4f}"
            print(f"  loss minus the other model's: {interval} (95% confidence interval)")


def main(o: Annotated[Options, tyro.conf.arg(name="")]):
    if o.data and o.corpus:
        raise UserError(f"--data {o.data} and --corpus {o.corpus} cannot be combined: omit one of them")
    if o.out:
        if o.out.is_dir():
            raise UserError(f"--out {o.out} is a folder: name a file in it, such as {o.out / 'scores.json'}")
        o.out.parent.mkdir(parents=True, exist_ok=True)  # an error here should not come after an hour
    run = find_model(o.run, otherwise=INCLUDED)
    device = pick_device(o.device)
    model = load(run).to(device)
    other = None
    if o.against:
        place = find_model(o.against)
        check_pair(run, place, o.data)
        other = load(place).to(device)
    if o.data:
        name, texts, size = own_texts(o.data, load_tokenizer(run / "tokenizer.json"))
    else:
        name, texts, size = validation_text(run, o.corpus)
    result = {"run": str(run)} | score_texts(model, name, texts, size, o.tau, o.windows, other)
    show(result)
    if o.out is not None:
        write_json(o.out, result)
        print(f"written: {o.out}")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab evaluate", description=__doc__))
