"""hardware.py, distributed.py and the clock of train.py, on machines that are pretended."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, python, small_model

import common
import hardware
import train
from attention import BACKENDS
from common import UserError, defer_signals
from distributed import init_distributed, was_launched
from hardware import eval_batch_size
from train import Clock, TrainConfig, objective

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that can compile, as far as hardware.py asks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hardware, "find_spec", lambda name: object())
    monkeypatch.setattr(hardware.shutil, "which", lambda name: f"bin/{name}")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})


# -- Compilation -----------------------------------------------------------------------------------


def test_compiles_where_it_can(gpu, capsys):
    """Catches a GPU on which blocks stay uncompiled, a CPU on which they do not, a choice that is not
    obeyed."""
    assert hardware.why_not_compile(CUDA) is None and hardware.should_compile("auto", CUDA)
    assert not hardware.should_compile("off", CUDA) and not capsys.readouterr().out
    cpu = torch.device("cpu")
    assert not hardware.should_compile("auto", cpu) and hardware.should_compile("on", cpu)
    assert not capsys.readouterr().out  # a CPU needs no note


@pytest.mark.parametrize("missing", ["triton", "an old device", "a compiler", "a header"])
def test_a_reason_not_to_compile(missing, gpu, monkeypatch, capsys, tmp_path):
    """Catches a compilation that ends in pages of traceback at the first step (pretended: no triton, a GPU of
    capability 6.1, no C compiler, no Python.h), and one that is skipped without a word."""
    if missing == "triton":
        monkeypatch.setattr(hardware, "find_spec", lambda name: None)
    if missing == "an old device":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (6, 1))
    if missing == "a compiler":
        monkeypatch.setattr(hardware.shutil, "which", lambda name: None)
    if missing == "a header":
        (tmp_path / "Python.h").unlink()
    word = {"an old device": "7.0", "a compiler": "C compiler", "a header": "Python.h"}.get(missing, missing)
    assert not hardware.should_compile("auto", CUDA)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("note: the blocks are not compiled") and word in line
    assert hardware.should_compile("on", CUDA)  # who asks for it may try


def test_blocks_are_not_split_by_ddp():
    """Catches blocks that DistributedDataParallel splits at its buckets: twice as many graphs, for
    nothing."""
    with torch._dynamo.config.patch(optimize_ddp=True, recompile_limit=8):
        hardware.compile_for_training(small_model())
        assert torch._dynamo.config.optimize_ddp is False


# -- Devices ---------------------------------------------------------------------------------------


def test_a_gpu_that_torch_cannot_use(monkeypatch, capsys):
    """Catches a training on the CPU, without a word, where the driver is too old for torch (pretended)."""

    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert hardware.pick_device().type == "cpu" and not capsys.readouterr().out
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert hardware.pick_device().type == "cpu"
    assert "note: computing on the CPU" in (said := capsys.readouterr().out) and "too old" in said


@pytest.mark.parametrize("name", ["auto", "cuda"])
@pytest.mark.parametrize(
    "error", [RuntimeError("no kernel image is available"), torch.OutOfMemoryError("CUDA")]
)
def test_a_device_that_fails(name, error, monkeypatch):
    """Catches a full GPU that is said not to be there, a reason that is hidden, and the advice to leave out a
    flag that was not given (pretended: a GPU whose first operation fails)."""

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", fails)
    with pytest.raises(UserError) as found:
        hardware.pick_device(name)
    message = str(found.value)
    is_full = isinstance(error, torch.OutOfMemoryError)
    assert ("no free memory" in message) == is_full and ("no kernel image" in message) != is_full
    assert "--device cpu" in message and ("omit --device" in message) == (name == "cuda")


def test_preset_without_bfloat16(monkeypatch, capsys):
    """Catches a preset that takes hours in float32 on a GPU such as a T4, without a word (pretended)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for supported, preset in ((True, "small"), (False, "tiny")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, x=supported: x)
        assert train.usual_preset("auto") == preset
        assert ("no bfloat16" in capsys.readouterr().out) == (not supported)
    assert train.usual_preset("cpu") == "tiny"


@pytest.mark.parametrize(
    "package, device, precision, width, reason",
    [
        (False, "cuda", "bfloat16", 64, "not installed"),
        (True, "cpu", "bfloat16", 64, "needs a GPU"),
        (True, "cuda", "float32", 64, "--precision is float32"),
        (True, "cuda", "bfloat16", 256, "up to 248"),
        (True, "cuda", "bfloat16", 248, None),
    ],
)
def test_flash_attn_is_refused(package, device, precision, width, reason, monkeypatch):
    """Catches --attention fa2 that fails at the first step, or is refused for another reason than the
    real one."""
    monkeypatch.setattr(hardware, "flash_attn_func", print if package else None)
    check = lambda name: hardware.check_attention(name, torch.device(device), precision, width)  # noqa: E731
    for name in BACKENDS.keys() - {"fa2"}:
        check(name)
    if reason is None:
        check("fa2")
    else:
        with pytest.raises(UserError, match=rf"--attention fa2 .*{reason}.*--attention sdpa"):
            check("fa2")


