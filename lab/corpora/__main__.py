"""Text -> token ids in train.bin and val.bin.

    python -m lab corpus                            the default corpus: docstrings of Python packages
    python -m lab corpus FILE_OR_FOLDER             any text; a folder with .bin files is ready as it is
    python -m lab corpus stream NAME --tokens N     a large corpus, through Hugging Face datasets
    python -m lab corpus lookup                     the lookup task, into data/lookup

`python -m lab train --data ..` prepares what the first two prepare by itself.
"""

import sys
from pathlib import Path
from typing import Literal

import tyro

from data import unigram_entropy
from lab.common import command_line
from lab.corpora.lookup import prepare_lookup
from lab.corpora.preparation import CACHE, describe, load_tokens, prepare
from lab.corpora.streaming import stream


def show(
    data: tyro.conf.Positional[str] = "pydocs",
    tokenizer: str | None = None,
    vocab_size: int = 4096,
):
    """Prepare a corpus and show what is in it.

    Args:
        data: pydocs, pysource, shakespeare, a text file, a folder of them, or of .bin files
        tokenizer: bytes, bpe, gpt2, or a model that has one; by default bytes, or the corpus's own
        vocab_size: number of tokens of a bpe tokenizer
    """
    folder, tokenizer = prepare(data, tokenizer, vocab_size)
    print(describe(folder))
    for split in ("train", "val"):
        tokens = load_tokens(folder, split, tokenizer.vocab_size)
        entropy = unigram_entropy(tokens, tokenizer.vocab_size)
        print(f"{split}: {len(tokens):,} tokens, unigram entropy {entropy:.3f} nats, begins")
        print("    " + repr(tokenizer.decode(tokens[:60]).decode("utf-8", "replace")))


def lookup(
    folder: Path = CACHE / "lookup",
    lines: int = 100_000,
    seed: int = 0,
    lookups: tuple[int, ...] = (),
    longest: Literal[6, 10] = 6,
):
    """Prepare the lookup task: chains of known length, to train on and to measure with.

    Args:
        folder: where to
        lines: number of lines, of 64 tokens each; one in 20 is for validation
        seed: of the random lines
        lookups: of a question, all equally often; by default 1 to the longest
        longest: lookups of the longest chain of each line
    """
    prepare_lookup(folder, lines, seed, lookups, longest)
    show(str(folder))
    print(f"next: python -m lab train --data {folder}")


def main():
    name, *flags = sys.argv[1:] or [""]
    if name == "stream":
        tyro.cli(stream, prog="python -m lab corpus stream", args=flags)
    elif name == "lookup":
        tyro.cli(lookup, prog="python -m lab corpus lookup", args=flags)
    else:
        tyro.cli(show, prog="python -m lab corpus", description=__doc__)


if __name__ == "__main__":
    command_line(main)
