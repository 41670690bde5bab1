"""The scripts of the root stand alone, and what a training step runs is what stands in them."""

import ast
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, python

from model import Config, PonderLM
from train import objective

README = (ROOT / "README.md").read_text("utf-8")
SCRIPTS = re.findall(r"(?m)^\| \[`(\w+)\.py`\]", README)  # each above those that import it
PACKAGES = {line.split("==")[0] for line in (ROOT / "requirements.txt").read_text("utf-8").split()}

OPTIONAL = {"flash_attn"}
SMALL = "--hidden-size 32 --intermediate-size 48 --num-hidden-layers 1 --head-dim 16 --block-size 16 "
SMALL += "--ponder-steps 2 --batch-size 4 --eval-windows 8 --device cpu --data text.txt"


@pytest.mark.parametrize("script", SCRIPTS)
def test_imports(script):
    """Catches a script that needs the lab, one above it, or a package that is not in requirements.txt."""
    below = SCRIPTS[: SCRIPTS.index(script)]
    for node in ast.walk(ast.parse((ROOT / f"{script}.py").read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in (name.split(".")[0] for name in names):
            known = {*below, *PACKAGES, *OPTIONAL, *sys.stdlib_module_names}
            assert name in known, f"{script}: {name}"


def test_commands():
    """Catches a command that cannot run where only these scripts are, and an output that ASCII stops."""
    for script in SCRIPTS:
        shutil.copy(ROOT / f"{script}.py", ".")
    Path("text.txt").write_text((ROOT / "LICENSE").read_text("utf-8") * 20, encoding="utf-8")
    code = "import runpy, sys\n"  # all in one process, since torch takes seconds to import
    for command in (
        "data.py --data text.txt",
        f"train.py --preset tiny --steps 2 --name a {SMALL}",
        "train.py --resume --name a --steps 3",
        "sample.py --run out/a --prompt The --max-new-tokens 5 --show-steps --seed 1",
        "analyze.py tokens --run out/a --windows 4 --data text.txt --device cpu",
        "analyze.py pareto --runs out/a",
    ):
        code += f"sys.argv = {command.split()}\n"
        code += "print('#'); runpy.run_path(sys.argv[0], run_name='__main__')\n"
    done = python("-c", code, cwd=".", PYTHONPATH="", PYTHONIOENCODING="ascii")
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
    _, prepared, trained, resumed, sampled, *_ = done.stdout.split("#\n")
    assert "unigram entropy" in prepared and "step 2/2" in trained
    assert "resumed at step 2" in resumed and "step 3/3" in resumed
    assert "of 2 pondering steps per token" in sampled and "\nThe" in sampled and r"\u208" in sampled
    for file in ("out/a/report/tokens.png", "out/analyze/pareto.png"):
        assert Path(file).stat().st_size > 5000


def test_what_a_training_step_runs():
    """Catches a training in which functions of the root, which a reader reads, are replaced."""
    model = PonderLM(Config(257, 32, 48, 1, 2, head_dim=16, block_size=16)).train()
    x, entered = torch.randint(256, (2, 16)), set()

    def trace(frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.parent == ROOT:
            entered.add(f"{file.stem}.{frame.f_code.co_qualname}")

    sys.setprofile(trace)
    try:
        objective(model, x, x, 1)[0].backward()
    finally:
        sys.setprofile(None)
    method = "train.objective model.PonderLM.forward model.PonderLM.jacobi model.PonderLM.transform"
    method += " model.Attention.forward model.apply_rope model.SwiGLU.forward model.Block.forward"
    method += " attention.soft_mask_attention attention.eager router.Router.forward router.log_mask_score"
    method += " router.mask_keys model.PonderLM.integrate router.bottom_mass_penalty"
    assert set(method.split()) <= entered
    assert type(model.model.norm).forward is torch.nn.RMSNorm.forward
