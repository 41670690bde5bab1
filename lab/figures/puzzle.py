"""Show how a model solves a puzzle, one lookup per extra step: printed, and drawn as an animated SVG.

    python -m lab puzzle                                 the model in models/lookup
    python -m lab puzzle --run out/grid --number 4       another model, and a question of four lookups

For example, a question of three lookups that begins at b (the first lookup needs no extra step):

    3 b     b -> f -> q -> Z     the model answers Z, after two extra steps

What a step looks up is measured, not taken from the solution: it is the pair that the step attends to most.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from attention import augment
from common import UserError, command_line
from lab.common import NonEmpty
from lab.corpora.lookup import SHORT, line, longest_of
from lab.figures.explainer import open_model, write_page
from lab.interop.weights import PUZZLES, locate
from lab.methods.grid import CacheBySlot
from model import Fraction, validated_dataclass
from router import TAU

SECONDS = 0.9  # that a step is shown
PAUSE = 4  # seconds after the last step


@dataclass
class Solution:
    """What a model does with one question."""

    table: list  # the pairs, in the order in which they are read
    chain: str  # the letters from the one that is asked about to the end
    answer: str
    steps: int  # extra steps that were executed
    attention: list  # for each state, h⁽⁰⁾ first: {pair: attention weight, of the head that gives it most}

    def looked_up(self):
        """(pair, weight) of the pair that each state attends to most."""
        return [max(pairs.items(), key=lambda item: item[1]) for pairs in self.attention]


class Watched(CacheBySlot):
    """A layer's cache on the grid that keeps the attention weights of each slot: (H, M) each, for the M keys
    that the slot sees.

    Attributes:
        seen: the weights of each slot so far. `solve` puts a new list here for each token.
    """

    seen = None

    def attend(self, q, k, v, log_w):
        out = super().attend(q, k, v, log_w)  # after it, self.k is one more than the number of this slot
        d = q.size(-1)
        q, _, _ = augment(q, k, v, log_w)  # (1, H, 1, d')
        # slots[:k] are the caches that this slot has seen.
        keys = torch.cat([slot.keys for slot in self.slots[: self.k]], dim=2)  # (1, G, M, d')
        keys = keys.repeat_interleave(q.size(1) // keys.size(1), dim=1)
        self.seen.append((q @ keys.mT / d**0.5).softmax(-1)[0, :, -1])
        return out


@torch.no_grad()
def solve(model, tokenizer, table, letter, tau):
    """Ask a model for the end of a letter's chain.

    Args:
        model: of one layer, on the grid.
        tokenizer: of the lookup task.
        table: pairs.
        letter: the first one of the chain.
        tau: where it stops.

    Returns:
        Solution.
    """
    chain = chain_from(letter, table)
    ids = tokenizer.encode(f" {' '.join(table)} {len(chain) - 1} {letter}")
    S = model.config.ponder_steps + 1
    cache = Watched(S)
    # for each slot k, the tokens whose keys the cache of slot k holds, in order
    owners = [[] for _ in range(S)]
    for t, x in enumerate(ids):
        cache.seen = []
        logits, steps = model.ponder_token(x, t, [cache], tau)
        for k in range(steps + 1):
            owners[k].append(t)
    attention = []
    tokens_of_keys = []
    for k, weights in enumerate(cache.seen):  # of the last token; slot k sees the keys of slots 0 .. k
        tokens_of_keys += owners[k]
        by_token = weights.new_zeros(len(weights), len(ids))  # (H, tokens)
        by_token.index_add_(1, torch.tensor(tokens_of_keys), weights)
        largest = by_token.max(0).values.tolist()
        attention.append(dict(zip(table, largest, strict=False)))  # the text begins with the table
    said = tokenizer.decode([int(logits.argmax())]).decode("utf-8", "replace").strip()
    return Solution(table, chain, said, steps, attention)


def puzzle(seed, longest=6):
    """A random table, a list of pairs, and a letter for each number of lookups, {n: letter}."""
    rng = random.Random(seed)
    words = line(rng, longest=longest).split()
    table = words[: longest + SHORT]
    lengths = {pair[0]: len(chain_from(pair[0], table)) for pair in table}
    letters = {}
    for n in range(1, longest + 1):
        letters[n] = rng.choice([letter for letter, length in lengths.items() if length == n + 1])
    return table, letters


def chain_from(letter, table):
    """The letters from one letter to the end of its chain, as one text."""
    follow = {a: b for a, b in table}
    chain = letter
    while chain[-1] in follow:
        chain += follow[chain[-1]]
    return chain


def show(model, tokenizer, tau=TAU, seed=6):
    """Print a puzzle with one question for each number of lookups, and what the model does with them."""
    table, letters = puzzle(seed, longest_of(tokenizer))
    print(f"A model reads a table, {' '.join(table)}, and predicts where a chain ends:\n")
    width = 3 * len(letters)
    print(f"question   {'what it looks up':{max(width, 16)}}   answer   extra steps")
    for number, letter in letters.items():
        found = solve(model, tokenizer, table, letter, tau)
        pairs = " ".join(pair for pair, _ in found.looked_up())
        wrong = "" if found.answer == found.chain[-1] else f", not {found.chain[-1]}"
        print(f"{number:4} {letter}     {pairs:{width}}   {found.answer + wrong:8} {found.steps}")
    print()


@validated_dataclass
class Puzzle:
    # directory of a model that was trained on the lookup task with --method grid; None: models/lookup
    run: NonEmpty | None = None
    seed: int = 6  # seed of the puzzle
    number: int | None = None  # which question to draw, by its number of lookups; None: the most
    # early-exit threshold: a token takes no further pondering step once the router's probability that it
    # needs one falls below this; 0: take all steps
    tau: Fraction = TAU
    out: Path = Path("out/puzzle.svg")  # file for the picture


def main(options: Annotated[Puzzle, tyro.conf.arg(name="")]):
    o = options
    place = PUZZLES if o.run is None else locate(o.run)
    model, tokenizer = open_model(place, "grid", "lookup")
    layers = model.config.num_hidden_layers
    if layers > 1:
        raise UserError(
            f"{place} has {layers} layers, but this command needs a model of one layer: bash "
            "lab/runs/lookup.sh trains such models"
        )
    table, letters = puzzle(o.seed, longest_of(tokenizer))
    number = max(letters) if o.number is None else o.number
    if number not in letters:
        raise UserError(f"--number {number} is not possible: questions take 1 to {max(letters)} lookups")
    show(model, tokenizer, o.tau, o.seed)
    found = solve(model, tokenizer, table, letters[number], o.tau)
    # After the question come the frames, one for each slot and one for the answer, and then a pause.
    period = SECONDS * (found.steps + 2) + PAUSE  # seconds
    at = [100 * SECONDS * (k + 1) / period for k in range(found.steps + 2)]  # percent
    # The picture begins with its last frame, for readers who see it still. A CSS delay below 0 begins the
    # animation that many seconds after its start.
    start = PAUSE - 1 - period
    write_page(o.out, "puzzle.svg", found=found, number=number, period=period, at=at, start=start)


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab puzzle", description=__doc__))
