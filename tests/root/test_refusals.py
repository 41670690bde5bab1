"""What is wrong is said before minutes of work, by its name and with the way out; what is not wrong
passes."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, small_model

import analyze
import checkpoint
import data
import sample
import train
from checkpoint import load, locked, make_run_folder, open_model, save
from common import UserError, check_writable, command_line
from data import open_corpus, open_ids
from model import validated_dataclass
from sources import read_documents
from tokenizer import WHITESPACE_PIECE, Tokenizer, load_tokenizer
from train import parse

# -- Flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, flags, said",
    [
        (train, ["--tau", "2"], "--tau 2.0: it must be at most 1"),
        (train, ["--steps", "0"], "--steps 0: it must be at least 1"),
        (train, ["--betas", "0.9", "3"], "--betas 3.0: it must be less than 1"),
        (train, ["--hidden-size", "97", "--head-dim", "None"], "--hidden-size 97 is not divisible by"),
        (train, ["--num-key-value-heads", "3"], "--num-key-value-heads 3: it must divide"),
        (train, ["--router-offset", "1", "2"], "--router-offset (1.0, 2.0): for 3 pondering steps"),
        (train, ["--name", "a/b"], "--name 'a/b' cannot be the name of a folder"),
        (sample, ["--temperature", "-1"], "--temperature -1.0: it must be at least 0"),
    ],
)
def test_a_value_out_of_range(script, flags, said):
    """Catches an error that is not one line, or that names a setting and not the flag as it was typed:
    parsed in groups, tyro printed pydantic's words in a box, with a link to its documentation."""
    with pytest.raises(SystemExit) as caught:
        command_line(lambda: script.parse(flags))
    assert str(caught.value).startswith(f"error: {said}") and "\n" not in str(caught.value)


def test_a_vocabulary_size_without_a_bpe():
    """Catches data.py with a --vocab-size that it ignores."""
    Path("text.txt").write_text("A text. " * 100)
    with pytest.raises(UserError, match="--vocab-size 500 applies to a BPE"):
        data.main("text.txt", vocab_size=500)
    data.main("text.txt")


def test_a_bpe_that_is_too_small(monkeypatch):
    """Catches a refusal that comes after the text has been read, which takes a while."""
    monkeypatch.setitem(data.SOURCES, "pydocs", lambda: pytest.fail("the text was read"))
    with pytest.raises(UserError, match="--vocab-size 200 is too small for a BPE: use more than 257"):
        open_corpus("pydocs", "bpe", 200)


def test_data_that_is_no_file():
    """Catches "Not a directory" in the place of what --data may be."""
    with pytest.raises(UserError, match="--data '/dev/null' is not a file or folder"):
        open_corpus("/dev/null")


def test_a_missing_setting():
    """Catches a setting that is missing and is told by pydantic's own name for all arguments, ArgsKwargs."""

    @validated_dataclass
    class Settings:
        factor: float

    with pytest.raises(SystemExit, match=r"^error: factor is missing$"):
        command_line(Settings)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


# -- Ids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["int64", "int32", "uint32", "uint16"])
@pytest.mark.parametrize("vocab_size", [257, 50_257, 128_000])
def test_ids_of_another_type(written, vocab_size):
    """Catches ids that are read as a narrower type than they were written in, so that a model is trained on
    zeros; and right ones that are refused."""
    if written == "uint16" and vocab_size > 2**16:
        pytest.skip("such ids do not fit")
    ids = np.random.default_rng(0).integers(1, vocab_size, 1000)
    ids.astype(written).tofile("train.bin")
    usual = "uint16" if vocab_size <= 2**16 else "uint32"
    right = {"int64": "uint64", "int32": "uint32"}.get(written, written)
    if right == usual:
        assert (open_ids(Path("train.bin"), None, vocab_size) == ids).all()
    else:
        with pytest.raises(UserError, match=rf"looks like {right}, not {usual}: .*meta\.json"):
            open_ids(Path("train.bin"), None, vocab_size)
    assert (open_ids(Path("train.bin"), right, vocab_size) == ids).all()


