"""The simple decoder: what it says, how it chooses, and its command line."""

import json

import pytest
import torch
from conftest import full_disk, small_model

from engine.request import Options, choose_finite, paint, uniform
from runtime import UserError, command_line
from sample import generate, main


def test_generate_is_greedy_argmax_of_the_parallel_form():
    """Catches a decoder that continues from other logits than the model's, and wrong steps, or a
    count of them, from which the saving is printed, that misses tokens."""
    prompt, differ = [3, 1, 4], 0
    for seed in range(6):
        model, read = small_model(seed=seed), []
        (sample,) = generate(model, [prompt], 8, tau=0.3, temperature=0, read=read)
        with torch.no_grad():
            out = model(torch.tensor([prompt + sample.tokens]), tau=0.3, R=33)
        assert sample.tokens == out.logits[0, 2:-1].argmax(-1).tolist()
        assert sample.steps == read[2:] and read == out.steps[0, :-1].tolist()
        differ += len(set(sample.steps)) > 1
    assert differ >= 2


def test_seeds_and_independence():
    """Catches prompts that share random numbers, and a seed that does not repeat."""
    model, prompts = small_model(), [[1, 2], torch.tensor([5, 6, 7])]
    a, b = generate(model, prompts, 12, seed=5), generate(model, prompts, 12, seed=5)
    assert a == b
    assert generate(model, prompts[1:], 12, seed=6) == a[1:]
    assert generate(model, prompts, 12, seed=7) != a


def test_longer_than_the_window():
    """Catches a crash at the window's end, and a context other than the documented last half."""
    model = small_model(block_size=8)
    (sample,) = generate(model, [[1, 2, 3]], 30, temperature=0)
    assert len(sample.tokens) == 30
    context = [1, 2, 3, *sample.tokens]
    # 9 tokens do not fit: the last 4 of them begin a new context.
    assert generate(model, [context[5:9]], 4, temperature=0)[0].tokens == context[9:13]
    (long,) = generate(model, [list(range(20))], 1, temperature=0)
    assert long == generate(model, [list(range(16, 20))], 1, temperature=0)[0]


def test_choices():
    """Catches top-k or top-p that keeps one too many or few, and an unused temperature."""
    logits, u = torch.tensor([0.1, 0.4, 0.2, 0.3]).log(), uniform(0, 1000)
    draw = lambda *args: set(choose_finite(logits.expand(1000, 4), u, *args).tolist())  # noqa: E731
    assert draw(0, None, None) == {1}
    assert draw(1, None, None) == {0, 1, 2, 3}
    assert draw(1, 2, None) == {1, 3}
    assert draw(1, None, 0.39) == {1}
    assert draw(1, None, 0.41) == {1, 3}
    assert draw(1, 3, 0.99) == {1, 2, 3}
    assert draw(0.02, None, None) == {1}
    assert choose_finite(torch.tensor([-torch.inf, 1.0, 1.0]), torch.tensor(0.0)) == 1  # never 0


@pytest.mark.parametrize("args", [(1.0,), (0.5,), (1.0, 3), (1.0, None, 0.65)])
def test_frequencies(args):
    """Catches tokens chosen more or less often than their probability, and rows mixed up."""
    rows, u = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.0, 0.2, 0.1]]), uniform(1, 20_000)
    for row in rows:
        p = row ** (1 / args[0])
        if len(args) == 2:
            p[row.argsort()[: 4 - args[1]]] = 0
        if len(args) == 3:
            p = torch.where(row >= 0.3, p, 0)
        counts = choose_finite(row.log().expand(20_000, 4), u, *args).bincount(minlength=4)
        assert ((counts / 20_000 - p / p.sum()).abs() < 0.015).all()
    two = choose_finite(rows.log(), u[:2], *args).tolist()
    assert two == [int(choose_finite(row.log(), u[i], *args)) for i, row in enumerate(rows)]


