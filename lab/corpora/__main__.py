"""Text -> token ids in train.bin and val.bin, for train.py --data."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from data import command_line
from lab.corpora.lookup import CACHE, prepare_lookup
from lab.corpora.mixed import prepare_mixed
from lab.corpora.preparation import OURS, Options, prepare


def corpus(o: Annotated[Options, tyro.conf.arg(name="")]):
    """JSON lines, Parquet, texts or a data set of the Hub -> a folder, also in several goes."""
    prepare(o)
    print(f"next: python {'train.py' if o.tokenizer in OURS else '-m lab train'} --data {o.to}")


def lookup(
    folder: Path = CACHE / "lookup",
    lines: int = 100_000,
    seed: int = 0,
    lookups: tuple[int, ...] = (),
    longest: Literal[6, 10] = 6,
):
    """The lookup task: chains of known length, to train on and to measure with.

    Args:
        folder: where to
        lines: number of lines, of 64 tokens each; one in 20 is for validation
        seed: of the random lines
        lookups: of a question, all equally often; by default 1 to the longest
        longest: lookups of the longest chain of each line
    """
    prepare_lookup(folder, lines=lines, seed=seed, lookups=lookups, longest=longest)
    print(f"next: python -m lab train --data {folder}")


def mixed(folder: Path = CACHE / "mixed", lines: int = 50_000, seed: int = 0, lookups: tuple[int, ...] = ()):
    """Two kinds of text: lines of the lookup task, and as many windows of docstrings.

    Args:
        folder: where to
        lines: of the task, of 64 tokens each; one in 20 is for validation
        seed: of the random lines and of their order
        lookups: as for the lookup task
    """
    prepare_mixed(folder, lines=lines, seed=seed, lookups=lookups)
    print(f"next: python -m lab train --data {folder}")


def main():
    commands = {"prepare": corpus, "lookup": lookup, "mixed": mixed}
    tyro.extras.subcommand_cli_from_dict(commands, prog="python -m lab corpus", description=__doc__)


if __name__ == "__main__":
    command_line(main)
