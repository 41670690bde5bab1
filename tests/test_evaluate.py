"""Perplexity of texts: against the simple decoder, and whatever is scored beside them."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import script, small_model
from test_methods import METHODS, method_model

from score import Window, bootstrap, cut, score
from tokenizer import Tokenizer

evaluate = script("evaluate")


def ids(n, seed=0):
    return torch.randint(31, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("n", [1, 2, 5, 9, 10, 16, 17, 40])
@pytest.mark.parametrize("T,stride", [(8, 8), (8, 4), (8, 1), (8, 5)])
def test_cut(n, T, stride):
    """Catches a token that is predicted twice or never, or from less context than was asked for."""
    text = list(range(n))
    windows = cut(text, T, stride)
    predicted = [i for w in windows for i in w.ids[w.first :]]
    assert predicted == text[1:]
    for window in windows:
        assert len(window.ids) <= T + 1 and window.ids == text[window.ids[0] :][: len(window.ids)]
        for place in range(window.first, len(window.ids)):
            assert place >= min(window.ids[place], T - stride + 1)


def decoder_losses(model, text, tau):
    """The losses of a text's tokens, and the steps before each, by the simple decoder."""
    cache, losses, steps = model.new_cache(), [], []
    for t, (token, following) in enumerate(pairwise(text)):
        logits, k = model.ponder_token(token, t, cache, tau)
        losses.append(-logits.log_softmax(-1)[following].item())
        steps.append(k)
    return losses, steps


@pytest.mark.parametrize("tau", [0, 0.3])
@pytest.mark.parametrize("method", METHODS)
def test_against_the_simple_decoder(method, tau):
    """Catches scores that decoding does not give: each token's loss to 1e-4 (the latents are
    settled to 1e-5), its steps exactly."""
    model, text = method_model(method), ids(20)
    scores = score(model, [Window(text, 1)], tau)
    losses, steps = decoder_losses(model, text, tau)
    torch.testing.assert_close(scores.hard, torch.tensor(losses).double(), atol=1e-4, rtol=0)
    assert scores.steps.tolist() == steps
    soft, _ = decoder_losses(model, text, 0)
    torch.testing.assert_close(scores.soft, torch.tensor(soft).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(scores.depths[:, -1], scores.soft, atol=1e-9, rtol=0)
    assert scores.depths.std(0).min() > 0.1  # states of zeros would score log V everywhere


@pytest.mark.parametrize("method", METHODS)
def test_batches_and_order_do_not_matter(method):
    """Catches padding that is seen, a tolerance that is shared, and scores in the wrong place."""
    model = method_model(method)
    windows = [Window(ids(n, n), 1 + n % 3) for n in (12, 5, 33, 7, 20, 4, 33)]
    alone = [score(model, [window], 0.3) for window in windows]
    for batch_tokens in (1, 50, 10_000):
        for order in (range(7), range(6, -1, -1)):
            together = score(model, [windows[i] for i in order], 0.3, batch_tokens)
            for place, i in enumerate(order):
                mine = together.window == place
                for name in ("soft", "hard", "steps", "depths"):
                    found, expected = getattr(together, name)[mine], getattr(alone[i], name)
                    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_bootstrap():
    """Catches an interval of single tokens, where tokens of a window hang together: of windows
    with one value each it is that of the mean of so many values."""
    generator = torch.Generator().manual_seed(0)
    value = 5 + torch.randn(400, generator=generator, dtype=torch.float64)
    window = torch.arange(400).repeat_interleave(50)
    low, high = bootstrap(window, value.repeat_interleave(50))
    half = 1.96 * value.std().item() / 20
    assert low < value.mean() < high and (high - low) / 2 == pytest.approx(half, rel=0.15)
    assert bootstrap(torch.zeros(5, dtype=torch.long), value[:5]) is None


def test_report(tmp_path, capsys):
    """Catches bytes that are counted on something else than the file, and numbers that are saved
    otherwise than printed."""
    model = small_model(vocab_size=257, block_size=16).float()
    model.save_pretrained(tmp_path / "model")
    Tokenizer.bytes().save(tmp_path / "model" / "tokenizer.json")
    raw = "naïve café\r\n".encode() * 10 + b"\xff"
    (tmp_path / "text").write_bytes(raw)
    out = tmp_path / "scores.json"
    evaluate.main(str(tmp_path / "model"), str(tmp_path / "text"), device="cpu", out=out)
    result = json.loads(out.read_text())
    assert result["bytes"] == len(raw) == result["tokens"]
    soft = result["soft"]
    assert soft["bits_per_byte"] == pytest.approx(soft["loss"] / math.log(2))
    assert soft["perplexity"] == pytest.approx(math.exp(soft["loss"]))
    assert soft["interval"][0] < soft["loss"] < soft["interval"][1]
    shown = capsys.readouterr().out
    assert f"{soft['loss']:.4f}" in shown and f"{soft['bits_per_byte']:.4f}" in shown
    evaluate.main(str(tmp_path / "model"), str(tmp_path / "text"), windows=2, device="cpu", out=out)
    assert "bits_per_byte" not in json.loads(out.read_text())["soft"]  # of a part: which bytes?


def test_costs():
    """Catches the steps of the soft form reported for decoding."""
    model = small_model(router_scale=12.0)
    result = evaluate.summarise(score(model, [Window(ids(30), 1)], 0.3), model.config)
    assert result["soft"]["steps"] == 3 > result["hard"]["steps"] > 0
    ratio = result["hard"]["paper_flops"] / result["soft"]["paper_flops"]
    assert ratio == pytest.approx((1 + result["hard"]["steps"]) / 4)


@pytest.mark.parametrize("method", ["looped", "mor-token"])
def test_costs_without_a_soft_form(method):
    """Catches the cost of K steps for a model that took fewer: both rows are the same one."""
    model = method_model(method)
    scores = score(model, [Window(ids(30), 1)], 0.3)
    result = evaluate.summarise(scores, model.config)
    assert result["soft"]["steps"] == result["hard"]["steps"] == scores.steps.double().mean()


@pytest.mark.parametrize(
    "kwargs,message",
    [
        (dict(data="nowhere"), "no such file"),
        (dict(data="empty"), "holds no text"),
        (dict(data="text", stride=17), "stride = 17"),
        (dict(data="text", stride=0), "stride = 0"),
        (dict(data="text", limit=3), "--limit without --tasks"),
        (dict(data="text", out=Path("model")), "--out model is a folder"),
        (dict(data="text", out=Path("model/config.json")), "has no losses of texts"),
        (dict(data="text", tau=2.0), "tau = 2"),
        (dict(data="text", windows=0), "windows = 0"),
        (dict(), "train.json"),
    ],
)
def test_wrong_options(tmp_path, monkeypatch, kwargs, message):
    """Catches a stack trace, or a score of something else than was asked for."""
    monkeypatch.chdir(tmp_path)
    small_model(vocab_size=257, block_size=16).save_pretrained("model")
    Tokenizer.bytes().save("model/tokenizer.json")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "text").write_text("some text")
    with pytest.raises((ValueError, OSError), match=message):
        evaluate.main("model", device="cpu", **kwargs)