def test_paint():
    """Catches steps that cannot be told apart without colours."""
    assert paint("a", 3, 3, color=False) == "a₃" and paint("a", 12, 12, color=False) == "a₁₂"
    assert len({paint("a", k, 3, color=True) for k in range(4)}) == 4


def sample_by_command(byte_model, **options):
    main(Options(**{"run": byte_model, "device": "cpu", "tau": 0.3, **options}))


def test_show_steps(byte_model, monkeypatch, capsys):
    """Catches a token that is painted with another one's steps, and an end that is shown."""
    pairs = [(102, 1), (0xC3, 0), (0xA9, 3), (120, 2), (256, 2)]  # a character of two tokens
    said = lambda *args, read, **kwargs: read.append(1) or iter(pairs)  # noqa: E731
    monkeypatch.setattr("sample.stream", said)
    sample_by_command(byte_model, prompt="a", show_steps=True)
    assert "\naf₁é₃x₂\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content,options,message",
    [
        ("", {}, "has no prompt in it"),
        (b"\xff\xfe", {}, "is not UTF-8 text"),
        ("a", dict(prompt="b"), "--prompt and --prompts exclude each other"),
        ("a", dict(num_samples=0), "num_samples = 0"),
        ("a", dict(top_p=0.0), "top_p = 0.0"),
        ("a", dict(tau=-1.0), "tau = -1.0"),
    ],
)
def test_refused_commands(content, options, message, byte_model, tmp_path):
    """Catches a file of samples that is made before what is wrong is noticed, or said."""
    file, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        command_line(lambda: sample_by_command(byte_model, prompts=str(file), out=out, **options))
    assert not out.exists()


def test_nothing_is_overwritten(byte_model, tmp_path):
    """Catches samples that are written over the prompts, or to something that is no file."""
    file = tmp_path / "prompts.txt"
    file.write_text("kept")
    for out, message in (
        (file, r"prompts\.txt: File exists"),
        (tmp_path, "File exists"),
        (tmp_path / "none" / "new", "No such file or directory"),
    ):
        with pytest.raises(SystemExit, match=f"^error: .*{message}$"):
            command_line(lambda: sample_by_command(byte_model, prompts=str(file), out=out))  # noqa: B023
    with pytest.raises(SystemExit, match=r"^error: none\.txt: No such file or directory$"):
        command_line(lambda: sample_by_command(byte_model, prompts="none.txt"))
    with pytest.raises(UserError, match="the prompt is not UTF-8 text"):
        sample_by_command(byte_model, prompt="a\udcff", out=tmp_path / "new")
    assert file.read_text() == "kept" and not (tmp_path / "new").exists()


def test_interrupted(byte_model, tmp_path, monkeypatch, capsys):
    """Catches finished samples that are lost when a later one is not."""
    out, calls = tmp_path / "out.jsonl", iter(range(9))

    def interrupt(*args, **kwargs):
        if next(calls) == 2:
            raise KeyboardInterrupt
        kwargs["read"].append(1)
        yield 65, 1

    monkeypatch.setattr("sample.stream", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sample_by_command(byte_model, num_samples=4, out=out, max_new_tokens=1)
    assert len(out.read_text().splitlines()) == 2
    assert f"written: {out}, 2 of 4 samples" in capsys.readouterr().out


def test_full_disk(byte_model, tmp_path, capsys):
    """Catches a line that a full disk cut, at the end of a file."""
    out = tmp_path / "out.jsonl"
    message = r"File too large \(.* MiB free\): .*out\.jsonl"
    with full_disk(1000), pytest.raises(OSError, match=message):
        sample_by_command(byte_model, num_samples=60, max_new_tokens=9, out=out)
    lines = out.read_text().splitlines()
    assert f"written: {out}, {len(lines)} of 60 samples" in capsys.readouterr().out
    assert len(lines) > 2 and all(json.loads(line)["tokens"] for line in lines)
