"""Train a PonderLM-3 on a GPU or a CPU.

The loss is the cross-entropy of the next token plus the bottom-mass penalty (section 3.4.2), plus an optional
price per executed step (--step-price; not in the paper; used by the preset `small`).

    python train.py                                       'small' on a GPU, 'tiny' on a CPU
    python train.py --data my_texts/ --steps 2000
    python train.py --preset tiny --ponder-steps 0        the same transformer without pondering
    python train.py --resume                              resume the newest run, bit for bit
    torchrun --nproc_per_node=2 train.py                  two processes share each training step

    preset    parameters    takes
    tiny      0.33 M        2 minutes on 2 CPU cores
    small     13 M          minutes on one GPU with bfloat16
    70m       70 M          days on one GPU: the paper's smaller size
    410m      407 M         weeks on one GPU: the paper's larger size

Ctrl-C saves. A run is a directory, out/NAME:

    config.json, model.safetensors, tokenizer.json    the model, as sample.py and analyze.py read it
    trainer.pt      the checkpoint: weights, optimizer, step and log; replaced whole or not at all
    train.json      every setting, and hashes of the corpus
    log.jsonl       the settings of each start, then the metrics of every --log-every training steps
    results.json    the final evaluation
"""

import math
import shlex
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from pydantic import Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from attention import BACKENDS, auto
from checkpoint import (
    check_finite,
    check_free,
    from_json,
    load_checkpoint,
    locked,
    make_run_folder,
    newest_training,
    resume_flags,
    save_checkpoint,
    write_log,
)
from common import (
    UserError,
    check_writable,
    command_line,
    defer_signals,
    join,
    parse_groups,
    read_json,
    split_into,
    user_error_if_unreadable,
    write_json,
)
from data import Windows, open_corpus, pick_tokenizer, unigram_entropy
from distributed import gather, init_distributed, rank_and_world_size, wait_for_all
from hardware import (
    check_attention,
    compile_for_training,
    describe_machine,
    eval_batch_size,
    has_fast_bfloat16,
    memory_budget,
    micro_batch_that_fits,
    peak_memory,
    pick_precision,
    should_compile,
    windows_that_fit,
)
from model import (
    BackboneConfig,
    Config,
    Count,
    Fraction,
    NonNegative,
    PonderingConfig,
    PonderLM,
    Seed,
    validated_dataclass,
)
from router import TAU, bottom_mass_penalty, relaxed_steps, resolved_fraction, stop_step
from tokenizer import BPE_VOCAB_SIZE

# -- Settings --------------------------------------------------------------------------------------

# For each preset, what differs from the defaults below: settings of the training, and of the model.
PRESETS = {
    # For 2 CPU cores.
    "tiny": (
        dict(),
        dict(hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2, head_dim=24,
             refinements=(1, 1)),
    ),
    # For one GPU; its text is read once. At d = 56, the channel of log w fits into a kernel of width 64.
    # Without a price, all tokens would take all steps (docs/results.md).
    "small": (
        dict(data="pysource", steps=1500, batch_size=64, learning_rate=1e-3, step_price=0.1, eval_every=500),
        dict(vocab_size=4096, hidden_size=384, intermediate_size=1032, num_hidden_layers=6,
             num_attention_heads=6, head_dim=56, block_size=256),
    ),
    # The paper's two sizes, with the recipe of the released PonderLM-2 and Pythia scripts: 15 and 10 billion
    # tokens.
    "70m": (
        dict(steps=28_610, batch_size=256, learning_rate=1e-3, router_rate=1.0, warmup=0.01,
             weight_decay=0.01, eval_every=1000),
        dict(vocab_size=50_304, hidden_size=512, intermediate_size=1376, num_hidden_layers=6,
             num_attention_heads=8, block_size=2048),
    ),
    "410m": (
        dict(steps=19_073, batch_size=256, learning_rate=3e-4, router_rate=1.0, warmup=0.02, eval_every=1000),
        dict(vocab_size=50_304, hidden_size=1024, intermediate_size=2752, num_hidden_layers=24,
             num_attention_heads=16, block_size=2048),
    ),
}  # fmt: skip

Beta = Annotated[float, Field(ge=0, lt=1)]


@validated_dataclass
class RunSettings:
    """The run: its folder, and where it begins."""

    # tyro shows the comment beside or above a field as the help of its flag.

    # named set of defaults, which any other flag overrides. If omitted: small on a GPU with bfloat16, else
    # tiny. The defaults shown here are those of the preset that is chosen
    preset: Literal[tuple(PRESETS)] = "tiny"
    name: str | None = None  # name of the run, which is its folder in --out; None: preset, date and time
    out: str = "out"  # folder that holds the runs
    # resume the run --name, or else the newest run in --out, with its original settings. Only these may
    # change: steps, learning rate, clip, tau, how often it is logged and evaluated, micro-batch size, the
    # hardware flags, and the path of the text
    resume: bool = False
    # random seed of the initial weights, the order of the windows, and the number of refinement passes that
    # each training step draws
    seed: Seed = 0

    def __post_init__(self):
        if self.name is not None and (self.name in ("", ".", "..") or "/" in self.name):
            raise ValueError(
                f"name = {self.name!r} cannot be the name of a folder: choose another, without /"
            )


