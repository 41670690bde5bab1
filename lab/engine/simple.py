"""One sequence at a time, one slot at a time: what the engine is compared with, token by token.

The root's loop, with the choice of a token by numbers that are drawn in advance, as a batch needs it.
"""

import sample
from lab.engine.request import Sample, check_request, choose_finite, uniform


def stream(model, prompt, max_new_tokens, *, begin=(), ends=(), read=None, **choice):
    """Yield (token, steps) for each generated token. Arguments as `generate`, for one prompt; `read`, a list,
    receives the steps of every token that is read, the prompt's too."""
    (prompt,), o = check_request(model, [prompt], **choice)
    numbers = iter(uniform(o.seed, max_new_tokens))

    def choose(logits):
        return int(choose_finite(logits.cpu(), next(numbers), o.temperature, o.top_k, o.top_p))

    texts = dict(choose=choose, begin=begin, ends=ends, read=read)
    return sample.stream(model, prompt, max_new_tokens, **texts, tau=o.tau, alpha=o.alpha)


def generate(model, prompts, max_new_tokens, *, seed=None, **kwargs):
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
    samples = []
    for i, prompt in enumerate(prompts):
        one = None if seed is None else seed + i
        pairs = list(stream(model, prompt, max_new_tokens, seed=one, **kwargs))
        samples.append(Sample([token for token, _ in pairs], [steps for _, steps in pairs]))
    return samples
