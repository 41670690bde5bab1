"""sample.py: what it says, how it chooses, and its command."""

import io
import shutil
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from helpers import small_model

import sample
from common import UserError, command_line
from sample import Options, Sampling, as_text, draw_svg, main, make_sampler, mark, shade, show, stream
from tokenizer import Tokenizer


def generate(model, prompt, n, **how):
    """The new tokens, and the steps of each."""
    pairs = [*stream(model, prompt, n, **how)]
    return [token for token, _ in pairs], [steps for _, steps in pairs]


def sample_main(**options):
    main(Options(**{"device": "cpu"} | options))


def test_generate_is_greedy_argmax_of_the_parallel_form():
    """Catches a decoder with other logits or steps than the model's, and a list of what was read."""
    prompt, differ = [3, 1, 4], 0
    for seed in range(6):
        model, read, how = small_model(seed), [], dict(tau=0.3, alpha=seed / 5)
        tokens, steps = generate(model, torch.tensor(prompt), 8, temperature=0, read=read, **how)
        with torch.no_grad():
            out = model(torch.tensor([prompt + tokens]), R=33, **how)
        assert tokens == out.logits[0, 2:-1].argmax(-1).tolist()
        assert steps == read[2:] and read == out.steps[0, :-1].tolist()
        differ += len(set(steps)) > 1
    assert differ >= 2


def test_longer_than_the_window():
    """Catches a context other than the documented last half."""
    model, greedy = small_model(block_size=8), dict(temperature=0)
    tokens, _ = generate(model, [1, 2, 3], 30, **greedy)
    context = [1, 2, 3, *tokens]
    # 9 tokens do not fit: the last 4 of them begin a new context.
    assert generate(model, context[5:9], 4, **greedy)[0] == context[9:13]
    read = []
    long = generate(model, [*range(20)], 1, read=read, **greedy)
    assert long == generate(model, [16, 17, 18, 19], 1, **greedy)
    assert len(read) == 4


def test_end():
    """Catches a text that goes on behind its end."""
    model = small_model()
    free = generate(model, [1], 9, temperature=0)[0]
    at = free.index(free[4])
    assert generate(model, [1], 9, temperature=0, ends={free[4]})[0] == free[: at + 1]


def test_choices():
    """Catches other frequencies than probabilities, an unused temperature, a wrong top-k."""
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])

    def shares(**how):
        choose = make_sampler(Sampling(seed=0, **how))
        return torch.tensor([choose(p.log()) for _ in range(4000)]).bincount(minlength=4) / 4000

    assert shares(temperature=0.0)[1] == shares(temperature=1e-30)[1] == shares(top_k=1)[1] == 1
    assert ((shares(temperature=1.0) - p).abs() < 0.03).all()
    assert ((shares(temperature=0.5) - p**2 / (p**2).sum()).abs() < 0.03).all()
    assert ((shares(temperature=1.0, top_k=2) - torch.tensor([0, 4, 0, 3]) / 7).abs() < 0.03).all()
    assert shares(temperature=1.0, top_k=99).min() > 0


@pytest.mark.parametrize(
    "wrong",
    [
        *(dict(prompt=[]), dict(prompt=[31]), dict(prompt=[-1]), dict(tau=1.5), dict(temperature=-1.0)),
        *(dict(top_k=0), dict(seed=-1), dict(alpha=float("inf")), dict(top_p=0.5), dict(logits=float("nan"))),
    ],
    ids=str,
)
def test_refused(wrong):
    """Catches values that are taken and do nothing, or end in a stack trace."""
    model, (name, value) = small_model(), *wrong.items()
    if name == "logits":
        model.lm_head.weight.data[3] = value
    how = wrong if name not in ("prompt", "logits") else {}
    with pytest.raises((UserError, ValueError), match=name):
        next(stream(model, wrong.get("prompt", [1]), 1, **how))


def test_marks():
    """Catches steps that cannot be told apart, and a line's end before its mark or coloured to the edge."""
    assert mark("a", 3, 3, color=False) == "a₃" and mark("a", 12, 12, color=False) == "a₁₂"
    assert mark("\n", 2, 3, color=False) == "₂\n" and mark(";\n  ", 1, 3, color=False) == ";₁\n  "
    assert len({mark("a", k, 3, color=True) for k in range(4)}) == 4
    assert mark("\n", 2, 3, color=True).split("\n")[0].endswith("\x1b[0m")


