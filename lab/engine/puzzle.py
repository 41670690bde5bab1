"""A puzzle solved: what a model of the lookup task (corpora/lookup.py) looks up at each step.

    3 b     b -> f -> q -> Z     the model answers Z, after two thinking steps

Nothing is drawn from the truth: what a step looks up is the pair that it attends to, measured.
"""

import random
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lab.corpora.lookup import line, longest_of
from lab.corpora.tokenizers import load_tokenizer
from lab.interop import PUZZLES, load
from lab.methods import grid
from model import UserError


@dataclass
class Solution:
    """What a model does with one question."""

    table: list  # the pairs, in the order that they are read
    chain: str  # the letters from the one that is asked about to the end
    answer: str
    steps: int  # executed
    attention: list  # {pair: the share of the head that gives it most} of each state, h⁽⁰⁾ first

    def looked_up(self):
        """The pair that each state attends to most, with its share."""
        return [max(pairs.items(), key=lambda item: item[1]) for pairs in self.attention]


@contextmanager
def watched():
    """Attention weights (H, M) of every slot that a model on the grid runs meanwhile: a list."""
    attend, seen = grid.attend_to_cache, []

    def watching(q, k, v, d):
        k_of_head = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
        seen.append((q @ k_of_head.mT / d**0.5).softmax(-1)[0, :, -1])
        return attend(q, k, v, d)

    grid.attend_to_cache = watching
    try:
        yield seen
    finally:
        grid.attend_to_cache = attend


@torch.no_grad()
def solve(model, tokenizer, table, letter, tau):
    """Ask a model of one layer on the grid for the end of a letter's chain -> Solution."""
    chain = chain_from(letter, table)
    ids = tokenizer.encode(f" {' '.join(table)} {len(chain) - 1} {letter}")
    cache, owners = model.new_cache(), [[] for _ in range(model.config.ponder_steps + 1)]
    with watched() as seen:
        for t, x in enumerate(ids):
            seen.clear()
            logits, steps = model.ponder_token(x, t, cache, tau, 0.0)
            for k in range(steps + 1):
                owners[k].append(t)  # whose keys lie in the cache of slot k, in order
    attention = []
    for k, weights in enumerate(seen):  # of the last token: M = the keys of slots 0 .. k
        places = torch.tensor([t for slot in owners[: k + 1] for t in slot])
        share = weights.new_zeros(len(weights), len(ids)).index_add_(1, places, weights)
        attention.append(dict(zip(table, share.max(0).values.tolist(), strict=False)))
    said = tokenizer.decode([int(logits.argmax())]).decode("utf-8", "replace").strip()
    return Solution(table, chain, said, steps, attention)


def puzzle(seed, longest=6):
    """A table and a letter for each number of lookups, from a seed -> [pair, ..], {n: letter}."""
    rng = random.Random(seed)
    words = line(rng, longest=longest).split()
    table = words[: longest + 7]
    lengths = {pair[0]: len(chain_from(pair[0], table)) for pair in table}
    letters = {n: [a for a in lengths if lengths[a] == n + 1] for n in range(1, longest + 1)}
    return table, {n: rng.choice(some) for n, some in letters.items()}


def chain_from(letter, table):
    """The letters from one to its chain's end."""
    follow, chain = {a: b for a, b in table}, letter
    while chain[-1] in follow:
        chain += follow[chain[-1]]
    return chain


def open_model(path=PUZZLES):
    """A model of the task and its tokenizer. UserError: it is another one."""
    model, tokenizer = load(path), load_tokenizer(path / "tokenizer.json")
    layers = model.config.num_hidden_layers
    if model.method != "grid" or layers != 1 or tokenizer.name != "lookup":
        raise UserError(
            f"{path} is {layers} layers of {model.method} for {tokenizer.name}; a puzzle takes one "
            f"layer of grid for lookup: bash lab/runs/lookup.sh trains some"
        )
    return model, tokenizer


def show(model, tokenizer, tau=0.1, seed=6):
    """Print a puzzle, one question of each number of lookups, and what the model does with them."""
    table, letters = puzzle(seed, longest_of(tokenizer))
    print(f"A model reads a table, {' '.join(table)}, and says where a chain ends:\n")
    width = 3 * len(letters)
    print(f"question   {'what it looks up':{max(width, 16)}}   answer   thinking steps")
    for number, letter in letters.items():
        found = solve(model, tokenizer, table, letter, tau)
        pairs = " ".join(pair for pair, _ in found.looked_up())
        wrong = "" if found.answer == found.chain[-1] else f", not {found.chain[-1]}"
        print(f"{number:4} {letter}     {pairs:{width}}   {found.answer + wrong:8} {found.steps}")
    print()
