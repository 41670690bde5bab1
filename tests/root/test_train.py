"""train.py: it learns, and whatever stops it, what was saved goes on as if nothing had happened."""

import fcntl
import json
import math
import os
import pickle
import platform
import pty
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, full_disk, in_bytes, python, small_model, start, tokens

import hardware
import train
from checkpoint import from_json, load
from common import UserError
from data import Windows, open_corpus
from model import Config, PonderLM
from router import bottom_mass_penalty, relaxed_steps
from train import TrainConfig, learning_rate, objective, parse, read_run

TEXT = "the quick brown fox jumps over the lazy dog. " * 200
TINY = (
    "--preset tiny --hidden-size 32 --intermediate-size 64 --num-hidden-layers 1 --head-dim 16 "
    "--block-size 16 --ponder-steps 2 --refinements 0 2 --data text.txt --name x --steps 30 --batch-size 8 "
    "--micro-batch-size 4 --learning-rate 0.01 --log-every 1 --eval-every 10 --eval-windows 8 --device cpu "
    "--precision float32"
)


@pytest.fixture(autouse=True)
def text():
    """The text of all trainings."""
    Path("text.txt").write_text(TEXT)


@pytest.fixture(autouse=True, scope="module")
def signals():
    """The usual ones, also where a script or nohup started these tests and lets some be ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    usual |= {signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def go(flags=""):
    """A training of a second by the flags of TINY and these, or with --resume by these alone."""
    flags = flags if "--resume" in flags else f"{TINY} {flags}"
    return train.train(*parse(shlex.split(flags)))


def interrupt_at(patch, step, number=signal.SIGTERM, function="learning_rate"):
    """Send this process one signal in a step, or in a function of train.py."""
    original, sent = getattr(train, function), []

    def interrupted(*args, **kwargs):
        if not sent and (function != "learning_rate" or args[0] == step):
            sent.append(os.kill(os.getpid(), number))
        return original(*args, **kwargs)

    patch.setattr(train, function, interrupted)


def times(run):
    """When each file of a run was written."""
    return {file: file.stat().st_mtime_ns for file in run.rglob("*")}


def checkpoint(run):
    return torch.load(run / "trainer.pt", weights_only=True)


def log(run):
    """All that is logged but times and starts."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows if "torch" not in row]


def assert_same(a, b):
    """Two runs have the same log and bit for bit the same weights, in both of their files."""
    assert log(a) == log(b)
    whole = checkpoint(a)["model"]
    for tensors in (checkpoint(b)["model"], load(a).state_dict(), load(b).state_dict()):
        assert tensors.keys() == whole.keys()
        assert all(torch.equal(whole[name], x.to(whole[name])) for name, x in tensors.items())


# -- It learns -------------------------------------------------------------------------------------


def test_training_learns_and_leaves_a_run(capsys):
    """Catches a loop that does not learn, is not deterministic, leaves out a file or says nothing."""
    (run, results), said = go("--log-every 20"), capsys.readouterr().out
    assert re.search(r"step 30/30  loss [\d.]+  ce .* left 0:00\n(.*\n)+.*at the fixed point", said)
    assert results["fixed"]["loss"] < results["unigram_entropy"]
    assert results == json.loads((run / "results.json").read_text())
    names = {"config.json", "model.safetensors", "tokenizer.json", "trainer.pt", "train.json"}
    assert {p.name for p in run.iterdir()} == names | {"log.jsonl", "results.json", ".lock"}
    assert [row["step"] for row in log(run) if "loss" in row] == [20, 30]
    assert [row["step"] for row in log(run) if "val" in row] == [10, 20, 30]
    assert_same(run, go("--log-every 20 --name again")[0])


