"""`python -m evaluation` on texts: what is reported, printed, saved and refused."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import save_for_bytes, small_model

from corpus.tokenizers import IdTokenizer, Tokenizer
from evaluation.__main__ import Options, main
from evaluation.perplexity import paired, summarise, texts_of
from evaluation.scoring import Window, cut, score
from interop import load
from runtime import UserError, command_line

RAW = "naïve café\r\n".encode() * 10 + b"\xff"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Here are the directory `model`, an `empty` text, and `text`, whose bytes are RAW."""
    monkeypatch.chdir(tmp_path)
    save_for_bytes(small_model(vocab_size=257, block_size=16), tmp_path / "model")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "text").write_bytes(RAW)
    return tmp_path


def test_report(folder, capsys):
    """Catches bytes that are counted on something else than the file, and numbers that are saved
    otherwise than printed."""
    out = folder / "scores.json"
    main(Options("model", "text", device="cpu", out=out))
    result = json.loads(out.read_text())
    assert result["bytes"] == len(RAW) == result["tokens"]
    soft = result["soft"]
    assert soft["bits_per_byte"] == pytest.approx(soft["loss"] / math.log(2))
    assert soft["perplexity"] == pytest.approx(math.exp(soft["loss"]))
    shown = capsys.readouterr().out
    assert f"{soft['loss']:.4f}" in shown and f"{soft['bits_per_byte']:.4f}" in shown
    main(Options("model", "text", windows=2, device="cpu", out=folder / "part.json"))
    part = json.loads((folder / "part.json").read_text())["soft"]
    assert "bits_per_byte" not in part  # of a part: which bytes?


def summary(model):
    text = torch.randint(31, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    scores = score(model, [Window(text, 1)], 0.3)
    return summarise(scores, model.config), scores.steps.double().mean()


def test_costs(method_model):
    """Catches the steps of the soft form reported for decoding."""
    result, _ = summary(method_model("ponderlm3"))
    assert result["soft"]["steps"] == 3 > result["hard"]["steps"] > 0
    ratio = result["hard"]["paper_flops"] / result["soft"]["paper_flops"]
    assert ratio == pytest.approx((1 + result["hard"]["steps"]) / 4)


@pytest.mark.parametrize("method", ["looped", "mor-token"])
def test_costs_without_a_soft_form(method, method_model):
    """Catches the cost of K steps for a model that took fewer: both rows are the same one."""
    result, steps = summary(method_model(method))
    assert result["soft"]["steps"] == result["hard"]["steps"] == steps


@pytest.mark.parametrize(
    "kwargs,message",
    [
        (dict(data="nowhere"), "--data nowhere: no such file"),
        (dict(data="empty"), "--data empty: .* without text"),
        (dict(data="text", out=Path("model/config.json")), "is there already"),
        (dict(), "train.json"),
    ],
)
def test_wrong_options(folder, kwargs, message):
    """Catches a stack trace, or a score of something else than was asked for."""
    with pytest.raises(SystemExit, match=message):
        command_line(lambda: main(Options("model", device="cpu", **kwargs)))


def test_difference(folder, capsys):
    """Catches a difference of other tokens, an interval by tokens instead of windows, and models
    that read other ids."""
    save_for_bytes(small_model(vocab_size=257, block_size=16, seed=1), folder / "other")
    how, out = dict(tau=0.3, windows=7, device="cpu"), folder / "scores.json"
    main(Options("model", "text", against="other", out=out, **how))
    found, shown = json.loads(out.read_text()), capsys.readouterr().out
    ours, theirs = (load(folder / name) for name in ("model", "other"))
    windows = cut(texts_of("text", Tokenizer.bytes())[0][0], 16)
    windows = windows[:: len(windows) // 7][:7]
    for kind in ("soft", "hard"):
        each = [
            getattr(score(ours, [w], 0.3), kind) - getattr(score(theirs, [w], 0.3), kind)
            for w in windows
        ]
        assert found[kind]["difference"] == pytest.approx(torch.cat(each).mean().item(), abs=1e-4)
        assert f"{found[kind]['difference']:+.4f} ± {found[kind]['interval']:.4f}" in shown
    even = [Window([0] * 9, 1)] * 4  # of 8 tokens each: the usual interval of four means
    x = torch.randn(32, generator=torch.Generator().manual_seed(0)).double()
    mean, half = paired(x, even)
    expected = 1.96 * x.view(4, 8).mean(1).std() / 2
    assert mean == pytest.approx(x.mean().item()) and half == pytest.approx(expected.item())
    IdTokenizer(257).save(folder / "other" / "tokenizer.json")
    with pytest.raises(UserError, match="--against other has another tokenizer than model"):
        main(Options("model", "text", against="other", **how))
