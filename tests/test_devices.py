"""All of the project on a GPU that is not there (pretended_cuda.py): no tensor on another device
than its neighbours, the results of the CPU, and how often the host waits."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import ROOT, small_model
from pretended_cuda import Misplaced, pretended_cuda

from analysis.convergence import convergence_rows
from analysis.measuring import measure, open_subject, tau_rows
from baselines import all_methods
from corpus.preparation import Windows
from engine.batching import Engine
from evaluation.perplexity import score_texts
from interop import load
from runtime import UserError, pick_device
from sample import generate
from train import make_optimizer, objective, train
from training.config import TrainConfig
from training.runs import read_lines
from training.validation import evaluate

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SAMPLING = dict(temperature=0.9, top_k=20, top_p=0.95, seed=3, end=5)


# -- The pretended device --------------------------------------------------------------------------


COUNTS = {  # what is done with x = [1, 2, 3] on the device, by waits, copies to it, copies back
    (
        1,
        0,
        1,
    ): """x[0].item(); bool(x.sum() > 1); [1, 2, 3][x.argmin()]; x[: x.argmax()];
        x.tolist(); torch.tensor([x[0], 2.0]); x.cpu()""",
    (0, 0, 1): 'x.to("cpu", non_blocking=True)',
    (1, 0, 0): """x.nonzero(); x[x > 1]; torch.equal(x, x); x.unique(); torch.cuda.synchronize()""",
    (1, 1, 0): """torch.tensor([1.0], device=x.device); x.new_tensor(1.0); x.copy_(torch.ones(3));
        torch.ones(3).to(x.device, non_blocking=True); x[torch.tensor([0, 1])]""",
    (0, 1, 0): "x.copy_(torch.ones(3).pin_memory(), non_blocking=True)",
    (0, 0, 0): """x[x > 1] = 0.0; x[0] = 1.0; x.mul_(torch.tensor(2.0)); x.masked_fill_(x > 1, 0.0);
        torch.nn.functional.one_hot(x.long(), 4);
        x.to(torch.float64).to(x.device).to(x)""",
}
COUNTS = [(code.strip(), n) for n, codes in COUNTS.items() for code in codes.split(";")]


@pytest.mark.parametrize("code, expected", COUNTS)
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_counts(code, expected, mode):
    """Catches a wait or a copy that the pretended device does not see, or sees where none is."""
    with pretended_cuda() as gpu, mode():
        x = torch.tensor([1.0, 2.0, 3.0], device="cuda")
        gpu.counts.clear()
        exec(code, globals(), {"x": x})
    assert tuple(gpu.seen(kind).total() for kind in ("wait", "h2d", "d2h")) == expected
    assert {file for _, file, *_ in gpu.counts} <= {"tests/test_devices.py"}


REFUSED = """x + torch.arange(3); x @ torch.ones(3); torch.stack([x[0], torch.tensor(1.0)])
torch.nn.functional.embedding(torch.tensor([0, 1]), x[:, None]); torch.ones(3)[x.long()]
np.asarray(x)"""


@pytest.mark.parametrize("code", re.split(r"[;\n] *", REFUSED))
def test_refused(code):
    """Catches two devices in one operation that pass, and a message without its line."""
    with pretended_cuda():
        x = torch.tensor([1.0, 2.0, 3.0], device="cuda")
        with pytest.raises(Misplaced, match=r"^tests/test_devices.py:\d+ in .*(devices|numpy)"):
            exec(code, globals(), {"x": x})


def test_copies_that_do_not_block():
    """Catches results that are read before the host has waited for them, and inputs that are
    overwritten before they have been copied."""
    with pretended_cuda():
        x, early, done = torch.ones(3, device="cuda"), torch.cuda.Event(), torch.cuda.Event()
        early.record()
        host = x.to("cpu", non_blocking=True)
        done.record()
        early.synchronize()
        assert host.isnan().all()
        done.synchronize()
        assert host.tolist() == [1, 1, 1]
        x.copy_(host, non_blocking=True)
        host.zero_()
        with pytest.raises(Misplaced, match="has changed before its copy was awaited"):
            torch.cuda.synchronize()


def test_graphs():
    """Catches graphs that run at their capture, that replay values of the time of the capture or
    on other memory, and captures in which the host waits."""
    with pretended_cuda() as gpu:
        x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = x * torch.arange(3, device="cuda")
            y += z[:, None].sum(1)
        assert z.isnan().all() and y.tolist() == [0, 0, 0]
        for n in (1, 2):
            x.fill_(n)
            graph.replay()
            assert z.tolist() == [0, n, 2 * n]
        assert y.tolist() == [0, 3, 6]
        capture = torch.cuda.graph(torch.cuda.CUDAGraph())
        with pytest.raises(Misplaced, match="item waits for the device while"), capture:
            x *= x[0].item()
        assert gpu.graph is None


# -- Every method ----------------------------------------------------------------------------------


def windows():
    """A text of 200 tokens in windows of 8."""
    return Windows(np.random.default_rng(0).integers(31, size=200), 8, seed=0)


def steps_of(model, device, count=2):
    """`count` steps of training -> what is logged of each."""
    model.to(device).train()
    optimizer, logged = make_optimizer(model, TrainConfig(model=model.config)), []
    for step in range(count):
        rows = windows().rows(step, 4).to(device)
        x, y = rows[:, :-1], rows[:, 1:]
        loss, penalty, out = objective(model, x, y, 2)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        logged.append([loss, penalty, out.loss, norm])
    return [[float(value.detach()) for value in row] for row in logged]


def everything(method, device):
    """A little training of a method, its losses, and what it decodes then."""
    shape = dict(ponder_steps=0) if method == "vanilla" else dict(ponder_steps=2)
    if method == "adaponder":  # whose lowest gates would be rounding errors
        shape["router_scale"] = 0.5
    model = small_model(seed=1, method=method, **shape).float()
    logged = steps_of(model, device)
    tau = 0.3 if model.has_router else None
    scores = evaluate(model.eval(), windows(), 3, device, tau=tau, permute=model.has_router)
    return logged, scores, generate(model, [[1, 2, 3], [4]], 4, tau=0.3, seed=0)


def close(a, b, rel=1e-6):
    """Whether two nested results agree, floats to `rel` of their size."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key], rel) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(close(x, y, rel) for x, y in zip(a, b, strict=True))
    return a == pytest.approx(b, rel=rel, nan_ok=True) if isinstance(a, float) else a == b