def test_the_loop_written_out(monkeypatch):
    """Catches a step with another R, order of windows, rate, clipped gradient or decay than written out, and
    gradients or losses of micro-batches, of which the last is smaller, that are summed and not averaged."""
    run, _ = go("--steps 3 --micro-batch-size 3 --seed 5 --step-price 0.1 --price-from 0.4 --router-rate 5")
    corpus = open_corpus("text.txt", "bytes")
    config, shape, _ = read_run(run)
    torch.manual_seed(5)
    shape.pop("method")
    model = PonderLM(replace(from_json(Config, shape), vocab_size=257)).train()
    W = model.router.proj.weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not W]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
            {"params": [W], "weight_decay": 0.0, "lr_scale": 5},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    windows, logged = Windows(corpus.train, 16, seed=5), log(run)
    for step in range(3):
        rows = torch.from_numpy(np.stack([windows.window(8 * step + i) for i in range(8)]))
        R = np.random.default_rng((5, step)).integers(0, 3)
        out = model(rows[:, :-1], rows[:, 1:], R=int(R))
        price = 0.1 if step >= 2 else 0.0  # from 0.4 of three steps on
        relaxed = (1 + out.log_w[..., 1:] / math.log(1e4)).clamp(min=0).sum(-1).mean()
        (out.loss + price * relaxed).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        means = {"ce": out.loss.item(), "relaxed": relaxed.item(), "grad_norm": norm.item()}
        assert {key: logged[step][key] for key in means} == pytest.approx(means, rel=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = group.get("lr_scale", 1) * learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad()
    for name, x in load(run).state_dict().items():
        torch.testing.assert_close(x, model.state_dict()[name], atol=1e-6, rtol=1e-5)


def test_micro_batch_of_processes(monkeypatch, capsys):
    """Catches a micro-batch that depends on the number of processes without a word; cpu:0 for a GPU."""
    cpu = torch.device("cpu:0")
    assert train.init_distributed("cpu:0") == (0, 1, cpu)

    def pick(share, micro=None, resume=False):
        config = TrainConfig(batch_size=8, micro_batch_size=micro, resume=resume)
        return train.fit_to_hardware(config, small_model(), None, None, cpu, world_size=8 // share)[0]

    assert pick(8) == 8 and pick(8, 4) == pick(4) == pick(4, 4) == pick(4, 8) == 4
    assert pick(8, 3, resume=True) == 3 and not capsys.readouterr().out
    assert pick(4, 8, resume=True) == 4
    assert "micro-batches have 4 windows instead of 8" in capsys.readouterr().out
    monkeypatch.setattr(train, "init_distributed", lambda _: (0, 3, torch.device("cpu")))
    with pytest.raises(UserError, match="--batch-size 8"):
        go("--micro-batch-size None")


@pytest.mark.parametrize("penalty", ["printed", "token"])
def test_objective(penalty):
    """CE + lambda penalty + price by loops: other tokens or depths, states made to sum to 1, lambda twice."""
    torch.manual_seed(0)
    model = PonderLM(Config(31, 32, 48, 1, 2, ponder_steps=2, penalty=penalty, penalty_weight=0.3))
    torch.nn.init.normal_(model.router.proj.weight, std=3)
    x, y = torch.randint(2, (2, 40)), torch.zeros(2, 40, dtype=torch.long)
    y[:, ::3] = -100
    with torch.no_grad():  # the more of a token is integrated, the better 0 is predicted
        direction = model(x, R=1).h.mean((0, 1, 2))
        model.lm_head.weight.zero_()[0] = 2 * direction
    loss, found, out = objective(model, x, y, 1, price=0.2)
    log_w = out.log_w[y != -100]  # (n, 3)
    partial = [
        model.cross_entropy((out.s[..., :i][..., None] * out.h[:, :, :i]).sum(2), y) for i in (1, 2, 3)
    ]
    ce = torch.stack(partial, dim=-1)[y != -100]  # (n, 3)
    torch.testing.assert_close(out.loss, ce[:, -1].mean())
    expected, _ = bottom_mass_penalty(log_w, ce, penalty)  # of which test_router.py has the loops
    assert expected > 0
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(loss, out.loss + 0.3 * expected + 0.2 * relaxed_steps(log_w).mean())
    assert objective(model, x, torch.full_like(y, -100), 1, 0.2)[0] == 0  # nothing to predict
    model.config.penalty_weight = 0.0
    assert objective(model, x, y, 1)[1] == 0


def test_evaluation_against_the_definitions(monkeypatch):
    """Catches a wrong mean, tau or mode that is left, batches that overlap, windows left out."""
    monkeypatch.setattr(train, "eval_batch_size", lambda *_: 2)
    torch.manual_seed(0)
    model = PonderLM(Config(31, 32, 48, 2, 4, block_size=8, router_offset=(0.0,) * 4)).double().train()
    torch.nn.init.normal_(model.router.proj.weight, std=2)
    windows = Windows(np.random.default_rng(0).integers(31, size=100).astype("uint16"), 8, seed=0)
    found = train.evaluate(model, windows, 5, R=21, tau=0.3, first=2)
    rows = torch.stack([torch.from_numpy(windows.window(i)) for i in range(2, 7)])
    with torch.no_grad():
        h, s, log_w = model.jacobi(rows[:, :-1], R=21, tau=0.3)
    steps = (log_w.exp() >= 0.3).sum(-1) - 1  # (5, 8)
    kept = s * (torch.arange(4) <= steps[..., None])
    logits = model.lm_head((kept[..., None] * h).sum(2))
    nll = -logits.log_softmax(-1).gather(-1, rows[:, 1:, None]).mean()
    assert found["loss"] == pytest.approx(nll.item(), abs=1e-9)
    assert found["steps"] == pytest.approx(steps.double().mean().item())
    assert found["stopped"] == pytest.approx([(steps == k).double().mean().item() for k in range(4)])
    assert found["weight"] == pytest.approx(s.mean((0, 1)).tolist())
    assert 0 < found["steps"] < 3 and model.training
    soft = train.evaluate(model, windows, 5, R=21, first=2)
    fixed = model(rows[:, :-1], rows[:, 1:], R=21)
    assert soft["loss"] == pytest.approx(fixed.loss.item(), abs=1e-9)
    assert soft["steps"] == pytest.approx(((fixed.log_w.exp() >= 1e-4).sum(-1) - 1.0).mean().item())


def test_learning_rate():
    """Catches a schedule that starts at zero, overshoots, or does not end at a tenth."""
    config = TrainConfig(steps=100, warmup=0.1, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[0] == 0.1 and max(rates) == rates[9] == 1.0
    assert rates[100] == pytest.approx(0.1) and math.isclose(rates[55], 0.55)
    assert rates == [*sorted(rates[:10]), *sorted(rates[10:])[::-1]]


# -- How a step is computed ------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["auto", "eager", "sdpa", "fa2"])
def test_attention(choice, monkeypatch):
    """Catches a form of attention that is asked for and not taken, or not here and ends in a stack trace; the
    evaluation, which is in float32, by one that has none."""
    calls, form = [], train.BACKENDS["sdpa" if choice == "fa2" else choice]
    monkeypatch.setitem(train.BACKENDS, choice, lambda *x: calls.append(x[0].dtype) or form(*x))
    if choice == "fa2":
        for here, precision in ((None, "bfloat16"), (form, "float32")):
            monkeypatch.setattr(hardware, "flash_attn_func", here)
            with pytest.raises(UserError, match="--attention fa2"):
                go(f"--attention fa2 --precision {precision}")
        monkeypatch.setattr(train, "check_attention", lambda *_: None)  # there is no GPU
    run, _ = go(f"--steps 1 --attention {choice} --precision bfloat16")
    assert {*calls} == {torch.bfloat16} and read_run(run)[0].attention == choice


@pytest.fixture
def dynamo():
    """A torch.compile that has compiled nothing yet, and whose settings stay. -> how many graphs it has"""
    import torch._dynamo

    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8):  # which compile_for_training sets
        yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def compile_by(backend, patch):
    real = torch.compile
    patch.setattr(torch, "compile", lambda f, **how: real(f, backend=backend, **how))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks(backend, recompute, dynamo, monkeypatch):
    """Compiled blocks, to 1e-5 in float32: other losses or gradients, or compiled in every step."""
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a compiler of C++")
    compile_by(backend, monkeypatch)
    plain = small_model(penalty="token", penalty_weight=0.3).float().train()
    model, counts = deepcopy(plain), []
    train.compile_for_training(model)
    model.recompute = recompute
    for R in (0, 2, 1, 3):
        idx, found = tokens(B=2, seed=R), []
        for one in (plain, model):
            one.zero_grad()
            loss, _, _ = objective(one, idx, idx.flip(1), R)
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in one.parameters())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        counts.append(dynamo())
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens(7)).logits, plain.eval()(tokens(7)).logits)
    # 1, 2, 3 and 4 slots a token; the cross-entropy with a gradient, and without one for the penalty
    assert {*counts, dynamo()} == {counts[0]} and counts[0] >= 6


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a compiler")
def test_compiled_cross_entropy(dynamo):
    """In bfloat16, the loss to 1e-5 and the gradients to 1e-3 of their norm: a compiled form that sums the
    exponentials in half precision."""
    model = small_model(vocab_size=300).float().train()
    plain = deepcopy(model)
    train.compile_for_training(model)
    torch.manual_seed(1)
    targets = torch.randint(300, (4, 16))
    states = torch.randn(4, 16, model.config.hidden_size)
    found = []
    for one in (plain, model):
        x = states.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = one.cross_entropy(x, targets).mean()
        loss.backward()
        found.append((loss, x.grad, one.lm_head.weight.grad))
    assert dynamo() == 1
    (loss, *gradients), (compiled_loss, *compiled_gradients) = found
    assert compiled_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    for a, b in zip(compiled_gradients, gradients, strict=True):
        assert (a - b).norm() < 1e-3 * b.norm()


