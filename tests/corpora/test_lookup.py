import random
from hashlib import sha256

import pytest
import torch

from common import UserError
from data import Windows
from lab.corpora import lookup
from lab.corpora.preparation import open_corpus
from lab.figures.puzzle import chain_from


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """200 lines."""
    folder = tmp_path_factory.mktemp("lookup") / "lookup"
    lookup.prepare_lookup(folder, lines=200)
    return folder


@pytest.mark.parametrize("longest", [6, 10])
def test_lines(longest):
    """Catches an answer at another distance than asked, other chains or lines, a word of two tokens."""
    tokenizer, rng, asked, ends = lookup.tokenizer(longest), random.Random(3), [], []
    pairs = longest + 7
    for _ in range(100):
        text = lookup.line(rng, longest=longest)
        ids = tokenizer.encode(text)
        assert len(ids) == lookup.LINE - 1 and min(ids) >= 256
        assert tokenizer.decode(ids).decode() == text
        words = text.split()
        table, following = words[:pairs], dict(words[:pairs])
        begins = following.keys() - following.values()
        chains = [chain_from(letter, table) for letter in begins]
        assert len(following) == pairs and len(chains) == 4 and max(map(len, chains)) == longest + 1
        assert len({chain[-1] for chain in chains} & {*"STUVXYZ"}) == 4
        for i in range(pairs, 61, 4):
            number, letter, answer, again = words[i : i + 4]
            assert chain_from(letter, table)[int(number) :] == answer and number == again
            asked.append(int(number))
            ends.append(answer)
        assert words[61:] == ["the", "end"]
    counts = [asked.count(n) for n in range(1, longest + 1)]
    assert sum(counts) == len(asked) and min(counts) > 0.7 * max(counts)
    assert all(100 < ends.count(end) < 250 for end in "STUVXYZ")
    assert lookup.longest_of(tokenizer) == longest


def test_corpus(corpus):
    """Catches another text or split than earlier results were measured on, and windows that are not lines."""
    digests = {"train": "b1d522b7c0ed2bb4", "val": "64547a7e1f21490d"}
    for split, digest in digests.items():
        assert sha256((corpus / f"{split}.bin").read_bytes()).hexdigest()[:16] == digest
    prepared = open_corpus(str(corpus))
    assert prepared.tokenizer.name == "lookup" and prepared.val_bytes == 1144
    windows = Windows(prepared.train, lookup.LINE, seed=0)
    x = windows.stack(0, windows.count)
    assert (x[:, -2] == prepared.tokenizer.end_of_text).all()
    # The held-out lines of another seed are none of these.
    assert not {*lookup.documents(30, 0)} & {*lookup.documents(30, 1)}


def test_chosen_lookups(tmp_path, monkeypatch):
    """Catches questions of other kinds or shares, and a corpus that is made again or is another one."""
    folder, asked_for = tmp_path / "some", dict(lines=100, lookups=(1, 3))
    lookup.prepare_lookup(folder, **asked_for)
    prepared = open_corpus(str(folder))
    asked = [word for word in prepared.tokenizer.decode(prepared.train).decode().split() if word.isdigit()]
    assert set(asked) == {"1", "3"} and 0.4 < asked.count("3") / len(asked) < 0.6
    monkeypatch.setattr(lookup, "write_corpus", lambda *_: pytest.fail("it was made again"))
    lookup.prepare_lookup(folder, **asked_for)
    for other in (dict(lines=300), dict(seed=1), dict(lookups=()), dict(longest=10)):
        with pytest.raises(UserError, match="use another --folder"):
            lookup.prepare_lookup(folder, **asked_for | other)
    with pytest.raises(UserError, match="lookups"):
        lookup.prepare_lookup(tmp_path / "new", lookups=(0, 1))


def test_lookups_asked(corpus):
    """Catches a mask that is one token off, and a text that is something else."""
    prepared = open_corpus(str(corpus))
    tokenizer, x = prepared.tokenizer, torch.from_numpy(prepared.val[: 4 * 64].astype(int)).view(4, 64)
    asked = lookup.lookups_asked(x.view(2, 128), tokenizer).view(4, 64)
    numbers = [int(tokenizer.decode([token])) for token in x[:, 13].tolist()]
    assert asked[:, 14].tolist() == numbers and (asked[:, 61:63] == 0).all()  # before the end of text, too
    asked[:, [14, 61, 62]] = -1
    assert (asked == -1).all()
    for other in (x[:, :60], x.roll(1, dims=1)):
        with pytest.raises(UserError, match="does not consist of lookup puzzles"):
            lookup.lookups_asked(other, tokenizer)
