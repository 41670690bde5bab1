"""A run is a folder, out/<name>/. It survives whatever stops the training.

train.json                       every setting of the training, and its corpus
tokenizer.json                   the vocabulary (corpus/tokenizers.py)
log.jsonl                        one line a logged step
step-00000250/                   a checkpoint:
  config.json, model.safetensors, tokenizer.json    a model as any other (interop)
  trainer.pt                     optimizer, random state, step
config.json, model.safetensors   those of the newest checkpoint, which is what other commands read
results.json                     the final evaluation

A checkpoint is written under another name, brought to the disk and then renamed: it is complete or
not there. Batches are a function of the step, so that the step is all there is to know of the data.
Only JSON, safetensors and weights_only pickles are read: no file of a run can run code.
"""

import json
import math
import os
import shlex
import shutil
import signal
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, NotRequired

import filelock
import torch
from pydantic import Field, with_config
from pydantic_core import from_json
from typing_extensions import TypedDict

from interop import is_model, save
from runtime import (
    UserError,
    check_json,
    clock,
    commit,
    read_bytes,
    read_json,
    reduce,
    sync,
    write_json,
    write_text,
    writing,
)

# -- Runs ------------------------------------------------------------------------------------------


def checkpoints(run):
    """The complete checkpoints of a run, oldest first."""
    return sorted(Path(run).glob("step-" + 8 * "[0-9]"))


def step_of(checkpoint):
    return int(checkpoint.name.removeprefix("step-"))


def check_free(run):
    """Refuse a folder that has anything but a training that ended before its first checkpoint."""
    names = {file.name for file in run.glob("*")} - {".lock"}
    others = "train.json" not in names and any(not name.endswith(".tmp") for name in names)
    if others or checkpoints(run) or is_model(run):
        raise UserError(f"{run} exists: go on with --resume, or choose another --name")


def new_run(out, name, prefix):
    """Create out/<name>, or without a name out/<prefix>-<date and time>.

    Raises:
        UserError: such a run exists already, with a model; or the name is not one of a folder.
    """
    if name and (Path(name).name != name or name == ".."):
        raise UserError(f"--name {name!r} is not a plain name; --out says where the run goes")
    fresh = f"{prefix}-{time.strftime('%m%d-%H%M%S')}"
    same_second = len(list(Path(out).glob(f"{fresh}*")))
    run = Path(out) / (name or (f"{fresh}-{same_second + 1}" if same_second else fresh))
    check_free(run)
    run.mkdir(parents=True, exist_ok=bool(name))
    return run


@contextmanager
def locked(run):
    """Keep a run for this process. The lock ends with the process, however that ends."""
    try:
        with filelock.FileLock(run / ".lock", blocking=False):
            yield
    except filelock.Timeout:
        raise UserError(f"another process is training {run}; stop that one first") from None


def changes(before, now):
    """The settings that differ: {name: (before, now)}; not the name of the run and its place."""
    found = {}
    for name in sorted(vars(before).keys() - {"name", "out", "resume"}):
        a, b = getattr(before, name), getattr(now, name)
        found |= changes(a, b) if is_dataclass(a) else {name: (a, b)} if a != b else {}
    return found


def resume_command(run):
    out = [] if str(run.parent) == "out" else ["--out", str(run.parent)]
    return shlex.join(["python", "train.py", "--resume", *out, "--name", run.name])


# -- Its files -------------------------------------------------------------------------------------


Number = Annotated[int, Field(ge=0, lt=2**31)]


@with_config(extra="allow")
class Line(TypedDict):
    """A line of log.jsonl, as far as it is read again."""

    step: Number
    ce: NotRequired[float]
    K_hat: NotRequired[float]
    val: NotRequired[float]
    commit: NotRequired[str | None]


Finite = Annotated[float, Field(allow_inf_nan=False)]


class Scores(TypedDict):
    """What training.validation.evaluate returns."""

    loss: Finite
    steps: Annotated[Finite, Field(ge=0)]
    truncated: list[Finite]
    weight: list[Finite]
    alone: list[Finite]
    stopped: list[Finite]


class Chosen(Scores):
    tau: Annotated[Finite, Field(ge=0, le=1)]


class Results(TypedDict):
    """What results.json holds."""

    trained: Scores
    fixed: Scores
    hard: Scores
    permuted: Scores
    chosen: Chosen | None  # at the tau that training chose; None without a router
    R: Number
    unigram_entropy: Finite


