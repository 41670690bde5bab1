"""Continue prompts, thinking about each token only as long as its router asks for (section 3.3).

    python sample.py                                   the newest run, from an empty prompt
    python sample.py --prompt "Return the" --show-steps
    echo "Return the" | python sample.py --prompt - --tau 0
    python sample.py --prompts prompts.txt --num-samples 4 --out samples.jsonl

One sequence at a time, one slot at a time: `stream` calls PonderLM.ponder_token for each token.
Each executed slot leaves one key and one value a layer in the cache; a skipped one leaves and costs
nothing. `python -m engine` has the same flags and decodes many sequences at once.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from tqdm import tqdm

from corpus.tokenizers import load_tokenizer
from engine.choosing import Sample, check_request, choose, uniform
from engine.printing import Printer, paint, replacing, show_one, summary, write_sample
from interop import find_model, load
from runtime import UserError, autocast, command_line, pick_device, pick_precision


def stream(
    model, prompt, max_new_tokens, *, tau=1e-4, alpha=0.0, temperature=1.0, top_k=None, top_p=None,
    seed=None, end=None, read=None,
):  # fmt: skip
    """Yield (token, steps) for each generated token. Arguments as `generate`, for one prompt.

    A context that outgrows the model's window starts anew from its last half window.
    `read`, a list, receives the steps of every token that is read, the prompt's too.
    """
    context = [int(token) for token in prompt]
    window = model.config.block_size
    check_request(
        model, [context], max_new_tokens, tau=tau, alpha=alpha, temperature=temperature,
        top_k=top_k, top_p=top_p, end=end,
    )  # fmt: skip
    done = 0  # tokens of the context that are in the cache
    for u in uniform(seed, max_new_tokens):
        if len(context) > window:
            context, done = context[-max(window // 2, 1) :], 0
        if done == 0:
            cache = model.new_cache()
        while done < len(context):
            logits, steps = model.ponder_token(context[done], done, cache, tau, alpha)
            done += 1
            if read is not None:
                read.append(steps)
        token = int(choose(logits, u, temperature, top_k, top_p))
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
        UserError: an empty prompt, an id outside the vocabulary, or a setting out of its range.
    """
    samples = []
    for i, prompt in enumerate(prompts):
        one = None if seed is None else seed + i
        pairs = list(stream(model, prompt, max_new_tokens, seed=one, **kwargs))
        samples.append(Sample([token for token, _ in pairs], [steps for _, steps in pairs]))
    return samples


# -- The command line ------------------------------------------------------------------------------


@dataclass
class Options:
    run: str | None = None  # directory of a model, or its name on the Hub; by default the newest
    prompt: str = ""  # text to go on from; - reads it from standard input
    prompts: str | None = None  # file of prompts, one a line; empty lines do not count
    max_new_tokens: int = 200  # tokens to generate
    num_samples: int = 1  # how many continuations of each prompt
    tau: float = 1e-4  # stop pondering when the mask score falls below it; 0 never stops early
    alpha: float = 0.0  # shift the router towards more (> 0) or fewer (< 0) steps
    temperature: float = 0.8  # 0 is greedy
    top_k: int | None = None  # choose among the k most probable tokens
    top_p: float | None = None  # choose among the fewest tokens that hold this probability
    seed: int | None = None  # makes the choices repeatable; sample i, from 0 on, has seed + i
    stop: bool = True  # a text ends where the model ends it
    show_steps: bool = False  # colour each token by the steps taken before it was chosen, or read
    out: Path | None = None  # write the samples to this file, one JSON a line, in place of printing
    device: str = "auto"  # auto, cpu, cuda or mps
    # of the computation; a few queries at a time gain little from bfloat16
    precision: Literal["auto", "float32", "bfloat16"] = "float32"


def open_model(directory, device):
    """A model and its tokenizer. UserError: one that has more tokens is another model's."""
    model, tokenizer = load(directory).to(device), load_tokenizer(directory / "tokenizer.json")
    if tokenizer.vocab_size > model.config.vocab_size and not tokenizer.padded:
        raise UserError(f"{directory}: the tokenizer has more tokens than the model; not its own?")
    return model, tokenizer


def read_prompts(prompt, prompts):
    """The texts to go on from: one, or the lines of a file without the empty ones."""
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


