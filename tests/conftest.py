"""What pytest asks of this folder. What tests share is in helpers.py and lab_helpers.py."""

import contextlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import byte_model  # noqa: F401
from placement import DEVICE, EQUIVALENCE, ON_CPU

TESTS = Path(__file__).parent
ROOT = TESTS.parent
torch.set_num_threads(1)  # of products so small a second one only costs time


def missing_packages():
    """Which packages the tests of the lab want, and are not here."""
    lists = [(ROOT / folder / "requirements.txt").read_text("utf-8") for folder in ("lab", "tests")]
    names = {name for text in lists for name in re.findall(r"(?m)^([\w-]+)==", text)}
    names -= {"pytest-xdist", "pyyaml", "ruff"}  # which no test imports
    modules = {name: name.replace("-", "_") for name in names} | {"mini-racer": "py_mini_racer"}
    return sorted(name for name in names if not find_spec(modules[name]))


MISSING = missing_packages()
if MISSING:
    collect_ignore = [file.name for file in TESTS.iterdir() if file.name != "root"]
else:
    from lab_helpers import config, shape, tokens_alone  # noqa: F401


def pytest_collection_modifyitems(items):
    """Leave out what would only run on the CPU again."""
    if DEVICE != "cpu":
        files = {str(TESTS / name) for name in EQUIVALENCE}
        items[:] = [i for i in items if str(i.path) in files and i.originalname not in ON_CPU]


def pytest_terminal_summary(terminalreporter):
    """A line on each thing that was left out, and how to get it."""
    if MISSING:
        terminalreporter.write_line(
            f"left out: the tests of the lab, which want {', '.join(MISSING)} "
            "(pip install -r tests/requirements.txt)"
        )
    terminalreporter.write_line("left out: what is slow (python -m pytest -m slow)")


@pytest.fixture(autouse=True, scope="session")
def nothing_is_left():
    """Tests write to folders of their own, and not to data/ and out/ of the checkout."""
    found = lambda: sorted(path for name in ("data", "out") for path in (ROOT / name).glob("*"))  # noqa: E731
    before = found()
    yield
    assert found() == before


@pytest.fixture(autouse=True)
def elsewhere(tmp_path):
    """Each test begins in an empty folder of its own: commands write data/ and out/ into the current one."""
    with contextlib.chdir(tmp_path):
        yield
