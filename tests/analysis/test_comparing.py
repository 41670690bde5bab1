"""Several runs side by side: mostly of runs that are nothing but their files."""

import json
import math
import shutil
from dataclasses import replace

import pandas as pd
import pytest
from conftest import flags, records

from analysis.comparing import (
    at_other_taus,
    check_comparable,
    depth_rows,
    draw_curves,
    group_runs,
    method_of,
    on_frontier,
    pareto_rows,
    read_runs,
)
from analysis.tables import MARKERS, new_figure, read
from analyze import Choice, Depth, Losses, Pareto
from baselines import all_methods
from baselines.cost import cost
from interop import load
from runtime import UserError
from training.config import validation_windows
from training.validation import evaluate


def test_pareto_rows(make_run):
    """Catches seeds that are mixed with other K, the perplexity of a mean loss instead of the mean
    perplexity, a spread over the whole population, and another cost than cost.py's."""
    runs = [make_run("a", 1.0, 2.0), make_run("b", 2.0, 3.0, seed=1)]
    runs += [make_run("c", 0.5, 4.0, method="looped", ponder_steps=4)]
    adaptive, looped = records(pareto_rows(read_runs(runs)))
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
    with pytest.raises(UserError, match="scored on different windows"):
        check_comparable(runs)
    other = replace(runs[0], config=replace(runs[0].config, eval_windows=5))
    with pytest.raises(UserError, match="scored on different numbers of windows"):
        check_comparable([runs[0], other])


def test_damaged_rows(make_run, tmp_path):
    """Catches saved numbers that end in a stack trace when they are drawn again."""
    Pareto((make_run("a", 1.0, 2.0),), out=tmp_path).draw()
    saved = (tmp_path / "pareto.csv").read_text()
    for damage in (saved.replace("PonderLM-3", "Ponder"), saved.removesuffix(",1\n") + ",0\n"):
        (tmp_path / "pareto.csv").write_text(damage)
        with pytest.raises(UserError, match="is damaged"):
            Pareto(out=tmp_path, redraw=True).draw()


def test_losses(make_run, tmp_path, capsys):
    """Catches a loss in the column of another, a difference with the wrong sign, and seeds or
    methods that are mixed."""
    runs = [make_run("a", 1.0, 2.0), make_run("b", 2.0, 3.0, seed=1)]
    runs += [make_run("c", 0.5, 3.0, method="ponderlm2", refinements=(2, 2))]
    Losses(flags(runs), out=tmp_path).draw()
    ours, other = records(read(tmp_path / "losses.csv"))
    assert (ours["method"], ours["K"], ours["seeds"], other["seeds"]) == ("PonderLM-3", 3, 2, 1)
    assert (ours["loss"], ours["hard"], ours["steps"]) == (1.625, 1.5, 2.5)
    assert (ours["gap"], ours["permuted"], ours["permuted_std"]) == (-0.125, 0.375, 0)
    assert ours["hard_std"] == pytest.approx(math.sqrt(0.5)) and other["hard_std"] is None
    assert (other["method"], other["hard"], other["R"]) == ("PonderLM-2", 0.5, 2)
    assert (ours["training_forwards"], other["training_forwards"]) == (14, 18)
    printed = capsys.readouterr().out
    assert "| PonderLM-2 | 3 | 2 | 1 | 0.6250 | 0.5000 | 3.00 | -0.1250 | 0.375 | 18.0 |" in printed
    Losses(out=tmp_path, redraw=True).draw()
    assert capsys.readouterr().out == printed


def test_choice(trained, tmp_path, monkeypatch):
    """Catches a choice by the windows that are reported, by another number of them, or by none."""
    names, out = [str(trained / name) for name in ("ponder", "plain")], tmp_path / "out"
    Choice(flags(names), out=out, windows=5).draw()
    rows = {row["method"]: row for row in records(read(out / "choice.csv"))}
    for name, title in (("ponder", "PonderLM-3"), ("plain", "vanilla")):
        _, _, val = validation_windows(trained / name)
        expected = evaluate(load(trained / name), val, 5, "cpu", first=8)["loss"]
        assert rows[title]["loss"] == pytest.approx(expected, abs=1e-6)
        assert (rows[title]["windows"], rows[title]["seeds"]) == (5, 1)
    monkeypatch.setattr("analysis.comparing.reported", lambda config, windows: windows.count)
    with pytest.raises(UserError, match="windows are reported; give more text"):
        Choice(flags(names), out=out).draw()


