"""Continue prompts, thinking about each token only as long as its router asks for (section 3.3).

    python sample.py                                   the newest run, or the model that is included
    python sample.py --prompt "Return the" --show-steps
    echo "Return the" | python sample.py --prompt - --tau 0
    python sample.py --prompts prompts.txt --num-samples 4 --out samples.jsonl

One sequence at a time, one slot at a time: `stream` calls PonderLM.ponder_token for each token.
Each executed slot leaves one key and one value a layer in the cache; a skipped one leaves and costs
nothing. `python -m engine` has the same flags and decodes many sequences at once.
"""

import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import AfterValidator, Field

from corpus.tokenizers import load_tokenizer
from engine.choosing import Sample, Sampling, Temperature, check_request, choose_finite, uniform
from engine.printing import Printer, paint, read_prompts, replacing, summary, write_sample
from interop import INCLUDED, find_model, load
from model import Given, strict_dataclass
from runtime import (
    UserError,
    autocast,
    command_line,
    pick_device,
    pick_precision,
    progress,
    read_json,
)


def stream(model, prompt, max_new_tokens, *, end=None, read=None, **choice):
    """Yield (token, steps) for each generated token. Arguments as `generate`, for one prompt.

    A context that outgrows the model's window starts anew from its last half window.
    `read`, a list, receives the steps of every token that is read, the prompt's too.
    """
    o = check_request(model, [prompt], max_new_tokens, end=end, **choice)
    context, window = [int(token) for token in prompt], model.config.block_size
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
        UserError, pydantic.ValidationError: as engine.choosing.check_request.
    """
    samples = []
    for i, prompt in enumerate(prompts):
        one = None if seed is None else seed + i
        pairs = list(stream(model, prompt, max_new_tokens, seed=one, **kwargs))
        samples.append(Sample([token for token, _ in pairs], [steps for _, steps in pairs]))
    return samples


# -- The command line ------------------------------------------------------------------------------


def in_range(tau):
    if tau != "auto" and not 0 <= tau <= 1:
        raise ValueError("should be auto or a probability, 0 to 1")
    return tau


Tau = Annotated[float | Literal["auto"], AfterValidator(in_range)]


@strict_dataclass
class Options(Sampling):
    # stop when the mask score is below; 0: never; auto: where the training found that it costs
    # hardly anything (train.py --tau-cost); by default where the run was scored, else 1e-4
    tau: Tau | None = None
    temperature: Temperature = 0.8  # 0 is greedy
    # directory of a model, or its name on the Hub; by default the newest, else models/shakespeare
    run: Given | None = None
    prompt: str = ""  # text to go on from; - reads it from standard input
    prompts: Given | None = None  # file of prompts, one a line; empty lines do not count
    max_new_tokens: Annotated[int, Field(ge=1, le=10**7)] = 200  # tokens to generate
    num_samples: Annotated[int, Field(ge=1, le=10**6)] = 1  # how many continuations of each prompt
    stop: bool = True  # a text ends where the model ends it
    show_steps: bool = False  # colour each token by the steps taken before it was chosen, or read
    out: Path | None = None  # write the samples to this file, one JSON a line, in place of printing
    device: str = "auto"  # auto, cpu, cuda or mps
    # of the computation; a few queries at a time gain little from bfloat16
    precision: Literal["auto", "float32", "bfloat16"] = "float32"


def scored_tau(directory):
    """The tau at which a run counted its steps, or with which it was exported; else a Sampling's."""
    run, exported = (Path(directory, name) for name in ("train.json", "generation_config.json"))
    config = read_json(exported) if exported.exists() else {}
    config |= read_json(run, dict[str, dict]).get("config", {}) if run.exists() else {}
    return config.get("tau", Sampling.tau)


def chosen_tau(directory):
    """The tau that a training chose by what it costs: --tau auto.

    Raises:
        UserError: none was.
    """
    file = Path(directory, "results.json")
    chosen = read_json(file, dict).get("chosen") if file.exists() else None
    if not chosen:
        raise UserError(
            f"--tau auto: {directory} has no tau that its training chose; give a number, after a "
            f"look at python analyze.py tau --run {directory}"
        )
    return chosen["tau"]


