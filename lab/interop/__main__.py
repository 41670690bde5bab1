"""Show what a directory of weights holds, and write the model in another form.

    python -m lab convert DIR                             show what it holds
    python -m lab convert DIR --to OTHER                  write it; vanilla becomes a Llama or GPT-NeoX
    python -m lab convert DIR --to OTHER --transformers   write it so that transformers can run it
    python -m lab convert DIR --to OTHER --half           write weights in float16, half the size

The tokenizer, if DIR has one, is written with the model.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import torch
import tyro

from common import UserError, command_line, read_json
from lab.common import locate, settings_of
from lab.corpora.tokenizers import HuggingFaceTokenizer, begin_of, load_tokenizer, save_pretrained
from lab.interop.export import export
from lab.interop.weights import load, save
from model import Fraction


@dataclass
class Options:
    # directory of a model, or its name on the Hugging Face Hub
    directory: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    # new directory to write the model to. A model of --method vanilla becomes a Llama or GPT-NeoX that
    # transformers loads; any other model is written in the format of this project
    to: Path | None = None
    half: bool = False  # write weights in float16, 2 bytes each; they are loaded back as float32
    # write a model of any method so that AutoModelForCausalLM and AutoTokenizer load it
    transformers: bool = False
    # with --transformers, the default early-exit threshold of the written model: a token takes no further
    # pondering step once the router's probability that it needs one falls below this; 0: take all steps;
    # None: the tau of the run's evaluation, or 1e-4
    tau: Fraction | None = None


def scored_tau(directory):
    """The tau at which a run was evaluated, or the tau with which a model was exported; 1e-4 if there is
    neither."""
    exported = Path(directory, "generation_config.json")
    known = read_json(exported) if exported.exists() else {}
    known |= settings_of(directory)
    return known.get("tau", 1e-4)


def show(place, model):
    """Print what a directory holds: method, size, and settings that are not at their defaults."""
    config = model.config
    size = sum(p.numel() for p in model.parameters())
    print(f"{place}: {config.method}, K = {config.ponder_steps}, {size:,} parameters")
    for field in fields(config):
        value = getattr(config, field.name)
        if value not in (field.default, {}):
            print(f"    {field.name} = {value}")


def check_flags(to, half, transformers, tau):
    """Refuse flags that contradict each other.

    Raises:
        UserError: they do, or the directory `to` is not new.
    """
    if to is not None and to.exists() and (to.is_file() or any(to.iterdir())):
        raise UserError(f"--to {to} already exists: name a new directory")
    if to is None and (half or transformers):
        raise UserError("--half and --transformers need a place to write the model to: add --to DIR")
    if tau is not None and not 0 <= tau <= 1:
        raise UserError(f"--tau {tau} must lie between 0 and 1")
    if tau is not None and not transformers:
        raise UserError(f"--tau {tau} applies only to a model for transformers: add --transformers")


def convert(directory, to=None, half=False, transformers=False, tau=None):
    """Show what a directory of weights holds, and write the model in another form. The arguments are those of
    Options."""
    check_flags(to, half, transformers, tau)
    place = locate(directory)
    model = load(place)
    config = model.config
    show(place, model)
    file = place / "tokenizer.json"
    tokenizer = None
    begin = None
    end = None
    if file.is_file():
        tokenizer = load_tokenizer(file)
        print(f"tokenizer {tokenizer.name}, {tokenizer.vocab_size:,} tokens")
        begin = next(iter(begin_of(tokenizer)), None)
        end = tokenizer.end_of_text
    if to is None:
        return
    if half:
        # A bound: the embedding scale may be multiplied into the table.
        largest = max(p.abs().max().item() for p in model.parameters()) * max(config.scale, 1)
        if largest > torch.finfo(torch.float16).max:
            raise UserError(
                f"the weights of {place} could reach {largest:.3g} when they are written, which is too large "
                "for float16: omit --half"
            )
        model.half()
    if tau is not None and not model.has_router:
        raise UserError(f"--tau {tau} has no effect on {place}, which has no router: omit --tau")
    if transformers:
        if tau is None:
            tau = scored_tau(place)
        export(model, to, tau, begin, end)
    else:
        save(model, to, begin=begin, end=end)
    theirs = transformers or config.method == "vanilla" or isinstance(tokenizer, HuggingFaceTokenizer)
    if tokenizer and theirs:
        save_pretrained(tokenizer, to)
    elif tokenizer:
        tokenizer.save(to / "tokenizer.json")
    kind = "a model of transformers" if transformers or config.method == "vanilla" else "our own form"
    print(f"written: {to}, {kind}")


def main(o: Annotated[Options, tyro.conf.arg(name="")]):
    convert(**vars(o))


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab convert", description=__doc__))
