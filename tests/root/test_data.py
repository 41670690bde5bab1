"""data.py: text -> ids -> windows. No test here reaches the network."""

import json
import re
import time
from hashlib import sha1, sha256
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from conftest import full_disk
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from data import Corpus, IdTokenizer, Tokenizer, Windows, divide, load_tokenizer, open_corpus, pieces_of
from model import UserError

CODE = "def f(x):\n    return x + 1  # naïve café 😀👩‍👩‍👧\n" * 40
TEXT = "the quick brown fox jumps over the lazy dog. " * 30


@pytest.fixture(autouse=True)
def no_gpt2(monkeypatch, tmp_path):
    """GPT-2's vocabulary cannot be fetched, and the current directory is an empty one."""

    def fail(name):
        raise OSError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def bpe():
    return Tokenizer.train([CODE.encode(), TEXT.encode()], 300)


# -- Tokenizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [CODE, "", "😀", "日本語\u200d\u0301", "<|endoftext|>", "\x00\r\n\t"])
def test_round_trip(bpe, text, tmp_path):
    """Catches text that does not come back, through a saved and loaded tokenizer too."""
    for tokenizer in (Tokenizer.bytes(), bpe):
        tokenizer.save(tmp_path / "t.json")
        again = load_tokenizer(tmp_path / "t.json")
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids).decode() == text and all(i < tokenizer.end_of_text for i in ids)
        assert again.encode(text) == ids and again.digest == tokenizer.digest
        assert tokenizer.decode([*ids, tokenizer.vocab_size + 5]).decode() == text  # padding says nothing


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_round_trip_of_any_bytes(bpe, raw):
    """Catches invalid UTF-8 that is replaced, also where it touches valid characters."""
    assert bpe.decode(bpe.encode(raw)) == raw
    assert bpe.decode(bpe.encode(raw.decode("utf-8", "surrogateescape"))) == raw


def slow_merges(words, size):
    """Byte-pair encoding by its definition: all pairs are counted again for each token."""
    words = {tuple(word.encode()): count for word, count in words.items()}
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < size:
        counts = {}
        for word, count in words.items():
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + count
        if not counts:
            break
        a, b = min(counts, key=lambda pair: (-counts[pair], pair))
        new, merged = len(tokens), {}
        tokens.append(tokens[a] + tokens[b])
        for word, count in words.items():
            out, i = [], 0
            while i < len(word):
                two = word[i : i + 2] == (a, b)
                out, i = [*out, new if two else word[i]], i + 1 + two
            merged[tuple(out)] = merged.get(tuple(out), 0) + count
        words = merged
    return tokens


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text("abé", min_size=1, max_size=12), st.integers(1, 5), max_size=8))
def test_merges(words):
    """Catches a count of pairs that is not kept up to date, as in "aaa"; ties by chance; the same
    bytes as two tokens; and words that end before there are as many tokens as asked for."""
    tokens = data.merge_pairs(words, 290)
    assert tokens == slow_merges(words, 290) and len(set(tokens)) == len(tokens)


def test_bpe_takes_seconds(bpe):
    """Catches a trainer that looks at all words, or all pairs, for each merge: minutes instead of seconds."""
    rng = np.random.default_rng(0)
    letters = rng.choice([*"etaoinshrdlu"], (40_000, 6))
    began = time.process_time()
    tokenizer = Tokenizer.train([" ".join(map("".join, letters)).encode()], 2048)
    assert tokenizer.vocab_size == 2048 and time.process_time() - began < 20
    assert bpe.vocab_size == 300 and len(bpe.encode(CODE)) < len(CODE.encode()) * 2 / 3


def test_endless_blanks(bpe):
    """Catches a run of blanks that overflows tiktoken's stack, in training and encoding."""
    text = " \n" * 750_000 + "a"
    Tokenizer.train([text[-200_000:].encode(), CODE.encode()], 300)
    assert bpe.decode(bpe.encode(text)).decode() == text


OURS = Tokenizer.bytes().fields()
BPE = OURS | {"name": "bpe", "pattern": data.WORDS}


