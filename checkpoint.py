"""Models and training runs on disk.

A model is a directory with config.json, model.safetensors and tokenizer.json. A run is such a directory with
files of its training beside them (see train.py); its trainer.pt is the checkpoint from which it resumes.
"""

import errno
import json
import math
import os
import shlex
import shutil
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import filelock
import pydantic
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common import UserError, atomic_write, one_line, refuse_lfs_pointer, user_error_if_unreadable
from hardware import pick_device
from model import Config, PonderLM
from tokenizer import load_tokenizer

FORMAT = "ponderlm-3"  # in config.json

# -- A model ---------------------------------------------------------------------------------------


def save(model, directory):
    """Write config.json and model.safetensors. They are replaced only after both have been written, so a full
    disk leaves both as they were.

    Raises:
        OSError, SafetensorError: the directory cannot be written.
    """
    tensors = {}
    for name, x in model.state_dict().items():
        name = name.replace("_orig_mod.", "")  # torch.compile puts this into names
        tensors[name] = x.cpu().contiguous()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    config = {"format": FORMAT, "method": model.method, **asdict(model.config)}

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights_file = directory / "model.safetensors.tmp"
    config_file = directory / "config.json.tmp"
    try:
        save_file(tensors, weights_file)
        config_file.write_text(json.dumps(config, indent=2) + "\n")
        # safetensors makes files that only their owner can read. Not all file systems can change that.
        with suppress(OSError):
            shutil.copymode(config_file, weights_file)
        for file in (weights_file, config_file):
            os.replace(file, file.with_suffix(""))
    finally:
        weights_file.unlink(missing_ok=True)
        config_file.unlink(missing_ok=True)


def load(directory):
    """Read the model that `save` wrote, in float32 and in evaluation mode.

    Raises:
        OSError, SafetensorError, ValueError, RuntimeError: files are missing, damaged, or of another kind
            of model.
    """
    config_file = Path(directory, "config.json")
    refuse_lfs_pointer(config_file)
    content = json.loads(config_file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("its config.json does not hold a JSON object")
    model_format = content.pop("format", None)
    method = content.pop("method", None)
    if model_format != FORMAT or method != PonderLM.method:
        raise ValueError(
            "its config.json does not describe a PonderLM-3 (python -m lab reads and converts other models)"
        )
    unknown = content.keys() - Config.__dataclass_fields__.keys()
    if unknown:  # of another backbone, for instance
        raise ValueError(
            f"its config.json has settings that the model here does not have, {', '.join(sorted(unknown))} "
            "(python -m lab reads and converts other models)"
        )
    weights_file = Path(directory, "model.safetensors")
    refuse_lfs_pointer(weights_file)
    with torch.device("meta"):  # shapes without memory, which the weights then fill
        model = PonderLM(from_json(Config, content))
    tensors = {name: x.float() for name, x in load_file(weights_file).items()}
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    model.tie_head()
    return model.eval()


def from_json(kind, content):
    """Make settings from what a JSON file holds of them.

    Args:
        kind: a validated_dataclass.
        content: a dict with all of its fields.

    Raises:
        ValueError: a field is missing, unknown or wrong.
    """
    missing = kind.__dataclass_fields__.keys() - content.keys()
    if missing:
        raise ValueError(f"the settings lack {', '.join(sorted(missing))}")
    # Through JSON, because the strict mode accepts a list as a tuple only where it parses the JSON itself.
    return pydantic.TypeAdapter(kind).validate_json(json.dumps(content))


def open_model(directory, device="auto"):
    """Load a model and its tokenizer.

    Args:
        directory: that of a model or a run.
        device: 'auto', 'cpu', 'cuda' or 'mps'.

    Returns:
        The model, in evaluation mode, and its Tokenizer.

    Raises:
        UserError: files are missing, damaged, or of another kind; or the device cannot be used.
    """
    with user_error_if_unreadable(directory, ": give the directory of a model, or train one"):
        model = load(directory)
    tokenizer = load_tokenizer(Path(directory, "tokenizer.json"))
    return model.to(pick_device(device)), tokenizer


def newest_run(out="out", default=None):
    """The run whose weights are the newest, out/NAME.

    Raises:
        UserError: there is no run and no default.
    """
    run = newest_with("model.safetensors", out)
    if run is None and default is None:
        raise UserError(f"there is no trained model in {out}/: train one with python train.py")
    return run or default


def newest_training(out="out"):
    """The run that was trained last, out/NAME. It may have ended before its first checkpoint.

    Raises:
        UserError: there is no run.
    """
    run = newest_with("log.jsonl", out)  # a training writes it from its beginning to its end
    if run is None:
        raise UserError(f"there is no training to resume in {out}/: begin one without --resume")
    return run


def newest_with(name, out):
    """The folder in `out` whose file `name` is the newest; None if no folder has one."""
    with user_error_if_unreadable(out):
        folders = list(Path(out).iterdir()) if Path(out).exists() else []
        files = [folder / name for folder in folders if (folder / name).exists()]
    if not files:
        return None
    return max(files, key=lambda file: file.stat().st_mtime).parent


# What flock says on file systems without locks, such as some NFS and Lustre: the last is Linux's ENOTSUPP.
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, 524}


