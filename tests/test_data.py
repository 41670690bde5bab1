import json
import pickle
import urllib.error
import urllib.request
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import corpora
import data
from data import pieces_of, prepare
from tokenizer import CharTokenizer, DataError, Tokenizer, load_tokenizer
from windows import Windows, load_tokens, unigram_entropy

TEXT = "def f(x):\n    return x + 1  # naïve café 😀👩‍👩‍👧\n" * 40


@pytest.fixture(scope="module")
def bpe():
    return Tokenizer.train([TEXT, Path(data.__file__).read_text(encoding="utf-8")], 300)


@pytest.mark.parametrize(
    "text", [TEXT, "", "😀", "日本語\u200d\u0301", "<|endoftext|>", "\x00\r\n\t"]
)
def test_round_trip(bpe, text, tmp_path):
    """Catches text that does not come back, through a saved and loaded tokenizer too."""
    for tokenizer in (Tokenizer.bytes(), bpe):
        tokenizer.save(tmp_path / "t.json")
        again = load_tokenizer(tmp_path / "t.json")
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids).decode() == text
        assert again.encode(text) == ids and again.vocab_size == tokenizer.vocab_size
        assert all(i < tokenizer.end_of_text for i in ids)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_round_trip_of_any_bytes(bpe, raw):
    """Catches invalid UTF-8 that is replaced, also where it touches valid characters."""
    assert bpe.decode(bpe.encode(raw)) == raw
    assert bpe.decode(bpe.encode(raw.decode("utf-8", "surrogateescape"))) == raw


@pytest.mark.parametrize(
    "text",
    [b"", b"a\nb", b"a" * 10**6, b"line\n" * 500_000, b"x" * 2_500_000, "日".encode() * 700_000],
)
def test_pieces(text):
    """Catches a text that is cut inside a line or a character, or where it need not be, or loses
    something."""
    pieces = list(pieces_of(text))
    assert b"".join(pieces) == text and len(pieces) == -(-len(text) // 10**6)
    assert all(piece.decode() for piece in pieces)
    assert b"\n" not in text or all(piece.endswith(b"\n") for piece in pieces[:-1])


def test_bpe_merges(bpe):
    """Catches a BPE that learned nothing, or whose table has not the size asked for."""
    assert bpe.vocab_size == 300
    again = Tokenizer.train([TEXT, Path(data.__file__).read_text(encoding="utf-8")], 300)
    assert again.tokens == bpe.tokens  # deterministic
    assert len(bpe.encode(TEXT)) < len(TEXT.encode()) * 2 / 3
    with pytest.raises(DataError, match="a BPE of 100 tokens"):
        Tokenizer.train([TEXT], 100)
    with pytest.raises(DataError, match="--tokenizer hops is for --data hops"):
        prepare(__file__, "hops")


def test_corpus_of_files(tmp_path):
    """Catches lost bytes, text in both parts, and a cache that ignores a change."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(3):
        (texts / f"{i}.txt").write_text(f"file {i}. " * 100, encoding="utf-8")
    folder, tokenizer = prepare(str(texts), cache=tmp_path / "cache")
    parts = [np.fromfile(folder / f"{n}.bin", dtype=np.uint16) for n in ("train", "val")]
    train, val = (tokenizer.decode(x).split(b"<|endoftext|>") for x in parts)
    whole = [a + b for a, b in zip(train, val, strict=True)]
    assert whole == [*(f"file {i}. ".encode() * 100 for i in range(3)), b""]
    assert len(parts[1]) == 3 * 81
    assert prepare(str(texts), cache=tmp_path / "cache")[0] == folder
    (texts / "3.txt").write_text("more")
    assert prepare(str(texts), cache=tmp_path / "cache")[0] != folder
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["bytes"] == 2400 and meta["documents"] == 3
    # Three documents, each with an end of text.
    assert meta["val_bytes"] == (folder / "val.bin").stat().st_size // 2 - 3


def test_split_by_file():
    """Catches documents cut in two where there are enough to keep them whole."""
    documents = [(f"f{i}", f"text {i}".encode()) for i in range(400)]
    train, val = corpora.divide(documents)
    assert sorted(train + val) == sorted(text for _, text in documents)
    assert 8 < len(val) < 40


def test_docstrings(tmp_path):
    """Catches docstrings that are missed, and files of other Pythons that stop the preparation."""
    file = tmp_path / "m.py"
    file.write_text(
        '"""M."""\nclass C:\n    """C."""\n    async def f(self):\n        """F."""\n        "no"\n'
    )
    assert corpora.docstrings(file) == ["M.", "C.", "F."]
    file.write_text("print 'python 2'")
    assert corpora.docstrings(file) == []


def test_pydocs_is_clean():
    """Catches test files and duplicates in the default corpus, and an unstable order."""
    names = [name for name, _ in corpora.package_files()]
    assert len(names) > 1000 and names == [name for name, _ in corpora.package_files()]
    assert not any("/tests/" in name or "site-packages" in name for name in names)


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n", "holds no text"),
        ("short.txt", b"short", "less than one window"),
        ("missing.txt", None, "no such file or folder, nor one of pydocs, pysource"),
    ],
)
def test_bad_text(tmp_path, name, content, message):
    """Catches a stack trace where one line should name the problem and the way out."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        folder, tokenizer = prepare(str(tmp_path / name), cache=tmp_path / "cache")
        load_tokens(folder, "train", tokenizer.vocab_size, 64)


@pytest.mark.parametrize(
    "raw,message",
    [
        (b"\1\0" * 100 + b"\1", "201 bytes: no file of 16-bit"),
        (
            np.array([1, 300] * 50, dtype=np.uint16).tobytes(),
            "token id 300 in its train tokens, beyond the vocabulary of 257",
        ),
        (b"\1\0" * 64, "64 tokens, less than one window of 64"),
        (b"", "has 0 bytes"),
        (None, "is missing"),
    ],
)
def test_bad_bins(tmp_path, raw, message):
    """Catches .bin files that would train on garbage or crash in the embedding."""
    if raw is not None:
        (tmp_path / "train.bin").write_bytes(raw)
    with pytest.raises(DataError, match=message):
        load_tokens(tmp_path, "train", 257, 64)


def test_no_network(monkeypatch, tmp_path):
    """Catches a stack trace without a network, or its one line after minutes of reading text."""

    def refuse(*_, **__):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(DataError, match=r"cannot download .*--data FILE"):
        data.shakespeare()
    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    with pytest.raises(DataError, match=r"--tokenizer bytes"):
        Tokenizer.gpt2()
    monkeypatch.setattr(data, "pydocs", lambda: pytest.fail("the text was read before"))
    with pytest.raises(DataError, match=r"--tokenizer bytes"):
        prepare("pydocs", "gpt2", cache=tmp_path)


def test_download_is_checked(monkeypatch, tmp_path):
    """Catches another text under the same address."""
    file = tmp_path / "input.txt"
    file.write_bytes(b"To be")
    monkeypatch.setattr(corpora, "SHAKESPEARE", (file.as_uri(), sha256(b"To go").hexdigest()))
    with pytest.raises(DataError, match="sha256 differs"):
        data.shakespeare()
    monkeypatch.setattr(corpora, "SHAKESPEARE", (file.as_uri(), sha256(b"To be").hexdigest()))
    assert data.shakespeare() == [("shakespeare", b"To be")]


def test_nanogpt_folders(tmp_path, monkeypatch, capsys):
    """Catches nanoGPT's folders not taken as they are, also without GPT-2's vocabulary."""
    for name in ("train.bin", "val.bin"):
        np.array([0, 1, 2, 3] * 50, dtype=np.uint16).tofile(tmp_path / name)

    def refuse(name):
        raise ConnectionError

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    folder, tokenizer = prepare(str(tmp_path), None)
    assert folder == tmp_path and tokenizer.vocab_size == 50_257
    assert "shown as token ids" in capsys.readouterr().out
    assert tokenizer.encode("3 1 2") == [3, 1, 2] and tokenizer.decode([3, 1]) == b" 3 1"
    with pytest.raises(DataError, match="give ids"):
        tokenizer.encode("hello")

    itos = dict(enumerate("abcé"))
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 4, "itos": itos, "stoi": {}}))
    _, tokenizer = prepare(str(tmp_path), None)
    assert tokenizer.encode("caé") == [2, 0, 3] and tokenizer.decode([2, 0, 3]).decode() == "caé"
    tokenizer.save(tmp_path / "t.json")
    assert isinstance(load_tokenizer(tmp_path / "t.json"), CharTokenizer)
    with pytest.raises(DataError, match=r"lacks.*z"):
        tokenizer.encode("az")