@pytest.mark.parametrize(
    "content,message",
    [
        (None, "is missing: a model has its tokenizer"),
        ("[]", "not a JSON object"),
        ({"model": {"type": "BPE"}, "version": "1.0"}, "of Hugging Face; python -m lab reads it"),
        (
            OURS | {"tokens": {"a": 1}},
            "not a tokenizer that is known",
        ),  # with which tiktoken ends the process
        (OURS | {"tokens": ["YQ==", "YQ=="]}, "a token is there twice"),
        (OURS | {"tokens": ["YQ=="]}, "a byte has no token"),
        (BPE | {"tokens": [*OURS["tokens"], ""]}, "a token is there twice, or empty"),
        (OURS | {"tokens": [5]}, "not a tokenizer that is known"),
        (OURS | {"tokens": OURS["tokens"][::-1]}, "another one than its own"),
        (OURS | {"name": "../../x"}, "no name with its pattern"),  # names are parts of paths
        (OURS | {"name": "bpe"}, "no name with its pattern"),
        (OURS | {"name": ["bytes"]}, "no name with its pattern"),
        (OURS | {"pattern": "(a+)+$"}, "no name with its pattern"),  # which runs for ever
        ({"name": "ids", "vocab_size": True}, "not a tokenizer that is known"),
        ({}, "not a tokenizer that is known"),
    ],
)
def test_damaged_tokenizer(tmp_path, content, message):
    """Catches a stack trace, a path or a pattern from a stranger's file, or text in other tokens."""
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=message):
        load_tokenizer(file)


def test_tokenizer_of_the_lookup_task(tmp_path):
    """Catches a tokenizer of the lab that the root does not read any more."""
    tokens = [bytes([i]) for i in range(256)] + [b" mX", b" 3"]
    Tokenizer("lookup", r" ?[^ ]+| ", tokens).save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").encode(" mX 3 Z") == [256, 257, 32, 90]


# -- Sources ---------------------------------------------------------------------------------------


SOURCE = '''
"""M."""
if 1:
    class C:
        """C."""
        async def f(self):
            """F."""
            "no"
else:
    def g(x=lambda: "no"):
        """G."""
    try:
        pass
    except E:
        def h():
            "H."
match 1:
    case 1:
        def i(): "I."
'''


def test_docstrings(tmp_path):
    """Catches docstrings that are missed or in another order, and files of other Pythons that stop it."""
    file = tmp_path / "m.py"
    file.write_text(SOURCE)
    assert data.docstrings(file) == ["M.", "C.", "F.", "G.", "H.", "I."]
    file.write_text("print 'python 2'")
    assert data.docstrings(file) == []


def test_pydocs(tmp_path, monkeypatch):
    """Catches a docstring that comes twice, and documents in another order than their files."""
    for name, text in (("a", '"""One."""'), ("b", '"""One."""'), ("c", "0"), ("d", '"""Two."""')):
        (tmp_path / name).write_text(text + '\ndef f():\n    """F."""\n' * (name == "d"))
    files = [(file.name, file) for file in sorted(tmp_path.iterdir())]
    monkeypatch.setattr(data, "package_files", lambda: iter(files))
    monkeypatch.setattr(data, "topics", {"lambda": "Two.", "if": "Three."})
    assert data.pydocs() == [("a", b"One."), ("d", b"Two.\n\nF."), ("topics/if", b"Three.")]


def test_package_files(monkeypatch):
    """Catches test files in the default corpus, and an unstable order."""
    monkeypatch.setattr(data, "PACKAGES", ("numpy", "networkx"))
    names = [name for name, _ in data.package_files()]
    assert len(names) > 900 and len(set(names)) == len(names)
    assert not any("/tests/" in name or "site-packages" in name for name in names)
    for _, group in groupby(names, lambda name: name.split("/")[0]):
        paths = [Path(name) for name in group]
        assert paths == sorted(paths)
    assert [p for p, _ in groupby(name.split("/")[0] for name in names)] == ["python", *data.PACKAGES]


