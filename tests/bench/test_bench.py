"""`python -m lab bench`: what it measures against what, and what it refuses before it measures."""

import json
import time
from dataclasses import replace

import pytest
import torch
from lab_helpers import NEOX, save_for_bytes, small_model
from torch.nn.attention import SDPBackend

import train as train_script
from attention import sdpa
from common import UserError
from lab import bench
from lab.engine.batching import Engine
from model import Llama
from train import preset_settings

CPU = torch.device("cpu")


def test_measure(monkeypatch):
    """Catches things that do not take turns, a mean in place of a median, one that fails and takes all with
    it or disappears without a reason."""
    order, waits = [], iter([0, 0, 0.3] + 10 * [0])

    def slow_once():
        order.append("b")
        time.sleep(next(waits, 0))

    def fails():
        raise RuntimeError("too large\nby far")

    runs = {"a": lambda: order.append("a"), "b": slow_once, "c": fails}
    seconds, memory, refused = bench.measure(runs, 3, CPU)
    assert seconds.keys() == {"a", "b"} and seconds["b"] < 0.05 and memory == {"a": None, "b": None}
    assert refused == {"c": "too large by far"}
    turns = "".join(order)[2:]  # the first calls load what is needed
    assert turns == 3 * turns[: len(turns) // 3]


def test_peak_of_a_gpu(monkeypatch):
    """Catches a peak that counts what was there before, or of another run."""
    now = dict(allocated=2**30, peak=2**40)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: now["allocated"])
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: now["peak"])
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: now.update(peak=now["allocated"]))
    grow = lambda: now.update(peak=now["allocated"] + 2**23)  # noqa: E731
    assert bench.measure({"a": grow, "b": lambda: None}, 1, torch.device("cuda"))[1] == {"a": 8, "b": 0}


def test_one_kernel():
    """Catches a kernel that is asked for by name, and another one that runs."""
    q, k, v = torch.randn(3, 1, 2, 16, 8, dtype=torch.float64)
    log_w = -torch.rand(1, 16)
    torch.testing.assert_close(bench.sdpa_by(SDPBackend.MATH)(q, k, v, log_w), sdpa(q, k, v, log_w))
    with pytest.raises(RuntimeError):  # there is no such kernel on a CPU
        bench.sdpa_by(SDPBackend.CUDNN_ATTENTION)(q, k, v, log_w)


def test_profile(tmp_path, monkeypatch):
    """Catches a profile without the matrix products, whose times are not of one step, and graphs that are not
    counted."""
    graphs = iter([7, 9])
    monkeypatch.setattr(bench, "compiled_graphs", lambda: next(graphs))
    how = dict(repeats=1, device="cpu", out=tmp_path, rows=300)
    bench.profile(bench.Profile(preset="tiny", windows=2, R=0, **how))
    found = json.loads((tmp_path / "profile-tiny-cpu.json").read_text())
    (step,) = found["step"]
    assert (step["graphs"], step["graphs compiled after the first step"]) == (7, 2)
    rows = {row["operation"]: row for row in found["rows"]}
    assert rows["aten::mm"]["milliseconds"] > 0
    fractions = [row["fraction"] for row in found["rows"]]
    assert fractions == sorted(fractions, reverse=True) and sum(fractions) == pytest.approx(1)


def test_ratios(tmp_path, monkeypatch):
    """Catches ratios to something else than the plain form or step, and a compiled step that is not."""
    monkeypatch.setitem(bench.MOST_SLOTS, "eager", 32)
    how = dict(repeats=1, device="cpu", out=tmp_path)
    bench.attention(bench.Attention(lengths=(32, 64), widths=(8,), **how))
    rows = json.loads((tmp_path / "attention-cpu.json").read_text())["rows"]
    assert [(row["backend"], row["N"]) for row in rows] == [
        *((name, 32) for name in ("plain", "sdpa", "exact", "eager")),
        *((name, 64) for name in ("plain", "sdpa", "exact")),
    ]
    for row in rows:
        plain = next(x["milliseconds"] for x in rows if (x["backend"], x["N"]) == ("plain", row["N"]))
        assert row["time_ratio"] == pytest.approx(row["milliseconds"] / plain)
    compiled = []
    monkeypatch.setattr("torch.compile", lambda form, **how: compiled.append(how) or form)
    bench.step(bench.Step(preset="tiny", windows=1, R=0, compile=True, **how))
    blocks_and_loss = preset_settings("tiny")[1].num_hidden_layers + 1
    assert compiled == [{"dynamic": False}] * 2 * blocks_and_loss
    rows = json.loads((tmp_path / "train-tiny-cpu.json").read_text())["rows"]
    assert [row["case"] for row in rows[:2]] == ["plain", "PonderLM-3"] and len(rows) == 5
    for row in rows:
        assert row["time_ratio"] == pytest.approx(row["seconds"] / rows[0]["seconds"])


