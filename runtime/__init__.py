"""Where and how a command runs: errors, files, devices, processes.

Everything may import it, and it imports nothing of the project. A helper belongs here only if
several rooms need it and it knows nothing of models, text or training.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import timeit
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pydantic
import pydantic_core
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from tqdm import tqdm

# -- Commands and their errors ---------------------------------------------------------------------


# A dataclass that checks types and bounds: no "3" for 3, no unknown field.
strict_dataclass = pydantic.dataclasses.dataclass(config=dict(strict=True, extra="forbid"))


class UserError(Exception):
    """What a user can mend: wrong input, a missing file, a full disk. It says what and how.

    A command ends with its one line. Every other error is a bug and keeps its traceback.
    """


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
    """Run a command: an error that the user can mend is one line, not a stack trace."""
    try:
        main()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except pydantic.ValidationError as error:
        sys.exit(f"error: {one_line(error)}")
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if not (error.filename and error.strerror):  # not about a file that the user named
            raise
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and "can't allocate memory" not in str(error):  # what torch says on a CPU
            raise
        sys.exit("error: there is not enough memory: ask for fewer or smaller things at once")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


progress = partial(tqdm, disable=None)  # a bar, where stderr is a terminal


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}"


def commit():
    """The commit of this code, with -dirty if it was changed since; None without git."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # no git here
        return None


# -- Files that are whole or not there -------------------------------------------------------------


def sync(path):
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(file):
    """An error within it names the file that is written, and the room that its disk has: torch,
    safetensors and a full disk say neither. OSError"""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if getattr(error, "filename", None):
            raise
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        place = next(path for path in Path(file).absolute().parents if path.exists())
        reason += f" ({shutil.disk_usage(place).free / 2**20:,.0f} MiB free)"
        number = getattr(error, "errno", None) or errno.EIO
        raise OSError(number, reason, str(file)) from None


def write_bytes(file, content):
    """Replace a file by new content, or leave it as it was."""
    temporary = file.with_name(file.name + ".tmp")
    try:
        with writing(file):
            temporary.write_bytes(content)
            sync(temporary)
            os.replace(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_text(file, text):
    write_bytes(file, text.encode())


def write_json(file, fields):
    write_text(file, json.dumps(fields, indent=2) + "\n")


def read_bytes(file):
    """A regular file, whole. FileNotFoundError also for a device, which may have no end."""
    if not (file := Path(file)).is_file():
        raise FileNotFoundError(errno.ENOENT, "no such file", str(file))
    return file.read_bytes()


def check_json(content, kind):
    """What JSON held, as a `kind` that pydantic knows. UserError: which field has what instead."""
    try:
        return pydantic.TypeAdapter(kind).validate_python(content, strict=True)
    except pydantic.ValidationError as error:
        raise UserError(one_line(error)) from None


def read_json(file, kind=dict, way_out=""):
    """A file with a JSON object, which is of a `kind` as `check_json` has it.

    Raises:
        OSError: it is no file, or one that may not be read.
        UserError: it holds something else; with a way out.
    """
    try:  # which refuses what is nested too deep, too
        content = pydantic_core.from_json(read_bytes(file))
        if not isinstance(content, dict):
            raise ValueError(f"it begins with {content!r:.20}")
    except ValueError as error:
        raise UserError(f"{file} is not a JSON object: {error}{way_out}") from None
    try:
        return check_json(content, kind)
    except UserError as error:
        raise UserError(f"{file} is damaged: {error}{way_out}") from None


# -- Models of others ------------------------------------------------------------------------------


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


# -- Devices and precision -------------------------------------------------------------------------


def pick_device(name="auto"):
    """'auto' -> CUDA, else MPS, else CPU; or a device by its name, as cuda:1.

    Raises:
        UserError: this machine has no such device.
    """
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    there = [*(kind for kind, is_there in found.items() if is_there), "cpu"]
    with suppress(RuntimeError):  # what torch raises for a name that it does not know
        device = torch.device(there[0] if name == "auto" else name)
        if device.type in there:
            if device.type == "cuda" and device.index is not None:
                if device.index >= (count := torch.cuda.device_count()):
                    raise UserError(f"device {name!r} is not here: {count} GPUs are")
                torch.cuda.set_device(device)  # where streams, events and graphs are made
            return device
    raise UserError(f"device {name!r} is not here; there is {', '.join(there)}")


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


# -- Several processes -----------------------------------------------------------------------------


def join_processes(device):
    """Meet the other processes that torchrun started -> rank, number of processes, own device.

    Without torchrun 0, 1 and `device`. Of several processes only the first prints.

    Raises:
        UserError: more processes on this machine than GPUs.
    """
    if "RANK" not in os.environ:
        return 0, 1, device
    if device.type == "cuda":
        device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
    if not dist.is_initialized():  # by an earlier training
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return dist.get_rank(), dist.get_world_size(), device


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def reduce(tensor, device):
    """The sum of a tensor over all processes, which meet on `device`."""
    if not dist.is_initialized():
        return tensor
    tensor = tensor.to(device)
    dist.all_reduce(tensor)
    return tensor.cpu()


def average_gradients(model):
    """Let all processes have the mean of their gradients."""
    if dist.is_initialized():
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(mean.view_as(g))


def from_first(value):
    """What the first process has, in all of them."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


@contextmanager
def first_process_first():
    """The first process goes ahead, so that the others find what it made."""
    rank, _ = rank_and_size()
    if rank:
        from_first(None)
    yield
    if not rank:
        from_first(None)
