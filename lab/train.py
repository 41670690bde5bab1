"""Train any method, from nothing or from a trained model, through the loop of train.py at the root.

    python -m lab train --preset tiny --method ponderlm2
    python -m lab train --init-from DIR_OR_NAME      go on with a Llama, and teach it to ponder
    python -m lab train --compile                    faster steps, after minutes
    python -m lab train --resume                     go on with the newest run, exactly
    torchrun --nproc_per_node=2 -m lab train --micro-batch-size 4

Every flag and its default: python -m lab train --method NAME --help. What else a run is, see train.py.
"""

import argparse
import shutil
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import tyro

import train as root
from lab.common import COMPILED, settings_of
from lab.corpora.preparation import open_corpus
from lab.interop import locate, parse_config
from lab.interop.warm_start import FEEDBACK_RATE, check_ids, start_defaults, start_from
from lab.kernels.attention import fastest
from lab.kernels.attention import find as find_attention
from lab.methods import build, check_settings, configure, find, objective
from model import UserError, command_line, newest_run, pick_device
from train import MAY_CHANGE, PRESETS, TrainConfig, micro_batch, pick_precision, rank_and_size


@dataclass
class LabConfig(TrainConfig):
    """What train.py has, and more. The tokenizer `auto` is that of --init-from."""

    program = "python -m lab {}"

    # begin from a model: a directory (Llama or GPT-NeoX, PonderLM-2, a run) or a name of the Hub. Its
    # shape, tokenizer and window (as far as the preset's goes) become the defaults.
    init_from: str | None = None
    backend: str = "auto"  # of attention, see kernels/; auto: on CUDA the fastest, measured
    compile: bool = False  # compile the blocks: faster steps, after minutes


MAY_CHANGE.update(("backend", "compile"))


def parse(argv=None):
    """The command line -> LabConfig, and the settings of its method. Defaults are those of --preset,
    --method and --init-from, or of the run that goes on."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag, default in (("--preset", None), ("--device", "auto"), ("--out", "out"), ("--name", None)):
        first.add_argument(flag, default=default)
    first.add_argument("--method")
    first.add_argument("--init-from", "--init_from")
    first.add_argument("--ponder-steps", "--ponder_steps", type=int)
    first.add_argument("--resume", action="store_true")
    known = first.parse_known_args(argv)[0]
    if known.resume:
        run = Path(known.out, known.name) if known.name else newest_run(known.out)
        config, shape, _ = read_run(run)
        if not isinstance(config, LabConfig):
            raise UserError(f"{run} was begun by train.py: go on with python train.py --resume")
        config = replace(config, out=known.out, name=run.name, resume=True)
    else:
        preset = known.preset or ("small" if pick_device(known.device).type == "cuda" else "tiny")
        config, shape = PRESETS.get(preset, PRESETS["tiny"])  # tyro refuses a wrong one below
        config = LabConfig(**asdict(config))
        if known.init_from:
            config, shape = start_defaults(config, shape, known.init_from, known.method, known.ponder_steps)
        else:
            shape = configure(shape, known.method or "ponderlm3")

    def flags(
        config: Annotated[LabConfig, tyro.conf.arg(name="")] = config,
        model_config: Annotated[type(shape), tyro.conf.arg(name="")] = shape,
    ):
        return config, model_config

    try:
        config, shape = tyro.cli(flags, prog="python -m lab train", description=__doc__, args=argv)
    except ValueError as error:
        raise UserError(error) from None
    check_settings(shape)
    if config.step_price and not find(shape.method).priced:
        raise UserError(f"step_price = {config.step_price}: {shape.method} has no price; leave it at 0")
    return config, shape


def read_run(run):
    """As train.read_run of any run: its LabConfig (a TrainConfig, if train.py began it), the settings of
    its model as its method has them, and what its corpus is known by."""
    file, kind = Path(run, "train.json"), TrainConfig
    if "backend" in settings_of(run):
        kind = LabConfig
    config, shape, corpus = root.read_run(run, kind)
    return config, parse_config(shape, file), corpus


def train(config, shape):
    """Train as a LabConfig and the settings of a method say. -> as train.train"""
    check_settings(shape)
    if config.compile:
        check_compiler()
    return root.train(config, shape, partial(make_model, config), objective, partial(open_text, config))


def open_text(config, data, tokenizer, vocab_size):
    """The corpus of a training. One that begins from a model has its tokenizer, and its table's size.

    Raises:
        UserError: as check_ids; or ids that the model has not.
    """
    if config.init_from and config.tokenizer == "auto":
        # A run has its own copy, since the first model may be gone.
        place = Path(config.out, config.name) if config.resume else locate(config.init_from)
        check_ids(place, data)
        tokenizer = str(place)
    corpus = open_corpus(data, tokenizer, vocab_size)
    if not config.init_from:
        return corpus
    if corpus.tokenizer.vocab_size > vocab_size:  # which may have tokens, like <pad>, that are in no text
        pieces = (x[i : i + 10**7] for x in (corpus.train, corpus.val) for i in range(0, len(x), 10**7))
        if (largest := max(piece.max() for piece in pieces)) >= vocab_size:
            raise UserError(
                f"{data} has a token {largest}, but {config.init_from} only {vocab_size} tokens; leave out "
                "--tokenizer to take the model's own"
            )
    return replace(corpus, vocab_size=vocab_size)


def make_model(config, shape):
    """The model of a training: new, or begun from another one, with its kernels."""
    begun = config.resume and Path(config.out, config.name, "trainer.pt").exists()
    model = start_from(config.init_from, shape) if config.init_from and not begun else build(shape)
    if config.learning_rate:
        model.feedback_rate = FEEDBACK_RATE / config.learning_rate
    device = pick_device(config.device)
    dtype = getattr(torch, pick_precision(config.precision, device))
    name = config.backend
    if name == "auto" and device.type == "cuda" and not model.grid:  # which has kernels of its own
        B, S = micro_batch(config, rank_and_size()[1]), shape.ponder_steps + 1 if model.interleaves else 1
        size = B, shape.num_attention_heads, shape.block_size * S, shape.d
        how = dict(biased=model.has_router, compiled=config.compile)
        name = fastest(size, shape.G, device, dtype, **how)
    model.backend = find_attention(name, device, dtype)
    if config.compile:
        torch._dynamo.config.recompile_limit = COMPILED
        for block in model.model.layers:
            compile_in_training(block)
    return model


def compile_in_training(block):
    """Compile a block, but not for evaluation, which has other shapes: each of them takes long."""
    plain, compiled = block.forward, torch.compile(block.forward, dynamic=False)
    block.forward = lambda *inputs: (compiled if block.training else plain)(*inputs)


def check_compiler():
    """UserError: there is no C++ compiler, which torch.compile needs."""
    from torch._inductor import config as inductor

    if not shutil.which(compiler := inductor.cpp.cxx[-1].split()[0]):
        raise UserError(f"--compile takes a C++ compiler: install {compiler}, or leave it out")


if __name__ == "__main__":
    command_line(partial(root.main, parse, train))
