"""The figures of one run, from a training of a few steps."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import analyze
import figures
from analyze import Options, WithReference
from settings import read_run
from tables import read_csv
from train import train

ROOT = Path(__file__).parent.parent
COMMANDS = ("converge", "buckets", "shift", "tokens", "tau", "penalty", "heatmap")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A PonderLM-3 and a model without pondering, on the same text."""
    from config import PonderConfig
    from settings import TrainConfig

    folder = tmp_path_factory.mktemp("analyze")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, <b>é</b> of a kind.\n" * 200)
    model = PonderConfig(257, 32, 64, 1, 2, head_dim=16, block_size=16, ponder_steps=2)
    config = TrainConfig(preset="tiny", data=str(text), out=str(folder / "out"), model=model)
    config = replace(config, steps=20, learning_rate=1e-2, eval_windows=8, precision="float32")
    plain = replace(model, method="vanilla", ponder_steps=0)
    ponder = train(replace(config, name="ponder"))[0]
    return ponder, train(replace(config, name="plain", model=plain))[0]


def test_report_and_redraw(runs, capsys, tmp_path):
    """Catches a figure, table or setting that is missing on the page, and a figure that cannot be
    drawn again, with the same numbers, from what was saved when the model is gone."""
    ponder, plain = runs
    analyze.report(WithReference(run=str(ponder), reference=str(plain), windows=8))
    out = ponder / "report"
    page = (out / "index.html").read_text(encoding="utf-8")
    names = ("converge", "buckets", "shift", "tokens", "tau", "penalty")
    for name in names:
        assert f'<img src="{name}.png"' in page and (out / f"{name}.png").stat().st_size > 10_000
        assert f'href="{name}.csv"' in page
    for text in (
        'href="heatmap.html"',
        "executed steps at tau = 0.0001",
        "hard-stopped",
        "commit ",
    ):
        assert text in page
    assert "&quot;ponder_steps&quot;: 2" in page and "paper flops" in page
    assert page.count("<table>") == 1 + 8 and "K = 0 model" in page
    assert page.count(f"tokens 128, tau 0.0001, reference {plain}") == 8
    first = {f.name: f.read_bytes() for f in out.iterdir() if f.suffix in (".csv", ".md", ".html")}
    printed = capsys.readouterr().out
    saved = tmp_path / "saved"
    out.rename(saved)
    for name in COMMANDS:
        getattr(analyze, name)(WithReference(out=saved, redraw=True))
    with pytest.raises(ValueError, match="needs --run"):
        analyze.report(WithReference(out=saved, redraw=True))
    with pytest.raises(ValueError, match="cannot follow --taus, --windows"):
        analyze.tau(Options(out=saved, redraw=True, windows=3), taus=(0.5,))
    again = {f.name: f.read_bytes() for f in saved.iterdir() if f.name in first}
    assert all(again[name] == first[name] for name in first)
    redrawn = capsys.readouterr().out
    assert redrawn.count("written: ") == len(COMMANDS)
    tables = [line for line in printed.splitlines() if line.startswith("|")]
    assert tables == [line for line in redrawn.splitlines() if line.startswith("|")]
    saved.rename(out)


def test_one_window(runs, tmp_path):
    """Catches a crash where a bucket, a depth or a word has no token."""
    ponder, _ = runs
    for name in COMMANDS:
        getattr(analyze, name)(WithReference(run=str(ponder), windows=1, out=tmp_path))
    assert {f.name for f in tmp_path.glob("*.csv")} >= {"tokens.csv", "buckets.csv", "tau.csv"}
    words = [row for row in read_csv(tmp_path / "tokens.csv") if row["kind"] == "word"]
    assert any(row["count"] == 0 and row["steps"] is None for row in words)
    assert "| - |" in (tmp_path / "tokens.md").read_text()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(windows=0), "windows = 0: it must be at least 1"),
        (dict(tau=2.0), "tau = 2.0 is not a probability"),
        (dict(run="nowhere"), "nowhere does not exist"),
    ],
)
def test_wrong_options(runs, options, message):
    """Catches a wrong value that is taken, or fails without saying what to do."""
    with pytest.raises((ValueError, OSError), match=message):
        analyze.buckets(WithReference(**{"run": str(runs[0]), **options}))


def test_flags_reach_the_figure(runs, tmp_path):
    """Catches a flag that changes nothing."""
    options = WithReference(run=str(runs[0]), windows=1, tau=0.5, out=tmp_path)
    analyze.tau(options, taus=(0.5, 0.25))
    assert [row["tau"] for row in read_csv(tmp_path / "tau.csv")] == [0.25, 0.5, 0.5]
    analyze.shift(options, alphas=(2.0,))
    assert {row["alpha"] for row in read_csv(tmp_path / "shift.csv")} == {0, 2}
    analyze.tokens(options, words=("fox",), least=1)
    rows = read_csv(tmp_path / "tokens.csv")
    assert [row["text"] for row in rows if row["kind"] == "word"] == ["fox"]
    assert sum(row["count"] for row in rows if row["kind"] == "token") == 16


