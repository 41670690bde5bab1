"""Two kinds of text in one corpus, of which one needs thought: docstrings, and lines of the lookup task.

Half of its windows of 64 tokens are lines of the task (lookup.py). The others are prose: the docstrings of
data.pydocs in the tokens of the task, cut into 63 and the end of a text. All are shuffled.
"""

import random
from pathlib import Path

import numpy as np
import pydantic

from data import UserError, divide, id_type, new_folder, pydocs, write_json
from lab.corpora.lookup import CACHE, LINE, Lines, chosen, is_made, line, tokenizer
from model import Seed


def windows_of_prose(texts, tokens, n):
    """The first n windows of some texts, (n, 64). UserError: there are fewer."""
    ids, wanted = [], n * (LINE - 1)
    for text in texts:
        if len(ids) >= wanted:
            break
        ids += tokens.encode(text)
    if len(ids) < wanted:
        raise UserError(f"the docstrings make {len(ids) // (LINE - 1)} windows, not {n}: give fewer --lines")
    rows = np.array(ids[:wanted]).reshape(n, LINE - 1)
    return np.pad(rows, ((0, 0), (0, 1)), constant_values=tokens.end_of_text)


@pydantic.validate_call
def prepare_mixed(
    folder: Path = CACHE / "mixed", lines: Lines = 50_000, seed: Seed = 0, lookups: tuple[int, ...] = ()
):
    """Two kinds of text: lines of the lookup task, and as many windows of docstrings.

    Args:
        folder: where to
        lines: of the task, of 64 tokens each; one in 20 is for validation
        seed: of the random lines and of their order
        lookups: as for the lookup task

    Raises:
        UserError: a folder that holds something else; more lines than there is prose; lookups that no chain
            has.
        pydantic.ValidationError: a number out of its range.
    """
    lookups = chosen(lookups, longest=6)
    asked = f", lookups {' '.join(map(str, lookups))}" if lookups else ""
    source = f"{lines} lines of the lookup task and as many windows of docstrings, seed {seed}{asked}"
    if not is_made(folder, source):
        write_mixed(folder, source, lines, seed, lookups)
    print(f"next: python -m lab train --data {folder}")


def write_mixed(folder, source, lines, seed, lookups):
    """A prepared folder, as data.write_corpus."""
    tokens, rng, kind = tokenizer(), random.Random(seed), id_type(tokenizer().vocab_size)
    with new_folder(folder) as half:
        sizes = lines * 19 // 20, lines // 20
        for split, texts, n in zip(("train", "val"), divide(pydocs()), sizes, strict=True):
            rng.shuffle(texts)
            prose = windows_of_prose(texts, tokens, n)
            puzzles = [[*tokens.encode(line(rng, lookups)), tokens.end_of_text] for _ in range(n)]
            rows = np.random.default_rng(seed).permutation(np.concatenate([prose, np.array(puzzles)]))
            rows.astype(kind).tofile(half / f"{split}.bin")
        tokens.save(half / "tokenizer.json")
        write_json(half / "meta.json", {"source": source, "dtype": kind.name})
