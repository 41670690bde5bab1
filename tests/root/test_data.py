"""data.py: text -> ids -> windows; errors in one line. No test here reaches the network."""

import io
import json
import os
import random
import re
import signal
import sys
import types
from collections import Counter
from hashlib import sha1, sha256
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from helpers import full_disk, python

import checkpoint
import common
import data
import hardware
import sources
import tokenizer
from common import UserError, command_line
from data import Corpus, Windows, open_corpus
from model import Config
from tokenizer import Tokenizer, load_tokenizer

CODE = "def f(x):\n    return x + 1  # naïve café 😀👩‍👩‍👧\n" * 40
TEXT = "the quick brown fox jumps over the lazy dog. " * 30


@pytest.fixture(autouse=True)
def no_gpt2(monkeypatch):
    """GPT-2's vocabulary cannot be fetched."""

    def fail(name):
        raise OSError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)


@pytest.fixture(scope="module")
def bpe():
    return Tokenizer.train([CODE.encode(), TEXT.encode()], 300)


# -- Errors, files, devices ------------------------------------------------------------------------


def fail(error):
    raise error


@pytest.mark.parametrize(
    "error, message",
    [
        (UserError("two\nlines"), "error: two lines"),
        (FileNotFoundError(2, "No such file", "a.txt"), "error: a.txt: No such file"),
        (MemoryError(), "error: out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: .."), "error: out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "error: out of memory"),
        (KeyboardInterrupt(), 130),
        (RuntimeError("a bug"), None),
        (OSError("not about a file"), None),
        (ValueError("a bug"), None),
    ],
    ids=repr,
)
def test_command_line(error, message, monkeypatch):
    """Catches a stack trace where a line says what is wrong, and a bug without its stack trace."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # these of the tests stay
    with pytest.raises(SystemExit if message else type(error)) as found:
        command_line(lambda: (print("₂é"), fail(error)))
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == b"\\u2082\\xe9\n"  # ASCII does not stop it
    if message:
        code = found.value.code
        assert code == message or (code.startswith(message) and "\n" not in code)


def test_settings_in_one_line():
    """Catches a message of several lines, one that does not name the field, and one without an end."""
    with pytest.raises(SystemExit) as error:
        command_line(lambda: Config(rope_theta=-1.0, vocab_size="x" * 1000))
    assert re.fullmatch(r"error: --vocab-size 'xxx.*; --rope-theta -1\.0: .{,100}", error.value.code)
    assert len(error.value.code) < 300
    with pytest.raises(SystemExit, match=r"^error: --head-dim 7 [^\n]*$"):
        command_line(lambda: Config(head_dim=7))


def test_command_line_of_a_process():
    """Catches a kill, closed terminal or gone reader that ends in a stack trace or leaves half a file."""
    script = (
        "import os, signal, sys; from common import *\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # which nohup lets be ignored
        "def main():\n"
        "    for number in (signal.SIGTERM, signal.SIGHUP):\n"
        "        try: atomic_write('x', lambda part: (part.touch(), os.kill(os.getpid(), number)))\n"
        "        except SystemExit as error: print(error.code, os.listdir(), file=sys.stderr)\n"
        "    os.close(1); os.dup2(os.pipe()[1], 1); print('x')\n"
        "command_line(main)"
    )
    done = python("-c", script, cwd=".")
    assert (done.stderr, done.returncode) == ("143 []\n129 []\n", 141)


def test_json_files():
    """Catches a file that is no JSON object and passes, and half a file where a whole one was."""
    common.write_json("x.json", {"a": [1, 2.5, "é"]})
    with full_disk(5), pytest.raises(UserError, match=r"cannot write x\.json"):
        common.write_json("x.json", {"b": 1})
    assert common.read_json("x.json") == {"a": [1, 2.5, "é"]} and os.listdir() == ["x.json"]
    for content in (b"", b"{", b"[1, 2]", b"null", b"\xff", b"[" * 10**5):
        Path("x.json").write_bytes(content)
        with pytest.raises(UserError, match=r"x\.json cannot be read"):
            common.read_json("x.json")
    with pytest.raises(UserError, match=r"none\.json cannot be read"):
        common.read_json("none.json")
    with pytest.raises(UserError, match=r"cannot write none/x\.json"):
        common.write_json("none/x.json", {})


def test_newest_run_and_devices():
    """Catches another run than the newest, a crash where there is none, and a device that is not here."""
    with pytest.raises(UserError, match=r"python train\.py"):
        checkpoint.newest_run()
    Path("out").touch()  # no folder: it cannot be read
    with pytest.raises(UserError, match="out cannot be read"):
        checkpoint.newest_run(default="another")
    Path("out").unlink()
    for name, when in (("a", 5), ("b", 9), ("c", 7)):
        Path("out", name).mkdir(parents=True)
        Path("out", name, "model.safetensors").touch()
        os.utime(f"out/{name}/model.safetensors", (when, when))
    Path("out/unfinished").mkdir()
    assert checkpoint.newest_run() == Path("out/b")
    with pytest.raises(UserError, match="no training to resume in out"):
        checkpoint.newest_training()
    for name, when in (("b", 8), ("unfinished", 11)):  # the second has no weights yet
        Path("out", name, "log.jsonl").touch()
        os.utime(f"out/{name}/log.jsonl", (when, when))
    assert checkpoint.newest_run() == Path("out/b") and checkpoint.newest_training() == Path("out/unfinished")
    assert hardware.pick_device("cpu").type == "cpu" and hardware.pick_device().type in ("cpu", "cuda", "mps")
    for name in ("tpu", "cuda:99", "", "meta"):
        with pytest.raises(UserError, match=f"device '{name}'"):
            hardware.pick_device(name)


# -- Tokenizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [CODE, "", "日本語\u200d\u0301", "<|endoftext|>", "\x00\r\n\t"])
def test_round_trip(bpe, text):
    """Catches text that does not come back, through a saved and loaded tokenizer too."""
    for one in (Tokenizer.named("bytes"), bpe):
        one.save("t.json")
        again, ids = load_tokenizer("t.json"), one.encode(text)
        assert again.encode(text) == ids and again.digest == one.digest
        assert all(i < one.end_of_text for i in ids)
        assert one.decode([*ids, one.vocab_size + 5]).decode() == text  # padding says nothing
    assert len(bpe.encode(CODE)) < len(CODE.encode()) * 2 / 3


def test_round_trip_of_any_bytes(bpe):
    """Catches invalid UTF-8 that is replaced, also where it touches valid characters."""
    draw = random.Random(0)
    kinds = (
        lambda: draw.randbytes(draw.randint(0, 4)),
        lambda: chr(draw.choice([*range(128), *range(0xD7F0, 0xD800), *range(0xE000, 0xE010)])).encode(),
        lambda: "né😀日".encode()[draw.randint(0, 5) : draw.randint(5, 10)],  # torn characters
        lambda: draw.choice([b"the ", b" " * 30, b"<|endoftext|>", b"\xff\xfe", b"\x00"]),
    )
    for _ in range(2000):
        some = draw.choices(kinds, k=draw.randint(1, 4))
        raw = b"".join(draw.choice(some)() for _ in range(draw.randint(0, 20)))
        assert bpe.decode(bpe.encode(raw)) == raw
        assert bpe.decode(bpe.encode(raw.decode("utf-8", "surrogateescape"))) == raw


def slow_merges(words, size):
    """Byte-pair encoding by its definition: all pairs are counted again for each token."""
    words = [([*word.encode()], count) for word, count in words.items()]
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < size:
        counts = Counter()
        for word, count in words:
            for pair in pairwise(word):
                counts[pair] += count
        if not counts:
            break
        a, b = min(counts, key=lambda pair: (-counts[pair], pair))
        for word, _ in words:
            for i in range(len(word)):
                if word[i : i + 2] == [a, b]:
                    word[i : i + 2] = [len(tokens)]
        tokens.append(tokens[a] + tokens[b])
    return tokens


def test_merges():
    """Catches pairs that are miscounted, as in "aaa", ties by chance, tokens twice, early ends."""
    draw = random.Random(0)
    for _ in range(400):
        letters = draw.choice(["a", "ab", "abé"])
        words = {
            "".join(draw.choices(letters, k=draw.randint(1, 12))): draw.randint(1, 5)
            for _ in range(draw.randint(0, 8))
        }
        tokens = tokenizer.merge_pairs(words, 290)
        assert tokens == slow_merges(words, 290) and len(set(tokens)) == len(tokens), words


def test_endless_blanks(bpe):
    """Catches a run of blanks that overflows tiktoken's stack, in training and encoding."""
    text = " \n" * 750_000 + "a"
    Tokenizer.train([text[-200_000:].encode(), CODE.encode()], 300)
    assert bpe.decode(bpe.encode(text)).decode() == text


