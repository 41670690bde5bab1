"""Speed and memory, as ratios of two things measured in one run.

    python -m bench attention                 forward and backward of each backend, against plain
    python -m bench train                     a training step against plain forward and backward
    python -m bench decode                    early exit against no exit, the cache, transformers
    python -m bench throughput --transformers tokens a second, of requests of all lengths

Prints a table. The first three write it to <out>/attention-<device>.json,
train-<preset>-<device>.json or decode-<run>-<device>.json, too; the first and the third draw it.
"""

import tyro

from bench.attention import attention
from bench.decoding import decode
from bench.throughput import throughput
from bench.training_step import train
from runtime import command_line

if __name__ == "__main__":
    commands = {command.__name__: command for command in (attention, train, decode, throughput)}
    command_line(lambda: tyro.extras.subcommand_cli_from_dict(commands, description=__doc__))
