"""The scripts in runs/, with a stand-in for Python that writes down how it is called."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import interop
from baselines import all_methods, build, find
from training.config import parse
from training.runs import changes

ROOT = Path(__file__).parent.parent.parent
MODULES = ("corpus", "interop", "evaluation", "bench", "torch.distributed.run")


@pytest.fixture
def run_script(tmp_path):
    """Run a script in a copy of runs/; returns the arguments of each call, by script or module."""
    shutil.copytree(ROOT / "runs", tmp_path / "runs")
    stand_in, record = tmp_path / "python", tmp_path / "record"
    inline = f'-c) cd "{ROOT}"; exec "{sys.executable}" "$@" ;;'
    stand_in.write_text(
        f'#!/bin/bash\ncase "$1" in\n{inline}\n*) echo "$@" >> "{record}" ;;\nesac\n'
    )
    stand_in.chmod(0o755)

    def run(script, *arguments, **variables):
        environment = os.environ | {"PYTHON": str(stand_in)} | variables
        command = ["bash", str(tmp_path / "runs" / script), *arguments]
        subprocess.run(command, check=True, env=environment, timeout=120)
        calls = {name: [] for name in ("train.py", "analyze.py", *MODULES)}
        for line in record.read_text().splitlines():
            module, name, arguments = re.fullmatch(r"(-m )?(\S+) ?(.*)", line).groups()
            assert bool(module) == (name in MODULES), line
            calls[name].append(arguments.split())
        record.unlink()
        return calls

    return run


def test_llama(run_script, tmp_path):
    """Catches a flag that train.py does not know, and arms that differ in more than they should."""
    calls = run_script("llama.sh")
    trained, analyzed = calls["train.py"], calls["analyze.py"]
    assert calls["interop"] == [["out/llama/plain-0", "--to", "out/llama/hugging-face"]]
    assert [args[0] for args in analyzed] == ["pareto"]
    base = tmp_path / "out/llama/hugging-face"
    config = find("vanilla").Config(vocab_size=31, hidden_size=32, method="vanilla", ponder_steps=0)
    interop.save(build(config), base)
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
    assert len(run_script("llama.sh", SEEDS="2")["train.py"]) == 2


def test_pareto(run_script, tmp_path):
    """Catches a flag that train.py does not know, a method or budget that is left out, a seed that
    is not used, a finished run that is trained again, an interrupted one that begins anew."""
    (out := tmp_path / "out/pareto/tiny").mkdir(parents=True)
    calls = run_script("pareto.sh")
    trained, analyzed = calls["train.py"], calls["analyze.py"]
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
        (kind.method, seed)
        for kind in all_methods()
        for seed in range(3)
        if not kind.method.startswith("ablation-")
    }
    assert (
        len({(c.steps, c.batch_size, c.learning_rate, c.data, c.precision) for c in configs}) == 1
    )
    for name, file in (("vanilla-0-0", "results.json"), ("vanilla-0-1", "train.json")):
        (out / name).mkdir()
        (out / name / file).touch()
    again = run_script("pareto.sh")["train.py"]
    assert len(again) == len(trained) - 1
    assert ["--resume", "--out", "out/pareto/tiny", "--name", "vanilla-0-1"] in again


def test_frontier(run_script, tmp_path):
    """Catches a flag that train.py does not know, a method or seed that is left out, and pairs that
    differ in more than their method."""
    for name, method, K in (
        ("out/cost/vanilla-12600-0", "vanilla", 0),
        ("out/grown/1-0", "ponderlm3", 1),
        ("out/grown/2-0", "ponderlm3", 2),
    ):
        config = find(method).Config(method=method, ponder_steps=K)
        interop.save(build(config), tmp_path / name)
    calls = run_script("frontier.sh")
    names = [*4 * ["frontier"], "pareto"]
    assert [args[0] for args in calls["analyze.py"]] == names
    configs = {}
    for args in calls["train.py"]:
        begins = args.index("--init-from") + 1 if "--init-from" in args else 0
        if begins:
            args[begins] = str(tmp_path / args[begins])
        config = parse(args)
        configs[config.out, config.name] = config
    assert len(configs) == len(calls["train.py"])
    rivals = "vanilla", "ponderlm2-1", "ponderlm2-2"
    for folder, seeds, names in (
        ("out/frontier", range(5), (*rivals, "ponderlm2-4", "ponderlm3-2", "ponderlm3-4")),
        ("out/long", range(5), (*rivals, "ponderlm2-3")),
        ("out/size", range(1), rivals),
    ):
        for seed in seeds:
            ours = configs[folder, f"ponderlm3-3-{seed}"]
            assert ours.model.method == "ponderlm3" and ours.seed == seed
            for name in names:
                differ = changes(ours, configs[folder, f"{name}-{seed}"]).keys()
                assert differ <= {"method", "ponder_steps", "refinements", "name", "router_offset"}
    deepest = {name: config.model.offset[-1] for name, config in configs.items()}
    for seed in range(5):  # the settings that were chosen, and those that were not
        for more in (0, 5):
            assert deepest["out/frontier", f"ponderlm3-3-{seed + more}"] == 12
        assert deepest["out/choice", f"ponderlm3-3-{seed}"] == 6
        for K in (1, 2, 3):
            folders = ("out/frontier", "out/choice")
            pair = [
                configs[folder, f"ponderlm2-{K}-{seed}"].model.refinements for folder in folders
            ]
            assert sorted(pair) == [(2, 2), (3, 3)]
    big, tiny = (build(configs[f"out/{f}", "ponderlm3-3-0"].model) for f in ("size", "frontier"))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (big, tiny)]
    assert sizes[0] / sizes[1] == pytest.approx(8, abs=0.1)
    depths = {c.model.ponder_steps for c in configs.values() if c.model.method == "ponderlm3"}
    assert depths == {1, 2, 3, 4}
    models = [config.model for config in configs.values()]
    assert {m.penalty_weight for m in models if m.penalty == "mean"} == {0.003, 0.01, 0.03}
    assert len(run_script("frontier.sh", SEEDS="1", PARTS="pairs choice")["train.py"]) == 16


def test_remedies(run_script, tmp_path):
    """Catches flags that train.py does not know, and names that hide that two runs are the same."""
    (tmp_path / "out/remedies/tiny").mkdir(parents=True)
    calls = run_script("remedies.sh")
    trained, analyzed = calls["train.py"], calls["analyze.py"]
    configs = [parse(args) for args in trained]
    assert len({config.name for config in configs}) == len(configs) and len(analyzed) == 1
    assert len({repr(replace(config, name=None)) for config in configs}) == len(configs)


def test_tiny(run_script, tmp_path):
    """Catches flags that train.py does not know, seeds that are left out or are all the same."""
    (tmp_path / "out/tiny").mkdir(parents=True)
    calls = run_script("tiny.sh")
    trained, analyzed = calls["train.py"], calls["analyze.py"]
    configs = [parse(args) for args in trained]
    assert len({repr(replace(config, name=None)) for config in configs}) == 12 == len(configs)
    assert [args[0] for args in analyzed] == ["pareto"]
    assert len(run_script("tiny.sh", SEEDS="1")["train.py"]) == 4


def test_ablations(run_script, tmp_path):
    """Catches flags that train.py does not know, and an ablation that is none."""
    (tmp_path / "out/ablations/tiny").mkdir(parents=True)
    calls = run_script("ablations.sh")
    trained, analyzed = calls["train.py"], calls["analyze.py"]
    configs = [parse(args) for args in trained]
    assert len(configs) == 21 and len(analyzed) == 1
    ablations = {kind.method for kind in all_methods() if kind.method.startswith("ablation-")}
    assert {config.model.method for config in configs} == {"ponderlm3", *ablations}
    assert len({repr(replace(config, name=None)) for config in configs}) == len(configs)


def test_paper(run_script, tmp_path):
    """Catches a recipe that does not begin, of either size."""
    configs = [parse(args) for args in run_script("paper.sh", TRY="1")["train.py"]]
    assert [(config.preset, config.steps) for config in configs] == [("70m", 2), ("410m", 2)]


def test_paper_in_full(run_script, tmp_path):
    """Catches a corpus, training or benchmark that is left out, and a finished run that is trained
    again."""
    (done := tmp_path / "out/paper/70m/looped").mkdir(parents=True)
    (done / "results.json").touch()
    calls = run_script("paper.sh", GPUS="8")
    assert calls["corpus"] == [["stream", "pile", "--tokens", "15e9", "--folder", "data/pile"]]
    trainings = calls["torch.distributed.run"]
    flags = [args[args.index("train.py") + 1 :] for args in trainings]
    assert all("--nproc_per_node=8" in args for args in trainings)
    methods = [parse(args).model.method for args in flags]
    assert methods == ["ponderlm3", "ponderlm2", "vanilla"]
    shots = [args[args.index("--num-fewshot") + 1] for args in calls["evaluation"]]
    assert shots == ["0", "5"] * 4


def test_lookup(run_script, tmp_path):
    """Catches flags that train.py does not know, stages that do not begin from the one before, or
    have another text, rivals with more or less text, a task that is prepared again, and finished
    runs that are trained again."""
    calls = run_script("lookup.sh")
    asked = {args[2]: args[args.index("--lookups") + 1 :] for args in calls["corpus"]}
    assert [len(numbers) for numbers in asked.values()] == [2, 3, 4, 5, 6, 6]
    flags = {args[args.index("--name") + 1]: args for args in calls["train.py"]}
    assert len(flags) == 3 * (5 + 5 + 1 + 5 + 5 + 1)
    configs = {}
    for name, args in flags.items():
        method, *learns, K, seed = name.split("-")
        if "--init-from" in args:  # which is not there: as if it was, but for what it would say
            at, K = args.index("--init-from"), int(K[1])
            before = f"{method}-learns-K{K}-{seed}"
            if learns:
                before = f"{method}-{'learns-' * (K > 2)}K{K - 1}-{seed}"
            assert args[at + 1] == f"out/lookup/{before}" and before in configs
            kept = " ".join(args[:at] + args[at + 2 :]).replace("--ponder-warmup 0", "")
            more = "" if learns else f" --ponder-steps {K}"
            args = [*kept.split(), *more.split(), "--method", method.replace("grown", "ponderlm3")]
        configs[name] = config = parse(args)
        K = 3 if method == "vanilla" else config.model.ponder_steps
        assert f"data/lookup-K{K}" == config.data in asked and config.seed == int(seed)
        assert name.split("-")[-2] in (f"K{K}", "L4")
        if method == "grown":
            assert config.model.penalty_weight == (0 if learns else 0.1)
    text = {name: config.steps * config.batch_size for name, config in configs.items()}
    for rival in ("grown", "ponderlm2", "looped"):
        stages = ("learns-K1", "K1", "learns-K2", "learns-K3", "K3")
        total = sum(text[f"{rival}-{stage}-1"] for stage in stages)
        assert total == text["once-K3-1"] == text["vanilla-L4-1"]
    assert configs["grown-learns-K1-0"].model.offset == (0, 0)
    assert configs["grown-K2-0"].model.penalty == "mean"
    assert configs["vanilla-L4-0"].model.num_hidden_layers == 4
    analyzed = calls["analyze.py"]
    assert [args[0] for args in analyzed] == 2 * ["lookup"]
    assert all("data/lookup-all" in args for args in analyzed)
    for folder in asked:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "meta.json").touch()
    (done := tmp_path / "out/lookup/once-K3-1").mkdir(parents=True)
    (done / "results.json").touch()
    calls = run_script("lookup.sh", SEEDS="1", RUNS="once vanilla")
    assert [len(calls[name]) for name in ("corpus", "train.py", "analyze.py")] == [0, 1, 0]


def test_pareto_scale_and_seeds(run_script, tmp_path):
    """Catches variables of the script that change nothing."""
    (tmp_path / "out/pareto/small").mkdir(parents=True)
    calls = run_script("pareto.sh", SCALE="small", SEEDS="5")
    trained, analyzed = calls["train.py"], calls["analyze.py"]
    assert not analyzed
    configs = [parse(args) for args in trained]
    assert {(c.preset, c.seed, c.out) for c in configs} == {("small", 5, "out/pareto/small")}


def test_gpu(run_script):
    """Catches flags that train.py does not know, and models of part b on other texts."""
    ponder, vanilla = map(parse, run_script("gpu.sh", "b", STEPS="7")["train.py"])
    assert changes(ponder, vanilla).keys() == {"method", "ponder_steps"}
    assert (ponder.preset, ponder.steps, ponder.device) == ("small", 7, "cuda")


@pytest.mark.slow
def test_gpu_at_toy_size(tmp_path):
    """Catches a command of the script that does not run, and a failing test that ends with 0."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "data", "out", "figures"))
    environment = os.environ | {"TRY": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}

    def run(*parts):
        command = ["bash", "runs/gpu.sh", *parts]
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)

    done = run(*"abcd")
    assert done.returncode == 0, done.stdout + done.stderr
    for printed in ("4 passed", "soft, all steps", "memory / plain", "MFU", "saved time"):
        assert printed in done.stdout, printed
    (tree / "tests/method/test_golden.py").write_text("def test_wrong():\n    assert False\n")
    assert run("a").returncode == 1
