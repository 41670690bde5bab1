"""Every setting of a training: defaults, presets, the command line, and the door.

`parse` reads the command line into a TrainConfig, in which much may be 'auto' or None.
`open_training` is the door: what was left open is decided there, once, and whatever lies behind it
gets plain values.
"""

import argparse
import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from pydantic import Field
from typing_extensions import TypedDict

from baselines import build, check_settings, configure, find
from corpus.preparation import Windows, is_prepared, load_tokens, prepare
from interop import from_json, load, newest_run, parse_config
from model import Count, Given, PonderConfig, PonderLM, Size
from runtime import (
    UserError,
    check_json,
    first_process_first,
    from_first,
    join_processes,
    pick_device,
    pick_precision,
    pick_threads,
    read_json,
    strict_dataclass,
)
from training.runs import changes, check_free, checkpoints, new_run, step_of, unreadable

Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


@strict_dataclass
class TrainConfig:
    preset: Literal["auto", "tiny", "small", "70m", "410m"] = "auto"  # auto: small on a GPU
    name: Given | None = None  # of the run, in --out; by default preset and time
    out: Given = "out"  # where runs are kept
    resume: bool = False  # go on with the run --name, or the newest, with its settings
    # begin from a model: a directory (Llama or GPT-NeoX, PonderLM-2, a run) or a name of the Hub.
    # Its shape, tokenizer and window (as far as the preset's goes) become the defaults.
    init_from: Given | None = None
    data: Given = "pydocs"  # or pysource, shakespeare, a file, a folder of texts or of .bin files
    # bytes, bpe, gpt2 or a model that has one. auto: that of --init-from or of a .bin folder; else
    # bytes with tiny, bpe with small, gpt2
    tokenizer: str = "auto"
    model: Annotated[PonderConfig, tyro.conf.arg(name="")] = field(default_factory=PonderConfig)

    steps: Count = 1000  # optimizer steps
    batch_size: Size = 8  # windows a step
    micro_batch_size: Count | None = None  # windows at a time, to save memory; None: all
    learning_rate: Annotated[float, Field(ge=0, lt=1e30)] = 4e-3  # peak; cosine to a tenth of it
    warmup: Share = 0.05  # share of the steps in which the learning rate rises
    weight_decay: Share = 0.1  # on matrices only
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # of AdamW
    clip: Annotated[float, Field(ge=0)] = 1.0  # gradient norm; 0: off
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of weights, batches and R

    log_every: Count = 20  # steps between log lines
    eval_every: Count = 250  # steps between checkpoints, each of which is evaluated
    eval_windows: Count = 512  # validation windows of the final evaluation
    tau: Share = 1e-4  # where executed steps are counted and hard stopping is scored
    # nats a token that stopping may cost at the tau that is chosen in the end, for --tau auto
    tau_cost: Annotated[float, Field(ge=0)] = 0.002

    device: str = "auto"  # auto, cpu, cuda, mps
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None  # on a CPU; None: what is faster
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where it is fast
    backend: str = "auto"  # of attention, see kernels/; auto: on CUDA the fastest, measured
    compile: bool = False  # compile the blocks: faster steps, after a minute
    recompute: bool = False  # compute each pass again in the backward pass, to save memory


