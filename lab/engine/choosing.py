"""The choice of a token: the settings that both decoders take, the random numbers, and samples.

Random numbers are drawn in advance, one for each token of a text. So with the same logits the same token is
chosen, whichever decoder computes them, and whichever other texts are decoded in the same batch.
"""

from dataclasses import dataclass
from operator import index
from typing import Annotated

import torch
from pydantic import Field

import sample
from common import UserError
from model import Finite, Fraction, validated_dataclass
from router import TAU


@validated_dataclass
class Sampling(sample.Sampling):
    """The sampling settings of every `generate`: those of sample.py, and top_p."""

    # early-exit threshold: a token takes no further pondering step once the router's probability that it
    # needs one falls below this; 0: take all steps
    tau: Fraction = TAU
    # shifts the router: alpha x k is added to its logit for k steps, so values above 0 give more steps, and
    # values below 0 fewer; try -2 to 2
    alpha: Finite = 0.0
    # sample from the fewest tokens whose probabilities add up to this (nucleus sampling); None: from all
    top_p: Annotated[float, Field(ge=1e-30, le=1)] | None = None


@dataclass
class Sample:
    """A continuation of a prompt."""

    tokens: list[int]  # the generated ids
    steps: list[int]  # pondering steps executed before each of them was chosen


def gather(events, n):
    """Collect the events (i, token, steps) of n texts into n Samples."""
    samples = [Sample([], []) for _ in range(n)]
    for i, token, steps in events:
        samples[i].tokens.append(token)
        samples[i].steps.append(steps)
    return samples


def uniform(seed, i, n):
    """n random numbers in [0, 1) for text i, in float64. Without a seed they differ at every call."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed + i)
    return torch.rand(n, generator=generator, dtype=torch.float64)


def choose(logits, u, temperature=1.0, top_k=None, top_p=None):
    """The token at which the cumulative probability exceeds u.

    Args:
        logits: (..., V).
        u: (...) random numbers in [0, 1).
        temperature: divides the logits; 0 takes the most probable token.
        top_k: choose among the k most probable tokens.
        top_p: choose among the fewest tokens whose probabilities reach top_p.

    Returns:
        (...) tokens; -1 where the logits are not finite.
    """
    if temperature < 1e-6:  # practically 0, and dividing by it could overflow
        best = logits.max(-1)
        return best.indices.where(best.values.abs() < torch.inf, -1)
    logits = logits.float() / temperature
    order = None  # the tokens to which the logits belong; None: logit i belongs to token i
    if top_k is not None:
        logits, order = logits.topk(min(top_k, logits.size(-1)))
    elif top_p is not None:
        logits, order = logits.sort(dim=-1, descending=True)
    if top_p is not None:
        p = logits.softmax(-1)
        before = p.cumsum(-1) - p  # what the more probable tokens add up to
        logits = logits.masked_fill(before >= top_p, -torch.inf)
    total = logits.softmax(-1).double().cumsum(-1)
    u = (u.to(total.device) * total[..., -1])[..., None]
    token = torch.searchsorted(total, u, right=True)  # (..., 1), the first one with total > u
    if order is not None:
        token = order.gather(-1, token.clamp(max=order.size(-1) - 1))
    return token[..., 0].where(total[..., -1] > 0, -1)  # the total is nan if a logit is not finite


def choose_finite(logits, u, temperature=1.0, top_k=None, top_p=None):
    """The tokens that `choose` returns, with the same arguments.

    Raises:
        UserError: some logits are not finite.
    """
    token = choose(logits, u, temperature, top_k, top_p)
    if (token < 0).any():
        raise not_finite()
    return token


def not_finite():
    """The error for logits that are not finite."""
    return UserError(
        "the logits are not finite: use an --alpha closer to 0, or another copy of the weights if these are "
        "damaged"
    )


def check_request(model, prompts, **sampling):
    """Check the arguments of a `generate` before anything is computed.

    Args:
        model: the model that will be sampled from.
        prompts: lists or tensors of token ids.
        sampling: the fields of Sampling.

    Returns:
        The prompts as lists of ids, and the Sampling.

    Raises:
        UserError: a prompt is empty, an id is outside the vocabulary, or alpha shifts a router that the model
            does not have.
        pydantic.ValidationError: a setting is unknown, or out of its range.
    """
    sampling = Sampling(**sampling)
    V = model.config.vocab_size
    prompts = [list(map(index, prompt)) for prompt in prompts]
    for i, prompt in enumerate(prompts):
        which = f"prompt {i + 1} of {len(prompts)}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise UserError(f"{which} is empty: give at least one token id")
        if min(prompt) < 0 or max(prompt) >= V:
            wrong = min(prompt) if min(prompt) < 0 else max(prompt)
            raise UserError(f"{which} has the token id {wrong}: give ids of this model, 0 to {V - 1}")
    if sampling.alpha and model.router is None:
        method = model.config.method
        raise UserError(
            f"--alpha {sampling.alpha} has no effect: {method} has no router to shift, so omit it"
        )
    return prompts, sampling