def test_show_steps(byte_model, monkeypatch, capsys):
    """Catches a mark of another token, a torn character, an end that is shown, a saving of other steps."""
    pairs = [(102, 1), (0xC3, 0), (0xA9, 3), (120, 2), (256, 2)]
    monkeypatch.setattr(sample, "stream", lambda *_, read, **__: read.append(1) or iter(pairs))
    sample_main(run=byte_model, prompt="a", show_steps=True)
    out = capsys.readouterr().out
    assert "\naf₁é₃x₂\n" in out
    assert "\n1.00 of 3 pondering steps per token read, 50% of the slots saved; " in out
    pieces = as_text(iter([(255, 0), *pairs, (0xC3, 1)]), Tokenizer.named("bytes"), {255, 256})
    shown = show(pieces, 3)
    assert [steps for _, steps in shown] == [0, 1, 0, 3, 2, 2, 1, None]
    assert capsys.readouterr().out == "féx\ufffd\n" == "".join(text for text, _ in shown) + "\n"


def test_samples_and_prompts(byte_model, monkeypatch, capsys):
    """Catches samples not repeatable or alike, an empty prompt refused, one cut in silence, stdin unread."""

    def printed(**options):
        sample_main(run=byte_model, max_new_tokens=9, **options)
        return capsys.readouterr().out.rpartition("\n\n")[0]

    three = printed(prompt="ab", num_samples=3, seed=4)
    assert three == printed(prompt="ab", num_samples=3, seed=4)
    second = three.split("--- sample 2 of 3\n")[1].split("\n\n--- sample 3")[0]
    assert second in printed(prompt="ab", seed=5) and second not in printed(prompt="ab", seed=4)
    assert printed(prompt="ab", num_samples=5) != printed(prompt="ab", num_samples=5)  # some end at once
    assert "note" not in printed() and "only its last 8 are read" in printed(prompt=17 * "a")
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO("né\n".encode() + b"\xff")))
    assert "\nné\n\ufffd" in printed(prompt="-")


@pytest.mark.parametrize(
    "wrong",
    [dict(tau=-1.0), dict(num_samples=0), dict(max_new_tokens=0), dict(run="none"), dict(device="tpu")],
    ids=str,
)
def test_refused_commands(wrong, byte_model, capsys):
    """Catches an error that is a stack trace, or that comes after the prompt was printed."""
    with pytest.raises(SystemExit, match=f"^error: .*{next(iter(wrong.values()))}"):
        command_line(lambda: sample_main(**{"run": byte_model, "prompt": "a"} | wrong))
    assert "\na" not in capsys.readouterr().out


def test_which_model(byte_model, monkeypatch, capsys):
    """Catches a model that is taken without a word, and none that is a stack trace."""
    monkeypatch.setattr(sample, "INCLUDED", Path("none"))
    with pytest.raises(UserError, match=r"none cannot be read.* or train one"):
        sample_main(prompt="a", max_new_tokens=1)
    monkeypatch.setattr(sample, "INCLUDED", Path(byte_model))
    sample_main(prompt="a", max_new_tokens=1)
    assert f"model: {byte_model}\n" in capsys.readouterr().out
    shutil.copytree(byte_model, "out/mine")
    sample_main(prompt="a", max_new_tokens=1)
    assert "model: out/mine\n" in capsys.readouterr().out


def test_picture(byte_model, capsys):
    """Catches a picture that is no XML, lacks a character or shade, or is written for what it cannot show."""
    sample_main(run=byte_model, prompt="a<", show_steps=True, seed=0, out=Path("new/steps.svg"))
    assert "written: new/steps.svg\n" in capsys.readouterr().out
    ElementTree.parse("new/steps.svg")
    picture = ElementTree.fromstring(draw_svg("<&", [("b", 0), ("\n", 1), ("日" * 50, 3), ("c", None)], 3))
    space = "{http://www.w3.org/2000/svg}"
    colours = {text.text: text.get("fill") for text in picture.iter(f"{space}text")}
    assert colours["<"] == colours["&"] == colours["c"] != colours["b"]  # the prompt is unlike no steps
    boxes = [(box.get("fill"), box.get("y")) for box in picture.iter(f"{space}rect")][1:]
    letters = [x.text for x in picture.iter(f"{space}text")][:-5]  # the last are the legend
    assert letters == [*"<&b", *("日" * 50), "c"]
    assert [fill for fill, _ in boxes] == [shade(k, 3) for k in (None, None, 0, *[3] * 50, None, 0, 1, 2, 3)]
    assert len({y for _, y in boxes[:-4]}) == 3  # a line break, and one where a line is full
    assert len({shade(k, 3) for k in range(4)}) == 4
    for wrong, message in (
        (dict(out=Path("a.png"), show_steps=True), "a.png must end in .svg or .html"),
        (dict(out=Path("a.svg")), "add --show-steps"),
        (dict(out=Path("a.svg"), show_steps=True, num_samples=2), "omit --num-samples 2"),
    ):
        with pytest.raises(UserError, match=message):
            sample_main(run=byte_model, prompt="a", **wrong)