def test_texts_that_are_left_out(tmp_path, capsys):
    """Catches files that are left out without a word, and tables that are learned with their commas."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    (folder / "b.txt").write_text("text", encoding="utf-16")
    (folder / "c.JSON").write_text("{}")
    (folder / ".hidden").write_text("no")
    (folder / "empty").write_text(" \n")
    assert data.read_texts(folder) == [("texts/a.txt", b"text")]
    assert (
        "note: 2 of 4 files are no UTF-8 text, left out: texts/b.txt, texts/c.JSON" in capsys.readouterr().out
    )
    assert data.read_texts(folder / "b.txt") == [] and "b.txt" in capsys.readouterr().out
    for name in ("a.json", "a.jsonl", "a.CSV", "a.parquet"):
        (tmp_path / name).write_text('{"text": "a"}')
        with pytest.raises(UserError, match=f"{name} is no plain text; write its text into"):
            open_corpus(str(tmp_path / name))


# -- Documents -> ids ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [b"", b"a\nb", b"a" * 10**6, b"line\n" * 500_000, b"x" * 2_500_000, "日".encode() * 700_000]
)
def test_pieces(text):
    """Catches a text that is cut inside a line or a character, where it need not be, or loses something."""
    pieces = list(pieces_of(text))
    assert b"".join(pieces) == text and len(pieces) == -(-len(text) // 10**6)
    assert all(piece.decode() for piece in pieces)
    assert b"\n" not in text or all(piece.endswith(b"\n") for piece in pieces[:-1])


def test_pieces_of_no_utf8():
    """Catches a loop without end where no character begins."""
    assert b"".join(pieces_of(b"\x80" * 2_500_000)) == b"\x80" * 2_500_000


def test_divide():
    """Catches documents cut in two where there are enough to keep them whole, and a corpus of many files
    without any validation, or without any training."""
    documents = [(f"f{i}", f"text {i}".encode()) for i in range(400)]
    train, val = divide(documents)
    assert sorted(train + val) == sorted(text for _, text in documents)
    assert 8 < len(val) < 40
    held_out = [f"f{i}" for i in range(4000) if int(sha1(b"f%d" % i).hexdigest(), 16) % 20 == 0]
    others = [f"f{i}" for i in range(150) if f"f{i}" not in held_out]
    for names in (held_out, others):  # all would be on one side
        train, val = divide([(name, b"0123456789") for name in names[:100]])
        assert train == [b"012345678"] * 100 and val == [b"9"] * 100
    assert divide([("a", b"ab"), ("b", b"cd")]) == ([b"a", b"c"], [b"b", b"d"])


def test_corpus_of_files(tmp_path):
    """Catches lost bytes, text in both parts, a cache that ignores a change or is not found again."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(3):
        (texts / f"{i}.txt").write_text(f"file {i}. " * 100, encoding="utf-8")
    corpus = open_corpus(str(texts))
    assert corpus.name.startswith("texts-bytes-") and corpus.vocab_size == 257
    train, val = (corpus.tokenizer.decode(x).split(b"<|endoftext|>") for x in (corpus.train, corpus.val))
    whole = [a + b for a, b in zip(train, val, strict=True)]
    assert whole == [*(f"file {i}. ".encode() * 100 for i in range(3)), b""]
    assert len(corpus.val) == 3 * 81
    assert [p.name for p in Path("data").iterdir()] == [corpus.name]
    assert open_corpus(str(texts)).name == corpus.name
    meta = json.loads((Path("data") / corpus.name / "meta.json").read_text())
    assert meta["bytes"] == 2400 and meta["dtype"] == "uint16"
    (texts / "3.txt").write_text("more")
    assert open_corpus(str(texts)).name != corpus.name


def test_known_by():
    """Catches a run that resumes on another text, and one that does not on the same."""
    ids = np.arange(100, dtype=np.uint16)
    corpus = Corpus("a", Tokenizer.bytes(), 257, ids, ids[:50], "from somewhere")
    known = corpus.known_by
    twice = sha256(np.concatenate([ids, ids]).tobytes()).hexdigest()
    assert known["name"] == "a" and known["sha256"] == twice and known["val_sha256"] != twice
    assert (known["train_tokens"], known["val_tokens"], known["tokenizer"]) == (100, 50, "5801ed9e")
    corpus.val = ids[1:51]
    assert corpus.known_by["val_sha256"] != known["val_sha256"]
    corpus.train = np.arange(2_500_000, dtype=np.uint32)
    ends = np.concatenate([corpus.train[:1_000_000], corpus.train[1_500_000:]])
    assert corpus.known_by["sha256"] == sha256(ends.tobytes()).hexdigest()


def test_names_in_the_cache(tmp_path):
    """Catches corpora that were prepared before and are not found any more, other tokens than before, or
    a prepared text that needs the network again."""
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox. " * 100)
    corpus = open_corpus(str(file), cache="cache")
    assert corpus.name == "text-bytes-1f655a00"
    folder = Path("cache") / corpus.name
    assert sha256((folder / "train.bin").read_bytes()).hexdigest().startswith("a13707bc4b08c76b")
    corpus = open_corpus(str(file), "bpe", 300, "cache")
    assert (corpus.name, corpus.tokenizer.digest) == ("text-bpe300-019e43b6", "86419895")
    with pytest.raises(UserError, match="--tokenizer bytes or --tokenizer bpe"):
        open_corpus(str(file), "gpt2", cache="cache")
    folder.rename(folder.with_name("text-gpt2-44cdd419"))
    assert open_corpus(str(file), "gpt2", cache="cache").name == "text-gpt2-44cdd419"


