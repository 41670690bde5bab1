"""The scripts in lab/runs/, with a stand-in for Python that writes down how it is called."""

import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from lab_helpers import ROOT

import lab.interop.weights as interop
import lab.train
from lab.methods import all_methods, build, find

NAMES = ("train", "analyze", "corpus", "convert", "evaluate", "bench")
NAMES = (*(f"lab {name}" for name in NAMES), "lm_eval", "torch.distributed.run", "train.py", "sample.py")
PLACES = {"name", "out", "resume"}


def parse(argv):
    """As lab.train.parse, in one: the settings of the training, and in `model` those of the model."""
    config, shape = lab.train.parse(argv)
    return SimpleNamespace(**vars(config), model=shape)


def changes(a, b):
    """The settings in which two trainings differ, but for their places."""
    a, b = ({**vars(x), **vars(x.model), "model": None} for x in (a, b))
    return {key: (a[key], b[key]) for key in a.keys() & b.keys() - PLACES if a[key] != b[key]}


@pytest.fixture
def run_script(tmp_path):
    """Run a script in a copy of runs/; returns the arguments of each call, by script or module."""
    shutil.copytree(ROOT / "lab/runs", tmp_path / "lab/runs")
    stand_in, record = tmp_path / "python", tmp_path / "record"
    inline = f'-c) cd "{ROOT}"; exec "{sys.executable}" "$@" ;;'
    stand_in.write_text(f'#!/bin/bash\ncase "$1" in\n{inline}\n*) echo "$@" >> "{record}" ;;\nesac\n')
    stand_in.chmod(0o755)

    def run(script, *arguments, **variables):
        environment = os.environ | {"PYTHON": str(stand_in)} | variables
        command = ["bash", str(tmp_path / "lab/runs" / script), *arguments]
        subprocess.run(command, check=True, env=environment, timeout=120)
        calls = {name: [] for name in NAMES}
        for line in record.read_text().splitlines():
            name, arguments = re.fullmatch(r"(?:-m )?(lab \w+|\S+) ?(.*)", line).groups()
            calls[name].append(arguments.split())
        record.unlink()
        return calls

    return run


def read(calls):
    """The trainings of a script, {name: settings}; every one is another one."""
    configs = [parse(args) for args in calls["lab train"]]
    same = [repr({**vars(config), "name": None}) for config in configs]
    assert len({*same}) == len({(config.out, config.name) for config in configs}) == len(configs)
    return {f"{config.out}/{config.name}": config for config in configs}


@pytest.mark.parametrize(
    "script, arguments, variables, trainings, figures",
    [
        ("ablations.sh", (), {}, 18, ["compare"]),
        ("pareto.sh", (), {}, 72, ["compare"]),
        ("pays.sh", (), {}, 53, [*["compare"] * 4, "layers"]),
        ("warmup.sh", (), {}, 116, [*["compare"] * 5, "within", *["compare"] * 2]),
        ("depth.sh", (), {}, 14, ["depth", "depth", "compare"]),
        ("price.sh", (), {}, 21, ["compare"] * 4),
        ("pareto.sh", (), {"SCALE": "small", "SEEDS": "5"}, 24, []),
        ("grid.sh", (), {}, 70, ["compare"] * 3),
        ("layers.sh", (), {}, 69, ["layers"] * 3),
        ("paper.sh", (), {"TRY": "1"}, 2, []),
        ("gpu.sh", ("b",), {"STEPS": "7"}, 3, []),
    ],
)
def test_flags(script, arguments, variables, trainings, figures, run_script, tmp_path):
    """Catches an unknown flag, two names of one training, a seed that changes nothing, a training or figure
    left out, and arms that differ in more than they should."""
    folder = script.removesuffix(".sh")
    (tmp_path / "out" / folder / variables.get("SCALE", "tiny")).mkdir(parents=True)
    calls = run_script(script, *arguments, **variables)
    configs = [*read(calls).values()]
    assert len(configs) == trainings
    assert [args[0] for args in calls["lab analyze"]] == figures
    methods = {config.model.method for config in configs}
    if script == "ablations.sh":
        parts = {kind.method for kind in all_methods() if kind.method.startswith("ablation-")}
        assert methods == {"ponderlm3", *parts} - {"ablation-price", "ablation-price-grid"}  # of price.sh
    if script == "pareto.sh":
        assert len(methods) == 11
        assert len({(c.steps, c.batch_size, c.learning_rate, c.data, c.precision) for c in configs}) == 1
    if script == "gpu.sh":
        vanilla, one, three = configs
        assert changes(one, three).keys() == {"ponder_steps"} and vanilla.steps == one.steps == 7
        assert changes(vanilla, three).keys() == {"method", "ponder_steps", "step_price"}


