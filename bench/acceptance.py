"""The acceptance run on a GPU, in four parts of less than ten minutes: `bash runs/gpu.sh a|b|c|d`.

    a   Is it right?    the kernels and the tests on CUDA; training and decoding against the CPU
    b   Is it good?     `small` beside a model without pondering, on as many tokens
    c   Is it fast?     attention and training steps against plain ones
    d   Does it save?   early exit, CUDA graphs, prompts

A part is a list of commands, each a process of its own: one that crashes or takes too long is
recorded, and the others go on. What is required of their results are the gates. After each command
all is written to <out>/<part>/summary.json, beside the results of the commands and log.txt.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Literal
from xml.etree import ElementTree

import pandas as pd
import pydantic
import tyro

from bench.timing import machine
from runtime import UserError, clock, commit, pick_device, read_json, write_json
from training.config import read_run
from training.runs import read_lines

ROOT = Path(__file__).parent.parent
MARK = ".acceptance"  # a file in each folder that a run made, and may empty
MINUTES = 9.5  # of a part; what has not begun by then is left out
TRAINING = 360  # seconds of part b's longest training
# What other commands need of a run.
OF_A_RUN = "config.json model.safetensors tokenizer.json train.json log.jsonl results.json"


@dataclass
class Place:
    """Where a part runs. `toy` is a size that a CPU does in seconds, to see that all of it runs."""

    out: Path  # for the results
    runs: Path  # for trained models; the folder around it is where commands run and keep corpora
    data: str  # the corpus
    device: str
    toy: bool

    # Commands, with flags as one types them.

    def bench(self, name, flags=""):
        where = ["--device", self.device, "--out", str(self.out)]
        return [sys.executable, "-m", "bench", name, *where, *flags.split()]

    def train(self, name, steps, flags=""):
        size = "--preset small --eval-windows 256 --log-every 10"
        if self.toy:
            size = "--preset tiny --batch-size 2 --eval-windows 2 --log-every 1"
        size += f" --steps {steps} --eval-every {max(steps // 2, 1)} --device {self.device}"
        where = ["--data", self.data, "--out", str(self.runs), "--name", name]
        return [sys.executable, str(ROOT / "train.py"), *where, *size.split(), *flags.split()]

    def evaluation(self, run, file, windows, device=None):
        command = [sys.executable, "-m", "evaluation", "--run", str(self.runs / run)]
        command += ["--windows", str(windows), "--device", device or self.device]
        return [*command, "--out", str(file)]

    # What they have written.

    def read(self, name):
        return read_json(self.out / name)

    def rows(self, name, key="rows", **wanted):
        """The rows of a result in which the fields have these values."""
        rows = self.read(name)[key]
        return [row for row in rows if all(row[k] == value for k, value in wanted.items())]


@dataclass
class Step:
    name: str
    command: list[str] | Callable[[], list[str]]  # a function is asked when it is its turn
    seconds: int  # at most
    environment: dict = field(default_factory=dict)


@dataclass
class Gate:
    name: str
    measure: Callable[[], float]
    limit: float
    at_least: bool = False  # rather than at most
    needs: Literal["CUDA", "size"] | None = None  # without which it says nothing


# -- a: is it right? -------------------------------------------------------------------------------


def part_a(p):
    tests, flags = ("tests/method", "tests/engine"), "-n 8 --dist worksteal"
    if p.toy:
        tests, flags = ("tests/method/test_golden.py",), ""
    pytest = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    pytest += ["-q", "-p", "no:cacheprovider", "--junitxml", str(p.out / "tests.xml")]
    pytest += [*flags.split(), *(str(ROOT / test) for test in tests)]
    width, preset = ("--widths 8", "--preset tiny") if p.toy else ("", "")
    return [
        Step("environment", p.bench("environment", width), 90),
        Step("forms", p.bench("forms", width), 180),
        Step("tests", pytest, 240, {"PONDERLM_TEST_DEVICE": "pretended" if p.toy else "cuda"}),
        Step("steps", p.bench("steps", preset + " --count 3" * p.toy), 120),
        Step("decoder", p.bench("decoder", preset), 90),
    ]


def gates_a(p):
    def failed():
        suites = ElementTree.parse(p.out / "tests.xml").getroot().iter("testsuite")
        counts = [{k: int(s.get(k)) for k in ("tests", "failures", "errors")} for s in suites]
        if not sum(count["tests"] for count in counts):
            raise ValueError("no test was run")
        return sum(count["failures"] + count["errors"] for count in counts)

    def error(dtype):
        errors = ("out", "dq", "dk", "dv", "dlog_w")
        return max(max(row[e] for e in errors) for row in p.rows("forms.json", dtype=dtype))

    def loss_gap():
        here, cpu = (p.read("steps.json")["losses"][name] for name in (p.device, "cpu"))
        return max(abs(a - b) for a, b in zip(here, cpu, strict=True))

    def seconds():
        return max(p.read("decoder.json")[f"{how}_seconds"] for how in ("graphs", "eager"))

    differ = lambda: p.read("decoder.json")["samples_that_differ"]  # noqa: E731
    return [
        Gate("tests that fail", failed, 0),
        Gate("forms of attention that fail", lambda: len(p.read("forms.json")["failed"]), 0),
        Gate("error of a form of attention, bfloat16", lambda: error("bfloat16"), 1e-2),
        Gate("error of a form of attention, float32", lambda: error("float32"), 1e-4),
        Gate("loss of the first steps, difference from the CPU", loss_gap, 1e-3, needs="CUDA"),
        Gate("samples that differ with graphs, float64", differ, 0, needs="CUDA"),
        Gate("seconds of the first ten passes, bfloat16", seconds, 1, needs="CUDA"),
    ]


# -- b: is it good? --------------------------------------------------------------------------------


def seconds_a_step(run):
    """Of a training, without its beginning, by the mean speeds that its log has."""
    _, config, _ = read_run(run)
    tokens = config.batch_size * config.model.block_size
    rows = [row for row in read_lines(run / "log.jsonl") if "loss" in row]
    at = [(row["step"], row["step"] * tokens / row["tokens_per_second"]) for row in rows]
    return (at[-1][1] - at[0][1]) / (at[-1][0] - at[0][0])


def part_b(p):
    def steps():
        return 4 if p.toy else round(TRAINING / seconds_a_step(p.runs / "pace"))

    few, many = (2, 2) if p.toy else (8, 300)
    # In pieces that a mail or a file store takes; cat puts them together again.
    run, pieces = (shlex.quote(str(x)) for x in (p.runs / "small", p.out / "small.tar.gz."))
    pack = f"set -o pipefail; tar cz -C {run} {OF_A_RUN} | split -b 15m -d - {pieces}"
    cpu = p.evaluation("small", p.runs / "cpu.json", few, "cpu")
    return [
        Step("pace", p.train("pace", 4 if p.toy else 30), 120),
        Step("small", lambda: p.train("small", steps()), TRAINING + 60),
        Step("vanilla", lambda: p.train("vanilla", steps(), "--method vanilla"), 90),
        Step("evaluation", p.evaluation("small", p.out / "loss-small.json", many), 60),
        Step("of vanilla", p.evaluation("vanilla", p.out / "loss-vanilla.json", many), 30),
        Step("of a few windows", p.evaluation("small", p.runs / "few.json", few), 30),
        Step("on a CPU", cpu, 60),
        Step("pack", ["bash", "-c", pack], 20),
    ]


def gates_b(p):
    def loss(file, kind):
        return read_json(file)[kind]["loss"]

    small, vanilla = p.out / "loss-small.json", p.out / "loss-vanilla.json"
    results = p.runs / "small" / "results.json"

    def on_cpu():
        few, cpu = p.runs / "few.json", p.runs / "cpu.json"
        return max(abs(loss(few, kind) - loss(cpu, kind)) for kind in ("soft", "hard"))

    gain = lambda: loss(small, "hard") - loss(vanilla, "hard")  # noqa: E731
    stopping = lambda: abs(loss(small, "hard") - loss(small, "soft"))  # noqa: E731
    beyond_R = lambda: abs(loss(results, "fixed") - loss(results, "trained"))  # noqa: E731
    return [
        Gate("loss, less that without pondering", gain, 0, needs="size"),
        Gate("loss that stopping early changes", stopping, 0.001, needs="size"),
        Gate("loss that more passes than in training change", beyond_R, 0.005, needs="size"),
        Gate("loss of a few windows, difference from the CPU", on_cpu, 1e-3, needs="CUDA"),
    ]


# -- c: is it fast? --------------------------------------------------------------------------------

STEPS_OF = {"small": 150, "70m": 130, "410m": 150}  # presets, and seconds that they may take


def part_c(p):
    if p.toy:
        tiny = "--preset tiny --windows 1 --refinements 1 --repeats 1 --optimizer --profile 3"
        return [
            Step("attention", p.bench("attention", "--lengths 64 --widths 56 --repeats 1"), 60),
            Step("train tiny", p.bench("train", tiny), 60),
        ]
    flags = "--precision bfloat16 --compile --optimizer --profile 20 --repeats 3"
    return [
        Step("attention", p.bench("attention", "--repeats 3"), 150),
        *(
            Step(f"train {preset}", p.bench("train", f"--preset {preset} {flags}"), seconds)
            for preset, seconds in STEPS_OF.items()
        ),
    ]


def gates_c(p):
    def mask(d):
        """Of the fastest form, at the worst length."""
        rows = p.rows(f"attention-{p.device}.json", d=d)
        forms = pd.DataFrame(row for row in rows if row["backend"] != "plain")
        return forms.groupby("N").time_ratio.min().max()

    def a_slot(preset):
        """Of the step that a training would take: compiled against compiled, if that is faster."""
        rows = p.read(f"train-{preset}-{p.device}.json")["rows"]
        seconds = {row["case"]: row["seconds"] for row in rows}
        ours = min(seconds[x] for x in ("PonderLM-3", "--compile") if x in seconds)
        return ours / min(seconds[x] for x in ("plain", "plain, --compile") if x in seconds)

    def mfu(preset):
        rows = p.read(f"train-{preset}-{p.device}.json")["rows"]
        return max(row["mfu"] for row in rows if row["case"] in ("PonderLM-3", "--compile"))

    presets = ["tiny"] if p.toy else [*STEPS_OF]
    needed = {"tiny": 0, "small": 0.25, "410m": 0.35}
    return [
        *(
            Gate(f"soft mask, d = {d}, times plain", lambda d=d: mask(d), 1.1, needs="CUDA")
            for d in ((56,) if p.toy else (56, 120))
        ),
        *(
            Gate(f"step of {x}, times plain", lambda x=x: a_slot(x), 1.1, needs="CUDA")
            for x in presets
        ),
        *(
            Gate(f"MFU of {x}", lambda x=x: mfu(x), needed[x], at_least=True, needs="CUDA")
            for x in presets
            if x in needed
        ),
    ]


# -- d: does it save? ------------------------------------------------------------------------------


def part_d(p):
    steps, trained = [], p.runs.parent / "b" / "small"
    if not (trained / "results.json").exists():
        steps = [Step("a model", p.train("small", 4 if p.toy else 300), 120)]
        trained = p.runs / "small"

    def decode(part, flags=""):
        size = "--repeats 2 --precisions bfloat16 float32"
        if p.toy:
            size = "--repeats 1 --batch-sizes 1 --prompts 8 --new-tokens 4 --contexts 16 32"
        return [*p.bench("decode", f"--parts {part} {size} {flags}"), "--run", str(trained)]

    exits = "--graphs on off --tau 1e-4 0.1 --alphas 0 -4"
    return [
        *steps,
        Step("exit", decode("exit", exits), 260),
        Step("prompt", decode("prompt", "--alphas 0"), 120),
        Step("context", decode("context", "--graphs on off"), 60),
        Step("others", decode("others"), 120),
    ]


def gates_d(p):
    def rows(part, **wanted):
        return p.rows(f"decode-small-{p.device}-{part}.json", part, **wanted)

    def graphs(precision):
        """Of always K, which runs the same slots."""
        key, how = "always_tokens_per_second", {"batch": 1, "precision": precision}
        pairs = zip(
            rows("exit", graphs="on", **how), rows("exit", graphs="off", **how), strict=True
        )
        return median(on[key] / off[key] for on, off in pairs)

    def saved(batch):
        found = rows("exit", batch=batch, graphs="on")
        return median(row["saved"] for row in found if row["saved"] is not None)

    def prefill():
        return min(row["sequential_ratio"] for row in rows("prompt", prompt=8 if p.toy else 512))

    return [
        *(
            Gate(f"graphs at batch 1, {x}, times eager", lambda x=x: graphs(x), 2, True, "CUDA")
            for x in (("float32",) if p.toy else ("float32", "bfloat16"))
        ),
        *(
            Gate(f"saved time / saved slots, batch {B}", lambda B=B: saved(B), 0.9, True, "CUDA")
            for B in ((1,) if p.toy else (1, 8, 32, 128))
        ),
        Gate("prompt of 512 in parallel, times as fast", prefill, 10, at_least=True, needs="CUDA"),
    ]


# -- Running a part --------------------------------------------------------------------------------

PARTS = {"a": (part_a, gates_a), "b": (part_b, gates_b), "c": (part_c, gates_c)}
PARTS |= {"d": (part_d, gates_d)}


def perform(step, place, left):
    """Run a step's command, at most `left` seconds. -> how it ended"""
    try:
        command = step.command() if callable(step.command) else step.command
    except (UserError, OSError, LookupError, ArithmeticError) as error:
        return f"failed: what it needs of a step before is not there ({error})"
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PYTHONPATH": path, "TQDM_DISABLE": "1"} | step.environment
    if place.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    with open(place.out / "log.txt", "ab") as log:
        log.write(f"\n== {step.name}: {' '.join(command)}\n".encode())
        log.flush()
        child = subprocess.Popen(
            command, cwd=place.runs.parent, env=environment, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(min(step.seconds, left))
            return "done" if code == 0 else f"failed: it ended with {code}"
        except subprocess.TimeoutExpired:
            return f"failed: not done after {min(step.seconds, left):.0f} seconds"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # its own children, too
                child.wait()


def judge(gate, place):
    """-> a row of the table: what was measured, and whether that will do."""
    try:
        measured = float(gate.measure())
    except (UserError, OSError, LookupError, ValueError, TypeError, ElementTree.ParseError):
        measured = None  # the step that measures it has failed
    if gate.needs == "CUDA" and place.device != "cuda":
        result = "skipped (no CUDA)"
    elif gate.needs == "size" and place.toy:
        result = "skipped (toy size)"
    elif measured is None:
        result = "NOT MEASURED"
    else:
        good = measured >= gate.limit if gate.at_least else measured <= gate.limit
        result = "pass" if good else "FAIL"
    limit = f"{'>=' if gate.at_least else '<='} {gate.limit:g}"
    return {"gate": gate.name, "measured": measured, "limit": limit, "result": result}


def refuse_others(folder):
    """Raise UserError where a folder holds what no acceptance run wrote."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise UserError(f"{folder} holds other files; move them, or choose another --out or --runs")


@pydantic.validate_call
def acceptance(
    part: Annotated[Literal["a", "b", "c", "d"], tyro.conf.Positional],
    out: Path = Path("out/gpu"),
    runs: Path = Path("out/acceptance"),
    data: str = "pysource",
    toy: bool = False,
):
    """One part of the acceptance run, and the table of its gates; ends with 1 where one fails.

    Args:
        part: a, is it right? b, is it good? c, is it fast? d, does it save?
        out: folder for the results, in a folder for each part
        runs: folder for corpora and trained models; part d takes part b's model if it is there
        data: a prepared corpus, or a name as train.py knows it
        toy: at toy sizes on the CPU, in seconds, to see that all of it runs
    """
    device = pick_device("cpu" if toy else "auto")
    if device.type != "cuda" and not toy:
        raise UserError("this is for CUDA, which is not here; TRY=1 tries it on a CPU")
    if toy:
        data = ROOT / "docs" / "tour.md"
    elif Path(data).exists():
        data = Path(data).resolve()
    place = Place((out / part).resolve(), (runs / part).resolve(), str(data), device.type, toy)
    for folder in (place.out, place.runs):
        refuse_others(folder)
    for folder in (place.out, place.runs):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / MARK).touch()
    make_steps, make_gates = PARTS[part]
    began, steps, gates = time.monotonic(), [], make_gates(place)
    summary = {"part": part, "toy": toy, "machine": machine(device), "commit": commit()}
    for step in make_steps(place):
        start = time.monotonic()
        left = 60 * MINUTES - (start - began)
        status = perform(step, place, left) if left > 5 else "failed: no time was left"
        seconds = time.monotonic() - start
        steps.append({"step": step.name, "seconds": round(seconds, 1), "status": status})
        print(f"{part} {clock(time.monotonic() - began)}  {step.name}: {status}", flush=True)
        summary |= {"steps": steps, "gates": [judge(gate, place) for gate in gates]}
        write_json(place.out / "summary.json", summary)
    table, digits = pd.DataFrame(summary["gates"]), "{:.4g}".format
    print(table.to_string(index=False, na_rep="", float_format=digits))
    print(f"written: {place.out}")
    failed = [row["step"] for row in steps if row["status"] != "done"]
    failed += [row["gate"] for row in summary["gates"] if row["result"] in ("FAIL", "NOT MEASURED")]
    if failed:
        log = place.out / "log.txt"
        raise UserError(f"part {part} failed: {', '.join(failed)}; {log} says why")
