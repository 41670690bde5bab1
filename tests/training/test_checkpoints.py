"""Whatever stops a training, nothing that was saved is lost, and it goes on as if nothing was."""

import json
import math
import os
import pickle
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, full_disk
from safetensors.torch import load_file

import train as train_module
from baselines import configure
from corpus.tokenizers import IdTokenizer, Tokenizer
from interop import load
from runtime import UserError
from train import make_optimizer, train
from training.config import check, parse, read_settings, validation_windows
from training.runs import (
    best_checkpoint,
    checkpoints,
    locked,
    new_run,
    read_lines,
    read_results,
    read_trainer,
    step_of,
)

TRAIN = str(ROOT / "train.py")
SMALL = shlex.split(
    "--hidden-size 32 --intermediate-size 64 --num-hidden-layers 1 --head-dim 16 --block-size 16 "
    "--refinements 0 1 --batch-size 6 --micro-batch-size 2 --precision float32 --device cpu "
    "--eval-windows 4 --preset tiny --data text.txt"
)


@pytest.fixture
def config(config):
    """In an empty directory, with draws of R, micro-batches, and more than one epoch."""
    config.model.refinements, config.name, config.out = (0, 2), "x", "out"
    return replace(config, micro_batch_size=4, steps=80, eval_every=20, log_every=1)


def interrupt_at(monkeypatch, step, number=signal.SIGTERM, function="draw_refinements"):
    """Send this process a signal in the midst of a step, or in a function of train.py."""
    original = getattr(train_module, function)

    def interrupted(*args, **kwargs):
        if function != "draw_refinements" or args[0] == step:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    monkeypatch.setattr(f"train.{function}", interrupted)


def losses(run):
    """All that is logged but times and starts."""
    rows = [row for row in read_lines(run / "log.jsonl") if "torch" not in row]
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def weights(run):
    return load_file(run / "model.safetensors")


def assert_same(a, b):
    assert losses(a) == losses(b)
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    "method, precision",
    [("ponderlm3", "float32"), ("ponderlm3", "bfloat16"), ("vanilla", "float32")],
)
def test_resume_is_exact(config, monkeypatch, capsys, method, precision):
    """Catches any state that a checkpoint lacks, such as the embedding scale of one that is saved
    as a Llama: losses and weights are equal bit for bit; and --resume of another run than the
    last."""
    handler = signal.getsignal(signal.SIGINT)
    config = replace(config, precision=precision, model=configure(config.model, method))
    whole, results = train(replace(config, name="y"))
    for step in (7, 33, 39):  # between checkpoints, and just before one
        with monkeypatch.context() as patch:
            interrupt_at(patch, step, signal.SIGINT if step == 33 else signal.SIGTERM)
            run, nothing = train(config)
        assert nothing is None and step_of(checkpoints(run)[-1]) == step + 1
        assert "python train.py --resume --name x\n" in capsys.readouterr().out
        config = parse(["--resume"])
    run, again = train(config)
    assert_same(whole, run)
    assert results == again
    assert signal.getsignal(signal.SIGINT) is handler


def test_interrupted_evaluation(config, monkeypatch):
    """Catches a checkpoint that a signal within its evaluation prevents, and a final evaluation
    that is waited for, or lost: all is saved then, so it stops at once. And files of a write that
    was cut short, which stay for good."""
    whole, results = train(replace(config, name="whole"))
    with monkeypatch.context() as patch:
        interrupt_at(patch, 0, function="evaluate")
        run, nothing = train(config)
    assert nothing is None and step_of(checkpoints(run)[-1]) == 20
    assert [row["step"] for row in losses(run) if "val" in row] == [20]
    with monkeypatch.context() as patch:
        patch.setattr("training.validation.PermutedRouter", None)  # not reached
        interrupt_at(patch, 0, function="final_report")
        assert train(parse(["--resume"]))[1] is None
    (run / "step-00000007.tmp").mkdir()
    (run / "results.json.tmp").touch()
    assert train(parse(["--resume"]))[1] == results and not list(run.glob("*.tmp"))
    assert_same(whole, run)


