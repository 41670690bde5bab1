"""What the rooms of the lab share: types of settings, errors in a line, JSON that is checked, devices."""

import re
import shutil
import timeit
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import pydantic
import torch
from pydantic import Field
from tqdm import tqdm

import model
from model import UserError, write_whole

# A dataclass that checks types and bounds: no "3" for 3, no unknown field.
strict_dataclass = pydantic.dataclasses.dataclass(config=dict(strict=True, extra="forbid"))

Count = Annotated[int, Field(ge=1, lt=2**31)]
Given = Annotated[str, Field(min_length=1)]

COMPILED = 64  # forms of one function that torch.compile may make, one for each shape; usually 8

progress = partial(tqdm, disable=None)  # a bar, where stderr is a terminal


def one_line(error):
    """A pydantic.ValidationError in one line: each field, its value and what is wrong with it."""
    lines = []
    for e in error.errors():
        name = ".".join(map(str, e["loc"]))
        message = e["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if e["type"] == "missing":
            lines.append(f"{name} is missing")
        else:
            lines.append(f"{name} = {e['input']!r:.80}: it {message}" if name else message)
    return "; ".join(lines[:3]) + "; .." * (len(lines) > 3)


def command_line(main):
    """As model.command_line, also for settings that pydantic refuses."""

    def checked():
        try:
            main()
        except pydantic.ValidationError as error:
            raise UserError(one_line(error)) from None

    model.command_line(checked)


# -- Files -----------------------------------------------------------------------------------------


@contextmanager
def writing(file):
    """An OSError within it names the file that is written, and the room that its disk has."""
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        place = next(path for path in Path(file).absolute().parents if path.exists())
        reason = f"{error.strerror} ({shutil.disk_usage(place).free / 2**20:,.0f} MiB free)"
        raise OSError(error.errno, reason, str(file)) from None


def write_bytes(file, content):
    """Replace a file by new content, or leave it as it was."""
    write_whole(Path(file), lambda part: part.write_bytes(content))


def read_json(file, kind=dict, way_out=""):
    """As model.read_json, of a `kind` that pydantic knows. UserError: with a way out."""
    try:
        content = model.read_json(file)
    except UserError as error:
        raise UserError(f"{error}{way_out}") from None
    try:
        return pydantic.TypeAdapter(kind).validate_python(content, strict=True)
    except pydantic.ValidationError as error:
        raise UserError(f"{file} is damaged: {one_line(error)}{way_out}") from None


def settings_of(run):
    """What train.json of a run says of its training, unchecked; {} where there is none."""
    file = Path(run, "train.json")
    config = model.read_json(file).get("config") if file.is_file() else None
    return config if isinstance(config, dict) else {}


def locate(name, files=("*.json", "*.safetensors")):
    """The directory of a model: a path, or a name on the Hugging Face Hub, whose `files` are
    fetched: by default all that is read here, which has no code and no pickles.

    Raises:
        UserError: neither; or a name of the Hub that cannot be fetched.
    """
    path = Path(name)
    if path.exists():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or path.parent.exists():
        raise UserError(f"{name} does not exist")
    where = f"{name} is not a directory here; as a model of the Hugging Face Hub it"
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(name), allow_patterns=list(files)))
    except ImportError:
        raise UserError(f"{where} needs a package: pip install huggingface_hub") from None
    except Exception as error:  # a download fails in any way
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"{where} cannot be fetched ({reason}); check the name, or give a directory"
        ) from None


# -- Precision -------------------------------------------------------------------------------------


def pick_precision(name, device):
    """'auto' -> bfloat16 where its matrix products are fast (on a CPU: measured), else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type != "cpu":
        return torch.float32

    def seconds(n, dtype):  # the best of several, on a machine that may do other things
        x = torch.ones(n, n, dtype=dtype)
        return min(timeit.repeat(lambda: x @ x, number=1, repeat=8))

    def is_faster(n, times):
        return times * seconds(n, torch.bfloat16) < seconds(n, torch.float32)

    # Where bfloat16 is emulated, large products take seconds: small ones tell it first.
    is_fast = is_faster(256, 0.3) and is_faster(1024, 1.3)
    return torch.bfloat16 if is_fast else torch.float32


def autocast(device, dtype):
    """The context in which a model computes in `dtype`; its weights stay in float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
