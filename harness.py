"""The benchmarks of the paper's table (section 4.2), through lm-evaluation-harness.

    pip install lm_eval==0.4.13
    python evaluate.py --tasks lambada_openai,arc_easy,sciq --num-fewshot 5 --out scores.json

The harness has the tasks, writes the prompts and judges the answers; it fetches the texts of a task
once. Here is the model that it asks, in three ways:

request                 answer
loglikelihood           log p of a continuation after a context, and whether greedy decoding has it
loglikelihood_rolling   log p of a whole text
generate_until          a continuation, as far as a text that ends it

The first two are scored in parallel, hard-stopped at tau, as decoding has it; the third is decoded.
Where a request does not fit the model's window, the beginning of its context is left out.
"""

import difflib
import hashlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from config import PONDER
from cost import PAPER, cost
from engine import Engine
from evaluate import Window, batches, states
from router import upcast
from run import write_json
from sample import one_by_one
from tokenizer import DataError, IdTokenizer
from weights import read_json, shards

# The paper's table: task, heading, and accuracies in % of 410M parameters, 10 B tokens of the Pile.
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
PRINTED = {
    5: {
        "LoopedLM (4 loops)": (34.2, 48.2, 26.6, 20.6, 47.0, 64.2, 30.7, 83.4, 27.8, 42.5),
        "Pause (3 pauses)": (30.7, 46.9, 26.3, 21.8, 51.6, 63.4, 30.1, 81.8, 28.5, 42.3),
        "MoR (max 3 steps)": (31.5, 48.5, 25.3, 20.0, 51.0, 63.7, 30.6, 84.7, 28.0, 42.6),
        "PonderLM-1 (3 steps)": (34.0, 49.1, 28.4, 21.8, 49.7, 64.1, 30.9, 84.4, 29.5, 43.5),
        "PonderLM-2 (3 steps)": (37.6, 50.6, 34.0, 21.8, 53.5, 65.0, 32.5, 87.5, 31.2, 46.0),
        "PonderLM-3 (max 3 steps)": (40.8, 50.7, 36.0, 22.0, 52.6, 64.9, 32.3, 86.9, 31.8, 46.4),
    },
    0: {
        "LoopedLM (4 loops)": (40.4, 47.2, 28.6, 20.4, 50.8, 64.4, 30.6, 75.4, 28.8, 43.0),
        "Pause (3 pauses)": (38.1, 47.5, 27.8, 20.3, 50.3, 63.8, 29.8, 76.3, 29.0, 42.5),
        "MoR (max 3 steps)": (37.0, 45.3, 26.6, 19.9, 50.1, 63.8, 30.0, 77.3, 28.6, 42.0),
        "PonderLM-1 (3 steps)": (39.6, 47.8, 29.3, 20.4, 50.0, 64.1, 30.4, 77.2, 29.9, 43.2),
        "PonderLM-2 (3 steps)": (45.0, 47.6, 36.6, 21.9, 51.6, 64.4, 32.3, 80.6, 31.4, 45.7),
        "PonderLM-3 (max 3 steps)": (43.3, 48.7, 35.0, 21.9, 50.7, 64.2, 32.2, 80.0, 29.3, 45.0),
    },
}


# -- The model that the harness asks ---------------------------------------------------------------


@dataclass
class Count:
    """What was read for the answers so far."""

    tokens: int = 0
    steps: int = 0  # executed
    requests: int = 0
    cut: int = 0  # requests whose context lost its beginning