class Request:
    """What the command line asks for, opened and checked.

    texts, ids: of each sample's prompt. read: lists for the steps of the tokens that are read.
    settings: keyword arguments of `stream` and of an engine's.
    """

    def __init__(self, options):
        o = self.options = options
        self.texts = [
            text for text in read_prompts(o.prompt, o.prompts) for _ in range(o.num_samples)
        ]
        if o.num_samples < 1:
            raise UserError(f"num_samples = {o.num_samples}: it must be at least 1")
        if o.out and o.out.exists() and (
            not o.out.is_file() or (o.prompts and o.out.samefile(o.prompts))
        ):  # fmt: skip
            raise UserError(
                f"--out {o.out} is the file of prompts, or not a regular file: take another"
            )
        if o.out and not o.out.parent.is_dir():
            raise UserError(f"--out {o.out}: there is no folder {o.out.parent}; make it first")
        self.directory, self.device = find_model(o.run), pick_device(o.device)
        self.dtype = pick_precision(o.precision, self.device)
        self.model, self.tokenizer = open_model(self.directory, self.device)
        end = self.tokenizer.end_of_text
        # An empty prompt is where a document begins.
        self.ids = [
            self.tokenizer.begin + self.tokenizer.encode(text) or [end or 0] for text in self.texts
        ]
        self.end, self.read = end if o.stop else None, [[] for _ in self.texts]
        self.settings = dict(temperature=o.temperature, top_k=o.top_k, top_p=o.top_p, end=self.end)
        check_request(
            self.model, self.ids, o.max_new_tokens, tau=o.tau, alpha=o.alpha, **self.settings
        )

    def describe(self, decoder):
        """Print what is about to run."""
        o, K, window = self.options, self.model.config.ponder_steps, self.model.config.block_size
        print(
            f"{self.directory}: K = {K}, tau = {o.tau:g}, device {self.device.type}, precision "
            f"{str(self.dtype)[6:]}, decoder {decoder}"
        )
        if long := [len(ids) for ids in self.ids if len(ids) > window]:
            print(
                f"note: {len(long)} of {len(self.ids)} prompts do not fit the window of {window} "
                f"tokens, the longest has {max(long)}; of these the last {max(window // 2, 1)} "
                "tokens are read"
            )
        if o.show_steps and not o.out:
            color = sys.stdout.isatty()
            print("steps: " + " ".join(paint(f" {k} ", k, K, color) for k in range(K + 1)))

    def printer(self):
        K = self.model.config.ponder_steps if self.options.show_steps else None
        return Printer(self.tokenizer, K, self.end)

    def summarise(self, total, start):
        if total:
            steps = [k for one in self.read for k in one]
            seconds = time.perf_counter() - start
            print(summary(steps, self.model.config.ponder_steps, total, seconds))


def main(options):
    request, n, total = Request(options), 0, 0
    request.describe("simple")
    o, n, start = options, len(request.ids), time.perf_counter()
    with autocast(request.device, request.dtype), replacing(o.out, n) as file:
        for i in tqdm(range(n), unit=" samples", leave=False, disable=file is None):
            text, ids, read = request.texts[i], request.ids[i], request.read[i]
            pairs = stream(
                request.model, ids, o.max_new_tokens, tau=o.tau, alpha=o.alpha,
                seed=None if o.seed is None else o.seed + i, read=read, **request.settings,
            )  # fmt: skip
            if file:
                pairs = list(pairs)
                sample = Sample([token for token, _ in pairs], [steps for _, steps in pairs])
                write_sample(file, text, sample, request.tokenizer, request.end)
                total += len(pairs)
            else:
                print(f"\n--- sample {i + 1} of {n}" if n > 1 else "")
                total += show_one(pairs, request.printer(), text, ids, read)
    request.summarise(total, start)


def refuse_engine_flags(argv):
    for word in argv:
        flag = word.replace("_", "-").partition("=")[0]
        if flag in ("--batch-size", "--prefill", "--graphs", "--decoder"):
            raise UserError(f"{flag} is for many sequences at once: python -m engine")


def cli():
    refuse_engine_flags(sys.argv[1:])
    main(tyro.cli(Options, description=__doc__))


if __name__ == "__main__":
    command_line(cli)
