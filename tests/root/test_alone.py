"""The seven scripts stand alone, and what a training step runs is what stands in them."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

SCRIPTS = ["attention", "router", "model", "data", "train", "sample", "analyze"]
PACKAGES = {"torch", "numpy", "tiktoken", "matplotlib", "safetensors", "tyro"}
PACKAGES |= {"regex", "filelock"}  # which tiktoken and torch bring
OPTIONAL = {"flash_attn"}
SMALL = "--hidden-size 32 --intermediate-size 48 --num-hidden-layers 1 --head-dim 16 --block-size 16 "
SMALL += "--ponder-steps 2 --batch-size 4 --eval-windows 8 --device cpu"
SMALL = SMALL.split()


@pytest.mark.parametrize("script", SCRIPTS)
def test_imports(script):
    """Catches a script that needs the lab, one above it, or a package that is not in requirements.txt."""
    below = SCRIPTS[: SCRIPTS.index(script)]
    for node in ast.walk(ast.parse((ROOT / f"{script}.py").read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in (name.split(".")[0] for name in names):
            assert name in {*below, *PACKAGES, *OPTIONAL, *sys.stdlib_module_names}, f"{script}: {name}"


def test_requirements():
    """Catches a seventh package."""
    lines = (ROOT / "requirements.txt").read_text("utf-8").split()
    assert {line.split("==")[0] for line in lines} <= PACKAGES


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with the seven and a text, and a function that runs a command there."""
    folder = tmp_path_factory.mktemp("alone")
    for script in SCRIPTS:
        shutil.copy(ROOT / f"{script}.py", folder)
    text = (ROOT / "LICENSE").read_text("utf-8")
    (folder / "text.txt").write_text(text * 20, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def run(*command):
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert not done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    run("train.py", "--data", "text.txt", "--steps", "2", "--name", "a", *SMALL)
    return folder, run


def test_train_resume_sample(alone):
    """Catches a command that cannot run where only the seven are."""
    folder, run = alone
    assert "step 3/3" in run("train.py", "--resume", "--name", "a", "--steps", "3")
    out = run("sample.py", "--run", "out/a", "--prompt", "The", "--max-new-tokens", "5", "--show-steps")
    assert "of 2 pondering steps per token" in out
    names = {"config.json", "model.safetensors", "tokenizer.json", "trainer.pt", "train.json"}
    assert names <= {file.name for file in (folder / "out/a").iterdir()}


def test_figures(alone):
    """Catches one of the paper's figures that the root alone cannot draw. In one process, to save time."""
    folder, run = alone
    of_run = ["--run", "out/a", "--windows", "4", "--data", "text.txt"]
    figures = ["converge", "buckets", "shift", "tokens", "tau"]
    argv = [*([figure, *of_run] for figure in figures), ["pareto", "--runs", "out/a"]]
    start = "import runpy, sys; sys.argv[1:] = argv; runpy.run_path('analyze.py', run_name='__main__')"
    run("-c", "\n".join(f"argv = {flags}; {start}" for flags in argv))
    files = [*(f"out/a/report/{figure}.png" for figure in figures), "out/analyze/pareto.png"]
    assert all((folder / file).stat().st_size > 5000 for file in files)


def test_two_processes(alone):
    """Catches a training that torchrun cannot share."""
    _, run = alone
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = ["--data", "text.txt", "--steps", "2", "--name", "two", "--micro-batch-size", "2"]
    assert "step 2/2" in run(*torchrun, "train.py", *flags, *SMALL)


@pytest.mark.slow
def test_help(alone):
    """Catches a script without --help."""
    _, run = alone
    for script in ("train", "sample", "analyze"):
        assert "--" in run(f"{script}.py", "--help")


def test_what_a_training_step_runs():
    """Catches a training in which functions of the root are replaced: a step enters those that a reader
    reads, by their names and files."""
    from model import Config, PonderLM
    from train import objective

    model = PonderLM(Config(257, 32, 48, 1, 2, head_dim=16, block_size=16)).train()
    x, entered = torch.randint(256, (2, 16)), set()

    def trace(frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.parent == ROOT:
            entered.add(f"{file.stem}.{frame.f_code.co_qualname}")

    sys.setprofile(trace)
    objective(model, x, x, 1)[0].backward()
    sys.setprofile(None)
    method = "train.objective model.PonderLM.forward model.PonderLM.jacobi model.PonderLM.jacobi_pass"
    method += " model.Attention.forward model.apply_rotary model.SwiGLU.forward model.Block.forward"
    method += " attention.soft_mask_attention attention.eager router.Router.forward router.mask_score"
    method += " model.PonderLM.integrate router.bottom_mass_penalty"
    assert set(method.split()) <= entered
    assert type(model.model.norm).forward is torch.nn.RMSNorm.forward
