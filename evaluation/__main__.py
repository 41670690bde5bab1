"""What a model scores on texts: perplexity and bits per byte.

    python -m evaluation                                the newest run, on its validation text
    python -m evaluation --run my_llama --data texts/   any model, any text

Texts are scored twice: with all steps, and stopped at --tau, as the model decodes. For benchmarks,
lm-evaluation-harness runs what `python -m interop --transformers` writes.
"""

from pathlib import Path
from typing import Annotated

import tyro

from corpus.tokenizers import load_tokenizer
from engine.request import Tau, chosen_tau
from evaluation.perplexity import score_texts, show
from interop import INCLUDED, find_model, load
from model import Count, Given, strict_dataclass
from runtime import UserError, command_line, pick_device, write_json


@strict_dataclass
class Options:
    # directory of a model, or its name on the Hub; by default the newest, else models/shakespeare
    run: Given | None = None
    # text file, or folder of them; by default the validation tokens of the run's corpus
    data: Given | None = None
    tau: Tau = 1e-4  # where decoding stops, 0 never; auto: where the training found it cheap
    # another model with the same tokenizer: the difference to it, window by window
    against: Given | None = None
    windows: Count | None = None  # score only so many, spread over the text; by default all
    batch_tokens: Count = 4096  # how many tokens are scored at once
    device: str = "auto"  # auto, cpu, cuda or mps
    out: Path | None = None  # write the numbers to this new file, as JSON

    def __post_init__(self):
        """Refuse what would fail when all the work is done."""
        if self.out and (self.out.exists() or not self.out.parent.is_dir()):
            raise UserError(f"--out {self.out} is there already, or in no folder: name a new file")


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    o = options
    directory = find_model(o.run, otherwise=INCLUDED)
    tau = chosen_tau(directory) if o.tau == "auto" else o.tau
    model, other = load(directory).to(pick_device(o.device)), None
    if o.against:
        place = find_model(o.against)
        one, two = (load_tokenizer(x / "tokenizer.json").digest for x in (directory, place))
        if one != two:
            raise UserError(f"--against {place} has another tokenizer than {directory}")
        other = load(place).to(pick_device(o.device))
    result = score_texts(model, directory, o.data, tau, o.windows, o.batch_tokens, other)
    show(result)
    if o.out is not None:
        write_json(o.out, result)
        print(f"written: {o.out}")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m evaluation", description=__doc__))
