"""A request to the command `python -m lab sample`: its flags, its prompts, and how its samples are shown or
written."""

import json
import os
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Literal

import sample
from common import UserError
from hardware import pick_device
from lab.corpora.tokenizers import begin_of, load_tokenizer
from lab.engine.choosing import Sampling, check_request
from lab.interop.weights import INCLUDED, find_model, load
from model import Count, validated_dataclass


@validated_dataclass
class Options(sample.Options, Sampling):
    # directory of a model, or its name on the Hugging Face Hub; None: the newest run, or models/docstrings
    # if there is no run
    run: str | None = None
    num_samples: Count = 1  # continuations of each prompt; sample i, counted from 0, uses seed + i
    prompts: str | None = None  # file of prompts, one per line; empty lines are skipped
    out: Path | None = None  # new file for the samples, one JSON object per line; without it they are printed
    batch_size: Count | None = None  # texts that are decoded at once; None: 8
    # precision of matrix products and cache; auto: bfloat16 where the hardware is fast at it
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    # how prompts are read. jacobi: all tokens in parallel, in as many passes as it takes until the states no
    # longer change; sequential: one token after the other, as in decoding; auto: whichever is expected to be
    # faster, which is sequential only on a CPU with four or more texts at once
    prefill: Literal["jacobi", "sequential", "auto"] = "auto"
    # compile decoding, on a CPU only: up to three times as fast, after 10 to 60 seconds of compiling
    compile: bool = False


