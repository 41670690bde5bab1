"""All of the project on a GPU that is not there (pretended_cuda.py): no tensor on another device
than its neighbours, the results of the CPU, and how often the host waits."""

import json
import types
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from lab_helpers import small_model
from pretended_cuda import Misplaced, on_cuda, pretended_cuda, tensors_of
from torch.utils._pytree import tree_leaves

import train as train_script
from common import UserError
from data import Windows
from lab.engine.batching import Engine
from lab.engine.simple import generate
from lab.evaluation.__main__ import score_texts
from lab.evaluation.texts import own_texts
from lab.interop.weights import load
from lab.methods import all_methods, configure, find, unused_settings
from lab.train import parse as lab_parse
from tokenizer import load_tokenizer
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
        run = replace(config, device=device, name=device, steps=4, eval_every=2, log_every=1, compile="off")
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


class PretendedDDP(torch.nn.Module):
    """DistributedDataParallel of a process that is alone: gradients are already the mean."""

    def __init__(self, module, **how):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)


def pretend_two_processes(monkeypatch):
    """Let train() be the first of two processes, the other of which does the same.

    Returns:
        What they tell each other, a list.
    """
    told = []

    def gather(value):
        told.append(value)
        return [value, value]

    device = torch.device("cuda")
    monkeypatch.setattr(train_script, "init_distributed", lambda name: (0, 2, device))
    monkeypatch.setattr(train_script, "rank_and_world_size", lambda: (0, 2))
    monkeypatch.setattr(train_script, "gather", gather)
    monkeypatch.setattr(train_script, "wait_for_all", lambda: None)
    monkeypatch.setattr(train_script, "DistributedDataParallel", PretendedDDP)
    return told


@pytest.mark.parametrize("penalty_weight", [0.0, 0.5])
@pytest.mark.parametrize(
    "method, processes",
    [("ponderlm3", 1), ("ponderlm3", 2), ("grid", 1), ("mor-expert", 1), ("ponderlm1", 1)],
)
def test_a_gpu_is_not_waited_for(config, shape, monkeypatch, method, processes, penalty_weight):
    """Catches a step that stops the GPU. It is waited for where a line is logged, at the end, and in the
    objective: once a micro-batch to pick the tokens that have a target, and with a penalty twice more, to see
    whether CE_0 can count and how many tokens are selected. It copies once a step, its rows of tokens. Two
    processes tell each other nothing that is on the GPU."""
    monkeypatch.setattr(train_script, "evaluate", lambda *_, **__: {"loss": 1.0})
    monkeypatch.setattr(train_script, "final_report", lambda *_: {})
    config = replace(config, steps=3, log_every=100, eval_every=100, device="cuda", precision="bfloat16")
    config = replace(config, compile="off", micro_batch_size=8)
    if "penalty_weight" in unused_settings(find(method)):
        penalty_weight = 0.5  # its default
    shape = configure(shape, method, penalty_weight=penalty_weight)
    model = find(method)(shape)
    told = pretend_two_processes(monkeypatch) if processes == 2 else []
    with pretended_cuda() as gpu:
        train(config, shape, make_model=find(method), objective=find(method).objective)
    waits = {f"{file} {function}": n for (file, function, _), n in gpu.seen("wait").items()}
    saved = ("model.py", "checkpoint.py", "distributed.py")
    waits = {where: n for where, n in waits.items() if not where.startswith(saved)}
    size = len([*model.parameters(), *model.buffers()])  # which are copied to it
    objective = {where: waits.pop(where, 0) for where in OBJECTIVE_WAITS}
    has_objective = objective["train.py objective"] > 0
    assert set(objective.values()) <= {0, 3}
    assert objective["train.py depth_losses"] == (3 if has_objective and penalty_weight else 0)
    expected = {"hardware.py pick_device": 1, "train.py train": size, "train.py mean_over_processes": 1}
    if processes == 2:
        del expected["hardware.py pick_device"]  # its caller is pretended
        assert sum(value is False for value in told) >= config.steps  # after each step: no signal came
        assert not any(map(on_cuda, tensors_of(told)))
    assert waits == expected, waits
    copies = {f"{file} {function}": n for (file, function, _), n in gpu.seen("h2d").items()}
    assert copies.get("train.py train") == size, copies
    assert copies.get("train.py load_batch") == config.steps, copies


OBJECTIVE_WAITS = "train.py objective", "train.py depth_losses", "router.py bottom_mass_penalty"


@pytest.mark.parametrize("parse", [train_script.parse, lab_parse], ids=["root", "lab"])
def test_a_gpu_for_each_process(parse, monkeypatch):
    """Catches processes that all put something on the first GPU, and presets of a CPU where there is one."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    with pretended_cuda() as gpu:
        config, _ = parse([])
        assert config.preset == "small" and not gpu.counts
        assert train_script.init_distributed(config.device)[2] == torch.device("cuda:1")
        torch.cuda.set_device.assert_called_once_with(torch.device("cuda:1"))


@pytest.mark.parametrize(
    "room, share, asked, found",
    [
        *((10**9, 8, None, 8), (5200, 8, None, 4), (0, 8, 2, 2), (10**9, 6, None, 6)),
        *(
            (6500, 8, None, 4),
            (5200, 14, None, 2),
            (5200, 11, None, 4),
            (-1, 8, None, 1),
        ),  # -1: one fits, two do not
    ],
)
def test_windows_at_once(room, share, asked, found, monkeypatch):
    """Catches a GPU that runs out of memory, or takes other windows at once than fit or are asked for; parts
    of unequal size where equal ones are possible, and memory that the measurement keeps."""
    with pretended_cuda():
        ran = measured_memory(monkeypatch, room)
        model = torch.nn.Linear(1, 1).to("cuda")
        config = TrainConfig(batch_size=share, micro_batch_size=asked, compile="off")
        assert fit(config, model, ran, fails_at=2 if room < 0 else None) == found
        assert torch.cuda.empty_cache.call_count == (0 if asked else 1)
    assert ran == ([] if asked else [1, 2])


def test_no_window_fits(monkeypatch):
    """Catches a training that ends in torch's traceback where --recompute helps, without a word of it."""
    with pretended_cuda():
        ran = measured_memory(monkeypatch, 0)
        model = torch.nn.Linear(1, 1).to("cuda")
        with pytest.raises(UserError, match=r"not even one window fits.*--recompute"):
            fit(TrainConfig(compile="off"), model, ran)


def measured_memory(monkeypatch, room):
    """Let a GPU have `room` free bytes, or plenty if that is negative. -> the list of how many windows ran"""
    ran = []

    def of_the_model(measure):
        """A measurement of the GPU that the model is on, which need not be the current one."""
        return lambda device: measure() if torch.device(device).type == "cuda" else pytest.fail(str(device))

    free = room if room >= 0 else 10**9
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", of_the_model(lambda: 100 + 1000 * ran[-1]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", of_the_model(lambda: (free, None)))
    return ran


def fit(config, model, ran, fails_at=None):
    """The windows that fit_to_hardware computes at once, by a model of one weight."""
    model.config = types.SimpleNamespace(refinements=(1, 1))

    def loss_module(rows, R):
        ran.append(len(rows))
        if len(rows) == fails_at:
            raise torch.OutOfMemoryError
        return model.weight.sum(), None, None

    device = torch.device("cuda")
    return train_script.fit_to_hardware(config, model, loss_module, windows(), device, world_size=1)[0]


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
