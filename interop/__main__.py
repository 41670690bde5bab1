"""`python -m interop`: what a directory of weights holds, and the same written anew.

python -m interop DIR                 what it holds
python -m interop DIR --to OTHER      write it anew; a model without pondering as a Llama
python -m interop DIR --to OTHER --half      in half the size
python -m interop DIR --to OTHER --method looped      of the looped model of PonderLM-2's code
"""

from dataclasses import fields
from pathlib import Path
from typing import Literal

import tyro

from corpus.tokenizers import HuggingFaceTokenizer, load_tokenizer
from interop import load, locate, save
from runtime import UserError, command_line, read_json, write_json


def main(
    directory: tyro.conf.Positional[str],
    to: Path | None = None,
    half: bool = False,
    method: Literal["looped"] | None = None,
):
    """Show what a directory of weights holds, and write it anew.

    Args:
        directory: a model's directory, or its name on the Hugging Face Hub
        to: a new directory. A model without pondering becomes a Hugging Face Llama, which
            transformers loads, any other one a directory of our own
        half: weights in float16, 2 bytes each, read as float32 again
        method: what a directory of PonderLM-2's code holds where config.json does not tell
    """
    if to is not None and to.exists() and (to.is_file() or any(to.iterdir())):
        raise UserError(f"{to} exists already; give a new directory")
    place = locate(directory)
    model = load(place, method)
    config = model.config
    size = sum(p.numel() for p in model.parameters())
    print(f"{place}: {config.method}, K = {config.ponder_steps}, {size:,} parameters")
    for f in fields(config):  # what is not as everywhere
        if (value := getattr(config, f.name)) != f.default:
            print(f"    {f.name} = {value}")
    file, tokenizer = place / "tokenizer.json", None
    if file.is_file():
        tokenizer = load_tokenizer(file)
        print(f"tokenizer {tokenizer.name}, {tokenizer.vocab_size:,} tokens")
    if to is None:
        return
    save(model.half() if half else model, to)
    if tokenizer and config.method == "vanilla":
        ids = {"eos_token_id": tokenizer.end_of_text}
        ids["bos_token_id"] = tokenizer.begin[0] if tokenizer.begin else None
        write_json(to / "config.json", read_json(to / "config.json") | ids)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.save_pretrained(to)
    elif tokenizer:
        tokenizer.save(to / "tokenizer.json")
    kind = "a Hugging Face Llama" if config.method == "vanilla" else "our own form"
    print(f"written: {to}, {kind}")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m interop"))