class Request:
    """What the command line asks for: the model is loaded, the prompts are encoded, and both are checked.

    Attributes:
        texts, ids: the prompt of each sample, as text and as token ids.
        read: for each sample a list, to which the pondering steps of every token that is read are appended.
        arguments: the keyword arguments of `generate` and `stream`, except the prompts.

    Raises:
        UserError: a file cannot be read, or the model cannot follow a prompt or a setting.
    """

    def __init__(self, options):
        self.options = options
        self.texts = []
        for text in read_prompts(options.prompt, options.prompts):
            self.texts += [text] * options.num_samples
        self.directory = find_model(options.run, otherwise=INCLUDED)
        self.device = pick_device(options.device)
        self.model = load(self.directory).to(self.device)
        self.tokenizer = load_tokenizer(self.directory / "tokenizer.json")
        self.begin = begin_of(self.tokenizer)
        self.ends = {self.tokenizer.end_of_text} - {None}
        self.ids = [self.encode(text) for text in self.texts]
        self.read = [[] for _ in self.texts]
        sampling = {field.name: getattr(options, field.name) for field in fields(Sampling)}
        check_request(self.model, self.ids, **sampling)
        self.arguments = sampling | {"begin": self.begin, "ends": self.ends, "read": self.read}

    def encode(self, text):
        """The ids of a prompt. An empty prompt is the beginning of a document."""
        # Tokenizers of Hugging Face have encode_prompt. It reads a control token in the text, such as <s>, as
        # one id, so a prompt that a chat template has written may already begin with the tokens `begin`.
        encode = getattr(self.tokenizer, "encode_prompt", self.tokenizer.encode)
        ids = encode(text)
        if ids[: len(self.begin)] != self.begin:
            ids = self.begin + ids
        return ids or [self.tokenizer.end_of_text or 0]

    def describe(self, decoder):
        """Print the model, the settings and the name of the decoder, and what to know about the prompts."""
        K = self.model.config.ponder_steps
        window = self.model.config.block_size
        tau = self.options.tau
        print(f"{self.directory}: K = {K}, tau = {tau:g}, device {self.device.type}, decoder {decoder}")
        too_long = sum(len(ids) > window for ids in self.ids)
        if too_long:
            last = max(window // 2, 1)
            print(
                f"note: {too_long} of {len(self.ids)} prompts are longer than the window of {window} tokens: "
                f"only their last {last} tokens are read"
            )
        if self.options.show_steps and not self.options.out:
            color = sys.stdout.isatty()
            print("steps: " + " ".join(sample.mark(f" {k} ", k, K, color) for k in range(K + 1)))

    def show(self, i, pairs, file):
        """Print sample i while its pairs (token, steps) arrive, or write it to `file` if there is one.

        Returns:
            How many tokens were generated.
        """
        if file:
            return self.write(i, list(pairs), file)
        heading = f"\n--- sample {i + 1} of {len(self.ids)}" if len(self.ids) > 1 else ""
        print(heading)
        print(self.texts[i], end="", flush=True)
        hidden = {*self.begin, *self.ends}
        K = self.model.config.ponder_steps
        pieces = sample.as_text(pairs, self.tokenizer, hidden)
        shown = sample.show(pieces, K, self.options.show_steps)
        # Every token is one piece. A last piece whose steps are None is the rest of a cut character.
        return sum(steps is not None for _, steps in shown)

    def write(self, i, pairs, file):
        """Write sample i as one line of JSON.

        Returns:
            How many tokens were generated.
        """
        tokens = [token for token, _ in pairs]
        text = self.tokenizer.decode([token for token in tokens if token not in self.ends])
        line = {
            "prompt": self.texts[i],
            "text": text.decode("utf-8", "replace"),
            "tokens": tokens,
            "steps": [steps for _, steps in pairs],
        }
        try:
            print(json.dumps(line, ensure_ascii=False), file=file, flush=True)
        except OSError as error:
            raise UserError(f"cannot write {file.name} ({error.strerror}): use another --out") from None
        return len(pairs)

    def summarize(self, new_tokens, start):
        """Print the steps per token and the speed.

        Args:
            new_tokens: how many tokens were generated.
            start: when decoding began, in seconds of time.perf_counter.
        """
        speed = f"{new_tokens / (time.perf_counter() - start):.1f} tokens/s"
        K = self.model.config.ponder_steps
        if K:
            steps = sum(map(sum, self.read)) / sum(map(len, self.read))
            saved = f"{1 - (1 + steps) / (K + 1):.0%} of the slots saved"
            speed = f"{steps:.2f} of {K} pondering steps per token read, {saved}; {speed}"
        print(f"\n{speed}")


def read_prompts(prompt, prompts):
    """The texts to continue: the one of --prompt, or the lines of the file --prompts.

    Raises:
        UserError: both are given, the file has no prompt, or a text is not UTF-8.
    """
    if prompt and prompts:
        raise UserError("--prompt and --prompts are both given: omit one of them")
    try:
        if prompts is not None:
            lines = Path(prompts).read_text(encoding="utf-8-sig").split("\n")
        elif prompt == "-":
            return [sys.stdin.buffer.read().removesuffix(b"\n").decode()]
        else:
            # Python hides bytes of argv that are not UTF-8 in surrogates; decoding them raises UnicodeError.
            return [os.fsencode(prompt).decode()]
    except UnicodeError as error:
        what = "the prompt" if prompts is None else f"--prompts {prompts}"
        raise UserError(f"{what} is not UTF-8 text ({error}): convert it to UTF-8") from None
    texts = [line.rstrip("\r") for line in lines if line.strip()]
    if not texts:
        raise UserError(f"--prompts {prompts} has no prompt in it: write one prompt per line")
    return texts


@contextmanager
def new_file(out, n):
    """A context with a new file for n samples, or with None if `out` is None. However the command ends, the
    file then has whole lines only.

    Raises:
        FileExistsError: the file exists already; it stays as it is.
    """
    if out is None:
        yield None
        return
    file = out.open("x", encoding="utf-8")
    try:
        yield file
    finally:
        with suppress(OSError):  # closing tries once more to write a line for which a full disk has no room
            file.close()
        lines = out.read_bytes().split(b"\n")[:-1]
        os.truncate(out, sum(len(line) + 1 for line in lines))
        print(f"written: {out}, {len(lines)} of {n} samples")
