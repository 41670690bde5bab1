"""Every command ends well: with output that knows ascii alone, to a closed pipe, on a full disk, without a
home, in a folder that cannot be written, with warnings as errors, interrupted.

The commands are those of `python -m lab` and the root's scripts; a new one has to be in the table below.
"""

import contextlib
import io
import os
import shutil
import signal
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from lab_helpers import ROOT, full_disk, run_command, start

from lab.__main__ import COMMANDS

SMALL = (
    "--preset tiny --hidden-size 32 --intermediate-size 48 --num-hidden-layers 1 --head-dim 16 "
    "--block-size 16 --ponder-steps 2 --steps 2 --batch-size 2 --eval-windows 2 --device cpu --data text.txt"
)
RUN = "--run out/a --device cpu"
COMMAND_LINES = {
    "train.py": f"{SMALL} --name é-root",
    "sample.py": f"{RUN} --prompt é --max-new-tokens 3 --show-steps",
    "analyze.py": f"tau {RUN} --windows 2 --data text.txt",
    "data.py": "--data text.txt",
    "lab train": f"{SMALL} --method grid --name é-lab",
    "lab sample": f"{RUN} --prompt é --max-new-tokens 3 --num-samples 2 --show-steps",
    "lab analyze": "where --runs out/b --windows 2 --data text.txt --device cpu",
    "lab evaluate": "--run out/b --windows 2 --corpus text.txt",
    "lab bench": "attention --lengths 64 --widths 56 --repeats 1",
    "lab convert": "out/a",
    "lab corpus": "lookup --lines 100 --folder é-lines",
    "lab worth": "--runs table.csv",
    "lab puzzle": "--out out/é.svg",
}


def test_the_table_has_every_command():
    """Catches a command that none of these tests runs."""
    scripts = {"train.py", "sample.py", "analyze.py", "data.py"}
    assert scripts | {f"lab {name}" for name in COMMANDS} == set(COMMAND_LINES)


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """A folder with a text and two trained runs."""
    folder = tmp_path_factory.mktemp("ready")
    (folder / "text.txt").write_text(
        "Résumé of a naïve text: the quick brown fox. \n" * 200, encoding="utf-8"
    )
    shutil.copy(ROOT / "docs/figures/worth.csv", folder / "table.csv")
    for what, name in (("train.py", "a"), ("lab train", "b")):
        flags = COMMAND_LINES[what].replace("--method grid ", "").rsplit(" ", 1)[0] + f" {name}"
        assert not run_command(what, flags.split(), folder)[0]
    return folder


@pytest.fixture
def folder(ready, tmp_path):
    return Path(shutil.copytree(ready, tmp_path / "here", symlinks=True))


@pytest.mark.parametrize("what", COMMAND_LINES)
def test_ascii(what, folder):
    """Catches output that a terminal without UTF-8 turns into an error."""
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    assert not run_command(what, COMMAND_LINES[what].split(), folder, out)[0]
    assert out.buffer.getvalue() and out.buffer.getvalue().isascii()


@pytest.mark.parametrize("what", COMMAND_LINES)
def test_closed_pipe(what, folder):
    """Catches a stack trace when whoever reads the output has seen enough."""
    reader, writer = os.pipe()
    os.close(reader)
    out = open(writer, "w", encoding="utf-8")  # noqa: SIM115
    with patch("os.dup2"):  # which would replace pytest's own output
        assert run_command(what, COMMAND_LINES[what].split(), folder, out)[0] in (141, None)
    with contextlib.suppress(BrokenPipeError):
        out.close()


def begin(what, folder, flags=(), **environment):
    """A command in a process of its own."""
    name = [ROOT / what] if what.endswith(".py") else ["-m", "lab", what.removeprefix("lab ")]
    return start(*flags, *name, *COMMAND_LINES[what].split(), cwd=folder, **environment)


def ends_well(process):
    """It has done its work, or says in one line why not."""
    _, errors = process.communicate(timeout=200)
    assert "Traceback" not in errors, errors
    assert process.returncode == 0 or errors.strip().splitlines()[-1].startswith(("error: ", "stopping")), (
        errors
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", COMMAND_LINES)
def test_surroundings(what, folder, tmp_path):
    """Catches a need of a home, the checkout or a writable folder, and warnings that are errors."""
    ends_well(begin(what, folder, HOME="/nowhere"))
    ends_well(begin(what, folder, ["-W", "error::DeprecationWarning:__main__"]))
    with full_disk(2000):
        ends_well(begin(what, folder))
    if os.geteuid():  # root writes everywhere
        folder.chmod(0o500)
        ends_well(begin(what, folder))
        folder.chmod(0o700)


@pytest.mark.slow
@pytest.mark.parametrize("what", COMMAND_LINES)
def test_interrupted(what, folder):
    """Catches a stack trace, or half a file, after Ctrl-C."""
    for pause in (1.0, 3.0):
        process = begin(what, folder)
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
        # While it imports, before any command has begun, Python and packages say what they like.
        assert "Traceback" not in errors or "in command_line" not in errors, errors
    assert not [file for file in folder.rglob("*.tmp") if file.parent.parent.name != "out"]
