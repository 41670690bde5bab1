"""One sequence at a time, one slot at a time: what the engine is compared with, token by token.

The root's loop, with the choice of a token by numbers that are drawn in advance, as a batch needs it.
"""

import sample
from lab.engine.request import check_request, choose_finite, gather, uniform


def stream(model, prompts, max_new_tokens, *, begin=(), ends=(), read=None, **choice):
    """Yield (i, token, steps) for each token of prompt i, one text after the other. Arguments as `generate`;
    `read`, a list for each prompt, receives the steps of every token that is read, the prompt's too."""
    prompts, o = check_request(model, prompts, **choice)
    for i, prompt in enumerate(prompts):
        numbers = iter(uniform(o.seed, i, max_new_tokens))

        def choose(logits, numbers=numbers):
            return int(choose_finite(logits.cpu(), next(numbers), o.temperature, o.top_k, o.top_p))

        texts = dict(choose=choose, begin=begin, ends=ends, read=None if read is None else read[i])
        for token, steps in sample.stream(model, prompt, max_new_tokens, **texts, tau=o.tau, alpha=o.alpha):
            yield i, token, steps


def generate(model, prompts, max_new_tokens, **kwargs):
    """Continue each prompt by early-exit decoding with a cache of executed slots (section 3.3).

    Args:
        prompts: lists or tensors of token ids, at least one id each.
        max_new_tokens: tokens to generate for each.
        seed: of the random choices; prompt i uses seed + i. None: different at every call.
        tau, alpha, temperature, top_k, top_p: see request.Sampling.
        begin: the tokens before each text, which stay when the window slides. ends: those after which a
            sequence ends.

    Returns:
        One Sample a prompt.

    Raises:
        UserError, pydantic.ValidationError: as request.check_request.
    """
    prompts = list(prompts)
    return gather(stream(model, prompts, max_new_tokens, **kwargs), len(prompts))