# What a resumed training may change: anything else would make it another training. The corpus may
# have moved, but must be the same.
MAY_CHANGE = {"steps", "learning_rate", "clip", "log_every", "eval_every", "eval_windows", "tau"}
MAY_CHANGE |= {"tau_cost"}
MAY_CHANGE |= {"data", "device", "threads", "precision", "backend", "compile", "recompute"}
PRESETS = {
    # A 2-core CPU, minutes. d = 24 is 32 with the bias channels, a width that GPU kernels have.
    "tiny": TrainConfig(
        preset="tiny",
        model=PonderConfig(257, 96, 256, 3, 2, head_dim=24, block_size=64, refinements=(1, 1)),
    ),
    # One GPU, minutes. d = 56 leaves room for the bias channels in a kernel of width 64.
    "small": TrainConfig(
        preset="small",
        model=PonderConfig(4096, 384, 1032, 6, 6, head_dim=56, block_size=256),
        steps=2000,
        batch_size=64,
        micro_batch_size=16,
        learning_rate=1e-3,
        eval_every=500,
    ),
    # The paper's two sizes, with the recipe of the released PonderLM-2 and Pythia scripts. Their
    # d = 64 is 72 with the bias channels: a model of one's own takes 56 or 120.
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


# -- The command line ------------------------------------------------------------------------------


def parse(argv=None, description=None):
    """The command line: --preset chooses the defaults that --help shows and other flags change."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="auto")
    first.add_argument("--method")
    first.add_argument("--init-from", "--init_from")
    first.add_argument("--ponder-steps", "--ponder_steps", type=int)
    first.add_argument("--device", default="auto")
    first.add_argument("--out", default="out")
    first.add_argument("--name")
    first.add_argument("--resume", action="store_true")
    known = first.parse_known_args(argv)[0]
    if known.resume:
        run, config, _ = read_settings(known.out, known.name)
        defaults = replace(config, out=known.out, name=run.name, resume=True)
    else:
        preset = known.preset
        if preset not in PRESETS:  # 'auto', or a wrong one, which tyro refuses below
            preset = "small" if pick_device(known.device).type == "cuda" else "tiny"
        defaults = PRESETS[preset]
        if known.init_from:
            from training.warm_start import start_defaults

            flags = known.method, known.ponder_steps
            defaults = start_defaults(defaults, known.init_from, *flags)
        elif known.method:
            defaults = replace(defaults, model=configure(defaults.model, known.method))

    def flags(config: Annotated[TrainConfig, tyro.conf.arg(name="")] = defaults):
        return config  # of a class of its own tyro would print a wrong value as a page

    config = tyro.cli(flags, description=description, args=argv)
    return replace(config, preset=defaults.preset) if config.preset == "auto" else config


def check(config, processes=1):
    """Refuse settings that do not fit together, which would fail hours later or train nothing.

    Raises:
        UserError: which, and what to do.
    """
    check_settings(config.model)
    batch, micro = config.batch_size, config.micro_batch_size
    if micro and batch % micro:
        raise UserError(f"micro_batch_size {micro} does not divide batch_size {batch}")
    if batch % ((micro or batch) * processes):
        fits = [m for m in range(1, batch + 1) if batch % (m * processes) == 0]
        way_out = f"--micro-batch-size {fits[-1]} would do" if fits else "change --batch-size"
        if config.resume:
            way_out = "go on with fewer processes: the penalty depends on the micro-batch"
        raise UserError(
            f"{processes} processes cannot share {batch} windows a step in micro-batches of "
            f"{micro or batch}; {way_out}"
        )
    if config.name and not config.resume:  # before minutes of reading text
        check_free(Path(config.out, config.name))


# -- Settings of a run -----------------------------------------------------------------------------


def read_settings(out, name=None):
    """The run to go on with, out/<name> or the newest in `out` -> directory, config and corpus.

    Raises:
        UserError: no such run, or its train.json is damaged.
    """
    run = Path(out) / name if name else newest_run(out, "train.json")
    file = run / "train.json"
    if not file.is_file():
        raise UserError(f"{file} does not exist: nothing to resume; train without --resume")
    content = read_json(file)
    try:
        model = parse_config(content["config"].pop("model"))
        corpus = check_json(content["corpus"], Corpus)
        config = from_json(TrainConfig, content["config"] | {"model": {}})
        return run, replace(config, model=model), corpus
    except (UserError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} does not hold the settings of a run: {error}") from None


def read_run(path):
    """A run's directory, TrainConfig and corpus; of a checkpoint, those of its run.

    Raises:
        UserError: it is not a run, or its train.json is damaged.
    """
    place = Path(path).resolve()
    run = next((p for p in (place, place.parent) if (p / "train.json").is_file()), None)
    if run is None:
        raise UserError(f"{path} is not a run: no train.json says how it was trained")
    return read_settings(run.parent, run.name)


def go_on(config, corpus):
    """The run that a training with --resume goes on with.

    Returns:
        Its directory, its newest checkpoint (or None), and {name: (before, now)} of the settings
        that changed.

    Raises:
        UserError: a change that is not in MAY_CHANGE, or fewer steps than are done; nothing is
            touched then.
    """
    run, before, corpus_before = read_settings(config.out, config.name)
    changed = changes(before, config)
    if not is_same(corpus, corpus_before):
        changed["corpus"] = corpus_before, corpus
    refused = [f"{k}: {a} -> {b}" for k, (a, b) in changed.items() if k not in MAY_CHANGE]
    if refused:
        raise UserError(
            f"{run} was trained with other settings; leave them as they were, or train anew "
            f"without --resume. Changed: {'; '.join(refused)}"
        )
    checkpoint = checkpoints(run)[-1] if checkpoints(run) else None
    if checkpoint and step_of(checkpoint) > config.steps:
        raise UserError(f"{checkpoint} is beyond step {config.steps}; go on with a larger --steps")
    return run, checkpoint, changed


# -- The corpus ------------------------------------------------------------------------------------


class Corpus(TypedDict):
    """What a corpus is known by. Its ends stand for tokens that may be of gigabytes."""

    name: str
    train_tokens: int
    val_tokens: int
    sha256: str  # of the first and the last 10^6 training tokens
    val_sha256: str  # the same of validation
    tokenizer: str  # its digest


def describe_corpus(folder, tokenizer, train, val):
    """-> the Corpus that `open_corpus` opened."""

    def digest(tokens):
        return hashlib.sha256(np.concatenate([tokens[: 10**6], tokens[-(10**6) :]])).hexdigest()

    return Corpus(
        name=folder.name, train_tokens=len(train), val_tokens=len(val), sha256=digest(train),
        val_sha256=digest(val), tokenizer=tokenizer.digest,
    )  # fmt: skip


def is_same(corpus, other):
    """Whether two corpora have the same tokens, by all that they are known by but the name."""
    return corpus | {"name": ""} == other | {"name": ""}


def pick_tokenizer(config):
    """What `auto` stands for, as `prepare` takes it: None is the corpus's own, or bytes."""
    if config.tokenizer != "auto":
        return config.tokenizer
    if config.init_from:
        from training.warm_start import tokenizer_beside

        return tokenizer_beside(config)
    of_preset = {"tiny": "bytes", "small": "bpe"}.get(config.preset, "gpt2")
    return None if is_prepared(config.data) else of_preset


def open_corpus(config):
    """The corpus of a config -> folder, tokenizer, train and validation tokens."""
    V = config.model.vocab_size
    folder, tokenizer = prepare(config.data, pick_tokenizer(config), V)
    if config.init_from and tokenizer.vocab_size > V and not tokenizer.padded:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, {config.init_from} only {V}; leave "
            "out --tokenizer to take the model's own"
        )
    V = min(tokenizer.vocab_size, V) if config.init_from else tokenizer.vocab_size
    tokens = [load_tokens(folder, split, V, config.model.block_size) for split in ("train", "val")]
    return folder, tokenizer, *tokens


