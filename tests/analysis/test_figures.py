"""The figures of one run, and the command line."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from conftest import records
from pydantic import ValidationError

import analyze
from analysis import figures
from analysis.measuring import BUCKETS
from analysis.tables import read
from analyze import Buckets, Converge, Heatmap, Report, Shift, Tau, Tokens
from runtime import UserError, command_line

ROOT = Path(__file__).parent.parent.parent
NAMES = ("converge", "buckets", "shift", "tokens", "tau")


def rows_of(file):
    return records(read(file))


def test_report_and_redraw(trained, tmp_path):
    """Catches a figure, table or setting that is missing on the page, and a figure that cannot be
    drawn again, the same to the byte, from what was saved when the model is gone."""
    out = tmp_path / "report"
    Report(run=str(trained / "ponder"), reference=str(trained / "plain"), out=out).draw()
    page = (out / "index.html").read_text(encoding="utf-8")
    for name in NAMES:
        assert f'<img src="{name}.png"' in page and f'href="{name}.csv"' in page
    texts = ('href="heatmap.html"', "executed steps at tau = 0.0001", "hard-stopped", "commit ")
    for text in (*texts, "paper flops", "K = 0 model", "stopped at tau = 0.0001"):
        assert text in page
    assert "&#34;ponder_steps&#34;: 2" in page and page.count("<table>") == 1 + 7
    assert "http" not in page and page.count("src=") == len(NAMES)
    first = {f.name: f.read_bytes() for f in out.iterdir() if f.suffix != ".html"}
    for name in first:
        if not name.endswith(".csv"):
            (out / name).unlink()
    for figure in figures.ALL:
        figure(out=out, redraw=True).draw()
    assert all((out / name).read_bytes() == content for name, content in first.items())


def test_one_window(trained, tmp_path):
    """Catches a crash where a bucket, a depth or a word has no token."""
    Report(run=str(trained / "ponder"), windows=1, out=tmp_path).draw()
    words = [row for row in rows_of(tmp_path / "tokens.csv") if row["kind"] == "word"]
    assert any(row["count"] == 0 and row["steps"] is None for row in words)
    assert "| - |" in (tmp_path / "tokens.md").read_text()


def test_flags_reach_the_figure(trained, tmp_path):
    """Catches a flag that changes nothing."""
    common = dict(run=str(trained / "ponder"), windows=1, tau=0.5, out=tmp_path)
    Tau(**common, taus=(0.5, 0.25)).draw()
    assert [row["tau"] for row in rows_of(tmp_path / "tau.csv")] == [0.25, 0.5]
    Shift(**common, alphas=(2.0,)).draw()
    assert {row["alpha"] for row in rows_of(tmp_path / "shift.csv")} == {0, 2}
    Tokens(**common, words=("fox",)).draw()
    assert [row["text"] for row in rows_of(tmp_path / "tokens.csv")] == ["fox"]


def test_tables():
    """Catches columns that are mixed up, and tokens that are ranked the wrong way."""

    def cells(table, rows):
        return table(pd.DataFrame(rows)).to_numpy().tolist()

    rows = [{"bucket": b, "steps": i, "loss_change": i / 10} for i, b in enumerate(BUCKETS)]
    rows = [
        row | {"difficulty_by": by, "alpha": -1.0, "all_steps": 9} for by in "yx" for row in rows
    ]
    row = ["-1", "9.00", "0.00, 0.0000", "1.00, 0.1000", "2.00, 0.2000"]
    assert cells(figures.shift_table, rows) == [["y", *row], ["x", *row]]
    row = {"kind": "token", "count": 5, "pruned": 0.5}
    rows = [row | {"text": str(i), "steps": i} for i in range(4)]
    lines = cells(lambda frame: figures.token_table(frame, most=2), rows)
    kinds = ["most steps", "most steps", "fewest steps", "fewest steps"]
    assert [line[:2] for line in lines] == [[k, f"“{3 - i}”"] for i, k in enumerate(kinds)]
    assert lines[0][2:] == ["5", "3.000", "50.00%"]


def test_refused(trained, tmp_path):
    """Catches a figure of a model that it is not for, or of a text that is not the one that the run
    was scored on; a reference that does not fit; a redraw of nothing; and values out of bounds."""
    changed = shutil.copytree(trained / "ponder", tmp_path / "changed")
    content = json.loads((changed / "train.json").read_text())
    content["config"]["data"] = str(trained.parent / "other.txt")
    (changed / "train.json").write_text(json.dumps(content))
    other = str(trained / "other")
    for command, run, flags, message in (
        (Tau, "plain", {}, "is of method vanilla: it has no router"),
        (Converge, "plain", {}, "is of method vanilla: it is not trained by iterating"),
        (Buckets, "ponder", {"reference": other, "windows": 8}, "differ in corpus"),
        (Tau, changed, {}, "another corpus"),
        (Converge, "ponder", {"redraw": True}, "does not exist: draw it once without --redraw"),
        (Buckets, "ponder", {"windows": 0}, r"windows\n.* greater than or equal to 1"),
        (Tau, "ponder", {"taus": (0.5, 2.0)}, r"taus\.1\n.* less than or equal to 1"),
        (Tokens, "ponder", {"words": ()}, "nothing to put into"),
    ):
        with pytest.raises((UserError, ValidationError), match=message):
            command(run=str(trained / run), out=tmp_path / "new", **{"windows": 1} | flags).draw()


def test_another_method(trained, tmp_path):
    """Catches a figure that is refused to the other method that iterates."""
    Converge(run=str(trained / "ponderlm2"), windows=2, out=tmp_path).draw()
    rows = rows_of(tmp_path / "converge.csv")
    assert len(rows) == 13 and rows[0]["latents"] > rows[4]["latents"] > 0 == rows[0]["router"]


def test_heatmap_of_a_text(trained, tmp_path, capsys):
    """Catches texts that are too short or too long, and one that is not the file's."""
    text = tmp_path / "mine.txt"

    def draw(content):
        text.write_text(content, encoding="utf-8")
        Heatmap(run=str(trained / "ponder"), out=tmp_path, text=text).draw()

    draw("fox <b>")
    page = (tmp_path / "heatmap.html").read_text()
    assert re.findall(r'"text": "([^"]*)"', page)[:4] == ["f", "o", "x", " "]
    for content, message in (("", "0 tokens"), ("a", "1 tokens")):
        with pytest.raises(UserError, match=message):
            draw(content)
    draw("a" * 5000)
    assert "of 5,000 tokens the first 4,096 are shown" in capsys.readouterr().out