# -- Sources ---------------------------------------------------------------------------------------


SOURCE = '''
"""M."""
class C:
    """C."""
    async def f(self):
        """F."""
        "no"
def g(x=lambda: "no"):
    """G."""
try:
    pass
except E:
    def h(): "H."
match 1:
    case 1:
        def i(): "I."
'''


def test_pydocs(tmp_path, monkeypatch):
    """Catches a docstring that is missed or comes twice, another order, and a file of another Python."""
    for name, text in (("a", SOURCE), ("b", '"""M."""'), ("c", "print 'python 2'"), ("d", '"""Two."""')):
        (tmp_path / name).write_text(text)
    files = [(file.name, file) for file in sorted(tmp_path.iterdir())]
    monkeypatch.setattr(sources, "package_files", lambda: iter(files))
    monkeypatch.setattr(sources, "topics", {"lambda": "Two.", "if": "Three."})
    assert sources.pydocs() == [
        ("a", b"M.\n\nC.\n\nF.\n\nG.\n\nH.\n\nI."),
        ("d", b"Two."),
        ("topics/if", b"Three."),
    ]


def test_package_files(monkeypatch):
    """Catches test files in the default corpus, and an unstable order."""
    monkeypatch.setattr(sources, "PACKAGES", ("numpy", "networkx"))
    names = [name for name, _ in sources.package_files()]
    assert len({*names}) == len(names) > 900
    assert not any("/tests/" in name or "site-packages" in name for name in names)
    groups = [(package, [*map(Path, group)]) for package, group in groupby(names, lambda x: x.split("/")[0])]
    assert [package for package, _ in groups] == ["python", *sources.PACKAGES]
    assert all(paths == sorted(paths) for _, paths in groups)


