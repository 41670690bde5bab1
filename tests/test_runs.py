"""The scripts in runs/, with a stand-in for Python that writes down how it is called."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import small_model

from methods import CLASSES
from run import changes
from settings import parse

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run_script(tmp_path):
    """Run a script in a copy of runs/; returns the arguments of each train.py and analyze.py."""
    shutil.copytree(ROOT / "runs", tmp_path / "runs")
    stand_in, record = tmp_path / "python", tmp_path / "record"
    inline = f'-*) cd "{ROOT}"; exec "{sys.executable}" "$@" ;;'
    stand_in.write_text(
        f'#!/bin/bash\ncase "$1" in\n{inline}\n*) echo "$@" >> "{record}" ;;\nesac\n'
    )
    stand_in.chmod(0o755)

    def run(script, **variables):
        environment = os.environ | {"PYTHON": str(stand_in)} | variables
        command = ["bash", str(tmp_path / "runs" / script)]
        subprocess.run(command, check=True, env=environment, timeout=120)
        lines = [line.split() for line in record.read_text().splitlines()]
        record.unlink()
        return [[args for name, *args in lines if name == f"{s}.py"] for s in ("train", "analyze")]

    return run


def test_llama(run_script, tmp_path):
    """Catches a flag that train.py does not know, and arms that differ in more than they should."""
    trained, analyzed = run_script("llama.sh")
    assert [args[0] for args in analyzed] == ["losses", "pareto"]
    base = tmp_path / "out/llama/hugging-face"
    small_model(ponder_steps=0, method="vanilla").save_pretrained(base)
    configs = {}
    for args in trained:
        args = [str(base) if arg == "out/llama/hugging-face" else arg for arg in args]
        configs[args[args.index("--name") + 1]] = parse(args)
    assert len(configs) == 12
    plain, taught = configs["longer-1"], configs["taught-1"]
    differ = set(changes(plain, taught))
    assert {"method", "ponder_steps", "ponder_warmup", "penalty_weight"} == differ
    assert {configs[f"taught-{seed}"].seed for seed in (1, 2, 3)} == {1, 2, 3}
    assert changes(taught, configs["at-once-1"]).keys() == {"ponder_warmup"}
    (tmp_path / "out/llama/plain-0").mkdir()
    (tmp_path / "out/llama/plain-0/results.json").touch()
    assert len(run_script("llama.sh", SEEDS="2")[0]) == 2


def test_pareto(run_script, tmp_path):
    """Catches a flag that train.py does not know, a method or budget that is left out, a seed that
    is not used, a finished run that is trained again, an interrupted one that begins anew."""
    (out := tmp_path / "out/pareto/tiny").mkdir(parents=True)
    trained, analyzed = run_script("pareto.sh")
    assert [args[0] for args in analyzed] == ["pareto", "depth"]
    configs = [parse(args) for args in trained]
    assert len({config.name for config in configs}) == len(configs)
    budgets = [(c.model.method, c.model.ponder_steps, c.seed) for c in configs]
    for seed in (0, 1, 2):
        assert ("vanilla", 0, seed) in budgets
        for K in (1, 2, 3, 4):
            for method in ("looped", "ponderlm2", "ponderlm3"):
                assert (method, K, seed) in budgets
    assert {(c.model.method, c.seed) for c in configs} == {
        (m, s) for m in CLASSES for s in range(3)
    }
    assert (
        len({(c.steps, c.batch_size, c.learning_rate, c.data, c.precision) for c in configs}) == 1
    )
    for name, file in (("vanilla-0-0", "results.json"), ("vanilla-0-1", "train.json")):
        (out / name).mkdir()
        (out / name / file).touch()
    again, _ = run_script("pareto.sh")
    assert len(again) == len(trained) - 1
    assert ["--resume", "--out", "out/pareto/tiny", "--name", "vanilla-0-1"] in again


def test_remedies(run_script, tmp_path):
    """Catches flags that train.py does not know, and names that hide that two runs are the same."""
    (tmp_path / "out/remedies/tiny").mkdir(parents=True)
    trained, analyzed = run_script("remedies.sh")
    configs = [parse(args) for args in trained]
    assert len({config.name for config in configs}) == len(configs) and len(analyzed) == 2
    assert len({repr(replace(config, name=None)) for config in configs}) == len(configs)


def test_tiny(run_script, tmp_path):
    """Catches flags that train.py does not know, seeds that are left out or are all the same."""
    (tmp_path / "out/tiny").mkdir(parents=True)
    trained, analyzed = run_script("tiny.sh")
    configs = [parse(args) for args in trained]
    assert len({repr(replace(config, name=None)) for config in configs}) == 12 == len(configs)
    assert [args[0] for args in analyzed] == ["losses"]
    assert len(run_script("tiny.sh", SEEDS="1")[0]) == 4


def test_ablations(run_script, tmp_path):
    """Catches flags that train.py does not know, and an ablation that is none."""
    (tmp_path / "out/ablations/tiny").mkdir(parents=True)
    trained, analyzed = run_script("ablations.sh")
    configs = [parse(args) for args in trained]
    assert len(configs) == 21 and len(analyzed) == 1
    assert len({repr(replace(config, name=None)) for config in configs}) == len(configs)


def test_paper(run_script, tmp_path):
    """Catches a recipe that does not begin, of either size."""
    trained, _ = run_script("paper.sh", TRY="1")
    configs = [parse(args) for args in trained]
    assert [(config.preset, config.steps) for config in configs] == [("70m", 2), ("410m", 2)]


def test_hops(run_script, tmp_path):
    """Catches flags that train.py does not know, and budgets that differ in more than K."""
    (tmp_path / "out/hops").mkdir(parents=True)
    trained, analyzed = run_script("hops.sh")
    configs = [parse(args) for args in trained]
    assert [config.model.ponder_steps for config in configs] == [0, 1, 1, 2, 3, 4, 1]
    assert [len(config.model.router_offset) for config in configs] == [1, 2, 2, 3, 4, 5, 2]
    assert [config.seed for config in configs] == [0, 0, 1, 0, 0, 0, 0]
    assert [config.steps for config in configs] == [7000] * 6 + [14000]
    same = dict(ponder_steps=0, router_offset=(0.0,))
    same = [replace(c, name=None, steps=1, seed=0, model=replace(c.model, **same)) for c in configs]
    assert all(config == same[0] for config in same) and same[0].data == "hops"
    assert [args[:2] for args in analyzed] == [["hops", "--tau"]]
    assert [len(part) for part in run_script("hops.sh", SEED="1", RUNS="1 2")] == [2, 0]
    assert [len(part) for part in run_script("hops.sh", SEED="1")] == [6, 0]


def test_pareto_scale_and_seeds(run_script, tmp_path):
    """Catches variables of the script that change nothing."""
    (tmp_path / "out/pareto/small").mkdir(parents=True)
    trained, analyzed = run_script("pareto.sh", SCALE="small", SEEDS="5")
    assert not analyzed
    configs = [parse(args) for args in trained]
    assert {(c.preset, c.seed, c.out) for c in configs} == {("small", 5, "out/pareto/small")}
