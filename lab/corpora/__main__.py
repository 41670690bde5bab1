"""Text -> token ids in train.bin and val.bin, for train.py --data."""

from typing import Annotated

import tyro

from common import command_line
from lab.corpora.lookup import prepare_lookup
from lab.corpora.preparation import OURS, Options, prepare


def corpus(o: Annotated[Options, tyro.conf.arg(name="")]):
    """JSON lines, Parquet, texts or a data set of the Hub -> a folder, also in several goes."""
    prepare(o)
    print(f"next: python {'train.py' if o.tokenizer in OURS else '-m lab train'} --data {o.to}")


def main():
    commands = {"prepare": corpus, "lookup": prepare_lookup}
    tyro.extras.subcommand_cli_from_dict(commands, prog="python -m lab corpus", description=__doc__)


if __name__ == "__main__":
    command_line(main)