def test_texts_that_are_left_out(tmp_path, capsys):
    """Catches files left out without a word, tables and files of many texts that are learned."""
    folder = tmp_path / "texts"
    (folder / ".git").mkdir(parents=True)
    for name, text in (
        *(("a.txt", b"text"), ("b.txt", "text".encode("utf-16")), ("c.JSON", b"{}"), ("d.txt", b"n\xe9")),
        *((".hidden", b"no"), (".git/text", b"no"), ("empty", b" \n")),
    ):
        (folder / name).write_bytes(text)
    os.truncate(folder / "c.JSON", 10**12)  # more than fits into memory: what is left out is not read
    assert sources.read_documents(folder) == [("a.txt", b"text"), ("d.txt", b"n\xe9")]
    out = capsys.readouterr().out
    assert re.search(r"2 of 5 files .*are skipped: b\.txt, c\.JSON\n", out)
    assert re.search(r"1 of 5 files .*not UTF-8.*: d\.txt\n", out)
    for name in ("a.jsonl", "a.JSONL", "a.parquet"):
        (folder / name).write_text('{"text": "a"}')
        for given in (folder, folder / name):
            with pytest.raises(UserError, match=f"{name} .*python -m lab corpus"):
                open_corpus(str(given))
        (folder / name).unlink()
    assert not Path("data").exists()


