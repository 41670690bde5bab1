"""`python -m lab evaluate` on texts: what is reported, printed, saved and refused."""

import json
import math
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign import KINDS, make_tokenizer
from lab_helpers import method_model, same_weights, save_for_bytes, small_model

from data import Tokenizer, UserError, read_json
from lab.evaluation import __main__ as perplexity
from lab.evaluation.__main__ import Options, main, score_texts
from lab.evaluation.scoring import cut, score
from lab.evaluation.texts import own_texts, validation_text
from lab.interop.weights import load, save
from lab.methods import configure
from lab.train import LabConfig, train

RAW = "naïve café\r\n".encode() * 60 + b"\xff"


@pytest.fixture
def folder(tmp_path):
    """Here are the directory `model`, an `empty` text, and `text`, whose bytes are RAW."""
    save_for_bytes(small_model(vocab_size=257, block_size=16), tmp_path / "model")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "text").write_bytes(RAW)
    return tmp_path


def test_report(folder, capsys):
    """Catches bytes of something else than the file, and numbers saved otherwise than printed."""
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


def test_a_loss_that_is_huge():
    """Catches a perplexity beyond all numbers that ends the command: it is infinite."""
    model = method_model("vanilla", ponder_steps=0)
    model.lm_head.weight.data *= 1e6
    result = score_texts(model, "a text", [np.arange(30)], None, 0.3)
    assert result["soft"]["loss"] > 709 and result["soft"]["perplexity"] == math.inf


@pytest.mark.parametrize("method", ["ponderlm3", "looped", "mor-token"])
def test_costs(method):
    """Catches steps of the soft form said of decoding, and the cost of K steps where fewer were taken."""
    text, model = (
        torch.randint(31, (30,), generator=torch.Generator().manual_seed(0)).numpy(),
        method_model(method),
    )
    result = score_texts(model, "a text", [text], None, 0.3)
    soft, hard = result["soft"], result["hard"]
    assert hard["steps"] == score(model, cut([text], 32), 0.3).steps.double().mean()
    assert soft["steps"] == (3 if method == "ponderlm3" else hard["steps"])
    assert method != "ponderlm3" or 3 > hard["steps"] > 0
    assert hard["paper_flops"] / soft["paper_flops"] == pytest.approx(
        (1 + hard["steps"]) / (1 + soft["steps"])
    )


@pytest.mark.parametrize(
    "kwargs,words", [(dict(data="empty"), "--data empty"), ({}, "model is no run.*--data")]
)
def test_wrong_options(folder, kwargs, words):
    """Catches a stack trace, or a score of something else than was asked for."""
    with pytest.raises(UserError, match=words):
        main(Options("model", device="cpu", **kwargs))


def test_texts(folder):
    """Catches texts of a .jsonl file that are scored as JSON, or as one, and other bytes than a file's."""
    (folder / "two.jsonl").write_text('{"text": "ab"}\n{"text": "café\\r\\n"}\n', encoding="utf-8")
    name, ids, size = own_texts("two.jsonl", Tokenizer.named("bytes"))
    assert [bytes(x[1:].astype(np.uint8)) for x in ids] == [b"ab", "café\r\n".encode()]
    assert {int(x[0]) for x in ids} == {256} and (name, size) == ("two.jsonl", 9)