def test_refused_before_the_text_is_read(monkeypatch):
    """Catches a refusal that comes after minutes of tokenizing."""

    def reads(*_):
        raise AssertionError("the text was read")

    config, model_config = train.parse(["--preset", "tiny", "--device", "cpu", "--attention", "fa2"])
    with pytest.raises(UserError, match="--attention fa2"):
        train.train(config, model_config, open_text=reads)
    Path("file").touch()
    config, model_config = train.parse(["--preset", "tiny", "--device", "cpu", "--out", "file/out"])
    with pytest.raises(UserError, match=r"file/out .*--out"):
        train.train(config, model_config, open_text=reads)


def test_the_log_says_where_it_ran():
    """Catches a machine that is not named, or a row that JSON cannot hold."""
    machine = hardware.describe_machine(torch.device("cpu"), "float32")
    assert machine["device"] == "cpu" and machine["precision"] == "float32" and machine["machine"]
    assert machine["cores"] >= 1 and machine["threads"] == torch.get_num_threads()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit(monkeypatch):
    """Catches a commit of a repository in which this code lies, but which does not have it, or that a hook
    has named."""

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)

    for folder in ("one", "two"):
        Path(folder).mkdir()
        Path(folder, "hardware.py").write_text(folder)
        git("init", folder)
        git("-C", folder, "commit", "--allow-empty", "-m", "first")
    monkeypatch.setattr(hardware, "__file__", str(Path("one/hardware.py").resolve()))
    assert hardware.current_commit() is None
    git("-C", "one", "add", "hardware.py")
    git("-C", "one", "commit", "-m", "second")
    found = hardware.current_commit()
    assert re.fullmatch("[0-9a-f]{40}", found)
    monkeypatch.setenv("GIT_DIR", str(Path("two/.git").resolve()))
    assert hardware.current_commit() == found


# -- The clock -------------------------------------------------------------------------------------


def test_the_clock(monkeypatch):
    """Catches a speed that counts compiling, evaluating or old steps, and a time left without the evaluations
    and checkpoints to come. Time and graphs are pretended."""
    time_now, graphs = [0.0], [0]
    monkeypatch.setattr(train, "compiled_graphs", lambda: graphs[0])
    clock = Clock(TrainConfig(steps=100, eval_every=50, eval_windows=128), now=lambda: time_now[0])

    def pass_time(seconds):
        time_now[0] += seconds

    def step(seconds, compiled=0):
        pass_time(seconds)
        graphs[0] += compiled
        clock.end_step()

    step(60, compiled=4)
    assert clock.finish_interval() is None  # nothing but compiling so far
    step(30, compiled=1)
    step(2)
    step(4)
    assert clock.finish_interval() == 3
    step(1)
    for name, seconds in (("evaluation", 8), ("saving", 5)):
        with clock.measure(name):
            pass_time(seconds)
    assert clock.finish_interval() == 1  # since the last line
    assert clock.finish_interval() == 1  # no step since
    with clock.measure("evaluation"):
        pass_time(8)
        graphs[0] += 1  # which is not the next step's
    step(1)
    pass_time(2)  # the wait for what a GPU has not yet computed
    assert clock.finish_interval() == 3
    step(1)
    assert clock.finish_interval() == 1  # the wait was counted once
    # 96 steps, checkpoints at 50 and 100 of 13 s each, and 3 evaluations of twice as many windows
    assert clock.seconds_left(4) == 96 + 2 * 13 + 3 * 8 * 2
    assert clock.seconds_left(50) == 50 + 2 * 13 + 48  # the first of them comes after this log line
    assert clock.seconds_left(51) == 49 + 13 + 48
    assert clock.seconds_left(100) == 0 + 13 + 48
    assert (train.as_time(125), train.as_time(3725)) == ("2:05", "1:02:05")


def test_a_line_while_compiling(capsys):
    """Catches a speed of compiling in the log, and a line that cannot be printed without one."""
    metrics = {name: torch.tensor(x) for name, x in (("loss", 1.0), ("ce", 1.0), ("K_hat", 2.0))}
    config = TrainConfig(steps=2)
    row = train.log_step(Path("x"), 1, metrics, Clock(config), config, small_model().config)
    assert capsys.readouterr().out == "step 1/2  loss 1.000  ce 1.000  K-hat 2.00  compiling\n"
    assert row["tokens_per_second"] is None


