"""A task whose difficulty is known: lookups in a chain, between words that need none.

    ab bf fc .. now 3a c , now 1f c , .. the end

    table       13 pairs in random order; the second letter of a pair is the first one of another,
                and all 13 make one circle
    3a c        3 hops from a: a -> b -> f -> c. The answer c is predicted at the token 3a, so that
                all lookups have to happen there.
    now , the   filler, which needs no lookup

Chains have 1 to 6 hops, short ones more often (all of them short of half the circle, so that no
way is shorter backwards), and all letters but the start are as likely an answer: who cannot follow
the chain guesses one of 12. Each word is one token, and a pair is one, too, so that a lookup takes
one layer: attend to the pair that begins with the letter that you have. A line has 64 tokens, the
end of text included: windows of 64 are lines.
"""

import random

import torch

from tokenizer import Tokenizer

LINE = 64  # tokens
HOPS, CHANCES = range(1, 7), [60 / hops for hops in range(1, 7)]
LETTERS, QUERIES = "abcdefghijklm", 12


def line(rng):
    circle = rng.sample(LETTERS, len(LETTERS))
    words = [a + b for a, b in zip(circle, circle[1:] + circle[:1], strict=True)]
    rng.shuffle(words)
    for _ in range(QUERIES):
        start, hops = rng.randrange(len(circle)), rng.choices(HOPS, CHANCES)[0]
        words += ["now", f"{hops}{circle[start]}", circle[(start + hops) % len(circle)], ","]
    return "".join(" " + word for word in [*words, "the", "end"])


def documents(lines=100_000, seed=0):
    """The corpus: a document a line, (name, bytes)."""
    rng = random.Random(seed)
    return [(str(i), line(rng).encode()) for i in range(lines)]


def tokenizer():
    """One token a word, with the space before it; single bytes for anything else."""
    words = [*LETTERS, *(a + b for a in LETTERS for b in LETTERS if a != b)]
    words += [f"{hops}{letter}" for hops in HOPS for letter in LETTERS]
    words += ["now", ",", "the", "end"]
    tokens = [bytes([i]) for i in range(256)] + [b" " + word.encode() for word in words]
    return Tokenizer("hops", r" ?[^ ]+| ", tokens)


def hops_asked(x, tokenizer):
    """How many lookups does the token after each of x take? Whole lines (B, T) -> (B, T) integers.

    0 where filler follows, -1 where chance decides: in the table and before a question.

    Raises:
        ValueError: x is not made of lines of this task.
    """
    if x.size(1) % LINE:
        raise ValueError(f"windows of {x.size(1)} tokens are no lines: they have to be of {LINE}")
    of_token = torch.full((tokenizer.vocab_size,), -1)
    for hops in HOPS:
        for letter in LETTERS:
            of_token[tokenizer.encode(f" {hops}{letter}")[0]] = hops
    first = len(LETTERS)  # where the first question begins
    asked = torch.full((LINE,), -1)
    for start in range(first, first + 4 * QUERIES, 4):
        asked[[start + 2, start + 3]] = 0
        asked[start + 1] = 1
    asked[[first - 1, LINE - 3, LINE - 2]] = 0
    asked = asked.repeat(x.size(1) // LINE).to(x.device)  # (T,)
    hops = of_token.to(x.device)[x]
    if (hops[:, asked == 1] < 1).any():
        raise ValueError("this text is no text of the task; train with --data hops")
    return torch.where(asked == 1, hops, asked)
