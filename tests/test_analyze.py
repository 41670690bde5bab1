import json
import math
from dataclasses import asdict, replace

import pytest

from analyze import (
    at_other_taus,
    check_comparable,
    depth,
    depth_rows,
    group_runs,
    mean_std,
    on_frontier,
    pareto,
    pareto_rows,
    read_csv,
    read_runs,
)
from cost import cost
from methods import SETTINGS
from train import PRESETS, train


@pytest.fixture
def make_run(tmp_path):
    """Write a finished run with this loss and these steps: only what analyze.py reads of one."""

    def make(name, loss, steps, seed=0, method="ponderlm3", batch_size=8, **shape):
        model = replace(PRESETS["tiny"].model, method=method, **{**SETTINGS[method], **shape})
        config = replace(PRESETS["tiny"], seed=seed, model=model, steps=100, batch_size=batch_size)
        run = tmp_path / name
        run.mkdir()
        corpus = {"name": "text", "train_tokens": 1, "val_tokens": 1, "sha256": ""}
        (run / "train.json").write_text(json.dumps({"config": asdict(config), "corpus": corpus}))
        (run / "config.json").write_text(json.dumps({"format": "ponderlm-3", **asdict(model)}))
        (run / "model.safetensors").touch()
        (run / "results.json").write_text(json.dumps({"hard": {"loss": loss, "steps": steps}}))
        log = [{"step": s, "ce": float(s)} for s in range(10, 101, 10)] + [{"step": 100, "val": 1}]
        (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
        return str(run)

    return make


def test_pareto_rows(make_run):
    """Catches seeds that are mixed with other K, the perplexity of a mean loss instead of the mean
    perplexity, a spread over the whole population, and another cost than cost.py's."""
    runs = [make_run("a", 1.0, 2.0), make_run("b", 2.0, 3.0, seed=1)]
    runs += [make_run("c", 0.5, 4.0, method="looped", ponder_steps=4)]
    adaptive, looped = pareto_rows(read_runs(runs))
    assert (adaptive["method"], adaptive["K"], adaptive["seeds"]) == ("PonderLM-3", 3, 2)
    assert adaptive["steps"] == 2.5 and adaptive["steps_std"] == pytest.approx(math.sqrt(0.5))
    assert adaptive["perplexity"] == pytest.approx((math.e + math.e**2) / 2)
    assert adaptive["perplexity_std"] == pytest.approx((math.e**2 - math.e) / math.sqrt(2))
    assert (looped["seeds"], looped["loss"], looped["loss_std"]) == (1, 0.5, None)
    shape = read_runs(runs)[0].shape
    assert adaptive["paper_flops"] == cost(shape, 2.5).paper_flops
    assert (adaptive["frontier"], looped["frontier"]) == (1, 1)


def test_at_other_taus(config):
    """Catches an evaluation at the old tau, on other windows, or one that is taken for a seed."""
    path, results = train(replace(config, steps=2))
    (run,) = read_runs([path])
    same, earlier = at_other_taus([run], (config.tau, 0.97), "cpu")  # w_2 is 0.95 at the start
    assert same.results["hard"] == results["hard"]
    assert earlier.results["hard"]["steps"] < 1.5 < results["hard"]["steps"]
    rows = pareto_rows([run, earlier])
    assert [row["method"] for row in rows] == ["PonderLM-3", "PonderLM-3, tau 0.97"]
    run.corpus["val_tokens"] += 1
    with pytest.raises(ValueError, match="another corpus"):
        at_other_taus([run], (0.5,), "cpu")


def test_on_frontier():
    """Catches a frontier that keeps a beaten point, or drops one of two equal ones."""
    points = [(0, 9), (2, 5), (2, 5), (2, 6), (3, 5), (3, 4), (4, 4.5)]
    assert on_frontier(points) == [True, True, True, False, False, True, False]


def test_mean_std():
    """Catches a spread of one value that is called 0."""
    assert mean_std([3.0]) == (3.0, None)
    assert mean_std([1.0, 2.0, 6.0]) == (3.0, pytest.approx(math.sqrt(7)))


def test_other_settings_are_other_curves(make_run):
    """Catches a mean over runs that are not the same training, in all K of the method."""
    runs = [make_run("a", 1, 2), make_run("b", 1, 2, penalty_weight=0.0)]
    runs += [make_run("c", 1, 2, ponder_steps=4), make_run("d", 1, 2, method="vanilla")]
    runs += [make_run("e", 1, 2, method="ponderlm1", accumulate=False)]
    assert list(group_runs(read_runs(runs))) == [
        ("PonderLM-3", 3),
        ("PonderLM-3, penalty_weight 0", 3),
        ("PonderLM-3", 4),
        ("vanilla", 0),
        ("PonderLM-1", 3),
    ]


def test_the_same_run_twice(make_run):
    """Catches a copy of a run that counts as another seed."""
    with pytest.raises(ValueError, match="are the same run twice"):
        group_runs(read_runs([make_run("a", 1, 2), make_run("b", 1, 2)]))


def test_unlike_trainings_are_named(make_run, capsys):
    """Catches methods that are compared after trainings of other lengths without a word."""
    runs = [make_run("a", 1, 2), make_run("b", 1, 3, method="looped", batch_size=16)]
    check_comparable(read_runs(runs))
    assert "the runs differ in batch_size, too: 16, 8" in capsys.readouterr().out
    check_comparable(read_runs(runs[:1]))
    assert not capsys.readouterr().out


def test_unfinished_runs(make_run, tmp_path, capsys):
    """Catches an unfinished or missing run that stops the others, or goes unmentioned."""
    run = make_run("a", 1, 2)
    (tmp_path / "empty").mkdir()
    assert len(read_runs([run, tmp_path / "empty", tmp_path / "missing"])) == 1
    out = capsys.readouterr().out
    assert "empty" in out and "missing" in out
    with pytest.raises(ValueError, match="no finished run"):
        read_runs([])
    with pytest.raises(ValueError, match="none of the runs is a PonderLM-3"):
        depth((make_run("l", 1, 3, method="looped"),), tmp_path)


def test_depth_rows(make_run):
    """Catches a training loss over all steps, or over lines that have none."""
    runs = [make_run("a", 1.5, 2.0, ponder_steps=2), make_run("b", 1.0, 2.5)]
    rows = depth_rows(read_runs(runs))
    assert [(r["K"], r["loss"], r["steps"]) for r in rows] == [(2, 1.5, 2.0), (3, 1.0, 2.5)]
    assert rows[0]["training_loss"] == 100.0  # of steps 91 to 100, logged at 100
    assert rows[0]["training_forwards"] == 3 + 2 * 3


@pytest.mark.parametrize("figure", [pareto, depth])
def test_redrawing(figure, make_run, tmp_path):
    """Catches numbers that do not survive their file, and a figure that needs the runs."""
    runs = [make_run("a", 1.1, 2), make_run("b", 1.2, 1.9, ponder_steps=2)]
    runs += [make_run("c", 1.3, 2.2, seed=1), make_run("v", 1.7, 0, method="vanilla")]
    out, name = tmp_path / "out", figure.__name__
    with pytest.raises(FileNotFoundError, match="draw it once from --runs"):
        figure(out=out, redraw=True)
    figure(runs=tuple(runs), out=out)
    files = [out / f"{name}{suffix}" for suffix in (".csv", ".md", ".png")]
    before = [file.read_bytes() for file in files]
    files[1].unlink(), files[2].unlink()
    figure(out=out, redraw=True)
    assert [file.read_bytes() for file in files] == before
    rows = (pareto_rows if figure is pareto else depth_rows)(read_runs(runs))
    assert read_csv(files[0]) == rows