def test_compile(dynamo, monkeypatch, capsys):
    """Catches --compile that does nothing, is forgotten by --resume, or leaves a run that nobody can read."""
    compile_by("eager", monkeypatch)
    go("--steps 1 --name plain")
    assert not dynamo() and "compiled" not in capsys.readouterr().out
    config, shape = parse(shlex.split(f"{TINY} --steps 2"))
    run, _ = train.train(replace(config, compile="on"), shape)
    assert dynamo() and "blocks compiled" in capsys.readouterr().out
    load(run)
    go("--resume --name x --steps 4")
    assert "blocks compiled" in capsys.readouterr().out


# -- Settings --------------------------------------------------------------------------------------


def test_command_line(capsys):
    """Catches preset values that a flag does not change or --help not show, and unknown flags that pass."""
    config, shape = parse(shlex.split("--preset 70m --steps 7 --ponder-steps 5"))
    assert (config.steps, config.preset) == (7, "70m")
    assert (shape.ponder_steps, shape.hidden_size, len(shape.offset)) == (5, 512, 6)
    assert parse(["--device", "cpu"]) == (TrainConfig(device="cpu"), train.preset_settings("tiny")[1])
    for argv in (["--ponder-step", "5"], ["--preset", "huge"], ["--preset", "70m", "--help"]):
        with pytest.raises(SystemExit):
            parse(argv)
    assert "28610" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [dict(learning_rate=math.nan), dict(tau=2.0), dict(seed=-1), dict(steps=True), dict(init_from="a")]
    + [dict(name=name) for name in ("", "..", ".", "a/b")],
    ids=str,
)
def test_settings_refused(wrong):
    """Catches a setting that fails after hours of training, or writes where it should not."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainConfig(**wrong)


def test_folder_of_ids():
    """Catches a preset's tokenizer that is forced upon a folder of ids."""
    Path("ids").mkdir()
    Path("ids/train.bin").touch()
    assert train.pick_tokenizer("tiny", "ids", "auto") is None
    assert train.pick_tokenizer("tiny", "ids", "gpt2") == "gpt2"
    assert train.pick_tokenizer("small", "text.txt", "auto") == "bpe"


