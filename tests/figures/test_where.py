"""Where a model thinks: kinds of tokens, and what they are given."""

import pandas as pd
import pytest
import torch
from lab_helpers import flags, records, small_model

from common import UserError
from lab.figures.subject import decoded_tokens
from lab.figures.where import Where, character, kinds_of, permuted, where_rows
from tokenizer import Tokenizer


def test_kinds():
    """Catches a byte of another kind, an end of a word that is not seen, and thirds of other sizes."""
    text = "Ab 4,\nxé e"
    ids = torch.tensor([[*text.encode(), 0]])  # the last token is a target only
    characters, place, _ = kinds_of(ids, Tokenizer.named("bytes"))
    assert characters == [
        "vowel", "consonant", "space", "digit", "punctuation", "line end", "consonant", "beyond ASCII",
        "beyond ASCII", "space", "vowel",
    ]  # fmt: skip
    assert place == [
        "first", "last", "between words", "first", "between words", "between words",
        "first", "inside", "last", "between words", "first",
    ]  # fmt: skip
    words = [b"of", b" the", b" fox", b"es", b"."]
    tokenizer = Tokenizer("bpe", words)
    assert kinds_of(torch.arange(5)[None], tokenizer)[1] == ["first", "first", "first", "last"]
    letters = torch.tensor([[*b"aaabbbcde", 0]])
    assert kinds_of(letters, Tokenizer.named("bytes"))[2] == ["frequent"] * 3 + ["between"] * 3 + ["rare"] * 3


@torch.no_grad()
def test_rows(subject):
    """Catches shares that do not sum to 1, steps of the token after, and a control that changes nothing."""
    one = subject(small_model(seed=2, vocab_size=257, block_size=8), V=257)
    loss, steps, _ = (x.double() for x in decoded_tokens(one))
    rows = records(where_rows(one))
    rows_of = {(row["group"], row["kind"]): row for row in rows}
    for group in ("character", "place in its word", "frequency", "steps taken"):
        mine = [row for row in rows if row["group"] == group and row["tokens"] == row["tokens"]]
        assert sum(row["tokens"] for row in mine) == pytest.approx(1)
        for key, whole in (("steps", steps), ("loss", loss)):
            assert sum(row[key] * row["tokens"] for row in mine) == pytest.approx(whole.mean().item())
    x = one.windows[:, :-1].flatten().tolist()
    kinds = {character(byte) for byte in x}
    assert len(kinds) > 1
    for kind in kinds:
        mine = torch.tensor([character(byte) == kind for byte in x])
        assert rows_of["character", kind]["steps"] == pytest.approx(steps[mine].mean().item())
    own, other = (rows_of["step distribution", kind] for kind in ("its own", "another token's"))
    assert own["loss"] == pytest.approx(loss.mean().item()) and own["loss"] != other["loss"]
    assert torch.equal(decoded_tokens(one)[0].double(), loss)  # by its own again


def test_permuted():
    """Catches a token that is lost, or a w that is not of its s."""
    router = small_model().router
    s, log_w = router(torch.randn(2, 5, router.proj.in_features).to(router.proj.weight))
    other_s, other_log_w = permuted(s, log_w)
    key = lambda x: sorted(map(tuple, torch.cat(x, -1).flatten(0, 1).tolist()))  # noqa: E731
    assert not other_s.equal(s) and key((other_s, other_log_w)) == key((s, log_w))
    assert permuted(s[1:], log_w[1:])[0].equal(other_s[1:])  # whichever windows a pass holds


def test_where(trained, tmp_path):
    """Catches a figure that is not drawn, and a model without a router that is."""
    Where(flags([trained / "ponder"]), out=tmp_path, data=str(trained.parent / "text.txt"), windows=4).draw()
    assert len(pd.read_csv(tmp_path / "where.csv").group.unique()) == 5
    assert (tmp_path / "where.png").stat().st_size > 5000
    with pytest.raises(UserError, match="plain"):
        Where(flags([trained / "plain"]), out=tmp_path, data=str(trained.parent / "text.txt")).draw()
