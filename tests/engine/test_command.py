"""The commands of both decoders: sample.py, and `python -m engine` for many at once."""

import json
import re
import shutil

import pytest
from conftest import save_for_bytes, small_model

import engine.__main__
import sample
from engine.__main__ import ManyOptions, show_many
from engine.request import Options
from interop import load
from runtime import UserError

BOTH = pytest.mark.parametrize("decoder", ["simple", "engine"])


def decode(run, decoder="engine", **options):
    options = {"run": run, "device": "cpu", "tau": 0.3, **options}
    if decoder == "simple":
        sample.main(Options(**options))
    else:
        engine.__main__.main(ManyOptions(**options))


def samples(run, prompts, n, seed):
    """What the simple decoder makes of each prompt at the settings of `decode`, with its text."""
    ids, how = [list(text.encode()) for text in prompts], dict(tau=0.3, temperature=0.8, end=256)
    for one in sample.generate(load(run), ids, n, seed=seed, **how):
        shown = bytes(token for token in one.tokens if token < 256)
        yield one, shown.decode("utf-8", "replace")


@BOTH
def test_many_prompts(decoder, byte_model, tmp_path, capsys):
    """Catches lines in another order than the prompts', a lost sample, a text that is not what the
    model said, and a token that the simple decoder would not choose."""
    file, out = tmp_path / "prompts.txt", tmp_path / "samples.jsonl"
    file.write_text("one\n\ntwo, which is longer than the window\r\nthree\n", encoding="utf-8")
    options = dict(prompts=str(file), num_samples=2, max_new_tokens=6, seed=4)
    options |= dict(batch_size=3) if decoder == "engine" else {}
    decode(byte_model, decoder, out=out, **options)
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert f"written: {out}, 6 of 6 samples" in capsys.readouterr().out
    texts = ["one", "two, which is longer than the window", "three"]
    prompts = [text for text in texts for _ in range(2)]
    assert [line.pop("prompt") for line in written] == prompts
    for line, (one, text) in zip(written, samples(byte_model, prompts, 6, seed=4), strict=True):
        assert line == {"tokens": one.tokens, "steps": one.steps, "text": text}
    assert written[0]["tokens"] != written[1]["tokens"]
    assert any(line["tokens"][-1] == 256 for line in written)
    before = out.read_text()
    with pytest.raises(FileExistsError):  # what is there stays
        decode(byte_model, decoder, out=out, **options)
    other, way = tmp_path / "other.jsonl", dict(prefill="sequential") if decoder == "engine" else {}
    decode(byte_model, decoder, out=other, **options, **way)
    assert other.read_text() == out.read_text() == before


@BOTH
@pytest.mark.parametrize("n", [1, 3])
def test_samples_are_printed_whole(n, decoder, byte_model, capsys):
    """Catches samples that are torn apart where several run at once, or a shown end token."""
    decode(byte_model, decoder, prompt="fox", num_samples=n, max_new_tokens=5, seed=0)
    printed = capsys.readouterr().out
    for i, (_, text) in enumerate(samples(byte_model, ["fox"] * n, 5, seed=0)):
        assert (f"--- sample {i + 1} of 3\nfox{text}\n" if n > 1 else f"\nfox{text}\n") in printed
    assert f"decoder {decoder}" in printed
    assert "pondering steps per token, prompts included" in printed


def test_samples_come_as_soon_as_they_can():
    """Catches samples that are kept back until all are finished, or shown before those in front."""
    shown = []

    def events():
        for i, (now, token) in enumerate([(1, 5), (0, 7), (2, 7), (0, 7), (2, 7)]):
            yield now, token, i
            assert [n for n, _ in shown] == ([] if i < 3 else [0, 1] if i == 3 else [0, 1, 2])

    assert show_many(events(), 3, 2, 5, lambda i, sample, bar: shown.append((i, sample.steps))) == 5
    assert shown == [(0, [1, 3]), (1, [0]), (2, [2, 4])]


def test_another_method(tmp_path):
    """Catches a model that the engine cannot decode, refused without a word of what can."""
    run = save_for_bytes(small_model(method="looped", vocab_size=257), tmp_path)
    with pytest.raises(UserError, match=r"python sample\.py"):
        decode(str(run))


def test_tau_of_the_run(byte_model, tmp_path, capsys):
    """Catches a text that is decoded at another tau than the one at which its run was scored, an
    asked one that is not taken, and a model without a run that has none."""
    shutil.copytree(byte_model, tmp_path / "run")
    place = str(tmp_path / "run")
    decode(place, tau=None, max_new_tokens=1)
    (tmp_path / "run/train.json").write_text('{"config": {"tau": 0.25}}')
    decode(place, tau=None, max_new_tokens=1)
    decode(place, tau=0.0, max_new_tokens=1)
    assert re.findall(r"tau = (\S+),", capsys.readouterr().out) == ["0.0001", "0.25", "0"]
