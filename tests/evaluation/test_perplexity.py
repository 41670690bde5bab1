"""`python -m evaluation` on texts: what is reported, printed, saved and refused."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import small_model

from corpus.tokenizers import Tokenizer
from evaluation.__main__ import Options, main
from evaluation.perplexity import summarise
from evaluation.scoring import Window, score
from interop import save
from runtime import command_line

RAW = "naïve café\r\n".encode() * 10 + b"\xff"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Here are the directory `model`, an `empty` text, and `text`, whose bytes are RAW."""
    monkeypatch.chdir(tmp_path)
    save(small_model(vocab_size=257, block_size=16).float(), tmp_path / "model")
    Tokenizer.bytes().save(tmp_path / "model" / "tokenizer.json")
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
    assert (
        "bits_per_byte" not in json.loads((folder / "part.json").read_text())["soft"]
    )  # of a part: which bytes?


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