def test_what_is_done_is_not_done_again(run_script, tmp_path):
    """Catches a finished run that is trained again, an interrupted one that begins anew."""
    out = tmp_path / "out/ablations/tiny"
    first = run_script("ablations.sh")["lab train"]
    names = [args[args.index("--name") + 1] for args in first]
    for name, file in zip(names, ("results.json", "train.json"), strict=False):
        (out / name).mkdir(parents=True)
        (out / name / file).touch()
    again = run_script("ablations.sh")["lab train"]
    assert len(again) == len(first) - 1
    assert ["--resume", "--out", "out/ablations/tiny", "--name", names[1]] in again


def test_llama(run_script, tmp_path):
    """Catches a flag that train.py does not know, and arms that differ in more than they should."""
    calls, place = run_script("llama.sh"), tmp_path / "out/llama/hugging-face"
    interop.save(build(find("vanilla").Config(31, 32, method="vanilla", ponder_steps=0)), place)
    assert calls["lab convert"] == [["out/llama/plain-0", "--to", "out/llama/hugging-face"]]
    for args in calls["lab train"]:
        args[:] = [str(place) if arg == "out/llama/hugging-face" else arg for arg in args]
    configs = read(calls)
    arms = {name: configs[f"out/llama/{name}-1"] for name in ("longer", "grid1", "grid3", "jacobi3")}
    for arm, differ in (
        ("longer", {"method", "ponder_steps", "reread", "penalty_weight"}),
        ("grid1", {"ponder_steps"}),
        ("jacobi3", {"method"}),
    ):
        assert changes(arms[arm], arms["grid3"]).keys() == differ


def test_paper_in_full(run_script, tmp_path):
    """Catches a corpus, training or benchmark left out, and a finished run that is trained again."""
    (done := tmp_path / "out/paper/70m/looped").mkdir(parents=True)
    (done / "results.json").touch()
    calls = run_script("paper.sh", GPUS="8")
    trainings = calls["torch.distributed.run"]
    assert all("--nproc_per_node=8" in args for args in trainings)
    methods = [parse(args[args.index("train") + 1 :]).model.method for args in trainings]
    assert methods == ["ponderlm3", "ponderlm2", "vanilla"]
    assert [len(calls[name]) for name in ("lab corpus", "lab convert", "lm_eval")] == [1, 4, 8]


def test_lookup(run_script, tmp_path):
    """Catches unknown flags, stages of another beginning or text, rivals with more or less text."""
    calls = run_script("lookup.sh")
    asked = {args[2]: args for args in calls["lab corpus"]}
    flags = {args[args.index("--name") + 1]: args for args in calls["lab train"]}
    assert len(flags) == 5 * 7 + 3 * (7 + 5 + 5 + 1 + 1) + 2 * (2 * 7 + 3)
    configs, before = {}, None
    for name, args in flags.items():
        if "--init-from" in args:  # which is not there: as if it was, but for what it would say
            at, shape = args.index("--init-from"), configs[before].model
            assert args[at + 1] == f"out/lookup/{before}"
            K = [] if "--ponder-steps" in args else ["--ponder-steps", str(shape.ponder_steps)]
            args = [*args[:at], *args[at + 2 :], *K, "--method", shape.method]
        configs[name] = parse(args)
        assert configs[name].data in asked
        before = name
    seen = {name: config.steps * config.batch_size for name, config in configs.items()}
    for rival in ("fixed", "looped"):
        stages = (f"{rival}{stage}-1" for stage in ("-learns", "-K1", "-K2", "-K3", ""))
        assert sum(seen[stage] for stage in stages) == seen["once-1"] == seen["vanilla-1"]
    assert [args[2] for args in calls["lab analyze"]] == 4 * ["data/lookup-all"] + ["data/long-all"]
    deepest = {
        name: max(configs[f"{name}-K{stage}-0"].model.ponder_steps for stage in range(1, 6))
        for name in ("capped-1", "capped-3")
    }
    assert deepest == {"capped-1": 1, "capped-3": 3}
    for folder in asked:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "meta.json").touch()
    calls = run_script("lookup.sh", SEEDS="4", RUNS="once vanilla")
    assert [len(calls[name]) for name in ("lab corpus", "lab train", "lab analyze")] == [0, 2, 0]


@pytest.mark.slow
def test_gpu_at_toy_size(tmp_path):
    """Catches a command of the script that does not run."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "data", "out", "figures"))
    environment = os.environ | {"TRY": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment["MODEL"] = "out/try/gpu/vanilla-0"  # of part b
    command = ["bash", "lab/runs/gpu.sh", *"abcd"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for printed in (
        " passed", "grid-3-0 (grid, K = 3)", "time_ratio", "slot_ratio", "taught-0-cpu",
        *(f"part {part} ran to its end" for part in "abcd"), "left out: a GPU",
    ):  # fmt: skip
        assert printed in done.stdout, printed
