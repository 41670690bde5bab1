"""`train.py --grow`: stages that begin from each other, in one command that can be stopped."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

import train
from interop import load
from runtime import UserError
from training.config import parse, read_run
from training.growing import stages
from training.runs import checkpoints, read_lines

SHAPE = "--hidden-size 16 --intermediate-size 16 --num-hidden-layers 1 --num-attention-heads 2"
FLAGS = f"--data text.txt --preset tiny {SHAPE} --head-dim 8 --block-size 16 --eval-every 3"


@pytest.fixture
def grow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{i} and {i * i}\n" for i in range(2000)))

    def run(schedule, *flags):
        monkeypatch.setattr(sys, "argv", ["train.py", "--grow", schedule, *FLAGS.split(), *flags])
        train.main()

    return run


def test_stages(grow, capsys):
    """Catches a stage that does not begin from the one before, sees the same text again, or has
    other steps; and a command that, given again, is another training or trains anew."""
    grow("1:4,3:6")
    one, three = load("out/grown-K1"), load("out/grown-K3")
    assert (one.config.ponder_steps, three.config.ponder_steps) == (1, 3)
    rates = [read_run(f"out/grown-K{K}")[1].learning_rate for K in (1, 3)]
    assert rates == [4e-3, 2e-3]
    with pytest.raises(UserError, match=r"grown-K3 takes 3, which can become more, not fewer"):
        parse(["--init-from", "out/grown-K3", "--ponder-steps", "2"])
    assert read_lines(Path("out/grown-K3/log.jsonl"))[-1]["step"] == 6
    first = capsys.readouterr().out
    trained = three.state_dict()
    for lost in (1, 2):  # stopped after 3 of 6 steps, or before the first of them was saved
        for checkpoint in checkpoints(Path("out/grown-K3"))[-lost:]:
            shutil.rmtree(checkpoint)
        Path("out/grown-K3/results.json").unlink()
        grow("1:4,3:6")
        out = capsys.readouterr().out
        assert "resumed at step" in out and "grown-K1:" not in out
        again = load("out/grown-K3").state_dict()
        assert all(torch.equal(trained[name], again[name]) for name in trained)
    grow("1:4,3:6")
    again = capsys.readouterr().out.splitlines()
    assert [line[:24] for line in again] == [f"out/grown-K{K} is trained;" for K in (1, 3)]
    assert "step 4/4" in first and "step 6/6" in first


def test_own_tokenizer(grow):
    """Catches a second stage that would make another vocabulary than the first one's."""
    grow("1:1,2:1", "--tokenizer", "bpe", "--vocab-size", "1100")
    assert load("out/grown-K2").config.vocab_size == load("out/grown-K1").config.vocab_size > 1000


def test_name_of_a_folder(grow):
    """Catches a first stage that is trained where the second does not look for it."""
    with pytest.raises(UserError, match="--name 'a/b' is not a plain name"):
        grow("1:1,2:1", "--name", "a/b")


def test_another_command(grow):
    """Catches stages that are mixed: of other flags or another schedule, or without their start."""
    grow("1:2,2:2", "--name", "a")
    others = ("1:2,3:2", []), ("3:2", []), ("1:2,2:2", ["--learning-rate", "0.1"])
    for schedule, flags in others:
        with pytest.raises(UserError, match=r"were begun by '--grow 1:2,2:2 .*another --name"):
            grow(schedule, "--name", "a", *flags)
    kept = Path("out/a-grow.json").rename("elsewhere")
    with pytest.raises(UserError, match="a command that is not known any more"):
        grow("1:2,2:2", "--name", "a")
    kept.rename("out/a-grow.json")
    shutil.rmtree("out/a-K1")
    with pytest.raises(UserError, match="a-K1 is gone, but not the stages after it"):
        grow("1:2,2:2", "--name", "a")


def test_stopped(grow, monkeypatch, capsys):
    """Catches a next stage that begins from a stopped one, and a way on that leaves stages out."""
    trained = []

    def stopped(config):
        trained.append(config.model.ponder_steps)
        return Path("out/grown-K1"), None

    monkeypatch.setattr(train, "train", stopped)
    with pytest.raises(SystemExit) as end:
        grow("1:2,2:2")
    assert trained == [1] and end.value.code == 130
    assert "the same command goes on" in capsys.readouterr().out


def test_flags(tmp_path):
    """Catches a stage with another name, seed or start than the page says, and other commands that
    are changed."""
    argv = ["--grow", "1:5,2:6", "--out", str(tmp_path), "--name", "a", "--seed", "4"]
    first, second = stages([*argv, "--clip", "1"])
    where = ["--out", str(tmp_path), "--name"]
    of_first = ["--seed", "4", "--ponder-steps", "1", "--steps", "5"]
    assert first == ["--clip", "1", *where, "a-K1", *of_first]
    start = ["--init-from", str(tmp_path / "a-K1")]
    of_second = ["--seed", "5", "--ponder-steps", "2", "--steps", "6"]
    assert second == [*start, "--clip", "1", *where, "a-K2", *of_second]
    assert [*stages(["--steps", "3"])] == [["--steps", "3"]]


@pytest.mark.parametrize(
    "flags,message",
    [
        ("--grow 1", "--grow 1: it should be K:steps"),
        ("--grow 0:5,1:5", "it should be K:steps"),
        ("--grow 2:5,2:5", "needs more steps a token than the one before"),
        ("--grow 1:5 --router-offset 0 6", "--router-offset does not go with --grow"),
        ("--grow 1:5 --steps 3", "--steps does not go with --grow"),
        ("--grow 1:5 --ponder_steps=3", "--ponder-steps does not go with --grow"),
        ("--grow 1:5 --resume", "--resume does not go with --grow"),
        ("--grow 1:5 --init-from out/a", "--init-from does not go with --grow"),
        ("--grow=1:60,2:20 --ponder-warmup 30", "ponder_warmup = 30: .* of 20 steps"),
    ],
)
def test_refusals(flags, message):
    """Catches a schedule that would train something else than it says."""
    with pytest.raises(UserError, match=message):
        next(stages(flags.split()))