def validation_windows(path, data=None):
    """The corpus that a run was trained on -> its config, tokenizer and validation windows.

    Those of the corpus `data`, if that is given, which has to have the same token ids.

    Raises:
        UserError: there is no run, its corpus has changed, or `data` has ids of another tokenizer.
    """
    run, config, corpus = read_run(path)
    # Its own tokenizer, as when it is resumed: a model that it began from may be gone.
    here = replace(config, resume=True, out=str(run.parent), name=run.name)
    if data:
        from training.warm_start import check_ids

        check_ids(run, data)
    folder, tokenizer, train, val = open_corpus(replace(here, data=data or config.data))
    if not data and not is_same(describe_corpus(folder, tokenizer, train, val), corpus):
        raise UserError(f"{path} was trained with another corpus than {config.data} is now")
    return config, tokenizer, Windows(val, config.model.block_size, seed=0)


# -- The door --------------------------------------------------------------------------------------


@dataclass
class Training:
    """A training of which everything is decided."""

    config: TrainConfig
    run: Path
    checkpoint: Path | None  # where it goes on from
    changed: dict  # the settings that a resumed training changes: {name: (before, now)}
    corpus: Corpus
    folder: Path  # of the corpus
    tokenizer: object
    windows: Windows
    val: Windows
    model: PonderLM
    device: torch.device
    dtype: torch.dtype  # of the matrix products
    rank: int
    processes: int