@validated_dataclass
class DataSettings:
    """The text, and how it is read."""

    # what to train on: pydocs or pysource (docstrings or source files of the Python on this machine), a text
    # file, a folder of text files, or a folder with train.bin and val.bin
    data: str = "pydocs"
    # how text is split into tokens: bytes, bpe (trained on the text) or gpt2. auto: bytes for the preset
    # tiny, bpe for small, gpt2 for the larger ones; a folder with train.bin has its own
    tokenizer: str = "auto"


@validated_dataclass
class OptimisationSettings:
    """Batches, learning rate and AdamW."""

    steps: Count = 1000  # number of training steps
    batch_size: Count = 8  # windows (sequences of --block-size tokens) per training step
    # windows per forward and backward pass; gradients are accumulated over several of them until --batch-size
    # windows are done. None: all at once on a CPU, as many as fit into memory on a GPU
    micro_batch_size: Count | None = None
    learning_rate: NonNegative = 4e-3  # peak learning rate of AdamW; a cosine decays it to a tenth
    # fraction of the training steps during which the learning rate rises linearly to its peak
    warmup: Fraction = 0.05
    weight_decay: Fraction = 0.1  # weight decay on matrices, except the router's
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # AdamW's beta 1 and beta 2
    clip: NonNegative = 1.0  # largest norm of the gradient: a larger one is scaled down; 0 turns it off


@validated_dataclass
class RouterSettings:
    """Training of the router, which decides how many pondering steps each token takes."""

    router_rate: NonNegative = 3.0  # multiplier of the learning rate for the router
    # price of a step: the loss rises by this many nats times the average number of pondering steps per token
    # (a differentiable approximation of it); 0 turns it off (not in the paper)
    step_price: NonNegative = 0.0
    price_from: Fraction = 0.0  # fraction of training after which --step-price applies


@validated_dataclass
class EvaluationSettings:
    """Logging, checkpoints and evaluation."""

    log_every: Count = 20  # training steps between log lines
    eval_every: Count = 250  # training steps between checkpoints; at each, 64 validation windows are scored
    eval_windows: Count = 512  # number of validation windows in the final evaluation
    # early-exit threshold, used in the log and the final evaluation, not in training: a token takes no
    # further pondering step once w, the router's probability that it needs one, is below it
    tau: Fraction = TAU


@validated_dataclass
class HardwareSettings:
    """Device, precision, speed and memory."""

    device: str = "auto"  # cpu, cuda or mps; auto is a GPU if there is one, else the CPU
    # precision of matrix products; auto is bfloat16 where the hardware has it, else float32
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    # form of attention: eager (the plain formula), sdpa (PyTorch's fused kernels) or fa2 (the package
    # flash-attn); auto picks a fast one
    attention: Literal["auto", "eager", "sdpa", "fa2"] = "auto"
    # compile the blocks and the cross-entropy, which makes steps faster after about a minute of compiling;
    # auto compiles on a GPU where that can work
    compile: Literal["auto", "on", "off"] = "auto"
    recompute: bool = False  # recompute activations in the backward pass: slower, but takes much less memory


@validated_dataclass
class TrainConfig(
    HardwareSettings, EvaluationSettings, RouterSettings, OptimisationSettings, DataSettings, RunSettings
):
    """All settings that are not the model's. Each parent class is a group of flags in --help."""

    command = "python {}.py"  # not a setting: how messages spell a command (the lab's is python -m lab {})


TRAIN_GROUPS = {
    "run": RunSettings,
    "data": DataSettings,
    "optimisation": OptimisationSettings,
    "router": RouterSettings,
    "evaluation": EvaluationSettings,
    "hardware": HardwareSettings,
}
MODEL_GROUPS = {"pondering": PonderingConfig, "transformer": BackboneConfig}

CHECKPOINT_WINDOWS = 64  # validation windows that are scored at each checkpoint
# What a resumed training may change; any other change would make it another training. The corpus may have
# moved, but must be the same.
MAY_CHANGE = {"steps", "learning_rate", "clip", "log_every", "eval_every", "eval_windows", "tau"}
MAY_CHANGE |= {"data", "device", "precision", "attention", "compile", "recompute", "micro_batch_size"}
# Values of settings that older runs did not record, and how they wrote --compile.
OLD_DEFAULTS = {
    "router_rate": 1.0,
    "step_price": 0.0,
    "price_from": 0.0,
    "attention": "auto",
    "compile": "off",
}
OLD_COMPILE = {None: "auto", True: "on", False: "off"}


def preset_settings(name):
    """The settings of a preset: a TrainConfig and a Config."""
    train_settings, model_settings = PRESETS[name]
    return TrainConfig(preset=name, **train_settings), Config(**model_settings)


def usual_preset(device_name):
    """The preset of a device, given --device: 'small' on a GPU, else 'tiny'."""
    on_gpu = device_name.partition(":")[0] in ("auto", "cuda") and torch.cuda.is_available()
    if not on_gpu:
        return "tiny"
    if not has_fast_bfloat16(torch.device("cuda")):
        print("note: this GPU has no bfloat16, so the preset is tiny; --preset small would take hours on it")
        return "tiny"
    return "small"


@validated_dataclass
class FirstFlags:
    """Flags that are read before the others, because the defaults of the others depend on them."""

    preset: str | None = None
    device: str = "auto"
    out: str = "out"
    name: str | None = None
    resume: bool = False
    data: str = "pydocs"
    tokenizer: str = "auto"
    vocab_size: int | None = None
    ponder_steps: int | None = None


