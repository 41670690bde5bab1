"""A task whose difficulty is known: lookups in a chain, between words that need none.

    ab mX bf fq .. 3 b Z 3 1 m X 1 .. the end

    table       13 pairs in random order, which make 4 chains: one of 6 lookups, three of 7 in all;
                each leads to an end of its own, a capital (--longest 10: 17 pairs, 10 and 7)
    3 b Z       3 lookups from b: b -> f -> q -> Z. The end Z is predicted at the b, so that all
                lookups have to happen at that token; the number is known before it.
    3           the number once more: a model that never has to say it may not read it
    the end     filler, which needs no lookup

Questions have as many lookups as the longest chain or fewer, or those that are chosen, equally
often. Answers to earlier questions of a line help with later ones (a letter may come again), so
that only the first question of a line is scored. A model that cannot follow a chain guesses one of
the 4 ends of the table, or of fewer: it can rule out chains that are too short. Each word is one
token, and so is a pair: a lookup takes one layer, which attends to the pair that begins with the
letter at hand. A line has 64 tokens, the end of text included: windows of 64 are lines.

With --prose half of the windows are lines, in random order among others, of docstrings in the same tokens.
"""

import random
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
from pydantic import Field

from common import UserError, read_json, write_json
from data import id_type, new_folder, split_documents, write_corpus
from model import Seed
from sources import pydocs
from tokenizer import Tokenizer

CACHE = Path("data")
Lines = Annotated[int, Field(ge=100)]  # of fewer documents data.divide would cut each
LINE = 64  # tokens
LETTERS, ENDS, CHAINS = "abcdefghijklmnopq", "STUVXYZ", 4
KINDS = "pair", "number", "question", "answer", "number again", "filler"  # of tokens, as a line has them


def letters_of(longest):
    return LETTERS[: longest + 7]


