"""Every setting of a training: defaults, presets, the command line, what is refused, the corpus."""

import argparse
import hashlib
import math
import os
import shlex
import shutil
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from attention import BACKENDS
from config import PonderConfig
from data import prepare
from device import pick_device
from methods import SETTINGS
from run import read_settings
from start import start_defaults, tokenizer_beside
from tokenizer import DataError
from weights import later, locate
from windows import is_prepared, load_tokens


@dataclass
class TrainConfig:
    preset: Literal["auto", "tiny", "small", "70m", "410m"] = "auto"  # auto: small on a GPU
    name: str | None = None  # of the run, in --out; by default preset and time
    out: str = "out"  # where runs are kept
    resume: bool = False  # go on with the run --name, or the newest, with its settings
    # Begin from a model: a directory (Hugging Face Llama, PonderLM-2, a run) or a name of the Hub.
    # Its shape, tokenizer and window (as far as the preset's goes) become the defaults.
    init_from: str | None = later(None)
    data: str = "pydocs"  # or pysource, shakespeare, hops, a file, a folder of texts or .bin
    # bytes, bpe, gpt2 or a model that has one. auto: that of --init-from, of a .bin folder or hops;
    # else bytes with tiny, bpe with small, gpt2
    tokenizer: str = "auto"
    model: Annotated[PonderConfig, tyro.conf.arg(name="")] = field(default_factory=PonderConfig)

    steps: int = 1000  # optimizer steps
    batch_size: int = 8  # windows a step
    micro_batch_size: int | None = None  # windows at a time, to save memory; None: the whole batch
    learning_rate: float = 4e-3  # peak; cosine down to a tenth of it
    warmup: float = 0.05  # share of the steps in which the learning rate rises
    # steps that lead the router from hardly any pondering to where it starts (start.py); with
    # --init-from and a model that does not ponder 3 in 10, else 0
    ponder_warmup: int = later(0)
    weight_decay: float = 0.1  # on matrices only
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    clip: float = 1.0  # gradient norm; 0: off
    seed: int = 0

    log_every: int = 20  # steps between log lines
    eval_every: int = 250  # steps between checkpoints, each of which is evaluated
    eval_windows: int = 512  # validation windows of the final evaluation
    tau: float = 1e-4  # where executed steps are counted and hard stopping is scored

    device: str = "auto"  # auto, cpu, cuda, mps
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where it is fast
    backend: Literal[BACKENDS] = "auto"  # attention
    compile: bool = False  # compile the blocks: faster steps, after a minute
    recompute: bool = False  # compute each pass again in the backward pass, to save memory

    def __post_init__(self):
        """Refuse what JSON may hold in place of a number or a text."""
        kinds = {str: (str, os.PathLike), int: int, float: (int, float), bool: bool}
        for f in fields(self):
            value, kind = getattr(self, f.name), type(f.default)
            if not isinstance(value, kinds.get(kind, object)):
                raise ValueError(f"{f.name} = {value!r}: it must be of type {kind.__name__}")


# What a resumed training may change: anything else would make it another training. The corpus may
# have moved, but must be the same.
MAY_CHANGE = {"steps", "learning_rate", "clip", "log_every", "eval_every", "eval_windows", "tau"}
MAY_CHANGE |= {"data", "device", "precision", "backend", "compile", "recompute"}
PRESETS = {
    # A 2-core CPU, minutes.
    "tiny": TrainConfig(
        preset="tiny",
        model=PonderConfig(257, 96, 256, 3, 2, head_dim=24, block_size=64, iters=(1, 1)),
    ),
    # One GPU, minutes. d = 56 leaves room for the bias channel in a kernel of width 64.
    "small": TrainConfig(
        preset="small",
        model=PonderConfig(4096, 384, 1032, 6, 6, head_dim=56, block_size=256),
        steps=2000,
        batch_size=64,
        micro_batch_size=16,
        learning_rate=1e-3,
        eval_every=500,
    ),
    # The paper's two sizes, with the recipe of the released PonderLM-2 and Pythia scripts.
    "70m": TrainConfig(
        preset="70m",
        model=PonderConfig(50_304, 512, 1376, 6, 8, block_size=2048),
        steps=28_610,  # 15 B tokens
        batch_size=256,
        micro_batch_size=4,
        learning_rate=1e-3,
        warmup=0.01,
        weight_decay=0.01,
        eval_every=1000,
    ),
    "410m": TrainConfig(
        preset="410m",
        model=PonderConfig(50_304, 1024, 2752, 24, 16, block_size=2048),
        steps=19_073,  # 10 B tokens
        batch_size=256,
        micro_batch_size=1,
        learning_rate=3e-4,
        warmup=0.02,
        eval_every=1000,
    ),
}


