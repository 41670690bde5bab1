"""The tour as a notebook: the text of docs/tour.md, each step with its code from docs/tour.py.

    python -m docs.notebook       writes docs/tour.ipynb

Neither text nor code is written here. The outputs are the numbers of docs/tour.md. Tests compare
them to what the cells print, and the notebook to what this script makes.
"""

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


def opening():
    """The code before the steps: what stands above the first of them in docs/tour.py; the model."""
    source = inspect.getsource(tour).split('"""', 2)[2]
    source = source[: source.index(f"def {tour.STEPS[0].__name__}(")].strip()
    command = "import tyro", "from typing import Literal", "from runtime import command_line"
    for line in command:
        source = source.replace(f"{line}\n", "")
    return f"{source}\n\n\nmodel, idx = small_model()"


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
    add("markdown", FIRST)
    add_code(SETUP)
    add("markdown", introduction)
    add_code(opening())
    for text, step in zip(texts, tour.STEPS, strict=True):
        text, numbers, end = re.fullmatch(r"(.*)```\n(.*)```\n(.*)", text, re.DOTALL).groups()
        add("markdown", text)
        add_code(f"{inspect.getsource(step)}\n\n{step.__name__}(model, idx)", numbers)
    add("markdown", end)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    command_line(lambda: write_text(NOTEBOOK, build()))