def test_memory(folder):
    """Catches windows that are made before it is known which are scored: 40 times as much as the text."""
    (folder / "large").write_bytes(b"a line of text\n" * 200_000)
    model, tokenizer = load("model"), Tokenizer.named("bytes")
    tracemalloc.start()
    score_texts(model, *own_texts("large", tokenizer), 0.3, windows=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * 3e6


@pytest.mark.parametrize("kind", KINDS)
def test_bytes(folder, kind, config, shape):
    """Catches bytes of what a tokenizer adds to a text, and those of a token that is not predicted."""
    _, tokenizer = make_tokenizer(folder / "llama", kind)
    text = "\n".join(["the quick brown fox"] * 400)
    Path("words.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text.split("\n")))
    model = small_model(method="vanilla", vocab_size=tokenizer.vocab_size, block_size=16)
    save(model, folder / "llama")
    shape = configure(shape, "vanilla", vocab_size=tokenizer.vocab_size)
    settings = dict(data="words.jsonl", tokenizer=str(folder / "llama"), name="words", steps=1)
    run, _ = train(LabConfig(**vars(config) | settings), shape)
    (meta,) = Path("data").glob("words*/meta.json")
    assert validation_text(run, "words.jsonl")[2] == read_json(meta)["val_bytes"] > 0
    assert own_texts("words.jsonl", tokenizer)[2] == len(text.replace("\n", ""))
    tokenizer.begin, tokenizer.end_of_text = [], None
    assert own_texts("words.jsonl", tokenizer)[2] is None
    shutil.rmtree(folder / "llama")  # named by train.json alone: not opened again
    assert validation_text(run, "words.jsonl")[2]


def test_windows_are_spread(folder, monkeypatch):
    """Catches windows of the beginning alone where more than half of all are asked for."""
    texts, scored, model = own_texts("text", Tokenizer.named("bytes")), [], load("model")
    every = cut(texts[1], 16)
    monkeypatch.setattr(
        perplexity, "score", lambda _, cuts, *more: scored.append(cuts) or score(model, cuts[:1])
    )
    for n in (1, 2, len(every) * 6 // 10, len(every) - 1, len(every), 10**6):
        score_texts(model, *texts, 0.3, windows=n)
        starts = scored.pop().places[:, 1] // 8
        assert len({*starts}) == len(starts) == min(n, len(every))
        if n > 1:
            assert (starts[0], starts[-1]) == (0, len(every) - 1)
            assert max(np.diff(starts)) - min(np.diff(starts)) <= 1


def test_difference(folder, capsys):
    """Catches a difference of other tokens, and numbers that are saved otherwise than printed."""
    save_for_bytes(small_model(vocab_size=257, block_size=16, seed=1), folder / "other")
    out = folder / "scores.json"
    main(Options("model", "text", against="other", tau=0.3, device="cpu", out=out))
    found, shown = json.loads(out.read_text()), capsys.readouterr().out
    ours, theirs = (load(folder / name) for name in ("model", "other"))
    windows = cut(own_texts("text", Tokenizer.named("bytes"))[1], 16)
    for kind in ("soft", "hard"):
        one, two = (getattr(score(model, windows, 0.3), kind) for model in (ours, theirs))
        assert found[kind]["difference"] == pytest.approx((one - two).mean().item(), abs=1e-5)
        assert f"{found[kind]['difference']:+.4f} ± {found[kind]['interval']:.4f}" in shown


def test_unlike_models(folder, config, shape):
    """Catches models that are compared although they read other ids, in windows that one of them has not, or
    that learned from another text, which may have had that of the other one's validation in it."""
    config = LabConfig(**vars(config) | {"steps": 1})
    Path("short.txt").write_text("pack my box with five dozen liquor jugs. " * 200)
    runs = {"run": (config.data, shape), "plain": (config.data, configure(shape, "vanilla", ponder_steps=0))}
    runs["other"] = "short.txt", shape
    for name, (data, model) in runs.items():
        train(LabConfig(**vars(config) | {"name": name, "data": data}), model)
    save_for_bytes(small_model(vocab_size=257, block_size=8), folder / "narrow")
    save_for_bytes(small_model(vocab_size=257, block_size=16), folder / "ids")
    Tokenizer.train([b"the the the"] * 9, 258).save(folder / "ids/tokenizer.json")
    how = dict(device="cpu", corpus=config.data)
    main(Options("out/run", against="out/plain", out=Path("scores.json"), **how))
    result = json.loads(Path("scores.json").read_text())
    assert result["text"] == "validation text of out/run" and result["soft"]["interval"] > 0
    assert result["bytes"] == result["tokens"]  # the first one is not predicted, the end is
    for other, options, words in (
        ("ids", how, "--against ids .*tokenizer"),
        ("out/other", how, "--against out/other .*corpus"),
        ("out/plain", {"windows": 99} | how, "99 windows"),
        ("out/plain", {"device": "cpu"}, "--corpus"),
    ):
        with pytest.raises(UserError, match=words):
            main(Options("out/run", against=other, **options))
    main(Options("out/run", "short.txt", against="out/other", device="cpu"))
    main(Options("out/run", "short.txt", against="narrow", device="cpu", out=Path("narrow.json")))
    found = json.loads(Path("narrow.json").read_text())["soft"]
    windows = cut(own_texts("short.txt", Tokenizer.named("bytes"))[1], 8)
    one, two = (score(load(name), windows).soft.double().mean() for name in ("out/run", "narrow"))
    assert found["difference"] == pytest.approx((one - two).item(), abs=1e-5)
    assert not same_weights(load("out/run"), load("out/other"))