@pytest.mark.parametrize("K, R", [(1, 2), (3, 0)])
def test_what_a_step_runs(K, R, monkeypatch):
    """Catches a step that is not train.py's, or a plain one of other slots or without a backward pass."""
    shape, seen, gradients = replace(preset_settings("tiny")[1], block_size=8, ponder_steps=K), [], []
    forward, backward = Llama.forward, torch.Tensor.backward
    monkeypatch.setattr(Llama, "forward", lambda *x: seen.append(x[1].size(1)) or forward(*x))
    monkeypatch.setattr("torch.Tensor.backward", lambda *x: gradients.append(x) or backward(*x))
    for plain in (True, False):
        bench.step_run(shape, 1, R, CPU, torch.float32, plain=plain)()
        assert seen == [8 * n for n in bench.slots_of_passes(K, R)]
        assert len(gradients) == (len(seen) if plain else 1)
        seen.clear(), gradients.clear()
    bench.step_run(shape, 1, R, CPU, torch.float32, recompute=True)()
    assert len(seen) == 2 * len(bench.slots_of_passes(K, R))  # each pass once more
    assert bench.objective is train_script.objective


def test_goals(tmp_path, capsys):
    """Catches a goal that is judged the wrong way round, or missing, and results that nobody measured."""
    with pytest.raises(UserError, match="has none of the measurements"):
        bench.goals(bench.Goals(out=tmp_path))
    sdpa = {"backend": "sdpa", "N": 1024}
    results = {
        "attention": {"rows": [{**sdpa, "d": 56, "time_ratio": 1.09}, {**sdpa, "d": 120, "time_ratio": 1.2},
                               {**sdpa, "d": 64, "time_ratio": 1.45}, {**sdpa, "d": 128, "time_ratio": 9}]},
        "small": {"preset": "small", "rows": [{"case": "--compile", "MFU": 0.3}, {"case": "plain"}]},
        "70m": {"preset": "70m", "rows": [{"case": "--compile", "MFU": 0.17}]},
        "decode": {"run": "x", "exit": [
            {"batch": 1, "way": "alpha -2", "saved": 0.95}, {"batch": 8, "way": "alpha -2", "saved": 0.8},
            {"batch": 1, "way": "all steps, no graphs", "time_ratio": 2.5},
        ]},
        "results": {"hard": {"steps": 2.95}},
    }  # fmt: skip
    for name, content in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    bench.goals(bench.Goals(out=tmp_path, run=tmp_path))
    lines = capsys.readouterr().out.splitlines()[1:]
    failed = "".join(line for line in lines if "passed" not in line)
    assert len(lines) == 9 and failed.count("FELL SHORT") == 4
    assert all(what in failed for what in ("d = 120", "batch 8", "executed steps", "70m"))


# -- Decoding --------------------------------------------------------------------------------------


def test_rows():
    """Catches a measurement that counts other slots than were run."""
    model, alphas, how = small_model(seed=2, block_size=64).float(), (0.0, -4.0), dict(dtype=torch.float32)
    texts = bench.prompts_of(torch.arange(200) % 31, 2, 5)
    *_, loop = bench.exit_rows(model, texts[:1], 4, 0.3, alphas, 1, **how)
    assert loop["way"] == "all steps, sample.py" and loop["time_ratio"] > 0
    always, full, less = bench.exit_rows(model, texts, 4, 0.3, alphas, 1, **how)
    assert always["time_ratio"] == 1
    assert 0 < less["slot_ratio"] < full["slot_ratio"] < 1
    for row, alpha in zip((full, less), alphas, strict=True):
        engine = Engine(model, 2, tau=0.3, alpha=alpha, prefill="sequential")
        engine.generate(texts, 4, seed=0)
        read = 2 * (5 + 4 - 1)  # tokens; the last one that is chosen is not read
        assert engine.stats.slots == pytest.approx((1 + row["steps"]) * read)
        assert row["slot_ratio"] == pytest.approx((1 + row["steps"]) / 4)
        seconds = 8 / row["tokens_per_second"]
        assert row["time_ratio"] == pytest.approx(seconds / (8 / always["tokens_per_second"]))


def test_compiled_beside_plain(monkeypatch, capsys):
    """Catches compiled passes that are reported in place of plain ones, or not at all, so that nobody sees
    that they are slower; an inverted ratio; and a benchmark that stops where nothing can be compiled."""
    seen = []

    def measure(runs, repeats, device):
        for run in runs.values():
            run()
        return {"ours": 2.0, "compiled": 4.0, "theirs": 6.0}, {}, {}

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(
        bench, "compiled_engine", lambda *args, **how: seen.append(how) or Engine(*args, **how)
    )
    models = bench.llama(small_model(block_size=64).float().config)
    texts, how = bench.prompts_of(torch.arange(200) % 31, 2, 5), dict(dtype=torch.float32)
    (row,) = bench.other_rows(models, texts, 4, 1, compile=True, **how)
    assert seen == [how]
    assert (row["ours_tokens_per_second"], row["compiled_tokens_per_second"]) == (4, 2)
    assert (row["ratio"], row["compiled_ratio"]) == (3, 0.5)
    monkeypatch.undo()
    assert bench.compiled_engine(small_model(**NEOX).float(), 2) is None
    assert (
        "compiled passes are left out: --compile supports only the backbone llama, not gpt_neox"
        in capsys.readouterr().err
    )


def test_another_method(tmp_path):
    """Catches a sweep of a router that is not there."""
    save_for_bytes(small_model(method="ponderlm2", vocab_size=257), tmp_path)
    with pytest.raises(UserError, match="ponderlm2"):
        bench.decoding(bench.Decoding(run=str(tmp_path), device="cpu"))
