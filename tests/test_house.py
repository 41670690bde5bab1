"""The tree: who may import whom, what a folder says of itself, what an import costs."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("runtime", "corpus", "kernels", "backbones", "baselines", "interop", "training", "engine")
TOP = ("analysis", "evaluation", "bench", "docs")
SCRIPTS = ("attention", "router", "model", "train", "sample", "analyze")
# What each may import, of the layers below it.
METHOD = ("runtime", "attention", "router", "model")
READS = (*METHOD, "backbones", "baselines", "corpus", "interop")  # models and texts
USES = (*READS, "kernels", "training", "engine", "sample")
BELOW = {
    "runtime": (),
    "corpus": ("runtime",),
    "attention": METHOD[:1],
    "router": METHOD[:2],
    "model": METHOD[:3],
    "kernels": METHOD,
    "backbones": METHOD,
    "baselines": (*METHOD, "kernels", "backbones"),
    "interop": READS,
    "training": (*READS, "kernels"),
    "engine": READS,  # to open what is asked for; how to train is not its business
    "train": (*READS, "training"),
    "sample": (*READS, "engine"),
    "bench": (*USES, "train"),  # it measures the step of train.py
    "analyze": (*USES, "analysis"),
} | dict.fromkeys(("analysis", "evaluation", "docs"), USES)
# What a file imports only where a command asks for it: everybody else need not read it.
ASKED_FOR = {
    ("sample", "engine.puzzle"),  # where nobody asks for anything
    ("training.config", "kernels.attention"),  # the forms of attention, by the name of one
    ("training.config", "kernels.blocks"),  # how a model runs, decided last
    ("training.config", "training.warm_start"),  # --init-from
}

# Packages that are not in requirements.txt: no import of a file may need them.
OPTIONAL = ["datasets", "tokenizers", "huggingface_hub", "transformers", "gguf", "lm_eval"]
OPTIONAL += ["flash_attn", "ctranslate2"]
INSIDE = {*OPTIONAL, "matplotlib", "rustbpe"}  # the last two are heavy


def files():
    yield from (ROOT / f"{name}.py" for name in SCRIPTS)
    for room in (*ROOMS, *TOP):
        yield from sorted((ROOT / room).rglob("*.py"))


def name_of(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in files()}


def imports(file):
    """(module, whether it is inside a function) of each import of a file."""

    def walk(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{file}: a relative import"
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield full if full in FILES else child.module, inside
            kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            yield from walk(child, inside or isinstance(child, kinds))

    yield from walk(ast.parse(file.read_text("utf-8")), False)


def room_of(name):
    return name.split(".")[0]


OURS = {room_of(name) for name in FILES}


def test_root_is_the_method():
    """Catches a seventh script at the root, and a folder of code that no layer knows."""
    assert {file.stem for file in ROOT.glob("*.py")} == set(SCRIPTS)
    folders = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert folders == {*ROOMS, *TOP}


@pytest.mark.parametrize("script", SCRIPTS)
def test_few_arguments_in_a_row(script):
    """Catches a function of the six that nobody can call without looking up the order."""
    for node in ast.walk(ast.parse((ROOT / f"{script}.py").read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef):
            names = [a.arg for a in node.args.args if a.arg != "self"]
            assert len(names) <= 5, f"{node.name}({', '.join(names)})"


@pytest.mark.parametrize("room", [*ROOMS, *TOP])
def test_a_folder_says_what_is_in_it(room):
    """Catches a folder whose __init__.py does not say what is in it."""
    text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text("utf-8")))
    assert text and len(text.splitlines()) >= 3, room


def test_layers():
    """Catches an import that points upwards or to a neighbour. A __main__ may import anything."""
    wrong = []
    for name, file in FILES.items():
        room = room_of(name)
        for module, _ in imports(file):
            other = room_of(module)
            if other in OURS and other != room and other not in BELOW[room]:
                wrong.append(f"{name} imports {module}")
    wrong = [line for line in wrong if "__main__" not in line.split()[0]]
    assert not wrong, "\n".join(dict.fromkeys(wrong))


def test_no_circles():
    """Catches modules that import each other, directly or around a corner."""
    graph = {name: {m for m, _ in imports(f) if m in FILES} - {name} for name, f in FILES.items()}
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for other in sorted(graph[name]):
                visit(other)
            done.add(path.pop())

    for name in graph:
        visit(name)


def test_imports_stand_at_the_top():
    """Catches an import inside a function, but of packages that are optional or heavy, and of what
    is on the list; and a line of the list that nobody needs."""
    found = {
        (name, module)
        for name, file in FILES.items()
        for module, inside in imports(file)
        if inside and room_of(module) not in INSIDE
    }
    assert found == ASKED_FOR


def python(code, directory):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done


@pytest.mark.parametrize("script, most", [("train", 12), ("sample", 9)])
def test_what_a_script_loads(script, most, tmp_path):
    """Catches a command that drags in rooms which it does not need: a reader has to read them."""
    code = f"import {script}, sys, json; print(json.dumps(list(sys.modules)))"
    loaded = set(json.loads(python(code, tmp_path).stdout)) & set(FILES)
    with_code = {m for m in loaded if len(ast.parse(FILES[m].read_text("utf-8")).body) > 1}
    assert len(with_code) <= most, sorted(with_code)
    assert "engine.batching" not in with_code


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
    done = python(code, tmp_path)
    assert not done.stdout and not done.stderr, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
