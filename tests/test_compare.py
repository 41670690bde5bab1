import json
import math
from dataclasses import asdict, replace

import pytest

import compare
import hops
from compare import at_other_taus, depth, depth_rows, losses, on_frontier, pareto, pareto_rows
from cost import cost
from measure import answers, open_subject
from methods import SETTINGS
from settings import PRESETS
from tables import check_comparable, group_runs, mean_std, read_csv, read_runs
from train import train

SCORES = ("hard", "fixed", "trained", "permuted")


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
        broken = isinstance(loss, str)
        results = {
            key: {"loss": loss if broken else loss + i / 8, "steps": steps}
            for i, key in enumerate(SCORES)
        }
        (run / "results.json").write_text(json.dumps(results | {"iters": 2}))
        log = [{"step": s, "ce": float(s)} for s in range(5, 101, 5)] + [{"step": 100, "val": 1}]
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


def test_scored_alike(make_run):
    """Catches losses on other windows in one table."""
    runs = read_runs([make_run("a", 1.0, 2.0), make_run("b", 1.0, 2.0, block_size=32)])
    with pytest.raises(ValueError, match="scored on different windows"):
        check_comparable(runs)
    other = replace(runs[0], config=replace(runs[0].config, eval_windows=5))
    with pytest.raises(ValueError, match="scored on different numbers of windows"):
        check_comparable([runs[0], other])


def test_damaged_rows(make_run, tmp_path):
    """Catches saved numbers that end in a stack trace when they are drawn again."""
    pareto((make_run("a", 1.0, 2.0),), out=tmp_path)
    saved = (tmp_path / "pareto.csv").read_text()
    for damage in (saved.replace("PonderLM-3", "Ponder"), saved.replace(",1\n", ",0\n")):
        (tmp_path / "pareto.csv").write_text(damage)
        with pytest.raises(ValueError, match="is damaged"):
            pareto(out=tmp_path, redraw=True)


def test_losses(make_run, tmp_path, capsys):
    """Catches a loss in the column of another, a difference with the wrong sign, and seeds or
    methods that are mixed."""
    runs = [make_run("a", 1.0, 2.0), make_run("b", 2.0, 3.0, seed=1)]
    runs += [make_run("c", 0.5, 3.0, method="ponderlm2", iters=(2, 2))]
    losses(tuple(runs), out=tmp_path)
    ours, other = read_csv(tmp_path / "losses.csv")
    assert (ours["method"], ours["K"], ours["seeds"], other["seeds"]) == ("PonderLM-3", 3, 2, 1)
    assert (ours["loss"], ours["hard"], ours["steps"]) == (1.625, 1.5, 2.5)
    assert (ours["gap"], ours["permuted"], ours["permuted_std"]) == (-0.125, 0.375, 0)
    assert ours["hard_std"] == pytest.approx(math.sqrt(0.5)) and other["hard_std"] is None
    assert (other["method"], other["hard"], other["R"]) == ("PonderLM-2", 0.5, 2)
    assert (ours["training_forwards"], other["training_forwards"]) == (14, 18)
    printed = capsys.readouterr().out
    assert "| PonderLM-2 | 3 | 2 | 1 | 0.6250 | 0.5000 | 3.00 | -0.1250 | 0.375 | 18.0 |" in printed
    losses(out=tmp_path, redraw=True)
    assert capsys.readouterr().out == printed


