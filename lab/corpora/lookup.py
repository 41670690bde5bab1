"""A task whose difficulty is known: lookups along chains, between words that need no lookup.

    ab mX bf fq .. 3 b Z 3 1 m X 1 .. the end

    table       13 pairs in random order, which make 4 chains: one of 6 lookups, and three of 7 lookups
                together. Each chain leads to an end of its own, a capital. (--longest 10: 17 pairs, a chain
                of 10 lookups, and three of 7 together.)
    3 b Z       3 lookups from b: b -> f -> q -> Z. The end Z is predicted at the token b, so all lookups have
                to happen at that token. The number of lookups is known before it.
    3           the number again: having to predict it makes the model read it
    the end     filler, which needs no lookup

A question takes from one lookup up to the length of the longest chain, or one of the numbers in --lookups,
each equally often. Answers to earlier questions of a line help with later ones, since a letter may come
again; so only the first question of a line is scored. A model that cannot follow a chain guesses one of the 4
ends of the table, or of fewer, because it can rule out chains that are too short.

Each word is one token, and so is a pair. A lookup takes one layer, which attends to the pair that begins with
the letter at hand. A line has 64 tokens, the end of text included, so windows of 64 tokens are lines.

With --prose, half of the windows are lines; the others are docstrings in the same tokens, and all windows are
in random order.
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
from lab.corpora import tokenizers  # noqa: F401 - importing it registers PATTERNS["lookup"]
from model import Seed
from sources import pydocs
from tokenizer import Tokenizer

CACHE = Path("data")
Lines = Annotated[int, Field(ge=100)]  # with fewer documents, data.split_documents would cut each document
LINE = 64  # tokens
QUESTION = 4  # tokens of a question: the number, the letter, the answer, the number again
CLOSING = 3  # tokens after the questions: `the`, `end` and the end of text
LETTERS = "abcdefghijklmnopq"
ENDS = "STUVXYZ"
CHAINS = 4
SHORT = 7  # letters of the three shorter chains together
# The kinds of tokens, in the order of a line. (Of the tokens of a question, "question" is the letter alone.)
KINDS = "pair", "number", "question", "answer", "number again", "filler"


def letters_of(longest):
    """The letters of a table whose longest chain has this many lookups: one letter for each pair."""
    return LETTERS[: longest + SHORT]


def line(rng, lookups=(), longest=6):
    """One text of the task: a table, questions with their answers, and the words `the end`.

    Args:
        rng: a random.Random.
        lookups: how many lookups questions take, equally often; empty: 1 to `longest`.
        longest: lookups of the longest chain, 6 or 10.
    """
    letters = letters_of(longest)
    letters = rng.sample(letters, len(letters))
    starts = {n: [] for n in range(1, longest + 1)}  # (letter, end) of all starts that are n lookups away
    lookups = lookups or list(starts)
    words = []
    cuts = [0, *sorted(rng.sample(range(1, SHORT), 2)), SHORT, len(letters)]  # between chains
    for (first, stop), end in zip(pairwise(cuts), rng.sample(ENDS, CHAINS), strict=True):
        chain = [*letters[first:stop], end]
        words += [a + b for a, b in pairwise(chain)]
        for n in range(1, len(chain)):
            starts[n].append((chain[-1 - n], end))
    rng.shuffle(words)
    questions = (LINE - CLOSING - len(letters)) // QUESTION
    for _ in range(questions):
        (n,) = rng.choices(lookups)
        letter, end = rng.choice(starts[n])
        words += [str(n), letter, end, str(n)]
    return "".join(" " + word for word in [*words, "the", "end"])


def documents(lines=100_000, seed=0, lookups=(), longest=6):
    """The corpus: one document per line, (name, bytes)."""
    rng = random.Random(seed)
    return [(str(i), line(rng, lookups, longest).encode()) for i in range(lines)]


def tokenizer(longest=6):
    """A tokenizer with one token per word, including the space before it, and single bytes for other text."""
    letters = letters_of(longest)
    numbers = map(str, range(1, longest + 1))
    words = [*letters, *ENDS, *numbers, "the", "end"]
    for a in letters:
        words += [a + b for b in letters + ENDS if a != b]
    tokens = [bytes([i]) for i in range(256)]
    tokens += [b" " + word.encode() for word in words]
    return Tokenizer("lookup", tokens)


def longest_of(tokenizer):
    """The lookups of the longest chain for which a tokenizer of this task was made."""
    return 10 if len(tokenizer.encode(" 10")) == 1 else 6


@pydantic.validate_call
def prepare_lookup(
    folder: Path = CACHE / "lookup",
    lines: Lines = 100_000,
    seed: Seed = 0,
    lookups: tuple[int, ...] | None = None,
    longest: Literal[6, 10] = 6,
    prose: bool = False,
):
    """Prepare the lookup task: puzzles of known difficulty, to train on and to measure with.

    A puzzle is a line of 64 tokens. It begins with a table of pairs, which form chains: ab bf fZ leads from a
    to Z. A question names a number n and a letter, and its answer is the letter n pairs further on.

    Args:
        folder: folder to write
        lines: number of puzzles; one in 20 is for validation
        seed: seed of the random lines
        lookups: how many pairs a question follows; give several for an equal mix; None: 1 to --longest
        longest: pairs in the longest chain of each puzzle
        prose: add an equal number of 64-token pieces of docstrings

    Raises:
        UserError: the folder holds something else, no chain has so many lookups, or there are not enough
            docstrings.
        pydantic.ValidationError: a number is out of its range.
    """
    lookups = sorted(set(lookups or ()))
    if lookups and not 1 <= lookups[0] <= lookups[-1] <= longest:
        given = " ".join(map(str, lookups))
        way_out = f"give 1 to {longest}"
        if longest == 6:
            way_out += ", or add --longest 10"
        raise UserError(
            f"--lookups {given} is impossible, since the longest chain has {longest} lookups: {way_out}"
        )
    source = f"lookup task, {lines} lines, seed {seed}"
    if longest != 6:
        source += f", longest {longest}"
    if lookups:
        source += f", lookups {' '.join(map(str, lookups))}"
    if prose:
        source += ", and as many windows of docstrings"
    meta = folder / "meta.json"
    if folder.exists() and not (meta.exists() and read_json(meta).get("source") == source):
        raise UserError(
            f"--folder {folder} already holds a different corpus, not {source}: use another --folder"
        )
    if not folder.exists() and prose:
        write_with_prose(folder, source, lines, seed, lookups, longest)
    elif not folder.exists():
        write_corpus(folder, source, documents(lines, seed, lookups, longest), tokenizer(longest))
    print(f"next: python -m lab train --data {folder}")


def windows_of_prose(texts, words_tokenizer, n, lines):
    """The first n windows of some texts, (n, 64): 63 tokens and the end of text each.

    Args:
        texts: bytes of each.
        words_tokenizer: the tokenizer of this task.
        n: how many windows.
        lines: value of --lines, for the message.

    Raises:
        UserError: there are fewer windows.
    """
    ids = []
    wanted = n * (LINE - 1)
    for text in texts:
        if len(ids) >= wanted:
            break
        ids += words_tokenizer.encode(text)
    if len(ids) < wanted:
        raise UserError(
            f"--lines {lines} is too many for --prose: {n} lines of docstrings are needed, but there are "
            f"only {len(ids) // (LINE - 1)}: give fewer --lines"
        )
    rows = np.array(ids[:wanted]).reshape(n, LINE - 1)
    return np.pad(rows, ((0, 0), (0, 1)), constant_values=words_tokenizer.end_of_text)


def write_with_prose(folder, source, lines, seed, lookups, longest):
    """Write a prepared folder with as many windows of docstrings as lines, as data.write_corpus does."""
    words_tokenizer = tokenizer(longest)
    kind = id_type(words_tokenizer.vocab_size)
    rng = random.Random(seed)
    train_texts, val_texts = split_documents(pydocs())
    splits = ("train", train_texts, lines * 19 // 20), ("val", val_texts, lines // 20)
    with new_folder(folder) as unfinished:
        for split, texts, n in splits:
            rng.shuffle(texts)
            prose = windows_of_prose(texts, words_tokenizer, n, lines)
            puzzles = []
            for _ in range(n):
                puzzles.append(
                    [*words_tokenizer.encode(line(rng, lookups, longest)), words_tokenizer.end_of_text]
                )
            rows = np.concatenate([prose, np.array(puzzles)])
            rows = np.random.default_rng(seed).permutation(rows)
            rows.astype(kind).tofile(unfinished / f"{split}.bin")
        words_tokenizer.save(unfinished / "tokenizer.json")
        write_json(unfinished / "meta.json", {"source": source, "dtype": kind.name})


def kinds_of(T, tokenizer):
    """The kind of each token in a row of T tokens, whole lines: indices of KINDS, (T,)."""
    place = torch.arange(T) % LINE
    start = longest_of(tokenizer) + SHORT  # of the questions
    stop = LINE - CLOSING
    kind = KINDS.index("number") + (place - start) % QUESTION
    kind = kind.masked_fill(place < start, KINDS.index("pair"))
    return kind.masked_fill(place >= stop, KINDS.index("filler"))


def lookups_asked(x, tokenizer):
    """How many lookups it takes to predict the token after each token of x.

    Args:
        x: (B, T) whole lines.
        tokenizer: of this task.

    Returns:
        (B, T) integers. At the letter of the first question of a line, its number of lookups. 0 at `the` and
        `end`, whose next token is certain. -1 everywhere else: before a pair, a letter or the number of a
        question, which are random; at answers, after which the number comes again; and at later questions,
        with which earlier answers help.

    Raises:
        UserError: x does not consist of lines of this task.
    """
    T = x.size(1)
    longest = longest_of(tokenizer)
    number = torch.zeros(tokenizer.vocab_size, dtype=torch.long)  # that a token stands for; 0: none
    for n in range(1, longest + 1):
        number[tokenizer.encode(f" {n}")[-1]] = n
    lookups = number.to(x.device)[x].roll(1, dims=1)  # the number is the token before the letter
    kind = kinds_of(T, tokenizer)
    if T % LINE or (lookups[:, kind == KINDS.index("question")] == 0).any():
        raise UserError(
            f"this text, cut into windows of {T} tokens, does not consist of lookup puzzles of {LINE} tokens "
            "each: prepare the task with python -m lab corpus lookup, and train with "
            f"--data {CACHE / 'lookup'} --block-size {LINE}"
        )
    place = torch.arange(T) % LINE
    first = place == longest + SHORT + 1  # the letter of the first question
    filler = (kind == KINDS.index("filler")) & (place < LINE - 1)  # after the end of text a new line begins
    return torch.where(first.to(x.device), lookups, torch.where(filler.to(x.device), 0, -1))
