"""Where the difficulty is known: right answers, their steps, and where these look."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import flags, records, small_model

from analysis import lookup as looking
from analysis.comparing import read_runs
from analysis.lookup import answers, chain_rows, chain_table, lookup_rows
from analysis.measuring import open_subject
from analysis.tables import read
from analyze import Chain, Lookup
from corpus import lookup
from engine.prefill import settle
from interop import load
from runtime import UserError
from training.warm_start import deeper


@pytest.fixture
def lines():
    """40 lines and the token after each -> ids (40, 65), tokenizer."""
    tokenizer, x = lookup.tokenizer(), []
    for i in range(40):
        x.append([*tokenizer.encode(lookup.line(random.Random(i))), tokenizer.end_of_text])
    x = torch.tensor(x)
    return torch.cat([x, x[:, :1]], dim=1), tokenizer


@pytest.mark.parametrize("method", ["ponderlm3", "looped"])
@torch.no_grad()
def test_answers(subject, lines, method):
    """Catches answers taken from the wrong place, and steps of other tokens."""
    rows, tokenizer = lines
    x = rows[:, :-1]
    model = small_model(method=method, vocab_size=tokenizer.vocab_size, block_size=64, seed=3)
    one = subject(model)
    one.tokenizer, one.rows = tokenizer, rows
    asked, right, steps = answers(one)
    out = model(x, tau=0.3)
    expected = []
    for b in range(40):
        for t, n in enumerate(lookup.lookups_asked(x[b : b + 1], tokenizer)[0].tolist()):
            if n >= 0:
                guess = out.logits[b, t].argmax() == one.rows[b, t + 1]
                expected.append((n, guess.item(), out.steps[b, t].item()))
    assert list(zip(asked.tolist(), right.tolist(), steps.tolist(), strict=True)) == expected


def test_lookup(trained, tmp_path, capsys):
    """Catches accuracy and steps of other questions, K or seeds, and a text that is another one."""
    runs = [trained / f"lookup-{name}" for name in (0, 1, "plain")]
    Lookup(flags(runs), out=tmp_path).draw()
    rows = records(read(tmp_path / "lookup.csv"))
    assert [(r["K"], r["lookups"], r["seeds"]) for r in rows] == [
        (K, n, 2 if K else 1) for K in (0, 2) for n in range(7)
    ]
    assert {r["method"] for r in rows} == {"vanilla", "PonderLM-3"}
    found = [answers(open_subject(run)) for run in runs[:2]]
    for row in rows[7:]:
        for part, key in ((1, "accuracy"), (2, "steps")):
            means = [f[part][f[0] == row["lookups"]].double() for f in found]
            if len(means[0]):
                assert row[key] == pytest.approx(sum(m.mean().item() for m in means) / 2)
            else:
                assert row[key] is None
    assert all(row["steps"] == 0 for row in rows[:7] if row["steps"] is not None)
    table = (tmp_path / "lookup.md").read_text()
    assert None in [row["steps"] for row in rows] and "| - |" in table
    assert "| filler | 1 lookup | 2 lookups |" in table
    lines = [line.split(" | ")[:3] for line in table.splitlines()[2:]]
    assert lines == [
        [f"| {name}", K, key]
        for name, K in (("vanilla", "0"), ("PonderLM-3", "2"))
        for key in ("accuracy", "steps")
    ]
    printed = capsys.readouterr().out
    Lookup(out=tmp_path, redraw=True).draw()
    assert capsys.readouterr().out in printed and (tmp_path / "lookup.png").exists()
    stopped = lookup_rows(read_runs(runs[:1]), tau=1.0, device="cpu")
    assert not stopped.steps.any()
    with pytest.raises(UserError, match="windows of 16 tokens are not lines"):
        Lookup(flags([trained / "other"]), out=tmp_path).draw()


def test_panels(trained, tmp_path, monkeypatch):
    """Catches one panel drawn twice, and lines that are left out where there are 1024."""
    drawn = []
    monkeypatch.setattr(looking, "save_figure", lambda figure, file: drawn.append(figure))
    asked = []
    monkeypatch.setattr(looking, "open_subject", lambda *a: asked.append(a[1]) or open_subject(*a))
    Lookup(flags([trained / "lookup-0"]), out=tmp_path).draw()
    frame = read(tmp_path / "lookup.csv")
    panels = zip(drawn[0].axes, ("accuracy", "steps"), strict=True)
    for axes, key in panels:
        y = axes.containers[0].lines[0].get_ydata()
        assert y.tolist() == pytest.approx(frame[key].tolist(), nan_ok=True)
    assert asked == [1024]


def test_other_offsets_are_other_curves(trained):
    """Catches runs that become one curve when the offset leaves their name."""
    runs = read_runs([trained / "lookup-0", trained / "lookup-1"])
    model = replace(runs[1].config.model, router_offset=(0.0, 0.0, 1.0))
    runs[1] = replace(runs[1], config=replace(runs[1].config, model=model))
    rows = lookup_rows(runs, None, "cpu")
    assert rows.method.nunique() == 2 and len(rows) == 14


def test_one_text_for_all(trained, tmp_path):
    """Catches another text than the one that was asked for, and ids of another tokenizer."""
    folder = tmp_path / "other"
    lookup.prepare_lookup(folder, lines=200, seed=5, lookups=(2,))
    rows = lookup_rows(read_runs([trained / "lookup-0"]), None, "cpu", data=str(folder))
    assert rows.accuracy.notna().tolist() == [True, False, True, False, False, False, False]
    asked, right, _ = answers(open_subject(trained / "lookup-0", data=str(folder)))
    assert rows.accuracy[2] == pytest.approx(right[asked == 2].double().mean().item())
    with pytest.raises(UserError, match="ids of another tokenizer"):
        lookup_rows(read_runs([trained / "ponder"]), None, "cpu", data=str(folder))


def test_more_steps(trained):
    """Catches steps beyond those of the training that are not taken, or by another router."""
    (run,) = read_runs([trained / "lookup-0"])
    rows = lookup_rows([run], 0.0, "cpu", more_steps=2)
    taken = rows.steps.dropna()
    assert len(taken) > 2 and (taken == run.shape.ponder_steps + 2).all()
    assert rows.method.str.endswith(", 2 more steps").all()
    model = load(run.path)
    more = deeper(model, 2)
    assert more.router.proj.weight[2:].eq(model.router.proj.weight[2]).all()
    assert more.config.offset == (*model.config.offset, *2 * model.config.offset[-1:])
    assert deeper(small_model(method="ponderlm2"), 1).config.ponder_steps == 4


def test_chain_asked(lines):
    """Catches pairs of another chain, or in another order."""
    rows, tokenizer = lines
    for row in rows.tolist():
        text = tokenizer.decode(row).decode().split()
        number, letter, end = text[14:17]
        places = lookup.chain_asked(row, tokenizer)
        assert len(places) == int(number)
        for place in places:
            assert text[place][0] == letter
            letter = text[place][1]
        assert letter == end


@torch.no_grad()
def test_chain_rows(subject, lines, monkeypatch):
    """Catches attention of another slot, of another line, of a pair's first slot alone, questions
    that were not answered, and pairs that are no lookup of the chain."""
    rows, tokenizer = lines
    model = small_model(vocab_size=tokenizer.vocab_size, block_size=64, seed=3)
    now = settle(model, rows[:8, :-1], 0.3)
    assert now.steps.unique().numel() > 1
    answer = model.lm_head(model.integrate(now.h, now.s, now.steps))[:, 15].argmax(-1)
    rows[:6, 16] = answer[:6]  # these are right, in this text
    one = subject(model, tau=0.3)
    one.tokenizer, one.rows = tokenizer, rows[:8]
    real = looking.Watched.attend

    def numbered(layer, q, *args):
        out, N = real(layer, q, *args), q.size(2)
        code = torch.arange(N)[:, None] * 1000 + torch.arange(N)
        layer.seen |= {row: code.expand(2, N, N) + 10**6 * row for row in layer.rows.tolist()}
        return out

    monkeypatch.setattr(looking.Watched, "attend", numbered)
    found = chain_rows(one)
    assert {row["line"] for row in found} == set(range(6))
    for row in found:
        line, pair, slots = row["line"], row["pair"], (now.steps[row["line"]] + 1).tolist()
        assert row["step"] < slots[15]
        query, first = sum(slots[:15]) + row["step"], sum(slots[:pair])
        keys = range(first, first + slots[pair])
        assert row["attention"] == sum(10**6 * line + 1000 * query + key for key in keys)
        chain = lookup.chain_asked(rows[line].tolist(), tokenizer)
        assert row["lookup"] == (chain.index(pair) + 1 if pair in chain else 0)
        assert row["lookups"] == len(chain)
    rows[:, 16] = tokenizer.end_of_text  # no answer
    with pytest.raises(UserError, match="answers no question right"):
        chain_rows(one)
    assert len(found) == 13 * sum(now.steps[line, 15].item() + 1 for line in range(6))


def test_weights_of_watched():
    """Catches weights that are not those of the attention, or of another row."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 4, generator=g).double() for heads in (4, 2, 2))
    bias, layer = -torch.rand(2, 5, generator=g).double(), looking.Watched()
    layer.rows = torch.tensor([3, 7])
    torch.testing.assert_close(layer.attend(q, k, v, bias), looking.eager(q, k, v, bias))
    i, head, t = 1, 3, 2
    scores = (k[i, 1, : t + 1] @ q[i, head, t]) / 2 + bias[i, : t + 1]
    torch.testing.assert_close(layer.seen[7][head, t, : t + 1], scores.softmax(-1))
    assert (layer.seen[7][head, t, t + 1 :] == 0).all()


def test_chain_is_drawn(trained, tmp_path, capsys, monkeypatch):
    """Catches a mean over other questions, steps or pairs, and a figure that cannot be redrawn."""
    rows = [
        dict(line=line, lookups=2, step=k, pair=pair, text="ab", lookup={4: 1, 7: 2}.get(pair, 0))
        | {"attention": 0.1 * line + 0.2 * k + 0.01 * pair}
        for line, k, pair in product((1, 3), range(2), range(13))
    ]
    monkeypatch.setattr(looking, "chain_rows", lambda subject: rows)
    Chain(run=str(trained / "lookup-0"), out=tmp_path).draw()
    table = chain_table(read(tmp_path / "chain.csv")).to_numpy().tolist()
    assert table == [["2", "0", "2", "0.24", "0.27"], ["2", "1", "2", "0.44", "0.47"]]
    printed = capsys.readouterr().out
    Chain(run=str(trained / "lookup-0"), out=tmp_path, redraw=True).draw()
    assert capsys.readouterr().out in printed and (tmp_path / "chain.png").exists()
