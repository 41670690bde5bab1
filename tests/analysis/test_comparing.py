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
    draw_curves,
    group_runs,
    method_of,
    on_frontier,
    pareto_rows,
    read_runs,
    stopped_at,
)
from analysis.tables import MARKERS, new_figure, read
from analyze import Depth, Pareto
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


def test_at_other_taus(trained, tmp_path):
    """Catches an evaluation at the old tau, on other windows, or one that is taken for a seed."""
    (run,) = read_runs([trained / "tau"])
    _, _, val = validation_windows(run.path)
    for tau, hard in stopped_at(run, (0.5, 0.97, 0.5), "cpu"):
        expected = evaluate(load(run.path), val, 8, "cpu", tau=tau)
        assert hard["loss"] == pytest.approx(expected["loss"], abs=1e-9)
        assert hard["steps"] == expected["steps"]
    (later,) = at_other_taus([run], (0.97, 1e-4), "cpu")
    assert run.results["hard"]["steps"] < 1.5 < later.results["hard"]["steps"]
    assert set(pareto_rows([run, later]).method) == {"PonderLM-3", "PonderLM-3, tau 0.97"}
    copy = shutil.copytree(trained / "tau", tmp_path / "copy")
    content = json.loads((copy / "train.json").read_text())
    content["corpus"]["val_tokens"] += 1
    (copy / "train.json").write_text(json.dumps(content))
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
    runs += [make_run("g", 1, 2, method="looped", batch_size=4), make_run("h", 1, 2, seed=1)]
    runs += [make_run(f"i{x}", 1, 2, method="looped", embed_scale=x) for x in (22.63, 22.627417)]
    groups = group_runs(read_runs(runs))
    assert {key: len(group) for key, group in groups.items()} == {
        ("PonderLM-3, router_offset 0 6 12", 2): 1,
        ("PonderLM-3", 3): 2,
        ("PonderLM-3, penalty_weight 0", 3): 1,
        ("PonderLM-3", 4): 1,
        ("LoopedLM, batch_size 4", 3): 1,
        ("LoopedLM, embed_scale 22.63", 3): 1,
        ("LoopedLM, embed_scale 22.6274", 3): 1,
        ("PonderLM-1, accumulate False", 3): 1,  # named although it is alone: not the paper's
        ("vanilla", 0): 1,
    }


def test_where_a_run_began_is_another_curve(make_run):
    """Catches seeds that fall apart because each began from its own first stage; stages that are
    mixed up although they were other trainings; and a beginning that is gone."""
    for seed in (0, 1):
        make_run(f"short-{seed}", 1, 1, seed=seed)
        make_run(f"long-{seed}", 1, 1, seed=seed, batch_size=4)
    runs = read_runs([make_run("new", 1, 2)] * 5)
    folder = runs[0].path.parent
    for i, name in enumerate(("short-0", "short-1", "long-0", "long-1", "gone")):
        config = replace(runs[i].config, init_from=str(folder / name), seed=i)
        runs[i] = replace(runs[i], config=config)
    groups = group_runs(runs)
    assert [[run.config.seed for run in group] for group in groups.values()] == [
        [0, 1],
        [2, 3],
        [4],
    ]
    assert "init_from (PonderLM-3, batch_size 4" in [*groups][1][0]


def test_refused_comparisons(make_run):
    """Catches a copy of a run that counts as another seed; losses on other texts or windows in one
    table."""
    first, copy, short = read_runs(
        [make_run("a", 1, 2), make_run("b", 1, 2), make_run("c", 1, 2, block_size=32)]
    )
    with pytest.raises(UserError, match="are the same training"):
        group_runs([first, copy])
    fewer = replace(first, config=replace(first.config, eval_windows=5))
    other = replace(first, corpus=first.corpus | {"sha256": "another"})
    for run, what in ((short, "windows"), (fewer, "numbers of windows"), (other, "corpora")):
        with pytest.raises(UserError, match=f"scored on different {what}"):
            check_comparable([first, run])


