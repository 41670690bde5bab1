"""A puzzle that a model solves, a lookup a thinking step: printed, and drawn as a picture that moves.

    python -m lab puzzle                                 models/lookup
    python -m lab puzzle --run out/grid --number 4       another model, a question of four lookups

    3 b     b -> f -> q -> Z     the model answers Z, after two thinking steps

Nothing is drawn from the truth: what a step looks up is the pair that it attends to, measured.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from attention import augment
from common import UserError, command_line
from lab.common import Given
from lab.corpora.lookup import line, longest_of
from lab.figures.explainer import open_model, write_page
from lab.interop.weights import PUZZLES, locate
from lab.methods.grid import SlotCache
from model import Fraction, validated_dataclass
from router import TAU

SECONDS, PAUSE = 0.9, 4  # of a step, and behind the last


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


class Watched(SlotCache):
    """The cache of a layer on the grid, which notes to what each slot attends: weights (H, M), in a list."""

    seen = ()

    def attend(self, q, k, v, log_w):
        out, d = super().attend(q, k, v, log_w), q.size(-1)
        q = augment(q, k, v, log_w)[0]  # (1, H, 1, d')
        keys = torch.cat([slot.keys for slot in self.slots[: self.k]], dim=2)  # (1, G, M, d')
        keys = keys.repeat_interleave(q.size(1) // keys.size(1), dim=1)
        self.seen.append((q @ keys.mT / d**0.5).softmax(-1)[0, :, -1])
        return out


@torch.no_grad()
def solve(model, tokenizer, table, letter, tau):
    """Ask a model of one layer on the grid for the end of a letter's chain -> Solution."""
    chain = chain_from(letter, table)
    ids = tokenizer.encode(f" {' '.join(table)} {len(chain) - 1} {letter}")
    S = model.config.ponder_steps + 1
    cache, owners = Watched(S), [[] for _ in range(S)]
    for t, x in enumerate(ids):
        cache.seen = []
        logits, steps = model.ponder_token(x, t, [cache], tau)
        for k in range(steps + 1):
            owners[k].append(t)  # whose keys lie in the cache of slot k, in order
    attention = []
    for k, weights in enumerate(cache.seen):  # of the last token: M = the keys of slots 0 .. k
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


def show(model, tokenizer, tau=TAU, seed=6):
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


@validated_dataclass
class Puzzle:
    run: Given | None = None  # a model of the lookup task on the grid; by default models/lookup
    seed: int = 6  # of the puzzle
    number: int | None = None  # lookups of the question that is drawn; by default the most
    tau: Fraction = TAU  # where pondering stops
    out: Path = Path("out/puzzle.svg")


def main(options: Annotated[Puzzle, tyro.conf.arg(name="")]):
    o = options
    place = PUZZLES if o.run is None else locate(o.run)
    model, tokenizer = open_model(place, "grid", "lookup")
    if (layers := model.config.num_hidden_layers) > 1:
        raise UserError(
            f"{place} has {layers} layers, not one: bash lab/runs/lookup.sh trains some that have"
        )
    table, letters = puzzle(o.seed, longest_of(tokenizer))
    number = max(letters) if o.number is None else o.number
    if number not in letters:
        raise UserError(f"--number {number}: there are 1 to {max(letters)} lookups")
    show(model, tokenizer, o.tau, o.seed)
    found = solve(model, tokenizer, table, letters[number], o.tau)
    period = SECONDS * (found.steps + 2) + PAUSE
    at = [100 * SECONDS * (k + 1) / period for k in range(found.steps + 2)]  # percent
    write_page(o.out, "puzzle.svg", found=found, number=number, period=period, at=at)


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab puzzle", description=__doc__))
