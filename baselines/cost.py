"""What a token costs, by method: in the paper's unit, and in those it leaves out.

    python -m baselines                  the compute column of the paper's table, and the shapes
    python -m baselines --run out/x      a trained model's cost, at the steps that it takes

name                  unit, per token        formula
token_computations    passes of the stack    1 + steps
paper_flops           FLOPs                  6 N (1 + steps): the paper's unit (section 4.2). 6 N is
                                             what a token costs in training; decoding takes 2 N.
forward_flops         FLOPs                  2 N (1 + steps)
product_flops         FLOPs                  about 2 for each weight that is multiplied: the head
                                             once, the embedding table never (but PonderLM-1 and
                                             AdaPonderLM apply both after each pass). Without
                                             routers, which are small but in AdaPonderLM, and
                                             attention's products, which grow with the text.
cache_entries         keys a layer           1 + steps
training_forwards     passes of the stack    slots that run for it in all passes of a training step;
                                             one without gradient counts a third (--backprop-passes)

N are all parameters, the embedding table's too; steps are those executed beyond the first
computation, a mean over tokens (for MoR: mean depth - 1).
"""

from dataclasses import dataclass

import torch

from baselines import build, find
from runtime import UserError

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
    """All parameters, and those of the stack, without tables, head and routers: two integers."""
    with torch.device("meta"):  # shapes only, no memory
        model = build(config)
    stack = sum(p.numel() for p in model.model.parameters())
    stack -= model.model.embed_tokens.weight.numel()
    return sum(p.numel() for p in model.parameters()), stack


def paper_flops(N, steps):
    return 6 * N * (1 + steps)


def cost(config, steps):
    """The Cost of a model (PonderConfig) that executes so many extra steps a token.

    Raises:
        UserError: more steps than the model has, or fewer than none.
    """
    K, method = config.ponder_steps, find(config.method)
    if not 0 <= steps <= K:
        raise UserError(f"{steps} steps a token: a model with K = {K} takes 0 to {K}")
    (N, stack), table = parameters(config), config.vocab_size * config.hidden_size
    return Cost(
        parameters=N,
        token_computations=1 + steps,
        paper_flops=paper_flops(N, steps),
        forward_flops=2 * N * (1 + steps),
        product_flops=2 * (stack * (1 + steps) + table * method.vocabulary_products(steps)),
        cache_entries=1 + steps,
        training_forwards=method.training_forwards(config, steps),
    )
