"""Text -> token ids in train.bin and val.bin, for train.py --data.

python -m lab corpus prepare DATA --to FOLDER     JSON lines, Parquet, texts, a data set of the Hub
python -m lab corpus lookup                       the lookup task, into data/lookup
python -m lab corpus mixed                        the lookup task and docstrings, into data/mixed
"""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import tyro

from data import UserError, command_line
from lab.corpora.lookup import CACHE, prepare_lookup
from lab.corpora.mixed import prepare_mixed
from lab.corpora.preparation import Options, prepare


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
    print(f"next: python -m lab train --data {folder}")


def mixed(folder: Path = CACHE / "mixed", lines: int = 50_000, seed: int = 0, lookups: tuple[int, ...] = ()):
    """Prepare two kinds of text: lines of the lookup task, and as many windows of docstrings.

    Args:
        folder: where to
        lines: of the task, of 64 tokens each; one in 20 is for validation
        seed: of the random lines and of their order
        lookups: as for the lookup task
    """
    prepare_mixed(folder, lines, seed, lookups)
    print(f"next: python -m lab train --data {folder}")


def corpus(o: Annotated[Options, tyro.conf.arg(name="")]):
    with suppress(OSError, AttributeError):  # of glibc: give large blocks back at once, or the heap grows
        ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD
    prepare(o)
    ours = o.tokenizer in ("bytes", "bpe", "gpt2")
    print(f"next: python {'train.py' if ours else '-m lab train'} --data {o.to}")


def main():
    name, *flags = sys.argv[1:] or ["--help"]
    commands = {"prepare": corpus, "lookup": lookup, "mixed": mixed}
    if name in ("-h", "--help"):
        print(__doc__.strip())
    elif name in commands:
        tyro.cli(commands[name], prog=f"python -m lab corpus {name}", args=flags)
    else:
        raise UserError(f"{name!r} is not one of {', '.join(commands)}")


if __name__ == "__main__":
    command_line(main)