def test_more_steps(config):
    """Catches a longer training that starts anew or is refused, and a shorter one that passes."""
    run, _ = train(replace(config, steps=20))
    with pytest.raises(UserError, match="is beyond step 10; go on with a larger --steps"):
        train(parse(["--resume", "--steps", "10"]))
    train(parse(["--resume", "--name", "x", "--steps", "24", "--learning-rate", "0.001"]))
    assert [row["step"] for row in losses(run) if "loss" in row] == list(range(1, 25))
    start = [row for row in read_lines(run / "log.jsonl") if "changed" in row][-1]
    assert start["changed"] == {"steps": [20, 24], "learning_rate": [0.01, 0.001]}
    assert read_settings("out", "x")[1].steps == 24


@pytest.mark.parametrize("long, times", [(0, 1), (600, 0)])
def test_a_long_training_hears_of_the_compiler(config, monkeypatch, capsys, long, times):
    """Catches a training that is not told of --compile, told at every line, or told for seconds."""
    monkeypatch.setattr("training.runs.LONG", long)
    train(replace(config, steps=3))
    assert capsys.readouterr().out.count("train.py --resume --name x --compile") == times


def test_changed_settings_are_refused(config, tmp_path):
    """Catches a resumed training that is another one, without a word; and one that is touched."""
    run, _ = train(replace(config, steps=2))
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    argv = "--resume --batch-size 4 --ponder-steps 1 --log-every 7 --router-offset 0 1"
    with pytest.raises(UserError, match="without --resume") as error:
        train(parse(shlex.split(argv)))
    for line in ("batch_size: 8 -> 4", "ponder_steps: 2 -> 1", "router_offset: None -> (0.0, 1.0)"):
        assert line in str(error.value)
    assert "log_every" not in str(error.value)
    Path(config.data).write_text("another text, longer than the one before. " * 300)
    with pytest.raises(UserError, match=r"corpus: .* -> "):
        train(parse(["--resume"]))
    assert before == {file: file.stat().st_mtime_ns for file in run.rglob("*")}


def test_other_tokens_of_the_same_number(config, tmp_path):
    """Catches a prepared corpus whose tokens, of training or validation, or whose tokenizer
    changed, but neither its name nor its length; and a run that loses its tokenizer to it."""
    folder = tmp_path / "ids"
    folder.mkdir()
    ids = np.arange(900, dtype=np.uint16) % 250
    for name in ("train.bin", "val.bin"):
        ids.tofile(folder / name)
    Tokenizer.bytes().save(folder / "tokenizer.json")
    config = replace(config, data=str(folder), tokenizer="auto", steps=2)
    run, _ = train(config)
    train(parse(["--resume", "--steps", "3"]))
    own = (run / "tokenizer.json").read_bytes()
    for name in ("train.bin", "val.bin", "tokenizer.json"):
        before = (folder / name).read_bytes()
        if name == "tokenizer.json":
            IdTokenizer(257).save(folder / name)
        else:
            ids[::-1].tofile(folder / name)
        with pytest.raises(UserError, match=r"corpus: .*sha256"):
            train(parse(["--resume", "--steps", "4"]))
        with pytest.raises(UserError, match="another corpus"):
            validation_windows(run)
        (folder / name).write_bytes(before)
    assert (run / "tokenizer.json").read_bytes() == own


@pytest.mark.parametrize("method", ["ablation-router", "ablation-integration", "mor-token"])
def test_weights_without_a_gradient(config, method):
    """Catches a router that does not learn, which AdamW keeps nothing of, taken for a damaged
    checkpoint when the training goes on."""
    changes = {"penalty_weight": 0.0, "backprop_passes": 1}
    model = configure(config.model, method, **changes if method == "ablation-integration" else {})
    run, _ = train(replace(config, model=model, steps=2))
    train(parse(["--resume", "--steps", "3"]))
    assert step_of(checkpoints(run)[-1]) == 3


def test_nothing_to_resume(config):
    """Catches a stack trace where there is no run, or a train.json that is none."""
    with pytest.raises(UserError, match="train one first"):
        parse(["--resume"])
    with pytest.raises(UserError, match=r"nothing to resume; train without"):
        parse(["--resume", "--name", "x"])
    run, _ = train(replace(config, steps=1))
    for text in ("", "[]", '{"config": {"steps": 3}, "corpus": {}}', '{"config": {"model": {}'):
        (run / "train.json").write_text(text)
        with pytest.raises(UserError, match=r"train\.json"):
            parse(["--resume"])