def append_line(file, fields):
    """One JSON object as one more line of a run's log."""
    try:
        with writing(file), open(file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(fields) + "\n")
    except OSError as error:
        raise cannot_write(file.parent, error) from None


def read_lines(file):
    """What append_line wrote; [] without a file, and without a last line that was cut short."""
    if not file.exists():
        return []
    try:
        *lines, _ = read_bytes(file).split(b"\n")
        return check_json([from_json(line) for line in lines], list[Line])
    except (ValueError, UserError) as error:
        raise UserError(f"{file} has a line that is not of a log: {error}; remove it") from None


def read_results(run):
    """The final evaluation of a run, as validation.final_report returned it.

    Raises:
        UserError: it is not trained to the end, or the file is damaged.
    """
    file = Path(run) / "results.json"
    if not file.is_file():
        way_out = "a finished run is needed, not one of its checkpoints"
        raise UserError(f"{file} does not exist; {way_out}")
    return read_json(file, Results, "; --resume writes it again")


# -- Checkpoints -----------------------------------------------------------------------------------


def cannot_write(run, error):
    """What to do about an OSError of `runtime.writing`."""
    saved = checkpoints(run)
    return UserError(
        f"cannot write to {run}: {error.strerror}: {error.filename}. Saved there is "
        + (f"step {step_of(saved[-1])}" if saved else "no checkpoint yet")
        + f"; make room, or bring back what is missing, then: {resume_command(run)}"
    )


def best_checkpoint(run):
    """The one with the lowest validation loss of those that are left, or None."""
    losses = {row["step"]: row["val"] for row in read_lines(run / "log.jsonl") if "val" in row}
    scored = [path for path in checkpoints(run) if step_of(path) in losses]
    return min(scored, key=lambda path: losses[step_of(path)], default=None)


def save_checkpoint(run, model, optimizer, step, seconds):
    """Write run/step-<step>/, let the run's own files be its, keep the newest two and the best.

    Raises:
        UserError: the disk is full or gone (what was there before still is), or weights that are
            not finite.
    """
    if not all(p.isfinite().all() for p in model.parameters()):
        raise UserError(f"the weights of step {step} are not finite: {way_back(run)}")
    half, final = run / f"step-{step:08d}.tmp", run / f"step-{step:08d}"
    trainer = {
        "step": step,
        "seconds": seconds,  # of training so far
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if model.lm_head.weight.is_cuda else None,
    }
    try:
        for old in run.glob("step-*.tmp"):
            shutil.rmtree(old)
        half.mkdir()
        save(model, half, exact=True)
        shutil.copyfile(run / "tokenizer.json", half / "tokenizer.json")
        with writing(half / "trainer.pt"):
            torch.save(trainer, half / "trainer.pt")
        for path in (*half.iterdir(), half):
            sync(path)
        os.replace(half, final)
        publish(final)
        for path in checkpoints(run)[:-2]:
            if path != best_checkpoint(run):
                shutil.rmtree(path.rename(path.with_suffix(".tmp")))  # never half a checkpoint
    except OSError as error:
        shutil.rmtree(half, ignore_errors=True)
        raise cannot_write(run, error) from None


def publish(checkpoint):
    """Let the run's own model be that of a checkpoint, without a copy where links are possible."""
    run = checkpoint.parent
    for name in ("config.json", "model.safetensors"):
        temporary = run / f"{name}.tmp"
        temporary.unlink(missing_ok=True)
        try:
            os.link(checkpoint / name, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(checkpoint / name, temporary)
        os.replace(temporary, run / name)
        temporary.unlink(missing_ok=True)  # it stays where both are names of one file
    sync(run)


def unreadable(checkpoint, error):
    way_out = f"to go on from the checkpoint before, move {checkpoint} out of {checkpoint.parent}"
    return UserError(f"{error}; {way_out}")


def read_trainer(checkpoint, optimizer):
    """Restore the optimizer and the random state -> steps done, seconds of training.

    Raises:
        UserError: trainer.pt is missing, damaged, from another model, or has code in it, which is
            not run.
    """
    file = checkpoint / "trainer.pt"
    try:
        trainer = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a foreign file fails in any way
        reason = str(error).splitlines()[0] if str(error) else "it is empty"
        raise unreadable(checkpoint, f"{file} cannot be read as data: {reason}") from None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        if trainer["step"] != step_of(checkpoint):
            raise ValueError(f"it is of step {trainer['step']}")
        state = checked_state(trainer["optimizer"]["state"], parameters if trainer["step"] else [])
        # The groups are this training's: a resumed one may have another learning rate.
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        torch.set_rng_state(trainer["random"])
        if parameters[0].is_cuda and trainer["random_cuda"] is not None:  # else it moved to a GPU
            torch.cuda.set_rng_state(trainer["random_cuda"])
        return trainer["step"], check_json(trainer["seconds"], Finite)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, UserError) as error:
        raise unreadable(checkpoint, f"{file} is not of this model: {error!r}") from None