@pytest.mark.parametrize("method", [kind.method for kind in all_methods()])
def test_methods(method):
    """Catches a tensor of a method that is made on the CPU, in training, scoring or decoding."""
    expected = everything(method, CPU)
    with pretended_cuda():
        assert close(everything(method, CUDA), expected)


@pytest.mark.parametrize("recompute, count", [(False, 6), (True, 12)])
def test_waits_of_a_training_pass(recompute, count, monkeypatch):
    """Catches waits of a training step that are not seen, or at another line: 6 passes, which run
    again in the backward pass."""
    model = small_model().float()
    angles, model.recompute = model.model.angles, recompute

    def waiting(x, dtype):
        x.sum().item()
        return angles(x, dtype)

    monkeypatch.setattr(model.model, "angles", waiting)
    with pretended_cuda() as gpu:
        steps_of(model, CUDA, count=1)
    place = "tests/test_devices.py", "test_waits_of_a_training_pass.<locals>.waiting", "item"
    assert gpu.seen("wait")[place] == gpu.seen("d2h")[place] == count


# -- The commands ----------------------------------------------------------------------------------


def test_training(config):
    """Catches a training on a GPU whose checkpoints, resumed part or report are not a CPU's."""
    found = []
    for device in ("cpu", "cuda"):
        run = replace(config, device=device, name=device, steps=4, eval_every=2, log_every=1)
        with pretended_cuda() if device == "cuda" else nullcontext():
            train(run)
            place, results = train(replace(run, steps=6, resume=True))
        rows = [(row.get("loss"), row.get("val")) for row in read_lines(place / "log.jsonl")]
        found.append((rows, results))
    assert close(*found)


@pytest.mark.parametrize("prefill", ["jacobi", "sequential"])
@pytest.mark.parametrize("graphs", [True, False])
def test_engine(prefill, graphs, monkeypatch):
    """Catches rows, prompts or graphs that make other tokens on a GPU: with more prompts than rows,
    texts that end, windows that are outgrown, and graphs of a cache that has moved."""
    monkeypatch.setattr("engine.cache.BLOCK", 8)
    model = small_model(seed=2, block_size=16).float()
    texts = [windows().tokens[:n].tolist() for n in (3, 9, 1, 14, 6, 2, 4, 5)]
    calls = (texts[:1], 3), (texts, 10), (texts[:1], 3)  # the cache grows after the first
    expected = [generate(model, *call, tau=0.3, alpha=0.5, **SAMPLING) for call in calls]
    assert {len(sample.tokens) for sample in expected[1]} > {10}  # some end early
    with pretended_cuda():
        options = dict(tau=0.3, alpha=0.5, prefill=prefill, graphs=graphs)
        engine = Engine(model.to("cuda"), 6, **options)
        assert [engine.generate(*call, **SAMPLING) for call in calls] == expected


