"""From logits to a token: greedy, or by chance among the most probable ones; what is refused."""

from dataclasses import dataclass
from operator import index
from typing import Annotated

import torch
from pydantic import Field

from model import Count, strict_dataclass
from runtime import UserError

Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@strict_dataclass
class Sampling:
    """How long a model ponders, and which token it takes: the keywords of every `generate`."""

    tau: Annotated[float, Field(ge=0, le=1)] = 1e-4  # stop when the mask score is below; 0: never
    # shift the router towards more (> 0) or fewer (< 0) steps
    alpha: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0
    temperature: Temperature = 1.0  # 0 is greedy
    top_k: Count | None = None  # choose among the k most probable tokens
    # choose among the fewest tokens that hold this probability
    top_p: Annotated[float, Field(ge=1e-30, le=1)] | None = None
    # makes the choices repeatable; sample i, from 0 on, has seed + i
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


@dataclass
class Sample:
    tokens: list[int]  # the generated ids
    steps: list[int]  # pondering steps executed before each of them was chosen


def uniform(seed, n):
    """n random numbers in [0, 1) for one sequence, in float64; seed None: others at every call.

    They are drawn in advance. So what is chosen depends on the logits alone, not on which decoder
    computes them, nor on who else is decoded beside it.
    """
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    return torch.rand(n, generator=generator, dtype=torch.float64)


def choose(logits, u, temperature=1.0, top_k=None, top_p=None):
    """The token at which the cumulative probability passes u. (..., V), (...) -> (...).

    Temperature 0 takes the most probable one. top_k and top_p leave the k most probable, and the
    fewest whose probabilities reach top_p. -1 where the logits are not finite.
    """
    if temperature < 1e-6:  # so low it is greedy, too, and the quotient would overflow
        best = logits.max(-1)
        return best.indices.where(best.values.abs() < torch.inf, -1)
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
    if order is not None:
        index = order.gather(-1, index.clamp(max=order.size(-1) - 1))
    return index[..., 0].where(total[..., -1] > 0, -1)  # not if it is nan


def choose_finite(logits, u, temperature=1.0, top_k=None, top_p=None):
    """As `choose`. Logits that are not finite raise a UserError."""
    token = choose(logits, u, temperature, top_k, top_p)
    if (token < 0).any():
        raise not_finite()
    return token


def not_finite():
    return UserError("the logits are not finite: the weights, or alpha, are too large")


def check_request(model, prompts, max_new_tokens, *, end=None, **choice):
    """Refuse what this model cannot sample from: the errors of every `generate`. -> the Sampling

    Raises:
        UserError: a prompt that is empty or holds no ids, an id outside the vocabulary, or a shift
            without a router.
        pydantic.ValidationError: a setting that is unknown, or out of its range.
    """
    choice, V = Sampling(**choice), model.config.vocab_size
    for i, prompt in enumerate(prompts):
        which = f"prompt {i + 1} of {len(prompts)}" if len(prompts) > 1 else "the prompt"
        try:
            ids = [index(token) for token in prompt]
        except TypeError:
            raise UserError(f"{which} is no list of token ids: {prompt!r:.80}") from None
        if not ids:
            raise UserError(f"{which} has no token: a model needs at least one to go on from")
        if not all(0 <= token < V for token in ids):
            raise UserError(f"{which} has ids outside the vocabulary, 0 to {V - 1}")
    if not hasattr(max_new_tokens, "__index__") or max_new_tokens < 0:
        raise UserError(f"max_new_tokens = {max_new_tokens}: it must be a number, 0 or more")
    if end is not None and not (hasattr(end, "__index__") and 0 <= end < V):
        raise UserError(f"end = {end} is outside the vocabulary, 0 to {V - 1}")
    if choice.alpha and not model.has_router:
        raise UserError(
            f"alpha = {choice.alpha}: only the router of a PonderLM-3 can be shifted; leave it"
        )
    return choice
