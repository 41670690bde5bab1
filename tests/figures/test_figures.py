"""What is measured of one run, its pages, and the command line."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import small_model
from pydantic import ValidationError

from lab.common import command_line
from lab.figures.__main__ import FIGURES, main
from lab.figures.budget import Budget
from lab.figures.comparing import Pareto
from lab.figures.frontier import Frontier
from lab.figures.lookup import Lookup
from lab.figures.pages import Heatmap, Report
from lab.figures.subject import decoded, measure
from model import UserError

ROOT = Path(__file__).parent.parent.parent
NAMES = ("converge", "buckets", "shift", "tokens", "tau")


@pytest.mark.parametrize("tau", [0.3, 0.0])
@pytest.mark.parametrize("method", ["ponderlm3", "grid"])
@torch.no_grad()
def test_measured_is_what_decoding_does(tau, method, subject):
    """Catches soft masks where hard ones are said, and the other way round; losses of another depth; and a
    Jacobi iteration on the grid."""
    model = small_model(seed=2, method=method)
    one = subject(model, windows=2, tau=tau)
    (loss, steps), (s, w, ce), at = decoded(one), measure(one), 0
    for row in one.windows:
        cache, states = model.new_cache(), model.states(row[None, :-1])
        for t in range(8):
            logits, k = model.ponder_token(int(row[t]), t, cache, tau)
            assert loss[at].item() == pytest.approx(F.cross_entropy(logits, row[t + 1]).item(), abs=3e-5)
            assert steps[at] == k
            mixed = model.integrate(states[0][:, t : t + 1], states[1][:, t : t + 1], torch.tensor([[3]]))
            last = model.cross_entropy(mixed, row[None, t + 1 : t + 2])
            assert ce[at, 3].item() == pytest.approx(last.item(), abs=1e-3)
            torch.testing.assert_close(w[at], states[2][0, t].exp(), rtol=0, atol=1e-3)
            assert w[at, 1:].tolist() == pytest.approx(s[at].flip(0).cumsum(0).flip(0)[1:].tolist())
            at += 1
    assert ce[:, 0].std() > 0.1 and at == len(ce) == len(loss)


def test_report(trained, tmp_path):
    """Catches a figure, table or setting that is missing on the page, and a flag that changes nothing."""
    out, data = tmp_path / "report", str(trained.parent / "text.txt")
    reference = str(trained / "plain")
    Report(run=str(trained / "ponder"), data=data, reference=reference, windows=8, out=out).draw()
    page = (out / "index.html").read_text(encoding="utf-8")
    for name in NAMES:
        assert f'<img src="{name}.png"' in page and f'href="{name}.csv"' in page
        assert (out / f"{name}.png").stat().st_size > 5000
    texts = ('href="heatmap.html"', "executed steps at tau = 0.0001", "hard-stopped", "paper flops")
    for text in (*texts, "another model", "stopped at tau = 0.0001", "on 8 validation windows"):
        assert text in page
    assert "&#34;ponder_steps&#34;: 2" in page and page.count("<table>") == 1 + len(NAMES)
    assert "http" not in page and page.count("src=") == len(NAMES)


def test_report_on_the_grid(trained, tmp_path):
    """Catches a figure of an iteration where there is none, and a crash where a word has no token."""
    run = shutil.copytree(trained / "ponder", tmp_path / "grid")
    for file, place in (("config.json", ()), ("train.json", ("model",))):
        content = json.loads((run / file).read_text())
        (content[place[0]] if place else content)["method"] = "grid"
        (run / file).write_text(json.dumps(content))
    Report(run=str(run), data=str(trained.parent / "text.txt"), windows=1).draw()
    page = (run / "report/index.html").read_text()
    assert page.count("<img") == 4 and "converge" not in page and "<td>nan</td>" in page


def test_refused(trained, tmp_path):
    """Catches a page of a model that it is not for, a file that is opened because a stranger's run names it,
    a text that is not the one that the run was scored on, and values out of bounds."""
    text, other = (str(trained.parent / name) for name in ("text.txt", "other.txt"))
    for command, run, flags, message in (
        (Heatmap, "plain", {}, "is of method vanilla: it has no router"),
        (
            Heatmap,
            "ponder",
            {"data": None},
            "ponder was trained on .*text.txt': give this text again, by --data",
        ),
        (Heatmap, "ponder", {"data": other}, "other.txt is not the text that .*ponder was scored on"),
        (Heatmap, "lookup-0", {}, "text.txt has ids of another tokenizer than"),
        (Report, "ponder", {"reference": str(trained / "lookup-0")}, "--reference .* has another tokenizer"),
        (Report, "ponder", {"windows": 0}, r"windows\n.* greater than or equal to 1"),
        (Report, "ponder", {"tau": 2.0}, r"tau\n.* less than or equal to 1"),
    ):
        with pytest.raises((UserError, ValidationError), match=message):
            command(run=str(trained / run), out=tmp_path, **{"data": text} | flags).draw()


def test_heatmap_of_a_text(trained, tmp_path, capsys):
    """Catches texts that are too short or too long, and one that is not the file's."""
    text, data = tmp_path / "mine.txt", str(trained.parent / "text.txt")

    def draw(content):
        text.write_text(content, encoding="utf-8")
        Heatmap(run=str(trained / "ponder"), data=data, out=tmp_path, text=text).draw()

    draw("fox <b>")
    page = (tmp_path / "heatmap.html").read_text()
    assert re.findall(r'"text": "([^"]*)"', page)[:4] == ["f", "o", "x", " "]
    for content, message in (("", "0 tokens"), ("a", "1 tokens")):
        with pytest.raises(UserError, match=message):
            draw(content)
    draw("a" * 5000)
    assert "of 5,000 tokens the first 4,096 are shown" in capsys.readouterr().out


def test_command_line(trained, tmp_path, capsys):
    """Catches a figure whose flags cannot be parsed or do not arrive, or without a description; and an error
    that is a page."""
    for figure in FIGURES:
        with pytest.raises(SystemExit) as stop:
            main([figure.__name__.lower(), "--help"])
        assert stop.value.code == 0 and figure.__doc__[:40] in capsys.readouterr().out
    flags = ["--data", str(trained.parent / "text.txt"), "--tau", "0.5", "--out", str(tmp_path)]
    main(["heatmap", "--run", str(trained / "ponder"), *flags])
    assert "stopped at\n&tau; = 0.5;" in (tmp_path / "heatmap.html").read_text()
    with pytest.raises(SystemExit, match=r"error: windows = 0: it should be greater"):
        command_line(lambda: main(["report", "--windows", "0"]))


@pytest.mark.slow
def test_published_figures(tmp_path):
    """Catches a published figure that its published numbers do not draw, to the byte (with the versions of
    lab/requirements.txt)."""
    shown = ROOT / "docs/figures"
    for file in shown.glob("*.csv"):
        shutil.copy(file, tmp_path)
    for command in (Pareto, Frontier, Budget, Lookup):
        command(out=tmp_path, redraw=True).draw()
        drawn = tmp_path / f"{command.__name__.lower()}.png"
        assert drawn.read_bytes() == (shown / drawn.name).read_bytes(), drawn.name
