"""Checkpoints: a training survives whatever stops it.

step-00000250/                   in the folder of a run (run.py)
  config.json, model.safetensors, tokenizer.json    a model as any other (weights.py)
  trainer.pt                     optimizer, random state, step

A checkpoint is written under another name, brought to the disk and then renamed: it is complete or
not there. Batches are a function of the step, so that the step is all there is to know of the data.
Only JSON, safetensors and weights_only pickles are read: no file of a run can run code.
"""

import json
import math
import os
import shutil
import signal

import torch
from safetensors import SafetensorError

from run import cannot_write, checkpoints, read_lines, resume_command, step_of, sync, write_text


def best_checkpoint(run):
    """The one with the lowest validation loss of those that are left, or None."""
    losses = {row["step"]: row["val"] for row in read_lines(run / "log.jsonl") if "val" in row}
    scored = [path for path in checkpoints(run) if step_of(path) in losses]
    return min(scored, key=lambda path: losses[step_of(path)], default=None)


def save_checkpoint(run, model, optimizer, step, seconds):
    """Write run/step-<step>/, let the run's own files be its, keep the newest two and the best.

    Raises:
        OSError: the disk is full or gone. What was there before still is.
        ValueError: weights that are not finite.
    """
    if not all(p.isfinite().all() for p in model.parameters()):
        raise ValueError(f"the weights of step {step} are not finite: {way_back(run)}")
    half, final = run / f"step-{step:08d}.tmp", run / f"step-{step:08d}"
    trainer = {
        "step": step,
        "seconds": seconds,  # of training so far
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if on_cuda(optimizer) else None,
    }
    try:
        for old in run.glob("step-*.tmp"):
            shutil.rmtree(old)
        half.mkdir()
        model.save_pretrained(half, exact=True)
        shutil.copyfile(run / "tokenizer.json", half / "tokenizer.json")
        torch.save(trainer, half / "trainer.pt")
        for path in (*half.iterdir(), half):
            sync(path)
        os.replace(half, final)
        publish(final)
        for path in checkpoints(run)[:-2]:
            if path != best_checkpoint(run):
                shutil.rmtree(path.rename(path.with_suffix(".tmp")))  # never half a checkpoint
    except (OSError, RuntimeError, SafetensorError) as error:  # what torch and safetensors raise
        shutil.rmtree(half, ignore_errors=True)
        raise cannot_write(run, error) from None


def on_cuda(optimizer):
    return optimizer.param_groups[0]["params"][0].is_cuda


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
    sync(run)


def unreadable(checkpoint, error):
    way_out = f"delete {checkpoint} to go on from the checkpoint before"
    return ValueError(f"{error}; {way_out}")


def read_trainer(checkpoint, optimizer):
    """Restore the optimizer and the random state -> steps done, seconds of training.

    Raises:
        ValueError: trainer.pt is missing, damaged, from another model, or has code in it, which is
            not run.
    """
    file = checkpoint / "trainer.pt"
    try:
        trainer = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a foreign file fails in any way
        reason = str(error).splitlines()[0] if str(error) else "it is empty"
        raise unreadable(checkpoint, f"{file} cannot be read as data: {reason}") from None
    try:
        if trainer["step"] != step_of(checkpoint):
            raise ValueError(f"it is of step {trainer['step']}")
        state, now = trainer["optimizer"]["state"], optimizer.state_dict()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if state.keys() != set(range(len(parameters))):
            raise ValueError(f"it has {len(state)} states for {len(parameters)} parameters")
        for i, p in enumerate(parameters):  # shapes, which torch trusts
            expected = {"step": torch.Size(), "exp_avg": p.shape, "exp_avg_sq": p.shape}
            found = {name: value.shape for name, value in state[i].items()}
            if found != expected:
                raise ValueError(f"parameter {i} has {found}, not {expected}")
        optimizer.load_state_dict(now | {"state": state})  # the settings are this training's
        torch.set_rng_state(trainer["random"])
        if on_cuda(optimizer) and trainer["random_cuda"] is not None:  # else it moved to a GPU
            torch.cuda.set_rng_state(trainer["random_cuda"])
        return trainer["step"], float(trainer["seconds"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise unreadable(checkpoint, f"{file} is not of this model: {error!r}") from None


def begin_log(run, step, changed, machine):
    """Take back what was logged after `step`, and a line cut short, and what is about to be made
    anew; then log the start."""
    rows = [row for row in read_lines(run / "log.jsonl") if row["step"] <= step] if step else []
    rows.append({"step": step, "changed": changed, **machine})
    write_text(run / "log.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    for name in ("results.json", "loss.png"):
        (run / name).unlink(missing_ok=True)


def check_finite(run, step, **values):
    """Stop a training that has left the numbers.

    Raises:
        ValueError: one of the values is infinite or nan; with the way back.
    """
    if not all(math.isfinite(value) for value in values.values()):
        values = ", ".join(f"{name} {float(value):.4g}" for name, value in values.items())
        raise ValueError(f"step {step} is not finite ({values}): {way_back(run)}")


def way_back(run):
    if not checkpoints(run):
        return "there is no checkpoint yet, so start again with a lower --learning-rate"
    return (
        f"the last checkpoint is {checkpoints(run)[-1]}; to go on from it: {resume_command(run)} "
        "--learning-rate LOWER; if that ends here again, delete it to take the one before"
    )


# -- Stopping --------------------------------------------------------------------------------------


class Stopped(Exception):
    """The training was asked to stop, and all of it is saved."""


class StopSignal:
    """Within `with StopSignal() as stop`, SIGINT and SIGTERM only set `stop.received`.

    After `stop.at_once(True)`, when there is nothing left to lose, they raise Stopped. The same
    signal a second time ends the process.
    """

    def __enter__(self):
        self.received = self.saved = False
        self.before = {s: signal.signal(s, self.handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def handle(self, number, frame):
        self.received = True
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"\nstopping after this step; once more to exit at once\n")
        self.at_once(self.saved)

    def at_once(self, saved):
        """Whether all is saved, so that a signal, also one that came before, may stop it now."""
        self.saved = saved
        if saved and self.received:
            raise Stopped

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)
