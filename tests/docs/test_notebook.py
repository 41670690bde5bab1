"""The tour as a notebook: made by its script, and true."""

import nbformat
import pytest
from lab_helpers import ROOT
from nbconvert.preprocessors import ExecutePreprocessor

from docs.notebook import NOTEBOOK, build


def printed(notebook):
    """The streams of each cell of code, as one text; any other output is an error."""
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in codes for output in cell.outputs]
    assert all(output.get("name") == "stdout" for output in outputs), outputs
    return ["".join(output.text for output in cell.outputs) for cell in codes]


def test_it_is_what_the_script_makes():
    """Catches a notebook that shows an older text or older code than the tour's."""
    assert NOTEBOOK.read_text("utf-8") == build(), "python -m docs.notebook makes it anew"


@pytest.mark.parametrize(
    "directory", [pytest.param(ROOT, marks=pytest.mark.slow), NOTEBOOK.parent], ids=["root", "docs"]
)
def test_it_runs(directory):
    """Catches a cell that fails or prints other numbers than docs/tour.md, from the root or where Jupyter
    starts."""
    notebook = nbformat.reads(build(), as_version=4)
    nbformat.validate(notebook)
    shown = printed(notebook)
    assert sum(map(bool, shown)) == 10
    runner = ExecutePreprocessor(timeout=120, kernel_name="python3")
    runner.preprocess(notebook, {"metadata": {"path": str(directory)}})
    assert printed(notebook) == shown
