"""What a model scores on texts: perplexity and bits per byte, soft and as it decodes, by depth.

    python evaluate.py                                the newest run, on its validation text
    python evaluate.py --run my_llama --data texts/   any model, any text
    python evaluate.py --tasks lambada_openai,sciq    benchmarks, see benchmarks.py

Bits per byte count the bytes of the files, not of what a tokenizer would write. The validation
tokens of a run are one long text, in which ends of documents are predicted like other tokens.

name            per token                  meaning
loss            nats                       -log p(token | tokens before), mean
perplexity      exp(loss)                  depends on the tokenizer
bits_per_byte   loss * tokens / bytes / ln 2   does not
interval        of the loss                95 % of bootstrap samples of windows, see `bootstrap`
"""

import hashlib
import math
from pathlib import Path

import tyro

from corpora import read_texts
from cost import cost
from device import command_line, pick_device
from measure import validation_windows
from methods import load
from run import find_run, write_json
from score import bootstrap, cut, score
from tokenizer import DataError, load_tokenizer
from weights import read_json


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
        import benchmarks
        import harness
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise ValueError(
            "--tasks needs lm-evaluation-harness: pip install lm_eval==0.4.13"
        ) from None
    return benchmarks, harness


def check(data, tau, stride, windows, tasks, batch_tokens, out, of_tasks):
    """Refuse options that are out of range, or would be ignored, before any work is done."""
    of_texts = dict(data=data, stride=stride, windows=windows)
    ignored = of_tasks if tasks is None else of_texts
    given = [f"--{name.replace('_', '-')}" for name, value in ignored.items() if value is not None]
    if given:
        which = "without --tasks" if tasks is None else "with --tasks"
        raise ValueError(f"{', '.join(given)} {which}: it would change nothing; leave it out")
    if not 0 <= tau <= 1 or (windows is not None and windows < 1) or batch_tokens < 1:
        raise ValueError(
            f"tau = {tau}, windows = {windows}, batch_tokens = {batch_tokens}: tau is a "
            "probability, the others at least 1"
        )
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ValueError(f"--out {out} is a folder, or in none: name a file in one that exists")
    if out is not None and tasks is None and out.exists() and "stride" not in read_json(out):
        raise ValueError(
            f"--out {out} has no losses of texts, but something else: give another file"
        )


def main(
    run: str | None = None,
    data: str | None = None,
    tau: float = 1e-4,
    stride: int | None = None,
    windows: int | None = None,
    tasks: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    include_path: Path | None = None,
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
        num_fewshot: solved examples in each prompt of a task; by default as the task has it
        limit: documents of each task, from the start on; by default all
        include_path: folder with tasks of your own (the harness's YAML files)
        batch_tokens: how many tokens are scored at once
        device: auto, cpu, cuda or mps
        out: write the numbers to this file, as JSON; tasks that are in it are not done again
    """
    of_tasks = dict(num_fewshot=num_fewshot, limit=limit, include_path=include_path)
    check(data, tau, stride, windows, tasks, batch_tokens, out, of_tasks)
    directory = find_run(run)
    model = load(directory).to(pick_device(device))
    if tasks is not None:
        benchmarks, harness = import_harness()
        tokenizer = load_tokenizer(directory / "tokenizer.json")
        lm = harness.HarnessLM(model, tokenizer, tau, batch_tokens)
        report = benchmarks.run(lm, directory, tasks, out=out, **of_tasks)
        benchmarks.show(report, model.config)
        return
    result = score_texts(model, directory, data, tau, stride, windows, batch_tokens)
    show(result)
    if out is not None:
        write_json(out, result)
        print(f"written: {out}")


def score_texts(model, directory, data, tau, stride, windows, batch_tokens):
    """Score the texts of `data`, or without any the run's validation tokens -> what is reported."""
    T = model.config.block_size
    stride = max(T // 2, 1) if stride is None else stride
    if not 1 <= stride <= T:
        raise ValueError(f"stride = {stride}: 1 to the window of {T} tokens")
    if data is None:
        _, tokenizer, val = validation_windows(directory)
        texts, name = [val.tokens[:].tolist()], f"validation tokens of {directory}"
        size, sha256 = val.tokens.bytes, None
    else:
        tokenizer = load_tokenizer(directory / "tokenizer.json")
        (texts, raw), name = texts_of(data, tokenizer), data
        size, sha256 = len(raw), hashlib.sha256(raw).hexdigest()
    cuts = [w for ids in texts for w in cut(ids, T, stride)]
    complete = windows is None or windows >= len(cuts)
    cuts = [w for w in cuts[:windows] if len(w.ids) > w.first]
    if not cuts:
        raise DataError(f"{name} has no token to predict; give more text")
    print(f"scoring {len(cuts):,} windows; fewer with --windows", flush=True)
    result = summarise(score(model, cuts, tau, batch_tokens), model.config)
    result |= {"run": str(directory), "text": name, "tau": tau, "stride": stride}
    if size is not None and complete:
        result |= {"bytes": size, "sha256": sha256}
        for kind in ("soft", "hard"):
            nats = result[kind]["loss"] * result["tokens"]
            result[kind]["bits_per_byte"] = nats / size / math.log(2)
    return result


def summarise(scores, config):
    """Scores -> what is reported of them: means, perplexities, intervals, costs."""
    result = {"method": config.label, "K": config.ponder_steps, "tokens": len(scores.soft)}
    for kind in ("soft", "hard"):
        losses = getattr(scores, kind)
        loss = losses.double().mean().item()
        steps = scores.steps.double().mean().item()
        if kind == "soft" and config.label == "ponderlm3":
            steps = config.ponder_steps
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
