"""Where the difficulty is known: right answers and their steps."""

import random
import re
from dataclasses import replace

import pandas as pd
import pytest
import torch
from lab_helpers import flags, records, small_model

from common import UserError
from lab.corpora import lookup
from lab.figures import lookup as lookup_figure
from lab.figures.lookup import Kinds, Lookup, answers, kind_rows, stilled
from lab.figures.runs import read_runs
from lab.figures.subject import decoded_tokens, open_subject, rerouted
from lab.methods import PonderConfig, configure
from lab.train import LabConfig, train


@pytest.fixture
def lines():
    """12 lines and the token after each -> ids (12, 65), tokenizer."""
    tokenizer, x = lookup.tokenizer(), []
    for i in range(12):
        x.append([*tokenizer.encode(lookup.line(random.Random(i))), tokenizer.end_of_text])
    x = torch.tensor(x)
    return torch.cat([x, x[:, :1]], dim=1), tokenizer


@pytest.mark.parametrize("method", ["ponderlm3", "looped"])
@torch.no_grad()
def test_answers(subject, lines, method):
    """Catches answers taken from the wrong place, and steps of other tokens."""
    rows, tokenizer = lines
    model = small_model(method=method, vocab_size=tokenizer.vocab_size, block_size=64, seed=3)
    one = subject(model)
    one.tokenizer, one.windows = tokenizer, rows
    known, out = lookup.lookups_asked(rows[:, :-1], tokenizer), model(rows[:, :-1], tau=0.3)
    asked, right, steps, _ = answers(one)
    assert torch.equal(asked, known[known >= 0]) and torch.equal(steps, out.steps[known >= 0])
    assert torch.equal(right, (out.logits.argmax(-1) == rows[:, 1:])[known >= 0])


def lookup_rows(runs, **flags):
    return Lookup((), **flags).frame(read_runs(runs))


def test_lookup(trained, tmp_path):
    """Catches accuracy and steps of other questions, K or seeds, and a text that is another one."""
    runs = [trained / f"lookup-{name}" for name in (0, 1, "plain")]
    data = str(trained.parent / "data/lookup")
    Lookup(flags(runs), out=tmp_path, data=data).draw()
    rows = records(pd.read_csv(tmp_path / "lookup.csv"))
    assert [(r["K"], r["lookups"], r["seeds"]) for r in rows] == [
        (K, n, 2 if K else 1) for K in (0, 2) for n in range(7)
    ]
    found = [answers(open_subject(run, 1024, data=data)) for run in runs[:2]]
    for row in rows[7:]:
        for part, key in ((1, "accuracy"), (2, "steps")):
            means = [f[part][f[0] == row["lookups"]].double() for f in found]
            if len(means[0]):
                assert row[key] == pytest.approx(sum(m.mean().item() for m in means) / 2)
            else:
                assert row[key] is None
    assert (tmp_path / "lookup.png").exists()
    with pytest.raises(UserError, match="lookup"):
        Lookup(flags([trained / "other"]), out=tmp_path, data=str(trained.parent / "other.txt")).draw()


def test_one_text_for_all(trained, tmp_path):
    """Catches another text than the one that was asked for, and ids of another tokenizer."""
    lookup.prepare_lookup(tmp_path / "other", lines=200, seed=5, lookups=(2,))
    rows = lookup_rows([trained / "lookup-0"], data=str(tmp_path / "other"))
    assert rows.lookups[rows.accuracy.notna()].tolist() == [0, 2]
    with pytest.raises(UserError, match="tokenizer"):
        lookup_rows([trained / "ponder"], data=str(tmp_path / "other"))


def test_offsets_in_names(monkeypatch):
    """Catches two models with different offsets under one name, and one name for each K of grown models."""
    rows = {"most": 1, "lookups": 1}
    for offsets, names in (
        (("", " 0 6"), ["x", "x, router_offset 0 6"]),
        ((" 0 6", " 0 6 6"), ["x", "x"]),
    ):
        methods = [f"x, router_offset{offset}" if offset else "x" for offset in offsets]
        K = [1, 1] if "" in offsets else [1, 2]
        frame = pd.DataFrame({"method": methods, "K": K, **rows})
        monkeypatch.setattr(lookup_figure.OnAnyText, "frame", lambda self, runs, frame=frame: frame)
        assert Lookup(()).frame([]).method.tolist() == names


def test_most_of_a_method_without_router(trained):
    """Catches more steps that are refused because of a flag that nobody gave."""
    how = dict(device="cpu", data=str(trained.parent / "data/lookup"))
    shape = PonderConfig(532, 32, 64, 1, 2, head_dim=16, block_size=64, ponder_steps=1)
    config = LabConfig("tiny", data=how["data"], name="fixed", steps=1, batch_size=2, device="cpu")
    config = replace(config, eval_windows=8, precision="float32")
    run, _ = train(config, configure(shape, "grid-fixed"))
    rows = lookup_rows([run], **how, most=(2,))
    assert set(rows.steps.dropna()) == {2}