def new_settings(first):
    """The settings of a new run, before the other flags change them. -> a TrainConfig and a Config"""
    name = first.preset or usual_preset(first.device)
    if name not in PRESETS:  # tyro will refuse it when it reads all flags
        name = "tiny"
    config, model_config = preset_settings(name)
    if first.tokenizer == "bpe" and model_config.vocab_size <= 257:  # that is the size of a bytes tokenizer
        model_config = replace(model_config, vocab_size=BPE_VOCAB_SIZE)
    if first.ponder_steps == 0:
        config = replace(config, step_price=0.0)  # there are no steps that the preset's price could be for
    return config, model_config


def parse(argv=None):
    """Read the command line.

    The defaults are those of --preset, or of the run that is resumed.

    Returns:
        A TrainConfig and a Config.

    Raises:
        UserError: a flag that --resume must not change.
        pydantic.ValidationError: a value out of its range.
    """
    first, _ = tyro.cli(FirstFlags, args=argv, return_unknown_args=True, add_help=False)
    if first.resume:
        run = Path(first.out, first.name) if first.name else newest_training(first.out)
        config, model_config = run_settings(run)
        config = replace(config, out=first.out, name=run.name, resume=True)
    else:
        config, model_config = new_settings(first)

    groups = split_into(TRAIN_GROUPS, config) | split_into(MODEL_GROUPS, model_config)
    parsed = parse_groups(groups, argv, prog="python train.py", description=__doc__)
    new_config = join(TrainConfig, [parsed[title] for title in TRAIN_GROUPS])
    new_model_config = join(Config, [parsed[title] for title in MODEL_GROUPS])
    if first.resume:
        refuse_changes(run, (config, model_config), (new_config, new_model_config))
    else:
        refuse_ignored(first, new_config, new_model_config)
    return new_config, new_model_config


def refuse_ignored(first, config, model_config):
    """Refuse flags that would be taken and change nothing.

    Args:
        first: the FirstFlags.

    Raises:
        UserError: it names the flag.
    """
    tokenizer = pick_tokenizer(config.preset, config.data, config.tokenizer)
    if first.vocab_size is not None and tokenizer is None:
        raise UserError(
            f"--vocab-size {first.vocab_size} has no effect on {config.data}, which already holds token ids: "
            "omit --vocab-size"
        )
    if first.vocab_size is not None and tokenizer != "bpe":
        raise UserError(
            f"--vocab-size {first.vocab_size} applies to a BPE, but the tokenizer is {tokenizer}: omit "
            "--vocab-size, or add --tokenizer bpe"
        )
    check_price(config, model_config)


def check_price(config, model_config):
    """Raise a UserError for a price on steps of a model that takes none."""
    if config.step_price and model_config.ponder_steps == 0:
        raise UserError(
            f"--step-price {config.step_price} has no effect with --ponder-steps 0: omit one of the two"
        )


def refuse_changes(run, before, now):
    """Refuse to resume a training with settings that would make it another one.

    Args:
        before, now: pairs of a TrainConfig and a Config.

    Raises:
        UserError: it names them.
    """
    recorded = asdict(before[0]) | asdict(before[1])
    asked = asdict(now[0]) | asdict(now[1])
    changed = [name for name in asked if recorded[name] != asked[name] and name not in MAY_CHANGE]
    if changed:
        changes = "; ".join(
            f"--{name.replace('_', '-')} {asked[name]} (was {recorded[name]})" for name in changed
        )
        raise UserError(
            f"{run} was begun with other settings: omit --resume to train a new run, or undo these changes: "
            f"{changes}"
        )


def read_run(run, kind=TrainConfig):
    """Read the train.json of a run.

    Args:
        kind: the class of its settings.

    Returns:
        Its settings, the settings of its model (a dict), and the fingerprint of its corpus.

    Raises:
        UserError: it is not a run, or is damaged.
    """
    file = Path(run, "train.json")
    if not file.is_file():
        raise UserError(
            f"{run} is not a training run (no train.json): check --name and --out, or omit --resume"
        )
    content = read_json(file)
    with user_error_if_unreadable(file):
        settings = OLD_DEFAULTS | dict(content["config"])
        if kind is TrainConfig and not settings.keys() <= kind.__dataclass_fields__.keys():
            raise UserError(
                f"{run} was begun by python -m lab train: resume it with python -m lab train --resume"
            )
        settings["compile"] = OLD_COMPILE.get(settings["compile"], settings["compile"])
        return from_json(kind, settings), dict(content["model"]), dict(content["corpus"])


def run_settings(run):
    """The settings of a run that this script can resume: a TrainConfig and a Config.

    Raises:
        UserError: it is not a run, is damaged, or is of another method.
    """
    config, model_settings, _ = read_run(run)
    method = model_settings.pop("method", None)
    if method != PonderLM.method:
        raise UserError(
            f"{run} was trained with the method {method!r}: resume it with python -m lab train --resume"
        )
    with user_error_if_unreadable(run / "train.json"):
        return config, from_json(Config, model_settings)


# -- The objective ---------------------------------------------------------------------------------