class HarnessLM(TemplateLM):
    """Any model of methods.py, for lm_eval.simple_evaluate.

    Args:
        model, tokenizer: as methods.load and tokenizer.load_tokenizer give them.
        tau: where it stops pondering, 0 never.
        batch_tokens: how many tokens are scored at once.
        batch_size: how many sequences are decoded at once.
    """

    def __init__(self, model, tokenizer, tau=1e-4, batch_tokens=4096, batch_size=16):
        super().__init__()
        if isinstance(tokenizer, IdTokenizer):
            raise DataError("this model reads ids without a vocabulary: no task is written in them")
        self.model, self.tau, self.batch_tokens = model, tau, batch_tokens
        self.vocabulary, self.batch_size, self.count = tokenizer, batch_size, Count()

    @property
    def eot_token_id(self):
        return self.vocabulary.end_of_text

    @property
    def prefix_token_id(self):
        """What a text without a context begins with."""
        begin = [*self.vocabulary.begin, self.vocabulary.end_of_text][0]
        if begin is None:
            raise DataError("the tokenizer has no token that a text begins or ends with")
        return begin

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        begin = [] if add_special_tokens is False else self.vocabulary.begin
        return begin + self.vocabulary.encode(string)

    def window(self, context, continuation):
        """Two lists of ids -> the Window that predicts the second, with what fits of the first."""
        room = self.model.config.block_size
        if not 0 < len(continuation) <= room:
            text = self.vocabulary.decode(continuation[:40]).decode("utf-8", "replace")
            raise DataError(
                f"a request asks for {len(continuation)} tokens after its context, {text!r}..: the "
                f"model scores 1 to {room} at once; leave this task out, or take a model with a "
                "longer window"
            )
        ids = (context + continuation)[-room - 1 :]
        return Window(ids, len(ids) - len(continuation))

    @torch.no_grad()
    def answers(self, windows):
        """[(log p, greedy)] of what Windows predict."""
        model, found = self.model, [None] * len(windows)
        device = model.lm_head.weight.device
        for batch, x, y, lengths in batches(windows, self.batch_tokens, device):
            h, s, steps = states(model, x, self.tau, lengths)
            h_hat = model.integrate(h, s, steps if model.masks else None)
            for row, i in enumerate(batch):
                part = windows[i].predictions
                logits, ids = upcast(model.lm_head(h_hat[row, part])), y[row, part]
                log_p = -F.cross_entropy(logits, ids, reduction="sum")
                found[i] = log_p.item(), (logits.argmax(-1) == ids).all().item()
                self.count.steps += steps[row, : lengths[row]].sum().item()
        self.count.tokens += sum(len(window.ids) - 1 for window in windows)
        return found

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        windows = [self.window(context, continuation) for _, context, continuation in requests]
        self.count.requests += len(requests)
        pairs = zip(windows, requests, strict=True)
        self.count.cut += sum(w.first < len(context) for w, (_, context, _) in pairs)
        return self.answers(windows)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        windows, of = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            room = self.model.config.block_size
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, room, context_len=1):
                windows.append(self.window(*make_disjoint_window(pair)))
                of.append(i)
        self.count.requests += len(requests)
        total = [0.0] * len(requests)
        for i, (log_p, _) in zip(of, self.answers(windows), strict=True):
            total[i] += log_p
        return total

    def generate_until(self, requests, disable_tqdm=False):
        alike, texts = {}, [None] * len(requests)
        for i, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        for settings, members in alike.items():
            contexts = [requests[i].args[0] for i in members]
            kwargs = normalize_gen_kwargs(json.loads(settings))
            for i, text in zip(members, self.generate(contexts, **kwargs), strict=True):
                texts[i] = text
        return texts

    def generate(
        self, contexts, max_gen_toks, until=(), do_sample=False, temperature=0.0, top_k=None,
        top_p=None, **others,
    ):  # fmt: skip
        """The continuations of texts, each without the text of `until` that ended it."""
        if others:
            raise DataError(f"the task asks to generate with {others}: unknown here")
        window = self.model.config.block_size
        room = window - max_gen_toks if max_gen_toks < window else max(window // 2, 1)
        ids = [self.tok_encode(text) or [self.prefix_token_id] for text in contexts]
        self.count.requests += len(ids)
        self.count.cut += sum(len(one) > room for one in ids)
        ids = [one[-room:] for one in ids]
        generated, read = [[] for _ in ids], [[] for _ in ids]
        text = lambda i: self.vocabulary.decode(generated[i]).decode("utf-8", "replace")  # noqa: E731

        def over(i, token):
            if token != self.eot_token_id:
                generated[i].append(token)
            return any(end and end in text(i) for end in until)

        chosen = dict(temperature=temperature if do_sample else 0, top_k=top_k, top_p=top_p)
        chosen |= dict(seed=0, end=self.eot_token_id, until=over, read=read)
        if self.model.config.method in PONDER:
            engine = Engine(self.model, min(self.batch_size, len(ids)), tau=self.tau)
            events = engine.stream(ids, max_gen_toks, **chosen)
        else:
            events = one_by_one(self.model, ids, max_gen_toks, tau=self.tau, **chosen)
        for _ in events:
            pass
        self.count.tokens += sum(map(len, read))
        self.count.steps += sum(map(sum, read))
        return [min((text(i).split(end)[0] for end in until if end), key=len, default=text(i))
                for i in range(len(ids))]  # fmt: skip


# -- Tasks -----------------------------------------------------------------------------------------


def find_tasks(names, include_path=None):
    """A TaskManager that knows the tasks of the harness and those in `include_path`.

    Raises:
        DataError: a name that is not known, or a task whose texts cannot be fetched.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise DataError(f"--include-path {include_path}: no such folder")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # one line for each retry
    manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "lm_eval ls tasks lists them"
            raise DataError(f"--tasks {name}: the harness has no such task; {hint}")
    for name in names:  # now, not after hours
        print(f"fetching {name}", flush=True)
        try:
            manager.load([name])
        except OSError as error:
            raise DataError(
                f"the texts of {name} cannot be fetched ({error}): the harness needs the network "
                "once; for tasks in local files give --include-path FOLDER"
            ) from None
    return manager


def digest(directory):
    """Tells weights apart."""
    found = hashlib.sha256()
    for file in shards(directory):
        with open(file, "rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()[:16]


def run(lm, directory, tasks, num_fewshot=0, limit=None, include_path=None, out=None):
    """Evaluate tasks one after the other; what `out` has of them already is not done again.

    Returns:
        What is written to `out`: settings, and for each task the harness's results, beside them
        what was read for it.

    Raises:
        DataError: an unknown task, no network, a request that the model cannot answer.
        ValueError: `out` has results of something else.
    """
    names = list(dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip()))
    if not names or num_fewshot < 0 or (limit is not None and limit < 1):
        raise ValueError(
            f"--tasks {tasks!r}, num_fewshot = {num_fewshot}, limit = {limit}: names with commas "
            "between them, 0 or more, 1 or more"
        )
    settings = {"run": str(directory), "weights": digest(directory), "tau": lm.tau}
    settings |= {"num_fewshot": num_fewshot, "limit": limit}
    report = settings | {"tasks": {}}
    if out is not None and out.exists():
        report = read_json(out)
        if {key: report.get(key) for key in settings} != settings or "tasks" not in report:
            raise ValueError(f"{out} has results of other settings or weights: give another --out")
    left = [name for name in names if name not in report["tasks"]]
    manager = find_tasks(left, include_path) if left else None
    for name in left:
        lm.count, start = Count(), time.perf_counter()
        found = simple_evaluate(
            lm, tasks=[name], num_fewshot=num_fewshot, limit=limit, task_manager=manager,
            log_samples=False,
        )  # fmt: skip
        report["tasks"][name] = vars(lm.count) | {
            "seconds": time.perf_counter() - start,
            "results": found["results"],
            "documents": {task: n["effective"] for task, n in found["n-samples"].items()},
        }
        if out is not None:
            write_json(out, report)
    report["tasks"] = {name: report["tasks"][name] for name in names}
    return report


def show(report, config):
    """Print the metrics of each task, and the paper's table with its rows and ours."""
    tasks, K = report["tasks"], config.ponder_steps
    print(f"\n{'task':24}{'metric':28}{'value':>9}{'stderr':>9}{'documents':>11}{'steps':>7}")
    for name, entry in tasks.items():
        steps = entry["steps"] / max(entry["tokens"], 1)
        for task, metrics in entry["results"].items():
            for key, value in metrics.items():
                metric, _, filtered = key.partition(",")
                if not filtered or metric.endswith("_stderr"):
                    continue
                error = metrics.get(f"{metric}_stderr,{filtered}")
                error = f"{error:.4f}" if isinstance(error, float) else "-"
                metric += "" if filtered == "none" else f" ({filtered})"
                documents = entry["documents"].get(task, "")
                print(f"{task:24}{metric:28}{value:9.4f}{error:>9}{documents:>11}{steps:7.2f}")
        if entry["cut"]:
            print(f"{name:24}note: {entry['cut']:,} of {entry['requests']:,} contexts lost their "
                  f"beginning: the window has {config.block_size} tokens")  # fmt: skip
    if not any(name in COLUMNS for name in tasks):
        return
    steps = sum(e["steps"] for e in tasks.values()) / sum(e["tokens"] for e in tasks.values())
    found = {name: entry["results"][name] for name, entry in tasks.items() if name in COLUMNS}
    cells = [100 * found[name]["acc,none"] if name in found else None for name in COLUMNS]
    ours = (*cells, None if None in cells else sum(cells) / len(cells))
    part = f", {report['limit']} documents a task" if report["limit"] else ""
    print(f"\naccuracy in %, {report['num_fewshot']}-shot{part}")
    print(f"{'':28}{'GFLOPs/token':>13}" + "".join(f"{h:>7}" for h in [*COLUMNS.values(), "Avg."]))

    def line(name, flops, row):
        cells = "".join(f"{'-' if cell is None else f'{cell:.1f}':>7}" for cell in row)
        print(f"{name:28}{flops:13.3g}{cells}")

    line(f"{config.label} (K = {K})", cost(config, steps).paper_flops / 1e9, ours)
    for name, row in PRINTED.get(report["num_fewshot"], {}).items():
        line(f"* {name}", PAPER[name][1], row)
    print("FLOPs: 6 N (1 + executed steps), section 4.2, over all that was read for the tasks")
    if report["num_fewshot"] in PRINTED:
        print("* as printed in the paper: 410M parameters, 10 B tokens of the Pile; not run here")