def line(rng, lookups=(), longest=6):
    """One text of the task: a table, its questions with their answers, and the end -> str.

    `lookups`: how many a question may take, equally often; none: 1 to `longest`, 6 or 10.
    """
    letters, words, at = letters_of(longest), [], {n: [] for n in range(1, longest + 1)}
    letters, lookups = rng.sample(letters, len(letters)), lookups or [*at]
    cuts = [0, *sorted(rng.sample(range(1, 7), 2)), 7, len(letters)]  # where chains begin
    for (first, stop), end in zip(pairwise(cuts), rng.sample(ENDS, CHAINS), strict=True):
        chain = [*letters[first:stop], end]
        words += [a + b for a, b in pairwise(chain)]
        for n in range(1, len(chain)):
            at[n].append((chain[-1 - n], end))  # n lookups from the end
    rng.shuffle(words)
    for _ in range((LINE - 3 - len(letters)) // 4):
        (n,) = rng.choices(lookups)
        words += [str(n), *rng.choice(at[n]), str(n)]
    return "".join(" " + word for word in [*words, "the", "end"])


def documents(lines=100_000, seed=0, lookups=(), longest=6):
    """The corpus: a document a line, (name, bytes)."""
    rng = random.Random(seed)
    return [(str(i), line(rng, lookups, longest).encode()) for i in range(lines)]


def tokenizer(longest=6):
    """One token a word, with the space before it; single bytes for anything else."""
    letters, numbers = letters_of(longest), map(str, range(1, longest + 1))
    words = [*letters, *ENDS, *numbers, "the", "end"]
    words += [a + b for a in letters for b in letters + ENDS if a != b]
    tokens = [bytes([i]) for i in range(256)] + [b" " + word.encode() for word in words]
    return Tokenizer("lookup", tokens)


def longest_of(tokenizer):
    """The lookups of the longest chain that a tokenizer of this task has words for."""
    return 10 if len(tokenizer.encode(" 10")) == 1 else 6


@pydantic.validate_call
def prepare_lookup(
    folder: Path = CACHE / "lookup", lines: Lines = 100_000, seed: Seed = 0, lookups: tuple[int, ...] = (),
    longest: Literal[6, 10] = 6, prose: bool = False,
):  # fmt: skip
    """The lookup task: chains of known length, to train on and to measure with.

    Args:
        folder: where to
        lines: number of lines, of 64 tokens each; one in 20 is for validation
        seed: of the random lines
        lookups: of a question, all equally often; by default 1 to the longest
        longest: lookups of the longest chain of each line
        prose: as many windows of docstrings among the lines

    Raises:
        UserError: a folder that holds something else; lookups that no chain has; less prose than lines.
        pydantic.ValidationError: a number out of its range.
    """
    lookups = sorted(set(lookups))
    if lookups and not 1 <= lookups[0] <= lookups[-1] <= longest:
        raise UserError(f"lookups {lookups}: chains have 1 to {longest} (--longest 10 has longer)")
    source = f"lookup task, {lines} lines, seed {seed}"
    if longest != 6:
        source += f", longest {longest}"
    if lookups:
        source += f", lookups {' '.join(map(str, lookups))}"
    if prose:
        source += ", and as many windows of docstrings"
    meta = folder / "meta.json"
    if folder.exists() and not (meta.exists() and read_json(meta).get("source") == source):
        raise UserError(f"{folder} holds something else than {source!r}: use another --folder")
    if not folder.exists() and prose:
        write_with_prose(folder, source, lines, seed, lookups, longest)
    elif not folder.exists():
        write_corpus(folder, source, documents(lines, seed, lookups, longest), tokenizer(longest))
    print(f"next: python -m lab train --data {folder}")


def windows_of_prose(texts, tokens, n):
    """The first n windows of some texts, (n, 64): 63 tokens and an end. UserError: there are fewer."""
    ids, wanted = [], n * (LINE - 1)
    for text in texts:
        if len(ids) >= wanted:
            break
        ids += tokens.encode(text)
    if len(ids) < wanted:
        raise UserError(f"the docstrings make {len(ids) // (LINE - 1)} windows, not {n}: give fewer --lines")
    rows = np.array(ids[:wanted]).reshape(n, LINE - 1)
    return np.pad(rows, ((0, 0), (0, 1)), constant_values=tokens.end_of_text)


def write_with_prose(folder, source, lines, seed, lookups, longest):
    """A prepared folder, as data.write_corpus."""
    tokens, rng, sizes = tokenizer(longest), random.Random(seed), (lines * 19 // 20, lines // 20)
    kind = id_type(tokens.vocab_size)
    with new_folder(folder) as half:
        for split, texts, n in zip(("train", "val"), split_documents(pydocs()), sizes, strict=True):
            rng.shuffle(texts)
            prose = windows_of_prose(texts, tokens, n)
            puzzles = [[*tokens.encode(line(rng, lookups, longest)), tokens.end_of_text] for _ in range(n)]
            rows = np.random.default_rng(seed).permutation(np.concatenate([prose, np.array(puzzles)]))
            rows.astype(kind).tofile(half / f"{split}.bin")
        tokens.save(half / "tokenizer.json")
        write_json(half / "meta.json", {"source": source, "dtype": kind.name})


def kinds_of(T, tokenizer):
    """The kind, an index of KINDS, of each token of a row of T whole lines. -> (T,)"""
    place = torch.arange(T) % LINE
    start, stop = longest_of(tokenizer) + 7, LINE - 3  # of the questions
    kind = 1 + (place - start) % 4
    return kind.masked_fill(place < start, 0).masked_fill(place >= stop, len(KINDS) - 1)


def lookups_asked(x, tokenizer):
    """How many lookups does the token after each of x take? Whole lines (B, T) -> (B, T) integers.

    0 where filler follows; -1 where chance decides, in the table and before a question's letter,
    where a number comes again, and at all questions of a line but the first, which earlier answers
    help with.

    Raises:
        UserError: x is not made of lines of this task.
    """
    lookups, longest = torch.zeros(tokenizer.vocab_size, dtype=torch.long), longest_of(tokenizer)
    for n in range(1, longest + 1):
        lookups[tokenizer.encode(f" {n}")[-1]] = n
    lookups = lookups.to(x.device)[x].roll(1, dims=1)  # the number is the token before the letter
    place, kind = torch.arange(x.size(1)) % LINE, kinds_of(x.size(1), tokenizer)
    first, filler = place == longest + 8, (kind == KINDS.index("filler")) & (place < LINE - 1)
    if x.size(1) % LINE or (lookups[:, kind == KINDS.index("question")] == 0).any():
        raise UserError(
            f"windows of {x.size(1)} tokens are not lines of the lookup task: prepare it with "
            f"python -m lab corpus lookup, train with --data {CACHE / 'lookup'} --block-size {LINE}"
        )
    first, filler = first.to(x.device), filler.to(x.device)
    return torch.where(first, lookups, torch.where(filler, 0, -1))