def objective(model, x, y, R, price=0.0):
    """The loss of one micro-batch:

        L = CE + lambda sum_k mean(Bottom_{d_rho_k}(w_k)) + price mean(relaxed(w))

    The printed penalty of n tokens is 0 where the mean CE_k of every k is above 0.5 + log(n) / 10, which is
    1.1 nats for n = 512: rho_k is at most exp(-10 (mean CE_k - 0.5)), so it is below 1/n there, and no token
    is selected (reading note 2). There the router learns from CE alone: through log w in attention, and
    through s in the integration.

    Args:
        x: (B, T), token ids.
        y: (B, T), the tokens that follow them; -100 where there is none to predict.
        R: refinement passes.
        price: loss in nats of an executed pondering step (not in the paper).

    Returns:
        Three values: L; the penalty, not multiplied by lambda; and the model's Output, whose loss is CE.
    """
    out = model(x, y, R=R)
    config = model.config
    loss = out.loss
    penalty = torch.zeros_like(loss)
    # The tokens that have a target: all of them in windows of a corpus, but other callers may have padding.
    # This waits for a GPU, once per micro-batch.
    with_target = (y != -100).flatten().nonzero().squeeze(1)  # (n,)
    log_w = out.log_w.flatten(0, 1)[with_target]  # (n, K+1)
    if config.ponder_steps == 0 or len(log_w) == 0:
        return loss, penalty, out
    if config.penalty_weight:
        ce = depth_losses(model, out, y, with_target)  # (n, K+1)
        penalty, _ = bottom_mass_penalty(log_w, ce, config.penalty)
        loss = loss + config.penalty_weight * penalty
    if price:
        loss = loss + price * relaxed_steps(log_w).mean()
    return loss, penalty, out


def depth_losses(model, out, y, with_target):
    """CE_k of the n tokens that have a target, integrated up to step k = 0 .. K. -> (n, K+1), without
    gradient"""

    def losses_of(depths):
        ce = model.partial_losses(out.h, out.s, y, depths)  # (B, T, depths)
        return ce.flatten(0, 1)[with_target]  # (n, depths)

    between = losses_of(range(1, model.config.ponder_steps))  # CE_1 .. CE_{K-1}
    last = out.ce.detach().flatten()[with_target][:, None]  # CE_K, which is known already
    from_1 = torch.cat([between, last], dim=-1)  # (n, K), CE_1 .. CE_K

    # CE_0 is computed only if the penalty can depend on it, which saves most steps a pass of the output head
    # over all tokens. It enters d_rho_1 = max(rho_1 - rho_0, 0), and where n rho_1 < 1, that selects no
    # token, whatever CE_0 is.
    rho_1 = resolved_fraction(from_1[:, :1], model.config.penalty)
    can_select = len(from_1) * rho_1.item() >= 0.999  # this waits for a GPU, too; the margin is for rounding
    ce_0 = losses_of([0]) if can_select else torch.full_like(last, math.inf)  # (n, 1)
    return torch.cat([ce_0, from_1], dim=-1)


class LossModule(nn.Module):
    """The objective of a batch of windows (n, T+1), as a module, which DistributedDataParallel needs."""

    def __init__(self, model, objective, precision):
        super().__init__()
        self.model = model
        self.objective = objective
        self.precision = precision

    def forward(self, windows, R, price=0.0):
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            return self.objective(self.model, windows[:, :-1], windows[:, 1:], R, price)


def learning_rate(step, config):
    """A linear warm-up, then a cosine from the peak down to a tenth of it."""
    warmup_steps = max(1, round(config.warmup * config.steps))
    if step < warmup_steps:
        return config.learning_rate * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, config.steps - warmup_steps)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


# -- Training --------------------------------------------------------------------------------------