def test_tables():
    """Catches columns that are mixed up, and tokens that are ranked the wrong way."""
    row = {"difficulty_by": "x", "bucket": "easy", "tokens": 1, "difficulty": 2, "steps": None}
    row |= {"gain_1": 3, "gain_2": 4, "raw_gain_1": 5, "raw_gain_2": 6}
    last = figures.bucket_table([row]).splitlines()[-1]
    assert last == "| x | easy | 1 | 2.000 | - | 3.000 | 4.000 | 5.000 | 6.000 |"
    rows = [{"bucket": b, "steps": i, "loss_change": i / 10} for i, b in enumerate(figures.BUCKETS)]
    rows = [row | {"difficulty_by": "x", "alpha": -1.0, "all_steps": 9} for row in rows]
    last = figures.shift_table(rows).splitlines()[-1]
    assert last == "| x | -1 | 9.00 | 0.00, 0.0000 | 1.00, 0.1000 | 2.00, 0.2000 |"
    rows = [
        {"kind": "token", "text": str(i), "count": 5, "steps": i, "pruned": 0.5} for i in range(4)
    ]
    lines = figures.token_table(rows, most=2).splitlines()[2:]
    assert [line.split("|")[1:3] for line in lines] == [
        [" most steps ", " “3” "],
        [" most steps ", " “2” "],
        [" fewest steps ", " “1” "],
        [" fewest steps ", " “0” "],
    ]
    assert lines[0].endswith("| 5 | 3.000 | 50.00% |")
    keys = ("ce", "rho_token", "rho_batch", "count_token", "count_batch")
    rows = [{"depth": 0, **dict.fromkeys(keys, value)} for value in (1.0, 4.0)]
    assert figures.penalty_table(rows).splitlines()[-1] == "| 0 " + "| 2.5 " * 5 + "|"
    rows = [{"refinements": n, "latents": 0.5**n, "router": 0.25**n} for n in range(4)]
    assert "| L of the fit | 0.500 | 0.250 |" in figures.converge_table(rows)


def test_wrong_values(runs):
    """Catches a value that fails only after minutes, or gives nan."""
    options = WithReference(run=str(runs[0]), windows=1)
    with pytest.raises(ValueError, match="tau = 2.0 is not a prob"):  # noqa: RUF043
        analyze.tau(options, taus=(0.5, 2.0))
    with pytest.raises(ValueError, match="--taus is empty"):
        analyze.tau(options, taus=())
    with pytest.raises(ValueError, match="alpha = nan must be finite"):
        analyze.shift(options, alphas=(float("nan"),))
    with pytest.raises(ValueError, match="nothing to put into"):
        analyze.tokens(options, words=())


def test_wrong_runs(runs, config, tmp_path):
    """Catches a figure of a model that has no router, a reference on another text, and a redraw of
    nothing."""
    ponder, plain = runs
    with pytest.raises(ValueError, match="is of method vanilla"):
        analyze.tau(Options(run=str(plain)))
    other, _ = train(replace(config, steps=1))
    train_again = other
    with pytest.raises(ValueError, match="has to be a vanilla"):
        analyze.buckets(WithReference(run=str(ponder), reference=str(other), windows=1))
    model = replace(config.model, method="vanilla", ponder_steps=0)
    other, _ = train(replace(config, steps=1, model=model, name="other"))
    with pytest.raises(ValueError, match="differ in corpus"):
        analyze.buckets(WithReference(run=str(ponder), reference=str(other), windows=1))
    text = Path(config.data)
    text.write_text(text.read_text().replace("lazy", "busy"))
    with pytest.raises(ValueError, match="another corpus"):
        analyze.tau(Options(run=str(train_again), windows=1))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be made a folder"):
        analyze.tau(Options(run=str(ponder), out=tmp_path / "file"))
    with pytest.raises(FileNotFoundError, match="does not exist: draw it once"):
        analyze.converge(Options(out=tmp_path / "empty", redraw=True))
    with pytest.raises(FileNotFoundError, match="without --redraw"):
        analyze.heatmap(Options(out=tmp_path / "empty", redraw=True))


def test_converge_of_ponderlm2(config, tmp_path):
    """Catches a figure that is refused to the other method that iterates."""
    model = replace(config.model, method="ponderlm2", router="always")
    run, _ = train(replace(config, steps=1, model=model))
    analyze.converge(Options(run=str(run), windows=2, out=tmp_path))
    rows = read_csv(tmp_path / "converge.csv")
    assert len(rows) == 13 and rows[0]["latents"] > rows[4]["latents"] > 0 == rows[0]["router"]


def test_checkpoint(runs, tmp_path):
    """Catches a checkpoint of a run that is taken for something else."""
    checkpoint = next(runs[0].glob("step-*"))
    analyze.converge(Options(run=str(checkpoint), windows=1))
    assert (runs[0] / f"report-{checkpoint.name}/converge.png").exists()
    with pytest.raises(FileNotFoundError, match="no train"):
        read_run(tmp_path)


def test_heatmap_of_a_text(runs, tmp_path, capsys):
    """Catches texts that are too short, too long or missing, and one that is not the file's."""
    ponder, _ = runs
    options, text = Options(run=str(ponder), out=tmp_path), tmp_path / "mine.txt"
    text.write_text("fox <b>", encoding="utf-8")
    analyze.heatmap(options, text)
    fields = json.loads((tmp_path / "heatmap.json").read_text())
    assert "".join(token["text"] for token in fields["tokens"]) == "fox <b>"
    for content, message in (("", "0 tokens"), ("a", "1 tokens")):
        text.write_text(content)
        with pytest.raises(ValueError, match=message):
            analyze.heatmap(options, text)
    with pytest.raises(FileNotFoundError):
        analyze.heatmap(options, tmp_path / "nowhere.txt")
    text.write_text("a" * 5000)
    analyze.heatmap(options, text)
    assert "of 5,000 tokens the first 4,096 are shown" in capsys.readouterr().out


def test_command_line(runs):
    """Catches a subcommand whose flags cannot be parsed."""
    for name in (*COMMANDS, "report", "pareto", "depth", "hops"):
        command = [sys.executable, str(ROOT / "analyze.py"), name, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "--redraw" in done.stdout, done.stderr
