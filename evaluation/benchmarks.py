"""The benchmarks of the paper's table (section 4.2), through lm-evaluation-harness.

    pip install lm_eval==0.4.13
    python -m evaluation --tasks lambada_openai,arc_easy,sciq --num-fewshot 5 --out scores.json

The harness has the tasks, writes the prompts and judges the answers; it fetches the texts of a task
once. The model that it asks is in harness.py.
"""

import logging
import math
import time
from importlib.metadata import version
from importlib.util import find_spec

from baselines.cost import PAPER, cost
from evaluation.harness import Count
from runtime import UserError, write_json

# The paper's table: task, heading.
COLUMNS = {
    "lambada_openai": "LAMB-O",
    "arc_easy": "ARC-E",
    "lambada_standard": "LAMB-S",
    "arc_challenge": "ARC-C",
    "winogrande": "WinoG",
    "piqa": "PIQA",
    "hellaswag": "HellaS",
    "sciq": "SciQ",
    "race": "RACE",
}
# Its row of PonderLM-3 (max 3 steps), 410M parameters, 10 B tokens of the Pile: accuracies in %,
# their average last, by the number of examples.
PRINTED = {
    0: (43.3, 48.7, 35.0, 21.9, 50.7, 64.2, 32.2, 80.0, 29.3, 45.0),
    5: (40.8, 50.7, 36.0, 22.0, 52.6, 64.9, 32.3, 86.9, 31.8, 46.4),
}


def check_installed():
    if find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-evaluation-harness: pip install lm_eval==0.4.13")


def find_tasks(names, include_path):
    """A TaskManager that knows the tasks of the harness and those in `include_path`.

    Raises:
        UserError: a name that is not known, or a task whose texts cannot be fetched.
    """
    from lm_eval.tasks import TaskManager

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # one line for each retry
    manager = TaskManager(include_path=include_path)
    for name in names:  # now, not after hours
        if name not in manager.all_tasks:
            raise UserError(
                f"--tasks {name}: the harness has no such task; lm_eval ls tasks lists them"
            )
        print(f"fetching {name}", flush=True)
        try:
            manager.load([name])
        except OSError as error:
            raise UserError(
                f"the texts of {name} cannot be read ({error}); if they are on the Hub, the "
                "harness needs the network once"
            ) from None
    return manager


def run(lm, directory, options):
    """Evaluate tasks one after the other, each of which is printed, and in `options.out`, as soon
    as it is done.

    Returns:
        What is written there: settings, and for each task the harness's results, beside them what
        was read for it.

    Raises:
        UserError: an unknown task, no network, or a request that the model cannot answer.
    """
    from lm_eval import simple_evaluate
    from lm_eval.utils import make_table

    o, names = options, options.tasks.split(",")
    report = {"run": str(directory), "lm_eval": version("lm_eval"), "tau": lm.tau}
    report |= {"num_fewshot": o.num_fewshot, "limit": o.limit, "tasks": {}}
    manager = find_tasks(names, o.include_path)
    for name in names:
        lm.count, start = Count(), time.perf_counter()
        found = simple_evaluate(
            lm, tasks=[name], num_fewshot=o.num_fewshot, limit=o.limit, task_manager=manager,
            bootstrap_iters=1000, log_samples=False,
        )  # fmt: skip
        entry = report["tasks"][name] = vars(lm.count) | {
            "seconds": time.perf_counter() - start,
            "results": found["results"],
            "documents": {task: n["effective"] for task, n in found["n-samples"].items()},
        }
        print(f"\n{make_table(found)}{name}: {mean_steps([entry]):.2f} steps a token")
        if entry["cut"]:
            print(f"note: {entry['cut']:,} of {entry['requests']:,} contexts lost their beginning: "
                  f"the window has {lm.model.config.block_size} tokens")  # fmt: skip
        if o.out is not None:
            write_json(o.out, report)
    return report


def mean_steps(entries):
    """Executed steps a token, over all that was read for some tasks."""
    return sum(e["steps"] for e in entries) / max(sum(e["tokens"] for e in entries), 1)


def show_table(report, config):
    """The paper's table, if one of its nine tasks is among those of the report: a row of this
    model, and PonderLM-3's as it is printed there."""
    tasks = {name: entry for name, entry in report["tasks"].items() if name in COLUMNS}
    shots, limit = report["num_fewshot"] or 0, report["limit"]
    if not tasks:
        return
    results = [tasks[name]["results"][name] if name in tasks else {} for name in COLUMNS]
    ours = [100 * result.get("acc,none", math.nan) for result in results]
    flops = cost(config, mean_steps(tasks.values())).paper_flops / 1e9
    rows = [(f"{config.method} (K = {config.ponder_steps})", flops, *ours, sum(ours) / len(ours))]
    print(f"\naccuracy in %, {shots}-shot" + (f", {limit} documents a task" if limit else ""))
    print(f"{'':28}{'GFLOPs/token':>13}" + "".join(f"{h:>7}" for h in [*COLUMNS.values(), "Avg."]))
    if shots in PRINTED:
        rows.append(("* PonderLM-3", PAPER["PonderLM-3 (max 3 steps)"][1], *PRINTED[shots]))
    for name, flops, *row in rows:
        cells = "".join(f"{cell:7.1f}".replace("nan", "  -") for cell in row)
        print(f"{name:28}{flops:13.3g}{cells}")
    print("FLOPs: 6 N (1 + executed steps), section 4.2, over all that was read for these tasks")
    if shots in PRINTED:
        print("* as printed in the paper: 410M parameters, 10 B tokens of the Pile; not run here")