def train(config, model_config, make_model=PonderLM, objective=objective, open_text=open_corpus):
    """Train a model, keeping it and its checkpoints in the folder of a run.

    Args:
        config: a TrainConfig.
        model_config: the settings of the model. Its vocab_size is replaced by that of the corpus.
        make_model: builds the model from its settings. This argument and the next two have the paper's
            method as their default; other methods (lab/train.py) pass their own.
        objective: the loss of one micro-batch; see the function of that name above.
        open_text: opens the corpus; takes the arguments of data.open_corpus.

    Returns:
        The folder of the run, and the final evaluation, or None if a signal stopped the training.

    Raises:
        UserError: a setting cannot be followed, or the training diverges.
    """
    rank, world_size, device = init_distributed(config.device)
    is_main = rank == 0  # only this process prints and writes files
    # The precision that "auto" chose is recorded, so that a run that is resumed elsewhere keeps it.
    config = replace(config, precision=pick_precision(config.precision, device))
    check_before_reading(config, model_config, device, world_size)

    # Data
    corpus = open_corpus_once(config, model_config.vocab_size, open_text, rank)
    if config.resume:
        check_same_corpus(config, corpus)
    train_windows = Windows(corpus.train, model_config.block_size, config.seed)
    val_windows = Windows(corpus.val, model_config.block_size, seed=0)

    # Model and optimizer
    torch.manual_seed(config.seed)
    model = make_model(replace(model_config, vocab_size=corpus.vocab_size)).to(device).train()
    optimizer = make_optimizer(model, config)
    model.backend = BACKENDS[config.attention]
    model.recompute = config.recompute
    loss_module = LossModule(model, objective, config.precision)
    # This also compiles the blocks. It comes before DistributedDataParallel, in which each measurement would
    # wait for the other processes.
    micro_batch_size, compiled = fit_to_hardware(
        config, model, loss_module, train_windows, device, world_size
    )
    if world_size > 1:
        loss_module = DistributedDataParallel(loss_module, gradient_as_bucket_view=True)

    # The run
    run = run_folder(config, rank)
    config = replace(config, name=run.name)
    if config.micro_batch_size is None:
        # A resumed run needs it, since the penalty is computed per micro-batch.
        config = replace(config, micro_batch_size=micro_batch_size)

    with locked(run, rank):
        first_step, log = start_or_resume(run, config, model_config, model, optimizer, corpus)
        print_start(run, config, model, corpus, train_windows, first_step, micro_batch_size, compiled)
        clock = Clock(config)
        done = first_step  # number of training steps done
        saved = first_step  # as of the last checkpoint

        # In this context, Ctrl-C and other signals only fill the list. The training ends where
        # stop_if_signalled finds it filled.
        with defer_signals() as signals:
            try:
                for step in range(first_step, config.steps):
                    # Batch, R and price. They depend on the seed and the step alone, so a resumed run sees
                    # the same ones, and so does a run with another number of processes, all taken together.
                    batch = load_batch(train_windows, step, config, device)  # (batch_size / world_size, T+1)
                    micro_batches = batch.split(micro_batch_size)
                    R = draw_refinements(step, config.seed, model_config.refinements)
                    price = price_at(step, config)

                    # Forward, backward, update
                    metrics = accumulate_gradients(loss_module, micro_batches, R, price, config.tau, signals)
                    max_norm = config.clip or math.inf
                    metrics["grad_norm"] = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                    for group in optimizer.param_groups:
                        group["lr"] = group["lr_scale"] * learning_rate(step, config)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    done = step + 1
                    clock.end_step()

                    # Log, evaluate, save
                    is_last = done == config.steps
                    if is_last or done % config.log_every == 0:
                        # All processes call this, log_validation and stop_if_signalled: they meet there.
                        log.append(log_step(run, done, metrics, clock, config, model_config))
                        if is_main:
                            write_log(run, log)
                    if is_last or done % config.eval_every == 0:
                        with clock.measure("evaluation"):
                            log.append(log_validation(run, done, model, val_windows, config))
                        with clock.measure("saving"):
                            if is_main:
                                save_checkpoint(run, model, optimizer, done, log)
                        saved = done
                    stop_if_signalled(signals)

                report = final_report(model, val_windows, config, signals)
            except (Signalled, OSError, torch.OutOfMemoryError) as reason:
                # The steps that are done are saved. If a signal came between two micro-batches, this step has
                # changed no weights: it is given up. The other two come from output that nobody reads any
                # more, as after Ctrl-C in `python train.py | tee log`, and from an evaluation that needs more
                # memory than a training step.
                if is_main and done > saved:
                    save_checkpoint(run, model, optimizer, done, log)
                if not isinstance(reason, Signalled):
                    raise
                resume = f"{config.command.format('train')} {resume_flags(run)}"
                print(f"\nstopped; resume with: {resume}", flush=True)
                return run, None

        report["unigram_entropy"] = unigram_entropy(corpus.val, corpus.vocab_size)
        if is_main:
            write_json(run / "results.json", report)

    print(f"unigram entropy {report['unigram_entropy']:.3f}")
    name = shlex.quote(str(run))
    print(f"next: {config.command.format('sample')} --run {name}")
    print(f"      python analyze.py curve --run {name}", flush=True)
    return run, report


# -- The parts of `train`, in their order ----------------------------------------------------------


def check_before_reading(config, model_config, device, world_size):
    """Refuse what cannot work before minutes are spent on reading a text.

    Raises:
        UserError: the number of processes, the form of attention, a path or the name of the run does not fit.
    """
    if config.batch_size % world_size:
        raise UserError(
            f"--batch-size {config.batch_size} cannot be shared equally by {world_size} processes: use a "
            f"multiple of {world_size}"
        )
    check_attention(config.attention, device, config.precision, model_config.head_width)
    for flag, path in (("--data", config.data), ("--out", config.out), ("--name", config.name)):
        if path is not None and not is_utf8(path):
            raise UserError(
                f"{flag} {path!r} is not valid UTF-8, and so train.json could not name it: rename it"
            )
    rank, _ = rank_and_world_size()
    if rank == 0:
        check_writable(config.out, "use --out with a folder that can be written")
        if config.name and not config.resume:
            check_free(Path(config.out, config.name))