def open_training(config):
    """Decide all that a config leaves open -> Training.

    Raises:
        UserError: settings that do not fit each other, this machine, or the run that goes on.
    """
    rank, processes, device = join_processes(pick_device(config.device))
    check(config, processes)
    threads = pick_threads(config.threads, device)
    dtype = from_first(pick_precision(config.precision, device))  # it may have been measured
    backend = from_first(pick_backend(config, processes, device, dtype))
    config = replace(config, threads=threads, precision=str(dtype)[6:], backend=backend)
    with first_process_first():
        folder, tokenizer, train_tokens, val_tokens = open_corpus(config)
    T = config.model.block_size
    windows, val = Windows(train_tokens, T, config.seed), Windows(val_tokens, T, seed=0)
    corpus = describe_corpus(folder, tokenizer, train_tokens, val_tokens)
    run, checkpoint, changed = None, None, {}
    if config.resume:
        run, checkpoint, changed = from_first(None if rank else go_on(config, corpus))
    model = open_model(config, tokenizer, checkpoint).to(device).train()
    prepare_kernels(model, config, device, dtype)
    if not run:  # only now, where nothing can be refused any more
        run = from_first(None if rank else new_run(config.out, config.name, config.preset))
    return Training(
        config, run, checkpoint, changed, corpus, folder, tokenizer, windows, val, model, device,
        dtype, rank, processes,
    )  # fmt: skip


def pick_backend(config, processes, device, dtype):
    """The name of the attention backend: `auto` is the fastest in a training's longest pass."""
    from kernels.attention import fastest
    from kernels.attention import find as find_backend

    if config.backend != "auto":
        find_backend(config.backend, device, dtype)
        return config.backend
    model, method = config.model, find(config.model.method)
    B = config.micro_batch_size or config.batch_size // processes
    S = model.ponder_steps + 1 if method.interleaves else 1
    N, slots = (model.block_size, S) if method.grid else (model.block_size * S, 1)
    shape = B, model.num_attention_heads, N, model.head_width
    how = dict(biased=method.has_router, compiled=config.compile, slots=slots)
    return fastest(shape, model.key_value_heads, device, dtype, **how)


def open_model(config, tokenizer, checkpoint):
    """The model of a training: new, begun from another one, or that of a checkpoint."""
    # Large tables are padded, for the GPU's matrix products; a trained one is as it is.
    V = tokenizer.vocab_size if tokenizer.vocab_size < 1024 else -(-tokenizer.vocab_size // 64) * 64
    V = config.model.vocab_size if config.init_from else V
    shape = replace(config.model, vocab_size=V)
    torch.manual_seed(config.seed)
    if not checkpoint:
        if not config.init_from:
            return build(shape)
        from training.warm_start import start_from

        return start_from(config.init_from, shape)
    try:
        model = load(checkpoint)
        if model.config != shape:
            raise UserError(f"{checkpoint}/config.json: {changes(shape, model.config)}")
    except UserError as error:
        raise unreadable(checkpoint, error) from None
    return model


def prepare_kernels(model, config, device, dtype):
    """How the model runs, which is no property of its weights: the form of attention, and in
    training faster forms of a Llama's blocks in place of those that model.py writes out."""
    from kernels import attention, blocks

    model.backend = attention.find(config.backend, device, dtype)
    model.recompute = config.recompute
    blocks.use_fast_blocks(model, norms=device.type == "cpu" and not config.compile)
    if config.compile:
        blocks.compile_blocks(model)