def test_a_character_is_not_cut():
    """Catches a held-out part that begins in the middle of a UTF-8 character."""
    for text in ("日本語" * 9, "é" * 15, "plain text, and more of it", "😀"):
        for n in range(3):
            (train,), (val,) = data.split_documents([("a", (text + "é" * n).encode())])
            assert train.decode() + val.decode() == text + "é" * n and val
    odd = b"\x80" * 30  # not UTF-8: no character begins here
    assert data.split_documents([("a", odd)]) == ([odd[:27]], [odd[27:]])
    assert data.split_documents([("a", b"\x80")]) == ([b""], [b"\x80"])


def test_the_name_of_a_folder_does_not_matter(tmp_path, monkeypatch):
    """Catches a text that is split otherwise because its folder was renamed, or is given as '.'."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(120):
        (folder / f"{i}.txt").write_text(f"text {i}\n")
    before = data.split_documents(sources.read_documents(folder))
    assert 0 < len(before[1]) < 20  # by whole documents
    moved = folder.rename(tmp_path / "moved")
    assert data.split_documents(sources.read_documents(moved)) == before
    monkeypatch.chdir(moved)
    assert data.split_documents(sources.read_documents(Path("."))) == before


@pytest.mark.parametrize("turned", [False, True])
def test_links(turned, tmp_path, monkeypatch):
    """Catches links not followed, followed twice or for ever, that lead nowhere; and a pipe that is read; and
    a corpus that depends on the order in which a disk lists a folder."""
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: sorted(listed(folder), reverse=turned))
    folder, other = tmp_path / "texts", tmp_path / "other"
    (folder / "sub").mkdir(parents=True)
    (other / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (other / "deep/b.txt").write_text("b")
    (folder / "c.txt").symlink_to(folder / "a.txt")
    (folder / "more").symlink_to(other)
    (folder / "sub/up").symlink_to(folder)
    (other / "deep/again").symlink_to(other)
    os.mkfifo(folder / "pipe")  # which nobody writes to: it would be read for ever
    texts = [("a.txt", b"a"), ("c.txt", b"a"), ("more/deep/b.txt", b"b")]
    assert sources.read_documents(folder) == texts
    (tmp_path / "link").symlink_to(folder)
    assert sources.read_documents(tmp_path / "link") == texts
    for target in ("nowhere", "d.txt"):  # the second leads to itself
        (folder / "d.txt").symlink_to(target)
        with pytest.raises(OSError) as error:
            open_corpus(str(folder))
        assert str(error.value.filename).endswith("/d.txt")
        (folder / "d.txt").unlink()


# -- Documents -> ids ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [b"", b"a\nb", b"a" * 10**6, b"line\n" * 500_000, "日".encode() * 700_000, b"\n" + b"x" * 1_500_000],
    ids=lambda text: f"{text[:5]} {len(text)}",
)
def test_pieces(text, bpe):
    """Catches a text cut inside a line where it need not be, or that loses something, also at a character."""
    pieces = list(tokenizer.pieces_of(text))
    assert b"".join(pieces) == text and max(map(len, pieces), default=0) <= 10**6
    assert all(b"\n" not in a or a.endswith(b"\n") for a, _ in pairwise(pieces))
    few = [piece[-99:] for piece in pieces[:1]] + [piece[:99] for piece in pieces[1:2]]
    assert b"".join(bpe.decode(bpe.encode(piece)) for piece in few) == b"".join(few)


def test_divide():
    """Catches documents cut in two without need, and a corpus without any validation or training."""
    documents = [(f"f{i}", f"text {i}".encode()) for i in range(400)]
    train, val = data.split_documents(documents)
    assert sorted(train + val) == sorted(text for _, text in documents) and 8 < len(val) < 40
    held_out = [f"f{i}" for i in range(4000) if int(sha1(b"f%d" % i).hexdigest(), 16) % 20 == 0]
    others = [f"f{i}" for i in range(150) if f"f{i}" not in held_out]
    for names in (held_out, others):  # all would be on one side
        train, val = data.split_documents([(name, b"0123456789") for name in names[:100]])
        assert train == [b"012345678"] * 100 and val == [b"9"] * 100
    assert data.split_documents([("a", b"ab"), ("b", b"cd")]) == ([b"a", b"c"], [b"b", b"d"])


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
    assert len(corpus.val) == 3 * 81 and corpus.val_bytes == 3 * 80
    assert [p.name for p in Path("data").iterdir()] == [corpus.name]
    assert open_corpus(str(texts)).name == corpus.name
    (texts / "3.txt").write_text("more")
    assert open_corpus(str(texts)).name != corpus.name


def test_fingerprint():
    """Catches a run that resumes on another text, and one that does not on the same."""
    ids = np.arange(100, dtype=np.uint16)
    corpus = Corpus("a", Tokenizer.named("bytes"), 257, ids, ids[:50], "from somewhere")
    known = corpus.fingerprint()
    assert known["name"] == "a" and known["sha256"] == sha256(np.tile(ids, 2).tobytes()).hexdigest()
    assert (known["train_tokens"], known["val_tokens"], known["tokenizer"]) == (100, 50, "5801ed9e")
    corpus.val = ids[1:51]
    assert corpus.fingerprint()["val_sha256"] != known["val_sha256"]
    corpus.train = np.arange(2_500_000, dtype=np.uint32)
    ends = np.concatenate([corpus.train[:1_000_000], corpus.train[1_500_000:]])
    assert corpus.fingerprint()["sha256"] == sha256(ends.tobytes()).hexdigest()


def test_names_in_the_cache(tmp_path):
    """Catches prepared corpora that are not found any more, are others, or need the network again."""
    Path("text.txt").write_text("the quick brown fox. " * 100)
    corpus = open_corpus("text.txt")
    assert corpus.name == "text-bytes-1f655a00"
    folder = Path("data") / corpus.name
    assert sha256((folder / "train.bin").read_bytes()).hexdigest().startswith("a13707bc4b08c76b")
    corpus = open_corpus("text.txt", "bpe", 300)
    assert (corpus.name, corpus.tokenizer.digest) == ("text-bpe300-019e43b6", "86419895")
    folder.rename(folder.with_name("text-gpt2-44cdd419"))
    assert open_corpus("text.txt", "gpt2").name == "text-gpt2-44cdd419"


@pytest.mark.parametrize(
    "name,flags,message",
    [
        ("blank.txt", [], "holds no text"),
        *((name, [], f"{name} holds no text") for name in ("a.json", "a.CSV")),
        ("missing.txt", [], "'missing.txt'"),
        ("", [], "--data ''"),
        ("text.txt", ["bpe", 257], "--vocab-size 257"),
        ("text.txt", ["no/where"], "--tokenizer no/where"),
        ("pydocs", ["gpt2"], "--tokenizer bytes"),  # before minutes of reading
    ],
)
def test_refused(name, flags, message, monkeypatch):
    """Catches a stack trace where one line should name the problem and the way out."""
    monkeypatch.setitem(sources.SOURCES, "pydocs", lambda: pytest.fail("the text was read before"))
    for file, text in (("blank.txt", " \n"), ("text.txt", TEXT), ("a.json", "[1]"), ("a.CSV", "1, 2")):
        Path(file).write_text(text)
    with pytest.raises(UserError, match=message):
        open_corpus(name, *flags)


def test_full_disk():
    """Catches a full disk without a word of which file, and half a corpus that is left."""
    Path("text.txt").write_text("0123456789" * 10_000)
    with full_disk(50_000), pytest.raises(UserError, match=r"cannot write data/text-bytes-.*train\.bin: "):
        open_corpus("text.txt")
    assert not any(Path("data").iterdir())


def test_two_at_once(monkeypatch):
    """Catches a program that fails where another one has prepared the same text just before."""
    Path("text.txt").write_text("0123456789" * 100)
    rename, others = Path.rename, []

    def renamed(half, folder):
        if not others:
            others.append(None)
            others.append(open_corpus("text.txt"))
        return rename(half, folder)

    monkeypatch.setattr(Path, "rename", renamed)
    assert open_corpus("text.txt").fingerprint() == others[1].fingerprint()
    assert [path.name for path in Path("data").iterdir()] == [others[1].name]


# -- Folders of .bin files -------------------------------------------------------------------------


def write_bins(folder, ids, kind=np.uint16):
    for name in ("train.bin", "val.bin"):
        np.array(ids, dtype=kind).tofile(folder / name)


def fake_gpt2():
    """As many tokens as GPT-2 has, of which the first are the bytes."""
    token = lambda i: bytes([i]) if i < 256 else i.to_bytes(3, "big")  # noqa: E731
    return types.SimpleNamespace(eot_token=50_256, decode_single_token_bytes=token)


@pytest.mark.parametrize("size, padded", [(1023, 1023), (1025, 1088)])
def test_padding(size, padded):
    """Catches a large table that no GPU multiplies fast, and a small one that is padded."""
    pairs = [bytes([i // 250, i % 250]) for i in range(size - 257)]
    tokenizer = Tokenizer("bpe", [*(bytes([i]) for i in range(256)), *pairs])
    data.write_corpus(Path("data/padded"), "here", [("a", b"a text of some length")], tokenizer)
    assert (tokenizer.vocab_size, open_corpus("data/padded").vocab_size) == (size, padded)


def test_nanogpt_folders(tmp_path, monkeypatch):
    """Catches nanoGPT's folders not taken as they are, and ids of characters that are taken for GPT-2's."""
    write_bins(tmp_path, [0, 1, 2, 3] * 50)
    with pytest.raises(UserError, match="--tokenizer bytes"):  # for want of the network
        open_corpus(str(tmp_path))
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: fake_gpt2())
    corpus = open_corpus(str(tmp_path))
    assert corpus.name == tmp_path.name and corpus.vocab_size == 50_304 and len(corpus.train) == 200
    assert corpus.tokenizer.name == "gpt2" and corpus.val_bytes is None
    with pytest.raises(UserError, match="bpe"):
        open_corpus(str(tmp_path), "bpe")
    (tmp_path / "meta.pkl").write_bytes(b"a pickle")
    with pytest.raises(UserError, match=r"meta\.pkl"):
        open_corpus(str(tmp_path))
    Tokenizer.named("bytes").save(tmp_path / "tokenizer.json")
    (tmp_path / "meta.json").write_text('{"vocab_size": 65}')  # somebody else's
    assert open_corpus(str(tmp_path)).tokenizer.name == "bytes"


def test_wide_ids(tmp_path):
    """Catches 32-bit ids read as half as wide, a type that is stated and not believed; an entropy in bits."""
    ids = np.random.default_rng(0).integers(1, 257, 3_000)
    write_bins(tmp_path, ids, np.uint32)
    Tokenizer.named("bytes").save(tmp_path / "tokenizer.json")
    for meta in ({}, {"dtype": "uint16"}):
        (tmp_path / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(UserError, match=r'train\.bin .*"dtype": "uint32"'):
            open_corpus(str(tmp_path))
    for kind in ("uint32", "uint64", "uint8"):
        write_bins(tmp_path, ids % 256, kind)
        (tmp_path / "meta.json").write_text(json.dumps({"dtype": kind}))
        corpus = open_corpus(str(tmp_path))
        assert np.array_equal(corpus.train, ids % 256)
        assert Windows(corpus.train, 8, 0).stack(0, 2).dtype == torch.int64
    assert data.unigram_entropy(np.array([0, 1, 0, 1], np.uint16), 5) == pytest.approx(np.log(2))


OURS = Tokenizer.named("bytes").fields()
BPE = OURS | {"name": "bpe", "pattern": tokenizer.GPT2_SPLIT_PATTERN}
PAIRS = b"\1\0" * 100


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("train.bin", PAIRS + b"\1", "multiple"),
        ("train.bin", np.array([1, 300] * 50, np.uint16).tobytes(), "300.*--tokenizer"),
        ("train.bin", b"", "empty"),
        ("train.bin", Path("/dev/zero"), ""),  # nothing that ends
        ("meta.json", {"dtype": "O"}, "dtype"),  # bytes as pointers
        ("meta.json", {"dtype": ["uint16"]}, "dtype"),
        ("meta.json", [1], ""),
        ("tokenizer.json", b"[]", ""),
        ("tokenizer.json", {"model": {"type": "BPE"}, "version": "1.0"}, "python -m lab"),
        ("tokenizer.json", OURS | {"tokens": {"a": 1}}, ""),  # with which tiktoken ends the process
        ("tokenizer.json", OURS | {"tokens": ["YQ==", "YQ=="]}, "twice"),
        ("tokenizer.json", OURS | {"tokens": ["YQ=="]}, "every single byte"),
        ("tokenizer.json", BPE | {"tokens": [*OURS["tokens"], ""]}, "empty"),
        ("tokenizer.json", OURS | {"tokens": [5]}, ""),
        ("tokenizer.json", OURS | {"tokens": OURS["tokens"][::-1]}, "token i must be byte i"),
        (
            "tokenizer.json",
            OURS | {"name": "../../x"},
            "not a tokenizer that train.py or data.py wrote",
        ),  # names are parts of paths
        ("tokenizer.json", OURS | {"name": "bpe"}, "pattern"),
        ("tokenizer.json", OURS | {"name": ["bytes"]}, ""),
        ("tokenizer.json", OURS | {"pattern": "(a+)+$"}, "pattern"),  # which runs for ever
        ("tokenizer.json", {}, ""),
    ],
)
def test_damaged_files(tmp_path, name, content, words):
    """Catches garbage that is trained on, a crash, and a path or a pattern from a stranger's file."""
    write_bins(tmp_path, [1, 2, 3])
    Tokenizer.named("bytes").save(tmp_path / "tokenizer.json")
    assert len(open_corpus(str(tmp_path)).train) == 3
    (tmp_path / name).unlink(missing_ok=True)
    if isinstance(content, Path):
        (tmp_path / name).symlink_to(content)
    else:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(UserError, match=rf"{name}.*{words}"):
        open_corpus(str(tmp_path))


