"""Speed and memory, as ratios of two things measured in one run.

    python -m bench attention                 forward and backward of each backend, against plain
    python -m bench train                     a training step against plain forward and backward
    python -m bench decode                    early exit against no exit, prompts, transformers

Prints a table, and writes it to <out>/attention-<device>.json, train-<preset>-<device>.json or
decode-<run>-<device>.json.
"""

import tyro

from bench.attention import attention
from bench.decoding import decode
from bench.training_step import train
from runtime import command_line

if __name__ == "__main__":
    commands = {command.__name__: command for command in (attention, train, decode)}
    command_line(lambda: tyro.extras.subcommand_cli_from_dict(commands, description=__doc__))
