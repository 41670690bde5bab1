"""pyproject.toml names every package that is imported, and the lists for pip lie within its ranges."""

import ast
import re
import sys
import tomllib

import pytest
from lab_helpers import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
GROUPS = PROJECT["dependency-groups"]
# Packages whose module has another name.
MODULES = {"lm-eval": "lm_eval", "pyyaml": "yaml", "mini-racer": "py_mini_racer", "flash-attn": "flash_attn"}
NOT_IMPORTED = {"pytest-xdist", "ruff", "selenium", "ipykernel", "accelerate", "ctranslate2"}
# What a declared package is certain to bring: transformers these two, datasets the last.
BROUGHT = {"tokenizers", "huggingface_hub", "fsspec"}


def requirements(group):
    """Those of the project, or of a group with the groups that it includes. -> {name: Requirement}"""
    lines = PROJECT["project"]["dependencies"] if group == "root" else GROUPS[group]
    found = {}
    for line in lines:
        if isinstance(line, dict):
            found |= requirements(line["include-group"])
        else:
            found[canonicalize_name(Requirement(line).name)] = Requirement(line)
    return found


def imported(files):
    """The packages of others that files import, also within functions."""
    ours = {file.stem for file in ROOT.glob("*.py")} | {file.stem for file in (ROOT / "tests").glob("*.py")}
    ours |= {"lab", "docs", "tests"}
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.split(".")[0])
    return names - ours - set(sys.stdlib_module_names) - BROUGHT


@pytest.mark.parametrize(
    "group, folders", [("root", [""]), ("lab", ["", "lab"]), ("test", ["", "lab", "tests"])]
)
def test_every_import_is_declared(group, folders):
    """Catches a package that is there by luck, since another one brings it."""
    files = []
    for folder in folders:
        files += (ROOT / folder).rglob("*.py") if folder else ROOT.glob("*.py")
    declared = requirements("root") | requirements("gpu")
    declared |= requirements(group) if group != "root" else {}
    modules = {MODULES.get(name, name.replace("-", "_")) for name in declared}
    assert imported(files) <= modules


@pytest.mark.parametrize(
    "group, file",
    [("root", "requirements.txt"), ("lab", "lab/requirements.txt"), ("test", "tests/requirements.txt")],
)
def test_pins_lie_within_the_ranges(group, file):
    """Catches a list for pip that has another package, or another version, than pyproject.toml allows."""
    pins = dict(re.findall(r"(?m)^([\w-]+)==(\S+)$", (ROOT / file).read_text("utf-8")))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    declared = requirements(group)
    if group == "test":
        declared = {name: wanted for name, wanted in declared.items() if name not in requirements("lab")}
    assert pins.keys() == declared.keys()
    for name, version in pins.items():
        assert declared[name].specifier.contains(version), (name, version)
