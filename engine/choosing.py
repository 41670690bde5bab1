"""From logits to a token: greedy, or by chance among the most probable ones; what is refused."""

import math
from dataclasses import dataclass

import torch

from runtime import UserError


@dataclass
class Sample:
    tokens: list[int]  # the generated ids
    steps: list[int]  # pondering steps executed before each of them was chosen


def uniform(seed, n):
    """n random numbers in [0, 1) for one sequence, in float64; seed None: others at every call.

    They are drawn in advance. So what is chosen depends on the logits alone, not on which decoder
    computes them, nor on who else is decoded beside it.
    """
    if seed is not None and not 0 <= seed < 2**63:
        raise UserError(f"seed = {seed}: it must lie in [0, 2^63)")
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    return torch.rand(n, generator=generator, dtype=torch.float64)


def choose(logits, u, temperature=1.0, top_k=None, top_p=None):
    """The token at which the cumulative probability passes u. (..., V), (...) -> (...).

    Temperature 0 takes the most probable one. top_k and top_p leave the k most probable, and the
    fewest whose probabilities reach top_p. Logits that are not finite raise a UserError.
    """
    if not logits.max().isfinite():
        raise UserError("the logits are not finite: the weights, or alpha, are too large")
    if temperature == 0:
        return logits.argmax(-1)
    logits, order = logits.float() / temperature, None
    if top_k is not None or top_p is not None:
        logits, order = logits.sort(dim=-1, descending=True)
    if top_k is not None:
        logits[..., top_k:] = -torch.inf
    if top_p is not None:
        p = logits.softmax(-1)
        logits = logits.masked_fill(p.cumsum(-1) - p >= top_p, -torch.inf)
    total = logits.softmax(-1).double().cumsum(-1)
    u = (u.to(total.device) * total[..., -1])[..., None]
    index = torch.searchsorted(total, u, right=True)  # (..., 1), the first with total > u
    return (index if order is None else order.gather(-1, index))[..., 0]


def check_request(
    model, prompts, max_new_tokens, *, tau=1e-4, alpha=0.0, temperature=1.0, top_k=None, top_p=None,
    end=None,
):  # fmt: skip
    """Refuse what cannot be sampled from, with a UserError: the errors of every `generate`."""
    V = model.config.vocab_size
    for i, prompt in enumerate(prompts):
        which = f"prompt {i + 1} of {len(prompts)}" if len(prompts) > 1 else "the prompt"
        if len(prompt) == 0:
            raise UserError(f"{which} has no token: a model needs at least one to go on from")
        if not all(0 <= int(token) < V for token in prompt):
            raise UserError(f"{which} has ids outside the vocabulary, 0 to {V - 1}")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens = {max_new_tokens}: it must be 0 or more")
    if not 0 <= tau <= 1:
        raise UserError(f"tau = {tau} is not a probability: it must lie in [0, 1]")
    if not abs(alpha) <= 1e6:
        raise UserError(f"alpha = {alpha} must be finite, and at most a million")
    if alpha and not model.has_router:
        raise UserError(
            f"alpha = {alpha}: only the router of a PonderLM-3 can be shifted; leave it"
        )
    if temperature != 0 and not 1e-6 <= temperature < math.inf:
        raise UserError(f"temperature = {temperature} must be 0 (greedy), or 1e-6 or more")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k = {top_k}: it must be 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p = {top_p}: it must lie in (0, 1]")
    if end is not None and not 0 <= end < V:
        raise UserError(f"end = {end} is outside the vocabulary, 0 to {V - 1}")
