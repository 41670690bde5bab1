"""Generate text, spending on each token as many pondering steps as the router asks for (section 3.3).

    python sample.py                                   the newest run in out/, else the included model
    python sample.py --run models/docstrings --prompt "Return the" --show-steps --seed 1
    python sample.py --show-steps --out steps.svg      a picture of the text, shaded by its steps
    echo "Return the" | python sample.py --prompt - --tau 0

--show-steps marks each token with the number of steps that were taken before it was chosen: by a digit
behind it, or by its colour on a terminal.
"""

import codecs
import html
import os
import sys
import time
import unicodedata
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from checkpoint import newest_run, open_model
from common import (
    UserError,
    atomic_write,
    check_writable,
    command_line,
    join,
    parse_groups,
    split_into,
)
from model import Count, Finite, Fraction, Seed, validated_dataclass
from router import TAU

INCLUDED = Path(__file__).parent / "models/docstrings"  # the model that comes with the code
BLUES = 231, 225, 153, 117, 75, 33, 26, 19  # pale to dark, among a terminal's 256 colours


# -- Decoding --------------------------------------------------------------------------------------


@validated_dataclass
class Sampling:
    """How long to ponder, and how to choose a token."""

    # early-exit threshold: stop pondering once the mask score w is below it; 0 takes all K steps
    tau: Fraction = TAU
    alpha: Finite = 0.0  # shift of the router, towards more (> 0) or fewer (< 0) steps
    # sampling temperature; 0 always takes the most probable token
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 0.8
    top_k: Count | None = None  # choose among the k most probable tokens only
    seed: Seed | None = None  # random seed, which makes the text repeatable