def is_utf8(path):
    """False for a path with bytes that are no UTF-8, which Python keeps as lone surrogates."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def open_corpus_once(config, vocab_size, open_text, rank):
    """Open the corpus. The first process prepares it, if need be; the others wait and find it on disk."""
    tokenizer = pick_tokenizer(config.preset, config.data, config.tokenizer)
    if rank > 0:
        wait_for_all()
    corpus = open_text(config.data, tokenizer, vocab_size)
    if rank == 0:
        wait_for_all()
    return corpus


def check_same_corpus(config, corpus):
    """Refuse to resume on another text. Its name is not compared, since the file may have been moved.

    Raises:
        UserError: the text, or its tokens, differ.
    """
    run = Path(config.out, config.name)
    _, _, recorded = read_run(run, type(config))
    if {**recorded, "name": None} != {**corpus.fingerprint(), "name": None}:
        raise UserError(
            f"{config.data} is not the text that {run} was trained on, or is tokenized differently: pass "
            "the original text with --data"
        )


def make_optimizer(model, config):
    device = next(model.parameters()).device
    return torch.optim.AdamW(
        model.param_groups(config.router_rate),
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=device.type in ("cpu", "cuda"),
    )


def fit_to_hardware(config, model, loss_module, windows, device, world_size):
    """Decide how many windows to compute at once, and compile the blocks where that is asked for.

    Returns:
        The size of a micro-batch in windows, and whether the blocks are compiled.

    Raises:
        UserError: not even one window fits into the memory of the GPU.
    """
    share = config.batch_size // world_size  # windows per training step of this process
    most_refinements = max(model.config.refinements)

    def loss_of(n):
        """The loss of n windows, with as many passes as a training step can have."""
        loss, _, _ = loss_module(windows.stack(0, n).to(device), most_refinements)
        return loss

    is_given = config.micro_batch_size is not None
    is_measured = not is_given and device.type == "cuda" and share > 1
    if is_given:
        micro_batch_size = given_micro_batch_size(config, share)
    elif is_measured:
        fitting = min(gather(windows_that_fit(model, loss_of)))
        micro_batch_size = micro_batch_that_fits(share, fitting)
    else:
        micro_batch_size = share

    compiled = should_compile(config.compile, device)
    if compiled:
        print("compiling the blocks, which takes about a minute", flush=True)
        compile_for_training(model)
    if compiled and is_measured and micro_batch_size < share:
        # Compiled blocks keep fewer activations, so perhaps twice as many windows fit. (Measuring them as
        # above would compile them for each size that is tried.)
        larger = micro_batch_that_fits(share, 2 * fitting)
        fits = peak_memory(model, loss_of, larger) <= memory_budget(model)
        if all(gather(fits)):
            micro_batch_size = larger
    if is_measured:
        torch.cuda.empty_cache()
    return micro_batch_size, compiled


def given_micro_batch_size(config, share):
    """--micro-batch-size, or this process's share of a training step if that is smaller."""
    micro_batch_size = min(config.micro_batch_size, share)
    if config.resume and micro_batch_size < config.micro_batch_size:  # more processes than before
        print(
            f"note: micro-batches have {micro_batch_size} windows instead of {config.micro_batch_size}. "
            "The penalty is computed per micro-batch, so it will differ slightly."
        )
    return micro_batch_size


def run_folder(config, rank):
    """The folder of the run: out/NAME, or a new one that is named after the preset and the time."""
    if config.name:
        return Path(config.out, config.name)
    name = f"{config.preset}-{time.strftime('%m%d-%H%M%S')}"
    run = make_run_folder(config.out, name) if rank == 0 else None
    return gather(run)[0]  # the first process decides, since clocks differ


def start_or_resume(run, config, model_config, model, optimizer, corpus):
    """Load the last checkpoint of a resumed run. In any case, write the files that describe the run, and
    delete the results of a shorter training.

    Returns:
        The number of training steps done, and the rows of the log so far.

    Raises:
        UserError: the run has done more steps than it is to do, or cannot be read or written.
    """
    rank, world_size = rank_and_world_size()
    first_step = 0
    log = []
    if config.resume:
        first_step, log = load_checkpoint(run, model, optimizer)
    elif rank == 0:
        check_free(run)  # again: another training may have taken the folder while this one read its text
    if first_step > config.steps:
        raise UserError(
            f"{run} has already done {first_step} training steps, more than --steps {config.steps}: use a "
            "larger --steps"
        )
    log.append(
        {
            "step": first_step,
            **describe_machine(next(model.parameters()).device, config.precision),
            "processes": world_size,
            "config": asdict(config),
        }
    )
    if rank == 0:
        if first_step < config.steps:
            # There are training steps to do, so a final evaluation that is here is out of date.
            (run / "results.json").unlink(missing_ok=True)
        description = {
            "config": asdict(config),
            # as asked for; the vocabulary of `model` may be padded
            "model": {"method": model.method, **asdict(model_config)},
            "corpus": corpus.fingerprint(),
        }
        write_json(run / "train.json", description)
        corpus.tokenizer.save(run / "tokenizer.json")
        if first_step > 0:
            # The process before may have been killed between writing trainer.pt and model.safetensors.
            save_checkpoint(run, model, optimizer, first_step, log)
    return first_step, log


def print_start(run, config, model, corpus, windows, first_step, micro_batch_size, compiled):
    parameters = sum(p.numel() for p in model.parameters())
    blocks = ", blocks compiled" if compiled else ""
    begins = f"resumed at step {first_step} of {config.steps}" if first_step else "a new training"
    print(corpus.source)
    print(f"{windows.count:,} windows of {windows.block_size} tokens")
    print(f"{parameters:,} parameters, {config.precision}")
    print(f"{config.batch_size} windows per step, {micro_batch_size} at a time{blocks}")
    print(f"{run}: {begins}", flush=True)


class Signalled(Exception):
    """A signal asked the training to stop."""


def stop_if_signalled(signals):
    """Stop the training if a signal came, to this process or another one. All processes must call this
    together, since they tell each other.

    Args:
        signals: the list that defer_signals fills.

    Raises:
        Signalled: one came.
    """
    if any(gather(bool(signals))):
        raise Signalled


