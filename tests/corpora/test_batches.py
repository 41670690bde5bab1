import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import Tokenizer
from lab.corpora.preparation import Shards, describe, load_tokens, open_corpus, read_meta
from model import UserError

GOOD = {"source": "x", "bytes": 1, "sha256": ""}


@pytest.mark.parametrize(
    "content,message",
    [
        ('{"source": "x"', "cannot be read.* move .* away and prepare it"),
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
        load_tokens(tmp_path, "train", 257)
    (tmp_path / "meta.json").write_text('{"vocab_size": 65}')  # somebody else's
    assert read_meta(tmp_path) == {}


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_type_of_ids_that_others_wrote(tmp_path, dtype):
    """Catches a folder whose meta.json has the dtype alone, as the error without one says, and which is
    refused again."""
    Tokenizer.bytes().save(tmp_path / "tokenizer.json")
    for split in ("train", "val"):
        np.arange(200, dtype=dtype).tofile(tmp_path / f"{split}.bin")
    with pytest.raises(UserError, match=f'"dtype": "{dtype}"'):
        open_corpus(str(tmp_path))
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": dtype}))
    assert open_corpus(str(tmp_path)).train[:].tolist() == [*range(200)]
    assert describe(tmp_path) == str(tmp_path)
    (tmp_path / "meta.json").write_text('{"dtype": "O"}')
    with pytest.raises(UserError, match="dtype = 'O' is none of"):
        open_corpus(str(tmp_path))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_shards_are_one_array(tmp_path_factory, sizes, data):
    """Catches a window across two shards that loses or repeats tokens."""
    folder, files = tmp_path_factory.mktemp("shards"), []
    ids = np.arange(sum(sizes), dtype=np.uint16)
    for i, part in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
        files.append(folder / f"train-{i:05}.bin")
        part.tofile(files[-1])
    tokens = Shards([np.fromfile(file, np.uint16) for file in files])
    assert len(tokens) == len(ids) and np.max(tokens) == ids[-1]
    start = data.draw(st.integers(0, len(ids) - 1))
    stop = data.draw(st.integers(start + 1, len(ids) + 2))
    assert tokens[start:stop].tolist() == ids[start:stop].tolist()
