"""The tour as a notebook: the text of docs/tour.md, each step with its code from docs/tour.py.

    python -m docs.notebook       writes docs/tour.ipynb

Neither text nor code is written here. The outputs are the numbers of docs/tour.md. Tests compare
them to what the cells print, and the notebook to what this script makes.
"""

import ast
import inspect
import json
import re
from pathlib import Path

from docs import tour
from runtime import command_line, write_text

# On GitHub. This code has no address there yet: once it has, put it here, and take out the sentence
# of FIRST that speaks of it.
REPOSITORY = "OWNER/REPO"
NOTEBOOK = Path(__file__).with_name("tour.ipynb")

FIRST = f"""\
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]\
(https://colab.research.google.com/github/{REPOSITORY}/blob/main/docs/{NOTEBOOK.name})

`OWNER/REPO` in this link and in the next cell stands for the address on GitHub of your copy of this
code. In a copy on your machine all cells run as they are.
"""
SETUP = f"""\
from importlib.util import find_spec
from pathlib import Path

if Path("tour.py").exists():  # Jupyter starts in the notebook's folder
    %cd -q ..
if find_spec("docs") is None:  # Colab has torch and pydantic, all that is needed, but not this code
    !git clone -q --depth 1 https://github.com/{REPOSITORY} ponderlm
    %cd -q ponderlm
"""


def names(code):
    """All variables, functions and modules that a piece of code refers to."""
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def code_of_steps():
    """Pieces of code for the cells of each step, from docs/tour.py: the step is the last of them.

    A helper comes before the first step that calls it.
    """
    functions = inspect.getmembers(tour, inspect.isfunction)
    code = {f: inspect.getsource(f).strip() for _, f in functions if f.__module__ == tour.__name__}
    helpers = sorted(set(code) - set(tour.STEPS), key=lambda f: f.__code__.co_firstlineno)
    for step in tour.STEPS:
        first = [helper for helper in helpers if helper.__name__ in names(code[step])]
        helpers = [helper for helper in helpers if helper not in first]
        yield [*(code[f] for f in first), f"{code[step]}\n\n\n{step.__name__}(model, idx)"]


def opening(shown):
    """The code before the steps: the imports that it and the code `shown` need, and the model."""
    source = inspect.getsource(tour)
    _, _, top = source[: source.index("def small_model")].split('"""', 2)
    imports, constants = re.split(r"(?m)^(?=WORDS =)", top)
    (start,) = re.findall(r"model, idx = .*", source)
    code = "\n\n\n".join([constants.strip(), inspect.getsource(tour.small_model).strip(), start])
    used = names("\n".join([code, *shown]))
    lines = [  # those that are empty part the groups of imports
        line
        for line in imports.strip().splitlines()
        if not line or used & set(re.findall(r"\w+", line.split("import ")[1]))
    ]
    return "\n".join(lines) + f"\n\n{code}"


def build():
    """The notebook as text, in Jupyter's format 4.5."""
    cells = []

    def add(kind, text, **fields):
        lines = text.strip().splitlines(keepends=True)
        cell = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines}
        cells.append(cell | fields)

    def add_code(text, printed=""):
        lines = printed.splitlines(keepends=True)
        outputs = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        add("code", text, execution_count=None, outputs=outputs)

    page = NOTEBOOK.with_suffix(".md").read_text("utf-8")
    introduction, *texts = re.split(r"(?m)^(?=\*\*\d+\. )", page)
    code = list(code_of_steps())
    add("markdown", FIRST)
    add_code(SETUP)
    add("markdown", introduction)
    add_code(opening([piece for pieces in code for piece in pieces]))
    for text, (*helpers, step) in zip(texts, code, strict=True):
        text, numbers, end = re.fullmatch(r"(.*)```\n(.*)```\n(.*)", text, re.DOTALL).groups()
        add("markdown", text)
        if helpers:
            add_code("\n\n\n".join(helpers))
        add_code(step, numbers)
    add("markdown", end)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    command_line(lambda: write_text(NOTEBOOK, build()))