# -- It goes on exactly ----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_resume_is_exact(monkeypatch, capsys, precision):
    """Catches any state that a checkpoint lacks: after three signals, one of a closed terminal, losses and
    weights are equal bit for bit, through several epochs. And --resume of another run than the last."""
    signals = {7: signal.SIGTERM, 33: signal.SIGINT, 39: signal.SIGHUP}  # the last just before a checkpoint
    handlers = [signal.getsignal(number) for number in signals.values()]
    flags = f"--steps 70 --eval-every 20 --precision {precision}"
    whole, results = go(f"{flags} --name whole")
    for step, number in signals.items():
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup2", lambda *_: None)  # the terminal of the tests stays
            interrupt_at(patch, step, number)
            run, nothing = go(flags)
        assert nothing is None and checkpoint(run)["step"] == step + 1
        assert "python train.py --resume --name x\n" in capsys.readouterr().out
        assert log(run) == log(whole)[: len(log(run))]
        flags = "--resume"
    run, again = go(flags)
    assert_same(whole, run)
    assert results == again
    assert [signal.getsignal(number) for number in signals.values()] == handlers


def test_nohup(monkeypatch):
    """Catches a training that a closed terminal stops although nohup says that it must not."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interrupt_at(monkeypatch, 1, signal.SIGHUP)
        assert go("--steps 3")[1] is not None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_interrupted_evaluation(monkeypatch, capsys):
    """Catches a signal in an evaluation that is waited for, says nothing, or takes the checkpoint or what was
    evaluated before with it; stale files."""
    whole, results = go("--name whole")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 0, function="evaluate")
        run, nothing = go()
    assert nothing is None and checkpoint(run)["step"] == 10
    assert [row["step"] for row in log(run) if "val" in row] == [10]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 0, signal.SIGINT, "final_report")
        capsys.readouterr()
        assert go("--resume --eval-every 30")[1] is None
    assert "stopped; resume with" in capsys.readouterr().out
    assert checkpoint(run)["step"] == 30 and not (run / "results.json").exists()
    (run / "trainer.pt.tmp").touch()
    assert go("--resume --eval-every 10")[1] == results and not list(run.glob("*.tmp"))
    with monkeypatch.context() as patch:
        interrupt_at(patch, 0, signal.SIGINT, "final_report")
        go("--resume")
    assert json.loads((run / "results.json").read_text()) == results
    assert torch.equal(load(run).lm_head.weight, load(whole).lm_head.weight)


@pytest.mark.parametrize("number", [signal.SIGINT, None], ids=["tee", "head"])
def test_nobody_reads_the_output(number):
    """Catches a training that is lost when the reader of its output ends: Ctrl-C ends `tee`, too, and `head`
    ends by itself."""
    ours, its = os.pipe()
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *shlex.split(f"{TINY} --steps 100000 --eval-every 9999"),
    ]
    process = subprocess.Popen(command, stdout=its, stderr=its)
    os.close(its)
    printed = b""
    while b"step 3/" not in printed:
        printed += os.read(ours, 1000)
    os.close(ours)
    if number:
        process.send_signal(number)
    assert process.wait(timeout=60) == 141
    assert checkpoint(Path("out/x"))["step"] >= 3


def test_an_evaluation_without_memory(monkeypatch):
    """Catches a training that is lost where an evaluation needs more memory than a step."""

    def evaluate(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train, "evaluate", evaluate)
    with pytest.raises(torch.OutOfMemoryError):
        go()
    assert checkpoint(Path("out/x"))["step"] == 10


def test_a_signal_between_micro_batches(monkeypatch):
    """Catches a signal that is not obeyed until a step ends, which may take minutes, and weights that a
    part of a step has changed."""
    whole, _ = go("--name whole")
    real, calls = train.relaxed_steps, []

    def relaxed_steps(log_w):  # which runs once for each micro-batch, of which a step has two
        calls.append(1)
        if len(calls) == 2 * 5 + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(log_w)

    with monkeypatch.context() as patch:
        patch.setattr(train, "relaxed_steps", relaxed_steps)
        run, nothing = go()
    assert nothing is None and len(calls) == 11 and checkpoint(run)["step"] == 5
    assert_same(whole, go("--resume --name x")[0])


def test_compile_is_recorded_as_asked():
    """Catches a run of a GPU that a CPU, on which it is resumed, compiles too."""
    run, _ = go("--steps 1")
    assert read_run(run)[0].compile == "auto"


def test_a_signal_in_the_last_save(monkeypatch):
    """Catches a Ctrl-C that is answered with "stopping", and then not obeyed."""
    interrupt_at(monkeypatch, 0, function="save_checkpoint")
    run, results = go("--steps 2")
    assert checkpoint(run)["step"] == 2 and results is None and not (run / "results.json").exists()


def test_where_it_ran():
    """Catches a start whose record does not say on which machine, how and with which code it computed."""
    run, _ = go("--steps 1")
    go("--resume --name x --steps 2")
    starts = [json.loads(x) for x in (run / "log.jsonl").read_text().splitlines() if "torch" in x]
    assert [x["step"] for x in starts] == [0, 1]
    for found in starts:
        assert found["device"] == "cpu" and found["precision"] == "float32" and found["machine"]
        assert found["threads"] == torch.get_num_threads() and 1 <= found["cores"] <= os.cpu_count()
        assert found["python"] == platform.python_version() and found["torch"] == torch.__version__
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert (found["commit"] or "").removesuffix("-dirty") == git.stdout.strip()


def test_more_steps(capsys):
    """Catches a longer training that starts anew or is refused, and a shorter one that passes."""
    run, _ = go("--steps 20")
    with pytest.raises(UserError, match="--steps"):
        go("--resume --steps 10")
    go("--resume --name x --steps 24 --learning-rate 0.001")
    assert "resumed at step 20" in capsys.readouterr().out
    assert [row["step"] for row in log(run) if "loss" in row] == list(range(1, 25))
    starts = [json.loads(x) for x in (run / "log.jsonl").read_text().splitlines() if "torch" in x]
    assert [(x["step"], x["config"]["learning_rate"]) for x in starts] == [(0, 0.01), (20, 0.001)]
    assert read_run(run)[0].steps == 24


def test_changed_settings_are_refused():
    """Catches a resumed training that is another one, without a word, or touched; a flag not named."""
    run, _ = go("--steps 2")
    before = times(run)
    with pytest.raises(UserError) as error:
        go("--resume --batch-size 3 --router-offset 0 1 --ponder-steps 1 --log-every 7 --data nowhere")
    for change in ("--batch-size 3 (was 8)", "--ponder-steps 1 (was 2)", "--router-offset (0.0, 1.0)"):
        assert change in str(error.value)
    assert "log" not in str(error.value) and "nowhere" not in str(error.value)
    with pytest.raises(UserError, match=r"--preset small \(was tiny\)"):
        go("--resume --preset small")
    Path("text.txt").rename("moved.txt")
    Path("text.txt").write_text("another text, longer than the one before. " * 300)
    with pytest.raises(UserError, match=r"text\.txt .* --data"):
        go("--resume")
    assert before == times(run)
    go("--resume --data moved.txt --steps 3 --attention sdpa")


def test_nothing_to_resume():
    """Catches a stack trace for no run, a damaged one or the lab's; an older run that cannot be read."""
    with pytest.raises(UserError, match=r"without --resume"):
        parse(["--resume"])
    with pytest.raises(UserError, match="x is not a training run"):
        parse(shlex.split("--resume --name x"))
    run, _ = go("--steps 1")
    content = json.loads((run / "train.json").read_text())

    def without(*names, **more):
        kept = {k: v for k, v in content["config"].items() if k not in names}
        return json.dumps({**content, "config": kept | more})

    for text, words in (
        *((x, r"train\.json") for x in ("", "[]", "5", '{"config": {}}', '{"config": {"model": {')),
        *(
            ('{"config": 5, "model": 5, "corpus": 5}', r"train\.json"),
            (without(init_from=None), "python -m lab train --resume"),
        ),
        *((without("steps"), "steps"), (without(tau="x"), "tau")),
        (json.dumps(content | {"model": content["model"] | {"method": "other"}}), "'other'.*python -m lab"),
    ):
        (run / "train.json").write_text(text)
        with pytest.raises(UserError, match=words):
            parse(["--resume"])
    (run / "train.json").write_text(without(*train.OLD_DEFAULTS))
    config, _, _ = read_run(run)
    assert (config.router_rate, config.step_price, config.attention, config.compile) == (1, 0, "auto", "off")


