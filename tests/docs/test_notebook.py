"""The tour as a notebook: made by its script, and true."""

import os

import nbformat
import pytest
import torch
from jupyter_client.manager import start_new_kernel
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


@pytest.mark.slow
def test_a_training_in_a_cell(tmp_path):
    """Catches a training that shows no progress in a notebook, or that loses its steps at an interrupt."""
    (tmp_path / "text.txt").write_text("one two three. " * 300)
    manager, client = start_new_kernel(cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    flags = ["--preset", "tiny", "--data", "text.txt", "--device", "cpu", "--log-every", "2", "--name", "x"]
    client.execute(f"import train; print(train.train(*train.parse({flags}))[1])")
    printed = ""
    interrupted = False
    while "\nNone\n" not in printed:
        message = client.get_iopub_msg(timeout=120)
        assert message["msg_type"] != "error", message["content"]
        printed += message["content"].get("text", "")
        if "step 4/1000" in printed and not interrupted:
            manager.interrupt_kernel()
            interrupted = True
    manager.shutdown_kernel(now=True)
    assert "stopped; resume with" in printed
    step = torch.load(tmp_path / "out/x/trainer.pt", weights_only=True)["step"]
    assert 4 <= step < 1000
