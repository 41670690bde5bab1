"""What a token costs, by method: in the paper's unit, and in those it leaves out.

    python cost.py                  the compute column of the paper's table, and the shapes
    python cost.py --run out/x      a trained model's cost, at the steps it was measured to take

name                  unit, per token        formula
token_computations    passes of the stack    1 + steps
paper_flops           FLOPs                  6 N (1 + steps): the paper's unit (section 4.2). 6 N is
                                             what a token costs in training; decoding takes 2 N.
forward_flops         FLOPs                  2 N (1 + steps)
product_flops         FLOPs                  about 2 for each weight that is multiplied: the head
                                             once, the embedding table never (but PonderLM-1 applies
                                             both after each pass). Without attention's products,
                                             which grow with the text.
cache_entries         keys a layer           1 + steps
training_forwards     passes of the stack    slots that run for it in all passes of a training step

N are all parameters, the embedding table's too; steps are those executed beyond the first
computation, a mean over tokens (for MoR: mean depth - 1).
"""

from dataclasses import asdict, dataclass, replace

import torch
import tyro

from config import read_config
from device import command_line
from methods import build
from run import read_results
from settings import PRESETS

# Section 4.2: extra steps, and G FLOPs a token as printed. MoR's and PonderLM-3's steps are not
# given: 8.44 and 8.86 are 2.43 and 2.60 of them.
PAPER_PARAMETERS = 0.41e9
PAPER = {
    "LoopedLM (4 loops)": (3, 9.84),
    "Pause (3 pauses)": (3, 9.84),
    "MoR (max 3 steps)": (2.43, 8.44),
    "PonderLM-1 (3 steps)": (3, 9.84),
    "PonderLM-2 (3 steps)": (3, 9.84),
    "PonderLM-3 (max 3 steps)": (2.60, 8.86),
}


@dataclass
class Cost:
    """Of one token; the units are in the table above."""

    parameters: int
    token_computations: float
    paper_flops: float
    forward_flops: float
    product_flops: float
    cache_entries: float
    training_forwards: float


def parameters(config):
    """All parameters, and those without embedding table and head: two integers."""
    with torch.device("meta"):  # shapes only, no memory
        model = build(config)
    tables = {id(p): p.numel() for p in (model.model.embed_tokens.weight, model.lm_head.weight)}
    total = sum(p.numel() for p in model.parameters())
    return total, total - sum(tables.values())


def paper_flops(N, steps):
    return 6 * N * (1 + steps)


def slots_of_passes(K, R):
    """PonderLM's slots per token in each pass: the ladder 1 .. K, R refinements, the final pass."""
    return [*range(1, K + 1), *[K + 1] * (R + 1)] if K else [1]


def training_forwards(config, steps):
    """Passes of the stack for each training token, forward. R as its mean over the range.

    Only token-choice MoR decides in training how many: there it is 1 + steps, of the tokens
    themselves (a batch of sequences is padded to the one with the most tokens at each depth).
    """
    K, R = config.ponder_steps, sum(config.iters) / 2
    if config.method == "mor-expert":
        return sum(config.shares)
    if config.method == "mor-token":
        return 1 + steps
    if config.label in ("ponderlm3", "ponderlm2"):
        return sum(slots_of_passes(K, 0)) + R * (K + 1)
    return K + 1


def cost(config, steps):
    """The Cost of a model (PonderConfig) that executes so many extra steps a token.

    Raises:
        ValueError: more steps than the model has, or fewer than none.
    """
    K = config.ponder_steps
    if not 0 <= steps <= K:
        raise ValueError(f"{steps} steps a token: a model with K = {K} takes 0 to {K}")
    (N, stack), table = parameters(config), config.vocab_size * config.hidden_size
    tables = 1 + 2 * steps if config.method == "ponderlm1" else 1  # heads, and mixtures of rows
    return Cost(
        parameters=N,
        token_computations=1 + steps,
        paper_flops=paper_flops(N, steps),
        forward_flops=2 * N * (1 + steps),
        product_flops=2 * (stack * (1 + steps) + table * tables),
        cache_entries=1 + steps,
        training_forwards=training_forwards(config, steps),
    )


def main(run: str | None = None):
    """What a token costs: the paper's column and shapes, or a trained model.

    Args:
        run: directory of a trained model
    """
    if run is not None:
        config, steps = read_config(run), read_results(run)["hard"]["steps"]
        costs = asdict(cost(config, steps))
        print(f"{run}: {config.label}, {steps:.2f} of {config.ponder_steps} extra steps a token")
        for name, value in costs.items():
            print(f"{name:20}{value:18,.2f}")
        return
    print(f"The paper's column, 6 N (1 + steps) with N = {PAPER_PARAMETERS / 1e9:.2f} G parameters")
    print(f"{'':26}{'steps':>7}{'G FLOPs':>10}{'printed':>10}")
    for name, (steps, printed) in PAPER.items():
        flops = paper_flops(PAPER_PARAMETERS, steps) / 1e9
        print(f"{name:26}{steps:7.2f}{flops:10.2f}{printed:10.2f}")
    print(f"\nThe shapes, without a router\n{'':8}{'parameters':>12}{'without tables':>16}")
    for name in ("70m", "410m"):
        shape = replace(PRESETS[name].model, ponder_steps=0)
        print(f"{name:8}" + "{:11.1f}M{:15.1f}M".format(*(n / 1e6 for n in parameters(shape))))


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main))
