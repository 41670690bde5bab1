"""analyze.py: the numbers of each figure, against loops that say them plainly; and its command."""

import csv
import json
import math
from dataclasses import asdict
from pathlib import Path

import helpers
import pytest
import torch
import torch.nn.functional as F

import analyze
from checkpoint import save
from common import UserError
from data import Windows, open_corpus
from tokenizer import Tokenizer
from train import TrainConfig

FIGURES = "converge", "buckets", "shift", "tokens", "tau"
K, T = 3, 8


def small_model(seed=2, **settings):
    return helpers.small_model(seed, block_size=T, **settings)


@pytest.fixture(scope="module")
def model():
    """Random weights in float64, with a router whose tokens differ in their steps."""
    return small_model()


def rows_of(W, V=31):
    return torch.randint(V, (W, T + 1), generator=torch.Generator().manual_seed(0))


def average(values):
    values = list(values)
    return sum(values) / len(values)


@torch.no_grad()
def test_losses_by_depth(model, monkeypatch):
    """Catches another order, target, truncation or steps, and weights that are not made to sum to 1."""
    monkeypatch.setattr(analyze, "eval_batch_size", lambda *_: 2)
    windows = rows_of(5)
    ce, steps = analyze.losses_by_depth(model, windows, 0.3)
    at = 0
    for row in windows:
        h, s, log_w = model.jacobi(row[None, :-1], R=24)
        for t in range(T):
            mixed, weight = 0, 0
            for i in range(K + 1):
                mixed, weight = mixed + s[0, t, i] * h[0, t, i], weight + s[0, t, i]
                p = model.lm_head(mixed / weight).softmax(-1)[row[t + 1]]
                assert ce[at, i].item() == pytest.approx(-p.log().item(), abs=1e-3)
            assert steps[at] == max(k for k in range(K + 1) if log_w[0, t, k].exp() >= 0.3)
            at += 1
    assert at == len(ce) == len(steps) and len({*steps.tolist()}) > 2


@pytest.mark.parametrize("tau, alpha", [(0.3, 0.0), (0.0, 0.0), (0.1, -2.0)])
def test_decoded_is_what_decoding_does(model, tau, alpha):
    """Catches soft masks where hard ones are said, a forgotten alpha, and other steps."""
    windows = rows_of(2)
    loss, steps = analyze.decoded(model, windows, tau, alpha)
    at = 0
    for row in windows:
        cache = model.new_cache()
        for t in range(T):
            logits, k = model.ponder_token(int(row[t]), t, cache, tau, alpha)
            assert loss[at].item() == pytest.approx(F.cross_entropy(logits, row[t + 1]).item(), abs=1e-3)
            assert steps[at] == k
            at += 1


@torch.no_grad()
def test_converge(model):
    """Catches refinements one off, errors of other slots, no fixed point, and a model left in float64."""
    single, windows = small_model().float(), rows_of(2)
    rows = analyze.converge(single, windows, most=K * T)
    assert single.lm_head.weight.dtype == torch.float32
    model, idx = single.double(), windows[:, :-1]
    fixed, fixed_s, _ = model.jacobi(idx, R=K * T)
    for n, row in enumerate(rows):
        assert row["refinements"] == n
        h, s, _ = model.jacobi(idx, R=n)
        for key, now, then in (("latents", h[:, :, :K], fixed[:, :, :K]), ("s", s, fixed_s)):
            pairs = [(now[b, t], then[b, t]) for b in range(2) for t in range(T)]
            errors = [((x - y) ** 2).mean().sqrt().item() for x, y in pairs]
            assert row[key] == pytest.approx(average(errors), rel=1e-3, abs=1e-12)
    assert rows[0]["latents"] > rows[1]["latents"] > 1e-3 and rows[-1]["latents"] < 1e-12


def test_exponential_fit():
    """Catches a fit that misses the planted decay, another R^2, and rounding or zeros that enter it."""
    rounding = [max(0.3 * 0.02**n, 1e-16) for n in range(12)]
    assert analyze.exponential_fit(range(12), rounding) == pytest.approx((0.02, 0.3, 1))
    L, _, r2 = analyze.exponential_fit([0, 1, 2, 3], errors := [1.0, 0.5, 0.1, 0])
    slope = math.log(0.1) / 2
    total = sum((math.log(e) - math.log(0.05) / 3) ** 2 for e in errors[:3])
    assert pytest.approx(math.exp(slope)) == L and r2 == pytest.approx(2 * slope**2 / total)
    assert all(map(math.isnan, analyze.exponential_fit([0, 1], [0, 0])))


