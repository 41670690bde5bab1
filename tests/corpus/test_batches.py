import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corpus.preparation import Tokens, Windows, load_tokens, read_meta
from runtime import UserError


@pytest.mark.parametrize(
    "raw,message",
    [
        (b"\1\0" * 100 + b"\1", "does not hold uint16 token ids: .* multiple"),
        (
            np.array([1, 300] * 50, dtype=np.uint16).tobytes(),
            "token id 300 in its train tokens, beyond the vocabulary of 257",
        ),
        (b"\1\0" * 64, "64 tokens, less than one window of 64"),
        (b"", "does not hold .* empty"),
        (None, "is missing"),
    ],
)
def test_bad_bins(tmp_path, raw, message):
    """Catches .bin files that would train on garbage or crash in the embedding."""
    if raw is not None:
        (tmp_path / "train.bin").write_bytes(raw)
    else:  # nothing that ends
        (tmp_path / "train.bin").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=message):
        load_tokens(tmp_path, "train", 257, 64)


GOOD = {"source": "x", "bytes": 1, "sha256": ""}


@pytest.mark.parametrize(
    "content,message",
    [
        ('{"source": "x"', "is not a JSON .* move .* away and prepare it"),
        (json.dumps(GOOD | {"dtype": "O"}), "is damaged: dtype"),  # bytes that become pointers
        (json.dumps(GOOD | {"tokens": "many"}), "is damaged: tokens"),
    ],
)
def test_bad_meta(tmp_path, content, message):
    """Catches bytes that become something else than ids, a stack trace for a damaged file, and
    somebody else's meta.json taken for ours."""
    np.ones(400, np.uint16).tofile(tmp_path / "train.bin")
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(UserError, match=f"meta.json {message}"):
        load_tokens(tmp_path, "train", 257, 64)
    (tmp_path / "meta.json").write_text('{"vocab_size": 65}')  # somebody else's
    assert read_meta(tmp_path) == {}


def test_windows():
    """Catches windows that come twice in an epoch or never, and targets not shifted."""
    tokens = np.arange(101, dtype=np.uint16)
    windows = Windows(tokens, 10, seed=3)
    assert windows.count == 10
    x = [windows.rows(step, 5) for step in range(4)]  # (5, T+1) each
    assert all(rows.diff().eq(1).all() for rows in x)
    epochs = [torch.cat(x[:2])[:, :-1], torch.cat(x[2:])[:, :-1]]
    for epoch in epochs:
        assert sorted(epoch.flatten().tolist()) == list(range(100))
    assert not torch.equal(*epochs)
    assert torch.equal(Windows(tokens, 10, seed=3).rows(3, 5), x[3])
    shares = [Windows(tokens, 10, seed=3).rows(3, 1, rank, 5) for rank in range(5)]
    assert torch.equal(torch.cat(shares), x[3])
    assert not torch.equal(Windows(tokens, 10, seed=4).rows(3, 5), x[3])


def test_order_of_windows():
    """Catches another order of the windows: a resumed run would see some twice."""
    windows = Windows(np.arange(101, dtype=np.uint16), 10, seed=3)
    order = [int(windows.window(i)[0]) // 10 for i in range(10)]
    assert order == [9, 6, 0, 2, 1, 4, 7, 5, 3, 8]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_shards_are_one_array(tmp_path_factory, sizes, data):
    """Catches a window across two shards that loses or repeats tokens."""
    folder, files = tmp_path_factory.mktemp("shards"), []
    ids = np.arange(sum(sizes), dtype=np.uint16)
    for i, part in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
        files.append(folder / f"train-{i:05}.bin")
        part.tofile(files[-1])
    tokens = Tokens(files)
    assert len(tokens) == len(ids)
    start = data.draw(st.integers(0, len(ids) - 1))
    stop = data.draw(st.integers(start + 1, len(ids) + 2))
    assert tokens[start:stop].tolist() == ids[start:stop].tolist()
