"""What is measured of one model, against loops that say it plainly."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from conftest import records, small_model

from analysis.convergence import convergence_rows, exponential_fit, refinements, rmse
from analysis.measuring import (
    Measured,
    bucket_rows,
    by_each,
    decoded,
    difficulty_rows,
    measure,
    shift_rows,
    shifted,
    tau_rows,
    thirds,
)
from analysis.words import show_token, token_rows, words
from corpus.tokenizers import Tokenizer


def flat(values):
    return torch.tensor(values, dtype=torch.float64)


@torch.no_grad()
def test_measure_against_loops(subject):
    """Catches tokens in another order, a shifted target, a truncation one step off, and weights
    that are renormalised in the wrong column."""
    model = small_model(seed=2)
    one = subject(model, windows=40)  # more than one batch
    found = measure(one)
    at = 0
    for row in one.rows:
        h, s, log_w = model.jacobi(row[None, :-1], R=24)
        for t in range(8):
            assert (found.x[at], found.y[at]) == (row[t], row[t + 1])
            mixed, weight = 0, 0
            for i in range(4):
                mixed = mixed + s[0, t, i] * h[0, t, i]
                weight = weight + s[0, t, i]
                p = model.lm_head(mixed / weight).softmax(-1)[row[t + 1]]
                assert found.ce[at, i].item() == pytest.approx(-p.log().item(), abs=3e-6)
            w = log_w[0, t].exp()
            assert found.steps[at] == max(k for k in range(4) if w[k] >= 0.3)
            torch.testing.assert_close(found.w[at], w, rtol=0, atol=1e-3)
            torch.testing.assert_close(found.s[at], s[0, t], rtol=0, atol=1e-3)
            at += 1
    assert at == len(found.x) and len(set(found.steps.tolist())) > 2
    assert torch.equal(found.difficulty, found.ce[:, 0])


@pytest.mark.parametrize("tau, alpha", [(0.3, 0.0), (0.0, 0.0), (0.1, -2.0)])
@pytest.mark.parametrize("method", ["ponderlm3", "grid"])
@torch.no_grad()
def test_decoded_is_what_decoding_does(tau, alpha, method, subject):
    """Catches soft masks where hard ones are said, a forgotten alpha, and other steps."""
    model = small_model(seed=2, method=method)
    one = subject(model, windows=2)
    loss, steps = decoded(one, tau, alpha)
    at = 0
    for row in one.rows:
        cache = model.new_cache()
        for t in range(8):
            logits, k = model.ponder_token(int(row[t]), t, cache, tau, alpha)
            expected = F.cross_entropy(logits, row[t + 1]).item()
            assert loss[at].item() == pytest.approx(expected, abs=3e-5)
            assert steps[at] == k
            at += 1


@torch.no_grad()
def test_convergence():
    """Catches a count of refinements that is one off, errors of other slots, a fixed point that is
    not one, and a model that is left in float64."""
    model, K, T = small_model(seed=1).float(), 3, 6
    idx = torch.randint(31, (2, T), generator=torch.Generator().manual_seed(0))
    rows = convergence_rows(model, idx, most=K * T)
    assert model.lm_head.weight.dtype == torch.float32
    model = model.double()
    fixed, fixed_s, _ = model.jacobi(idx, R=K * T)
    for n, (row, (at, h, s)) in enumerate(zip(rows, refinements(model, idx), strict=False)):
        assert at == n == row["refinements"] and h.shape[:3] == (2, T, K)
        if n > 0:
            assert torch.equal(h, model.jacobi(idx, R=n - 1)[0][:, :, :K])
        errors = [
            ((h[b, t, :K] - fixed[b, t, :K]) ** 2).mean().sqrt().item()
            for b, t in product(range(2), range(T))
        ]
        assert row["latents"] == pytest.approx(sum(errors) / len(errors), rel=1e-3, abs=1e-12)
        assert row["router"] == pytest.approx(rmse(s, fixed_s), rel=1e-3, abs=1e-12)
    assert len(rows) == K * T + 1
    assert rows[0]["latents"] > 1e-3 and rows[K * (T - 1)]["latents"] < 1e-12


def test_exponential_fit():
    """Catches a fit that does not find the planted decay, R^2 of something else, and rounding or
    zeros that enter it."""
    rounding = [max(0.3 * 0.02**n, 1e-16) for n in range(12)]
    assert exponential_fit(range(12), rounding) == pytest.approx((0.02, 0.3, 1))
    errors = [1.0, 0.5, 0.1]  # logs 0, -0.693, -2.303: slope -1.1513, mean -0.9986
    L, _, r2 = exponential_fit([0, 1, 2, 3], [*errors, 0])
    slope = math.log(0.1) / 2
    total = sum((math.log(e) - math.log(0.05) / 3) ** 2 for e in errors)
    assert pytest.approx(math.exp(slope)) == L and r2 == pytest.approx(2 * slope**2 / total)
    assert all(map(math.isnan, exponential_fit([0, 1], [0, 0])))


def test_thirds():
    """Catches buckets in the wrong order, or of unequal size."""
    assert thirds(flat([5, 1, 9, 2, 7, 3])).codes.tolist() == [1, 0, 2, 0, 2, 1]
    assert thirds(flat([3, 1])).tolist() == ["medium", "easy"]
    assert thirds(torch.rand(100)).value_counts().tolist() == [34, 33, 33]


def made_up(ce, steps=None, x=None):
    """A Measured with these losses."""
    ce = flat(ce)
    n, S = ce.shape
    steps = torch.tensor(steps or [0] * n)
    x = torch.tensor(x or [0] * n)
    return Measured(x, x, steps, torch.ones(n, S) / S, torch.ones(n, S), ce)


def test_buckets():
    """Catches gains with the wrong sign or of the wrong bucket, and a bucket without a token that
    crashes or counts as 0."""
    measured = made_up([[3.0, 1.0], [0.5, 0.5], [1.5, 1.0]], [1, 0, 1])
    hard_first = {"own": measured.difficulty, "other": flat([0.0, 1.0, 2.0])}
    rows = records(by_each(hard_first, lambda difficulty: bucket_rows(measured, difficulty)))
    keys = ("difficulty_by", "bucket", "difficulty", "gain_1", "steps")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        ("own", "easy", 0.5, 0, 0),
        ("own", "medium", 1.5, 0.5, 1),
        ("own", "hard", 3, 2, 1),
        ("other", "easy", 0, 2, 1),
        ("other", "medium", 1, 0, 0),
        ("other", "hard", 2, 0.5, 1),
    ]
    two = records(bucket_rows(made_up([[1.0, 2.0], [2.0, 1.0]]), flat([1, 2])))
    assert (two[2]["tokens"], two[2]["gain_1"], two[2]["steps"]) == (0, None, None)


def test_difficulty_by_steps():
    """Catches means over the wrong tokens, and steps that nobody takes counted as easy."""
    measured = made_up([[1.0, 0, 0], [2.0, 0, 0], [6.0, 0, 0]], steps=[0, 2, 2])
    rows = records(difficulty_rows(measured, measured.difficulty).reset_index())
    found = [(r["steps"], r["tokens"], r["difficulty"]) for r in rows]
    assert found == [(0, 1, 1.0), (1, 0, None), (2, 2, 4.0)]


@torch.no_grad()
def test_shift_against_loops(subject):
    """Catches a change to another alpha than 0, buckets of another order, and an alpha that is not
    passed on."""
    model = small_model(seed=2)
    one = subject(model, windows=4)
    difficulty = measure(one).difficulty
    rows = records(shift_rows(shifted(one, (-3.0, 3.0)), difficulty).reset_index())
    base = decoded(one, 0.3)[0]
    order = difficulty.argsort(stable=True).tolist()
    for alpha, (b, name) in product((-3.0, 0, 3.0), enumerate(("easy", "medium", "hard"))):
        (row,) = [r for r in rows if (r["alpha"], r["bucket"]) == (alpha, name)]
        loss, steps = decoded(one, 0.3, alpha)
        mine = [t for rank, t in enumerate(order) if rank * 3 // len(order) == b]
        assert row["loss_change"] == pytest.approx(sum((loss - base)[mine]).item() / len(mine))
        assert row["steps"] == pytest.approx(sum(steps[mine].tolist()) / len(mine))
        assert row["all_steps"] == pytest.approx(steps.double().mean().item())
    steps = [row["all_steps"] for row in rows if row["bucket"] == "easy"]
    assert steps == sorted(steps) and steps[0] < steps[-1]


@torch.no_grad()
def test_tau_rows(subject):
    """Catches changes to something else than all steps."""
    one = subject(small_model(seed=2).float(), windows=2)
    zero, middle, one_step = tau_rows(one, (0, 0.3, 1))
    full, loss = decoded(one, 0.0)[0], decoded(one, 0.3)[0]
    assert (zero["steps"], zero["change"], zero["moved"]) == (3, 0, 0)
    assert middle["change"] == pytest.approx((loss - full).double().mean().item())
    assert middle["moved"] == pytest.approx((loss - full).double().abs().mean().item())
    assert middle["perplexity"] == pytest.approx(math.exp(loss.double().mean()))
    assert one_step["steps"] < middle["steps"] < 3


def test_words():
    """Catches words cut by a window's ends or joined with other characters, and spaces."""
    single = [bytes([b]) for b in b"he cat, it's a do"]
    assert words(single) == [("cat", 3, 5), ("it", 8, 9), ("s", 11, 11), ("a", 13, 13)]
    pieces = [b" the", b" bi", b"cy", b"cle", b" of", b"f1", b" in", b"-", b"to", b" it"]
    assert words(pieces) == [("the", 0, 0), ("bicycle", 1, 3), ("in", 6, 6), ("to", 8, 8)]


