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
from lab.common import Count, Given
from lab.corpora.tokenizers import load_tokenizer
from lab.evaluation.perplexity import check_pair, score_texts, show
from lab.evaluation.texts import Share, own_texts, validation_text
from lab.interop.weights import INCLUDED, find_model, load
from model import settings


@settings
class Options:
    # directory of a model, or its name on the Hub; by default the newest, else models/docstrings
    run: Given | None = None
    data: Given | None = None  # text file, or folder of them; by default the validation text of the run
    corpus: Given | None = None  # what the run was trained on, where that is no corpus with a name
    tau: Share = 1e-4  # where decoding stops, 0 never
    # another model, with the same tokenizer and window: the difference to it, window by window
    against: Given | None = None
    windows: Count | None = None  # score only so many, spread over the text; by default all
    batch_tokens: Count = 4096  # how many tokens are scored at once
    device: str = "auto"  # auto, cpu, cuda or mps
    out: Path | None = None  # write the numbers to this new file, as JSON

    def __post_init__(self):
        """Refuse what would fail when all the work is done."""
        if self.out and (self.out.exists() or not self.out.parent.is_dir()):
            raise UserError(f"--out {self.out} is there already, or in no folder: name a new file")
        if self.data and self.corpus:
            raise UserError("--data and --corpus exclude each other: give one of them")


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    o = options
    directory, device = find_model(o.run, otherwise=INCLUDED), pick_device(o.device)
    model, other = load(directory).to(device), None
    if o.against:
        other = load(place := find_model(o.against)).to(device)
        check_pair(directory, place, model, other, o.data)
    if o.data:
        texts = own_texts(o.data, load_tokenizer(directory / "tokenizer.json"))
    else:
        texts = validation_text(directory, o.corpus)
    result = {"run": str(directory)}
    result |= score_texts(model, *texts, o.tau, windows=o.windows, batch_tokens=o.batch_tokens, other=other)
    show(result)
    if o.out is not None:
        write_json(o.out, result)
        print(f"written: {o.out}")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab evaluate", description=__doc__))