def test_at_other_taus(config):
    """Catches an evaluation at the old tau, on other windows, or one that is taken for a seed."""
    path, results = train(replace(config, steps=2, tau=0.97))  # w_2 is 0.95 at the start
    (run,) = read_runs([path])
    other = replace(run, config=replace(run.config, tau=0.5))  # as if it had been another
    (same,) = at_other_taus([other], (0.97, 0.5, 0.97), "cpu")
    (later,) = at_other_taus([run], (0.97, 1e-4), "cpu")
    assert same.results["hard"] == results["hard"]
    assert results["hard"]["steps"] < 1.5 < later.results["hard"]["steps"]
    assert results["hard"]["loss"] != later.results["hard"]["loss"]
    rows = pareto_rows([run, later])
    assert {row["method"] for row in rows} == {"PonderLM-3", "PonderLM-3, tau 0.97"}
    settings = json.loads((path / "train.json").read_text())
    settings["corpus"]["val_tokens"] += 1
    (path / "train.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="another corpus"):
        at_other_taus([run], (0.5,), "cpu")


def test_hops(config, tmp_path, monkeypatch, capsys):
    """Catches accuracy and steps of other questions, K or seeds, and a text that is another one."""
    monkeypatch.chdir(tmp_path)
    few = hops.documents(lines=200)
    monkeypatch.setattr(hops, "documents", lambda: few)
    model = replace(config.model, block_size=64, router_offset=(0.0, 0.0, 0.0))
    config = replace(config, data="hops", steps=2, batch_size=2, model=model)
    runs = [train(replace(config, seed=seed, name=f"seed-{seed}"))[0] for seed in (0, 1)]
    plain = replace(model, method="vanilla", ponder_steps=0, router_offset=None)
    runs += [train(replace(config, name="plain", model=plain))[0]]
    compare.hops(tuple(map(str, runs)), out=tmp_path)
    rows = read_csv(tmp_path / "hops.csv")
    assert [(r["K"], r["hops"], r["seeds"]) for r in rows] == [
        (K, n, 2 if K else 1) for K in (0, 2) for n in range(7)
    ]
    assert {r["method"] for r in rows} == {"vanilla", "PonderLM-3"}
    found = [answers(open_subject(run, labels=("ponderlm3",))) for run in runs[:2]]
    for row in rows[7:]:
        for part, key in ((1, "accuracy"), (2, "steps")):
            means = [f[part][f[0] == row["hops"]].double() for f in found]
            if len(means[0]):
                assert row[key] == pytest.approx(sum(m.mean().item() for m in means) / 2)
            else:
                assert row[key] is None
    assert all(row["steps"] == 0 for row in rows[:7] if row["steps"] is not None)
    assert None in [row["steps"] for row in rows] and "| - |" in (tmp_path / "hops.md").read_text()
    printed = capsys.readouterr().out
    compare.hops(out=tmp_path, redraw=True)
    assert capsys.readouterr().out in printed and (tmp_path / "hops.png").exists()
    compare.hops(tuple(map(str, runs[:1])), tau=1.0, out=tmp_path / "tau")
    assert not any(row["steps"] for row in read_csv(tmp_path / "tau/hops.csv"))
    text = tmp_path / "other.txt"
    text.write_text("now 1 a X the end " * 1000)
    other = train(replace(config, data=str(text), name="other"))[0]
    with pytest.raises(ValueError, match="no text of the task"):
        compare.hops((str(other),), out=tmp_path)


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
    runs += [make_run("c", 1, 2, ponder_steps=4), make_run("d", 1, 0, method="vanilla")]
    runs += [make_run("e", 1, 2, method="ponderlm1", accumulate=False)]
    assert list(group_runs(read_runs(runs))) == [
        ("PonderLM-3", 3),
        ("PonderLM-3, penalty_weight 0", 3),
        ("PonderLM-3", 4),
        ("vanilla", 0),
        ("PonderLM-1, accumulate False", 3),  # named although it is alone: not the paper's
    ]


@pytest.mark.parametrize(
    "name,values", [("embed_scale", (22.63, 22.627417)), ("batch_size", (8, 4))]
)
def test_settings_that_look_alike(name, values, make_run):
    """Catches settings that are one curve because they print alike, or are not looked at."""
    runs = [make_run(str(v), 1, 2, seed=i, **{name: v}) for i, v in enumerate(values)]
    assert len(group_runs(read_runs(runs))) == 2


def test_two_spellings_of_one_method(make_run):
    """Catches a method that is two because its settings were given by another flag."""
    runs = [make_run("a", 1, 3, router="always", iters=(2, 2))]
    runs += [make_run("b", 1, 3, seed=1, method="ponderlm2", iters=(2, 2))]
    runs += [make_run("c", 1, 0, ponder_steps=0), make_run("d", 1, 0, seed=1, method="vanilla")]
    groups = group_runs(read_runs(runs))
    assert {key: len(group) for key, group in groups.items()} == {
        ("PonderLM-2", 3): 2,
        ("vanilla", 0): 2,
    }


def test_the_same_run_twice(make_run):
    """Catches a copy of a run that counts as another seed."""
    with pytest.raises(ValueError, match="are the same training"):
        group_runs(read_runs([make_run("a", 1, 2), make_run("b", 1, 2)]))


def test_other_corpora_are_refused(make_run):
    """Catches losses on different texts in one mean or figure."""
    runs = read_runs([make_run("a", 1, 2), make_run("b", 1, 2, seed=1)])
    runs[1].corpus["sha256"] = "another"
    with pytest.raises(ValueError, match="different corpora"):
        pareto_rows(runs)


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
    assert rows[0]["training_loss"] == 97.5  # of steps 91 to 100, logged at 95 and 100
    assert rows[0]["training_forwards"] == 3 + 2 * 3


@pytest.mark.parametrize("figure", [pareto, depth])
def test_redrawing(figure, make_run, tmp_path):
    """Catches numbers that do not survive their file, and a figure that needs the runs."""
    runs = [make_run("a", 1.1, 2), make_run("b", 1.2, 1.9, ponder_steps=2)]
    runs += [make_run("c", 1.3, 2.2, seed=1), make_run("v", 1.7, 0, method="vanilla")]
    out, name = tmp_path / "out", figure.__name__
    with pytest.raises(FileNotFoundError, match="draw it once without"):
        figure(out=out, redraw=True)
    figure(runs=tuple(runs), out=out)
    files = [out / f"{name}{suffix}" for suffix in (".csv", ".md", ".png")]
    before = [file.read_bytes() for file in files]
    files[1].unlink(), files[2].unlink()
    figure(out=out, redraw=True)
    with pytest.raises(ValueError, match="give one"):
        figure(runs=tuple(runs), out=out, redraw=True)
    assert [file.read_bytes() for file in files] == before
    rows = (pareto_rows if figure is pareto else depth_rows)(read_runs(runs))
    assert read_csv(files[0]) == rows


@pytest.mark.parametrize("figure", [pareto, depth])
@pytest.mark.parametrize("damage", ["header only", "columns", "a word", "cut", "binary"])
def test_damaged_numbers(figure, damage, make_run, tmp_path):
    """Catches a stack trace, or a table that was replaced before the damage was found."""
    runs = (make_run("a", 1.1, 2), make_run("b", 1.2, 1.9, ponder_steps=2))
    figure(runs=runs, out=tmp_path)
    file, table = tmp_path / f"{figure.__name__}.csv", tmp_path / f"{figure.__name__}.md"
    before, lines = table.read_text(), file.read_text().splitlines()
    damaged = {
        "header only": lines[0],
        "columns": "\n".join(line.rsplit(",", 9)[0] for line in lines),
        "a word": "\n".join([lines[0], lines[1].replace("1.2", "word")]),
        "cut": "\n".join([*lines[:-1], lines[-1][:20]]),
    }
    file.write_bytes(damaged[damage].encode() if damage != "binary" else b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match="is damaged"):
        figure(out=tmp_path, redraw=True)
    assert table.read_text() == before


@pytest.mark.parametrize(
    "loss,steps", [("abc", 2), (math.nan, 2), (1.0, 30), (1.0, -1), (1.0, None)]
)
def test_damaged_results(loss, steps, make_run):
    """Catches a damaged run that becomes a number or a stack trace."""
    with pytest.raises(ValueError, match="results"):
        read_runs([make_run("a", loss, steps)])


def test_run_given_from_within(make_run, monkeypatch):
    """Catches another run that is read when the folder is given as '.'"""
    monkeypatch.chdir(make_run("a", 1.25, 2))
    assert read_runs(["."])[0].results["hard"]["loss"] == 1.25
    assert len(read_runs(["../a/"])) == 1