def test_newest_two_and_the_best_are_kept(config, monkeypatch):
    """Catches a disk that fills up, and a best model that is thrown away."""
    values = iter([3.0, 1.0, 2.0, 4.0, 1.5])
    real = train_module.evaluate
    monkeypatch.setattr(
        "train.evaluate",
        lambda *a, **k: {**real(*a, **k), **({"loss": next(values)} if "R" in k else {})},
    )
    monkeypatch.setattr("train.final_report", lambda *a: {})
    run, _ = train(replace(config, steps=50, eval_every=10))
    assert [step_of(path) for path in checkpoints(run)] == [20, 40, 50]
    assert step_of(best_checkpoint(run)) == 20
    best, newest = load(checkpoints(run)[0]), load(run)
    assert not torch.equal(best.lm_head.weight, newest.lm_head.weight)
    assert os.path.samefile(run / "model.safetensors", run / "step-00000050/model.safetensors")


def test_full_disk(config):
    """Catches a half-written checkpoint, and a message that helps nobody."""
    run, _ = train(replace(config, steps=20))
    message = r"cannot write to out/x: .*step 20; .*--resume"
    with full_disk(50_000), pytest.raises(UserError, match=message):
        train(parse(["--resume", "--steps", "40"]))
    assert [path.name for path in run.glob("step-*")] == ["step-00000020"]
    train(parse(["--resume", "--steps", "40"]))
    assert step_of(checkpoints(run)[-1]) == 40


def test_directory_goes_away(config, monkeypatch):
    """Catches a training that stops without a word of what to do when its disk is gone."""
    original = train_module.draw_refinements

    def vanish(step, config):
        if step == 25:
            os.rename("out", "away")
        return original(step, config)

    monkeypatch.setattr("train.draw_refinements", vanish)
    with pytest.raises(UserError, match=r"No such file or directory.*bring back what is missing"):
        train(config)
    assert step_of(checkpoints("away/x")[-1]) == 20


class Malice:
    def __reduce__(self):
        return os.mkdir, ("malice",)


def in_bytes(name, change):
    """What may become of a checkpoint: a change of the bytes of one of its files."""

    def damage(directory):
        content = (directory / name).read_bytes()
        (directory / name).unlink()  # the run's own model is the same file
        (directory / name).write_bytes(change(content))

    return damage


def in_trainer(change):
    """A change of the content of trainer.pt, with the state of the first parameter."""

    def damage(directory):
        trainer = torch.load(directory / "trainer.pt", weights_only=True)
        change(trainer, trainer["optimizer"]["state"][0])
        torch.save(trainer, directory / "trainer.pt")

    return damage


