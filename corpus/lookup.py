"""A task whose difficulty is known: lookups in a chain, between words that need none.

    ab mX bf fq .. now 3 b Z now 1 m X .. the end

    table       13 pairs in random order, which make 4 chains: one of 6 lookups, three of 7 in all;
                each leads to an end of its own, a capital
    3 b Z       3 lookups from b: b -> f -> q -> Z. The end Z is predicted at the b, so that all
                lookups have to happen at that token; the number is known before it.
    now, the    filler, which needs no lookup

Questions have 1 to 6 lookups, short ones more often, or those that are chosen, equally often.
Answers to earlier questions of a line help with later ones (a letter may come again), so that only
the first question of a line is scored. A model that cannot follow a chain guesses one of the 4 ends
of the table, or of fewer: it can rule out chains that are too short. Each word is one token, and so
is a pair: a lookup takes one layer, which attends to the pair that begins with the letter at hand.
A line has 64 tokens, the end of text included: windows of 64 are lines.
"""

import random
from itertools import pairwise

import torch

from corpus.preparation import CACHE, read_meta, write_corpus
from corpus.tokenizers import Tokenizer
from runtime import UserError

LINE = 64  # tokens
LETTERS, ENDS, CHAINS, QUESTIONS = "abcdefghijklm", "STUVXYZ", 4, 12
LOOKUPS = range(1, 7)
CHANCES = (6, 4, 2, 1.5, 1.2, 1)  # of a question with 1, 2, .. 6 lookups


def line(rng, lookups=()):
    """One text of the task: a table, its questions with their answers, and the end -> str.

    `lookups`: how many a question may take, equally often; none: all of LOOKUPS, by CHANCES.
    """
    letters, words, at = rng.sample(LETTERS, len(LETTERS)), [], {n: [] for n in LOOKUPS}
    cuts = [0, *sorted(rng.sample(range(1, 7), 2)), 7, 13]  # where chains begin
    for (first, stop), end in zip(pairwise(cuts), rng.sample(ENDS, CHAINS), strict=True):
        chain = [*letters[first:stop], end]
        words += [a + b for a, b in pairwise(chain)]
        for n in range(1, len(chain)):
            at[n].append((chain[-1 - n], end))  # n lookups from the end
    rng.shuffle(words)
    for _ in range(QUESTIONS):
        (n,) = rng.choices(lookups) if lookups else rng.choices(LOOKUPS, CHANCES)
        words += ["now", str(n), *rng.choice(at[n])]
    return "".join(" " + word for word in [*words, "the", "end"])


def documents(lines=100_000, seed=0, lookups=()):
    """The corpus: a document a line, (name, bytes)."""
    rng = random.Random(seed)
    return [(str(i), line(rng, lookups).encode()) for i in range(lines)]


def tokenizer():
    """One token a word, with the space before it; single bytes for anything else."""
    words = [*LETTERS, *ENDS, *map(str, LOOKUPS), "now", "the", "end"]
    words += [a + b for a in LETTERS for b in LETTERS + ENDS if a != b]
    tokens = [bytes([i]) for i in range(256)] + [b" " + word.encode() for word in words]
    return Tokenizer("lookup", r" ?[^ ]+| ", tokens)


def prepare_lookup(folder=CACHE / "lookup", lines=100_000, seed=0, lookups=()):
    """Write the prepared corpus of the task, unless it is there. One line in 20 is for validation.

    Raises:
        UserError: a folder that holds something else.
    """
    lookups = sorted(set(lookups))
    source = f"lookup, {lines} lines, seed {seed}"
    if lookups:
        source += f", lookups {' '.join(map(str, lookups))}"
    if not folder.exists():
        write_corpus(folder, source, documents(lines, seed, lookups), tokenizer())
    elif read_meta(folder).get("source") != source:
        raise UserError(f"{folder} holds something else than {source!r}: use another --folder")


def lookups_asked(x, tokenizer):
    """How many lookups does the token after each of x take? Whole lines (B, T) -> (B, T) integers.

    0 where filler follows; -1 where chance decides, in the table and before a question's letter,
    and at all questions of a line but the first, which earlier answers help with.

    Raises:
        UserError: x is not made of lines of this task.
    """
    lookups = torch.zeros(tokenizer.vocab_size, dtype=torch.long)
    for n in LOOKUPS:
        lookups[tokenizer.encode(f" {n}")[-1]] = n
    lookups = lookups.to(x.device)[x].roll(1, dims=1)  # the number is the token before the letter
    place = torch.arange(x.size(1), device=x.device) % LINE
    start, stop = len(LETTERS), LINE - 3  # of the questions, each of now, number, letter, end
    part = (place - start) % 4
    question = (place >= start) & (place < stop) & (part == 2)
    filler = (place >= start - 1) & (part == 3) | (place == stop) | (place == stop + 1)
    if x.size(1) % LINE or (lookups[:, question] == 0).any():
        raise UserError(
            f"windows of {x.size(1)} tokens are not lines of the lookup task: prepare it with "
            f"python -m corpus lookup, train with --data {CACHE / 'lookup'} --block-size {LINE}"
        )
    question &= place == start + 2
    return torch.where(question, lookups, torch.where(filler, 0, -1))