# -- Files that are whole --------------------------------------------------------------------------


def test_full_disk():
    """Catches a half-written checkpoint or log, and a message that helps nobody."""
    run, _ = go("--steps 10")
    before = (run / "trainer.pt").read_bytes()
    with full_disk(200_000), pytest.raises(UserError, match=r"cannot write out/x/trainer\.pt"):
        go("--resume --steps 20 --eval-every 5")
    assert (run / "trainer.pt").read_bytes() == before and not list(run.glob("*.tmp"))
    with full_disk(3000), pytest.raises(UserError, match=r"cannot write out/x/"):
        go("--resume --steps 400 --eval-every 400")
    go("--resume --steps 20")
    assert checkpoint(run)["step"] == 20


class Malice:
    def __reduce__(self):
        return os.mkdir, ("malice",)


def in_content(change):
    """A change of what trainer.pt holds."""

    def damage(run):
        content = torch.load(run / "trainer.pt", weights_only=True)
        change(content)
        torch.save(content, run / "trainer.pt")

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        in_bytes(lambda _: pickle.dumps(Malice(), protocol=2), "trainer.pt"),
        in_bytes(lambda b: b[: len(b) // 2], "trainer.pt"),
        in_bytes(lambda _: b"", "trainer.pt"),
        in_content(lambda content: content.pop("log")),
        in_content(lambda content: content["model"].popitem()),
        in_content(lambda content: content["model"].update({"model.norm.weight": torch.ones(3)})),
    ],
)
def test_damaged_checkpoint(damage):
    """Catches code that a checkpoint runs, a stack trace for a damaged one, and files that are touched."""
    run, _ = go("--steps 2 --eval-every 2")
    damage(run)
    before = times(run)
    with pytest.raises(UserError, match=r"trainer\.pt .*--name"):
        go("--resume --steps 4")
    assert not Path("malice").exists()
    assert before == times(run)


