"""Train any method, from nothing or from a trained model, through the loop of train.py at the root.

    python -m lab train --preset tiny --method ponderlm2
    python -m lab train --init-from DIR_OR_NAME      go on with a Llama, and teach it to ponder
    python -m lab train --resume                     go on with the newest run, exactly
    torchrun --nproc_per_node=2 -m lab train

Every flag and its default: python -m lab train --method NAME --help. What else a run is, see train.py.
"""

from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

import train as root
from checkpoint import newest_run
from common import UserError, command_line, join, parse_groups, split_into
from lab.common import settings_of
from lab.corpora.preparation import open_corpus
from lab.interop.warm_start import FEEDBACK_RATE, check_ids, check_start, start_defaults, start_from
from lab.interop.weights import as_root, locate, parse_config
from lab.methods import build, check_settings, configure, find
from lab.methods.schedule import Scheduled, count_steps
from model import validated_dataclass
from train import TRAIN_GROUPS, HardwareSettings, TrainConfig, refuse_changes


@validated_dataclass
class InitSettings:
    """What it begins from."""

    # begin from a model: a directory (Llama or GPT-NeoX, PonderLM-2, a run) or a name on the Hub. Its
    # settings, tokenizer and context length (at most the preset's) become the defaults
    init_from: str | None = None


@validated_dataclass
class LabHardwareSettings(HardwareSettings):
    """What it runs on."""

    # form of attention: eager (plain), sdpa (PyTorch's fused kernels), fa2 (the package flash-attn),
    # exact (log w to 16 bits in half precision); auto picks
    attention: Literal["auto", "eager", "sdpa", "fa2", "exact"] = "auto"


@validated_dataclass
class LabConfig(InitSettings, LabHardwareSettings, TrainConfig):
    """The settings of train.py, and more. The tokenizer `auto` is that of --init-from."""

    command = "python -m lab {}"


LAB_GROUPS = TRAIN_GROUPS | {"hardware": LabHardwareSettings, "start": InitSettings}


@validated_dataclass
class FirstFlags(root.FirstFlags):
    """Flags that are read before the others, because the defaults of the others depend on them."""

    method: str | None = None
    init_from: str | None = None


def parse(argv=None):
    """Read the command line. The defaults are those of --preset, --method and --init-from, or of the run
    that is resumed.

    Returns:
        A LabConfig, and the settings of its method.

    Raises:
        UserError: a flag that --resume must not change, or that the method does not follow.
        pydantic.ValidationError: a value out of its range.
    """
    first, _ = tyro.cli(FirstFlags, args=argv, return_unknown_args=True, add_help=False)
    if first.resume:
        run = Path(first.out, first.name) if first.name else newest_run(first.out)
        config, model_config, _ = read_run(run)
        if not isinstance(config, LabConfig):
            raise UserError(f"{run} was begun by train.py: resume it with python train.py --resume")
        config = replace(config, out=first.out, name=run.name, resume=True)
    else:
        config, model_config = root.new_settings(first)
        config = LabConfig(**asdict(config))
        if first.init_from:
            config, model_config = start_defaults(
                config, model_config, first.init_from, first.method, first.ponder_steps
            )
        else:
            model_config = configure(model_config, first.method or "ponderlm3")
        if not find(model_config.method).priced:  # the preset's price is not for it
            config = replace(config, step_price=0.0)

    groups = split_into(LAB_GROUPS, config) | {"model": model_config}
    parsed = parse_groups(groups, argv, prog="python -m lab train", description=__doc__)
    new_config = join(LabConfig, [parsed[title] for title in LAB_GROUPS])
    new_model_config = parsed["model"]
    if first.resume:
        refuse_changes(run, (config, model_config), (new_config, new_model_config))
    check(new_config, new_model_config)
    return new_config, new_model_config


def check(config, shape):
    """Refuse what the method would not follow. UserError"""
    check_settings(shape)
    kind = find(shape.method)
    if config.step_price and not kind.priced:
        raise UserError(f"step_price = {config.step_price}: {shape.method} has no price; leave it at 0")
    if config.attention != "auto" and kind.grid:
        raise UserError(f"attention = {config.attention}: {shape.method} has its own; leave it at auto")
    if config.init_from and not config.resume:
        check_start(config.init_from, shape)  # before a text is prepared


def read_run(run):
    """As train.read_run of any run: its LabConfig (a TrainConfig, if train.py began it), the settings of
    its model as its method has them, and what its corpus is known by."""
    kind = LabConfig if "init_from" in settings_of(run) else TrainConfig
    config, shape, corpus = root.read_run(run, kind)
    return config, parse_config(shape, Path(run, "train.json")), corpus


def train(config, shape):
    """Train as a LabConfig and the settings of a method say. -> as train.train"""
    check(config, shape)
    with ExitStack() as afterwards:

        def make(shape):
            model = make_model(config, shape)
            if isinstance(model, Scheduled):
                afterwards.callback(count_steps(model).remove)
            return model

        return root.train(config, shape, make, find(shape.method).objective, partial(open_text, config))


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
    more = corpus.tokenizer.vocab_size > vocab_size  # it may have tokens, like <pad>, that are in no text
    if more and (largest := max(corpus.train.max(), corpus.val.max())) >= vocab_size:
        raise UserError(
            f"{data} has a token {largest}, but {config.init_from} only {vocab_size} tokens; leave out "
            "--tokenizer to take the model's own"
        )
    return replace(corpus, vocab_size=vocab_size)


def make_model(config, shape):
    """The model of a training: new, or begun from another one."""
    begun = config.resume and Path(config.out, config.name, "trainer.pt").exists()
    model = start_from(config.init_from, shape) if config.init_from and not begun else build(shape)
    model = as_root(model)  # sample.py reads what it can
    if config.learning_rate:
        model.feedback_rate = FEEDBACK_RATE / config.learning_rate
    return model


if __name__ == "__main__":
    command_line(partial(root.main, parse, train))
