"""Several runs side by side: mostly of runs that are nothing but their files."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lab_helpers import ROOT, flags, small_model, tokens

from analyze import pareto
from common import UserError
from data import Windows, open_corpus
from lab.figures import comparing
from lab.figures.comparing import by_run, losses
from lab.figures.runs import check_one_recipe, named, read_runs
from lab.figures.subject import rerouted
from lab.figures.tables import new_figure
from lab.interop.weights import PUZZLES, load
from lab.methods import find

CPU = torch.device("cpu")


def rows_of(paths, taus=(1e-4,)):
    return by_run(read_runs(paths), lambda run: losses(run, taus, 0, CPU))


def test_means_over_seeds(make_run):
    """Catches seeds mixed with other K, another spread or cost, and numbers unlike the root's pareto."""
    paths = [make_run("a", 1.0, 2.0), make_run("b", 2.0, 3.0, seed=1)]
    paths += [make_run("c", 0.5, 4.0, method="looped", ponder_steps=4)]
    rows = rows_of(paths)
    assert rows.entropy.tolist() == pytest.approx([math.log(2)] * 3)  # of tokens by their last step
    frame = comparing.over_seeds(rows, ["tau"])
    adaptive, looped = frame.to_dict("records")
    assert (adaptive["method"], adaptive["K"], adaptive["seeds"]) == ("PonderLM-3", 3, 2)
    assert adaptive["steps"] == 2.5 and adaptive["steps_std"] == pytest.approx(math.sqrt(0.5))
    assert (looped["seeds"], looped["loss"]) == (1, 0.5) and math.isnan(looped["loss_std"])
    shape = read_runs(paths)[0].model_config
    assert adaptive["slots"] == pytest.approx(find("ponderlm3").training_forwards(shape, 2.5, 100) * 0.0512)
    assert adaptive["minutes"] == pytest.approx(51_200 / 100 / 60)
    for name, ours in pd.DataFrame(pareto(paths)).groupby("method"):
        (mine,) = frame[frame.method == find(name).title].to_dict("records")
        for key in ("steps", "loss"):
            assert mine[key] == pytest.approx(ours[key].mean())


@torch.no_grad()
def test_swapped():
    """Catches a token that keeps its own steps, one that is given those of another place, and a model that
    stays swapped. On the grid s is of h^(0), which no mask has touched."""
    model, idx = small_model(method="grid"), tokens(8, 3)
    own = model(idx, tau=1e-4)
    with rerouted(model, comparing.of_another_window):
        other = model(idx, tau=1e-4)
        with pytest.raises(UserError, match="--swap"):
            model(idx[:1])
    assert torch.equal(other.s, own.s[[2, 0, 1]]) and torch.equal(other.steps, own.steps[[2, 0, 1]])
    assert (other.h[..., 1:, :] - own.h[..., 1:, :]).abs().max() > 1e-3
    assert torch.equal(model(idx, tau=1e-4).s, own.s)


@torch.no_grad()
def test_other_tau_and_windows_to_choose_by(trained):
    """Catches windows that are reported as well, another text, and a tau that is taken for a seed."""
    text = str(trained.parent / "text.txt")
    runs, val = read_runs([trained / "ponder", trained / "tau"]), open_corpus(text, "bytes").val
    frame = by_run(runs, lambda run: losses(run, (1e-4, 0.97), 4, CPU, text))
    rows_of_val, windows = Windows(val, 16, seed=0), {"": (0, 8), "choose": (8, 12)}
    assert len(frame) == 4 and len(comparing.over_seeds(frame, ["tau"])) == 4
    for run, (name, rows) in zip(runs, frame.groupby("method", sort=False), strict=True):
        assert ("tau" in name) == (run.config.tau != 1e-4)
        for row, (which, part) in product(rows.to_dict("records"), windows.items()):
            x = rows_of_val.stack(*part)
            out = load(run.path)(x[:, :-1], x[:, 1:], tau=row["tau"])
            assert row[which or "loss"] == pytest.approx(out.loss.item(), rel=1e-5)
            steps = row[f"{which}_steps" if which else "steps"]
            assert steps == pytest.approx(out.steps.float().mean().item(), rel=1e-5)
    with pytest.raises(UserError, match="are already reported, so give"):
        by_run(runs, lambda run: losses(run, (), 10**6, CPU, text))
    runs[0].config.eval_windows = 10**6  # more than there are: it was scored on fewer
    (row,) = losses(runs[0], (0.97,), 0, CPU, text)
    assert row["loss"] == pytest.approx(frame[frame.tau == 0.97].loss.iloc[0])
    del runs[0].results["windows"]  # it does not say on how many: on all
    (row,) = losses(runs[0], (0.97,), 0, CPU, text)
    assert row["loss"] != pytest.approx(frame[frame.tau == 0.97].loss.iloc[0])


