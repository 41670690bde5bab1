"""Puzzles: what each step looks up is what it attends to; the model that comes along answers."""

import random

import pytest
import torch
from lab_helpers import small_model

from common import UserError
from lab.corpora import lookup
from lab.corpora.tokenizers import load_tokenizer
from lab.figures import puzzle
from lab.figures.puzzle import Puzzle, main
from lab.interop.weights import INCLUDED, PUZZLES, load
from model import apply_rope
from router import stop_step


@torch.no_grad()
def attention_by_hand(model, ids, k, tau):
    """The attention of slot k of the last token to all slots that it sees, (H, ..), and of which
    token each is: from the states, by the definition."""
    h, _, log_w = model.states(torch.tensor([ids]), tau=tau)
    steps = stop_step(log_w, tau)[0].tolist()
    layer, slots = model.model.layers[0], [(t, j) for t in range(len(ids)) for j in range(k + 1)]
    slots = [(t, j) for t, j in slots if j <= steps[t]]  # those that run

    def heads(t, j, project):
        e = model.embed(torch.tensor([[ids[t]]]))[:, 0]
        x = e if j == 0 else model.feed_back(h[:, t, j - 1], e)
        x = project(layer.input_layernorm(x)).view(1, -1, 1, layer.self_attn.d)
        return apply_rope(x, *model.model.rope_cos_sin(torch.tensor([t]), x.dtype))[0, :, 0]

    q = heads(len(ids) - 1, k, layer.self_attn.q_proj)  # (H, d)
    keys = torch.stack([heads(*slot, layer.self_attn.k_proj) for slot in slots], 1)  # (G, M, d)
    keys = keys.repeat_interleave(len(q) // len(keys), dim=0)
    scores = (keys @ q[..., None])[..., 0] / layer.self_attn.d**0.5
    key_log_w = torch.stack([log_w[0, t, j] * (j > 0) for t, j in slots])
    return (scores + key_log_w).softmax(-1), [t for t, _ in slots]


def test_what_a_step_looks_up():
    """Catches attention of another slot, token or head, without log w, or to slots that are
    skipped or deeper; and steps, s and states that are not those of decoding."""
    tokenizer = lookup.tokenizer()
    shape = dict(num_hidden_layers=1, ponder_steps=3, block_size=64, vocab_size=532)
    model = small_model(method="grid", seed=2, **shape)
    table, letters = puzzle.puzzle(1)
    ids = tokenizer.encode(f" {' '.join(table)} 3 {letters[3]}")
    for tau in (0.0, 0.2):
        found = puzzle.solve(model, tokenizer, table, letters[3], tau)
        out = model(torch.tensor([ids]), tau=tau)
        assert found.steps == out.steps[0, -1] and len(found.attention) == found.steps + 1
        said = tokenizer.decode([int(out.logits[0, -1].argmax())])
        assert found.answer == said.decode("utf-8", "replace").strip()
        for k, pairs in enumerate(found.attention):
            weights, owners = attention_by_hand(model, ids, k, tau)
            assert [*pairs] == table
            for t, pair in enumerate(table):
                of_pair = weights[:, [j for j, owner in enumerate(owners) if owner == t]]
                assert pairs[pair] == pytest.approx(of_pair.sum(-1).max().item(), abs=1e-9)
            assert found.looked_up()[k] == max(pairs.items(), key=lambda item: item[1])


@pytest.mark.parametrize("longest", [6, 10])
def test_puzzles(longest):
    """Catches a letter that is not as far from its end as the question says."""
    table, letters = puzzle.puzzle(3, longest)
    assert len(table) == longest + 7 and [*letters] == [*range(1, longest + 1)]
    assert all(len(puzzle.chain_from(a, table)) == n + 1 for n, a in letters.items())


@pytest.fixture(scope="module")
def included():
    return load(PUZZLES), load_tokenizer(PUZZLES / "tokenizer.json")


@pytest.mark.slow
def test_the_included_model_answers(included):
    """Catches other weights than those described: 200 questions of each kind, and their steps."""
    model, tokenizer = included
    rng = random.Random(1234)
    for n in range(1, 7):
        lines = [[*tokenizer.encode(lookup.line(rng, [n])), tokenizer.end_of_text] for _ in range(200)]
        x = torch.tensor(lines)
        with torch.no_grad():
            out = model(x, tau=0.1)
        asked = lookup.lookups_asked(x, tokenizer) == n
        right = out.logits.argmax(-1)[asked] == x.roll(-1, dims=1)[asked]
        assert asked.sum() == 200 and right.double().mean() >= 0.97
        assert out.steps[asked].double().mean() == pytest.approx(n - 1, abs=0.1)


def test_show(included, tmp_path, capsys):
    """Catches a wrong answer that is not said to be, and a picture with pairs that were not looked up."""
    table, letters = puzzle.puzzle(6)
    main(Puzzle(number=4, tau=0.1, out=tmp_path / "it.svg"))
    out, text = capsys.readouterr().out, (tmp_path / "it.svg").read_text("utf-8")
    rows = [line.split() for line in out.splitlines()[3:9]]
    assert " ".join(table) in out
    assert [row[:2] + row[-1:] for row in rows] == [[str(n), x, str(n - 1)] for n, x in letters.items()]
    found = puzzle.solve(*included, table, letters[4], 0.1)
    assert found.steps == 3 and all(f"{pair} {p:.2f}<" in text for pair, p in found.looked_up())
    puzzle.show(*included, tau=1.0, seed=6)  # without a thinking step
    assert f", not {puzzle.chain_from(letters[6], table)[-1]}" in capsys.readouterr().out


def test_wrong_models_and_numbers(tmp_path):
    """Catches a model of another task or method that is asked, and a number that no chain has."""
    with pytest.raises(UserError, match="ponderlm3"):
        main(Puzzle(run=str(INCLUDED), out=tmp_path / "it.svg"))
    with pytest.raises(UserError, match="--number 7"):
        main(Puzzle(number=7, out=tmp_path / "it.svg"))