class Request:
    """What the command line asks for, opened and checked.

    texts, ids: of each sample's prompt. read: lists for the steps of the tokens that are read.
    """

    def __init__(self, options):
        o = self.options = options
        texts = read_prompts(o.prompt, o.prompts, o.out)
        self.texts = [text for text in texts for _ in range(o.num_samples)]
        self.directory = find_model(o.run, otherwise=INCLUDED)
        self.device = pick_device(o.device)
        self.dtype = pick_precision(o.precision, self.device)
        self.model = load(self.directory).to(self.device)
        self.tokenizer = load_tokenizer(self.directory / "tokenizer.json")
        if self.tokenizer.vocab_size > self.model.config.vocab_size and not self.tokenizer.padded:
            raise UserError(
                f"{self.directory}: the tokenizer has more tokens than the model; not its own?"
            )
        begin, end = self.tokenizer.begin, self.tokenizer.end_of_text
        # An empty prompt is where a document begins.
        self.ids = [begin + self.tokenizer.encode(text) or [end or 0] for text in self.texts]
        self.end, self.read = end if o.stop else None, [[] for _ in self.texts]
        self.choice = {field.name: getattr(o, field.name) for field in fields(Sampling)}
        if o.tau in (None, "auto"):
            find = chosen_tau if o.tau == "auto" else scored_tau
            self.choice["tau"] = find(self.directory)
        check_request(self.model, self.ids, o.max_new_tokens, **self.choice)

    def describe(self, decoder):
        """Print what is about to run."""
        K, window = self.model.config.ponder_steps, self.model.config.block_size
        print(
            f"{self.directory}: K = {K}, tau = {self.choice['tau']:g}, device {self.device.type}, "
            f"precision {str(self.dtype)[6:]}, decoder {decoder}"
        )
        if long := [len(ids) for ids in self.ids if len(ids) > window]:
            print(
                f"note: {len(long)} of {len(self.ids)} prompts do not fit the window of {window} "
                f"tokens, the longest has {max(long)}; of these the last {max(window // 2, 1)} "
                "tokens are read"
            )
        if self.options.show_steps and not self.options.out:
            color = sys.stdout.isatty()
            print("steps: " + " ".join(paint(f" {k} ", k, K, color) for k in range(K + 1)))

    def show(self, i, pairs, file):
        """Print a sample as its pairs (token, steps) come, or write it. -> the tokens generated"""
        text, ids, config = self.texts[i], self.ids[i], self.model.config
        if file:
            return write_sample(file, text, pairs, self.tokenizer, self.end)
        print(f"\n--- sample {i + 1} of {len(self.ids)}" if len(self.ids) > 1 else "")
        K = config.ponder_steps if self.options.show_steps else None
        printer = Printer(self.tokenizer, K, self.end)
        m = len(ids) if len(ids) <= config.block_size else max(config.block_size // 2, 1)
        return printer.sample(pairs, text, ids, self.read[i], m)


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    request, o = Request(options), options
    request.describe("simple")
    total, n, start = 0, len(request.ids), time.perf_counter()
    with autocast(request.device, request.dtype), replacing(o.out, n) as file:
        for i in progress(range(n), unit=" samples", leave=False, disable=file is None or None):
            seed = None if o.seed is None else o.seed + i
            pairs = stream(
                request.model, request.ids[i], o.max_new_tokens, end=request.end,
                read=request.read[i], **request.choice | {"seed": seed},
            )  # fmt: skip
            total += request.show(i, pairs, file)
    summary(request.read, request.model.config.ponder_steps, total, start)


def cli():
    for word in sys.argv[1:]:
        flag = word.replace("_", "-").partition("=")[0]
        if flag in ("--batch-size", "--prefill", "--graphs", "--no-graphs", "--weights"):
            raise UserError(f"{flag} is for many sequences at once: python -m engine")
        if flag == "--decoder":
            raise UserError("--decoder is gone: this is the simple one, python -m engine the other")
    tyro.cli(main, description=__doc__)


if __name__ == "__main__":
    command_line(cli)