def test_differences_by_pair(make_run):
    """Catches a reference of another seed or other steps, and spreads of seeds instead of pairs."""
    paths = []
    for seed, gain in enumerate((0.1, 0.2, 0.6)):
        for K in (1, 2):
            shape = dict(method="ponderlm2", ponder_steps=K)
            paths.append(make_run(f"p{K}{seed}", 3.0 + seed - 0.4 * K, float(K), seed, **shape))
        shape = dict(method="looped", ponder_steps=2)
        paths.append(make_run(f"l{seed}", 2.4 + seed - gain, 1.5, seed, **shape))
        paths.append(make_run(f"q{seed}", 2.0, 2.5, seed, method="pause"))  # more than the reference has
    frame = rows_of(paths)
    found = comparing.differences(frame, "PonderLM-2").set_index("method").difference
    assert found["LoopedLM"].tolist() == pytest.approx([-0.1, -0.2, -0.6]) and found["Pause"].isna().all()
    assert found["PonderLM-2"].tolist() == pytest.approx([0] * 6)
    cells = comparing.comparison_table(frame, "PonderLM-2").set_index("method")
    assert len(cells) == 4  # each K has its own
    within = 4.303 * math.sqrt(0.07 / 3)
    assert cells.loc["LoopedLM"].iloc[-1] == f"-0.3000 ± {within:.4f}" and cells.loc["Pause"].iloc[-1] == "-"
    assert cells.pairs.to_dict() == {"PonderLM-2": "3", "LoopedLM": "3", "Pause": "0"}
    # Unpaired the seeds spread as they do: 2.3, 3.2, 3.8 against 2.4, 3.4, 4.4, by Welch with 3 degrees.
    within = 3.182 * math.sqrt(np.var([2.3, 3.2, 3.8], ddof=1) / 3 + 1 / 3)
    assert cells.loc["LoopedLM", "unpaired, 95 %"] == f"-0.3000 ± {within:.4f}"
    with pytest.raises(UserError, match="PonderLM-4"):
        comparing.differences(frame, "PonderLM-4")


def test_pairs_that_do_not_exist(make_run):
    """Catches an interval by the runs of a row, of which some have no partner."""
    paths = [make_run(f"p{seed}", 3.0, 1.0, seed, method="ponderlm2", ponder_steps=1) for seed in (0, 1, 2)]
    for seed, loss in enumerate((2.9, 2.8, 2.7, 9.0, 9.0)):
        paths.append(make_run(f"l{seed}", loss, 1.0, seed, method="looped"))
    cells = comparing.comparison_table(rows_of(paths), "PonderLM-2").set_index("method")
    assert cells.loc["LoopedLM", "pairs"] == "3"
    assert cells.loc["LoopedLM"].iloc[-1] == f"-0.2000 ± {4.303 * 0.1 / math.sqrt(3):.4f}"


def test_pairs_agree_in_where_they_ran(make_run, capsys):
    """Catches two runs of one seed that count as a pair although another machine trained one of them, and
    runs that are left out without a word."""
    paths = []
    for seed, machine in enumerate("AAB"):
        shape = dict(method="ponderlm2", ponder_steps=1, machine=machine)
        paths.append(make_run(f"p{seed}", 3.0, 1.0, seed, **shape))
        loss = 9.0 if machine == "B" else 2.9
        paths.append(make_run(f"l{seed}", loss, 1.0, seed, method="looped", machine="A"))
    frame = rows_of(paths)
    assert frame.machine.tolist().count("A, 1 thread, torch 2.13") == 5
    assert set(frame.precision) == {"float32"} and frame.text.nunique() == 1
    found = comparing.differences(frame, "PonderLM-2").set_index("method").difference
    assert found["LoopedLM"].tolist()[:2] == pytest.approx([-0.1, -0.1])
    assert math.isnan(found["LoopedLM"].tolist()[2])
    assert "leaving out 1 pair of runs" in capsys.readouterr().out
    cells = comparing.comparison_table(frame, "PonderLM-2").set_index("method")
    assert cells.loc["LoopedLM"].iloc[-1] == "-0.1000 ± 0.0000" and cells.loc["LoopedLM", "pairs"] == "2"
    assert cells.loc["LoopedLM", "unpaired, 95 %"].startswith("+1.9333 ±")
    assert comparing.over_seeds(frame, ["tau"]).machine.tolist()[1].count(";") == 1
    older = frame.drop(columns=comparing.ORIGIN)  # of a CSV that has no such columns: pairs by seed alone
    assert comparing.differences(older, "PonderLM-2").difference.notna().all()


