"""The acceptance run: what it does with commands that fail, what its gates read, what is told."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import torch
from conftest import ROOT

from attention import soft_mask_attention
from bench import acceptance as run
from bench.acceptance import Gate, Place, Step, judge
from bench.checks import forms
from bench.report import BEGIN, END, PAGE, report, section
from runtime import UserError, write_json
from training.config import PRESETS


def test_suite_is_on_the_cpu():
    """Catches a suite whose tests, or processes, take a GPU because there is one."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()


def test_device_of_the_tests():
    """Catches equivalence tests that run on the CPU all the same when they are to run on a GPU,
    which is not there, and others that do not stay away."""
    environment = os.environ | {"PONDERLM_TEST_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    files = [f"tests/method/test_{name}.py" for name in ("golden", "router", "train")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    command += ["-k", "golden or gradient or schedule"]  # files of three, two and one of these
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert re.search(r"(?m)^5 failed\b(?!.*passed)", done.stdout), done.stdout
    assert "CUDA" in done.stdout


@pytest.fixture
def place(tmp_path):
    (tmp_path / "runs").mkdir()
    return Place(tmp_path, tmp_path / "runs", "docs", "cuda", toy=False)


def python(code):
    return [sys.executable, "-c", code]


def test_commands_that_fail(tmp_path, monkeypatch, capsys):
    """Catches a command that takes the others with it, one that never ends, a failure that is not
    told or ends with 0, and results that are there only at the end."""
    left = tmp_path / "left"
    sleeper = f"import subprocess; subprocess.run(['sh', '-c', 'sleep 3; touch {left}'])"

    def nothing():
        raise UserError("log.jsonl does not exist")

    def steps(place):
        summary = place.out / "summary.json"
        return [
            Step("prints", python("print('seen'); import bench"), 60),
            Step("written as it goes", python(f"open('{summary}')"), 60),
            Step("crashes", python("import sys; sys.exit(3)"), 60),
            Step("hangs", python(sleeper), 1),
            Step("needs more", nothing, 60),
            Step("goes on", python(f"open('{place.out / 'number'}', 'w').write('7')"), 60),
        ]

    def gates(place):
        number = lambda: (place.out / "number").read_text()  # noqa: E731
        return [
            Gate("low", number, 8),
            Gate("high", number, 8, True),
            Gate("CUDA", number, 8, needs="CUDA"),
        ]

    monkeypatch.setitem(run.PARTS, "a", (steps, gates))
    with pytest.raises(UserError, match=r"^part a failed: crashes, hangs, needs more, high; "):
        run.acceptance("a", out=tmp_path / "out", runs=tmp_path / "runs", toy=True)
    summary = json.loads((tmp_path / "out/a/summary.json").read_text())
    assert [row["status"].split(" (")[0] for row in summary["steps"]] == [
        "done", "done", "failed: it ended with 3", "failed: not done after 1 seconds",
        "failed: what it needs of a step before is not there", "done",
    ]  # fmt: skip
    assert [row["result"] for row in summary["gates"]] == ["pass", "FAIL", "skipped (no CUDA)"]
    assert "\nseen\n" in (tmp_path / "out/a/log.txt").read_text()
    assert re.search(r"high +7 +>= 8 +FAIL", capsys.readouterr().out)
    time.sleep(2.5)
    assert not left.exists()  # what a command had started has ended with it


def test_time_that_is_up(tmp_path, monkeypatch):
    """Catches a part that goes on after its time."""
    monkeypatch.setattr(run, "MINUTES", 0)
    steps = [Step("late", python("pass"), 60)]
    monkeypatch.setitem(run.PARTS, "c", (lambda place: steps, lambda place: []))
    with pytest.raises(UserError, match="late"):
        run.acceptance("c", out=tmp_path, runs=tmp_path, toy=True)
    assert "no time was left" in (tmp_path / "c/summary.json").read_text()


@pytest.mark.parametrize("name", ["out", "runs"])
def test_other_peoples_folders(tmp_path, monkeypatch, name):
    """Catches a run that empties a folder that no run made, or not that of a run before it."""
    steps = [Step("nothing", python("pass"), 60)]
    monkeypatch.setitem(run.PARTS, "a", (lambda place: steps, lambda place: []))
    mine = tmp_path / name / "a" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    folders = {"out": tmp_path / "out", "runs": tmp_path / "runs", "toy": True}
    with pytest.raises(UserError, match=f"{name}/a holds other files"):
        run.acceptance("a", **folders)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [mine]
    mine.unlink()
    run.acceptance("a", **folders)
    (mine.parent / "old").touch()
    run.acceptance("a", **folders)
    assert not (mine.parent / "old").exists()


def test_no_gpu(tmp_path):
    """Catches hours on a CPU, for a GPU that is not there."""
    with pytest.raises(UserError, match="TRY=1 tries it on a CPU"):
        run.acceptance("a", out=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "measured,limit,at_least,needs,device,toy,result",
    [
        (1.0, 1.0, False, None, "cpu", True, "pass"),
        (1.1, 1.0, False, None, "cuda", False, "FAIL"),
        (1.1, 1.0, True, "CUDA", "cuda", False, "pass"),
        (float("nan"), 1.0, False, None, "cuda", False, "FAIL"),
        (None, 1.0, False, "CUDA", "cuda", False, "NOT MEASURED"),
        (None, 1.0, False, "CUDA", "cpu", True, "skipped (no CUDA)"),
        (0.0, 1.0, False, "CUDA", "cpu", True, "skipped (no CUDA)"),
        (0.0, 1.0, False, "size", "cpu", True, "skipped (toy size)"),
    ],
)
def test_judge(measured, limit, at_least, needs, device, toy, result, place):
    """Catches a requirement that passes on what was not measured, or not on a GPU."""
    place.device, place.toy = device, toy
    read = (lambda: place.read("missing.json")) if measured is None else (lambda: measured)
    assert judge(Gate("x", read, limit, at_least, needs), place)["result"] == result


def measured(part, place):
    """What the gates of a part read from the results, by name."""
    _, gates = run.PARTS[part]
    return {gate.name: float(gate.measure()) for gate in gates(place)}


def test_gates_a(place):
    """Catches a mean where the worst counts, errors of one precision taken for the other's, and a
    run without tests that passes."""
    (place.out / "tests.xml").write_text(
        '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>'
    )
    errors = dict(out=1e-4, dq=2e-4, dk=3e-4, dv=4e-4, dlog_w=5e-4)
    rows = [dict(dtype="bfloat16", **errors), dict(dtype="float32", **errors | dict(dk=1.0))]
    write_json(place.out / "forms.json", {"rows": rows, "failed": [{}, {}]})
    losses = {"cuda": [3.0, 2.0, 1.0], "cpu": [3.0, 2.5, 1.1]}
    write_json(place.out / "steps.json", {"losses": losses})
    decoder = dict(samples_that_differ=2, graphs_seconds=0.1, eager_seconds=0.4)
    write_json(place.out / "decoder.json", decoder)
    assert list(measured("a", place).values()) == [3, 2, 5e-4, 1.0, 0.5, 2, 0.4]
    (place.out / "tests.xml").write_text('<testsuite tests="0" failures="0" errors="0"/>')
    assert judge(run.gates_a(place)[0], place)["result"] == "NOT MEASURED"


def test_gates_b(place):
    """Catches losses of the wrong run, or soft ones for those of decoding."""
    scored = {"loss-small": (2.0, 2.25), "loss-vanilla": (2.5, 2.5)}
    scored |= {"runs/few": (1.0, 1.0), "runs/cpu": (1.0, 1.5)}
    for name, (soft, hard) in scored.items():
        losses = {"soft": {"loss": soft}, "hard": {"loss": hard}}
        write_json(place.out / f"{name}.json", losses)
    (place.runs / "small").mkdir()
    losses = {"fixed": {"loss": 2.0}, "trained": {"loss": 2.125}}
    write_json(place.runs / "small/results.json", losses)
    assert list(measured("b", place).values()) == [-0.25, 0.25, 0.125, 0.5]


def test_gates_c(place):
    """Catches a plain row that counts as a form of the mask, a length that is left out, and a
    compiled step that is compared with one that is not."""

    def row(d, N, backend, ratio):
        return dict(d=d, N=N, backend=backend, time_ratio=ratio)

    rows = [row(56, 64, "plain", 1.0), row(56, 64, "flash", 1.3), row(56, 64, "cudnn", 1.2)]
    rows += [row(56, 128, "flash", 1.1), row(120, 64, "flash", 1.5), row(64, 64, "flash", 9.0)]
    write_json(place.out / "attention-cuda.json", {"rows": rows})
    for preset in run.STEPS_OF:
        seconds = {"plain": 1.0, "PonderLM-3": 1.2, "plain, --compile": 0.5, "--compile": 0.6}
        rows = [dict(case=x, seconds=s, mfu=0.3 / s) for x, s in seconds.items()]
        write_json(place.out / f"train-{preset}-cuda.json", {"rows": rows})
    found = measured("c", place)
    assert list(found.values()) == pytest.approx([1.2, 1.5, *3 * [1.2], 0.5, 0.5])


def test_gates_d(place):
    """Catches a gain of graphs at another batch, and saved time of decoding without graphs."""
    rows = [
        dict(batch=B, precision=x, graphs=g, tau=t, saved=saved if g == "on" else 0.1)
        | dict(always_tokens_per_second=(6.0 if g == "on" else 2.0) * B)
        for B in (1, 8, 32, 128) for x in ("float32", "bfloat16") for g in ("on", "off")
        for t, saved in ((0.1, 0.95), (1e-4, None))
    ]  # fmt: skip
    write_json(place.out / "decode-small-cuda-exit.json", {"exit": rows})
    rows = [dict(prompt=32, sequential_ratio=2.0), dict(prompt=512, sequential_ratio=12.0)]
    write_json(place.out / "decode-small-cuda-prompt.json", {"prompt": rows})
    assert list(measured("d", place).values()) == [3, 3, *4 * [0.95], 12]


def test_seconds_a_step(tmp_path):
    """Catches steps that are planned by a speed that counts the beginning of a training."""
    config = asdict(PRESETS["tiny"])
    corpus = {"name": "text", "train_tokens": 1, "val_tokens": 1, "sha256": ""}
    write_json(tmp_path / "train.json", {"config": config, "corpus": corpus})
    tokens = config["batch_size"] * config["model"]["block_size"]
    seconds = {10: 30.0, 20: 32.0, 30: 34.0}  # behind a start of 28 seconds, 0.2 a step
    rows = [
        {"step": n, "loss": 1.0, "tokens_per_second": n * tokens / s} for n, s in seconds.items()
    ]
    lines = [{"step": 0, "torch": "2"}, *rows, {"step": 30, "val": 1.0}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run.seconds_a_step(tmp_path) == pytest.approx(0.2)


def test_errors_of_forms(tmp_path, monkeypatch):
    """Catches an error that is not the form's: a bias of the wrong sign has to be seen, and a
    kernel that refuses is told."""
    attend = soft_mask_attention

    def broken(q, k, v, key_bias, backend):
        if backend == "eager":
            raise RuntimeError("no such kernel")
        return attend(q, k, v, 0.5 * key_bias, backend)

    for function, low, high in ((attend, 0, 1e-5), (broken, 0.01, 9)):
        monkeypatch.setattr("bench.checks.soft_mask_attention", function)
        forms((8,), 33, device="cpu", out=tmp_path)
        results = json.loads((tmp_path / "forms.json").read_text())
        (row,) = (r for r in results["rows"] if (r["backend"], r["dtype"]) == ("sdpa", "float32"))
        assert low < max(row[name] for name in ("out", "dq", "dk", "dv", "dlog_w")) < high
    told = {x["why"] for x in results["failed"] if x["backend"] == "eager"}
    assert told == {"RuntimeError: no such kernel"}


# -- The page --------------------------------------------------------------------------------------


def test_page():
    """Catches numbers in the section on CUDA that are not those of the files beside it."""
    text = PAGE.read_text(encoding="utf-8")
    shown = text.split(BEGIN)[1].split(END)[0]
    assert shown.strip("\n") == section(PAGE.parent / "figures" / "cuda")


def test_report(tmp_path, capsys):
    """Catches results of one part that replace those of another, a page whose other text changes,
    weights beside the page, and a part that did not run without a word."""
    (page := tmp_path / "docs/page.md").parent.mkdir()
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    with pytest.raises(UserError, match=r"holds no results; bash runs/gpu\.sh a makes some"):
        report(tmp_path / "none", page)
    gate = dict(gate="loss", measured=0.25, limit="<= 0", result="FAIL")
    steps = [dict(step="train", seconds=1.0, status="failed: it ended with 1")]
    machine = dict(device="cuda H200", torch="2.11", time="now")
    summary = dict(machine=machine, toy=False, commit="abc", gates=[gate], steps=steps)
    for part in "ab":
        folder = tmp_path / part / part
        folder.mkdir(parents=True)
        write_json(folder / "summary.json", summary)
        (folder / "small.tar.gz.00").write_text("weights")
        report(folder.parent, page)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"{END}\nafter\n")
    assert "| b | loss | 0.25 | <= 0 | FAIL |" in text and "old" not in text
    assert text.count("Not all was done: train (failed: it ended with 1).") == 2
    assert "- c, is it fast? Not run yet: `bash runs/gpu.sh c`." in text
    names = sorted(str(f.relative_to(page.parent)) for f in page.parent.rglob("*") if f.is_file())
    assert names == [f"figures/cuda/{x}/summary.json" for x in "ab"] + ["page.md"]
