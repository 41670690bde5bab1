"""All of the project on a GPU that is not there (pretended_cuda.py): no tensor on another device
than its neighbours, the results of the CPU, and how often the host waits."""

import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from lab_helpers import small_model
from pretended_cuda import Misplaced, pretended_cuda
from torch.utils._pytree import tree_leaves

import train as train_script
from data import Windows, load_tokenizer
from lab.engine.batching import Engine
from lab.engine.simple import generate
from lab.evaluation.__main__ import score_texts
from lab.evaluation.texts import own_texts
from lab.interop.weights import load
from lab.methods import all_methods, configure, find
from lab.train import parse as lab_parse
from train import TrainConfig, evaluate, train

# What is done with x = [1, 2, 3] on the device: waits, copies to it, copies back; None: refused.
DONE = {
    (1, 0, 1): "x[0].item(); [1, 2, 3][x.argmin()]; x[: x.argmax()]; x.cpu(); torch.tensor([x[0], 2.0])",
    (0, 0, 1): 'x.to("cpu", non_blocking=True)',
    (1, 0, 0): "x.nonzero(); x[x > 1]; torch.equal(x, x)",
    (1, 1, 0): "torch.tensor([1.0], device=x.device); x.copy_(torch.ones(3)); x[torch.tensor([0, 1])]",
    (0, 1, 0): "x.copy_(torch.ones(3).pin_memory(), non_blocking=True)",
    (0, 0, 0): "x[x > 1] = 0.0; x[0] = 1.0; x.mul_(torch.tensor(2.0)); x.to(torch.float64).to(x)",
    None: "x + torch.arange(3); torch.stack([x[0], torch.tensor(1.0)]); torch.ones(3)[x.long()]; x.numpy()",
}
CODES = [(code, n) for n, codes in DONE.items() for code in codes.split("; ")]


@pytest.mark.parametrize("code, expected", CODES)
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_operations(code, expected, mode):
    """Catches a wait, a copy or two devices in one operation that the pretended device does not see."""
    with pretended_cuda() as gpu, mode():
        x = torch.tensor([1.0, 2.0, 3.0], device="cuda")
        gpu.counts.clear()
        wrong = pytest.raises(Misplaced, match=r"^tests/test_devices.py:\d+ in .*(devices|numpy)")
        with nullcontext() if expected else wrong:
            exec(code, globals(), {"x": x})
    found = tuple(gpu.seen(kind).total() for kind in ("wait", "h2d", "d2h"))
    assert found == (expected or found)


def test_waiting():
    """Catches results read before the host has waited for them, and a wait in the capture of a graph."""
    with pretended_cuda():
        x = torch.ones(3, device="cuda")
        host = x.to("cpu", non_blocking=True)
        assert host.isnan().all()
        torch.cuda.Event().synchronize()
        assert host.tolist() == [1, 1, 1]
        with pytest.raises(Misplaced, match="item waits"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            x *= x[0].item()


# -- The results of the CPU ------------------------------------------------------------------------


def windows():
    """A text of 200 tokens in windows of 8."""
    return Windows(np.random.default_rng(0).integers(31, size=200), 8, seed=0)


def everything(method, device):
    """Losses and gradients of a method, also where passes run again; its scores; and what it decodes."""
    model = small_model(seed=1, method=method, ponder_steps=2 * (method != "vanilla")).float()
    model.to(device).train()
    rows, found = windows().stack(0, 4).to(device), []
    for model.recompute in (False, True):
        loss, penalty, out = model.objective(rows[:, :-1], rows[:, 1:], 2)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found += [float(value.detach()) for value in (loss, penalty, out.loss, norm)]
    scores = evaluate(model.eval(), windows(), 3, tau=0.3 if model.has_router else None)
    decoded = generate(model, [[1, 2, 3], [4]], 4, tau=0.3, seed=0)
    return found, scores, [vars(sample) for sample in decoded]


def assert_close(a, b):
    """Two nested results agree, floats to a millionth of their size."""
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        assert x == (pytest.approx(y, rel=1e-6, nan_ok=True) if isinstance(y, float) else y)


QUICK = ("ponderlm3", "grid", "ouro", "mor-expert")


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(kind.method, marks=[] if kind.method in QUICK else pytest.mark.slow)
        for kind in all_methods()
    ],
)
def test_methods(method):
    """Catches a tensor of a method that is made on the CPU, in training, scoring or decoding."""
    expected = everything(method, "cpu")
    with pretended_cuda():
        assert_close(everything(method, "cuda"), expected)


def test_a_run(config, shape):
    """Catches a run on a GPU whose checkpoints, resumed part, report or scores are not a CPU's."""
    found = []
    for device in ("cpu", "cuda"):
        run = replace(config, device=device, name=device, steps=4, eval_every=2, log_every=1, compile=False)
        with pretended_cuda() if device == "cuda" else nullcontext():
            train(run, shape)
            place, results = train(replace(run, steps=6, resume=True), shape)
            model = load(place).to(device)
            texts = own_texts(config.data, load_tokenizer(place / "tokenizer.json"))
            scores = score_texts(model, *texts, 0.3, windows=2) | {"text": None}
        lines = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
        rows = [(row.get("loss"), row.get("val")) for row in lines]
        found.append((rows, results, scores))
    assert_close(*found)


