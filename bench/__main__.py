"""Speed and memory, as ratios of two things measured in one run.

    python -m bench attention                 forward and backward of each backend, against plain
    python -m bench attention --lengths 1024 --repeats 9
    python -m bench train                     a training step against plain forward and backward
    python -m bench decode                    early exit against no exit, the cache, transformers
    python -m bench throughput --transformers tokens a second, of requests of all lengths

Writes <out>/attention-<device>.json, train-<preset>-<device>.json or decode-<run>-<device>.json,
for the first and the last a picture, too, and prints the table.

    python -m bench acceptance a              what `bash runs/gpu.sh a` does, on a GPU
    python -m bench report out/gpu            its results -> docs/speed.md
    python -m bench environment               checks that are a part of it: what the machine is,
                                              forms, steps and decoder: is it right?
"""

import tyro

from bench.acceptance import acceptance
from bench.checks import decoder, environment, forms, steps
from bench.decoding import decode
from bench.kernels import attention
from bench.report import report
from bench.throughput import throughput
from bench.training_step import train
from runtime import command_line

if __name__ == "__main__":
    measured = [attention, train, decode, throughput]
    commands = [*measured, acceptance, report, environment, forms, steps, decoder]
    commands = {command.__name__: command for command in commands}
    command_line(lambda: tyro.extras.subcommand_cli_from_dict(commands, description=__doc__))
