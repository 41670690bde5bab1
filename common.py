"""How every command deals with its user: errors that can be fixed, files that are whole or not there,
signals, progress, and the command line."""

import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from pickle import UnpicklingError

import pydantic
import torch
import tyro
from safetensors import SafetensorError

# -- Errors ----------------------------------------------------------------------------------------


class UserError(Exception):
    """An error that the user can fix: wrong input, a missing file, a full disk.

    The message says what is wrong and how to fix it, and commands print it without a traceback. Every other
    exception is a bug and keeps its traceback.
    """


def one_line(error):
    """The message of an exception in one line. Of a ValidationError: each field, its value, what is wrong."""
    if not isinstance(error, pydantic.ValidationError):
        message = str(error) or repr(error)
        if isinstance(error, OSError) and error.strerror:
            message = error.strerror if error.filename is None else f"{error.strerror} ({error.filename})"
        return " ".join(message.split())[:400]
    parts = []
    for found in error.errors()[:3]:
        field = ".".join(str(part) for part in found["loc"])
        message = found["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
        message = message.replace("less than or equal to", "at most")
        message = message.replace("greater than or equal to", "at least")
        if found["type"] == "missing":
            parts.append(f"{field} is missing")
        elif field:
            parts.append(f"{field} = {found['input']!r:.80}: {message}")
        else:
            parts.append(message)
    return "; ".join(parts)


def with_flags(message):
    """A message about settings, with the settings as flags: "head_dim = 7 is odd" becomes "--head-dim 7 is
    odd". "betas.1 = 3.0", the second of two values, becomes "--betas 3.0"."""
    return re.sub(r"\b([a-z_]+)[.0-9]* = ", lambda match: f"--{match[1].replace('_', '-')} ", message)


# What Python, numpy, torch and safetensors raise for a file that is missing or damaged.
UNREADABLE = (OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError)
UNREADABLE += (SafetensorError, UnpicklingError)


@contextmanager
def user_error_if_unreadable(file, way_out=""):
    """Turn an exception that is raised while reading a file into a UserError that names the file.

    Args:
        file: named in the message.
        way_out: added to the message, for instance "; give another --data".
    """
    try:
        yield
    except UNREADABLE as error:
        raise UserError(f"{file} cannot be read: {one_line(error)}{way_out}") from None


# -- Files -----------------------------------------------------------------------------------------


def read_json(file):
    """Read a file that holds a JSON object.

    Raises:
        UserError: it is missing or damaged.
    """
    with user_error_if_unreadable(file):
        refuse_lfs_pointer(file)
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"it holds a JSON {type(content).__name__}, not an object")
        return content


def atomic_write(file, write):
    """Write to a temporary file, then rename it over the target, which is thus whole or as it was before.

    Args:
        file: the target.
        write: a function that writes a file, given its path.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    temporary = Path(f"{file}.tmp")
    try:
        write(temporary)
        os.replace(temporary, file)
    except BrokenPipeError:  # raised by a progress line within `write`, not by this file
        raise
    except (OSError, RuntimeError, SafetensorError) as error:  # torch has no exception class for a full disk
        raise UserError(f"cannot write {file}: {one_line(error)}") from None
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(folder, way_out):
    """Refuse a folder that cannot be written, before minutes are spent on what goes into it.

    Args:
        folder: is made if it does not exist.
        way_out: what to do, for the message.

    Raises:
        UserError: it cannot be written.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"cannot write to the folder {folder} ({error.strerror}): {way_out}") from None


LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_lfs_pointer(file):
    """Refuse a file that stands for another one, which git has not fetched.

    Raises:
        UserError: it is a Git LFS pointer.
        OSError: it cannot be read.
    """
    with open(file, "rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(f"{file} is a Git LFS pointer, not the file itself: fetch it with git lfs pull")


def write_json(file, content):
    """Write a JSON file, whole or not at all.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    text = json.dumps(content, indent=2) + "\n"
    atomic_write(file, lambda temporary: temporary.write_text(text))


# -- Progress and signals --------------------------------------------------------------------------


def progress(what):
    """Print what begins, and return a function that shows which fraction is done, on a terminal."""
    print(what, flush=True)

    def show(fraction):
        if sys.stdout.isatty():
            print(f"{fraction:4.0%}\r", end="", flush=True)

    return show


def termination_signals():
    """Ctrl-C, a kill and a closed terminal, as far as this system has them: Windows has no SIGHUP."""
    names = "SIGINT", "SIGTERM", "SIGHUP"
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def heard_signals():
    """The termination signals that this program may handle. Two kinds are left as they are: those that are
    ignored, since nohup works by that; and those with the handler None, which a program that embeds Python
    has set, since Python could not set it back."""
    unheard = (signal.SIG_IGN, None)
    return [number for number in termination_signals() if signal.getsignal(number) not in unheard]


def in_main_thread():
    """True in the main thread, the only one in which Python allows signal handlers."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def default_signals():
    """Inside this context, SIGINT, SIGTERM and SIGHUP end the process at once."""
    if not in_main_thread():
        yield
        return
    usual = {number: signal.signal(number, signal.SIG_DFL) for number in heard_signals()}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


SAME_SIGNAL_SECONDS = 1.0  # launchers forward a signal that the process has already received itself


@contextmanager
def defer_signals():
    """Inside this context, SIGINT, SIGTERM and SIGHUP are collected in the yielded list instead of ending the
    process. The same signal again, after more than a second, ends it at once."""
    received = []
    if not in_main_thread():
        yield received
        return
    first_time = {}

    def receive(number, frame):
        now = time.monotonic()
        if number in first_time:
            if now - first_time[number] > SAME_SIGNAL_SECONDS:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        first_time[number] = now
        received.append(number)
        if number == getattr(signal, "SIGHUP", None):  # the terminal is gone, so writing to it would fail
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        with suppress(OSError):  # Ctrl-C also ends the `tee` that may read this
            os.write(2, b"\nstopping; send the signal again to exit at once\n")

    usual = {number: signal.signal(number, receive) for number in heard_signals()}
    try:
        yield received
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


# -- The command line ------------------------------------------------------------------------------


def command_line(main):
    """Run a command. An error that the user can fix is printed in one line, without a traceback."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this, as some daemons do
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's streams lack it
            stream.reconfigure(errors="backslashreplace")  # escape what the terminal cannot show
    if in_main_thread():
        exit_on_termination()
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails, too
        sys.exit(141)  # 128 + SIGPIPE, as a shell reports it
    except KeyboardInterrupt:
        sys.exit(130)
    except pydantic.ValidationError as error:
        sys.exit(f"error: {with_flags(one_line(error))}")
    except (UserError, SafetensorError) as error:
        sys.exit(f"error: {one_line(error)}")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(
            "error: out of memory: compute less at once, for instance with a smaller --micro-batch-size when "
            "training, or fewer --windows when measuring"
        )
    except OSError as error:
        if not error.filename:  # not about a file that the user named
            raise
        sys.exit(f"error: {error.filename}: {error.strerror}")


def exit_on_termination():
    """Let SIGTERM and SIGHUP exit like Ctrl-C, so that temporary files are removed."""

    def exit(number, frame):
        sys.exit(128 + number)

    for number in termination_signals():
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, exit)


def is_out_of_memory(error):
    """torch raises a plain RuntimeError where a CPU's memory ends."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "can't allocate memory" in str(error)


# -- Flags in groups -------------------------------------------------------------------------------


def parse_groups(groups, argv, **how):
    """Read flags that stand in groups.

    Args:
        groups: {title: settings}, which are also the defaults.
        argv: the command line; None for that of this process.
        how: more arguments of tyro.cli.

    Returns:
        {title: settings}, as the command line changes them.

    Raises:
        pydantic.ValidationError: a value is out of its range.
    """
    # If tyro built the settings, it would print pydantic's whole report of a wrong value. So it fills
    # settings that check nothing. The real ones are built here, and their error reaches command_line, which
    # prints one line.
    unchecked_groups = {title: unchecked(settings) for title, settings in groups.items()}
    Flags = make_dataclass("Flags", [(title, type(group)) for title, group in unchecked_groups.items()])
    default = Flags(**unchecked_groups)
    flags = tyro.cli(Flags, default=default, args=argv, config=(tyro.conf.OmitArgPrefixes,), **how)
    return {title: type(settings)(**vars(getattr(flags, title))) for title, settings in groups.items()}


def unchecked(settings):
    """A copy of some settings, of a class that has the same fields and checks no values."""
    kind = type(settings)
    # tyro finds the help texts in the source of the class, which it locates by these attributes (Python 3.13
    # needs the line number, too).
    where = ("__module__", "__qualname__", "__doc__", "__firstlineno__")
    namespace = {name: getattr(kind, name) for name in where if hasattr(kind, name)}
    namespace["__post_init__"] = lambda self: None
    # dataclass() writes a plain __init__ over pydantic's, and the empty __post_init__ hides the checks.
    copy = dataclass(type(kind.__name__, (kind,), namespace))
    return copy(**{field.name: getattr(settings, field.name) for field in fields(kind)})


def split_into(group_types, config):
    """Split settings into groups.

    Args:
        group_types: {title: class of settings}.
        config: settings that have the fields of all groups.

    Returns:
        {title: settings}.
    """
    parts = {}
    for title, kind in group_types.items():
        parts[title] = kind(**{field.name: getattr(config, field.name) for field in fields(kind)})
    return parts


def join(kind, parts):
    """The parts of settings -> all of them, as one `kind`."""
    values = {}
    for part in parts:
        values |= {field.name: getattr(part, field.name) for field in fields(part)}
    return kind(**values)
