"""One sequence at a time, one slot at a time: the decoder that the engine is compared with, token by token.

It is the loop of sample.stream, with the random numbers that a batch needs (choosing.py), and with tokens
that stay when the window slides.
"""

from lab.engine.choosing import check_request, choose_finite, gather, uniform


def stream(model, prompts, max_new_tokens, *, begin=(), ends=(), read=None, **sampling):
    """Continue one prompt after the other, and yield tokens as they are chosen.

    Args:
        model, prompts, max_new_tokens, begin, ends, sampling: as `generate`.
        read: a list for each prompt, which receives the steps of every token that is read, the prompt's too.

    Yields:
        (i, token, steps) for each new token of prompt i; the steps were taken before it was chosen.
    """
    prompts, options = check_request(model, prompts, **sampling)
    for i, prompt in enumerate(prompts):
        numbers = uniform(options.seed, i, max_new_tokens)
        read_here = [] if read is None else read[i]
        for token, steps in continue_text(model, prompt, numbers, options, begin, ends, read_here):
            yield i, token, steps


def continue_text(model, prompt, numbers, options, begin, ends, read):
    """Yield (token, steps) for each of the random `numbers`, until a token of `ends` comes.

    Args:
        options: a Sampling.
        begin: tokens that stay at the beginning of a context that starts anew.
        read: a list to which the steps of every token that is read are appended.
    """
    context = list(prompt)
    window = model.config.block_size
    cache = model.new_cache()
    tokens_read = 0  # of the context
    for number in numbers:
        if len(context) > window:  # start anew from the last half, behind the tokens that stay
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