# -- Windows ---------------------------------------------------------------------------------------


def test_windows():
    """Catches windows that come twice in an epoch or never, targets not shifted, and another order."""
    windows = Windows(np.arange(110, dtype=np.uint16), 10, seed=3)
    assert windows.count == 10  # the 11th would lack its last target
    rows = windows.stack(0, 20)  # (20, T+1), two epochs
    assert rows.diff().eq(1).all()
    epochs = [epoch[:, :-1].flatten() for epoch in rows.split(10)]
    assert all(sorted(epoch.tolist()) == list(range(100)) for epoch in epochs)
    assert not torch.equal(*epochs)
    assert torch.equal(windows.stack(15, 17), rows[15:17]) and torch.equal(windows.stack(3, 5), rows[3:5])
    assert not torch.equal(Windows(windows.tokens, 10, seed=4).stack(0, 20), rows)
    order = [9, 6, 0, 2, 1, 4, 7, 5, 3, 8]  # in another one a run that is resumed would see some twice
    assert [int(row[0]) // 10 for row in rows[:10]] == order


def test_too_few_tokens(tmp_path):
    """Catches less than a window with its target, and a message that does not say of which file."""
    write_bins(tmp_path, np.arange(1, 65))
    ids = np.memmap(tmp_path / "val.bin", np.uint16, mode="r")
    assert Windows(ids, 63, seed=0).count == 1
    with pytest.raises(UserError, match=r"val\.bin .*--block-size"):
        Windows(ids, 64, seed=0)