@pytest.mark.parametrize("method", ["ponderlm3", "grid", "mor-expert", "ponderlm1"])
def test_a_gpu_is_not_waited_for(config, shape, monkeypatch, method):
    """Catches a step that stops the GPU: it is waited for where a line is logged, at the end, and once a
    micro-batch where the tokens that have a target are picked; it copies once a step, its rows of tokens."""
    monkeypatch.setattr(train_script, "evaluate", lambda *_, **__: {"loss": 1.0})
    monkeypatch.setattr(train_script, "final_report", lambda *_: {})
    config = replace(config, steps=3, log_every=100, eval_every=100, device="cuda", precision="bfloat16")
    config = replace(config, compile=False, micro_batch_size=8)
    shape = configure(shape, method, penalty_weight=0.0)
    model = find(method)(shape)
    with pretended_cuda() as gpu:
        train(config, shape, make_model=find(method), objective=find(method).objective)
    waits = {f"{file} {function}": n for (file, function, _), n in gpu.seen("wait").items()}
    saved = ("model.py", "train.py save_checkpoint", "train.py join_processes")
    waits = {where: n for where, n in waits.items() if not where.startswith(saved)}
    size = len([*model.parameters(), *model.buffers()])  # which are copied to it
    assert waits.pop("train.py objective", 0) in (0, 3)
    assert waits == {"data.py pick_device": 1, "train.py train": size + 1}, waits
    copies = {f"{file} {function}": n for (file, function, _), n in gpu.seen("h2d").items()}
    assert copies.get("train.py train") == size + 3, copies


@pytest.mark.parametrize("parse", [train_script.parse, lab_parse], ids=["root", "lab"])
def test_a_gpu_for_each_process(parse, monkeypatch):
    """Catches processes that all put something on the first GPU, and presets of a CPU where there is one."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    with pretended_cuda() as gpu:
        config, _ = parse([])
        assert config.preset == "small" and not gpu.counts
        assert train_script.join_processes(config.device)[2] == torch.device("cuda:1")
        torch.cuda.set_device.assert_called_once_with(torch.device("cuda:1"))


@pytest.mark.parametrize(
    "room, asked, found",
    [(10**9, None, 8), (5200, None, 4), (0, None, 1), (0, 2, 2), (None, None, 1)],  # None: two do not fit
)
def test_windows_at_once(room, asked, found, monkeypatch):
    """Catches a GPU that runs out of memory, or takes other windows at once than fit or are asked for."""
    model, ran = torch.nn.Linear(1, 1), []
    with pretended_cuda():
        model.to("cuda")
        taken = lambda: 100 + 1000 * ran[-1]  # noqa: E731

        def loss(n):
            ran.append(n)
            if room is None and n == 2:
                raise torch.OutOfMemoryError
            return model.weight.sum()

        monkeypatch.setattr(torch.cuda, "max_memory_allocated", taken)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (room, None))
        assert train_script.pick_micro_batch(TrainConfig(micro_batch_size=asked), model, 8, loss) == found
    assert ran == ([] if asked else [1, 2])


@pytest.mark.parametrize("method", ["ponderlm3", "grid"])
@pytest.mark.parametrize("prefill, graphs", [("jacobi", True), ("sequential", False)])
def test_engine(method, prefill, graphs, monkeypatch):
    """Catches rows, prompts or graphs that make other tokens on a GPU, also of a cache that has moved."""
    monkeypatch.setattr("lab.engine.cache.BLOCK", 8)
    model = small_model(seed=2, method=method, block_size=16).float()
    texts = [windows().tokens[:n].tolist() for n in (3, 9, 1, 14, 6, 2, 4, 5)]
    calls = (texts[:1], 3), (texts, 10), (texts[:1], 3)  # the cache grows after the first
    how = dict(temperature=0.9, top_k=20, top_p=0.95, seed=3, ends=[5])
    expected = [generate(model, *call, tau=0.3, alpha=0.5, **how) for call in calls]
    assert {len(sample.tokens) for sample in expected[1]} > {10}  # some end early
    with pretended_cuda():
        options = dict(tau=0.3, alpha=0.5, prefill=prefill, graphs=graphs)
        engine = Engine(model.to("cuda"), 6, **options)
        assert [engine.generate(*call, **how) for call in calls] == expected


# -- How often the host waits; of a training step see test_a_gpu_is_not_waited_for -----------------


@pytest.mark.parametrize("method", ["ponderlm3", "grid"])
@pytest.mark.parametrize("graphs", [True, False])
def test_waits_of_a_decoded_pass(method, graphs):
    """Catches a pass of the engine in which the host waits for the GPU: there is one copy back,
    what was chosen, which is looked at when two more passes are under way. And prompts of the grid
    for which it waits more than once, when their steps are known."""
    with pretended_cuda() as gpu:
        engine = Engine(small_model(method=method).float().to("cuda"), 3, tau=0.3, graphs=graphs)
        for _ in range(2):  # the second time nothing is recorded
            gpu.counts.clear()
            stream = engine.stream([[1], [2], [3, 4]], 20, seed=0)
            for _ in range(10):
                next(stream)
            reading = [n for key, n in gpu.seen("wait").items() if key[1] == "read_on_grid"]
            assert reading == [1] * (method == "grid")  # one place, once
            gpu.counts.clear()
            before = engine.stats.passes
            for _ in range(10):
                next(stream)
            passes = engine.stats.passes - before
    assert not gpu.seen("h2d")
    assert gpu.seen("d2h") == {("lab/engine/cuda_graphs.py", "Fetched.__init__", "copy"): passes}
    assert gpu.seen("wait") == {("lab/engine/cuda_graphs.py", "Fetched.tolist", "synchronize"): passes}
