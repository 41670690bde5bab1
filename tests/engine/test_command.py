"""`python -m engine`: the samples of sample.py, in the order of the prompts, for many at once."""

import json
import re
import shutil

import pytest
import torch
from conftest import small_model

from corpus.tokenizers import Tokenizer
from engine.__main__ import ManyOptions, main, show_many
from interop import load, save
from runtime import UserError
from sample import generate


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A directory of a model with a window of 16 bytes."""
    model = small_model(seed=2, vocab_size=257, block_size=16).float()
    with torch.no_grad():  # such that texts end now and then
        model.lm_head.weight[256] = 4 * model.lm_head.weight[100]
    folder = tmp_path_factory.mktemp("engine") / "run"
    save(model, folder)
    Tokenizer.bytes().save(folder / "tokenizer.json")
    return str(folder)


def decode(run, **options):
    main(ManyOptions(**{"run": run, "device": "cpu", "tau": 0.3, **options}))


def test_many_prompts(run, tmp_path, capsys):
    """Catches lines in another order than the prompts', a lost sample, a text that is not what the
    model said, and a token that the simple decoder would not choose."""
    file, out = tmp_path / "prompts.txt", tmp_path / "samples.jsonl"
    file.write_text("one\n\ntwo, which is longer than the window\r\nthree\n", encoding="utf-8")
    options = dict(prompts=str(file), num_samples=2, max_new_tokens=6, seed=4, batch_size=3)
    decode(run, out=out, **options)
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert f"written: {out}, 6 of 6 samples" in capsys.readouterr().out
    texts = ["one", "two, which is longer than the window", "three"]
    assert [line["prompt"] for line in written] == [text for text in texts for _ in range(2)]
    model = load(run)
    for i, line in enumerate(written):
        ids = list(line["prompt"].encode())
        (expected,) = generate(model, [ids], 6, seed=4 + i, tau=0.3, temperature=0.8, end=256)
        assert (line["tokens"], line["steps"]) == (expected.tokens, expected.steps)
        shown = bytes(token for token in line["tokens"] if token < 256)
        assert line["text"] == shown.decode("utf-8", "replace")
    assert written[0]["tokens"] != written[1]["tokens"]
    assert any(line["tokens"][-1] == 256 for line in written)
    before = out.read_text()
    with pytest.raises(FileExistsError):  # what is there stays
        decode(run, out=out, **options)
    other = tmp_path / "other.jsonl"
    decode(run, out=other, prefill="sequential", **options)
    assert other.read_text() == out.read_text() == before


@pytest.mark.parametrize("n", [1, 3])
def test_samples_are_printed_whole(run, capsys, n):
    """Catches samples that are torn apart where several run at once, or a shown end token."""
    decode(run, prompt="fox", num_samples=n, max_new_tokens=5, seed=0)
    printed = capsys.readouterr().out
    settings = dict(seed=0, tau=0.3, temperature=0.8, end=256)
    for i, sample in enumerate(generate(load(run), [list(b"fox")] * n, 5, **settings)):
        text = bytes(token for token in sample.tokens if token < 256).decode("utf-8", "replace")
        assert (f"--- sample {i + 1} of 3\nfox{text}\n" if n > 1 else f"\nfox{text}\n") in printed
    assert "decoder engine" in printed
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
    save(small_model(method="looped", vocab_size=257).float(), tmp_path)
    Tokenizer.bytes().save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"python sample\.py"):
        decode(str(tmp_path))


def test_tau_of_the_run(run, tmp_path, capsys):
    """Catches a text that is decoded at another tau than the one at which its run was scored, an
    asked one that is not taken, and a model without a run that has none."""
    shutil.copytree(run, tmp_path / "run")
    place = str(tmp_path / "run")
    decode(place, tau=None, max_new_tokens=1)
    (tmp_path / "run/train.json").write_text('{"config": {"tau": 0.25}}')
    decode(place, tau=None, max_new_tokens=1)
    decode(place, tau=0.0, max_new_tokens=1)
    assert re.findall(r"tau = (\S+),", capsys.readouterr().out) == ["0.0001", "0.25", "0"]
