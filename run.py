"""A run is a folder, out/<name>/: what is in it, and how it is found and opened.

train.json                       every setting of the training, and its corpus
tokenizer.json                   the vocabulary (tokenizer.py)
log.jsonl, loss.png              one line a logged step; the same drawn
step-00000250/                   a checkpoint, see checkpoint.py
config.json, model.safetensors   those of the newest checkpoint, which is what other scripts read
results.json                     the final evaluation
"""

import fcntl
import json
import math
import os
import shlex
import shutil
import time
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path

from weights import from_json, is_model, locate

# -- Files -----------------------------------------------------------------------------------------


def sync(path):
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(file, text):
    """Replace a file by a new text, or leave it as it was."""
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, file)


def write_json(file, fields):
    write_text(file, json.dumps(fields, indent=2) + "\n")


def cannot_write(run, error):
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    if getattr(error, "filename", None):
        reason += f": {error.filename}"
    if run.exists():  # torch and safetensors do not say that the disk is full
        reason += f" ({shutil.disk_usage(run).free / 2**20:,.0f} MiB free)"
    saved = checkpoints(run)
    return OSError(
        f"cannot write to {run}: {reason}. Saved there is "
        + (f"step {step_of(saved[-1])}" if saved else "no checkpoint yet")
        + f"; make room, or bring back what is missing, then: {resume_command(run)}"
    )


def append_line(file, fields):
    """One JSON object as one more line of a run's log."""
    try:
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(fields) + "\n")
    except OSError as error:
        raise cannot_write(file.parent, error) from None


def read_lines(file):
    """What append_line wrote; [] without a file, and without a last line that was cut short."""
    if not file.exists():
        return []
    try:
        *lines, _ = file.read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines]
        if all(isinstance(row["step"], int) for row in rows):
            return rows
        raise ValueError("a step that is no number")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} has a line that is none of a log: {error!r}; remove it") from None


# -- Runs ------------------------------------------------------------------------------------------


def find_run(run=None, out="out"):
    """The directory of a run, a checkpoint or another model: as given, or the newest run in `out`.

    Raises:
        FileNotFoundError: there is none that has a model.
    """
    if run is not None:
        place = locate(run)
        if not is_model(place):
            raise FileNotFoundError(
                f"{run} holds no model.safetensors; give the directory of a model, or train one: "
                "python train.py"
            )
        return place
    return newest(out, "model.safetensors")


def newest(out, file):
    runs = sorted(Path(out).glob(f"*/{file}"), key=lambda f: f.stat().st_mtime)
    if not runs:
        raise FileNotFoundError(f"no run with {file} in {out}/; train one first: python train.py")
    return runs[-1].parent


def checkpoints(run):
    """The complete checkpoints of a run, oldest first."""
    return sorted(Path(run).glob("step-" + 8 * "[0-9]"))


def step_of(checkpoint):
    return int(checkpoint.name.removeprefix("step-"))


def new_run(out, name, prefix):
    """Create out/<name>, or out/<prefix>-<date and time> without a name.

    Raises:
        FileExistsError: there is such a run already, with a model.
        ValueError: a name that is no name of a folder.
    """
    if name and (Path(name).name != name or name == ".."):
        raise ValueError(f"--name {name!r} is no plain name; another place is for --out to say")
    run = Path(out) / (name or f"{prefix}-{time.strftime('%m%d-%H%M%S')}")
    if checkpoints(run) or (run / "model.safetensors").exists():
        raise FileExistsError(f"{run} exists: go on with --resume, or choose another --name")
    run.mkdir(parents=True, exist_ok=bool(name))
    return run


@contextmanager
def locked(run):
    """Keep a run for this process. The lock ends with the process, however that ends."""
    folder = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise ValueError(f"another process is training {run}; stop that one first") from None
    try:
        yield
    finally:
        os.close(folder)


def read_settings(kind, out, name=None):
    """The run to go on with, out/<name> or the newest in `out` -> directory, config and corpus.

    Raises:
        FileNotFoundError, ValueError: no such run, or its train.json is damaged.
    """
    run = Path(out) / name if name else newest(out, "train.json")
    file = run / "train.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: nothing to resume; train without --resume")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        return run, from_json(kind, settings["config"]), dict(settings["corpus"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} does not hold the settings of a run: {error}") from None


def read_results(run):
    """The final evaluation of a run, as validation.final_report returned it.

    Raises:
        FileNotFoundError, ValueError: it is not trained to the end, or the file is damaged.
    """
    file = Path(run) / "results.json"
    if not file.is_file():
        way_out = "a finished run is needed, not one of its checkpoints"
        raise FileNotFoundError(f"{file} does not exist; {way_out}")
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        losses = [results[key]["loss"] for key in ("trained", "fixed", "hard", "permuted")]
        steps, R = results["hard"]["steps"], results["iters"]
        if not (all(map(math.isfinite, losses)) and 0 <= steps < math.inf and R >= 0):
            raise ValueError(f"losses {losses}, steps {steps}, iters {R}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error!r}; --resume writes it again") from None
    return results


def changes(before, now):
    """The settings that differ: {name: (before, now)}; not the name of the run and its place."""
    found = {}
    for name in sorted(vars(before).keys() - {"name", "out", "resume"}):
        a, b = getattr(before, name), getattr(now, name)
        found |= changes(a, b) if is_dataclass(a) else {name: (a, b)} if a != b else {}
    return found


def open_run(config, corpus, may_change):
    """A new run, or with config.resume an old one.

    Returns:
        Its directory, the checkpoint to go on from (or None), and {name: (before, now)} of the
        settings that changed.

    Raises:
        ValueError: a change that is not in `may_change`; nothing is touched then.
    """
    if not config.resume:
        return new_run(config.out, config.name, config.preset), None, {}
    run, before, corpus_before = read_settings(type(config), config.out, config.name)
    changed = changes(before, config)
    if corpus != corpus_before:
        changed["corpus"] = corpus_before, corpus
    refused = [f"{k}: {a} -> {b}" for k, (a, b) in changed.items() if k not in may_change]
    if refused:
        raise ValueError(
            f"{run} was trained with other settings; leave them as they were, or train anew "
            f"without --resume. Changed: {'; '.join(refused)}"
        )
    return run, checkpoints(run)[-1] if checkpoints(run) else None, changed


def resume_command(run):
    out = [] if str(run.parent) == "out" else ["--out", str(run.parent)]
    return shlex.join(["python", "train.py", "--resume", *out, "--name", run.name])


def draw_losses(run):
    """log.jsonl -> loss.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    log = read_lines(run / "log.jsonl")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, names, unit in (
        (left, ("ce", "val"), "cross-entropy, nats per token"),
        (right, ("steps",), "executed steps per token"),
    ):
        for name in names:
            points = [(row["step"], row[name]) for row in log if name in row]
            marker = "o" if name == "val" else None
            axis.plot(
                *zip(*points, strict=True),
                label={"ce": "train", "val": "validation"}.get(name),
                marker=marker,
            )
        axis.set(xlabel="optimizer step", ylabel=unit)
        axis.grid(alpha=0.3)
    left.legend()
    figure.savefig(run / "loss.png", dpi=150)
    plt.close(figure)