def parse(argv=None, description=None):
    """The command line: --preset chooses the defaults that --help shows and other flags change."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="auto")
    first.add_argument("--method")
    first.add_argument("--init-from", "--init_from")
    first.add_argument("--steps", type=int)
    first.add_argument("--device", default="auto")
    first.add_argument("--out", default="out")
    first.add_argument("--name")
    first.add_argument("--resume", action="store_true")
    known = first.parse_known_args(argv)[0]
    if known.resume:
        run, config, _ = read_settings(TrainConfig, known.out, known.name)
        defaults = replace(config, out=known.out, name=run.name, resume=True)
    else:
        preset = known.preset
        if preset not in PRESETS:  # 'auto', or a wrong one, which tyro refuses below
            preset = "small" if pick_device(known.device).type == "cuda" else "tiny"
        defaults = PRESETS[preset]
        if known.init_from:
            defaults = start_defaults(defaults, known.init_from, known.method, known.steps)
        else:
            method = known.method or "ponderlm3"
            model = replace(defaults.model, method=method, **SETTINGS.get(method, {}))
            defaults = replace(defaults, model=model)
    config = tyro.cli(TrainConfig, description=description, default=defaults, args=argv)
    if config.model.label != "ponderlm3" and config.ponder_warmup == defaults.ponder_warmup:
        config = replace(config, ponder_warmup=0)  # K = 0: nothing to warm up
    return replace(config, preset=defaults.preset) if config.preset == "auto" else config


def check(config, processes=1):
    """Refuse settings that would fail hours later, or train nothing."""
    for name in ("steps", "batch_size", "log_every", "eval_every", "eval_windows"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: it must be at least 1")
    bounds = dict(
        seed=(0, 2**63), tau=(0, 1), warmup=(0, 1), weight_decay=(0, 1), clip=(0, math.inf)
    )
    for name, (low, high) in (bounds | {"learning_rate": (0, 1e30)}).items():
        if not low <= getattr(config, name) <= high:
            raise ValueError(f"{name} = {getattr(config, name)}: it must be in {low} .. {high:g}")
    if 0 < config.steps <= config.ponder_warmup:
        raise ValueError(
            f"ponder_warmup = {config.ponder_warmup}: it has to end before the training, of "
            f"{config.steps} steps"
        )
    if config.ponder_warmup < 0 or (config.ponder_warmup and config.model.label != "ponderlm3"):
        raise ValueError(
            f"ponder_warmup = {config.ponder_warmup}: 0 or more steps, and only for ponderlm3, "
            f"not {config.model.label}"
        )
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ValueError(f"betas = {config.betas}: they must be in 0 .. 1, without 1")
    compilers = (shlex.split(os.environ.get("CXX") or "g++")[0], "clang++", "cl")
    if config.compile and not any(map(shutil.which, compilers)):
        raise ValueError("--compile needs a C++ compiler, and found none; install g++ or leave it")
    batch, micro = config.batch_size, config.micro_batch_size
    if micro is not None and (micro < 1 or batch % micro):
        raise ValueError(f"micro_batch_size {micro} does not divide batch_size {batch}")
    if batch % ((micro or batch) * processes):
        fits = [m for m in range(1, batch + 1) if batch % (m * processes) == 0]
        way_out = f"--micro-batch-size {fits[-1]} would do" if fits else "change --batch-size"
        if config.resume:
            way_out = "go on with fewer processes: the penalty depends on the micro-batch"
        raise ValueError(
            f"{processes} processes cannot share {batch} windows a step in micro-batches of "
            f"{micro or batch}; {way_out}"
        )


def read_run(path):
    """A run's directory, TrainConfig and corpus; of a checkpoint, those of its run.

    Raises:
        FileNotFoundError, ValueError: it is no run, or its train.json is damaged.
    """
    place = Path(path).resolve()
    run = next((p for p in (place, place.parent) if (p / "train.json").is_file()), None)
    if run is None:
        raise FileNotFoundError(f"{path} is no run: no train.json says how it was trained")
    return read_settings(TrainConfig, run.parent, run.name)


def describe_corpus(folder, train, val):
    """Name, size and hash of a corpus. Its ends stand for the whole, which may be of gigabytes."""
    ends = np.concatenate([train[: 10**6], train[-(10**6) :]])
    corpus = {"name": folder.name, "train_tokens": len(train), "val_tokens": len(val)}
    return corpus | {"sha256": hashlib.sha256(ends.tobytes()).hexdigest()}


def open_corpus(config):
    """The corpus of a config -> folder, tokenizer, train and validation tokens."""
    name, V = config.tokenizer, config.model.vocab_size
    if name == "auto" and config.init_from:
        if config.resume:  # the first model may be gone
            place, _, _ = read_settings(TrainConfig, config.out, config.name)
        else:
            place = locate(config.init_from)
        name = tokenizer_beside(place, config.data)
    elif name == "auto":
        of_preset = {"tiny": "bytes", "small": "bpe"}.get(config.preset, "gpt2")
        name = None if is_prepared(config.data) or config.data == "hops" else of_preset
    if config.init_from and name == "bpe":
        raise DataError(
            f"--tokenizer bpe would be a new one, which {config.init_from} does not know; leave it "
            "out to take the model's own"
        )
    folder, tokenizer = prepare(config.data, name, V)
    if config.init_from and tokenizer.vocab_size > V and not tokenizer.padded:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, {config.init_from} only {V}; leave "
            "out --tokenizer to take the model's own"
        )
    V = min(tokenizer.vocab_size, V) if config.init_from else tokenizer.vocab_size
    tokens = [load_tokens(folder, split, V, config.model.block_size) for split in ("train", "val")]
    return folder, tokenizer, *tokens
