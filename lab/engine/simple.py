"""One sequence at a time, one slot at a time: what the engine is compared with, token by token.

As the root's sample.py, with the engine's own way to choose a token: by numbers drawn in advance.
"""

from operator import index

from lab.engine.request import Sample, check_request, choose_finite, newest, uniform


def stream(model, prompt, max_new_tokens, *, begin=(), ends=(), read=None, **choice):
    """Yield (token, steps) for each generated token. Arguments as `generate`, for one prompt.

    A context that outgrows the model's window starts anew from `begin` and its last half window.
    `read`, a list, receives the steps of every token that is read, the prompt's too.
    """
    o = check_request(model, [prompt], **choice)
    context, window = [*map(index, prompt)], model.config.block_size
    done = 0  # tokens of the context that are in the cache
    for u in uniform(o.seed, max_new_tokens):
        if len(context) > window:
            context, done = newest(context, window, begin), 0
        if done == 0:
            cache = model.new_cache()
        while done < len(context):
            logits, steps = model.ponder_token(context[done], done, cache, o.tau, o.alpha)
            done += 1
            if read is not None:
                read.append(steps)
        token = int(choose_finite(logits.cpu(), u, o.temperature, o.top_k, o.top_p))
        context.append(token)
        yield token, steps
        if token in ends:
            return


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
