"""Prompts of a command line; samples in a terminal, painted by their steps, and in a file."""

import codecs
import json
import os
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic_core import from_json

from runtime import UserError, writing


def read_prompts(prompt, prompts, out=None):
    """The texts to go on from: one, or the lines of a file without the empty ones. `out` is where
    their samples will go; what holds anything but samples is refused here, before they take time.
    """
    if out is not None:
        check_out(out, prompts)
    try:
        if prompts is None:
            text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
            text.encode("utf-8")
            return [text]
        if prompt:
            raise UserError("--prompt and --prompts exclude each other: give one of them")
        lines = Path(prompts).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeError as error:
        raise UserError(f"{prompts or 'the prompt'} is not UTF-8 text: {error}") from None
    texts = [line.rstrip("\r") for line in lines if line.strip()]
    if not texts:
        raise UserError(f"{prompts} has no prompt in it: write one a line")
    return texts


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

    def sample(self, pairs, text, ids, read, m):
        """A prompt and its pairs (token, steps), as they come. -> the tokens generated

        With the first pair, `read` has the steps of the prompt's m tokens that are read.
        """
        n = 0
        for n, (token, steps) in enumerate(pairs, start=1):
            if n == 1:
                self.prompt(text, ids, read[:m])
            self.token(token, steps)
        if n == 0:
            print(text, end="")
        self.close()
        return n

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


def write_sample(file, prompt, pairs, tokenizer, end):
    """A sample, of pairs (token, steps), as one line of JSON. -> the tokens generated"""
    pairs = list(pairs)
    tokens, steps = [token for token, _ in pairs], [steps for _, steps in pairs]
    text = tokenizer.decode([token for token in tokens if token != end])
    text = text.decode("utf-8", "replace")
    line = {"prompt": prompt, "text": text, "tokens": tokens, "steps": steps}
    with writing(file.name):
        print(json.dumps(line, ensure_ascii=False), file=file, flush=True)
    return len(tokens)


def holds_samples(file):
    """Whether its first line is one of write_sample."""
    with suppress(ValueError, AttributeError), open(file, "rb") as stream:
        return from_json(stream.readline()).keys() == {"prompt", "text", "tokens", "steps"}
    return False


def check_out(out, prompts):
    """Refuse a place for samples before they take time: what is there, but samples, stays."""
    if out.exists() and (not out.is_file() or (prompts and out.samefile(prompts))):
        raise UserError(f"--out {out} is the file of prompts, or not a regular file: take another")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; make it first")
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {out}: nothing can be written in {out.parent}; take another folder")
    if out.exists() and out.stat().st_size and not holds_samples(out):
        raise UserError(f"--out {out} holds something else than samples: take another")


@contextmanager
def replacing(out, n):
    """A file that takes the place of `out` in the end, with the whole lines it has by then; or
    None. Where an error ends it, what was in `out` before stays."""
    if out is None:
        yield None
        return
    part, kept = out.with_name(out.name + ".part"), False
    file = part.open("w", encoding="utf-8")
    try:
        yield file
    except Exception:
        kept = out.exists()
        raise
    finally:
        with suppress(OSError):  # of the line that a full disk did not take
            file.close()
        whole = part.read_bytes().rpartition(b"\n")
        os.truncate(part, len(whole[0] + whole[1]))
        written = whole[0].count(b"\n") + len(whole[1])
        if not written:
            part.unlink()
        elif not kept:
            part.replace(out)
        if written:
            print(f"written: {part if kept else out}, {written} of {n} samples")


def summary(read, K, total, start):
    """Print what a run of the decoder took; `read`: lists of steps, of all tokens read."""
    if not total:
        return
    speed = f"{total / (time.perf_counter() - start):.1f} tokens/s"
    tokens, steps = sum(map(len, read)), sum(map(sum, read))
    if K == 0:
        print(f"\n{speed}")
        return
    slots, always = tokens + steps, tokens * (K + 1)
    print(
        f"\n{steps / tokens:.2f} of {K} pondering steps per token, prompts included; {slots:,} "
        f"slots run and cached where always running {K} takes {always:,} "
        f"({1 - slots / always:.0%} saved); {speed}"
    )
