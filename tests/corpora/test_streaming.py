import json
import sys
from pathlib import Path

import numpy as np
import pytest

from lab.corpora import streaming
from lab.corpora.preparation import load_tokens, prepare, read_meta
from lab.corpora.streaming import Options
from model import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The files that datasets locks are not those of the home directory."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """1,000 documents in two local files, and an empty directory to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    texts = [f"document {i}: " + "naïve café 😀 " * (i % 7) for i in range(1000)]
    for part in range(2):
        lines = [json.dumps({"text": text}) for text in texts[part * 500 : part * 500 + 500]]
        (tmp_path / "texts" / f"{part}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(streaming, "BATCH", 500)
    return texts


FLAGS = dict(tokenizer="bytes", val_tokens=5000, shard_tokens=10_000)


def stream(*args, **kwargs):
    streaming.stream(Options(*args, **kwargs))


def test_stream_is_the_corpus(documents):
    """Catches documents that are lost, doubled, out of order, or in training and validation."""
    stream("texts", 1e9, **FLAGS)
    folder, tokenizer = prepare("data/texts-bytes")
    assert len(list(folder.glob("train-*.bin"))) > 3
    train, val = (load_tokens(folder, split, 257) for split in ("train", "val"))
    ids = np.concatenate([val[:], train[:]])
    assert tokenizer.decode(ids[ids < 256]).decode() == "".join(documents)
    assert (ids == 256).sum() == 1000 and 5000 <= len(val) < 5200
    assert read_meta(folder)["bytes"] == (ids < 256).sum()
    assert read_meta(folder)["val_bytes"] == (val[:] < 256).sum()


def test_command(documents, capsys, run):
    """Catches flags that do not arrive, and a next step that is not named."""
    flags = "--tokens 9e3 --tokenizer bytes --val-tokens 1e3 --shard-tokens 4e3 --folder there"
    run("stream", "texts", *flags.split())
    assert capsys.readouterr().out.endswith("next:\npython -m lab train --data there\n")
    assert {f.name: f.stat().st_size > 8e3 for f in Path("there").glob("train-*")} == {
        "train-00000.bin": True, "train-00001.bin": True, "train-00002.bin": False
    }  # fmt: skip


@pytest.mark.parametrize("at", [1, 2, 4])
def test_interrupted_stream(documents, monkeypatch, at):
    """Catches an interruption that loses or repeats documents: the files are the same, bit for
    bit, as without it; before it is complete, nothing trains on it."""
    stream("texts", 4e4, **FLAGS)
    write, calls = streaming.write_bytes, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(streaming, "write_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream("texts", 4e4, folder=Path("again"), **FLAGS)
    if at > 1:
        with pytest.raises(UserError, match="again is not complete; run the command that began it"):
            load_tokens(prepare("again")[0], "train", 257)
    stream("texts", 4e4, folder=Path("again"), **FLAGS)
    whole, again = Path("data/texts-bytes"), Path("again")
    assert {f.name for f in whole.iterdir()} == {f.name for f in again.iterdir()}
    for file in whole.glob("*.bin"):
        assert file.read_bytes() == (again / file.name).read_bytes()
    a, b = (json.loads((folder / "meta.json").read_text()) for folder in (whole, again))
    assert a | {"state": None} == b | {"state": None}  # one place has several descriptions


def test_more_tokens(documents):
    """Catches a corpus that cannot grow, or that grows by what it has already."""
    stream("texts", 15_000, **FLAGS)
    before = load_tokens(prepare("data/texts-bytes")[0], "train", 257)[:]
    stream("texts", 30_000, **FLAGS)
    tokens = load_tokens(prepare("data/texts-bytes")[0], "train", 257)
    assert len(tokens) >= 30_000 > len(before) >= 15_000
    assert (tokens[: len(before)] == before).all()
    decode = prepare("data/texts-bytes")[1].decode
    assert decode(tokens[len(before) : len(before) + 9]).startswith(b"document")


def test_bpe(documents):
    """Catches the tokenizer of another corpus that is not taken."""
    folder, tokenizer = prepare("texts", "bpe", 300)
    stream("texts", 5000, tokenizer=str(folder), val_tokens=1000, folder=Path("there"))
    val = load_tokens(Path("there"), "val", 300)[:]
    assert tokenizer.decode(val[val < 299]).decode().startswith(documents[0] + documents[1])


def test_text_files_are_documents(monkeypatch, tmp_path):
    """Catches lines that are taken for documents, and line breaks that are lost."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts" / "more").mkdir(parents=True)
    texts = [f"Title {i}\n\nOnce upon a time.\nThe end.\n" for i in range(40)]
    for i, text in enumerate(texts):
        (tmp_path / "texts" / ("more" if i % 2 else ".") / f"{i:02}.txt").write_text(text)
    stream("texts/", float("inf"), tokenizer="bytes", val_tokens=200)
    folder, tokenizer = prepare("data/texts-bytes")
    ids = np.concatenate([load_tokens(folder, split, 257)[:] for split in ("val", "train")])
    found = tokenizer.decode(ids).decode().split("<|endoftext|>")
    assert sorted(found) == sorted(["", *texts])


def test_damaged_corpus(documents):
    """Catches a lost or cut shard, texts that changed since, and a damaged meta.json."""
    stream("texts", 3e4, **FLAGS)
    folder = Path("data/texts-bytes")
    shard, meta = folder / "train-00001.bin", folder / "meta.json"
    content, good = shard.read_bytes(), meta.read_bytes()
    for damage in (shard.unlink, lambda: shard.write_bytes(content[:100])):
        damage()
        with pytest.raises(UserError, match=r"training tokens, not the .* stream it again"):
            load_tokens(folder, "train", 257)
    shard.write_bytes(content)
    stream("texts", 3e4, **FLAGS)
    meta.write_bytes(good[:100])
    with pytest.raises(UserError, match=r"meta\.json cannot be read.*move data/texts-bytes"):
        load_tokens(folder, "train", 257)
    meta.unlink()
    for other in (None, b'{"source": "pydocs", "bytes": 1, "sha256": ""}'):
        if other:
            meta.write_bytes(other)
        with pytest.raises(UserError, match="holds something else"):
            stream("texts", 3e4, **FLAGS)
    meta.write_bytes(good)
    with open("texts/0.jsonl", "a") as file:
        file.write('\n{"text": "new"}')
    with pytest.raises(UserError, match="was made from"):
        stream("texts", 4e4, **FLAGS)


def test_odd_rows_and_a_broken_connection():
    """Catches a row without text, or with half a surrogate pair, that ends the stream for good, and
    a lost connection without a word of how to go on."""
    rows = [{"text": None}, {"text": "é"}, {"text": "\ud800"}]
    assert list(streaming.texts_of([{"meta": row} for row in rows[:2]], "meta.text")) == [b"", "é".encode()]
    assert list(streaming.texts_of(rows, "text")) == [b"", "é".encode(), b"?"]

    def broken():
        yield {"text": "abc"}
        raise ConnectionError("no route to host")

    for field in ("id", "body", "id.text"):  # no text, no such column, and nothing within one
        with pytest.raises(UserError, match=rf"no text in '{field}'; --field is one of \['text'"):
            list(streaming.texts_of([{"text": "a", "id": 5}], field))
    with pytest.raises(UserError, match="no route to host; the same command goes on"):
        list(streaming.texts_of(broken(), "text"))


def test_refused(documents, monkeypatch):
    """Catches another source in the same folder, a folder of something else that loses its files,
    and a missing package, without a word of the way out."""
    with pytest.raises(UserError, match="takes a BPE that is there"):
        stream("texts", 100, tokenizer="bpe")
    assert not Path("data").exists()
    with pytest.raises(UserError, match="takes all of texts: give more text, or lower"):
        stream("texts", 100, **{**FLAGS, "val_tokens": 1e9})
    stream("texts", 100, **FLAGS)  # the way out works
    with pytest.raises(UserError, match=r"was made from .*: use --folder"):
        stream("texts", 100, **{**FLAGS, "val_tokens": 6000})
    Path("run").mkdir()
    Path("run/tokenizer.json").write_text("kept")
    with pytest.raises(UserError, match="run holds something else: use another --folder"):
        stream("texts", 100, **FLAGS, folder=Path("run"))
    assert Path("run/tokenizer.json").read_text() == "kept"
    Path("empty").mkdir()
    with pytest.raises(UserError, match="cannot open empty"):
        stream("empty", 100, **FLAGS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        stream("texts", 100, **FLAGS)