# -- The folder of a run ---------------------------------------------------------------------------


def check_free(run):
    """Refuse a folder that holds a run. The folder of a training that ended before its first checkpoint is
    free.

    Raises:
        UserError: it holds one.
    """
    names = {file.name.removesuffix(".tmp") for file in run.glob("*")} - {".lock"}
    # A training writes these before its first checkpoint, in this order. If it ended in between, the folder
    # has only the first few of them.
    before_a_checkpoint = ["train.json", "tokenizer.json", "log.jsonl"]
    beginnings = [set(before_a_checkpoint[:n]) for n in range(len(before_a_checkpoint) + 1)]
    if names not in beginnings:
        raise UserError(f"{run} exists: resume it with --resume, or choose another --name")


def make_run_folder(out, name):
    """Make a new folder out/NAME. If that exists, because another training began in the same second, the
    name gets a number."""
    number = 1
    while True:
        run = Path(out, name if number == 1 else f"{name}-{number}")
        try:
            run.mkdir(parents=True)
            return run
        except FileExistsError:
            number += 1


@contextmanager
def locked(run, rank=0):
    """Keep a run for this training: its first process locks it. The lock ends with that process, however it
    ends.

    Raises:
        UserError: another process has the lock.
    """
    if rank > 0:
        yield
        return
    run.mkdir(parents=True, exist_ok=True)
    # Without flock, filelock would take any old .lock for one that is held.
    lock = filelock.FileLock(run / ".lock", blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise UserError(f"another process is training {run}: stop that one first") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"note: {run} cannot be locked ({one_line(error)}): do not train it in two processes at once")
    try:
        yield
    finally:
        lock.release()


def save_checkpoint(run, model, optimizer, step, log):
    """Replace the checkpoint, and then the files that others read. A kill between the two loses nothing.

    Args:
        step: number of training steps done.
        log: the rows of log.jsonl so far.

    Raises:
        UserError: the disk is full, or the weights are not finite. What was saved before is still there.
    """
    norm = torch.stack([p.detach().norm() for p in model.parameters()]).norm()
    check_finite(run, step, weights=norm.item())
    # There is no random state to keep, because batches and R are functions of the step.
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "log": log}
    atomic_write(run / "trainer.pt", lambda temporary: torch.save(content, temporary))
    try:
        save(model, run)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {run}: {one_line(error)}") from None
    write_log(run, log)


def write_log(run, log):
    lines = "".join(json.dumps(row) + "\n" for row in log)
    atomic_write(run / "log.jsonl", lambda temporary: temporary.write_text(lines))


def load_checkpoint(run, model, optimizer):
    """Restore what `save_checkpoint` kept. Code in a checkpoint is not run.

    Returns:
        The number of training steps done, and the rows of the log.

    Raises:
        UserError: trainer.pt is damaged, or of another model.
    """
    file = run / "trainer.pt"
    if not file.exists():  # the training ended before its first checkpoint
        return 0, []
    way_out = f"; its weights are in {run}/model.safetensors; start a new training with another --name"
    with user_error_if_unreadable(file, way_out):
        content = torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(content["model"])
        # Keep this optimizer's groups: they say whether it is fused, which depends on the device.
        state = optimizer.state_dict() | {"state": content["optimizer"]["state"]}
        optimizer.load_state_dict(state)
        return content["step"], content["log"]


def check_finite(run, step, **values):
    """
    Raises:
        UserError: one of the values is infinite or nan.
    """
    wrong = [f"{name} = {value:.4g}" for name, value in values.items() if not math.isfinite(value)]
    if wrong:
        raise UserError(
            f"training diverged at step {step}: {', '.join(wrong)}. Use a lower --learning-rate, or resume "
            f"from the last checkpoint, if one was saved, with {resume_flags(run)}"
        )


def resume_flags(run):
    """The flags that resume a run, as a shell takes them."""
    flags = ["--resume"]
    if str(run.parent) != "out":
        flags += ["--out", str(run.parent)]
    flags += ["--name", run.name]
    return shlex.join(flags)