def test_one_process_a_run():
    """Catches two processes that write one run, and a new one that overwrites what is there."""
    go("--steps 10")
    with pytest.raises(UserError, match=r"out/x exists.*--resume"):
        go("--data not-read")
    with train.locked(Path("out/x")), pytest.raises(UserError, match="another process"):
        go("--resume --steps 30")
    Path("out/own").mkdir()
    for name in ("model.safetensors.index.json", "model.safetensors", "tokenizer.json", "step-00000250"):
        Path("out/own", name).write_text("kept")
        with pytest.raises(UserError, match="own exists"):
            train.check_free(Path("out/own"))
        Path("out/own", name).unlink()
    for name in (".lock", "train.json.tmp", "train.json", "tokenizer.json", "log.jsonl"):
        train.check_free(Path("out/own"))  # a training that was killed before its first checkpoint
        Path("out/own", name).touch()
    go("--name own --steps 1")


def test_divergence_stops():
    """Catches a training that goes on with nan, and a name that it then blocks."""
    with pytest.raises(UserError, match=r"diverged at step \d+: .* = nan.*--learning-rate"):
        go("--steps 5 --learning-rate 1e12")
    run, _ = go("--steps 5")
    with pytest.raises(UserError, match="--resume --name x"):
        go("--resume --steps 10 --learning-rate 1e12")
    assert checkpoint(run)["step"] == 5


@pytest.mark.parametrize("log_every, noticed", [(4, 8), (100, 10)])
def test_gradients_that_are_not_finite(monkeypatch, log_every, noticed):
    """Catches a checkpoint of what a gradient of nan has made, and a training that goes on."""
    real, done = torch.nn.utils.clip_grad_norm_, []

    def clip(parameters, *args):
        done.append(parameters := [*parameters])
        if len(done) == 6:
            parameters[0].grad.fill_(torch.nan)  # and the penalty cannot count by losses of nan
        return real(parameters, *args)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    with pytest.raises(UserError, match=rf"diverged at step {noticed}: "):
        go(f"--steps 20 --log-every {log_every}")
    assert len(done) == noticed and not Path("out/x/trainer.pt").exists()


def test_weights_that_are_not_finite(monkeypatch):
    """Catches a checkpoint of nan whose loss was still a number."""
    step = torch.optim.AdamW.step

    def poisoned(self, *args):
        step(self, *args)
        self.param_groups[1]["params"][0].data[3] = torch.nan

    monkeypatch.setattr(torch.optim.AdamW, "step", poisoned)
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: {"loss": 1.0})
    with pytest.raises(UserError, match=r"diverged at step 1: weights = nan"):
        go("--eval-every 1")
    assert not Path("out/x/trainer.pt").exists() and not Path("out/x/model.safetensors").exists()