def test_a_header():
    """Catches the header of a file of llm.c that is read as tokens."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, 500
    ids = np.random.default_rng(0).integers(1, 50_000, 500).astype(np.uint16)
    Path("train.bin").write_bytes(header.tobytes() + ids.tobytes())
    with pytest.raises(UserError, match=r"header.*1,024 bytes"):
        open_ids(Path("train.bin"), None, 50_257)


# -- Files that are not text -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, words",
    [
        *(("a.gz", "unpack"), ("a.jsonl.gz", "unpack"), ("b.tar", "unpack"), ("c.ZIP", "unpack")),
        *(("d.arrow", "save_to_disk.*to_json"), ("e.ndjson", "lab corpus"), ("f.parquet", "lab corpus")),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_not_text(name, words, alone):
    """Catches a compressed file, a data set or JSON lines that are trained on as they are, or left out."""
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("A text.")
    Path("texts", name).write_bytes(b'{"text": "a"}\n' * 9)
    with pytest.raises(UserError, match=words):
        read_documents(Path("texts", name) if alone else Path("texts"))


def test_git_lfs(byte_model):
    """Catches the pointer of a file that git did not fetch which is read as the file itself."""
    Path("text.txt").write_bytes(POINTER)
    with pytest.raises(UserError, match="git lfs pull"):
        read_documents(Path("text.txt"))
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copytree(byte_model, name)
        Path(name, name).write_bytes(POINTER)
        with pytest.raises(UserError, match="git lfs pull"):
            load_tokenizer(Path(name, name)) if name == "tokenizer.json" else checkpoint.open_model(name)


def test_long_blanks(bpe_of_blanks, monkeypatch):
    """Catches runs of blanks that take tiktoken quadratic time, wherever they stand; other ids for a text
    without such runs; and a text that does not come back. What tiktoken is given is looked at, since time
    is no test."""
    tokenizer, given = bpe_of_blanks, []
    real = tokenizer.encoding.encode_ordinary
    monkeypatch.setattr(tokenizer.encoding, "encode_ordinary", lambda text: given.append(text) or real(text))
    for n in (WHITESPACE_PIECE - 1, WHITESPACE_PIECE, 12_345):
        text = "".join(f"a{' ' * n}b\n{' ' * n}" for _ in range(3)) + "\t" * n
        given.clear()
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids).decode() == text
        longest = max(max(len(run) for run in "".join("x" if c.isalpha() else " " for c in piece).split("x"))
                      for piece in given)  # fmt: skip
        assert longest <= WHITESPACE_PIECE + 1
    short = "a   b\n\n   c" * 50
    assert tokenizer.encode(short) == real(short)


@pytest.fixture
def bpe_of_blanks():
    return Tokenizer.train([(" " * 64 + "a b\n").encode() * 50], 280)


# -- Folders and file systems ----------------------------------------------------------------------


def test_a_folder_that_cannot_be_written(monkeypatch):
    """Catches docstrings that are read, or a model that is measured, before it is seen that the result
    cannot be written (pretended: a file in the place of the folder, which stops root, too)."""
    Path("data").touch()
    Path("text.txt").write_text("A text. " * 100)
    monkeypatch.setattr("data.SOURCES", {"pydocs": lambda: pytest.fail("was read")})
    for source in ("pydocs", "text.txt"):
        with pytest.raises(UserError, match=r"folder data .*folder of your own"):
            open_corpus(source)
    monkeypatch.setattr(analyze, "measure_run", lambda *_: pytest.fail("was measured"))
    Path("run").mkdir()
    Path("run/report").touch()
    with pytest.raises(UserError, match=r"run/report .*--out"):
        analyze.main(analyze.Options("tau", run=Path("run")))
    check_writable("new/folder", "")
    assert Path("new/folder").is_dir() and not list(Path("new/folder").iterdir())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, 524])
def test_no_locks(number, monkeypatch, capsys):
    """Catches a run that cannot be trained on a file system without locks (pretended: flock fails)."""

    def acquire(self, *_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint.filelock.FileLock, "acquire", acquire)
    with locked(Path("run")):
        pass
    assert "note: run cannot be locked" in capsys.readouterr().out
    monkeypatch.setattr(checkpoint, "NO_LOCKS", set())
    with pytest.raises(OSError, match="Errno"), locked(Path("run")):
        pass


def test_no_flock(monkeypatch, capsys):
    """Catches an old .lock that is taken for one that is held, where the file system has no flock
    (pretended)."""

    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    Path("run").mkdir()
    Path("run/.lock").touch()
    os.utime("run/.lock", (0, 0))
    with locked(Path("run")):
        pass
    assert "note: run cannot be locked" in capsys.readouterr().out


def test_a_path_that_is_no_utf8():
    """Catches a training that cannot be resumed, since train.json cannot be read."""
    name = os.fsdecode(b"caf\xe9.txt")
    Path(name).write_text("A text. " * 100)
    config, model_config = parse(["--preset", "tiny", "--device", "cpu", "--steps", "1", "--data", name])
    with pytest.raises(UserError, match=r"^--data 'caf\\udce9.txt' is not valid UTF-8"):
        train.train(config, model_config)


def test_a_long_name():
    """Catches a text whose folder would have a name that is too long."""
    Path("x" * 240 + ".txt").write_text("A text. " * 100)
    assert open_corpus("x" * 240 + ".txt").train.size


def test_a_config_without_settings():
    """Catches a traceback for a config.json that holds something else."""
    Path("run").mkdir()
    Path("run/config.json").write_text("null")
    with pytest.raises(UserError, match="does not hold a JSON object"):
        open_model("run")


def test_no_standard_output():
    """Catches a command that cannot run where standard output is closed, as under some daemons."""
    Path("text.txt").write_text("A text. " * 100)
    command = [sys.executable, str(ROOT / "data.py"), "--data", "text.txt"]
    done = subprocess.run(command, preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


def test_no_modes(monkeypatch):
    """Catches a model that cannot be saved where files have no modes, and files that are left (pretended:
    chmod fails, as on CIFS)."""

    def copymode(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(checkpoint.shutil, "copymode", copymode)
    save(small_model().float(), "run")
    load("run")
    assert sorted(os.listdir("run")) == ["config.json", "model.safetensors"]


def test_names_of_the_same_second():
    """Catches a training that fails since another one was begun in the same second."""
    runs = [make_run_folder("out", "tiny-1128-120000") for _ in range(3)]
    assert [run.name for run in runs] == ["tiny-1128-120000", "tiny-1128-120000-2", "tiny-1128-120000-3"]


# -- Flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--ponder-steps 0 --step-price 0.1", "--step-price 0.1 has no effect"),
        ("--tokenizer bytes --vocab-size 300", "--vocab-size 300 applies to a BPE"),
        ("--vocab-size 300", "--vocab-size 300 applies to a BPE"),
        ("--vocab-size 300 --data ids", "--vocab-size 300 has no effect on ids"),
        ("--tokenizer bpe", None),
        ("--tokenizer bpe --vocab-size 300", None),
        ("--preset small --ponder-steps 0", None),
    ],
)
def test_flags_that_change_nothing(flags, message):
    """Catches a setting that is taken, recorded and ignored; and the preset's price that is in the way."""
    Path("ids").mkdir()
    Path("ids/train.bin").touch()
    argv = ["--preset", "tiny", "--device", "cpu", *flags.split()]
    if message:
        with pytest.raises(UserError, match=message):
            parse(argv)
    else:
        config, model_config = parse(argv)
        sizes = {"--tokenizer bpe": 4096, "--tokenizer bpe --vocab-size 300": 300}
        assert model_config.vocab_size == sizes.get(flags, 4096)
        assert config.step_price == 0


@pytest.mark.parametrize(
    "figure, flags, message",
    [
        ("pareto", dict(tau=0.1), "pareto does not use --tau"),
        ("pareto", dict(run=Path("a")), "pareto does not use --run:"),
        ("pareto", dict(windows=8), "pareto does not use --windows"),
        ("converge", dict(tau=0.1), "converge does not use --tau"),
        ("converge", dict(windows=9), "--windows 9 is too many"),
        ("tau", dict(runs=("a",)), "tau does not use --runs"),
        ("curve", dict(data="a"), "curve does not use --data"),
        ("curve", dict(run=Path("a"), runs=("a",)), "not both"),
    ],
)
def test_flags_of_another_figure(figure, flags, message):
    """Catches a flag that a figure takes and ignores."""
    with pytest.raises(UserError, match=message):
        analyze.main(analyze.Options(figure, **flags))