@torch.no_grad()
def test_more_steps_than_learned(trained):
    """Catches rows of one number of steps that are said to be of another."""
    runs = [trained / "lookup-0"]
    how = dict(device="cpu", data=str(trained.parent / "data/lookup"))
    rows = lookup_rows(runs, tau=0.0, **how, most=(2, 4))
    assert rows.most.tolist() == 7 * [2] + 7 * [4] and set(rows.K) == {2}
    other = lookup_rows(runs, tau=0.0, **how, most=(4, 2))  # the second is not of the grown model
    assert other[7:].reset_index(drop=True).equals(rows[:7].reset_index(drop=True))
    assert rows[:7].drop(columns="most").equals(lookup_rows(runs, tau=0.0, **how).drop(columns="most"))
    taken = rows.steps[rows.accuracy.notna()]
    assert taken.tolist() == [n for n in rows.most[rows.accuracy.notna()]]
    # s is hardly trained: five shares of a fifth, of which w_3 = 0.4 and w_4 = 0.2
    even = lookup_rows(runs, tau=0.3, **how, most=(4,))
    assert even.steps[even.accuracy.notna()].tolist() == pytest.approx([3] * (len(taken) // 2))
    with pytest.raises(UserError, match="--most 1"):
        lookup_rows(runs, tau=0.0, **how, most=(1,))


def test_kinds_of(lines):
    """Catches a kind of another place."""
    rows, tokenizer = lines
    patterns = {"pair": " [a-m][a-mSTUVXYZ]", "number": r" \d", "number again": r" \d", "question": " [a-m]"}
    patterns |= {"answer": " [STUVXYZ]", "filler": " the| end|"}
    named = [lookup.KINDS[kind] for kind in lookup.kinds_of(128, tokenizer).tolist()]
    assert named[:64] == named[64:] and named.count("pair") == 26 and named.count("number") == 24
    for token, kind in zip(rows[0, :63].tolist(), named, strict=False):
        assert re.fullmatch(patterns[kind], tokenizer.decode([token]).decode()), kind
    assert named[12:18] == ["pair", "number", "question", "answer", "number again", "number"]


@torch.no_grad()
def test_kinds(trained, subject, lines, tmp_path):
    """Catches steps that are taken away from other tokens, or stay taken away, and a mean of others."""
    rows, tokenizer = lines
    model = small_model(method="grid", vocab_size=tokenizer.vocab_size, block_size=64, seed=3)
    one = subject(model)
    one.tokenizer, one.windows = tokenizer, rows
    _, steps, _ = (x.double() for x in decoded_tokens(one))
    asked, right, *_ = answers(one)
    found = {row["kind"]: row for row in records(kind_rows(one))}
    assert torch.equal(decoded_tokens(one)[1].double(), steps)  # by its own router again
    accuracies = [right[asked == n].double().mean().item() for n in range(1, 7)]
    everything = found["all"]
    assert everything["steps"] == everything["steps_left"] == pytest.approx(steps.mean().item())
    assert everything["right_left"] == pytest.approx(sum(accuracies) / 6)
    assert everything["worst_left"] == min(accuracies)
    kinds = lookup.kinds_of(64, tokenizer).repeat(12)
    for i, kind in enumerate(lookup.KINDS):
        assert found[kind]["tokens"] == pytest.approx((kinds == i).double().mean().item())
        assert found[kind]["steps"] == pytest.approx(steps[kinds == i].mean().item())
        assert found[kind]["steps_left"] < everything["steps"]
    with rerouted(model, stilled(torch.arange(64) == 5)):
        left = decoded_tokens(one)[1].view(12, 64)
        s, log_w = model.route(torch.randn(1, 64, 1, model.config.hidden_size).to(model.lm_head.weight))
    assert not left[:, 5].any() and torch.equal(left[:, :5], steps.view(12, 64)[:, :5].long())
    assert s.sum(-1) == pytest.approx(torch.ones(1, 64).double()) and (log_w[0, 5, 1:] < -99).all()
    runs, data = [str(trained / "lookup-0"), str(trained / "lookup-1")], str(trained.parent / "data/lookup")
    Kinds(runs=tuple(runs), data=data, tau=0.3, out=tmp_path).draw()
    table = pd.read_csv(tmp_path / "kinds.csv")
    assert table.seeds.eq(2).all() and len(table) == len(lookup.KINDS) + 2
    with pytest.raises(UserError, match="lookup-plain"):
        Kinds(runs=(str(trained / "lookup-plain"),), data=data, out=tmp_path).draw()
