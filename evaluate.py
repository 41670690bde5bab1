"""What a model scores on texts: perplexity and bits per byte, soft and as it decodes, by depth.

    python evaluate.py                                the newest run, on its validation text
    python evaluate.py --run my_llama --data texts/   any model, any text
    python evaluate.py --tasks lambada_openai,sciq    benchmarks, see harness.py

A text is scored in windows of the model's length T that lie `stride` apart, so that each token but
the first ones has at least T - stride tokens before it. What is in the file counts, in its bytes,
not how a tokenizer would write it.

name            per token                  meaning
loss            nats                       -log p(token | tokens before), mean
perplexity      exp(loss)                  depends on the tokenizer
bits_per_byte   loss * tokens / bytes / ln 2   does not
interval        of the loss                95 % of bootstrap samples of windows, see `bootstrap`
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from tqdm import tqdm

from compact import settle
from config import PONDER
from cost import cost
from data import read_texts
from device import command_line, pick_device
from measure import validation_windows
from methods import load
from run import find_run, write_json
from tokenizer import DataError, load_tokenizer
from validation import truncate

TOLERANCE = 1e-5  # of the latents, when a window's Jacobi iteration has converged


@dataclass
class Window:
    """Part of a text: token ids, of which those from `first` on are predicted here."""

    ids: list
    first: int  # at least 1: the first id only is read

    @property
    def predictions(self):
        """Where its predictions are made: the places before those ids."""
        return slice(self.first - 1, len(self.ids) - 1)


def cut(ids, T, stride):
    """The Windows of a text, which read at most T ids; each id but the first is predicted once."""
    windows, done = [], 1
    for start in range(0, max(len(ids) - 1, 1), stride):
        end = min(start + T + 1, len(ids))
        windows.append(Window(ids[start:end], done - start))
        done = end
        if end == len(ids):
            return windows
    return windows


@dataclass
class Scores:
    """Of predicted tokens, in the order of the text."""

    window: torch.Tensor  # (n,) which Window it is of
    soft: torch.Tensor  # (n,) loss in nats, all steps run
    hard: torch.Tensor  # (n,) stopped at tau, as decoding has it
    steps: torch.Tensor  # (n,) executed steps at tau
    depths: torch.Tensor  # (n, K+1) soft, integrated up to depth i; without weights s, h^(i) alone


def states(model, idx, tau, lengths):
    """h, s and executed steps of right-padded rows at their fixed point; tau 0 runs all steps.

    Each row stops on its own, so that it does not depend on its neighbours.
    """
    if model.config.method in PONDER:
        found = settle(model, idx, tau, lengths=lengths, tolerance=TOLERANCE)
        return found.h, found.s, found.steps
    h, s, log_w = model.states(idx, tau=tau)
    return h, s, model.executed(log_w, tau)


def batches(windows, batch_tokens, device):
    """Yield Windows in batches of at most `batch_tokens` tokens, the longest first: which they are,
    inputs x and targets y (B, T), padded behind, and the windows' lengths (B,)."""
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i].ids))
    with tqdm(total=sum(len(w.ids) - 1 for w in windows), unit=" tokens", leave=False) as bar:
        while order:
            size = max(1, batch_tokens // (len(windows[order[0]].ids) - 1))
            batch, order = order[:size], order[size:]
            lengths = torch.tensor([len(windows[i].ids) - 1 for i in batch], device=device)
            ids = torch.zeros(len(batch), int(lengths.max()) + 1, dtype=torch.long)
            for row, i in enumerate(batch):
                ids[row, : len(windows[i].ids)] = torch.tensor(windows[i].ids)
            yield batch, ids[:, :-1].to(device), ids[:, 1:].to(device), lengths
            bar.update(int(lengths.sum()))


@torch.no_grad()
def score(model, windows, tau=1e-4, batch_tokens=4096):
    """Score what Windows predict -> Scores."""
    rows = [None] * len(windows)
    for batch, x, y, lengths in batches(windows, batch_tokens, model.lm_head.weight.device):
        h, s, steps = states(model, x, 0, lengths)
        depths = [
            model.token_losses(truncate(h, s, i) if model.masks else h[:, :, i], y)
            for i in range(s.size(-1))
        ]
        soft = hard = model.token_losses(model.integrate(h, s), y)
        if model.masks:  # otherwise tau changes nothing
            h, s, steps = states(model, x, tau, lengths)
            hard = model.token_losses(model.integrate(h, s, steps), y)
        found = (soft, hard, steps, torch.stack(depths, dim=-1))
        for row, i in enumerate(batch):
            rows[i] = [values[row, windows[i].predictions].cpu() for values in found]
    counts = torch.tensor([len(row[0]) for row in rows])
    window = torch.arange(len(rows)).repeat_interleave(counts)
    return Scores(window, *(torch.cat(parts) for parts in zip(*rows, strict=True)))


def bootstrap(window, losses, samples=1000, seed=0):
    """95 % interval of the mean loss: windows, whose tokens belong together, are drawn anew.

    window (n,), losses (n,) -> low, high; None of fewer than two windows.
    """
    count = np.bincount(window.numpy())
    total = np.bincount(window.numpy(), losses.double().numpy())
    if len(count) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(len(count), size=(samples, len(count)))
    means = total[drawn].sum(1) / count[drawn].sum(1)
    return tuple(np.quantile(means, (0.025, 0.975)).tolist())


def texts_of(data, tokenizer):
    """The texts of a file or folder as ids, each behind what texts begin with, and their bytes."""
    path = Path(data)
    if not path.exists():
        raise DataError(f"--data {data}: no such file or folder")
    texts = [text for _, text in read_texts(path) if text.strip()]
    if not texts:
        raise DataError(f"{data} holds no text; give a file or folder with some")
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    before = tokenizer.begin or end  # without any, the first token is not predicted
    return [before + tokenizer.encode(text) for text in texts], b"".join(texts)


def import_harness():
    try:
        import harness
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise ValueError(
            "--tasks needs lm-evaluation-harness: pip install lm_eval==0.4.13"
        ) from None
    return harness


def main(
    run: str | None = None,
    data: str | None = None,
    tau: float = 1e-4,
    stride: int | None = None,
    windows: int | None = None,
    tasks: str | None = None,
    num_fewshot: int = 0,
    limit: int | None = None,
    include_path: str | None = None,
    batch_tokens: int = 4096,
    device: str = "auto",
    out: Path | None = None,
):
    """Perplexity and bits per byte of a model; with --tasks its accuracy on benchmarks.

    Args:
        run: directory of a trained model, or its name on the Hub; by default the newest in out/
        data: text file, or folder of them; by default the validation tokens of the run's corpus
        tau: where decoding stops, 0 never
        stride: tokens from one window to the next; by default half of the model's window
        windows: score only so many, from the start on; by default all
        tasks: of lm-evaluation-harness, with commas between them: lambada_openai,arc_easy
        num_fewshot: solved examples in each prompt of a task
        limit: documents of each task, from the start on; by default all
        include_path: folder with tasks of your own (the harness's YAML files)
        batch_tokens: how many tokens are scored at once
        device: auto, cpu, cuda or mps
        out: write the numbers to this file, as JSON; tasks that are in it are not done again
    """
    directory = find_run(run)
    model = load(directory).to(pick_device(device))
    config = model.config
    stride = stride or max(config.block_size // 2, 1)
    if not 1 <= stride <= config.block_size:
        raise ValueError(f"stride = {stride}: 1 to the window of {config.block_size} tokens")
    if not 0 <= tau <= 1 or (windows is not None and windows < 1) or batch_tokens < 1:
        raise ValueError(
            f"tau = {tau}, windows = {windows}, batch_tokens = {batch_tokens}: tau is a "
            "probability, the others at least 1"
        )
    if tasks is not None:
        if data is not None:
            raise ValueError("--tasks and --data exclude each other: give one of them")
        harness = import_harness()
        lm = harness.HarnessLM(
            model, load_tokenizer(directory / "tokenizer.json"), tau, batch_tokens
        )
        report = harness.run(lm, directory, tasks, num_fewshot, limit, include_path, out)
        harness.show(report, config)
        return
    if data is None:
        _, tokenizer, val = validation_windows(directory)
        texts, name = [val.tokens[:].tolist()], f"validation tokens of {directory}"
        size, sha256 = val.tokens.bytes, None
    else:
        tokenizer = load_tokenizer(directory / "tokenizer.json")
        (texts, raw), name = texts_of(data, tokenizer), data
        size, sha256 = len(raw), hashlib.sha256(raw).hexdigest()
    cuts = [w for ids in texts for w in cut(ids, config.block_size, stride)]
    complete = windows is None or windows >= len(cuts)
    cuts = [w for w in cuts[:windows] if len(w.ids) > w.first]
    if not cuts:
        raise DataError(f"{name} has no token to predict; give more text")
    result = summarise(score(model, cuts, tau, batch_tokens), config)
    result |= {"run": str(directory), "text": name, "tau": tau, "stride": stride}
    if size is not None and complete:
        result |= {"bytes": size, "sha256": sha256}
        for kind in ("soft", "hard"):
            nats = result[kind]["loss"] * result["tokens"]
            result[kind]["bits_per_byte"] = nats / size / math.log(2)
    show(result)
    if out is not None:
        write_json(out, result)
        print(f"written: {out}")


def summarise(scores, config):
    """Scores -> what is reported of them: means, perplexities, intervals, costs."""
    result = {"method": config.label, "K": config.ponder_steps, "tokens": len(scores.soft)}
    for kind in ("soft", "hard"):
        losses = getattr(scores, kind)
        loss = losses.double().mean().item()
        steps = scores.steps.double().mean().item() if kind == "hard" else config.ponder_steps
        low_high = bootstrap(scores.window, losses)
        result[kind] = {"loss": loss, "interval": low_high, "perplexity": math.exp(loss)}
        costs = cost(config, steps)
        result[kind] |= {"steps": steps, "token_computations": costs.token_computations}
        result[kind] |= {"paper_flops": costs.paper_flops}
    result["depths"] = scores.depths.double().mean(0).tolist()
    return result


def show(result):
    """Print what `main` reports."""
    bytes_ = f", {result['bytes']:,} bytes" if "bytes" in result else ""
    print(f"{result['run']} ({result['method']}, K = {result['K']}) on {result['text']}")
    print(f"{result['tokens']:,} tokens predicted{bytes_}, stride {result['stride']}\n")
    print("                        loss    95 % interval  perplexity  bits/byte  steps  6N, MFLOPs")
    for kind in ("soft", "hard"):
        row = result[kind]
        title = "soft, all steps" if kind == "soft" else f"decoded, tau {result['tau']:g}"
        low_high = "{:.4f}..{:.4f}".format(*row["interval"]) if row["interval"] else "-"
        bits = f"{row['bits_per_byte']:.4f}" if "bits_per_byte" in row else "-"
        print(
            f"{title:20}{row['loss']:8.4f}{low_high:>17}{row['perplexity']:12.3f}{bits:>11}"
            f"{row['steps']:7.2f}{row['paper_flops'] / 1e6:12.2f}"
        )
    title = "integrated up to i" if result["method"] == "ponderlm3" else "h^(i) alone"
    print(f"{title:20}" + "".join(f"{loss:8.4f}" for loss in result["depths"]))


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main))