def test_size_of_the_table(tmp_path):
    """Catches a table of a large vocabulary that is not padded, or a small one that is."""
    (tmp_path / "text.txt").write_text(" ".join(f"{i * 7919:x}" for i in range(30_000)))
    assert open_corpus("text.txt", "bpe", 1025).vocab_size == 1088
    assert open_corpus("text.txt", "bpe", 1023).vocab_size == 1023


@pytest.mark.parametrize(
    "name,flags,message",
    [
        ("blank.txt", [], "holds no text"),
        ("missing.txt", [], "'missing.txt' is no file or folder, and none of pydocs, pysource"),
        ("", [], "'' is no file or folder"),
        (__file__, ["bpe", 100], "--vocab-size 100 is too small"),
        (__file__, ["no/where"], "--tokenizer no/where is not known: give bytes, bpe or gpt2"),
    ],
)
def test_refused(name, flags, message):
    """Catches a stack trace where one line should name the problem and the way out."""
    Path("blank.txt").write_text(" \n")
    with pytest.raises(UserError, match=message):
        open_corpus(name, *flags)


def test_network_first(monkeypatch):
    """Catches minutes of reading before the line that says that the network is needed."""
    monkeypatch.setitem(data.SOURCES, "pydocs", lambda: pytest.fail("the text was read before"))
    with pytest.raises(UserError, match=r"could not be fetched \(OSError\).* take --tokenizer bytes"):
        open_corpus("pydocs", "gpt2")


def test_full_disk(tmp_path):
    """Catches a full disk without a word of which file, and half a corpus that is left."""
    (tmp_path / "text.txt").write_text("0123456789" * 10_000)
    with full_disk(50_000), pytest.raises(UserError) as error:
        open_corpus("text.txt")
    message = r"cannot write data/text-bytes-.*train\.bin \(.*File too large; [\d,]+ MiB are free\)"
    assert re.fullmatch(message, str(error.value))
    assert not any(Path("data").iterdir())


def test_progress(monkeypatch, capsys):
    """Catches thousands of percentages in a log, or minutes of silence on a terminal."""
    data.progress("reading")(0.5)
    assert capsys.readouterr().out == "reading\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    data.progress("reading")(0.5)
    assert capsys.readouterr().out == "reading\n 50%\r"


# -- Folders of .bin files -------------------------------------------------------------------------


def write_bins(folder, ids, kind=np.uint16):
    for name in ("train.bin", "val.bin"):
        np.array(ids, dtype=kind).tofile(folder / name)


def test_nanogpt_folders(tmp_path, capsys):
    """Catches nanoGPT's folders not taken as they are, also without GPT-2's vocabulary, and ids of
    characters that are taken for GPT-2's."""
    write_bins(tmp_path, [0, 1, 2, 3] * 50)
    corpus = open_corpus(str(tmp_path))
    assert corpus.name == tmp_path.name and corpus.vocab_size == 50_304 and len(corpus.train) == 200
    assert "shown as numbers: gpt2's vocabulary could not be fetched" in capsys.readouterr().out
    tokenizer = corpus.tokenizer
    assert tokenizer.encode("3 1 2") == [3, 1, 2] and tokenizer.decode([3, 1]) == b" 3 1"
    with pytest.raises(UserError, match="give ids"):
        tokenizer.encode("hello")
    tokenizer.save(tmp_path / "ids.json")
    assert load_tokenizer(tmp_path / "ids.json").digest == tokenizer.digest == IdTokenizer(50_257).digest
    with pytest.raises(UserError, match="a BPE cannot be trained on them"):
        open_corpus(str(tmp_path), "bpe")

    (tmp_path / "meta.pkl").write_bytes(b"a pickle")
    with pytest.raises(UserError, match=r"meta\.pkl is not read here: give the text.* --data FILE"):
        open_corpus(str(tmp_path))
    assert open_corpus(str(tmp_path), "bytes").tokenizer.name == "bytes"
    Tokenizer.bytes().save(tmp_path / "tokenizer.json")
    (tmp_path / "meta.json").write_text('{"vocab_size": 65}')  # somebody else's
    assert open_corpus(str(tmp_path)).tokenizer.name == "bytes"


