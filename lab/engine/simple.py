"""One sequence at a time, one slot at a time: the decoder that the engine is compared with, token by token.

It is the loop of sample.stream, with the random numbers that a batch needs (choosing.py).
"""

import sample
from lab.engine.choosing import check_request, choose_finite, gather, uniform


def stream(model, prompts, max_new_tokens, *, begin=(), ends=(), read=None, **sampling):
    """Continue one prompt after the other, and yield tokens as they are chosen.

    Args:
        model, prompts, max_new_tokens, begin, ends, sampling: as `generate`.
        read: a list for each prompt, which receives the steps of every token that is read, the prompt's too.

    Yields:
        (i, token, steps) for each new token of prompt i; the steps were taken before it was chosen.
    """
    prompts, o = check_request(model, prompts, **sampling)
    for i, prompt in enumerate(prompts):
        numbers = iter(uniform(o.seed, i, max_new_tokens))

        def choose(logits, numbers=numbers):
            return int(choose_finite(logits.cpu(), next(numbers), o.temperature, o.top_k, o.top_p))

        read_i = None if read is None else read[i]
        how = dict(choose=choose, begin=begin, ends=ends, read=read_i, tau=o.tau, alpha=o.alpha)
        for token, steps in sample.stream(model, prompt, max_new_tokens, **how):
            yield i, token, steps


def generate(model, prompts, max_new_tokens, **kwargs):
    """Continue each prompt by early-exit decoding with a cache of executed slots (section 3.3).

    Args:
        prompts: lists or tensors of token ids, at least one id each.
        max_new_tokens: tokens to generate for each.
        seed: of the random choices; prompt i uses seed + i. None: different at every call.
        tau, alpha, temperature, top_k, top_p: see choosing.Sampling.
        begin: the tokens before each text, which stay when the window slides.
        ends: the tokens after which a text ends.

    Returns:
        One Sample per prompt.

    Raises:
        UserError, pydantic.ValidationError: as choosing.check_request.
    """
    prompts = list(prompts)
    return gather(stream(model, prompts, max_new_tokens, **kwargs), len(prompts))
