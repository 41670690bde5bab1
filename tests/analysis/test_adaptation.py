"""Steps and difficulty, token by token, and whether two trainings agree."""

import json
import shutil

import numpy as np
import pytest
import torch

import analyze
from analysis.adaptation import adaptation_rows, correlation
from analysis.comparing import read_runs
from interop import load
from runtime import UserError
from training.config import validation_windows
from training.validation import evaluate

CPU = torch.device("cpu")


def test_correlation():
    """Catches ties that are ranked by their place: equal values share the mean of their ranks."""
    a, b = [1, 5, 5, 9], [10, 20, 30, 25]
    ranks = np.array([1, 2.5, 2.5, 4]), np.array([1, 2, 4, 3])
    assert correlation(a, b) == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert correlation(a, [-x for x in a]) == pytest.approx(-1)
    assert np.isnan(correlation(a, [2, 2, 2, 2]))


@pytest.fixture
def runs(trained, tmp_path):
    """Two seeds of PonderLM-3, and vanilla for each."""
    paths = [shutil.copytree(trained / n, tmp_path / n) for n in ("lookup-0", "lookup-1")]
    for seed in (0, 1):
        path = shutil.copytree(trained / "lookup-plain", tmp_path / f"plain-{seed}")
        content = json.loads((path / "train.json").read_text())
        content["config"]["seed"] = seed
        (path / "train.json").write_text(json.dumps(content))
        paths.append(path)
    return paths


@torch.no_grad()
def columns(path, tau):
    """Loss, K-hat and expected steps of each token, by the forward pass."""
    model, (_, _, val) = load(path), validation_windows(path)
    rows = np.stack([val.window(i) for i in range(min(8, -(-val.count // 2)))])
    rows = torch.from_numpy(rows)
    out = model(rows[:, :-1], rows[:, 1:], tau=tau)
    w = out.log_w.exp().sum(-1).flatten() - 1
    return out.ce.flatten().numpy(), out.steps.flatten().numpy(), w.numpy()


def test_rows(runs):
    """Catches another seed's difficulty, a correlation of something else, tau that is not used."""
    tau = 0.33  # of w_2, which is a third where nothing has been learned
    row = adaptation_rows(read_runs(runs), tau, CPU).iloc[0]
    mine, plain = [columns(p, tau) for p in runs[:2]], [columns(p, 1) for p in runs[2:]]
    assert row.seeds == 2 and row.tau == tau
    assert row.steps == pytest.approx(np.mean([m[1].mean() for m in mine]))
    assert row.loss == pytest.approx(np.mean([m[0].mean() for m in mine]), abs=1e-5)
    for i, what in ((1, "steps"), (2, "expected")):
        pairs = zip(mine, plain, strict=True)
        expected = np.mean([correlation(m[i], p[0]) for m, p in pairs])
        assert row[f"{what}_difficulty"] == pytest.approx(expected, abs=1e-3)
        assert row[f"{what}_agreement"] == pytest.approx(
            correlation(mine[0][i], mine[1][i]), abs=1e-3
        )
    assert row.steps == pytest.approx((row.easy + row.medium + row.hard) / 3, abs=0.01)
    _, _, val = validation_windows(runs[0])
    count = min(8, -(-val.count // 2))
    costs = [
        evaluate(load(path), val, count, CPU, tau=tau, permute=True)["loss"] - m[0].mean()
        for path, m in zip(runs, mine, strict=False)
    ]
    assert row.permuted == pytest.approx(np.mean(costs), abs=1e-5)


def test_refused(runs):
    """Catches a run without its difficulty, or without a router."""
    for chosen, message in (
        (runs[:3], "lookup-1: no vanilla run of seed 1"),
        (runs[2:], "none of the runs has a learned router"),
    ):
        with pytest.raises(UserError, match=message):
            adaptation_rows(read_runs(chosen), 0.1, CPU)
    results = json.loads((runs[0] / "results.json").read_text())
    (runs[0] / "results.json").write_text(json.dumps(results | {"chosen": None}))
    with pytest.raises(UserError, match=r"lookup-0 chose no tau .* give --tau"):
        adaptation_rows(read_runs(runs), None, CPU)


def test_command(runs, tmp_path):
    """Catches a table that is not redrawn the same."""
    out = str(tmp_path / "out")
    analyze.main(["adaptation", "--runs", *map(str, runs), "--out", out])
    names = [tmp_path / "out" / f"adaptation.{end}" for end in ("csv", "md")]
    before = [file.read_bytes() for file in names]
    analyze.main(["adaptation", "--redraw", "--out", out])
    assert before == [file.read_bytes() for file in names]