def load_batch(windows, step, config, device):
    """The windows of a training step that this process trains on. -> (batch_size / world_size, T+1)"""
    batch = windows.share_of_batch(step, config.batch_size, *rank_and_world_size())
    if device.type == "cuda":
        batch = batch.pin_memory()  # so that the copy need not wait for the previous step
    return batch.to(device, non_blocking=True)


def draw_refinements(step, seed, limits):
    """R of a training step, uniform between the limits: the same in every process and after a resume."""
    low, high = limits
    return int(np.random.default_rng((seed, step)).integers(low, high + 1))


def price_at(step, config):
    """The price of a pondering step. It may begin late: a router that starts with a flat --router-offset, and
    has to pay at once, never learns to ponder."""
    return config.step_price if step >= config.price_from * config.steps else 0.0


def accumulate_gradients(loss_module, micro_batches, R, price, tau, signals):
    """Add up the gradients of this process's share of a batch, one micro-batch at a time.

    Args:
        micro_batches: a list of windows (n, T+1); the last one may be smaller than the others.
        signals: as in stop_if_signalled, which is called between micro-batches.

    Returns:
        The mean of each metric over the share, in tensors that stay on the device, so that nothing waits
        for it.
    """
    share = sum(len(micro_batch) for micro_batch in micro_batches)
    metrics = dict.fromkeys(("loss", "ce", "penalty", "K_hat", "relaxed"), 0.0)
    for i, micro_batch in enumerate(micro_batches):
        if i > 0:
            stop_if_signalled(signals)
        # DistributedDataParallel averages gradients over the processes in backward(). Once per step is
        # enough. (Without DistributedDataParallel, this attribute has no effect.)
        loss_module.require_backward_grad_sync = i == len(micro_batches) - 1
        loss, penalty, out = loss_module(micro_batch, R, price)
        weight = len(micro_batch) / share
        (loss * weight).backward()

        values = {
            "loss": loss,
            "ce": out.loss,
            "penalty": penalty,
            "K_hat": stop_step(out.log_w, tau).float().mean(),
            "relaxed": relaxed_steps(out.log_w).mean(),
        }
        for name, value in values.items():
            metrics[name] = metrics[name] + value.detach() * weight
    return metrics


def mean_over_processes(metrics):
    """Metrics on the device -> numbers, averaged over the processes. This waits for the device, and for the
    other processes."""
    stacked = torch.stack(list(metrics.values())).cpu()  # one copy for all of them
    per_process = gather(stacked)
    means = sum(per_process) / len(per_process)
    return dict(zip(metrics, means.tolist(), strict=True))


class Clock:
    """The speed of a training, and the time that is left.

    The speed is that of the training steps since the last log line, without those in which blocks were
    compiled. The time left includes the evaluations and checkpoints to come, as long as the last ones
    took.
    """

    def __init__(self, config, now=time.monotonic):
        """
        Args:
            config: a TrainConfig.
            now: a function that returns the time in seconds.
        """
        self.config = config
        self.now = now
        self.graphs = compiled_graphs()  # as of the last step
        self.step_began = now()
        self.steps = 0  # number of training steps since the last log line
        self.step_seconds = 0.0  # time that these steps took
        self.seconds_per_step = None  # as of the last log line; None: all steps so far have compiled
        self.seconds = {"evaluation": 0.0, "saving": 0.0}  # time that the last of each took

    def end_step(self):
        """Count a training step, which took the time since the last call, less what was measured since."""
        now = self.now()
        graphs = compiled_graphs()
        if graphs == self.graphs:
            self.steps += 1
            self.step_seconds += now - self.step_began
        self.graphs = graphs
        self.step_began = now

    @contextmanager
    def measure(self, name):
        """Measure an "evaluation" or a "saving", whose time is no step's."""
        began = self.now()
        yield
        self.seconds[name] = self.now() - began
        self.step_began = self.now()
        self.graphs = compiled_graphs()  # an evaluation may have compiled some

    def finish_interval(self):
        """End the interval since the last log line, after its metrics have come from the device.

        Returns:
            Seconds per training step in the last interval that had one without compiling, or None if there
            was none yet.
        """
        if self.steps > 0:
            # A GPU computes behind the CPU's back; the wait for the metrics belongs to the steps.
            waited = self.now() - self.step_began
            self.seconds_per_step = (self.step_seconds + waited) / self.steps
            self.steps = 0
            self.step_seconds = 0.0
        self.step_began = self.now()
        return self.seconds_per_step

    def seconds_left(self, done):
        """Seconds that the rest of the training takes, after `done` training steps."""
        config = self.config
        steps_left = config.steps - done
        checkpoints = math.ceil(config.steps / config.eval_every)
        checkpoints_done = (done - 1) // config.eval_every  # one at step `done` comes after this log line
        checkpoints_left = checkpoints - checkpoints_done
        # The final evaluation scores more windows, in three ways.
        final_evaluation = 3 * self.seconds["evaluation"] * config.eval_windows / CHECKPOINT_WINDOWS
        return (
            steps_left * self.seconds_per_step
            + checkpoints_left * (self.seconds["evaluation"] + self.seconds["saving"])
            + final_evaluation
        )