def test_a_model_without_a_log():
    """Catches an included model that no figure can measure, since it does not say where it was trained."""
    (run,) = read_runs([PUZZLES])
    assert run.origin | {"text": ""} == {"machine": None, "precision": None, "text": ""}


@pytest.mark.parametrize("flags", [{}, {"against": "PonderLM-2"}])
def test_csv_of_another_figure(flags, tmp_path):
    """Catches a CSV of another figure that ends in a traceback, with --against too, or is drawn as if it were
    one of this figure."""
    csv = str(ROOT / "docs/figures/layers.csv")
    with pytest.raises(UserError, match=r"layers\.csv .*no column method, tau"):
        comparing.Compare(runs=(csv,), out=tmp_path, **flags).draw()
    assert not list(tmp_path.iterdir())


def test_other_settings_are_other_curves(make_run):
    """Catches a mean over runs that are not the same training, or begin from another model."""
    for name, changes in {
        "a": {},
        "b": dict(penalty_weight=0.0),
        "c": dict(ponder_steps=4),
        "d": dict(seed=1),
        "e": dict(method="ponderlm1", accumulate=False),
        "f": dict(method="looped", batch_size=4),
        "g": dict(method="looped", embed_scale=22.63),
        "h": dict(method="looped", embed_scale=22.627417),
        "i": dict(method="pause", init_from="out/first"),
        "j": dict(method="pause"),
    }.items():
        make_run(name, 1, 2, **changes)
    found = named(read_runs(sorted(x.parent for x in Path().glob("*/results.json"))))
    assert {name: [run.model_config.ponder_steps for run in runs] for name, runs in found.items()} == {
        "PonderLM-3": [3, 3, 4],
        "PonderLM-3, penalty_weight 0": [3],
        "LoopedLM, batch_size 4": [3],
        "LoopedLM, embed_scale 22.63": [3],
        "LoopedLM, embed_scale 22.6274": [3],
        "Pause, init_from True": [3],
        "Pause": [3],
        "PonderLM-1, accumulate False": [3],  # named although it is alone: not the paper's
    }


