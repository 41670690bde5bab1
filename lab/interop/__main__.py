"""`python -m lab convert`: what a directory of weights holds, and the same written anew.

python -m lab convert DIR                                what it holds
python -m lab convert DIR --to OTHER                     write it anew; a vanilla one as others do
python -m lab convert DIR --to OTHER --transformers      as a model that transformers runs
python -m lab convert DIR --to OTHER --half              in half the size
"""

from dataclasses import fields
from pathlib import Path

import torch
import tyro

from common import UserError, command_line, read_json
from lab.common import locate, settings_of
from lab.corpora.tokenizers import HuggingFaceTokenizer, begin_of, load_tokenizer, save_pretrained
from lab.interop.export import export
from lab.interop.weights import load, save
from model import Fraction


def scored_tau(directory):
    """The tau at which a run counted its steps, or with which it was exported; else 1e-4."""
    exported = Path(directory, "generation_config.json")
    return ((read_json(exported) if exported.exists() else {}) | settings_of(directory)).get("tau", 1e-4)


def main(
    directory: tyro.conf.Positional[str],
    to: Path | None = None,
    half: bool = False,
    transformers: bool = False,
    tau: Fraction | None = None,
):
    """Show what a directory of weights holds, and write it anew.

    Args:
        directory: a model's directory, or its name on the Hugging Face Hub
        to: a new directory. A model of --method vanilla becomes a Hugging Face Llama or GPT-NeoX,
            which transformers loads, any other one a directory of our own
        half: weights in float16, 2 bytes each, read as float32 again
        transformers: what transformers' AutoModelForCausalLM and AutoTokenizer load, of any method
        tau: where that stops by default; None: where the run was scored, else 1e-4
    """
    if to is not None and to.exists() and (to.is_file() or any(to.iterdir())):
        raise UserError(f"{to} exists already; give a new directory")
    if to is None and (half or transformers):
        raise UserError("--half and --transformers are of what is written: give --to DIR, too")
    if tau is not None and not transformers:
        raise UserError(f"--tau {tau} is of what transformers runs: give --transformers, too")
    place = locate(directory)
    model = load(place)
    config = model.config
    size = sum(p.numel() for p in model.parameters())
    print(f"{place}: {config.method}, K = {config.ponder_steps}, {size:,} parameters")
    for f in fields(config):  # what is not as everywhere
        if (value := getattr(config, f.name)) not in (f.default, {}):
            print(f"    {f.name} = {value}")
    file, tokenizer, begin, end = place / "tokenizer.json", None, None, None
    if file.is_file():
        tokenizer = load_tokenizer(file)
        print(f"tokenizer {tokenizer.name}, {tokenizer.vocab_size:,} tokens")
        begin, end = next(iter(begin_of(tokenizer)), None), tokenizer.end_of_text
    if to is None:
        return
    if half:
        largest = max(p.abs().max().item() for p in model.parameters()) * max(config.scale, 1)
        if largest > torch.finfo(torch.float16).max:  # the scale may go into the table
            raise UserError(f"{place} has weights too large for float16: leave --half out")
        model.half()
    if transformers:
        export(model, to, scored_tau(place) if tau is None else tau, begin, end)
    else:
        save(model, to, begin=begin, end=end)
    theirs = transformers or config.method == "vanilla" or isinstance(tokenizer, HuggingFaceTokenizer)
    if tokenizer and theirs:
        save_pretrained(tokenizer, to)
    elif tokenizer:
        tokenizer.save(to / "tokenizer.json")
    kind = "a model of transformers" if transformers or config.method == "vanilla" else "our own form"
    print(f"written: {to}, {kind}")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab convert"))
