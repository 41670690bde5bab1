"""The figures of one run, and the command line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from pydantic import ValidationError

import analyze
from analysis import figures
from analysis.measuring import BUCKETS
from analysis.tables import read
from analyze import Buckets, Converge, Heatmap, Report, Shift, Tau, Tokens
from runtime import UserError, command_line
from train import train
from training.config import read_settings

ROOT = Path(__file__).parent.parent.parent
OF_ONE_RUN = analyze.OF_ONE_RUN[:-1]  # without the report
NAMES = ("converge", "buckets", "shift", "tokens", "tau")


def records(file):
    """The rows of a CSV file as dicts, None for nothing."""
    frame = read(file).astype(object)
    return frame.where(frame.notna(), None).to_dict("records")


@pytest.fixture
def ponder(trained, tmp_path):
    """A copy of the PonderLM-3 run, to write into."""
    return shutil.copytree(trained / "ponder", tmp_path / "ponder")


def test_report_and_redraw(ponder, trained, capsys, tmp_path):
    """Catches a figure, table or setting that is missing on the page, and a figure that cannot be
    drawn again, the same to the byte, from what was saved when the model is gone."""
    plain = trained / "plain"
    Report(run=str(ponder), reference=str(plain), windows=8).draw()
    out = ponder / "report"
    page = (out / "index.html").read_text(encoding="utf-8")
    for name in NAMES:
        assert f'<img src="{name}.png"' in page and (out / f"{name}.png").stat().st_size > 10_000
        assert f'href="{name}.csv"' in page
    texts = ('href="heatmap.html"', "executed steps at tau = 0.0001", "hard-stopped", "commit ")
    for text in texts:
        assert text in page
    assert "&#34;ponder_steps&#34;: 2" in page and "paper flops" in page
    assert page.count("<table>") == 1 + 7 and "K = 0 model" in page
    assert page.count(f"tokens 128, tau 0.0001, reference {plain}") == 7
    assert "http" not in page and page.count("src=") == len(NAMES)
    kept = (".csv", ".md", ".html", ".png")
    first = {f.name: f.read_bytes() for f in out.iterdir() if f.suffix in kept}
    printed = capsys.readouterr().out
    saved = out.rename(tmp_path / "saved")
    for command in OF_ONE_RUN:
        command(out=saved, redraw=True).draw()
    with pytest.raises(UserError, match="needs --run"):
        Report(out=saved, redraw=True).draw()
    with pytest.raises(UserError, match="cannot follow --taus, --windows"):
        Tau(out=saved, redraw=True, windows=3, taus=(0.5,)).draw()
    again = {f.name: f.read_bytes() for f in saved.iterdir() if f.name in first}
    assert all(again[name] == first[name] for name in first)
    redrawn = capsys.readouterr().out
    assert redrawn.count("written: ") == len(OF_ONE_RUN)
    tables = [line for line in printed.splitlines() if line.startswith("|")]
    assert tables == [line for line in redrawn.splitlines() if line.startswith("|")]


def test_one_window(trained, tmp_path):
    """Catches a crash where a bucket, a depth or a word has no token."""
    Report(run=str(trained / "ponder"), windows=1, out=tmp_path).draw()
    words = [row for row in records(tmp_path / "tokens.csv") if row["kind"] == "word"]
    assert any(row["count"] == 0 and row["steps"] is None for row in words)
    assert "| - |" in (tmp_path / "tokens.md").read_text()


def test_flags_reach_the_figure(trained, tmp_path):
    """Catches a flag that changes nothing."""
    common = dict(run=str(trained / "ponder"), windows=1, tau=0.5, out=tmp_path)
    Tau(**common, taus=(0.5, 0.25)).draw()
    assert [row["tau"] for row in records(tmp_path / "tau.csv")] == [0.25, 0.5, 0.5]
    Shift(**common, alphas=(2.0,)).draw()
    assert {row["alpha"] for row in records(tmp_path / "shift.csv")} == {0, 2}
    Tokens(**common, words=("fox",), least=1).draw()
    rows = records(tmp_path / "tokens.csv")
    assert [row["text"] for row in rows if row["kind"] == "word"] == ["fox"]
    assert sum(row["count"] for row in rows if row["kind"] == "token") == 16


def test_tables():
    """Catches columns that are mixed up, and tokens that are ranked the wrong way."""

    def cells(table, rows):
        return table(pd.DataFrame(rows)).to_numpy().tolist()

    row = {"difficulty_by": "x", "bucket": "easy", "tokens": 1, "difficulty": 2, "steps": None}
    row |= {"gain_1": 3, "gain_2": 4, "raw_gain_1": 5, "raw_gain_2": 6}
    last = cells(figures.bucket_table, [row])[-1]
    assert last == ["x", "easy", "1", "2.000", "-", "3.000", "4.000", "5.000", "6.000"]
    rows = [{"bucket": b, "steps": i, "loss_change": i / 10} for i, b in enumerate(BUCKETS)]
    rows = [row | {"difficulty_by": "x", "alpha": -1.0, "all_steps": 9} for row in rows]
    last = cells(figures.shift_table, rows)[-1]
    assert last == ["x", "-1", "9.00", "0.00, 0.0000", "1.00, 0.1000", "2.00, 0.2000"]
    rows = [row | {"difficulty_by": by} for by in ("y", "x") for row in rows]
    assert [line[0] for line in cells(figures.shift_table, rows)] == ["y", "x"]
    row = {"kind": "token", "count": 5, "pruned": 0.5}
    rows = [row | {"text": str(i), "steps": i} for i in range(4)]
    lines = cells(lambda frame: figures.token_table(frame, most=2), rows)
    kinds = ["most steps", "most steps", "fewest steps", "fewest steps"]
    assert [line[:2] for line in lines] == [[k, f"“{3 - i}”"] for i, k in enumerate(kinds)]
    assert lines[0][2:] == ["5", "3.000", "50.00%"]
    rows = [{"refinements": n, "latents": 0.5**n, "router": 0.25**n} for n in range(4)]
    assert ["L of the fit", "0.500", "0.250"] in cells(figures.converge_table, rows)


def test_wrong_values(trained):
    """Catches a value that is taken, fails only after minutes, or does not say what to do."""
    common = dict(run=str(trained / "ponder"), windows=1, out=Path("new"))
    for command, flags, message in (
        (Buckets, {"windows": 0}, r"windows\n.* greater than or equal to 1"),
        (Buckets, {"tau": 2.0}, r"tau\n.* less than or equal to 1"),
        (Buckets, {"run": "nowhere"}, "nowhere does not exist"),
        (Tau, {"taus": (0.5, 2.0)}, r"taus\.1\n.* less than or equal to 1"),
        (Tau, {"taus": ()}, "--taus is empty"),
        (Shift, {"alphas": (float("nan"),)}, r"alphas\.0\n"),
        (Tokens, {"words": ()}, "nothing to put into"),
    ):
        with pytest.raises((UserError, ValidationError), match=message):
            command(**common | flags).draw()


def test_wrong_runs(trained, tmp_path):
    """Catches a figure of a model that it is not for, a reference that does not fit, a redraw of
    nothing, and losses on a text that is not the one that the run was scored on."""
    path, config, _ = read_settings(trained, "plain")
    shape = replace(config.model, vocab_size=320)  # auto is bytes in one preset, a BPE in the other
    config = replace(config, preset="small", tokenizer="auto", model=shape, steps=1)
    train(replace(config, out=str(tmp_path), name="bpe", data=str(trained.parent / "text.txt")))
    content = json.loads((trained / "ponder/train.json").read_text())
    content["config"]["data"] = str(trained.parent / "other.txt")
    changed = shutil.copytree(trained / "ponder", tmp_path / "changed")
    (changed / "train.json").write_text(json.dumps(content))
    for command, run, flags, message in (
        (Tau, path, {}, r"is of method vanilla; .* with a learned router"),
        (Converge, path, {}, "has K = 0: nothing is fed back"),
        (Buckets, "ponder", {"reference": str(trained / "other")}, "has to be a vanilla"),
        (Buckets, "ponder", {"reference": str(tmp_path / "bpe")}, "differ in corpus, tokenizer"),
        (Buckets, "ponder", {"reference": str(trained / "other-plain")}, "differ in corpus"),
        (Tau, changed, {}, "another corpus"),
        (Converge, "ponder", {"redraw": True}, "does not exist: draw it once without --redraw"),
        (Heatmap, "ponder", {"redraw": True}, "does not exist: draw it once without --redraw"),
    ):
        flags = flags if "redraw" in flags else flags | {"windows": 1}
        with pytest.raises(UserError, match=message):
            command(run=str(trained / run), out=tmp_path / "new", **flags).draw()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):  # which command_line shows in one line
        Tau(run=str(trained / "ponder"), out=tmp_path / "file").draw()


def test_other_models(trained, ponder, tmp_path):
    """Catches a figure that is refused to the other method that iterates, and a checkpoint of a run
    that is taken for something else."""
    Converge(run=str(trained / "ponderlm2"), windows=2, out=tmp_path).draw()
    rows = records(tmp_path / "converge.csv")
    assert len(rows) == 13 and rows[0]["latents"] > rows[4]["latents"] > 0 == rows[0]["router"]
    checkpoint = next(ponder.glob("step-*"))
    Converge(run=str(checkpoint), windows=1).draw()
    assert (ponder / f"report-{checkpoint.name}/converge.png").exists()


def test_heatmap_of_a_text(trained, tmp_path, capsys):
    """Catches texts that are too short, too long or missing, and one that is not the file's."""
    text = tmp_path / "mine.txt"

    def draw(content):
        text.write_text(content, encoding="utf-8")
        Heatmap(run=str(trained / "ponder"), out=tmp_path, text=text).draw()

    draw("fox <b>")
    fields = json.loads((tmp_path / "heatmap.json").read_text())
    assert "".join(token["text"] for token in fields["tokens"]) == "fox <b>"
    for content, message in (("", "0 tokens"), ("a", "1 tokens")):
        with pytest.raises(UserError, match=message):
            draw(content)
    draw("a" * 5000)
    assert "of 5,000 tokens the first 4,096 are shown" in capsys.readouterr().out