def test_windows_to_evaluate_at_once():
    """Catches logits of an evaluation that do not fit into a GPU on which the training does."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert eval_batch_size(1024, 50_304, gpu) * 1024 * 50_304 * 4 <= 2**30
    assert [eval_batch_size(64, 257, device) for device in (gpu, cpu)] == [256, 16]
    assert eval_batch_size(4096, 2**18, gpu) == 1


# -- Processes and signals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "left_over", [{"RANK": "0"}, {"RANK": ""}, {"RANK": "0", "WORLD_SIZE": "2"}], ids=str
)
def test_a_left_over_rank(left_over, monkeypatch, capsys):
    """Catches a variable of an earlier launch that ends a training in a traceback, or lets it wait for
    nobody."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in left_over.items():
        monkeypatch.setenv(name, value)
    assert not was_launched()
    assert init_distributed("cpu") == (0, 1, torch.device("cpu"))
    assert ("note: RANK is set" in capsys.readouterr().out) == bool(left_over["RANK"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_waiting_for_processes_can_be_stopped(number):
    """Catches a process that waits for another one for a day, in silence, and cannot be stopped."""
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": "29577", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-u", str(ROOT / "train.py"), "--preset", "tiny", "--device", "cpu"]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A script that runs these tests in the background lets them ignore SIGINT.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    try:
        assert process.stdout.readline() == "waiting for 2 processes\n"
        time.sleep(0.5)
        process.send_signal(number)
        assert process.wait(timeout=20) == -number
    finally:
        process.kill()
        process.communicate()


def test_the_other_processes_print_nothing(monkeypatch):
    """Catches a process that ends at a character that its silent output cannot hold."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("distributed.dist.is_initialized", lambda: True)
    monkeypatch.setattr("distributed.rank_and_world_size", lambda: (1, 2))
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # to be set back
    init_distributed("cpu")
    print("caf\udce9", flush=True)


def test_a_handler_that_is_not_pythons(monkeypatch):
    """Catches a training that fails at its end inside a program that embeds Python and has a signal handler
    of its own, which Python shows as None (pretended)."""
    before = signal.getsignal(signal.SIGINT)
    real = signal.getsignal
    monkeypatch.setattr(common.signal, "getsignal", lambda n: None if n == signal.SIGINT else real(n))
    with defer_signals():
        assert real(signal.SIGINT) is before
        assert real(signal.SIGTERM) is not signal.SIG_DFL


def test_the_same_signal_twice(monkeypatch):
    """Catches a launcher's copy of a signal that is taken for impatience, and impatience that is not
    obeyed."""
    now, killed = [100.0], []
    monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
    with defer_signals() as received:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            now[0] += 0.2
        assert received == [signal.SIGTERM]
        now[0] += 1.0
        real = os.kill
        monkeypatch.setattr(common.os, "kill", lambda pid, number: killed.append(number))
        real(os.getpid(), signal.SIGTERM)
        assert killed == [signal.SIGTERM] and received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_system_without_sighup():
    """Catches a command that cannot start on Windows, which has no SIGHUP (pretended: it is deleted)."""
    code = "import signal; del signal.SIGHUP\nimport sys, runpy\n"
    for script in ("sample.py", "train.py", "analyze.py", "data.py"):
        run = (
            f"sys.argv = ['{script}', '--help']; runpy.run_path({str(ROOT / script)!r}, run_name='__main__')"
        )
        done = python("-c", code + run)
        assert not done.returncode and "usage" in done.stdout, done.stderr
    defer = "from common import defer_signals\nwith defer_signals() as x: print(x)"
    done = python("-c", code + defer, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_in_another_thread():
    """Catches a training or sampling in a web server's thread that fails, since only the main thread may
    handle signals."""
    from concurrent.futures import ThreadPoolExecutor

    def in_thread():
        with defer_signals() as received:
            common.command_line(lambda: received.append("ran"))
            return received

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(in_thread).result() == ["ran"]


# -- The objective ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["printed", "token"])
@pytest.mark.parametrize("sure", [0.0, 0.7, 0.95])
@pytest.mark.parametrize("K", [1, 3])
def test_ce_0_is_computed_where_it_counts(form, sure, K, monkeypatch):
    """Catches a penalty that changes, in one bit, where CE_0 is left out; and one that is always
    computed. Some tokens are predicted surely, so that the penalty selects none, some or most of them."""
    torch.manual_seed(0)
    model = small_model(seed=1, ponder_steps=K, penalty=form, penalty_weight=0.5)
    x = torch.randint(2, (4, 32))
    y = (torch.rand(4, 32) > sure).long()  # the more zeros, the more of them are predicted
    with torch.no_grad():
        direction = model(x, R=1).h.mean((0, 1, 2))
        model.lm_head.weight.zero_()[0] = 2 * direction * (sure > 0)
    computed = []
    real = model.partial_losses
    monkeypatch.setattr(model, "partial_losses", lambda *args: computed.append(list(args[3])) or real(*args))
    _, penalty, out = objective(model, x, y, 1)
    whole = torch.cat([real(out.h, out.s, y, range(K)), out.ce.detach()[..., None]], dim=-1).flatten(0, 1)
    expected, _ = train.bottom_mass_penalty(out.log_w.flatten(0, 1), whole, form)
    assert torch.equal(penalty, expected)
    rho_1 = train.resolved_fraction(whole, form)[1].item()
    assert ([0] in computed) == (rho_1 * len(whole) >= 0.999)
