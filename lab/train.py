"""Train a model of any method, from scratch or from a trained model, through the training loop of train.py.

    python -m lab train --preset tiny --method ponderlm2
    python -m lab train --init-from DIR_OR_NAME      add pondering to a trained Llama
    python -m lab train --resume                     resume the newest run, exactly
    torchrun --nproc_per_node=2 -m lab train

Every flag and its default: python -m lab train --method NAME --help. It also lists flags that the method does
not use, such as --router-offset for a method without a router: setting one of these is an error.
train.py says what a run consists of.
"""

from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

import train as root
from checkpoint import newest_training
from common import UserError, command_line, join, parse_groups, split_into
from lab.common import settings_of
from lab.corpora.preparation import open_corpus
from lab.interop.warm_start import (
    FEEDBACK_RATE,
    check_same_tokenizer,
    check_start,
    start_defaults,
    start_from,
)
from lab.interop.weights import as_core_model, locate, parse_config
from lab.methods import build, check_settings, configure, find
from lab.methods.schedule import Scheduled, count_steps
from model import validated_dataclass
from train import TRAIN_GROUPS, DataSettings, HardwareSettings, TrainConfig, refuse_changes


@validated_dataclass
class InitSettings:
    """What it begins from."""

    # model to start from: the directory of a Llama, GPT-NeoX, PonderLM-2 or run, or its name on the Hugging
    # Face Hub. Its settings, tokenizer and context length (at most the preset's) become the defaults
    init_from: str | None = None


@validated_dataclass
class LabDataSettings(DataSettings):
    """What it reads."""

    # what to train on: pydocs or pysource (docstrings or source files of the Python on this machine), a text,
    # .jsonl, .ndjson or .parquet file, a folder of these, or a folder made by python -m lab corpus
    data: str = "pydocs"
    # how text is split into tokens: bytes, bpe (trained on the text), gpt2, or the directory of a model.
    # auto: the tokenizer of the model in --init-from, or of a folder made by python -m lab corpus; otherwise
    # bytes for the preset tiny, bpe for small, gpt2 for the larger ones
    tokenizer: str = "auto"


@validated_dataclass
class LabHardwareSettings(HardwareSettings):
    """Device, precision, speed and memory."""

    # form of attention: eager (the plain formula), sdpa (PyTorch's fused kernels), fa2 (the package
    # flash-attn) or exact (like sdpa, except that when training in bfloat16, what the router adds to the
    # attention scores keeps 16 significant bits instead of 8); auto picks a fast one
    attention: Literal["auto", "eager", "sdpa", "fa2", "exact"] = "auto"


@validated_dataclass
class LabConfig(InitSettings, LabHardwareSettings, LabDataSettings, TrainConfig):
    """The settings of train.py, and those that only the lab has."""

    command = "python -m lab {}"


LAB_GROUPS = TRAIN_GROUPS | {"data": LabDataSettings, "hardware": LabHardwareSettings, "start": InitSettings}


@validated_dataclass
class FirstFlags(root.FirstFlags):
    """Flags that are read before the others, because the defaults of the others depend on them."""

    method: str | None = None
    init_from: str | None = None
    # Flags that not every method uses: None if they are not typed.
    refinements: tuple[int, int] | None = None
    router_rate: float | None = None
    price_from: float | None = None
    tau: float | None = None


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
        run = Path(first.out, first.name) if first.name else newest_training(first.out)
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
    if not first.resume:
        refuse_ignored(first, config, new_model_config)
        if not first.init_from:  # a model has its own tokenizer and vocabulary
            root.refuse_ignored(first, new_config, new_model_config)
    return new_config, new_model_config


def refuse_ignored(first, defaults, model_config):
    """Refuse flags that the method would not use, also where they repeat the default.

    Args:
        first: the FirstFlags.
        defaults: LabConfig before the flags changed it.
        model_config: the settings of the method.

    Raises:
        UserError: it names the flag.
    """
    kind = find(model_config.method)
    # The scripts in lab/runs give the same router rate, 1 or the default, to all methods that they compare.
    is_common_rate = first.router_rate in (1, defaults.router_rate)
    learns_router = kind.has_router and "router_rate" not in kind.unused
    is_used = {
        "refinements": kind.iterates and model_config.ponder_steps > 0,
        "router_rate": learns_router or is_common_rate,
        "price_from": kind.priced,
        "tau": kind.has_router,
    }
    for name, used in is_used.items():
        value = getattr(first, name)
        if value is not None and not used:
            flag = "--" + name.replace("_", "-")
            typed = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise UserError(
                f"{flag} {typed} has no effect on a model with --method {kind.method} --ponder-steps "
                f"{model_config.ponder_steps}: omit {flag}"
            )


