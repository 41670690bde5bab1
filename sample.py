"""Continue prompts, thinking about each token only as long as its router asks for (section 3.3).

    python sample.py                                   the newest run, or the model that is included
    python sample.py --prompt "Return the" --show-steps
    echo "Return the" | python sample.py --prompt - --tau 0
    python sample.py --prompts prompts.txt --num-samples 4 --out samples.jsonl

One sequence at a time, one slot at a time: `stream` calls PonderLM.ponder_token for each token.
Each executed slot leaves one key and one value a layer in the cache; a skipped one leaves and costs
nothing. `python -m engine` has the same flags and decodes many sequences at once.
"""

import time
from operator import index
from typing import Annotated

import tyro

from engine.request import (
    Options,
    Request,
    Sample,
    check_request,
    choose_finite,
    new_file,
    summary,
    uniform,
)
from runtime import command_line, progress


def stream(model, prompt, max_new_tokens, *, end=None, read=None, **choice):
    """Yield (token, steps) for each generated token. Arguments as `generate`, for one prompt.

    A context that outgrows the model's window starts anew from its last half window.
    `read`, a list, receives the steps of every token that is read, the prompt's too.
    """
    o = check_request(model, [prompt], **choice)
    context, window = [*map(index, prompt)], model.config.block_size
    done = 0  # tokens of the context that are in the cache
    for u in uniform(o.seed, max_new_tokens):
        if len(context) > window:
            context, done = context[-max(window // 2, 1) :], 0
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
        if token == end:
            return


def generate(model, prompts, max_new_tokens, *, seed=None, **kwargs):
    """Continue each prompt by early-exit decoding with a cache of executed slots (section 3.3).

    Args:
        prompts: lists or tensors of token ids, at least one id each.
        max_new_tokens: tokens to generate for each.
        tau: stop pondering as soon as w_k < tau; 0 always runs all K steps.
        alpha: shifts the router to more or fewer steps (reading note 3).
        temperature: 0 is greedy. top_k, top_p: keep the most probable tokens only; None keeps all.
        seed: of the random choices; prompt i uses seed + i. None: different at every call.
        end: the token after which a sequence ends. None: none does.

    Returns:
        One Sample a prompt.

    Raises:
        UserError, pydantic.ValidationError: as engine.request.check_request.
    """
    samples = []
    for i, prompt in enumerate(prompts):
        one = None if seed is None else seed + i
        pairs = list(stream(model, prompt, max_new_tokens, seed=one, **kwargs))
        samples.append(Sample([token for token, _ in pairs], [steps for _, steps in pairs]))
    return samples


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    request, o = Request(options), options
    if request.is_first:
        from engine import puzzle

        puzzle.show(*puzzle.open_model())
    request.describe("simple")
    total, n, start = 0, len(request.ids), time.perf_counter()
    with new_file(o.out, n) as file:
        bar = dict(leave=False, disable=file is None or None)  # None: only on a terminal
        for i in progress(range(n), unit=" samples", **bar):
            seed = None if o.seed is None else o.seed + i
            pairs = stream(
                request.model, request.ids[i], o.max_new_tokens, end=request.end,
                read=request.read[i], **request.choice | {"seed": seed},
            )  # fmt: skip
            total += request.show(i, pairs, file)
    summary(request.read, request.model.config.ponder_steps, total, start)


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, description=__doc__))