def checked_state(state, parameters):
    """What AdamW knows of each parameter, if it is of these: torch trusts its shapes and types.

    Every tensor is copied to memory of its own. A view in a file may claim more than it has, and
    the optimizer's kernels write to all of it.

    Raises:
        ValueError: it is of other parameters.
    """
    if state.keys() != set(range(len(parameters))):
        raise ValueError(f"it has {len(state)} states for {len(parameters)} parameters")
    for i, p in enumerate(parameters):
        expected = {"step": torch.Size(), "exp_avg": p.shape, "exp_avg_sq": p.shape}
        found = {name: tensor.shape for name, tensor in state[i].items()}
        plain = all(x.layout == torch.strided and x.is_floating_point() for x in state[i].values())
        if found != expected or not plain:
            raise ValueError(f"parameter {i} has {state[i]!r:.80}, not numbers of {expected}")
    copy = lambda x: x.clone(memory_format=torch.contiguous_format)  # noqa: E731
    return {i: {name: copy(x) for name, x in of_one.items()} for i, of_one in state.items()}


def begin_log(run, step, changed, machine):
    """Take back what was logged after `step`, and a line cut short, and what is about to be made
    anew; then log the start."""
    rows = [row for row in read_lines(run / "log.jsonl") if row["step"] <= step] if step else []
    rows.append({"step": step, "changed": changed, **machine})
    write_text(run / "log.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    for file in (run / "results.json", *run.glob("*.tmp")):
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)


def check_finite(run, step, **values):
    """Stop a training that has left the numbers.

    Raises:
        UserError: one of the values is infinite or nan; with the way back.
    """
    if not all(math.isfinite(value) for value in values.values()):
        values = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        raise UserError(f"step {step} is not finite ({values}): {way_back(run)}")


def way_back(run):
    if not checkpoints(run):
        return "there is no checkpoint yet, so start again with a lower --learning-rate"
    return (
        f"the last checkpoint is {checkpoints(run)[-1]}; to go on from it: {resume_command(run)} "
        "--learning-rate LOWER; if that ends here again, move it away to take the one before"
    )


# -- A training that survives ----------------------------------------------------------------------

LONG = 600  # seconds of training that are worth the minute that compiling takes


class Stopped(Exception):
    """The training was asked to stop, and all of it is saved."""