DAMAGED = {  # what is said: what was done
    r"trainer\.pt ": [
        lambda d: (d / "trainer.pt").unlink(),
        in_bytes("trainer.pt", lambda _: pickle.dumps(Malice())),
        in_bytes("trainer.pt", lambda b: b[: len(b) // 2]),
        in_bytes("trainer.pt", lambda _: b""),
        in_bytes("trainer.pt", lambda _: b"hello"),
        in_trainer(lambda trainer, first: trainer.update(step=3)),
        in_trainer(lambda trainer, first: trainer.update(seconds=math.nan)),
        in_trainer(lambda trainer, first: trainer["optimizer"].update(state={})),
        # which the fused kernel would read beyond its end
        in_trainer(lambda trainer, first: first.update(exp_avg=torch.zeros(3))),
        in_trainer(lambda trainer, first: first.update(exp_avg_sq=torch.zeros(3))),
        in_trainer(lambda trainer, first: first.update(exp_avg=first["exp_avg"].to_sparse())),
        in_trainer(lambda trainer, first: first.update(exp_avg=first["exp_avg"].int())),
    ],
    "is damaged": [
        in_bytes("model.safetensors", lambda b: b[:-100]),
        in_bytes("model.safetensors", lambda _: b""),
    ],
    "has no model.safetensors": [lambda d: (d / "model.safetensors").unlink()],
    "not a JSON object": [in_bytes("config.json", lambda _: b"[]")],
    "penalty_weight": [in_bytes("config.json", lambda b: b.replace(b"0.5", b"0.0"))],
}


@pytest.mark.parametrize(
    "message, damage", [(message, damage) for message, row in DAMAGED.items() for damage in row]
)
def test_damaged_checkpoint(config, message, damage):
    """Catches code that a checkpoint runs, a stack trace for a damaged one, and a copy of one that
    is taken for the newest."""
    run, _ = train(replace(config, steps=40))
    newest = run / "step-00000040"
    shutil.copytree(run / "step-00000020", run / "step-00000050-copy")
    damage(newest)
    with pytest.raises(UserError, match=f"{message}.*move {newest} out of {run}"):
        train(parse(["--resume"]))
    assert not Path("malice").exists()
    shutil.rmtree(newest)
    train(parse(["--resume"]))  # the way out works
    assert checkpoints(run)[-1] == newest and (run / "step-00000050-copy").exists()


def test_a_view_for_a_state(config):
    """Catches a state that claims more memory than it has, which the fused kernel writes beyond."""
    run, _ = train(replace(config, steps=20))
    view = lambda x: torch.zeros(1, 1).expand(x.shape)  # noqa: E731
    newest, optimizer = checkpoints(run)[-1], make_optimizer(load(run), config)
    in_trainer(lambda _, first: first.update(exp_avg_sq=view(first["exp_avg_sq"])))(newest)
    read_trainer(newest, optimizer)
    for values in optimizer.state_dict()["state"].values():
        for value in values.values():
            assert value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes


def test_one_process_a_run(config, monkeypatch):
    """Catches two processes that write one run, and a new one that overwrites what is there, or is
    refused after minutes of reading text."""
    train(replace(config, steps=20))
    with monkeypatch.context() as patch:
        patch.setattr("training.config.open_corpus", None)  # not reached
        with pytest.raises(UserError, match="out/x exists"):
            train(replace(config, steps=1))
    with locked(Path("out/x")), pytest.raises(UserError, match="another process is training"):
        train(parse(["--resume", "--steps", "30"]))
    train(parse(["--resume", "--steps", "30"]))
    for name in ("model.safetensors.index.json", "model.safetensors", "tokenizer.json"):
        Path("out/own").mkdir()
        Path("out/own", name).write_text("kept")
        with pytest.raises(UserError, match="own exists"):
            new_run("out", "own", "tiny")
        shutil.rmtree("out/own")
    Path("out/own").mkdir()
    for name in (".lock", "train.json.tmp", "train.json", "tokenizer.json", "log.jsonl"):
        new_run("out", "own", "tiny")  # a training that was killed before its first checkpoint
        Path("out/own", name).touch()
    for name in ("a/b", "..", "."):
        with pytest.raises(UserError, match="not a plain name"):
            new_run("out", name, "tiny")


def test_weights_that_are_not_finite(config, monkeypatch):
    """Catches a checkpoint of nan, and a validation of nan that the training passes over."""
    step = torch.optim.AdamW.step

    def poisoned(self, *args):
        step(self, *args)
        self.param_groups[0]["params"][0].data.fill_(torch.nan)

    with monkeypatch.context() as patch:
        patch.setattr("torch.optim.AdamW.step", poisoned)
        patch.setattr("train.evaluate", lambda *a, **k: {"loss": 1.0})
        with pytest.raises(UserError, match="weights of step 1 are not finite"):
            train(replace(config, eval_every=1))
    monkeypatch.setattr("train.evaluate", lambda *a, **k: {"loss": math.nan})
    with pytest.raises(UserError, match=r"step 20 is not finite \(validation nan\)"):
        train(config)
    assert checkpoints("out/x") == []


def test_torn_log(config):
    """Catches a log that a kill in the midst of a line makes unreadable, and rows kept twice."""
    whole, _ = train(replace(config, name="whole", steps=30))
    run, _ = train(replace(config, steps=20))
    with open(run / "log.jsonl", "a") as log:
        log.write(json.dumps({"step": 21, "loss": 7.0}) + '\n{"step": 22, "lo')
    train(parse(["--resume", "--name", "x", "--steps", "30"]))
    assert [row["step"] for row in losses(run) if "loss" in row] == list(range(1, 31))
    assert losses(whole)[:20] != [] and not any(row.get("loss") == 7.0 for row in losses(run))
    odd = b'hello;5;{"a": 1};\xff;{"step": -1};{"step": 1e19};{"step": 1, "val": "x"}'
    for line in (*odd.split(b";"), b"[" * 3000):
        (run / "log.jsonl").write_bytes(line + b"\n")
        with pytest.raises(UserError, match=r"log\.jsonl has a line that is not of a log"):
            read_lines(run / "log.jsonl")


def start(directory, *command, stderr=subprocess.STDOUT, **options):
    """A process of Python, with one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    return subprocess.Popen(
        [sys.executable, *command], cwd=directory, env=environment, stdout=subprocess.PIPE,
        stderr=stderr, **options,
    )  # fmt: skip


def output_of(process):
    """What a process prints that ends well."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output.decode()


def start_patched(directory, patches):
    """main of train.py for two steps, after some patches."""
    script = (
        f"import atexit, os, signal, sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "import runtime, train; from training import runs\n"
        f"sys.argv = ['train.py', *{[*SMALL, '--steps', '2', '--name', 'x']}]; {patches}\n"
        "runtime.command_line(train.main)"
    )
    return start(directory, "-c", script, stderr=subprocess.PIPE)


@pytest.fixture
def directory(config, tmp_path):
    """Where `config` has put its text."""
    return tmp_path


def test_signals(directory):
    """Catches a Ctrl-C that loses the training or fails, and a second one that is not obeyed."""
    flags = [*SMALL, "--steps", "100000", "--log-every", "1"]
    for number in (signal.SIGINT, signal.SIGTERM):
        process = start(directory, TRAIN, *flags, "--name", number.name)
        while b"step 3/" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output  # so that a script goes no further
        assert f"python train.py --resume --name {number.name}" in output.decode()
        steps = [row["step"] for row in read_lines(directory / "out" / number.name / "log.jsonl")]
        assert step_of(checkpoints(directory / "out" / number.name)[-1]) == steps[-1]
    # A step that takes forever: the second signal does not wait for it.
    process = start_patched(directory, "train.draw_refinements = lambda *_: time.sleep(600)")
    while b"torch" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert b"once more" in process.stderr.readline() + process.stderr.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT


INTERRUPTED = "train.final_report = lambda *args: os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize("second", [
    "atexit.register(os.kill, os.getpid(), signal.SIGINT)",
    "train.sys.exit = lambda status: os.kill(os.getpid(), signal.SIGINT)",
    "runs.resume_command = lambda run: os.kill(os.getpid(), signal.SIGINT)",
    "real = train.train; train.train = lambda x: (real(x), os.kill(os.getpid(), signal.SIGINT))[0]",
])  # fmt: skip
def test_ctrl_c_twice_in_the_final_evaluation(directory, second):
    """Catches a stack trace behind the message that all is saved, wherever the second one comes."""
    process = start_patched(directory, f"{INTERRUPTED}; {second}")
    _, errors = process.communicate(timeout=60)
    assert b"Traceback" not in errors and b"Exception" not in errors, errors
    assert b"once more to exit at once" in errors and process.returncode in (130, -signal.SIGINT)
    assert step_of(checkpoints(directory / "out/x")[-1]) == 2


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_kill_at_any_moment(directory, times):
    """Catches a moment at which a kill leaves a run that cannot go on, or goes on otherwise."""
    flags = [*SMALL, "--steps", "60", "--eval-every", "3", "--log-every", "1"]
    begun = time.monotonic()
    output_of(start(directory, TRAIN, *flags, "--name", "whole"))
    duration = time.monotonic() - begun

    def kill_often(name):
        run, moments, kills = directory / "out" / name, random.Random(name), 0
        while True:
            resume = ["--resume"] if (run / "train.json").exists() else flags
            process = start(directory, TRAIN, *resume, "--name", name)
            try:
                if kills < times:
                    process.wait(moments.uniform(0, duration))
                output_of(process)
                assert_same(directory / "out" / "whole", run)
                if kills == times:
                    return kills
                run.rename(directory / f"{name}-{kills}-{time.monotonic()}")  # once more
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(kill_often, "xy")) == 2 * times


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes(directory, processes):
    """Catches gradients summed and not averaged, a batch that depends on the number of processes,
    R drawn by each for itself, a second writer, and a resume that only the first process makes.
    Weights after 8 steps in float64; in float32 Adam turns rounding errors of small gradients into
    3e-6."""
    (directory / "double.py").write_text(
        f"import sys, torch; sys.path.insert(0, {str(ROOT)!r})\n"
        "torch.set_default_dtype(torch.float64)\n"
        "if __name__ == '__main__':\n    from train import main; main()\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    flags = [*SMALL, "--steps", "8", "--log-every", "1", "--eval-every", "4", "--batch-size", "12"]

    def run(*command):
        assert output_of(start(directory, *command)).count("step 8/8  loss") == 1

    run("double.py", *flags, "--name", "one")
    one, many = directory / "out/one", directory / "out/many"
    for command in ([*flags, "--name", "many"], ["--resume", "--name", "many"]):
        run(*torchrun, "double.py", *command)
        for name, weight in weights(one).items():
            assert weight.dtype == torch.float64
            torch.testing.assert_close(weight, weights(many)[name], atol=1e-9, rtol=0)
        for a, b in zip(losses(one), losses(many), strict=True):
            assert a == pytest.approx(b, abs=1e-6)
        shutil.rmtree(many / "step-00000008")


@pytest.mark.slow
def test_two_nodes(directory):
    """Catches two machines, here two agents of torchrun on one, whose training is not that of one
    process, or cannot go on by one when the other machine is gone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = ["--master-addr=127.0.0.1", f"--master-port={free.getsockname()[1]}"]
    flags = [*SMALL, *shlex.split("--log-every 1 --eval-every 4 --batch-size 12")]

    def nodes(*flags):
        command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", *address]
        ranks = (["--max-restarts=0", f"--node-rank={i}", TRAIN, *flags] for i in range(2))
        return [start(directory, *command, *rank, start_new_session=True) for rank in ranks]

    one = start(directory, TRAIN, *flags, "--steps", "8", "--name", "one")
    assert "step 8/8  loss" in output_of(one)
    outputs = [output_of(node) for node in nodes(*flags, "--steps=8", "--name=two")]
    assert ["step 8/8  loss" in output for output in outputs] == [True, False], outputs
    one, two = directory / "out/one", directory / "out/two"
    for a, b in zip(losses(one), losses(two), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    assert len(list((directory / "data").iterdir())) == 1  # prepared once
    first, second = nodes(*flags, "--steps=100000", "--name=cut")
    while b"step 9/" not in first.stdout.readline():
        assert first.poll() is None
    workers = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
    for pid in (second.pid, *map(int, workers)):  # the machine is gone
        os.kill(pid, signal.SIGKILL)
    for node in (second, first):  # and the other one does not wait for ever
        node.communicate(timeout=120)
    assert first.returncode
    again = start(directory, TRAIN, "--resume", "--name", "cut", "--steps", "12")
    assert "step 12/12  loss" in output_of(again)


def test_processes_that_do_not_fit(config):
    """Catches a penalty whose micro-batch depends on the number of processes."""
    check(replace(config, batch_size=8, micro_batch_size=4), processes=2)
    for micro, way_out in ((8, "--micro-batch-size 4 would do"), (None, "--micro-batch-size 4")):
        with pytest.raises(UserError, match=rf"2 processes cannot share 8 .*{way_out}"):
            check(replace(config, batch_size=8, micro_batch_size=micro), processes=2)
    with pytest.raises(UserError, match=r"3 processes .*change --batch-size"):
        check(replace(config, batch_size=8, micro_batch_size=4), processes=3)


@pytest.mark.parametrize("change", [
    {"hard": None}, {"hard": {}}, {"hard": 1e19}, {"R": -1}, {"R": 10**19}, {"fixed": []},
    {"unigram_entropy": "3"}, {"trained": {"loss": math.nan}},
])  # fmt: skip
def test_damaged_results(config, change):
    """Catches a stack trace for a final evaluation with fields that are missing or odd."""
    run, results = train(replace(config, steps=1))
    assert read_results(run)["hard"] == results["hard"]
    whole = json.loads((run / "results.json").read_text())
    (key,) = change
    if isinstance(change[key], dict) and change[key]:
        change = {key: whole[key] | change[key]}
    (run / "results.json").write_text(json.dumps(whole | change))
    with pytest.raises(UserError, match=rf"results.json is damaged: {key}.*--resume writes it"):
        read_results(run)