def stream(model, prompt, max_new_tokens, *, ends=(), read=None, **sampling):
    """Generate tokens one by one.

    A context that outgrows the model's context length starts anew from its last half.

    Args:
        model: a PonderLM.
        prompt: token ids, a list or a tensor.
        max_new_tokens: how many tokens to generate at most.
        ends: tokens that end the text.
        read: a list to which the steps of every token that is read are appended, the prompt's tokens
            included.
        sampling: fields of Sampling.

    Yields:
        (token, steps): a new token, and the pondering steps that were executed before it was chosen.

    Raises:
        UserError: the prompt is empty or has unknown ids, or the logits are not finite.
        pydantic.ValidationError: a field of Sampling is out of its range.
    """
    options = Sampling(**sampling)
    context = [int(token) for token in prompt]
    context_length = model.config.block_size
    check_prompt(context, model.config.vocab_size)
    choose = make_sampler(options)

    cache = model.new_cache()
    tokens_read = 0  # of the context
    for _ in range(max_new_tokens):
        if len(context) > context_length:  # start anew: positions change, so all keys do
            context = context[-max(context_length // 2, 1) :]
            cache = model.new_cache()
            tokens_read = 0
        # Read what has not been read: at first the prompt, then one token at a time.
        for position in range(tokens_read, len(context)):
            logits, steps = model.ponder_token(context[position], position, cache, options.tau, options.alpha)
            if read is not None:
                read.append(steps)
        tokens_read = len(context)
        token = choose(logits)
        context.append(token)
        yield token, steps
        if token in ends:
            return


def check_prompt(ids, vocab_size):
    """
    Raises:
        UserError: there are no ids, or one that the model does not have.
    """
    if not ids:
        raise UserError("the prompt is empty: it must contain at least one token")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise UserError(
            f"the prompt contains token id {wrong}: every id must be between 0 and {vocab_size - 1}"
        )


def make_sampler(options):
    """A function that draws a token from its logits (V,), as Sampling says. It computes on the CPU, where
    a seed gives the same tokens on every machine."""
    generator = torch.Generator()
    if options.seed is None:
        generator.seed()
    else:
        generator.manual_seed(options.seed)

    def choose(logits):
        logits = logits.float().cpu()
        if not logits.isfinite().all():
            raise UserError(
                "the logits are not finite: use an --alpha nearer to 0, or another model if the weights "
                "are damaged"
            )
        if options.temperature < 1e-6:  # practically 0, and dividing by it could overflow
            return int(logits.argmax())
        k = min(options.top_k or len(logits), len(logits))
        logits, tokens = logits.topk(k)
        p = (logits / options.temperature).softmax(-1)
        return int(tokens[torch.multinomial(p, 1, generator=generator)])

    return choose


# -- Printing --------------------------------------------------------------------------------------


def mark(text, steps, K, color):
    """A token's text with its number of steps: on pale (0) to dark blue (K), or with a small digit behind
    it."""
    if not color:
        line, newline, rest = text.partition("\n")
        subscript = "".join(chr(ord("₀") + int(digit)) for digit in str(steps))
        return line + subscript + newline + rest
    i = round((len(BLUES) - 1) * steps / max(K, 1))
    shade = BLUES[i]
    is_dark = i >= 5
    foreground = 231 if is_dark else 16  # white or black
    on = f"\x1b[48;5;{shade};38;5;{foreground}m"
    off = "\x1b[0m"
    # Without this, a terminal would colour the rest of the line.
    text = text.replace("\n", f"↵{off}\n{on}")
    return on + text + off


def as_text(pairs, tokenizer, hidden=()):
    """Turn (token, steps), as `stream` yields them, into (text, steps) as they come. A character that
    takes several tokens comes with the last of them. The text of hidden tokens is empty."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token, steps in pairs:
        text = "" if token in hidden else decoder.decode(tokenizer.decode([token]))
        yield text, steps
    rest = decoder.decode(b"", final=True)
    if rest:  # a character that was cut
        yield rest, None


def show(pieces, K, marked=False):
    """Print pieces of text, (text, steps), as they come.

    Args:
        K: the largest number of steps.
        marked: mark each piece with its steps.

    Returns:
        The pieces, a list: one for each token, and perhaps the rest of a character, whose steps are None.
    """
    shown = []
    for text, steps in pieces:
        shown.append((text, steps))
        if marked and text and steps is not None:
            text = mark(text, steps, K, sys.stdout.isatty())
        print(text, end="", flush=True)
    print()
    return shown


# -- A picture -------------------------------------------------------------------------------------

SHADES = "#ffffff", "#d7e9fb", "#a9cff5", "#74aeea", "#3d87d6", "#1b5fae", "#0c3d7a"  # no steps to all steps
COLUMNS = 80  # characters per line of the picture
FONT_SIZE, CHAR_WIDTH, LINE_HEIGHT, MARGIN = 14, 8.43, 21, 14  # in pixels


def draw_svg(prompt, pieces, K):
    """A picture of a text in which each token is shaded by its number of steps.

    Args:
        prompt: str, which is not shaded.
        pieces: a list of (text, steps).
        K: the largest number of steps.

    Returns:
        The text of an SVG file.
    """
    boxes = []
    letters = []
    column = 0
    line = 2  # the legend stands on line 0
    for text, steps in [(prompt, None), *pieces]:
        for character in text:
            width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
            if character == "\n" or column + width > COLUMNS:
                line += 1
                column = 0
            if character == "\n":
                continue
            if not character.isprintable():  # XML has no control characters
                character = "\ufffd"
            x, y = MARGIN + column * CHAR_WIDTH, MARGIN + line * LINE_HEIGHT
            boxes.append(svg_box(x, y, width, steps, K))
            letters.append(svg_letters(x, y, character, steps, K))
            column += width

    legend = "extra steps before each token was chosen: "
    letters.append(svg_letters(MARGIN, MARGIN, legend, None, K))
    x = MARGIN + len(legend) * CHAR_WIDTH
    for k in range(K + 1):
        label = f" {k} "
        boxes.append(svg_box(x, MARGIN, len(label), k, K))
        letters.append(svg_letters(x, MARGIN, label, k, K))
        x += (len(label) + 1) * CHAR_WIDTH

    width = 2 * MARGIN + COLUMNS * CHAR_WIDTH
    height = 2 * MARGIN + (line + 1) * LINE_HEIGHT
    title = (
        f"Each token is shaded by its number of extra steps, from 0 (white) to {K} (dark blue). The prompt "
        "is grey."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{FONT_SIZE}" role="img">\n'
        f'<title>{title}</title>\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
        + "\n".join(boxes + letters)
        + "\n</svg>\n"
    )


def shade(steps, K):
    """The colour of a number of steps; None is white."""
    return SHADES[0] if steps is None else SHADES[round((len(SHADES) - 1) * steps / max(K, 1))]


def svg_box(x, y, width, steps, K):
    """The background of some characters."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width * CHAR_WIDTH:.1f}" height="{LINE_HEIGHT - 2}" '
        f'fill="{shade(steps, K)}"/>'
    )


def svg_letters(x, y, text, steps, K):
    """Characters: white on dark shades, and grey where there are no steps to show, as in the prompt."""
    if steps is None:
        color = "#6e7781"
    elif SHADES.index(shade(steps, K)) >= 4:
        color = "#ffffff"
    else:
        color = "#1f2328"
    baseline = y + FONT_SIZE
    return (
        f'<text x="{x:.1f}" y="{baseline:.1f}" xml:space="preserve" fill="{color}">{html.escape(text)}</text>'
    )


# -- The command -----------------------------------------------------------------------------------


@validated_dataclass
class Text:
    """What to write."""

    # directory of a model or run; None: the newest run in out/, else the included model
    run: str | None = None
    prompt: str = ""  # text to continue; - reads it from standard input; if empty, a new document begins
    max_new_tokens: Count = 200  # number of tokens to generate
    num_samples: Count = 1  # number of texts; with --seed, the i-th text (from 0) uses seed + i
    show_steps: bool = False  # mark each token with the number of steps that were taken before it was chosen
    out: Path | None = None  # with --show-steps: write the shaded text to this file, .svg or .html
    device: str = "auto"  # cpu, cuda or mps; auto is a GPU if there is one, else the CPU


@validated_dataclass
class Options(Sampling, Text):
    """The flags."""


GROUPS = {"text": Text, "sampling": Sampling}


def parse(argv=None):
    """Read the command line. -> Options"""
    groups = split_into(GROUPS, Options())
    parsed = parse_groups(groups, argv, prog="python sample.py", description=__doc__)
    return join(Options, parsed.values())


def read_prompt(prompt):
    """The bytes of --prompt, or of standard input if it is "-"."""
    if prompt == "-":
        return sys.stdin.buffer.read().removesuffix(b"\n")
    return os.fsencode(prompt)


def check_out(options):
    """
    Raises:
        UserError: the picture could not be made, or would be one of several texts.
    """
    if not options.show_steps:
        raise UserError(f"--out {options.out} is a picture of the steps: add --show-steps")
    if options.out.suffix not in (".svg", ".html"):
        raise UserError(f"--out {options.out} must end in .svg or .html")
    if options.num_samples > 1:
        raise UserError(f"--out can show one text only: omit --num-samples {options.num_samples}")
    check_writable(options.out.parent, "use another --out")


def main(options):
    """Generate and print texts, as the flags say."""
    if options.out:
        check_out(options)
    prompt = read_prompt(options.prompt)
    directory = Path(options.run) if options.run else newest_run(default=INCLUDED)
    print(f"model: {directory}")
    model, tokenizer = open_model(directory, options.device)
    K = model.config.ponder_steps
    window = model.config.block_size
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    if len(ids) > window:
        half = max(window // 2, 1)
        print(
            f"note: the prompt has {len(ids)} tokens, more than the context length of {window}: only its "
            f"last {half} are read"
        )
    if options.show_steps:
        print_legend(K)

    steps_read = []
    new_tokens = 0
    start = time.perf_counter()
    for i in range(options.num_samples):
        print(f"\n--- sample {i + 1} of {options.num_samples}" if options.num_samples > 1 else "")
        print(prompt.decode("utf-8", "replace"), end="", flush=True)
        sampling = {field.name: getattr(options, field.name) for field in fields(Sampling)}
        if options.seed is not None:
            sampling["seed"] = (options.seed + i) % 2**63
        pairs = stream(
            model, ids, options.max_new_tokens, ends={tokenizer.end_of_text}, read=steps_read, **sampling
        )
        pieces = show(as_text(pairs, tokenizer, {tokenizer.end_of_text}), K, marked=options.show_steps)
        new_tokens += sum(steps is not None for _, steps in pieces)
    seconds = time.perf_counter() - start

    mean_steps = sum(steps_read) / len(steps_read)
    saved = 1 - (1 + mean_steps) / (1 + K)
    print(
        f"\n{mean_steps:.2f} of {K} pondering steps per token read, {saved:.0%} of the slots saved; "
        f"{new_tokens / seconds:.1f} tokens/s"
    )
    if options.out:
        # Also for .html: a browser shows an SVG element in a file of either kind.
        picture = draw_svg(prompt.decode("utf-8", "replace"), pieces, K)
        atomic_write(options.out, lambda temporary: temporary.write_text(picture, encoding="utf-8"))
        print(f"written: {options.out}")


def print_legend(K):
    if sys.stdout.isatty():
        legend = " ".join(mark(f" {k} ", k, K, color=True) for k in range(K + 1))
    else:
        legend = "small digits"
    print(f"steps before each token was chosen: {legend}")


if __name__ == "__main__":
    command_line(lambda: main(parse()))