@pytest.mark.parametrize("damage", [b'{"step": 21, "loss": 7.0}\n5\n{"step": 22, "lo', None])
def test_torn_log(damage):
    """Catches a log that a kill makes unreadable or takes away, and rows that are kept twice."""
    run, _ = go("--steps 6 --eval-every 3")
    file = run / "log.jsonl"
    file.write_bytes(file.read_bytes() + damage) if damage else file.unlink()
    go("--resume --name x --steps 9")
    assert [row["step"] for row in log(run) if "loss" in row] == list(range(1, 10))
    assert [row["step"] for row in log(run) if "val" in row] == [3, 6, 9] and len(log(run)) == 12


# -- Processes -------------------------------------------------------------------------------------


def start_patched(patches, flags="--steps 2"):
    """main of train.py, after some patches."""
    script = (
        "import os, signal, sys, time, checkpoint, train\n"
        f"sys.argv = ['train.py', *{shlex.split(f'{TINY} {flags}')}]; {patches}\n"
        "train.command_line(train.main)"
    )
    return start("-c", script, PYTHONUNBUFFERED="1")


def wait_for(text, stream):
    while text not in (line := stream.readline()):
        assert line


def test_closed_terminal():
    """Catches a training that is lost with its terminal, where every line fails; a script that goes on."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *shlex.split(f"{TINY} --steps 100000")],
        **dict(stdin=its, stdout=its, stderr=its, start_new_session=True),
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(its)
    printed = b""
    while b"step 3/" not in printed:
        printed += os.read(ours, 1000)
    os.close(ours)
    assert process.wait(timeout=60) == 130  # so that a script goes no further
    assert checkpoint(Path("out/x"))["step"] == log(Path("out/x"))[-1]["step"] >= 3


def test_the_second_signal():
    """Catches a second Ctrl-C that waits for the end of the step, however long that takes."""
    process = start_patched("train.learning_rate = lambda *_: (print('sleeping'), time.sleep(600))")
    wait_for("sleeping", process.stdout)
    process.send_signal(signal.SIGINT)
    wait_for("send the signal again", process.stderr)
    assert process.poll() is None
    time.sleep(1.1)  # sooner, it is taken for the same signal, which a launcher has forwarded
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    "function, call",
    [("torch.save", 2)]
    + [
        pytest.param(function, call, marks=pytest.mark.slow)
        for function in ("torch.save", "checkpoint.save", "train.write_json", "checkpoint.save_file")
        for call in (1, 2)
    ],
)
def test_kill_while_it_saves(function, call):
    """Catches a kill around the files of a save after which a run cannot go on, or goes on otherwise."""
    flags = "--steps 12 --eval-every 4"
    whole, _ = go(f"{flags} --name whole")
    kill = (
        f"import torch; calls = []; real = {function}; {function} = lambda *a, **k: "
        f"(calls.append(1), len(calls) == {call} and os.kill(os.getpid(), 9), real(*a, **k))[-1]"
    )
    process = start_patched(kill, flags)
    process.communicate(timeout=100)
    run = Path("out/x")
    if function == "train.write_json" and call == 1:  # killed before there was any setting
        assert not (run / "train.json").exists()
        run, _ = go(flags)
    else:
        assert process.returncode == -9
        if (run / "model.safetensors").exists():
            load(run)
        run, _ = go("--resume --name x")
    assert_same(whole, run)
    assert (run / "results.json").exists()


# -- Several processes -----------------------------------------------------------------------------

# Trainings in float64, since in float32 Adam turns rounding errors of small gradients into 3e-6. Each keeps
# the gradients of its first step. The model is sure of an `a`, so that some tokens are below 0.5 nats, the
# more the deeper, and a penalty by token acts.
DOUBLE = """
import os, shlex, signal, sys, torch, train
from model import PonderLM

torch.set_default_dtype(torch.float64)
gradients, sent, step, rate = [], [], torch.optim.AdamW.step, train.learning_rate

def record(self, *args):
    gradients.append({i: p.grad.clone() for i, p in enumerate(self.param_groups[0]["params"])})
    gradients[-1] |= {-i: p.grad.clone() for i, p in enumerate(self.param_groups[2]["params"], 1)}
    return step(self, *args)

def sure(config):
    model = PonderLM(config)
    torch.nn.init.normal_(model.router.proj.weight, std=0.5)
    with torch.no_grad():
        model.lm_head.weight[97] = 2 * model(torch.full((1, 16), 97), R=1).h.mean((0, 1, 2))
    return model

def one_stops(at, config):  # the second of two processes gets a signal in step 4
    if at == 4 and os.environ["RANK"] == "1" and config.name == "stopped" and not config.resume and not sent:
        sent.append(os.kill(os.getpid(), signal.SIGTERM))
    return rate(at, config)