def check(config, model_config):
    """Raise a UserError for settings that the method would not follow."""
    check_settings(model_config)
    kind = find(model_config.method)
    if config.step_price and not kind.priced:
        raise UserError(
            f"--step-price {config.step_price} has no effect on --method {kind.method}, which has no price "
            "on steps: omit --step-price"
        )
    root.check_price(config, model_config)
    if config.attention != "auto" and kind.grid:
        raise UserError(
            f"--attention {config.attention} has no effect on --method {kind.method}, which has its own "
            "attention: omit --attention"
        )
    if config.init_from and not config.resume:
        check_start(config.init_from, model_config)  # before a text is prepared


def read_run(run):
    """Read the settings of any run, as train.read_run does.

    Returns:
        A LabConfig, or a TrainConfig if train.py began the run; the settings of the run's method; and the
        fingerprint of its corpus.
    """
    kind = LabConfig if "init_from" in settings_of(run) else TrainConfig
    config, model_config, corpus = root.read_run(run, kind)
    return config, parse_config(model_config, Path(run, "train.json")), corpus


def train(config, model_config):
    """Train as a LabConfig and the settings of a method say. Returns what train.train returns."""
    check(config, model_config)
    objective = find(model_config.method).objective
    with ExitStack() as at_the_end:

        def make(model_config):
            model = make_model(config, model_config)
            if isinstance(model, Scheduled):
                # Its schedule follows training steps, which a hook on all optimizers of this process counts.
                # The hook is removed when the training ends.
                counting = count_steps(model)
                at_the_end.callback(counting.remove)
            return model

        return root.train(config, model_config, make, objective, partial(open_text, config))


def open_text(config, data, tokenizer, vocab_size):
    """The corpus of a training. A training that starts from a model has the model's tokenizer and vocabulary.

    Args:
        config: LabConfig.
        data, tokenizer, vocab_size: as open_corpus.

    Raises:
        UserError: as check_same_tokenizer; or the text has ids that the model does not know.
    """
    if config.init_from and tokenizer == "bpe" and vocab_size <= 257:  # as many as bytes have
        raise UserError(
            f"--tokenizer bpe needs more than the {vocab_size} tokens that {config.init_from} has: use "
            "--tokenizer bytes"
        )
    if config.init_from and config.tokenizer == "auto":
        # A run keeps a copy of the tokenizer, since the model that it started from may be gone.
        place = Path(config.out, config.name) if config.resume else locate(config.init_from)
        check_same_tokenizer(place, data)
        tokenizer = str(place)
    corpus = open_corpus(data, tokenizer, vocab_size)
    if not config.init_from:
        return corpus
    if corpus.tokenizer.vocab_size > vocab_size:  # it may have tokens, like <pad>, that are in no text
        largest = max(corpus.train.max(), corpus.val.max())
        if largest >= vocab_size:
            raise UserError(
                f"--data {data} has the token id {largest}, but {config.init_from} has only {vocab_size} "
                f"tokens: {way_to_own_ids(config)}"
            )
    return replace(corpus, vocab_size=vocab_size)


def way_to_own_ids(config):
    """Advice for a message: how to get the text into the token ids of the model of --init-from."""
    if config.tokenizer == "auto":
        return "give a text in the tokens of this model"
    if Path(locate(config.init_from), "tokenizer.json").is_file():
        return "omit --tokenizer to use the model's own"
    return f"omit --tokenizer and add its tokenizer.json to {config.init_from}"


def make_model(config, model_config):
    """The model of a training, new or with the weights of the model that it starts from."""
    has_checkpoint = config.resume and Path(config.out, config.name, "trainer.pt").exists()
    if config.init_from and not has_checkpoint:
        model = start_from(config.init_from, model_config)
    else:
        model = build(model_config)
    model = as_core_model(model)  # so that sample.py reads it, if it can
    if config.learning_rate:
        # What multiplies the learning rate of g: its peak is FEEDBACK_RATE, whatever --learning-rate is.
        model.feedback_rate = FEEDBACK_RATE / config.learning_rate
    return model


if __name__ == "__main__":
    command_line(partial(root.main, parse, train))