def test_other_choices(monkeypatch):
    """Catches graphs that are kept for every temperature that ever was asked for."""
    with pretended_cuda():
        engine = Engine(small_model().float().to("cuda"), 1)
        for temperature in (0.5, 0.6, 0.7):
            engine.generate([[1]], 3, temperature=temperature)
        assert {key[2:] for key in engine.passes.recorded} == {((0.7, None, None),)}


def test_numbered_device():
    """Catches a GPU whose streams, events and graphs are made on another one."""
    with pretended_cuda(), patch("torch.cuda.set_device") as set_device:
        assert pick_device("cuda:0") == torch.device("cuda:0")
        set_device.assert_called_once_with(torch.device("cuda:0"))
        with pytest.raises(UserError, match="'cuda:3' is not here: 1"):
            pick_device("cuda:3")


def numbers(device, run):
    """What is measured of a run."""
    model, subject = load(run).to(device), open_subject(run, windows=2, tau=0.3, device=device)
    scores = score_texts(model, run, data=None, tau=0.3, windows=2, batch_tokens=64)
    measured = [x.tolist() for x in measure(subject)]
    converging = convergence_rows(subject.model, subject.rows[:, :5], most=2)
    return scores, measured, tau_rows(subject, [0.3]), converging


def test_measuring(config):
    """Catches evaluation and analysis that stumble over a model on a GPU, or find other numbers."""
    run, _ = train(replace(config, steps=1))
    expected = numbers("cpu", run)
    with pretended_cuda():
        assert close(numbers("cuda", run), expected, rel=1e-5)


# -- How often the host waits ----------------------------------------------------------------------


def test_waits_of_a_training_step(config, monkeypatch):
    """Catches a training step in which the host waits for the GPU. There is one copy to it, the
    batch, and none back where no line is logged."""
    begun = []
    with pretended_cuda() as gpu:
        own = lambda *args: begun.append(gpu.counts.copy()) or objective(*args)  # noqa: E731
        monkeypatch.setattr("train.objective", own)
        train(replace(config, device="cuda", steps=5, log_every=9, eval_every=9))
    gpu.counts = begun[3] - begun[2]  # one step, of which nothing is logged or saved
    assert gpu.seen("h2d") == {("train.py", "to_device", "copy"): 1}
    assert not gpu.seen("d2h") and not gpu.seen("wait")


@pytest.mark.parametrize("graphs", [True, False])
def test_waits_of_a_decoded_pass(graphs):
    """Catches a pass of the engine in which the host waits for the GPU. There is one copy back,
    what was chosen, which is looked at when two more passes are under way."""
    with pretended_cuda() as gpu:
        engine = Engine(small_model().float().to("cuda"), 3, tau=0.3, graphs=graphs)
        for _ in range(2):  # the second time nothing is recorded
            stream = engine.stream([[1], [2], [3]], 20, seed=0)
            for _ in range(10):
                next(stream)
            gpu.counts.clear()
            before = engine.stats.passes
            for _ in range(10):
                next(stream)
            passes = engine.stats.passes - before
    assert not gpu.seen("h2d")
    assert gpu.seen("d2h") == {("engine/cuda_graphs.py", "Fetched.__init__", "copy"): passes}
    assert gpu.seen("wait") == {("engine/cuda_graphs.py", "Fetched.tolist", "synchronize"): passes}


# -- The suite -------------------------------------------------------------------------------------


def test_device_of_the_tests():
    """Catches a suite that takes a GPU because there is one, and equivalence tests that stay on the
    CPU when they are to run on a GPU, which is not there, or others that do not."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()
    environment = os.environ | {"PONDERLM_TEST_DEVICE": "cuda"}
    files = [f"tests/method/test_{name}.py" for name in ("golden", "train")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    command += ["-k", "golden or learning_rate"]  # four tests, and one that stays on the CPU
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert re.search(r"(?m)^4 failed\b(?!.*passed)", done.stdout) and "CUDA" in done.stdout