def test_refused_comparisons(make_run, tmp_path, capsys):
    """Catches a copy of a run that counts as another seed; losses on other texts or windows in one table; an
    unfinished or damaged run that becomes a number; and trainings of other lengths without a word."""
    first, short = read_runs([make_run("a", 1, 2), make_run("c", 1, 2, block_size=32)])
    with pytest.raises(UserError, match="copy"):
        read_runs([first.path, make_run("copy", 1, 2)])
    fewer = replace(first, results=first.results | {"windows": 5})
    other = replace(first, corpus=first.corpus | {"sha256": "another"})
    for run, what in ((short, "windows"), (fewer, "numbers of windows"), (other, "corpora")):
        with pytest.raises(UserError, match=what):
            comparing.check_comparable([first, run])
    comparing.check_comparable(read_runs([first.path, make_run("b", 1, 3, method="looped", batch_size=16)]))
    assert "batch_size" in capsys.readouterr().out
    with pytest.raises(UserError, match="no finished run"):
        read_runs([tmp_path / "missing"])
    assert "missing" in capsys.readouterr().out
    for changes in ({"loss": "x"}, {"loss": -1.0}, {"loss": None}, {"loss": math.nan}):
        content = json.loads((first.path / "results.json").read_text())
        content["hard"] |= changes
        (first.path / "results.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=r"results\.json"):
            read_runs([first.path])
    for content in ("", "{", '{"tokens_per_second": null}'):
        (short.path / "log.jsonl").write_text(content)
        with pytest.raises(UserError, match=r"log\.jsonl"):
            rows_of([short.path])


def test_rows_that_are_averaged(make_run):
    """Catches two models that stand in one row of a table as if they were seeds of one."""
    first, other_seed, longer, other_method, priced, plain, also_plain = read_runs(
        [
            make_run("a", 1, 1, method="grid"),
            make_run("b", 1, 1, method="grid", seed=1),
            make_run("c", 1, 1, method="grid", ponder_steps=5),
            make_run("d", 1, 1, method="ponderlm3", seed=2),
            make_run("e", 1, 1, method="grid", seed=3, penalty_weight=0.1),
            make_run("f", 1, 0, method="vanilla"),
            make_run("g", 1, 0, method="ponderlm3", ponder_steps=0, router_offset=None, seed=4),
        ]
    )
    check_one_recipe([first, other_seed], lambda run: "a row")
    check_one_recipe([first, longer, other_method], lambda run: (run.K, run.method))
    check_one_recipe([plain, also_plain], lambda run: "a row")
    check_one_recipe([first, priced], lambda run: "a row", but={"penalty_weight"})
    for run, flag in ((longer, "ponder-steps"), (other_method, "method"), (priced, "penalty-weight")):
        with pytest.raises(UserError, match=f"one row, although they differ in .*--{flag}"):
            check_one_recipe([first, run], lambda run: "a row")


def test_runs_from_other_models(make_run):
    """Catches runs that began with different models, and are said to be the same."""
    paths = [make_run(name, 1, 1, init_from=f"out/{name}") for name in "ab"]
    with pytest.raises(UserError, match="differ only in the model that they began with"):
        read_runs(paths)


def test_a_csv_with_a_row_twice(make_run, tmp_path):
    """Catches a row that counts as two seeds, as in CSVs that were put together."""
    comparing.Compare(flags([make_run("a", 1.1, 2), make_run("b", 1.2, 2, seed=1)]), out=tmp_path).draw()
    file = tmp_path / "compare.csv"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, lines[1]]) + "\n")
    with pytest.raises(UserError, match=r"line 4 of .*compare\.csv repeats an earlier line"):
        comparing.Compare((str(file),), out=tmp_path).draw()


def test_nine_curves(tmp_path):
    """Catches two curves that look the same."""
    _, (axes,) = new_figure("", "", "")
    frame = pd.DataFrame({"method": list("abcdefghi"), "K": 1, "x": 1.0, "y": 1.0})
    comparing.draw_curves(axes, frame, "method", "x", "y")
    lines = [container.lines[0] for container in axes.containers]
    assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}) == 9


@pytest.mark.parametrize("windows", [16, 17])
def test_swap_of_an_odd_window(windows, trained, tmp_path, monkeypatch):
    """Catches a batch of one window, in which there is no other window to swap with."""
    monkeypatch.setattr(comparing, "eval_batch_size", lambda *_: 4)
    monkeypatch.setattr("train.eval_batch_size", lambda *_: 4)
    (run,) = read_runs([trained / "ponder"])
    run = replace(run, results=run.results | {"windows": windows})
    data = str(trained.parent / "text.txt")
    (row,) = comparing.losses(run, [run.config.tau], 0, torch.device("cpu"), data, swap=True)
    assert row["swapped"] > 0


def test_command(make_run, tmp_path):
    """Catches a table or figure that is not of the rows."""
    paths = [make_run("a", 1.1, 2, machine="A")]
    paths += [make_run("b", 1.2, 1.9, method="ponderlm2", ponder_steps=2, machine="A")]
    paths += [make_run("c", 1.3, 2.2, seed=1, machine="B")]
    paths += [make_run("v", 1.7, 0, method="vanilla", machine="A")]
    comparing.Compare(flags(paths), out=tmp_path, over="tau").draw()
    assert (tmp_path / "compare.png").stat().st_size > 5000
    expected = rows_of(paths).astype(dict.fromkeys(comparing.ORIGIN, "str"))
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "compare.csv"), expected, check_exact=True)
    assert len((tmp_path / "compare.md").read_text().splitlines()) == 2 + 3
