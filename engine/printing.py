"""Samples in a terminal, each token painted by the steps taken before it, and in a file."""

import codecs
import json
import sys
from contextlib import contextmanager


def paint(text, steps, K, color):
    """Text in the colour of its steps, from pale (0) to dark (K); without colours, subscripts."""
    if not color:
        return text + "".join(chr(0x2080 + int(digit)) for digit in str(steps))
    shade = (231, 225, 153, 117, 75, 33, 26, 19)[round(7 * steps / max(K, 1))]
    return f"\x1b[48;5;{shade};38;5;{16 if shade > 60 else 231}m{text}\x1b[0m"


class Printer:
    """Prints a sample token by token, painted by `K` steps or (K None) plain; end is not shown."""

    def __init__(self, tokenizer, K, end):
        self.tokenizer, self.K, self.end, self.color = tokenizer, K, end, sys.stdout.isatty()
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, text, ids, read):
        """`read`: steps of the prompt's tokens that were read, of a long one the last.

        A token is painted with the steps that were taken before it; of the first nothing is known.
        """
        if self.K is None or not text:
            print(text, end="", flush=True)
            return
        for pair in zip(ids, [None] * (len(ids) - len(read) + 1) + read[:-1], strict=True):
            self.token(*pair)

    def token(self, token, steps):
        hidden = token == self.end or token in self.tokenizer.begin
        piece = "" if hidden else self.decoder.decode(self.tokenizer.decode([token]))
        if self.K is not None and piece and steps is not None:
            piece = paint(piece, steps, self.K, self.color)
        print(piece, end="", flush=True)

    def close(self):
        print(self.decoder.decode(b"", final=True))


def show_one(pairs, printer, text, ids, read):
    """Print a sample as its pairs (token, steps) come. -> the tokens generated"""
    n = 0
    for n, (token, steps) in enumerate(pairs, start=1):
        if n == 1:  # now that the prompt has been read, its steps are known
            printer.prompt(text, ids, read)
        printer.token(token, steps)
    if n == 0:
        print(text, end="")
    printer.close()
    return n


def write_sample(file, prompt, sample, tokenizer, end):
    """A sample as one line of JSON."""
    text = tokenizer.decode([token for token in sample.tokens if token != end])
    line = {"prompt": prompt, "text": text.decode("utf-8", "replace"), **vars(sample)}
    print(json.dumps(line, ensure_ascii=False), file=file, flush=True)


@contextmanager
def replacing(out, n):
    """A file that takes the place of `out` in the end, if it has a line by then; or None."""
    if out is None:
        yield None
        return
    part = out.with_name(out.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield file
    finally:
        written = part.read_bytes().count(b"\n")
        if written:
            part.replace(out)
            print(f"written: {out}, {written} of {n} samples")
        else:
            part.unlink()


def summary(steps, K, total, seconds):
    """What a run of the decoder took; `steps` of every token that was read."""
    mean = sum(steps) / len(steps)
    if not K:
        return f"\n{total / seconds:.1f} tokens/s"
    return (
        f"\n{mean:.2f} of {K} pondering steps per token, prompts included; "
        f"{len(steps) + sum(steps):,} slots run and cached where always running {K} takes "
        f"{len(steps) * (K + 1):,} ({1 - (1 + mean) / (K + 1):.0%} saved); "
        f"{total / seconds:.1f} tokens/s"
    )