def compiled_graphs():
    """How many graphs torch.compile has made so far."""
    if "torch._dynamo" not in sys.modules:  # it takes long to import
        return 0
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def log_step(run, done, metrics, clock, config, model_config):
    """Print a line of progress. -> the row of log.jsonl. All processes must call this together."""
    means = mean_over_processes(metrics)
    check_finite(run, done, **means)
    seconds_per_step = clock.finish_interval()
    if seconds_per_step is None:
        speed = None
        timing = "compiling"
    else:
        speed = config.batch_size * model_config.block_size / seconds_per_step  # tokens per second
        timing = f"{speed:,.0f} tok/s  left {as_time(clock.seconds_left(done))}"
    print(
        f"step {done}/{config.steps}  loss {means['loss']:.3f}  ce {means['ce']:.3f}  "
        f"K-hat {means['K_hat']:.2f}  {timing}",
        flush=True,
    )
    return {"step": done, **means, "tokens_per_second": speed}


def as_time(seconds):
    """3725 -> 1:02:05, and 125 -> 2:05."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def log_validation(run, done, model, windows, config):
    """Score some validation windows and print their loss. -> the row of log.jsonl. All processes must call
    this together, since each scores some of the windows."""
    count = min(CHECKPOINT_WINDOWS, windows.count)
    loss = evaluate(model, windows, count, R=max(model.config.refinements))["loss"]
    check_finite(run, done, validation=loss)
    print(f"step {done}/{config.steps}  validation {loss:.3f}, {count} windows", flush=True)
    return {"step": done, "val": loss}


# -- Evaluation ------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model, windows, count, R=None, tau=None, first=0, signals=()):
    """Score validation windows, in float32. Several processes share the work.

    Args:
        windows: the Windows to choose from.
        count: number of windows to score.
        R, tau: as in PonderLM.forward.
        first: index of the first window.
        signals: as in stop_if_signalled. Once it is not empty, the evaluation is given up.

    Returns:
        Means over all tokens, a dict: `loss` in nats; `steps`, the mean of K-hat at tau (at TAU if tau is
        None); and lists over the depths k = 0 .. K: `stopped`, the fraction of tokens whose K-hat is k, and
        `weight`, the mean of s_k.

    Raises:
        Signalled: the evaluation was given up.
    """
    was_training = model.training
    backend = model.backend
    model.eval()
    model.backend = auto  # fa2 does not take float32
    device = next(model.parameters()).device
    rank, world_size = rank_and_world_size()
    size = eval_batch_size(windows.block_size, model.config.vocab_size, device)
    depths = model.config.ponder_steps + 1

    loss_sum = torch.zeros(1, dtype=torch.float64)
    stopped_sums = torch.zeros(depths, dtype=torch.float64)  # tokens whose K-hat is k
    weight_sums = torch.zeros(depths, dtype=torch.float64)  # sums of s_k
    end = first + count
    for i in range(first + rank * size, end, world_size * size):
        if signals:  # this process got one
            break  # and asks the others below: here, one with fewer batches would not be asked any more
        batch = windows.stack(i, min(i + size, end)).to(device)
        out = model(batch[:, :-1], batch[:, 1:], R=R, tau=tau)
        steps = stop_step(out.log_w, TAU) if tau is None else out.steps
        loss_sum += out.ce.sum().cpu()
        stopped_sums += nn.functional.one_hot(steps, depths).sum((0, 1)).cpu()
        weight_sums += out.s.sum((0, 1)).cpu()
    model.train(was_training)
    model.backend = backend

    stop_if_signalled(signals)
    sums = torch.cat([loss_sum, stopped_sums, weight_sums])
    means = sum(gather(sums)) / (count * windows.block_size)
    loss, stopped, weight = means.split([1, depths, depths])
    mean_steps = sum(k * fraction for k, fraction in enumerate(stopped.tolist()))
    return {"loss": loss.item(), "steps": mean_steps, "stopped": stopped.tolist(), "weight": weight.tolist()}


def final_report(model, windows, config, signals=()):
    """Print the final losses. -> what results.json stores

    The model is scored in three ways: as it was trained; at the fixed point of the Jacobi iteration; and
    at the fixed point with early exit, which is what decoding computes.
    """
    R = max(model.config.refinements)
    count = min(config.eval_windows, windows.count)
    results = {"R": R, "windows": count}
    print(f"validation loss in nats per token, {count} windows of {windows.block_size} tokens")
    for name, title, refinements, tau in (
        ("trained", f"as trained, R = {R}", R, None),
        ("fixed", "at the fixed point", None, None),
        ("hard", f"hard-stopped at tau = {config.tau:g}", None, config.tau),
    ):
        print(f"  {title:30}", end="", flush=True)  # before it is computed, which takes a while
        results[name] = evaluate(model, windows, count, refinements, tau, signals=signals)
        print(f"{results[name]['loss']:8.4f}", flush=True)

    hard = results["hard"]
    depths = range(len(hard["weight"]))
    print(f"executed steps per token: {hard['steps']:.2f} of {model.config.ponder_steps}")
    print(f"  {'depth':30}" + "".join(f"{k:8d}" for k in depths))
    print(f"  {'mean of s':30}" + "".join(f"{x:8.3f}" for x in hard["weight"]))
    print(f"  {'tokens that stop there':30}" + "".join(f"{x:8.3f}" for x in hard["stopped"]))
    return results


# -- The command -----------------------------------------------------------------------------------


def main(parse=parse, train=train):
    _, report = train(*parse())
    if dist.is_initialized():
        dist.destroy_process_group()
    if report is None:
        sys.exit(130)  # interrupted: exit non-zero, so that a calling script stops here


if __name__ == "__main__":
    command_line(main)