def go(flags):
    torch.optim.AdamW.step = record
    try:
        gradients.clear()
        run, _ = train.train(*train.parse(shlex.split(flags)), make_model=sure)
        return run, gradients[0]
    finally:
        torch.optim.AdamW.step = step

if __name__ == "__main__":
    train.learning_rate = one_stops
    for flags in sys.argv[1:]:
        run, found = go(flags)
        if os.environ["RANK"] == "0":
            torch.save(found, run / "gradients.pt")
        torch.distributed.barrier()  # the next one may read what was saved last
    sys.argv[1:] = ["--resume", "--name", "stopped"]
    train.command_line(train.main)
    threads = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
    assert not any("gloo" in name for name in threads), threads  # those may abort at the exit
"""
SHARED = {  # flags, and what they change
    "token": "--penalty token --micro-batch-size 2",
    "recompute": "--penalty token --micro-batch-size 2 --recompute",
    "plain": "--ponder-steps 0 --micro-batch-size 2",
    "stopped": "--penalty token --micro-batch-size 2 --steps 8 --step-price 0.1",
}


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_two_processes(float64):
    """Catches gradients that are summed and not averaged, or shared before all micro-batches are in; a batch
    that depends on the number of processes, R drawn by each for itself, a second writer, a process that
    stops alone at its signal, a resume that only the first process makes, and a training that a process
    began and two cannot go on with."""
    Path("double.py").write_text(DOUBLE)
    text = np.random.default_rng(0).choice([97, 97, 97, 98], 3000).astype(np.uint8)
    Path("text.txt").write_bytes(text.tobytes())
    double, tiny = runpy.run_path("double.py"), f"{TINY} --eval-every 4 --steps 3"
    # One process
    one = {name: double["go"](f"{tiny} {flags} --name {name}-1") for name, flags in SHARED.items()}
    double["go"](f"{tiny} --micro-batch-size None --steps 2 --penalty-weight 0 --name begun")
    shutil.copytree("out/begun", "out/begun-1")
    begun, _ = double["go"]("--resume --name begun-1 --steps 5")
    # Two
    argv = [f"{tiny} {flags} --name {name}" for name, flags in SHARED.items()]
    argv.append("--resume --name begun --steps 5")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "double.py"]
    done = python(*torchrun, *argv, cwd=".", GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
    output = done.stdout
    assert "step 5/8" in output and "stopped; resume with: python train.py --resume --name stopped" in output
    assert output.count("resumed at step 5") == output.count("step 8/8  loss") == 1
    assert output.count("note: micro-batches have 4 windows instead of 8") == 1
    assert read_run("out/begun")[0].micro_batch_size == 8  # one process would take them at once again
    # are the same.
    for name, (run, expected) in one.items():
        found = torch.load(f"out/{name}/gradients.pt")
        assert (log(run)[0]["penalty"] > 0.01) == (name != "plain")
        for i, x in expected.items():
            assert x.dtype == torch.float64 and (x.abs().max() > 1e-6) == (name != "plain" or i >= 0)
            torch.testing.assert_close(found[i], x, atol=1e-12, rtol=0)
    for a, b in (*((run, Path("out", name)) for name, (run, _) in one.items()), (begun, Path("out/begun"))):
        for name, x in checkpoint(a)["model"].items():
            torch.testing.assert_close(x, checkpoint(b)["model"][name], atol=1e-9, rtol=0)
        for x, y in zip(log(a), log(b), strict=True):
            assert x == pytest.approx(y, abs=1e-6)
        a, b = (json.loads((run / "results.json").read_text()) for run in (a, b))
        assert a["hard"]["loss"] == pytest.approx(b["hard"]["loss"], abs=1e-9)


LATE = """
import os
import signal
import train

final_report = train.final_report

def signalled(model, windows, config, signals=()):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return final_report(model, windows, config, signals)

if __name__ == "__main__":
    train.final_report = signalled
    train.command_line(train.main)
"""


def test_a_signal_to_one_of_two_in_the_final_evaluation():
    """Catches a process that stops alone, so that the other one ends in gloo's traceback."""
    Path("late.py").write_text(LATE)
    Path("text.txt").write_text("one two three. " * 300)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "late.py"]
    flags = shlex.split(f"{TINY} --steps 2 --eval-every 2 --name late")
    done = python(*torchrun, *flags, cwd=".", GLOO_SOCKET_IFNAME="lo")
    assert "stopped; resume with: python train.py --resume --name late" in done.stdout
    assert "Connection closed" not in done.stderr and "gloo" not in done.stderr, done.stderr
    assert checkpoint(Path("out/late"))["step"] == 2 and not Path("out/late/results.json").exists()
    _, results = go("--resume --name late")
    assert results["hard"]["loss"] > 0
