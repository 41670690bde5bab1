"""The tree: what stands at the root, who imports whom, what an import costs."""

import ast
import re
from pathlib import Path

import pytest
from lab_helpers import ROOT, python, run_command

from lab.__main__ import COMMANDS
from lab.methods import all_methods

SCRIPTS = {file.stem for file in ROOT.glob("*.py")}
# Packages of lab/requirements.txt and others that no import of a file may need.
OPTIONAL = ["datasets", "tokenizers", "huggingface_hub", "transformers", "lm_eval"]
OPTIONAL += ["flash_attn", "ctranslate2"]


def name_of(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in (*ROOT.glob("*.py"), *(ROOT / "lab").rglob("*.py"))}
FILES |= {name_of(file): file for file in (ROOT / "docs").glob("*.py")}


def imports(file):
    """The modules of the project that a file imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & FILES.keys()


def test_nobody_imports_what_stands_above():
    """Catches a root that knows the lab, and a lab that knows the pages or the tests."""
    for name, file in FILES.items():
        rooms = {module.split(".")[0] for module in imports(file)} - {name.split(".")[0]}
        allowed = SCRIPTS if name in SCRIPTS else SCRIPTS | {"lab"}
        assert rooms <= allowed, (name, rooms - allowed)


def test_lab_lists_its_commands():
    """Catches a command that the list lacks, or without --help."""
    _, listed, _ = run_command("lab", [], ".")
    assert all(f"\n{name} " in listed for name in COMMANDS)
    assert run_command("lab nothing", [], ".")[0].startswith("error: there is no command 'nothing'")
    for name in COMMANDS:
        assert f"python -m lab {name}" in run_command(f"lab {name}", ["--help"], ".")[1], name


def flags_without_help(text):
    """The flags that a --help says nothing about."""
    lines = [line.strip("│ ") for line in text.splitlines() if line.startswith("│")]
    found = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        flag, _, explained = line.partition("  ")
        explained = explained.strip() or following  # behind a long flag the text stands on the next line
        if flag.startswith("--") and explained.startswith(("(", "--")):
            found.append(flag)
    return found


@pytest.mark.parametrize(
    "command", ["sample.py", "train.py", "lab train", "lab sample", "lab bench decoding"]
)
def test_every_flag_is_explained(command):
    """Catches a comment beside a field that has moved to where the command line does not look for it."""
    _, printed, _ = run_command(command, ["--help"], ".")
    assert printed.count("--") > 10
    assert flags_without_help(printed) == []


def test_help_lists_every_method():
    """Catches a method that the help of --method does not name."""
    _, printed, _ = run_command("lab train", ["--help"], ".")
    words = re.findall(r"[\w-]+", printed.partition("--method STR")[2].partition("--backbone STR")[0])
    assert [kind.method for kind in all_methods() if kind.method not in words] == []


def test_without_docstrings():
    """Catches a command that needs its docstring, which python -OO drops."""
    done = python("-OO", "-m", "lab")
    assert not done.returncode and all(name in done.stdout for name in COMMANDS), done.stderr


def test_a_package_that_is_missing(tmp_path):
    """Catches a traceback where a sentence says what to install."""
    (tmp_path / "pydantic.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'pydantic'\", name='pydantic')"
    )
    done = python("-m", "lab", "sample", PYTHONPATH=str(tmp_path))
    message = "error: python -m lab sample needs the package pydantic: pip install -r lab/requirements.txt\n"
    assert done.returncode and done.stderr == message


def test_imports_have_no_side_effects(tmp_path):
    """Catches a file that prints, writes or needs an optional package when it is imported."""
    code = f"""
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
for name in {sorted(FILES)}:
    importlib.import_module(name)
"""
    done = python("-c", code, cwd=tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert not done.returncode and not done.stdout and not done.stderr, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
    assert all(Path(file).is_file() for file in FILES.values())
