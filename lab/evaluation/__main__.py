"""What a model scores on texts: perplexity and bits per byte.

    python -m lab evaluate                                the newest run, on its validation text
    python -m lab evaluate --run my_llama --data texts/   any model, any text

Texts are scored twice: with all steps, and stopped at --tau, as the model decodes. For benchmarks,
lm-evaluation-harness runs what `python -m lab convert --transformers` writes.
"""

from pathlib import Path
from typing import Annotated

import tyro

from data import UserError, command_line, pick_device, write_json
from lab.common import Given
from lab.corpora.tokenizers import load_tokenizer
from lab.evaluation.perplexity import score_texts, show
from lab.evaluation.texts import own_texts, validation_text
from lab.interop.weights import INCLUDED, find_model, load
from lab.train import read_run
from model import Count, Share, settings


@settings
class Options:
    # directory of a model, or its name on the Hub; by default the newest, else models/docstrings
    run: Given | None = None
    data: Given | None = None  # text file, or folder of them; by default the validation text of the run
    corpus: Given | None = None  # what the run was trained on, where that is no corpus with a name
    tau: Share = 1e-4  # where decoding stops, 0 never
    # another model with the same tokenizer: the difference to it, in the smaller window of the two
    against: Given | None = None
    windows: Count | None = None  # score only so many, spread over the text; by default all
    batch_tokens: Count = 4096  # how many tokens are scored at once
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


def main(o: Annotated[Options, tyro.conf.arg(name="")]):
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
    how = dict(windows=o.windows, batch_tokens=o.batch_tokens, other=other)
    result = {"run": str(run)} | score_texts(model, *texts, o.tau, **how)
    show(result)
    if o.out is not None:
        write_json(o.out, result)
        print(f"written: {o.out}")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab evaluate", description=__doc__))
