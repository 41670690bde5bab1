"""Attention and a training step: short runs of the commands, and what they compute."""

import json
import math
import re
from dataclasses import replace
from multiprocessing.dummy import Pool
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from bench import kernels, training_step
from bench.timing import medians
from train import objective
from training.settings import PRESETS


def test_medians(monkeypatch):
    """Catches a warm-up that counts, rounds that do not alternate, and own seconds that do not."""
    order, now = [], iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    own = iter([9.0, 0.1, 0.3, 0.2])
    runs = {"a": lambda: order.append("a"), "b": lambda: order.append("b") or next(own)}
    assert medians(runs, 3) == {"a": 1, "b": 0.2}
    assert order == ["a", "b"] * 4


def test_attention(tmp_path, capsys, monkeypatch):
    """Catches a command that crashes, ratios to something else than plain attention, and results
    without their picture."""
    threads = SimpleNamespace(Pool=lambda n, **kwargs: Pool(n))  # in place of new processes
    monkeypatch.setattr("bench.timing.get_context", lambda kind: threads)
    kernels.attention((64,), (8,), heads=2, repeats=1, device="cpu", out=tmp_path)
    rows = json.loads((tmp_path / "attention-cpu.json").read_text())["rows"]
    assert [row["backend"] for row in rows] == ["plain", "sdpa", "eager"]
    shown = capsys.readouterr().out
    for row in rows:
        ratio = row["milliseconds"] / rows[0]["milliseconds"]
        assert row["time_ratio"] == pytest.approx(ratio) and row["MiB"] >= 0
        assert re.search(rf"{row['backend']} +{row['milliseconds']:.1f} ", shown)
    assert (tmp_path / "attention-cpu.png").stat().st_size > 1000


def test_refusals():
    """Catches a measurement that breaks off after minutes, or measures nothing."""
    with pytest.raises(ValidationError, match=r"widths\.0\n.* greater than or equal to 1"):
        kernels.attention(widths=(0,))
    for options in (dict(windows=0), dict(iters=-1), dict(repeats=0)):
        with pytest.raises(ValidationError, match="greater than or equal to"):
            training_step.train("tiny", device="cpu", **options)


def test_flops():
    """Catches operations that are counted twice or left out: one layer, one head, by hand."""
    shape = replace(
        PRESETS["tiny"].model, vocab_size=5, hidden_size=4, intermediate_size=6, head_dim=2,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, block_size=3,
        ponder_steps=1,
    )  # fmt: skip
    weights = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6  # q, k and v, o, SwiGLU
    passes = [3, 6, 6]  # slots of the ladder, of R = 1 refinement, of the last pass
    attention = sum(2 * n * n * 2 * 2 for n in passes)  # causal: half of 2 products of 2 N^2 d H
    head = 4 * 5 * 3
    expected = 3 * (2 * weights * sum(passes) + attention + 2 * head) + 2 * head
    assert training_step.step_flops(shape, 7, 1) == 7 * expected


@pytest.mark.slow
def test_train(tmp_path):
    """Catches a command that crashes, and ratios to something else than the plain step."""
    training_step.train("tiny", 1, 1, repeats=1, device="cpu", out=tmp_path)
    results = json.loads((tmp_path / "train-tiny-cpu.json").read_text())
    for row in results["rows"]:
        assert row["time_ratio"] == pytest.approx(row["seconds"] / results["rows"][0]["seconds"])
        assert row["MiB"] > 0 and not math.isnan(row["seconds"])


@pytest.mark.parametrize("plain,recompute", [(True, False), (False, False), (False, True)])
def test_train_case(plain, recompute, monkeypatch):
    """Catches a case of the training step that does not run, or runs without its flag."""
    shape, made = replace(PRESETS["tiny"].model, block_size=8), []
    watch = lambda *a: made.append(a) or objective(*a)  # noqa: E731
    monkeypatch.setattr(training_step, "objective", watch)
    cpu = torch.device("cpu")
    training_step.train_case(shape, 1, 1, plain, recompute, False, cpu, torch.float32)()
    assert bool(made) != plain and all(a[0].recompute == recompute for a in made)