def test_at_other_taus(trained, tmp_path):
    """Catches an evaluation at the old tau, on other windows, or one that is taken for a seed."""
    (run,) = read_runs([trained / "tau"])
    other = replace(run, config=replace(run.config, tau=0.5))  # as if it had been another
    (same,) = at_other_taus([other], (0.97, 0.5, 0.97), "cpu")
    (later,) = at_other_taus([run], (0.97, 1e-4), "cpu")
    assert same.results["hard"] == run.results["hard"]
    assert run.results["hard"]["steps"] < 1.5 < later.results["hard"]["steps"]
    assert run.results["hard"]["loss"] != later.results["hard"]["loss"]
    rows = pareto_rows([run, later])
    assert set(rows.method) == {"PonderLM-3", "PonderLM-3, tau 0.97"}
    copy = shutil.copytree(trained / "tau", tmp_path / "copy")
    settings = json.loads((copy / "train.json").read_text())
    settings["corpus"]["val_tokens"] += 1
    (copy / "train.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="another corpus"):
        at_other_taus([replace(run, path=copy)], (0.5,), "cpu")


def test_on_frontier():
    """Catches a frontier that keeps a beaten point, or drops one of two equal ones."""
    points = [(0, 9), (2, 5), (2, 5), (2, 6), (3, 5), (3, 4), (4, 4.5)]
    assert on_frontier(points) == [True, True, True, False, False, True, False]


def test_other_settings_are_other_curves(make_run):
    """Catches a mean over runs that are not the same training, in all K of the method."""
    runs = [make_run("a", 1, 2), make_run("b", 1, 2, penalty_weight=0.0)]
    runs += [make_run("c", 1, 2, ponder_steps=4), make_run("d", 1, 0, method="vanilla")]
    runs += [make_run("e", 1, 2, method="ponderlm1", accumulate=False)]
    runs += [make_run("f", 1, 2, ponder_steps=2, router_offset=(0.0, 6.0, 12.0))]
    assert list(group_runs(read_runs(runs))) == [
        ("PonderLM-3, router_offset 0 6 12", 2),
        ("PonderLM-3", 3),
        ("PonderLM-3, penalty_weight 0", 3),
        ("PonderLM-3", 4),
        ("PonderLM-1, accumulate False", 3),  # named although it is alone: not the paper's
        ("vanilla", 0),
    ]


@pytest.mark.parametrize(
    "name,values", [("embed_scale", (22.63, 22.627417)), ("batch_size", (8, 4))]
)
def test_settings_that_look_alike(name, values, make_run):
    """Catches settings that are one curve because they print alike, or are not looked at."""
    runs = [make_run(str(v), 1, 2, seed=i, **{name: v}) for i, v in enumerate(values)]
    assert len(group_runs(read_runs(runs))) == 2


def test_where_a_run_began_is_another_curve(make_run):
    """Catches seeds that fall apart because each began from its own first stage; stages that are
    mixed up although they were other trainings; and a beginning that is gone."""
    for seed in (0, 1):
        make_run(f"short-{seed}", 1, 1, seed=seed)
        make_run(f"long-{seed}", 1, 1, seed=seed, batch_size=4)
    runs = read_runs([make_run("new", 1, 2)] * 5)
    folder = runs[0].path.parent
    begun = ("short-0", "short-1", "long-0", "long-1", "gone")
    for i, name in enumerate(begun):
        config = replace(runs[i].config, init_from=str(folder / name), seed=i)
        runs[i] = replace(runs[i], config=config)
    groups = group_runs(runs).values()
    assert [[run.config.seed for run in group] for group in groups] == [[0, 1], [2, 3], [4]]


def test_the_same_run_twice(make_run):
    """Catches a copy of a run that counts as another seed."""
    with pytest.raises(UserError, match="are the same training"):
        group_runs(read_runs([make_run("a", 1, 2), make_run("b", 1, 2)]))


def test_other_corpora_are_refused(make_run):
    """Catches losses on different texts in one mean or figure."""
    runs = read_runs([make_run("a", 1, 2), make_run("b", 1, 2, seed=1)])
    runs[1].corpus["sha256"] = "another"
    with pytest.raises(UserError, match="different corpora"):
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
    with pytest.raises(UserError, match="no whole and finished run"):
        read_runs([])
    with pytest.raises(UserError, match="none of the runs is a PonderLM-3"):
        Depth((make_run("l", 1, 3, method="looped"),), tmp_path).draw()


def test_depth_rows(make_run):
    """Catches a training loss over all steps, or over lines that have none."""
    runs = [make_run("a", 1.5, 2.0, ponder_steps=2), make_run("b", 1.0, 2.5)]
    rows = records(depth_rows(read_runs(runs)))
    assert [(r["K"], r["loss"], r["steps"]) for r in rows] == [(2, 1.5, 2.0), (3, 1.0, 2.5)]
    assert rows[0]["training_loss"] == 97.5  # of steps 91 to 100, logged at 95 and 100
    assert rows[0]["training_forwards"] == 3 + 2 * 3


@pytest.mark.parametrize("figure", [Pareto, Depth])
def test_redrawing(figure, make_run, tmp_path):
    """Catches numbers that do not survive their file, and a figure that needs the runs."""
    runs = [make_run("a", 1.1, 2), make_run("b", 1.2, 1.9, ponder_steps=2)]
    runs += [make_run("c", 1.3, 2.2, seed=1), make_run("v", 1.7, 0, method="vanilla")]
    out, name = tmp_path / "out", figure.__name__.lower()
    with pytest.raises(UserError, match="draw it once without"):
        figure(out=out, redraw=True).draw()
    figure(flags(runs), out=out).draw()
    files = [out / f"{name}{suffix}" for suffix in (".csv", ".md", ".png")]
    before = [file.read_bytes() for file in files]
    files[1].unlink(), files[2].unlink()
    figure(out=out, redraw=True).draw()
    with pytest.raises(UserError, match="give one"):
        figure(flags(runs), out=out, redraw=True).draw()
    assert [file.read_bytes() for file in files] == before
    rows = (pareto_rows if figure is Pareto else depth_rows)(read_runs(runs))
    pd.testing.assert_frame_equal(read(files[0]), rows, check_exact=True)


@pytest.mark.parametrize("figure", [Pareto, Depth])
@pytest.mark.parametrize("damage", ["header only", "columns", "a word", "cut", "binary", "method"])
def test_damaged_numbers(figure, damage, make_run, tmp_path):
    """Catches a stack trace, or a table that was replaced before the damage was found."""
    runs = (make_run("a", 1.1, 2), make_run("b", 1.2, 1.9, ponder_steps=2))
    name = figure.__name__.lower()
    figure(runs=runs, out=tmp_path).draw()
    file, table = tmp_path / f"{name}.csv", tmp_path / f"{name}.md"
    before, text = table.read_text(), file.read_text()
    lines = text.splitlines()
    damaged = {
        "header only": lines[0] + "\n",
        "columns": "".join(line.rsplit(",", 9)[0] + "\n" for line in lines),
        "a word": "\n".join([lines[0], lines[1].replace("1.2", "word")]) + "\n",
        "cut": "\n".join([*lines[:-1], lines[-1][:20]]),
        "method": text.replace("PonderLM-3", "Ponder"),
    }
    file.write_bytes(damaged[damage].encode() if damage != "binary" else b"\xff\xfe\xfa")
    with pytest.raises(UserError, match="'Ponder'" if damage == "method" else "is damaged"):
        figure(out=tmp_path, redraw=True).draw()
    assert table.read_text() == before


def curves(names):
    """The curves that draw_curves makes of rows with these names: (color, marker, line) of each."""
    rows = [{"method": name, "K": 3, "steps": i, "loss": 1.0} for i, name in enumerate(names)]
    _, (axes,) = new_figure("", "")
    draw_curves(axes, pd.DataFrame(rows), "steps", "loss")
    lines = [container[0] for container in axes.containers]
    return [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines]


def test_looks_of_the_methods():
    """Catches a method with the look of another one, and variants that cannot be told apart."""
    known = {
        "PonderLM-3": ("#D55E00", "o"),
        "PonderLM-2": ("#0072B2", "s"),
        "vanilla": ("#000000", "^"),
        "LoopedLM": ("#009E73", "D"),
        "Pause": ("#CC79A7", "v"),
        "PonderLM-1": ("#E69F00", "p"),
        "MoR, expert choice": ("#56B4E9", "P"),
        "MoR, token choice": ("#777777", "X"),
    }
    assert curves(known) == [(*look, "-") for look in known.values()]
    kinds = all_methods()
    assert len({(kind.color, kind.marker) for kind in kinds}) == len(kinds)
    variants = [f"PonderLM-3, tau {n}" for n in range(10)]
    looks = curves(variants)
    assert [marker for _, marker, _ in looks] == [*MARKERS, *MARKERS[:2]]
    assert [line for _, _, line in looks[:5]] == ["-", "--", ":", "-.", "-"]
    assert len(set(looks[:8])) == 8


def test_method_of():
    """Catches an ablation that is taken for a variant, and a row of no method that is left out."""
    assert method_of("PonderLM-3, tau 0.1").method == "ponderlm3"
    assert method_of("PonderLM-3, uniform s, tau 0.1").method == "ablation-router"
    with pytest.raises(UserError, match="'Someone'"):
        method_of("Someone")


@pytest.mark.parametrize(
    "loss,steps", [("abc", 2), (math.nan, 2), (1.0, 30), (1.0, -1), (1.0, None)]
)
def test_damaged_results(loss, steps, make_run, tmp_path, capsys):
    """Catches a damaged run that becomes a number or a stack trace, or ends it for all others."""
    with pytest.raises(UserError, match="no whole and finished run"):
        read_runs([make_run("a", loss, steps)])
    assert "left out, damaged: " in (printed := capsys.readouterr().out) and "results" in printed
    assert [run.path for run in read_runs([tmp_path / "a", make_run("b", 1.0, 2)])] == [
        tmp_path / "b"
    ]


def test_run_given_from_within(make_run, monkeypatch):
    """Catches another run that is read when the folder is given as '.'"""
    monkeypatch.chdir(make_run("a", 1.25, 2))
    assert read_runs(["."])[0].results["hard"]["loss"] == 1.25
    assert len(read_runs(["../a/"])) == 1
