"""Speed and memory, as ratios of two things measured in one run.

    python -m lab bench attention                 forward and backward of each backend, against plain
    python -m lab bench train                     a training step against plain forward and backward
    python -m lab bench decode                    early exit against no exit, prompts, transformers

Prints a table, and writes it to <out>/attention-<device>.json, train-<preset>-<device>.json or
decode-<run>-<device>.json.
"""

import tyro

from lab.bench.attention import attention
from lab.bench.decoding import decode
from lab.bench.training_step import train
from lab.common import command_line

if __name__ == "__main__":
    commands = {command.__name__: command for command in (attention, train, decode)}
    how = dict(prog="python -m lab bench", description=__doc__)
    command_line(lambda: tyro.extras.subcommand_cli_from_dict(commands, **how))
