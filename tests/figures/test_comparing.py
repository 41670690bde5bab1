"""Several runs side by side: mostly of runs that are nothing but their files."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from conftest import flags, records

from lab.evaluation.texts import validation_windows
from lab.figures.comparing import (
    Pareto,
    at_other_taus,
    check_comparable,
    curve_names,
    draw_curves,
    group_runs,
    on_frontier,
    pareto_rows,
    read_runs,
    stopped_at,
)
from lab.figures.tables import new_figure
from lab.interop import load
from lab.methods.cost import cost
from model import UserError
from train import evaluate


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


def test_at_other_taus(trained):
    """Catches an evaluation at the old tau, on other windows, or one that is taken for a seed."""
    (run,) = read_runs([trained / "tau"])
    _, _, val = validation_windows(run.path, run.config.data)
    for tau, hard in stopped_at(run, (0.5, 0.97), "cpu", run.config.data):
        expected = evaluate(load(run.path), val, 8, tau=tau)
        assert hard["loss"] == pytest.approx(expected["loss"], abs=1e-9)
        assert hard["steps"] == expected["steps"]
    (later,) = at_other_taus([run], (0.97, 1e-4), "cpu", run.config.data)
    assert run.results["hard"]["steps"] < 1.5 < later.results["hard"]["steps"]
    assert set(pareto_rows([run, later]).method) == {"PonderLM-3", "PonderLM-3, tau 0.97"}


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
    """Catches runs from scratch and from another model in one mean."""
    runs = read_runs([make_run("scratch", 1, 2), make_run("from", 1, 2), make_run("too", 1, 2)])
    for i, run in enumerate(runs[1:]):
        run.config.init_from, run.config.seed = f"out/first-{i}", i
    names = [name for name, _ in group_runs(runs)]
    assert names == ["PonderLM-3", "PonderLM-3, init_from True"]


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
    assert "the runs differ in batch_size, too: 8, 16" in capsys.readouterr().out


def test_runs_that_are_left_out(make_run, tmp_path, capsys):
    """Catches an unfinished or missing run that becomes a number or goes unmentioned, and a damaged
    one that does."""
    good, bad = make_run("good", 1.25, 2), [tmp_path / "empty", tmp_path / "missing"]
    bad[0].mkdir()
    assert [str(run.path) for run in read_runs([bad[0], good, bad[1]])] == [good]
    printed = capsys.readouterr().out
    assert all(str(path) in printed for path in bad)
    with pytest.raises(UserError, match="no finished run"):
        read_runs(bad)
    with pytest.raises(UserError, match=r"results\.json"):
        read_runs([make_run("damaged", math.nan, 2)])


def test_redrawing(make_run, tmp_path):
    """Catches numbers that do not survive their file, and a figure that needs the runs."""
    runs = [make_run("a", 1.1, 2), make_run("b", 1.2, 1.9, ponder_steps=2)]
    runs += [make_run("c", 1.3, 2.2, seed=1), make_run("v", 1.7, 0, method="vanilla")]
    out = tmp_path / "out"
    Pareto(flags(runs), out=out).draw()
    files = [out / f"pareto{suffix}" for suffix in (".csv", ".md", ".png")]
    before = [file.read_bytes() for file in files]
    files[1].unlink(), files[2].unlink()
    Pareto(out=out, redraw=True).draw()
    assert [file.read_bytes() for file in files] == before
    pd.testing.assert_frame_equal(pd.read_csv(files[0]), pareto_rows(read_runs(runs)), check_exact=True)


def test_curves():
    """Catches methods of one colour, variants of several or that cannot be told apart, and a point
    with another K."""
    names = ["A", "A, tau 1", "A, tau 2", "B", "C, x"]
    rows = [{"method": n, "K": i, "steps": i, "loss": 1.0} for i, n in enumerate(names)]
    frame = pd.DataFrame(rows)
    _, (axes,) = new_figure("", "")
    draw_curves(axes, frame, frame.method, "steps", "loss")
    lines = [container[0] for container in axes.containers]
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines]
    assert len(set(looks[:3])) == 3 and len({color for color, *_ in looks}) == 3
    assert {color for color, *_ in looks[:3]} == {looks[0][0]}
    assert [(text.get_position()[0], text.get_text()) for text in axes.texts] == [
        (i, str(i)) for i in range(5)
    ]
    assert [*curve_names(frame)][:2] == ["A, K = 0", "A, tau 1, K = 1"]
    assert [*curve_names(frame[:1])] == ["K = 0"]


@pytest.mark.parametrize("changes", [{"loss": 1e9}, {"loss": "x"}, {"steps": -1}, {"steps": None}])
def test_damaged_results(make_run, changes):
    """Catches a loss whose perplexity is infinite, and numbers that are none."""
    run = Path(make_run("run", 1.0, 1.0))
    assert len(read_runs([run])) == 1
    content = json.loads((run / "results.json").read_text())
    content["hard"] |= changes
    (run / "results.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"results\.json is damaged"):
        read_runs([run])
