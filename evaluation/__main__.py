"""What a model scores: perplexity and bits per byte on texts, or accuracy on benchmarks.

python -m evaluation                                the newest run, on its validation text
python -m evaluation --run my_llama --data texts/   any model, any text
python -m evaluation --tasks lambada_openai,sciq    benchmarks, see benchmarks.py
"""

from pathlib import Path

import tyro

from corpus.tokenizers import load_tokenizer
from evaluation import benchmarks
from evaluation.harness import harness_lm
from evaluation.perplexity import score_texts, show
from interop import find_model, load
from runtime import UserError, command_line, pick_device, read_json, write_json


def check(*, tau, batch_tokens, tasks, out, of_texts, of_tasks):
    """Refuse options that are out of range, or would be ignored, before any work is done."""
    ignored = of_tasks if tasks is None else of_texts
    given = [f"--{name.replace('_', '-')}" for name, value in ignored.items() if value is not None]
    if given:
        which = "without --tasks" if tasks is None else "with --tasks"
        raise UserError(f"{', '.join(given)} {which}: it would change nothing; leave it out")
    windows = of_texts["windows"]
    if not 0 <= tau <= 1 or (windows is not None and windows < 1) or batch_tokens < 1:
        raise UserError(
            f"tau = {tau}, windows = {windows}, batch_tokens = {batch_tokens}: tau is a "
            "probability, the others are at least 1"
        )
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UserError(f"--out {out} is a folder, or in none: name a file in one that exists")
    if out is not None and tasks is None and out.exists() and "stride" not in read_json(out):
        raise UserError(
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
    of_texts = dict(data=data, stride=stride, windows=windows)
    of_tasks = dict(num_fewshot=num_fewshot, limit=limit, include_path=include_path)
    options = dict(tau=tau, batch_tokens=batch_tokens)
    check(**options, tasks=tasks, out=out, of_texts=of_texts, of_tasks=of_tasks)
    if tasks is not None:
        benchmarks.check_installed()
    directory = find_model(run)
    model = load(directory).to(pick_device(device))
    if tasks is not None:
        tokenizer = load_tokenizer(directory / "tokenizer.json")
        lm = harness_lm(model, tokenizer, **options)
        report = benchmarks.run(lm, directory, tasks, out=out, **of_tasks)
        benchmarks.show(report, model.config)
        return
    result = score_texts(model, directory, **of_texts, **options)
    show(result)
    if out is not None:
        write_json(out, result)
        print(f"written: {out}")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main))
