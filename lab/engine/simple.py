"""One sequence at a time, one slot at a time: the decoder with which the engine is compared, token by token.

This is the loop of sample.stream with two changes: random numbers are drawn in advance, as a batch needs them
(choosing.py), and the tokens that begin a text stay when the window slides.
"""

from lab.engine.choosing import check_request, choose_finite, gather, uniform


def stream(model, prompts, max_new_tokens, *, begin=(), ends=(), read=None, **sampling):
    """Continue one prompt after the other, and yield tokens as they are chosen.

    Args:
        model, prompts, max_new_tokens, begin, ends, sampling: as in `generate`.
        read: a list for each prompt, to which the steps of every token that is read are appended, the
            prompt's tokens included.

    Yields:
        (i, token, steps): a new token of prompt i, and the steps that were taken before it was chosen.
    """
    prompts, options = check_request(model, prompts, **sampling)
    for i, prompt in enumerate(prompts):
        random_numbers = uniform(options.seed, i, max_new_tokens)
        read_here = [] if read is None else read[i]
        for token, steps in continue_text(model, prompt, random_numbers, options, begin, ends, read_here):
            yield i, token, steps


def continue_text(model, prompt, random_numbers, options, begin, ends, read):
    """Continue one prompt: each of the random numbers chooses one token, unless one of `ends` comes earlier.

    Args:
        model, prompt, ends: as in `generate`.
        random_numbers: one for each token, see choosing.uniform.
        options: a Sampling.
        begin: the tokens with which a context begins when it starts anew.
        read: a list to which the steps of every token that is read are appended.

    Yields:
        (token, steps): a new token, and the steps that were taken before it was chosen.
    """
    context = list(prompt)
    window = model.config.block_size
    cache = model.new_cache()
    tokens_read = 0  # of the context
    for number in random_numbers:
        if len(context) > window:  # start anew with the tokens of `begin`, then the last half
            tail = context[-max(window // 2, 1) :]
            context = [*begin, *tail][-window:]
            cache = model.new_cache()
            tokens_read = 0
        for position in range(tokens_read, len(context)):
            logits, steps = model.ponder_token(context[position], position, cache, options.tau, options.alpha)
            read.append(steps)
        tokens_read = len(context)
        token = int(choose_finite(logits.cpu(), number, options.temperature, options.top_k, options.top_p))
        context.append(token)
        yield token, steps
        if token in ends:
            return


def generate(model, prompts, max_new_tokens, **kwargs):
    """Continue each prompt by early-exit decoding with a cache of executed slots (section 3.3).

    Args:
        prompts: lists or tensors of token ids, at least one id each.
        max_new_tokens: how many tokens to generate for each prompt.
        seed: seed of the random choices; prompt i uses seed + i. None: different at every call.
        tau, alpha, temperature, top_k, top_p: see choosing.Sampling.
        begin: the tokens that begin each text, which stay when the window slides.
        ends: the tokens that end a text.

    Returns:
        One Sample per prompt.

    Raises:
        UserError: as choosing.check_request; or the logits are not finite.
        pydantic.ValidationError: as choosing.check_request.
    """
    prompts = list(prompts)
    return gather(stream(model, prompts, max_new_tokens, **kwargs), len(prompts))
