"""The tour as a notebook: the text of docs/tour.md, each step with its code from docs/tour.py.

    python -m docs.notebook       writes docs/tour.ipynb

Neither text nor code is written here. The outputs are the numbers of docs/tour.md. Tests compare
them to what the cells print, and the notebook to what this script makes.
"""

import inspect
import json
import re
from pathlib import Path

from common import command_line
from docs import tour

NOTEBOOK = Path(__file__).with_name("tour.ipynb")
SETUP = """\
from pathlib import Path

if Path("tour.py").exists():  # Jupyter starts in the notebook's folder
    %cd -q ..
"""


def opening():
    """The code before the steps: what stands above the first of them in docs/tour.py; the model."""
    source = inspect.getsource(tour).split('"""', 2)[2]
    source = source[: source.index(f"def {tour.STEPS[0].__name__}(")].strip()
    command = "import tyro", "from typing import Literal", "from common import command_line"
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
    add("markdown", introduction)
    add_code(SETUP)
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
    command_line(lambda: NOTEBOOK.write_text(build(), encoding="utf-8"))
