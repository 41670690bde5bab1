"""Continue prompts, thinking about each token only as long as its router asks for (section 3.3).

    python sample.py                                   the newest run, from an empty prompt
    python sample.py --prompt "Return the" --show-steps
    echo "Return the" | python sample.py --prompt - --tau 0
    python sample.py --prompts prompts.txt --num-samples 4 --out samples.jsonl

Here is the simple form of it: one sequence, one slot at a time, see PonderLM.ponder_token. Each
executed slot leaves one key and one value a layer in the cache; a skipped one leaves and costs
nothing. The command line uses engine.py, which does the same faster and for many sequences.
"""

import codecs
import json
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import tyro
from tqdm import tqdm

from choose import Sample, check, choose, uniform
from config import PONDER
from device import autocast, command_line, pick_device, pick_precision
from engine import Engine
from methods import load
from run import find_run
from tokenizer import load_tokenizer


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
    check(
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
        ValueError: an empty prompt, an id outside the vocabulary, or a setting out of its range.
    """
    samples = []
    for i, prompt in enumerate(prompts):
        one = None if seed is None else seed + i
        pairs = list(stream(model, prompt, max_new_tokens, seed=one, **kwargs))
        samples.append(Sample([token for token, _ in pairs], [steps for _, steps in pairs]))
    return samples


# -- The command line ----------------------------------------------------------------------------


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


def open_model(directory, device):
    """A model and its tokenizer. ValueError: one that has more tokens is another model's."""
    model, tokenizer = load(directory).to(device), load_tokenizer(directory / "tokenizer.json")
    if tokenizer.vocab_size > model.config.vocab_size and not tokenizer.padded:
        raise ValueError(f"{directory}: the tokenizer has more tokens than the model; not its own?")
    return model, tokenizer


def read_prompts(prompt, prompts):
    """The texts to go on from: one, or the lines of a file without the empty ones."""
    try:
        if prompts is None:
            text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
            text.encode("utf-8")
            return [text]
        if prompt:
            raise ValueError("--prompt and --prompts exclude each other: give one of them")
        lines = Path(prompts).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeError as error:
        raise ValueError(f"{prompts or 'the prompt'} is not UTF-8 text: {error}") from None
    texts = [line.rstrip("\r") for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"{prompts} has no prompt in it: write one a line")
    return texts


def one_by_one(model, prompts, max_new_tokens, seed, read, until=None, **kwargs):
    """The events of Engine.stream, (i, token, steps), from the simple decoder."""
    for i, prompt in enumerate(prompts):
        one = None if seed is None else seed + i
        for token, steps in stream(model, prompt, max_new_tokens, seed=one, read=read[i], **kwargs):
            yield i, token, steps
            if until is not None and until(i, token):
                break


def show_one(events, printer, text, ids, read):
    """Print the one sample as it grows. -> the tokens generated"""
    n = 0
    for n, (_, token, steps) in enumerate(events, start=1):
        if n == 1:  # now that the prompt has been read, its steps are known
            printer.prompt(text, ids, read)
        printer.token(token, steps)
    if n == 0:
        print(text, end="")
    printer.close()
    return n


def show_many(events, n, max_new_tokens, end, show):
    """A progress bar; `show(i, sample)` in the order of the prompts. -> the tokens generated

    When it is interrupted, all samples that are finished are shown.
    """
    samples, finished, shown = [Sample([], []) for _ in range(n)], set(), 0
    try:
        with tqdm(total=n * max_new_tokens, unit=" tokens", leave=False) as bar:
            for i, token, steps in events:
                samples[i].tokens.append(token)
                samples[i].steps.append(steps)
                left = max_new_tokens - len(samples[i].tokens)
                if token == end or not left:
                    finished.add(i)
                    bar.update(left)
                bar.update()
                while shown in finished:
                    show(shown, samples[shown], bar)
                    shown += 1
    finally:
        for i in range(shown, n):
            if i in finished or not max_new_tokens:
                show(i, samples[i], None)
    return sum(len(sample.tokens) for sample in samples)


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


def main(
    run: str | None = None,
    prompt: str = "",
    prompts: str | None = None,
    max_new_tokens: int = 200,
    num_samples: int = 1,
    batch_size: int = 8,
    tau: float = 1e-4,
    alpha: float = 0.0,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: bool = True,
    show_steps: bool = False,
    out: Path | None = None,
    prefill: Literal["jacobi", "sequential"] = "jacobi",
    decoder: Literal["auto", "engine", "simple"] = "auto",
    graphs: bool = False,
    device: str = "auto",
    precision: Literal["auto", "float32", "bfloat16"] = "float32",
):
    """Continue prompts, with early exit.

    Args:
        run: directory of a trained model, or its name on the Hub; by default the newest in out/
        prompt: text to go on from; - reads it from standard input, less a newline at its end
        prompts: file of prompts, one a line; empty lines do not count
        max_new_tokens: tokens to generate
        num_samples: how many continuations of each prompt
        batch_size: how many sequences run at once
        tau: stop pondering when the mask score falls below it; 0 always runs all K steps
        alpha: shift the router towards more (> 0) or fewer (< 0) steps
        temperature: 0 is greedy
        top_k: choose among the k most probable tokens
        top_p: choose among the fewest tokens that hold this probability
        seed: makes the choices repeatable; sample i, from 0 on, has seed + i
        stop: a text ends where the model ends it
        show_steps: colour each token by the steps taken before it was chosen, or read (prompt)
        out: write the samples to this file, as JSON, one a line, instead of printing them
        prefill: read prompts in parallel, up to rounding, or slot by slot
        decoder: engine.py, or the simple one of this file; auto: the engine for every PonderLM
        graphs: on CUDA, replay the engine's step of a slot as one graph
        device: auto, cpu, cuda or mps
        precision: of the computation; a few queries at a time gain little from bfloat16
    """
    texts = [text for text in read_prompts(prompt, prompts) for _ in range(num_samples)]
    directory, device = find_run(run), pick_device(device)
    dtype = pick_precision(precision, device)
    model, tokenizer = open_model(directory, device)
    K, window = model.config.ponder_steps, model.config.block_size
    if num_samples < 1 or batch_size < 1:
        raise ValueError(
            f"num_samples = {num_samples}, batch_size = {batch_size}: they must be at least 1"
        )
    if out and out.exists() and (not out.is_file() or (prompts and out.samefile(prompts))):
        raise ValueError(f"--out {out} is the file of prompts, or no regular file: take another")
    if out and not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; make it first")
    # An empty prompt is where a document begins.
    ids = [
        tokenizer.begin + tokenizer.encode(text) or [tokenizer.end_of_text or 0] for text in texts
    ]
    n, end, read = len(texts), tokenizer.end_of_text if stop else None, [[] for _ in texts]
    chosen = dict(temperature=temperature, top_k=top_k, top_p=top_p, end=end)
    check(model, ids, max_new_tokens, tau=tau, alpha=alpha, **chosen)
    if decoder == "auto":
        decoder = "engine" if model.config.method in PONDER else "simple"
    if decoder == "engine":
        engine = Engine(
            model, min(batch_size, n), tau=tau, alpha=alpha, prefill=prefill, dtype=dtype,
            graphs=graphs,
        )  # fmt: skip
        events = engine.stream(ids, max_new_tokens, seed=seed, read=read, **chosen)
    else:
        events = one_by_one(model, ids, max_new_tokens, seed, read, tau=tau, alpha=alpha, **chosen)
    print(
        f"{directory}: K = {K}, tau = {tau:g}, device {device.type}, precision {str(dtype)[6:]}, "
        f"decoder {decoder}"
    )
    half = max(window // 2, 1)
    if long := [len(x) for x in ids if len(x) > window]:
        print(
            f"note: {len(long)} of {n} prompts do not fit the window of {window} tokens, the "
            f"longest has {max(long)}; of these the last {half} tokens are read"
        )
    if show_steps and not out:
        color = sys.stdout.isatty()
        print("steps: " + " ".join(paint(f" {k} ", k, K, color) for k in range(K + 1)))

    def show(i, sample, bar):
        if out:
            write_sample(file, texts[i], sample, tokenizer, end)
            return
        if bar is not None:
            bar.clear()
        print(f"\n--- sample {i + 1} of {n}")
        pairs = zip(sample.tokens, sample.steps, strict=True)
        known = read[i][: len(ids[i]) if len(ids[i]) <= window else half]
        show_one(((i, *pair) for pair in pairs), Printer(*painted), texts[i], ids[i], known)

    painted, start = (tokenizer, K if show_steps else None, end), time.perf_counter()
    mixed = autocast(device, dtype) if decoder == "simple" else nullcontext()
    with mixed, replacing(out, n) as file:
        if n == 1 and not out:
            print()
            total = show_one(events, Printer(*painted), texts[0], ids[0], read[0])
        else:
            total = show_many(events, n, max_new_tokens, end, show)
    if total:
        print(summary([k for one in read for k in one], K, total, time.perf_counter() - start))


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main))
