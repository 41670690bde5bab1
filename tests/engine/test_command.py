"""`python -m lab sample`, by the engine and by the simple decoder, which has every method."""

import json
import re
from pathlib import Path

import pytest
import torch
from lab_helpers import full_disk, save_for_bytes, small_model

from common import UserError, command_line
from hardware import pick_precision
from lab.engine import __main__ as command
from lab.engine.__main__ import main, show_many
from lab.engine.batching import Engine
from lab.engine.request import Options
from lab.engine.simple import generate
from lab.interop.weights import load

both = pytest.mark.parametrize("decoder", ["simple", "engine"], indirect=True)


@pytest.fixture
def decoder(request, monkeypatch):
    """Which one decodes; "simple" for a model that the engine knows, too."""
    monkeypatch.setattr(command, "serves", lambda model: request.param == "engine")
    return request.param


def decode(run, **options):
    main(Options(**{"run": run, "device": "cpu", "tau": 0.3, **options}))


def samples(run, prompts, n, seed):
    """What the simple decoder makes of each prompt at the settings of `decode`, with its text."""
    ids, how = [list(text.encode()) for text in prompts], dict(tau=0.3, temperature=0.8, ends=[256])
    for one in generate(load(run), ids, n, seed=seed, **how):
        shown = bytes(token for token in one.tokens if token < 256)
        yield one, shown.decode("utf-8", "replace")


@both
def test_many_prompts(decoder, byte_model, tmp_path, capsys):
    """Catches lines in another order, a lost sample, and a text or token that is not the simple decoder's."""
    file, out = tmp_path / "prompts.txt", tmp_path / "samples.jsonl"
    file.write_text("one\n\ntwo, which is longer than the window\r\nthree\n", encoding="utf-8")
    options = dict(prompts=str(file), num_samples=2, max_new_tokens=6, seed=4)
    decode(byte_model, out=out, **options, **dict(batch_size=3) if decoder == "engine" else {})
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert f"written: {out}, 6 of 6 samples" in capsys.readouterr().out
    texts = ["one", "two, which is longer than the window", "three"]
    prompts = [text for text in texts for _ in range(2)]
    for line, prompt, (one, text) in zip(
        written, prompts, samples(byte_model, prompts, 6, seed=4), strict=True
    ):
        assert line == {"prompt": prompt, "tokens": one.tokens, "steps": one.steps, "text": text}
    assert written[0]["tokens"] != written[1]["tokens"]
    assert any(line["tokens"][-1] == 256 for line in written)
    before = out.read_text()
    with pytest.raises(FileExistsError):  # what is there stays
        decode(byte_model, out=out, **options)
    assert out.read_text() == before


@both
@pytest.mark.parametrize("n", [1, 3])
def test_samples_are_printed_whole(n, decoder, byte_model, capsys):
    """Catches samples that are torn apart where several run at once, or a shown end token."""
    decode(byte_model, prompt="fox", num_samples=n, max_new_tokens=5, seed=0)
    printed = capsys.readouterr().out
    for i, (_, text) in enumerate(samples(byte_model, ["fox"] * n, 5, seed=0)):
        assert (f"--- sample {i + 1} of 3\nfox{text}\n" if n > 1 else f"\nfox{text}\n") in printed
    assert f"decoder {decoder}" in printed
    assert "pondering steps per token read" in printed


def test_samples_come_as_soon_as_they_can():
    """Catches samples that are kept back until all are finished, or shown before those in front."""
    shown = []

    def events():
        for i, (now, token) in enumerate([(1, 5), (0, 7), (2, 7), (0, 7), (2, 7)]):
            yield now, token, i
            assert [n for n, _ in shown] == ([] if i < 3 else [0, 1] if i == 3 else [0, 1, 2])

    assert show_many(events(), 3, 2, {5}, lambda i, sample, bar: shown.append((i, sample.steps))) == 5
    assert shown == [(0, [1, 3]), (1, [0]), (2, [2, 4])]


def test_another_method(tmp_path, capsys):
    """Catches a method that cannot be decoded at all, and a wish that is left out for it without a word."""
    run = str(save_for_bytes(small_model(method="looped", vocab_size=257), tmp_path))
    decode(run, max_new_tokens=3)
    assert "decoder simple" in capsys.readouterr().out
    wishes = dict(batch_size=2, precision="bfloat16", prefill="jacobi", compile=True)
    with pytest.raises(UserError, match=r"looped .* --batch-size, --precision, --prefill, --compile$"):
        decode(run, **wishes)


def test_tau_and_precision(byte_model, capsys):
    """Catches a tau or a precision that is not the one asked for, or said."""
    for tau in (0.0, 1.0):
        decode(byte_model, tau=tau, max_new_tokens=4, prompt="fox", precision="auto", seed=0)
        said = capsys.readouterr().out
        precision = pick_precision("auto", torch.device("cpu"))  # as train.py's
        assert f"tau = {tau:g}," in said and f"precision {precision}" in said
        assert float(re.search(r"(\S+) of 3 pondering steps", said)[1]) == 3 * (1 - tau)


@pytest.mark.parametrize(
    "content,options,message",
    [
        ("", {}, "has no prompt in it"),
        (b"\xff\xfe", {}, "is not UTF-8 text"),
        ("a", dict(prompt="b"), "--prompt and --prompts"),
        ("a", dict(prompts=None, prompt="a\udcff"), "the prompt is not UTF-8 text"),
        ("a", dict(prompts="none.txt"), r"none\.txt"),
        ("a", dict(num_samples=0), "--num-samples 0"),
        ("a", dict(out="prompts.txt"), r"prompts\.txt: File exists"),
        ("a", dict(out="none/new"), "none/new"),
    ],
)
def test_refused_commands(content, options, message, byte_model):
    """Catches samples that are written over the prompts or to no file, and a file of them that is made before
    what is wrong is noticed, or said."""
    content = content if isinstance(content, bytes) else content.encode()
    Path("prompts.txt").write_bytes(content)
    asked = dict(prompts="prompts.txt", out="out.jsonl") | options
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        command_line(lambda: decode(byte_model, **asked | {"out": Path(asked["out"])}))
    assert [*Path().iterdir()] == [Path("prompts.txt")] and Path("prompts.txt").read_bytes() == content


@both
def test_interrupted(decoder, byte_model, tmp_path, monkeypatch, capsys):
    """Catches finished samples that are lost when a later one is not."""
    out = tmp_path / "out.jsonl"

    def interrupted(*args):
        yield from [(1, 65, 0), (0, 66, 1)]
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", lambda *_, **__: interrupted())
    monkeypatch.setattr(command, "one_by_one", lambda *_: ("simple", interrupted()))
    with pytest.raises(KeyboardInterrupt):
        decode(byte_model, num_samples=4, out=out, max_new_tokens=1)
    assert [json.loads(line)["tokens"] for line in out.read_text().splitlines()] == [[66], [65]]
    assert f"written: {out}, 2 of 4 samples" in capsys.readouterr().out


def test_full_disk(byte_model, tmp_path, capsys):
    """Catches a line that a full disk cut, at the end of a file."""
    out = tmp_path / "out.jsonl"
    with full_disk(1000), pytest.raises(UserError, match=r"cannot write .*out\.jsonl \("):
        decode(byte_model, num_samples=60, max_new_tokens=9, out=out)
    lines = out.read_text().splitlines()
    assert f"written: {out}, {len(lines)} of 60 samples" in capsys.readouterr().out
    assert len(lines) > 2 and all(json.loads(line)["tokens"] for line in lines)