def test_command_line(trained, tmp_path, capsys):
    """Catches a subcommand whose flags cannot be parsed or do not arrive, or one without a
    description; and an error that is a page."""
    for figure in (*analyze.OF_ONE_RUN, *analyze.OF_SEVERAL):
        with pytest.raises(SystemExit) as stop:
            analyze.main([figure.__name__.lower(), "--help"])
        shown = capsys.readouterr().out
        assert stop.value.code == 0 and "--redraw" in shown and figure.__doc__[:40] in shown
    flags = ["--windows", "1", "--taus", "0.5", "--out", str(tmp_path)]
    analyze.main(["tau", "--run", str(trained / "ponder"), *flags])
    assert rows_of(tmp_path / "tau.csv")[0]["tau"] == 0.5
    with pytest.raises(SystemExit, match=r"error: windows = 0: it should be greater"):
        command_line(lambda: analyze.main(["tau", "--windows", "0"]))


@pytest.mark.slow
def test_published_figures(tmp_path):
    """Catches a published figure that its published numbers do not draw, to the byte (with the
    versions of requirements.txt)."""
    shown = ROOT / "docs/figures"
    for file in shown.glob("*.csv"):
        shutil.copy(file, tmp_path)
    for command in (*figures.ALL, analyze.Pareto, analyze.Frontier, analyze.Budget, analyze.Lookup):
        command(out=tmp_path, redraw=True).draw()
    for name in (*NAMES, "pareto", "frontier", "budget", "lookup"):
        drawn = tmp_path / f"{name}.png"
        assert drawn.read_bytes() == (shown / drawn.name).read_bytes(), name