@pytest.mark.parametrize("kind,wide", [("uint16", "uint32"), ("uint16", "uint64"), ("uint32", "uint64")])
def test_wide_ids(tmp_path, kind, wide):
    """Catches a file of 32- or 64-bit ids that is read as ids half as wide, every other one a zero."""
    ids = np.random.default_rng(0).integers(1, 257, 3_000)
    write_bins(tmp_path, ids, wide)
    Tokenizer.bytes().save(tmp_path / "tokenizer.json")
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": kind}))
    with pytest.raises(
        UserError, match=f'train.bin looks like ids of type {wide}, read as .*"dtype": "{wide}"'
    ):
        open_corpus(str(tmp_path))
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": wide}))  # the way out that was named
    corpus = open_corpus(str(tmp_path))
    assert np.array_equal(corpus.train, ids)
    assert Windows(corpus.train, 8, 0).rows(0, 2).dtype == torch.int64
    assert 5 < data.unigram_entropy(corpus.train, 257) < np.log(257)


def test_ids_of_a_byte(tmp_path):
    """Catches ids of one byte that are read as pairs of them, and a type that is stated and not believed."""
    ids = np.random.default_rng(0).integers(0, 65, 3_000)
    write_bins(tmp_path, ids, np.uint8)
    IdTokenizer(50_257).save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r'looks like ids of type uint8, read as uint16: .*"dtype": "uint8"'):
        open_corpus(str(tmp_path))
    for kind in ("uint8", "uint16"):
        (tmp_path / "meta.json").write_text(json.dumps({"dtype": kind}))
        assert np.array_equal(open_corpus(str(tmp_path)).train, ids.astype(np.uint8).view(kind))


@pytest.mark.parametrize(
    "raw,meta,message",
    [
        (b"\1\0" * 100 + b"\1", {}, "does not hold uint16 token ids: .* multiple"),
        (np.array([1, 300] * 50, np.uint16).tobytes(), {}, "id 300, beyond the vocabulary of 257"),
        (b"", {}, "does not hold .* empty"),
        (None, {}, "train.bin is missing"),
        (b"\1\0" * 100, {"dtype": "O"}, "meta.json: dtype = 'O' is none of uint8"),  # bytes as pointers
        (b"\1\0" * 100, {"dtype": ["uint16"]}, "meta.json: dtype = .* is none of uint8"),
        (b"\1\0" * 100, [], "meta.json is not a JSON object"),
    ],
)
def test_bad_bins(tmp_path, raw, meta, message):
    """Catches .bin files that would train on garbage or crash in the embedding."""
    write_bins(tmp_path, [1, 2, 3])
    Tokenizer.bytes().save(tmp_path / "tokenizer.json")
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    if raw is not None:
        (tmp_path / "train.bin").write_bytes(raw)
    else:  # nothing that ends
        (tmp_path / "train.bin").unlink()
        (tmp_path / "train.bin").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=message):
        open_corpus(str(tmp_path))


# -- Windows ---------------------------------------------------------------------------------------


def test_windows():
    """Catches windows that come twice in an epoch or never, and targets not shifted."""
    tokens = np.arange(101, dtype=np.uint16)
    windows = Windows(tokens, 10, seed=3)
    assert windows.count == 10
    x = [windows.rows(step, 5) for step in range(4)]  # (5, T+1) each
    assert all(rows.diff().eq(1).all() for rows in x)
    epochs = [torch.cat(x[:2])[:, :-1], torch.cat(x[2:])[:, :-1]]
    for epoch in epochs:
        assert sorted(epoch.flatten().tolist()) == list(range(100))
    assert not torch.equal(*epochs)
    assert torch.equal(Windows(tokens, 10, seed=3).rows(3, 5), x[3])
    shares = [Windows(tokens, 10, seed=3).rows(3, 1, rank, 5) for rank in range(5)]
    assert torch.equal(torch.cat(shares), x[3])
    assert not torch.equal(Windows(tokens, 10, seed=4).rows(3, 5), x[3])


def test_order_of_windows():
    """Catches another order of the windows: a resumed run would see some twice."""
    windows = Windows(np.arange(101, dtype=np.uint16), 10, seed=3)
    order = [int(windows.window(i)[0]) // 10 for i in range(10)]
    assert order == [9, 6, 0, 2, 1, 4, 7, 5, 3, 8]


def test_too_few_tokens(tmp_path):
    """Catches less than a window with its target, and a message that does not say of which file."""
    write_bins(tmp_path, np.arange(1, 65))
    ids = np.memmap(tmp_path / "val.bin", np.uint16, mode="r")
    assert Windows(ids, 63, seed=0).count == 1
    with pytest.raises(UserError, match=r"val\.bin has 64 tokens, less than one window of 64 .*--block-size"):
        Windows(ids, 64, seed=0)


def test_unigram_entropy():
    """Catches an entropy in bits, and ids that never come and make it nan."""
    assert data.unigram_entropy(np.array([0, 1, 0, 1], np.uint16), 5) == pytest.approx(np.log(2))