def test_token_rows(monkeypatch):
    """Catches counts, means and pruned shares of the wrong tokens, and ends taken for insides."""
    text = b" the a the ofx "
    steps = [3, 0, 1, 2, 3, 1, 3, 0, 0, 3, 3, 1, 2, 0, 3]
    measured = made_up([[0.0] * 4] * len(text), steps=steps, x=list(text))
    names = ("The", "a", "of")
    monkeypatch.setattr("analysis.words.LEAST", 2)
    found = token_rows(measured, Tokenizer.bytes(), len(text), names)
    rows, compound = map(records, found)
    found = {(row["kind"], row["text"]): row for row in rows}
    assert set(found) == {("token", c) for c in " the"} | {("word", w) for w in ("the", "a", "of")}
    the = found["word", "the"]
    assert (the["count"], the["steps"], the["pruned"]) == (2, 2.5, 0.5)  # after the e: 2, 3
    assert (found["token", "t"]["steps"], found["token", "t"]["pruned"]) == (0, 1)
    assert (found["word", "of"]["count"], found["word", "of"]["steps"]) == (0, None)
    assert show_token(b"\n\xe2 a") == "\\n\\xe2 a"
    # inside: t h, t h, o f; at the end: e, e, x
    assert [row["non_terminal"] for row in compound] == [3 / 6, 2 / 6, 1 / 6, 0]
    assert [row["terminal"] for row in compound] == [1 / 3, 0, 1 / 3, 1 / 3]
    assert (compound[0]["non_terminal_tokens"], compound[0]["terminal_tokens"]) == (6, 3)