def test_buckets_and_shift(model):
    """Catches gains of the wrong sign, step or bucket; a change to another alpha, and one not passed on."""
    windows = rows_of(4)
    ce, steps = analyze.losses_by_depth(model, windows, 0.3)
    order = sorted(range(len(ce)), key=lambda i: ce[i, 0].item())
    parts = [[i for rank, i in enumerate(order) if rank * 3 // len(order) == b] for b in range(3)]
    found, moved = analyze.buckets(model, windows, 0.3), analyze.shift(model, windows, 0.3, alphas=(-3, 3))
    assert [row["bucket"] for row in found] == [*analyze.BUCKETS]
    assert [row["alpha"] for row in moved] == 3 * [-3] + 3 * [0] + 3 * [3]
    before, _ = analyze.decoded(model, windows, 0.3)
    for name, mine, row in zip(analyze.BUCKETS, parts, found, strict=True):
        expected = {f"gain_{k}": average((ce[i, k - 1] - ce[i, k]).item() for i in mine) for k in (1, 2, 3)}
        expected |= {"difficulty": average(ce[i, 0].item() for i in mine)}
        expected |= {"steps": average(steps[i].item() for i in mine)}
        close = {key: pytest.approx(value) for key, value in expected.items()}
        assert row == close | {"bucket": name, "tokens": len(mine)}
        for alpha in (-3, 0, 3):
            (row,) = [row for row in moved if (row["alpha"], row["bucket"]) == (alpha, name)]
            loss, taken = analyze.decoded(model, windows, 0.3, alpha)
            assert row["change"] == pytest.approx(average((loss - before)[i].item() for i in mine))
            assert row["steps"] == pytest.approx(average(taken[i].item() for i in mine))


def test_tau_curve(model):
    """Catches a change to something else than all K steps, and rows that are not in order."""
    windows = rows_of(2)
    rows = analyze.tau_curve(model, windows, (1, 0.3, 0))
    assert [row["tau"] for row in rows] == [0, 0.3, 1]
    full, (loss, steps) = analyze.decoded(model, windows, 0.0)[0], analyze.decoded(model, windows, 0.3)
    assert (rows[0]["steps"], rows[0]["change"]) == (K, 0)
    assert rows[1]["steps"] == pytest.approx(average(steps.tolist()))
    assert rows[1]["loss"] == pytest.approx(average(loss.tolist()))
    assert rows[1]["perplexity"] == pytest.approx(math.exp(average(loss.tolist())))
    assert rows[1]["change"] == pytest.approx(average((loss - full).tolist()))
    assert rows[2]["steps"] < rows[1]["steps"] < K
    assert analyze.perplexity(1.0) == math.e and analyze.perplexity(1e4) == math.inf


def test_words():
    """Catches words cut by a window's ends or joined with other characters, and spaces."""
    single = [bytes([b]) for b in b"he cat, it's a do"]
    assert [*analyze.find_words(single)] == [("cat", 3, 5), ("it", 8, 9), ("s", 11, 11), ("a", 13, 13)]
    pieces = [b" the", b" bi", b"cy", b"cle", b" of", b"f1", b" in", b"-", b"to", b" it"]
    assert [*analyze.find_words(pieces)] == [("the", 0, 0), ("bicycle", 1, 3), ("in", 6, 6), ("to", 8, 8)]


def test_tokens(model, monkeypatch):
    """Catches counts or shares of the wrong tokens, ends for insides, words across windows, means of none."""
    steps = torch.tensor([3, 0, 1, 2, 3, 1, 3, 0, 0, 3, 3, 1, 2, 0, 3])

    def rows_of_texts(texts, tokenizer, words, least):
        windows = torch.tensor([[*text, 0] for text in texts])
        monkeypatch.setattr(analyze, "decoded", lambda *_: (None, steps[: windows[:, :-1].numel()]))
        return analyze.tokens(model, windows, tokenizer, words=words, least=least)

    rows = rows_of_texts([b" the a the ofx "], Tokenizer.named("bytes"), ("the", "a", "of"), 2)
    found = {(row["kind"], row["text"]): row for row in rows}
    names = [("token", c) for c in " eht"] + [("word", w) for w in ("the", "a", "of")]
    assert [*found] == [*names, ("compound", "inside a word"), ("compound", "at its end")]
    the, t = found["word", "the"], found["token", "t"]
    assert (the["tokens"], the["steps"], the["share_2"], the["share_3"]) == (2, 2.5, 0.5, 0.5)
    assert (t["tokens"], t["steps"], t["share_0"]) == (2, 0, 1)
    assert found["word", "of"]["tokens"] == 0 and math.isnan(found["word", "of"]["steps"])
    shares = lambda text: [found["compound", text][f"share_{k}"] for k in range(4)]  # noqa: E731
    # inside: t h, t h, o f; at the end: e, e, x
    assert shares("inside a word") == pytest.approx([3 / 6, 2 / 6, 1 / 6, 0])
    assert shares("at its end") == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    assert rows_of_texts([b" the", b" ofx"], Tokenizer.named("bytes"), ("the",), 1)[-3]["tokens"] == 0
    assert analyze.show_token(b"\n\xe2 a") == "\\n\\xe2 a"
    alike = rows_of_texts([[0, 1, 1, 1]], Tokenizer("bpe", [b"\n", b"\\n"]), (), 1)
    assert [(row["text"], row["tokens"]) for row in alike[:2]] == [("\\n", 1), ("\\n", 3)]


# -- Several runs ----------------------------------------------------------------------------------


def finish(folder, method="ponderlm3", K=3, steps=1.0, loss=1.0, text="a", windows=8, asked=8):
    """What a finished run leaves, as far as it is compared."""
    folder.mkdir()
    shape = {"method": method, "ponder_steps": K, "block_size": 16}
    content = {"config": {"eval_windows": asked}, "model": shape}
    content["corpus"] = {"val_sha256": text, "tokenizer": "t"}
    (folder / "train.json").write_text(json.dumps(content))
    results = {"windows": windows, "hard": {"steps": steps, "loss": loss}}
    (folder / "results.json").write_text(json.dumps(results))
    return folder


@pytest.mark.parametrize("figure", ["curve", "tau"])
def test_a_run_that_is_not_there(figure):
    """Catches a folder that is made for a mistyped name, which a training of that name is then refused."""
    with pytest.raises(UserError, match="out/typo is not a folder"):
        analyze.main(analyze.Options(figure, run=Path("out/typo")))
    assert not Path("out/typo").exists()


def test_runs_of_one_name(tmp_path):
    """Catches two runs that are drawn as one line, and a name that is drawn as a formula."""
    runs = [tmp_path / "a/base", tmp_path / "b/base", tmp_path / "$\\foo$"]
    for run in runs:
        run.mkdir(parents=True)
        (run / "log.jsonl").write_text('{"step": 1, "loss": 2.0, "ce": 2.0, "K_hat": 1.0}\n')
    rows = analyze.curve(runs)
    assert [row["run"] for row in rows] == [str(runs[0]), str(runs[1]), "$\\foo$"]
    figure = draw("curve", rows)
    assert len(figure.axes[1].lines) == 3
    figure.savefig(tmp_path / "curve.png")


def test_pareto(tmp_path, capsys):
    """Catches numbers of another run, a frontier or ring with a wrong point, a figure that goes elsewhere."""
    runs = [
        finish(tmp_path / "a", steps=1.0, loss=1.0),
        finish(tmp_path / "b", steps=1.0, loss=1.2, asked=20),  # of 8 that there are; worse than a
        finish(tmp_path / "c", "two", K=2, steps=2.0, loss=0.9),
        finish(tmp_path / "d", "two", K=0, steps=0.0, loss=2.0),
        finish(tmp_path / "diverged", K=1, steps=3.0, loss=1e9),
        tmp_path / "unfinished",
    ]
    rows = analyze.pareto(runs)
    assert "unfinished" in capsys.readouterr().out
    assert [row["run"] for row in rows] == ["a", "b", "c", "d", "diverged"]
    assert [row["method"] for row in rows[:4]] == ["ponderlm3", "ponderlm3", "two", "two"]
    assert [(row["K"], row["steps"], row["loss"]) for row in rows[1:3]] == [(3, 1.0, 1.2), (2, 2.0, 0.9)]
    assert rows[2]["perplexity"] == pytest.approx(math.exp(0.9)) and rows[4]["perplexity"] == math.inf
    assert [row["frontier"] for row in rows] == [1, 0, 1, 1, 0]
    (axes,) = draw("pareto", rows).axes
    (rings,) = axes.collections[-1:]
    assert [x for x, _ in rings.get_offsets().tolist()] == [1, 2, 0]
    with pytest.raises(UserError, match="tau does not use --runs: omit it"):
        command("tau", runs=tuple(map(str, runs)))
    command("pareto", runs=tuple(map(str, runs)))
    assert "ponderlm3" in capsys.readouterr().out and Path("out/analyze/pareto.png").stat().st_size > 5000


@pytest.mark.parametrize("other", [dict(text="b"), dict(windows=7)])
def test_pareto_refuses(other, tmp_path):
    """Catches a comparison of what cannot be compared, and a stack trace for a damaged run."""
    runs = [finish(tmp_path / "a"), finish(tmp_path / "b", **other)]
    with pytest.raises(UserError, match="evaluated on different data"):
        analyze.pareto(runs)
    with pytest.raises(UserError, match="--runs"):
        analyze.pareto([tmp_path])
    for hard in ({}, {"steps": 1, "loss": "1.0.0"}, {"steps": [1], "loss": 1}, None):
        (runs[0] / "results.json").write_text(json.dumps({"hard": hard}))
        with pytest.raises(UserError, match=r"a: .*results\.json"):
            analyze.pareto(runs)


def test_curve(tmp_path, capsys):
    """Catches a point of another run or step, a run without a log, and one that has logged nothing."""
    rows = [
        {"step": 0, "torch": "2"},
        {"step": 20, "loss": 3.0, "ce": 2.5, "K_hat": 2.9, "tokens_per_second": None},
    ]
    rows += [{"step": 20, "val": 2.6}, {"step": 40, "loss": 2.0, "ce": 1.5, "K_hat": 1.9}]
    for name, kept in (("a", rows), ("b", rows[:2]), ("new", rows[:1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    found = analyze.curve([tmp_path / "a", tmp_path / "b"])
    assert [(row["run"], row["step"]) for row in found] == [("a", 20), ("a", 20), ("a", 40), ("b", 20)]
    assert [row["ce"] for row in found if not math.isnan(row["ce"])] == [2.5, 1.5, 2.5]
    left, right = draw("curve", found).axes
    assert [line.get_xydata().tolist() for line in left.lines[:2]] == [[[20, 2.5], [40, 1.5]], [[20, 2.6]]]
    assert right.lines[0].get_xydata().tolist() == [[20, 2.9], [40, 1.9]]
    with pytest.raises(UserError, match=r"no log\.jsonl"):
        analyze.curve([tmp_path])
    with pytest.raises(UserError, match="nothing is logged yet"):
        analyze.curve([tmp_path / "new"])
    analyze.main(analyze.Options("curve", runs=(str(tmp_path / "a"),)))
    assert (tmp_path / "a/report/curve.png").stat().st_size > 5000
    analyze.main(analyze.Options("curve", runs=(str(tmp_path / "a"), str(tmp_path / "b"))))
    assert (
        Path("out/analyze/curve.csv").exists() and "written: out/analyze/curve.csv" in capsys.readouterr().out
    )


def test_glyphs_that_are_missing():
    """Catches labels that are boxes, since the font has no such character."""
    assert analyze.drawable("the é α") == "the é α"
    assert analyze.drawable("中 a") == "U+4E2D a"


# -- The command -----------------------------------------------------------------------------------


@pytest.fixture
def run():
    """A run of bytes, and the text that it was scored on."""
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    make_run("run")
    return Path("run")


def make_run(name, **settings):
    model = small_model(vocab_size=257, **settings).float()
    save(model, name)
    corpus = open_corpus("text.txt", "bytes", 257)
    corpus.tokenizer.save(Path(name, "tokenizer.json"))
    shape = {"method": model.method, **asdict(model.config)}
    config = asdict(TrainConfig(data="text.txt", name=name))
    content = {"config": config, "model": shape, "corpus": corpus.fingerprint()}
    Path(name, "train.json").write_text(json.dumps(content))


def test_a_padded_vocabulary():
    """Catches a text that is prepared anew for the padded vocabulary of the model, and then refused."""
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    corpus = open_corpus("text.txt", "bpe", 265)
    config = asdict(TrainConfig(data="text.txt", tokenizer="bpe"))
    content = {"config": config, "model": {"vocab_size": 265}, "corpus": corpus.fingerprint()}
    Path("run").mkdir()
    Path("run/train.json").write_text(json.dumps(content))
    shape = small_model(vocab_size=320).config
    windows = analyze.open_windows("run", shape, 2, "text.txt")
    assert torch.equal(windows, Windows(corpus.val, shape.block_size, 0).stack(0, 2))


def read_csv(file):
    with open(file, newline="", encoding="utf-8") as stream:
        return [*csv.DictReader(stream)]


def draw(figure, rows):
    title, panels, into = analyze.DRAWINGS[figure]
    drawn, axes = analyze.sheet(title, panels)
    into(rows, *axes)
    return drawn


def command(figure, **options):
    device = {} if figure == "pareto" else {"device": "cpu"}
    analyze.main(analyze.Options(figure, **device, **options))


def test_draw(run, capsys):
    """Catches a figure that cannot be drawn, and a number of windows that changes nothing."""
    for figure in FIGURES:
        command(figure, run=run, data="text.txt", windows=8)
        assert "run/report/" in capsys.readouterr().out
    written = {file.name for file in Path("run/report").iterdir()}
    assert written == {f"{figure}.{kind}" for figure in FIGURES for kind in ("csv", "png")}
    assert sum(int(row["tokens"]) for row in read_csv("run/report/buckets.csv")) == 8 * T
    for figure in ("buckets", "tokens", "tau"):  # with nothing to count for a word or a place
        command(figure, run=run, data="text.txt", windows=1, tau=0.45)
    assert "0.45" in [row["tau"] for row in read_csv("run/report/tau.csv")]


def test_texts_stay_texts(tmp_path):
    """Catches a text with a comma or quote that comes back as another, and dollars as mathematics."""
    numbers = dict(tokens=9, steps=1.0, share_0=0.5, share_1=0.5)
    texts = ("token", "$$"), ("token", ',"'), ("compound", "inside a word"), ("compound", "at its end")
    rows = [dict(kind=kind, text=text) | numbers for kind, text in texts]
    draw("tokens", rows).savefig(tmp_path / "x.png")
    analyze.write_csv(tmp_path / "x.csv", rows)
    assert [row["text"] for row in read_csv(tmp_path / "x.csv")] == [text for _, text in texts]


def test_refused(run):
    """Catches a file opened since a stranger names it, a figure of another text, values out of bounds."""
    Path("other.txt").write_text("something else entirely. " * 400)
    make_run("plain", ponder_steps=0)
    given = dict(run=run, data="text.txt")
    for changed, message in (
        (dict(data=None), "'text.txt'.*--data"),
        (dict(data="other.txt"), "other.txt is not the text"),
        (dict(windows=0), "windows"),
        (dict(tau=2.0), "tau"),
        (dict(run=Path("plain")), "plain is a model without pondering steps"),
        (dict(run=Path("none")), "none is not a folder: give the directory of a trained run"),
    ):
        with pytest.raises((UserError, ValueError), match=message):
            command("tau", **given | changed)
    content = json.loads((run / "train.json").read_text())
    content["model"] |= {"block_size": [4], "vocab_size": "x"}  # what is drawn is of config.json
    content["config"] |= {"init_from": None, "attention": "exact"}  # as the lab has it
    (run / "train.json").write_text(json.dumps(content))
    command("tau", **given, windows=1)
    content["config"] |= {"tokenizer": "models/other"}
    (run / "train.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"prepare text\.txt --tokenizer run --to FOLDER"):
        command("tau", **given, windows=1)
    (prepared,) = Path("data").glob("text-*")
    command("tau", **given | dict(data=str(prepared)), windows=1)  # encoded already
    content["config"] |= {"tokenizer": "auto", "init_from": "models/other"}
    (run / "train.json").write_text(json.dumps(content))
    command("tau", **given, windows=1)  # bytes, whoever made them
    content["corpus"] |= {"tokenizer": "x"}
    (run / "train.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="has the tokenizer of another model"):
        command("tau", **given, windows=1)