class Session:
    """A run while it is trained: its lock, log and checkpoints, and signals that stop it.

        with Session(training, optimizer) as session:
            for step in session.steps():
                ..                              # the step
                session.log(step, numbers)      # scalars on the device
                if session.is_due(step):
                    session.log_validation(step, loss, windows)
                    session.save(step)
            session.finish(results)

    All of a step is a function of its number, the weights and the optimizer, so that a resumed
    training is the same one. A GPU is waited for only where a line is printed or a model saved. Of
    several processes only the first writes.

    SIGINT and SIGTERM let the step end and save it. The same signal a second time ends the process.
    """

    def __init__(self, training, optimizer):
        self.t, self.optimizer = training, optimizer
        self.run, self.config = training.run, training.config
        self.first, self.seconds = 0, 0.0  # steps done before, and what they took
        self.received = self.all_saved = False  # a signal; whether it may stop at once
        self.lock = nullcontext() if training.rank else locked(training.run)

    def __enter__(self):
        self.lock.__enter__()
        t = self.t
        if t.checkpoint and t.checkpoint != checkpoints(self.run)[-1]:
            raise UserError(f"another process has just trained {self.run}; begin again")
        if t.checkpoint:
            self.first, self.seconds = read_trainer(t.checkpoint, self.optimizer)
        self.before = self.seconds
        machine = {
            "torch": torch.__version__, "device": t.device.type, "processes": t.processes,
            "threads": self.config.threads, "commit": commit(),
        }  # fmt: skip
        if not t.rank:
            t.tokenizer.save(self.run / "tokenizer.json")
            write_json(self.run / "train.json", {"config": asdict(self.config), "corpus": t.corpus})
            begin_log(self.run, self.first, t.changed, machine)
            if t.checkpoint:
                publish(t.checkpoint)
        if self.config.init_from and not t.checkpoint:
            self.save(-1)  # from here on the first model is not needed any more
        size = sum(p.numel() for p in t.model.parameters())
        print(f"{self.run}: {size:,} parameters, {self.config.precision}, {self.config.backend}")
        if t.checkpoint:
            print(f"resumed at step {self.first}")
        print(f"{machine}")
        signals = signal.SIGINT, signal.SIGTERM
        self.handlers = {number: signal.signal(number, self.receive) for number in signals}
        return self

    def receive(self, number, frame):
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"\nstopping after this step; once more to exit at once\n")
        self.received = True
        if self.all_saved:
            raise Stopped

    def __exit__(self, kind, error, trace):
        self.lock.__exit__(kind, error, trace)
        if kind is Stopped:
            print(f"stopped; go on with: {resume_command(self.run)}", flush=True)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        return kind is Stopped

    def steps(self):
        """Yield the numbers of the steps that are left, from 0 on."""
        for step in range(self.first, self.config.steps):
            self.began = time.monotonic()
            yield step
            received = torch.tensor(int(self.received))
            if reduce(received, self.t.device):  # in any of the processes
                if not self.is_due(step):
                    self.save(step)
                raise Stopped
        self.all_saved = True

    def is_due(self, step):
        """Whether a checkpoint follows this step."""
        done = step + 1
        return done == self.config.steps or done % self.config.eval_every == 0

    def log(self, step, values):
        """Print and write {name: scalar on the device}, where a line is due.

        Raises:
            UserError: one of them is not finite.
        """
        done, config = step + 1, self.config
        is_logged = done % config.log_every == 0 or done == config.steps
        if is_logged:
            numbers = torch.stack([*values.values()]).cpu()  # only here a GPU is waited for
        self.seconds += time.monotonic() - self.began
        if not is_logged:
            return
        numbers = reduce(numbers, self.t.device) / self.t.processes
        row = dict(zip(values, numbers.tolist(), strict=True))
        check_finite(self.run, done, **row)
        a_step = (self.seconds - self.before) / (done - self.first)
        row["tokens_per_second"] = config.batch_size * config.model.block_size / a_step
        left = a_step * (config.steps - done)
        print(
            f"step {done}/{config.steps}  loss {row['loss']:.3f}  ce {row['ce']:.3f}  "
            f"penalty {row['penalty']:.4f}  K-hat {row['K_hat']:.2f}  "
            f"{row['tokens_per_second']:,.0f} tok/s  left {clock(left)}",
            flush=True,
        )
        if left > LONG and not config.compile and done - self.first <= config.log_every:
            again = f"{resume_command(self.run)} --compile"
            print(f"so long a training may be faster compiled: Ctrl-C, then {again}", flush=True)
        self.append({"step": done, **row})

    def append(self, row):
        if not self.t.rank:
            append_line(self.run / "log.jsonl", row)

    def log_validation(self, step, loss, windows):
        done = step + 1
        print(f"step {done}/{self.config.steps}  validation {loss:.3f} ({windows} windows)")
        check_finite(self.run, done, validation=loss)
        self.append({"step": done, "val": loss})

    def save(self, step):
        """A checkpoint after a step; that of -1 is the beginning."""
        if not self.t.rank:
            save_checkpoint(self.run, self.t.model, self.optimizer, step + 1, self.seconds)

    def finish(self, results):
        """Keep the final evaluation."""
        if not self.t.rank:
            write_json(self.run / "results.json", results)
        best = best_checkpoint(self.run)
        if best and best != checkpoints(self.run)[-1]:
            print(f"an earlier checkpoint had a better validation loss: {best}")
        ponders = f" --tau {self.config.tau:g} --show-steps" * bool(self.config.model.ponder_steps)
        print(f"next: python sample.py --run {shlex.quote(str(self.run))}{ponders}")