@pytest.mark.parametrize("command", [*analyze.OF_ONE_RUN, *analyze.OF_SEVERAL])
def test_help(command, capsys):
    """Catches a subcommand whose flags cannot be parsed, or one without a description."""
    with pytest.raises(SystemExit) as stop:
        analyze.main([command.__name__.lower(), "--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0 and "--redraw" in shown and command.__doc__[:40] in shown


def test_command_line(trained, tmp_path):
    """Catches flags that do not arrive, and an error that is a page."""
    flags = ["--windows", "1", "--taus", "0.5", "--out", str(tmp_path)]
    analyze.main(["tau", "--run", str(trained / "ponder"), *flags])
    assert records(tmp_path / "tau.csv")[0]["tau"] == 0.5
    analyze.main(["tau", "--redraw", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"error: windows = 0: it should be greater"):
        command_line(lambda: analyze.main(["tau", "--windows", "0"]))


@pytest.mark.slow
def test_published_figures(tmp_path):
    """Catches a published figure that its published numbers do not draw, to the byte (with the
    versions of requirements.txt)."""
    shown = ROOT / "docs/figures"
    for file in shown.glob("*.csv"):
        shutil.copy(file, tmp_path)
    (tmp_path / "more").mkdir()
    shutil.copy(shown / "remedies.csv", tmp_path / "more/pareto.csv")
    for command in (*figures.ALL, *analyze.OF_SEVERAL):
        command(out=tmp_path, redraw=True).draw()
    analyze.Pareto(out=tmp_path / "more", redraw=True).draw()
    names = {
        f"{name}.png": f"{name}.png" for name in (*NAMES, "pareto", "depth", "frontier", "lookup")
    }
    for name, drawn in (names | {"remedies.png": "more/pareto.png"}).items():
        assert (tmp_path / drawn).read_bytes() == (shown / name).read_bytes(), name
