"""`python -m lab evaluate` on texts: what is reported, printed, saved and refused."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from foreign import KINDS, make_tokenizer
from lab_helpers import method_model, save_for_bytes, small_model

from common import UserError, read_json
from lab.evaluation.__main__ import Options, main, score_texts
from lab.evaluation.scoring import cut, score
from lab.evaluation.texts import own_texts, validation_text
from lab.interop.weights import load, save
from lab.methods import configure
from lab.train import LabConfig, train
from tokenizer import Tokenizer

RAW = "naïve café\r\n".encode() * 60 + b"\xff"


@pytest.fixture
def folder(tmp_path):
    """Here are the directory `model`, an `empty` text, and `text`, whose bytes are RAW."""
    save_for_bytes(small_model(vocab_size=257, block_size=16), tmp_path / "model")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "text").write_bytes(RAW)
    return tmp_path


def test_report(folder, capsys):
    """Catches numbers saved otherwise than printed, and a difference that is not that of the two models in
    windows of the smaller one."""
    save_for_bytes(small_model(vocab_size=257, block_size=8, seed=1), folder / "other")
    main(Options("model", "text", against="other", tau=0.3, device="cpu", out=Path("scores.json")))
    found, shown = read_json("scores.json"), capsys.readouterr().out
    ours, theirs = (load(name) for name in ("model", "other"))
    texts = own_texts("text", Tokenizer.named("bytes"))[1]
    assert found["bytes"] == found["tokens"] == len(RAW)
    for kind in ("soft", "hard"):
        row, one, two = (
            found[kind],
            *(getattr(score(x, texts, cut(texts, 8), 0.3), kind) for x in (ours, theirs)),
        )
        assert row["loss"] == pytest.approx(one.mean().item(), abs=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row["difference"] == pytest.approx((one - two).mean().item(), abs=1e-5)
        assert f"{row['difference']:+.4f} ± {row['interval']:.4f}" in shown and f"{row['loss']:.4f}" in shown


@pytest.mark.parametrize("method", ["ponderlm3", "looped", "mor-token"])
def test_costs(method):
    """Catches steps of the soft form said of decoding, and the cost of K steps where fewer were taken; a
    perplexity beyond all numbers that ends the command."""
    text = torch.randint(31, (30,), generator=torch.Generator().manual_seed(0)).numpy()
    model = method_model(method)
    result = score_texts(model, "a text", [text], None, 0.3)
    soft, hard = result["soft"], result["hard"]
    assert hard["steps"] == score(model, [text], cut([text], 32), 0.3).steps.double().mean()
    assert soft["steps"] == (3 if method == "ponderlm3" else hard["steps"])
    assert method != "ponderlm3" or 3 > hard["steps"] > 0
    parameters = sum(p.numel() for p in model.parameters())
    assert soft["paper_flops"] == 6 * parameters * (1 + soft["steps"])
    assert hard["paper_flops"] == 6 * parameters * (1 + hard["steps"])
    model.lm_head.weight.data *= 1e6
    assert score_texts(model, "a text", [text], None, 0.3)["soft"]["perplexity"] == math.inf


@pytest.mark.parametrize("kind", KINDS)
def test_bytes(folder, kind, config, shape, capsys):
    """Catches texts of a .jsonl file that are scored as JSON or as one, bytes of what a tokenizer adds to a
    text, those of a token that is not predicted, and of a part: which ones?"""
    _, tokenizer = make_tokenizer(folder / "llama", kind)
    lines = ["the quick brown fox", "café\r\n"] * 200
    Path("words.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    model = small_model(method="vanilla", vocab_size=tokenizer.vocab_size, block_size=16)
    save(model, folder / "llama")
    shape = configure(shape, "vanilla", vocab_size=tokenizer.vocab_size)
    settings = dict(data="words.jsonl", tokenizer=str(folder / "llama"), name="words", steps=1)
    run, _ = train(LabConfig(**vars(config) | settings), shape)
    (meta,) = Path("data").glob("words*/meta.json")
    assert validation_text(run, "words.jsonl")[2] == read_json(meta)["val_bytes"] > 0
    texts = own_texts("words.jsonl", tokenizer)
    assert texts[2] == len("".join(lines).encode()) and len(texts[1]) == 400
    assert tokenizer.decode(texts[1][1][1:]).decode().strip() == "café"
    found = score_texts(model, *texts, 0.3)
    bits = found["soft"]["loss"] / math.log(2) * found["tokens"] / texts[2]
    assert found["soft"]["bits_per_byte"] == pytest.approx(bits) and found["tokens"] != texts[2]
    assert "bits_per_byte" not in score_texts(model, *texts, 0.3, windows=2)["soft"]
    tokenizer.begin, tokenizer.end_of_text = [], None
    assert own_texts("words.jsonl", tokenizer)[2] is None
    Path("mixed").mkdir()
    Path("mixed/a.txt").write_bytes(b"text")
    Path("mixed/b.txt").write_bytes("text".encode("utf-16"))
    own_texts("mixed", Tokenizer.named("bytes"))
    assert "1 files in mixed have no text and are skipped: b.txt" in capsys.readouterr().out
    shutil.rmtree(folder / "llama")  # named by train.json alone: not opened again
    assert validation_text(run, "words.jsonl")[2]


def test_refused(folder, config, shape):
    """Catches a score of something else than was asked for, and models that are compared although they read
    other ids, or learned from another text, which may have had that of the other one's validation in it."""
    config = LabConfig(**vars(config) | {"steps": 1})
    Path("short.txt").write_text("pack my box with five dozen liquor jugs. " * 200)
    for name, data in (("run", config.data), ("other", "short.txt")):
        train(LabConfig(**vars(config) | {"name": name, "data": data}), shape)
    save_for_bytes(small_model(vocab_size=257, block_size=16), folder / "ids")
    Tokenizer.train([b"the the the"] * 9, 258).save(folder / "ids/tokenizer.json")
    for run, options, words in (
        ("model", dict(data="empty"), "--data empty"),
        ("model", dict(data="none.txt"), r"--data none\.txt does not exist"),
        ("model", dict(data="pydocs"), "use --corpus pydocs"),
        ("model", dict(data="short.txt", out=folder), "is a folder: name a file"),
        ("model", {}, "--data"),
        ("out/run", dict(corpus=config.data, against="ids"), "--against ids"),
        ("out/run", dict(corpus=config.data, against="model"), "model has no train.json, .* --data"),
        ("out/run", dict(corpus=config.data, against="out/other"), "--against out/other"),
        ("out/run", dict(corpus=config.data, against="out/run", windows=99), "99 windows"),
        ("out/run", {}, "--corpus"),
        ("out/run", dict(data="short.txt", corpus="x"), "--corpus x"),
        ("out/run", dict(corpus="short.txt"), "short.txt"),
    ):
        with pytest.raises(UserError, match=words):
            main(Options(run, device="cpu", **options))
    main(Options("out/run", corpus=config.data, device="cpu", windows=20, out=Path("new/scores.json")))
    assert read_json("new/scores.json")["text"] == "validation text of out/run"