def test_meta_pkl_runs_no_code(tmp_path):
    """Catches a pickle that is allowed to call something."""

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": Bomb()}))
    with pytest.raises(DataError, match="not nanoGPT's character table"):
        data.read_nanogpt_characters(tmp_path / "meta.pkl")
    assert not (tmp_path / "ran").exists()


def test_windows():
    """Catches windows that come twice in an epoch or never, and targets not shifted."""
    tokens = np.arange(101, dtype=np.uint16)
    windows = Windows(tokens, 10, seed=3)
    assert windows.count == 10
    x, y = zip(*(windows.batch(step, 5) for step in range(4)), strict=True)
    assert all(torch.equal(a[:, 1:], b[:, :-1]) for a, b in zip(x, y, strict=True))
    epochs = [torch.cat(x[:2]), torch.cat(x[2:])]
    for epoch in epochs:
        assert sorted(epoch.flatten().tolist()) == list(range(100))
    assert not torch.equal(*epochs)
    assert torch.equal(Windows(tokens, 10, seed=3).batch(3, 5)[0], x[3])
    shares = [Windows(tokens, 10, seed=3).batch(3, 1, rank, 5)[0] for rank in range(5)]
    assert torch.equal(torch.cat(shares), x[3])
    assert not torch.equal(Windows(tokens, 10, seed=4).batch(3, 5)[0], x[3])


def test_unigram_entropy():
    """Catches bits for nats."""
    assert unigram_entropy(np.array([0, 1, 2, 3] * 5), 6) == pytest.approx(np.log(4))
