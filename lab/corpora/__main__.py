"""Prepare a corpus: token ids in a folder, for --data of train.py and python -m lab train."""

from typing import Annotated

import tyro

from common import command_line
from lab.corpora.lookup import prepare_lookup
from lab.corpora.preparation import OURS, Options, prepare


def corpus(o: Annotated[Options, tyro.conf.arg(name="")]):
    """Prepare JSON lines, Parquet files, texts or a data set from the Hugging Face Hub. If interrupted, the
    same command continues where it stopped."""
    prepare(o)
    command = "train.py" if o.tokenizer in OURS else "-m lab train"
    print(f"next: python {command} --data {o.to}")


def main():
    commands = {"prepare": corpus, "lookup": prepare_lookup}
    tyro.extras.subcommand_cli_from_dict(commands, prog="python -m lab corpus", description=__doc__)


if __name__ == "__main__":
    command_line(main)