def test_unlike_trainings_are_named(make_run, capsys):
    """Catches methods that are compared after trainings of other lengths without a word."""
    runs = [make_run("a", 1, 2), make_run("b", 1, 3, method="looped", batch_size=16)]
    check_comparable(read_runs(runs))
    assert "the runs differ in batch_size, too: 16, 8" in capsys.readouterr().out
    check_comparable(read_runs(runs[:1]))
    assert not capsys.readouterr().out


BROKEN = [("abc", 2), (math.nan, 2), (1.0, 30), (1.0, -1), (1.0, None)]  # loss, steps


def test_runs_that_are_left_out(make_run, tmp_path, capsys, monkeypatch):
    """Catches an unfinished, missing or damaged run that becomes a number, ends it for the others,
    or goes unmentioned; and another run that is read when the folder is given as '.'"""
    good = make_run("good", 1.25, 2)
    bad = [make_run(f"bad-{i}", *numbers) for i, numbers in enumerate(BROKEN)]
    (tmp_path / "empty").mkdir()
    bad += [tmp_path / "empty", tmp_path / "missing"]
    assert [str(run.path) for run in read_runs([bad[0], good, *bad[1:]])] == [good]
    printed = capsys.readouterr().out
    assert all(str(path) in printed for path in bad)
    assert printed.count("left out, damaged: ") == len(BROKEN)
    with pytest.raises(UserError, match="no whole and finished run"):
        read_runs(bad)
    with pytest.raises(UserError, match="none of the runs is a PonderLM-3"):
        Depth((make_run("l", 1, 3, method="looped"),), tmp_path).draw()
    monkeypatch.chdir(good)
    assert read_runs(["."])[0].results["hard"]["loss"] == 1.25
    assert len(read_runs(["../good/"])) == 1


@pytest.mark.parametrize("figure", [Pareto, Depth])
def test_redrawing(figure, make_run, tmp_path):
    """Catches numbers that do not survive their file, a figure that needs the runs, and a stack
    trace where the numbers are damaged."""
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
    shown = read_runs(runs if figure is Pareto else runs[:3])
    pd.testing.assert_frame_equal(read(files[0]), pareto_rows(shown), check_exact=True)
    for damaged in (b"method,K\na,1\n", before[0].replace(b"1.2", b"word"), b"\xff\xfe\xfa"):
        files[0].write_bytes(damaged)
        with pytest.raises(UserError, match="is damaged"):
            figure(out=out, redraw=True).draw()
    files[0].write_bytes(before[0].replace(b"PonderLM-3", b"Ponder"))
    with pytest.raises(UserError, match="'Ponder'"):
        figure(out=out, redraw=True).draw()


def curves(names):
    """The curves that draw_curves makes of rows with these names: (color, marker, line) of each."""
    rows = [{"method": name, "K": 3, "steps": i, "loss": 1.0} for i, name in enumerate(names)]
    _, (axes,) = new_figure("", "")
    draw_curves(axes, pd.DataFrame(rows), "steps", "loss")
    lines = [container[0] for container in axes.containers]
    return [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines]


def test_looks_of_the_methods():
    """Catches a method with the look of another one, variants that cannot be told apart, an
    ablation that is taken for a variant, and a row of no method that is left out."""
    kinds = all_methods()
    looks = curves([kind.title for kind in kinds])
    assert looks == [(kind.color, kind.marker, "-") for kind in kinds]
    assert len(set(looks)) == len(kinds)
    looks = curves([f"PonderLM-3, tau {n}" for n in range(10)])
    assert [marker for _, marker, _ in looks] == [*MARKERS, *MARKERS[:2]]
    assert [line for _, _, line in looks[:5]] == ["-", "--", ":", "-.", "-"]
    assert len(set(looks[:8])) == 8
    assert method_of("PonderLM-3, tau 0.1").method == "ponderlm3"
    assert method_of("PonderLM-3, uniform s, tau 0.1").method == "ablation-router"
    with pytest.raises(UserError, match="'Someone'"):
        method_of("Someone")
