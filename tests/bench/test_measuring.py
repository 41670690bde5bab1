"""Attention and a training step: short runs of the commands, and what they compute."""

import json
import re
import sys
import time
from dataclasses import replace
from functools import partial
from multiprocessing.dummy import Pool
from types import SimpleNamespace

import pytest
import torch

from attention import sdpa
from lab.bench import attention, timing, training_step
from lab.bench.timing import medians, peak_on_gpu, seconds_of
from model import Llama
from train import PRESETS, objective


def test_medians(monkeypatch):
    """Catches a warm-up that counts, rounds that do not alternate, and own seconds that do not."""
    order, now = [], iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    own = iter([9.0, 0.1, 0.3, 0.2])
    runs = {"a": lambda: order.append("a"), "b": lambda: order.append("b") or next(own)}
    assert medians(runs, 3) == {"a": 1, "b": 0.2}
    assert order == ["a", "b"] * 4


@pytest.fixture
def threads(monkeypatch):
    """Threads in place of new processes."""
    stand_in = SimpleNamespace(Pool=lambda n, **kwargs: Pool(n))
    monkeypatch.setattr("lab.bench.timing.get_context", lambda kind: stand_in)


class Event:
    """An event of a GPU that takes as long as `run` says, and 100 times as long to be asked."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def synchronize(self):
        self.waited = True

    def elapsed_time(self, end):
        assert end.waited
        return end.at - self.at


def test_gpu_clock(monkeypatch):
    """Catches a GPU that is timed by the host, that is not waited for, milliseconds taken for
    seconds, and a time of several calls taken for that of one."""
    monkeypatch.setattr("torch.cuda.Event", Event)

    def run():
        Event.now += 30.0

    gpu = torch.device("cuda")
    assert seconds_of(run, gpu, calls=4) == pytest.approx(0.03)
    assert medians({"a": run, "b": lambda: 7.0}, 3, device=gpu) == {
        "a": pytest.approx(0.03),
        "b": 7,
    }


def test_memory_of_a_gpu(monkeypatch):
    """Catches a peak that counts what was there before the run, or that of another run."""
    bytes_ = SimpleNamespace(now=2**30, peak=2**40)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: bytes_.now)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: bytes_.peak)
    reset = lambda: setattr(bytes_, "peak", bytes_.now)  # noqa: E731
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", reset)
    assert peak_on_gpu(lambda: setattr(bytes_, "peak", bytes_.now + 2**23)) == 8


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of a process")
def test_memory_of_nothing(monkeypatch):
    """Catches less than nothing, which Linux tells where its sums lag behind."""
    monkeypatch.setattr(timing, "resident", {"VmRSS": 5.0, "VmHWM": 4.7}.get)
    assert timing.peak_memory((lambda: int, (), ())) == 0


def test_attention(tmp_path, capsys, threads):
    """Catches a command that crashes, and ratios to something else than plain attention."""
    attention.attention((64,), (8,), repeats=1, device="cpu", out=tmp_path)
    rows = json.loads((tmp_path / "attention-cpu.json").read_text())["rows"]
    assert [row["backend"] for row in rows] == ["plain", "sdpa", "eager"]
    shown = capsys.readouterr().out
    for row in rows:
        ratio = row["milliseconds"] / rows[0]["milliseconds"]
        assert row["time_ratio"] == pytest.approx(ratio) and row["MiB"] >= 0
        assert re.search(rf"{row['backend']} +{row['milliseconds']:.1f} ", shown)


def test_forms_that_fail(tmp_path, threads, monkeypatch):
    """Catches a form that takes the others with it, or disappears without a reason; a plain that
    is not the fastest; and one batch for all lengths."""
    seen = []

    def form(q, k, v, log_w, backend):
        seen.append((backend, log_w is not None, q.shape[0] * q.shape[2]))
        if backend == "flash" and log_w is not None:
            raise RuntimeError("No available kernel.\nAborting")
        time.sleep(0.02 * (backend == "sdpa"))
        return q * 1

    monkeypatch.setattr(attention, "find", lambda name, *_: partial(form, backend=name))
    monkeypatch.setitem(attention.SIZES, "cpu", (2, 128, 1))
    names = ("sdpa", "flash")
    attention.attention((32, 64), (8,), names, 1, "cpu", tmp_path)
    results = json.loads((tmp_path / "attention-cpu.json").read_text())
    kinds = [(row["backend"], row["kernel"], row["N"]) for row in results["rows"]]
    assert kinds == [(b, k, N) for N in (32, 64) for b, k in (("plain", "flash"), ("sdpa", "sdpa"))]
    why = "RuntimeError: No available kernel."
    assert results["refused"] == [dict(backend="flash", N=N, d=8, why=why) for N in (32, 64)]
    assert {(b, masked) for b, masked, _ in seen} == {(b, m) for b in names for m in (True, False)}
    assert {slots for _, _, slots in seen} <= {128, 64}  # 64: what warms up the measure of memory


def test_train(tmp_path, threads, monkeypatch):
    """Catches a command that crashes, ratios to something else than the plain step, and a compiled step that
    is not compiled."""
    compiled = []
    monkeypatch.setattr("torch.nn.Module.compile", lambda block, **how: compiled.append(how))
    training_step.train("tiny", 1, 0, repeats=1, compile=True, device="cpu", out=tmp_path)
    # two cases, timed and weighed, of three blocks
    assert compiled == [{"dynamic": False}] * 2 * 2 * PRESETS["tiny"][1].num_hidden_layers
    rows = json.loads((tmp_path / "train-tiny-cpu.json").read_text())["rows"]
    assert [row["case"] for row in rows[:2]] == ["plain", "PonderLM-3"] and len(rows) == 5
    for row in rows:
        assert row["time_ratio"] == pytest.approx(row["seconds"] / rows[0]["seconds"])
        assert row["MiB"] >= 0 and row["seconds"] > 0


@pytest.mark.parametrize("K, R", [(1, 2), (2, 1), (3, 0)])
@pytest.mark.parametrize("recompute", [True, False])
def test_train_case(K, R, recompute, monkeypatch):
    """Catches a step that is not that of train.py, or runs without its flag; and a plain one with other slots
    or without a backward pass."""
    shape, seen = replace(PRESETS["tiny"][1], block_size=8, ponder_steps=K), {True: [], False: []}
    rest = recompute, False, "sdpa", torch.device("cpu"), torch.float32
    made, forward = [], Llama.forward

    def watch(model, *inputs):
        made.append(model)
        return objective(model, *inputs)

    for plain, slots in seen.items():
        note = lambda llama, x, *rest, slots=slots: slots.append(x.size(1)) or forward(llama, x, *rest)  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(training_step, "objective", watch)
            run = training_step.train_case(shape, 1, R, plain, *rest)
            patch.setattr(Llama, "forward", note)
            patch.setattr("torch.Tensor.backward", lambda *gradient: None)
            run()
    assert seen[True] == seen[False] == [8 * n for n in training_step.slots_of_passes(K, R)]
    (model,) = made
    assert model.recompute == recompute and model.backend is sdpa
