"""What a model scores on texts: perplexity and bits per byte.

    python -m lab evaluate                                the newest run, on its validation text
    python -m lab evaluate --run my_llama --data texts/   any model, any text

Texts are scored twice: with all steps, and stopped at --tau, as the model decodes. For benchmarks,
lm-evaluation-harness runs what `python -m lab convert --transformers` writes.
"""

import math
from pathlib import Path
from typing import Annotated

import tyro

from common import UserError, command_line, write_json
from hardware import pick_device
from lab.common import Given
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
    # directory of a model, or its name on the Hub; by default the newest, else models/docstrings
    run: Given | None = None
    data: Given | None = None  # text file, or folder of them; by default the validation text of the run
    corpus: Given | None = None  # what the run was trained on, where that is no corpus with a name
    tau: Fraction = 1e-4  # where decoding stops, 0 never
    # another model with the same tokenizer: the difference to it, in the smaller window of the two
    against: Given | None = None
    windows: Count | None = None  # score only so many, spread over the text; by default all
    device: str = "auto"  # auto, cpu, cuda or mps
    out: Path | None = None  # write the numbers to this file, as JSON


def check_pair(run, other, data):
    """UserError: models that read other ids; or, on the validation text of one (no `data`), learned from
    another text, which may have had that in it."""
    one, two = (load_tokenizer(place / "tokenizer.json").digest for place in (run, other))
    if one != two:
        raise UserError(f"--against {other} has another tokenizer than {run}")
    if not data:
        one, two = (read_run(place)[2] | {"name": ""} for place in (run, other))
        if one != two:
            raise UserError(f"--against {other} was trained on another corpus than {run}: give --data")


def score_texts(model, name, texts, size, tau, windows=None, other=None):
    """Score texts -> what is reported, of KINDS each

        loss            nats a token: -log p(token | tokens before), mean
        perplexity      exp(loss), which depends on the tokenizer
        bits_per_byte   loss * tokens / bytes / ln 2, of the texts' own bytes, does not
        paper_flops     of a token, by section 4.2: 6 N (1 + steps), N parameters; decoding takes 2 N

    Args:
        texts: ids of each, arrays. size: their bytes, if they are known.
        windows: score only so many, evenly spread. other: a model whose losses are subtracted.

    Raises:
        UserError: nothing to predict, or too little for an interval.
    """
    T = min(one.config.block_size for one in (model, other) if one)
    places = cut(texts, T, windows)
    if len(places) < (least := LEAST if other else 1):
        raise UserError(f"{name} has {len(places)} windows to score, {least} are needed: give more text")
    print(f"scoring {len(places):,} windows of {T} tokens; fewer with --windows", flush=True)
    scores, config = score(model, texts, places, tau), model.config
    result = {"text": name, "tau": tau, "method": config.method, "K": config.ponder_steps}
    result["tokens"] = n = len(scores.soft)
    whole = n == sum(len(ids) - 1 for ids in texts if len(ids))
    if whole and size:
        result["bytes"] = size
    theirs = score(other, texts, places, tau) if other else None
    parameters = sum(p.numel() for p in model.parameters())
    for kind in KINDS:
        loss, steps = getattr(scores, kind).double(), scores.steps.double().mean().item()
        if kind == "soft" and model.has_router:
            steps = config.ponder_steps
        mean = loss.mean()
        result[kind] = row = {"loss": mean.item(), "perplexity": mean.exp().item(), "steps": steps}
        row["paper_flops"] = 6 * parameters * (1 + steps)
        if "bytes" in result:
            row["bits_per_byte"] = row["loss"] * n / size / math.log(2)
        if other:
            sizes = places[:, 2] - places[:, 3]  # tokens that each predicts
            row["difference"], row["interval"] = of_text(loss - getattr(theirs, kind).double(), sizes)
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


def main(o: Annotated[Options, tyro.conf.arg(name="")]):
    if o.data and o.corpus:
        raise UserError(f"--corpus {o.corpus} is where a run's own text is: leave it out, or --data {o.data}")
    if o.out:
        o.out.parent.mkdir(parents=True, exist_ok=True)  # not after an hour
    run, device = find_model(o.run, otherwise=INCLUDED), pick_device(o.device)
    model, other = load(run).to(device), None
    if o.against:
        place = find_model(o.against)
        check_pair(run, place, o.data)
        other = load(place).to(device)
    if o.data:
        texts = own_texts(o.data, load_tokenizer(run / "tokenizer.json"))
    else:
        texts = validation_text(run, o.corpus)
    result = {"run": str(run)} | score_texts(model, *texts, o.tau, o.windows, other)
    show(result)
    if o.out is not None:
        write_json(o.out, result)
        print(f"written: {o.out}")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab evaluate", description=__doc__))
