"""A run on disk: out/<name>/ with the model, its tokenizer, the training config and the log.

config.json, model.safetensors   the model (weights.py)
tokenizer.json                   its vocabulary (tokenizer.py)
train.json                       every setting of the training, and what it ran on
log.jsonl, loss.png              one line a logged step; the same drawn
results.json                     the final evaluation
"""

import json
import time
from pathlib import Path


def new_run(out, name, prefix):
    """Create out/<name>, or out/<prefix>-<date and time> without a name.

    What a run that saved no model left behind is removed.

    Raises:
        FileExistsError: there is such a run already.
    """
    run = Path(out) / (name or f"{prefix}-{time.strftime('%m%d-%H%M%S')}")
    if (run / "model.safetensors").exists():
        raise FileExistsError(f"{run} exists: delete it, or choose another --name")
    run.mkdir(parents=True, exist_ok=True)
    (run / "log.jsonl").unlink(missing_ok=True)
    return run


def find_run(run=None, out="out"):
    """The directory of a run: as given, or the newest in `out` that has a model.

    Raises:
        FileNotFoundError: there is none.
    """
    if run is not None:
        if not (Path(run) / "model.safetensors").is_file():
            raise FileNotFoundError(f"{run} holds no model.safetensors; train one: python train.py")
        return Path(run)
    runs = sorted(Path(out).glob("*/model.safetensors"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise FileNotFoundError(f"no trained model in {out}/; train one first: python train.py")
    return runs[-1].parent


def write_json(file, fields):
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def append_line(file, fields):
    """One JSON object as one line, on disk as soon as this returns."""
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(fields) + "\n")


def read_lines(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


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
