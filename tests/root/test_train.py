"""train.py: it learns, and whatever stops it, what was saved goes on as if nothing had happened."""

import json
import math
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import full_disk

import train
from data import Windows, open_corpus
from model import Config, PonderLM, UserError, load
from train import TrainConfig, learning_rate, objective, parse, read_run

ROOT = Path(__file__).parents[2]
TEXT = "the quick brown fox jumps over the lazy dog. " * 200
TINY = (
    "--preset tiny --hidden-size 32 --intermediate-size 64 --num-hidden-layers 1 --head-dim 16 "
    "--block-size 16 --ponder-steps 2 --refinements 0 2 --data text.txt --name x --steps 30 --batch-size 8 "
    "--micro-batch-size 4 --learning-rate 0.01 --log-every 1 --eval-every 10 --eval-windows 8 --device cpu "
    "--precision float32"
)
torch.set_num_threads(1)  # of products so small a second one only costs time


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """An empty directory with a text, in which all of this happens."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    return tmp_path


def go(flags="", **doors):
    """A training of a second by the flags of TINY and these, or with --resume by these alone."""
    flags = flags if "--resume" in flags else f"{TINY} {flags}"
    return train.train(*parse(shlex.split(flags)), **doors)


def interrupt_at(patch, step, number=signal.SIGTERM, function="learning_rate"):
    """Send this process one signal in a step, or in a function of train.py."""
    original, sent = getattr(train, function), []

    def interrupted(*args, **kwargs):
        if not sent and (function != "learning_rate" or args[0] == step):
            sent.append(os.kill(os.getpid(), number))
        return original(*args, **kwargs)

    patch.setattr(train, function, interrupted)


def checkpoint(run):
    return torch.load(run / "trainer.pt", weights_only=True)


def log(run):
    """All that is logged but times and starts."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows if "torch" not in row]


def assert_same(a, b):
    """Two runs have the same log and bit for bit the same weights, in both of their files."""
    assert log(a) == log(b)
    whole = checkpoint(a)["model"]
    for tensors in (checkpoint(b)["model"], load(a).state_dict(), load(b).state_dict()):
        assert tensors.keys() == whole.keys()
        assert all(torch.equal(whole[name], x.to(whole[name])) for name, x in tensors.items())


# -- It learns -------------------------------------------------------------------------------------


def test_training_learns_and_leaves_a_run(capsys):
    """Catches a loop that does not learn, is not deterministic, or leaves out a promised file; and a
    docstring that shows other output than there is."""
    run, results = go("--log-every 20")
    printed = capsys.readouterr().out
    assert results["fixed"]["loss"] < results["unigram_entropy"]
    assert results == json.loads((run / "results.json").read_text())
    names = {"config.json", "model.safetensors", "tokenizer.json", "trainer.pt", "train.json"}
    assert {p.name for p in run.iterdir()} == names | {"log.jsonl", "results.json", ".lock"}
    assert [row["step"] for row in log(run) if "loss" in row] == [20, 30]
    assert [row["step"] for row in log(run) if "val" in row] == [10, 20, 30]
    again, _ = go("--log-every 20 --name again")
    assert_same(run, again)
    with pytest.raises(UserError, match="--resume, or choose another --name"):
        go()
    shape = lambda text: [re.sub(r"[\d.,:]+| +|out/.*", "", x) for x in text.strip().splitlines()]  # noqa: E731
    promised = shape(train.__doc__[train.__doc__.index("step 40/40  loss") :])
    assert promised == shape(printed)[-len(promised) :]


def test_the_loop_written_out(monkeypatch):
    """Catches a step that is not the written-out one: R of (seed, step), the order of windows, the rate of
    the step and that of the router, the clipped gradient, the decay of matrices alone."""
    run, _ = go("--steps 3 --micro-batch-size 8 --seed 5 --step-price 0.1 --price-from 0.4 --router-rate 5")
    corpus = open_corpus("text.txt", "bytes")
    config, shape, _ = read_run(run)
    torch.manual_seed(5)
    shape.pop("method")
    model = PonderLM(replace(Config(**shape | {"refinements": (0, 2)}), vocab_size=257)).train()
    W = model.router.proj.weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not W]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
            {"params": [W], "weight_decay": 0.0, "times": 5},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    windows = Windows(corpus.train, 16, seed=5)
    for step in range(3):
        rows = torch.from_numpy(np.stack([windows.window(8 * step + i) for i in range(8)]))
        R = np.random.default_rng((5, step)).integers(0, 3)
        out = model(rows[:, :-1], rows[:, 1:], R=int(R))
        price = 0.1 if step >= 2 else 0.0  # from 0.4 of three steps on
        (out.loss + price * (1 + out.log_w[..., 1:] / math.log(1e4)).clamp(min=0).sum(-1).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = group.get("times", 1) * learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad()
    for name, x in load(run).state_dict().items():
        torch.testing.assert_close(x, model.state_dict()[name], atol=1e-6, rtol=1e-5)


def test_micro_batches():
    """Catches gradients of micro-batches that are summed, not averaged; Adam alone would hide it. Without
    the penalty, which is of the tokens of each micro-batch."""
    whole, _ = go("--penalty-weight 0 --steps 3 --micro-batch-size None")
    parts, _ = go("--penalty-weight 0 --steps 3 --micro-batch-size 2 --name parts")
    for a, b in zip(log(whole), log(parts), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    with pytest.raises(UserError, match=r"8 windows .* of 3 x 1 .*--micro-batch-size 8 would do"):
        go("--micro-batch-size 3 --name y")


def test_processes_that_do_not_fit():
    """Catches a micro-batch, and so a penalty, that depends on the number of processes without a word; and
    a CPU with a number that is taken for a GPU."""
    assert train.join_processes("cpu:0") == (0, 1, torch.device("cpu:0"))
    config = TrainConfig(batch_size=8)
    assert train.micro_batch(replace(config, micro_batch_size=4), 2) == train.micro_batch(config, 2) == 4
    with pytest.raises(UserError, match="--micro-batch-size 4 would do"):
        train.micro_batch(replace(config, micro_batch_size=8), 2)
    with pytest.raises(UserError, match="change --batch-size"):
        train.micro_batch(config, 3)
    with pytest.raises(UserError, match="as many processes as before"):
        train.micro_batch(replace(config, micro_batch_size=8, resume=True), 2)


@pytest.mark.parametrize("penalty", ["printed", "token"])
def test_objective(penalty):
    """Catches a penalty of tokens without a target, one without its weight, or of the wrong depths."""
    torch.manual_seed(0)
    model = PonderLM(Config(31, 32, 48, 1, 2, ponder_steps=2, penalty=penalty, penalty_weight=0.3))
    torch.nn.init.normal_(model.router.proj.weight, std=3)
    x, y = torch.randint(2, (2, 40)), torch.zeros(2, 40, dtype=torch.long)
    y[:, ::3] = -100
    with torch.no_grad():  # the more of a token is integrated, the better 0 is predicted
        direction = model(x, R=1).h.mean((0, 1, 2))
        model.lm_head.weight.zero_()[0] = 2 * direction
    loss, found, out = objective(model, x, y, 1)
    w = out.log_w[y != -100].exp()  # (n, 3)
    partial = [
        model.cross_entropy((out.s[..., :i][..., None] * out.h[:, :, :i]).sum(2), y) for i in (1, 2, 3)
    ]
    ce = torch.stack(partial, dim=-1)[y != -100]  # (n, 3)
    solved = lambda x: 1 - torch.sigmoid(10 * (x - 0.5))  # noqa: E731
    rho = solved(ce).mean(0) if penalty == "token" else solved(ce.mean(0))
    counts = [int(max(rho[k] - rho[k - 1], 0) * len(w)) for k in (1, 2)]
    assert max(counts) > 0
    expected = sum(w[:, k].sort().values[:n].mean() for k, n in zip((1, 2), counts, strict=True) if n)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(loss, out.loss + 0.3 * expected)
    assert objective(model, x, torch.full_like(y, -100), 1)[0] == 0  # nothing to predict
    model.config.penalty_weight = 0.0
    assert objective(model, x, y, 1)[1] == 0


def test_evaluation_against_the_definitions():
    """Catches a wrong mean, steps counted at another tau, windows left out, and a model that is left in
    evaluation mode."""
    torch.manual_seed(0)
    model = PonderLM(Config(31, 32, 48, 2, 4, block_size=8, router_offset=(0.0,) * 4)).double().train()
    torch.nn.init.normal_(model.router.proj.weight, std=2)
    windows = Windows(np.random.default_rng(0).integers(31, size=100).astype("uint16"), 8, seed=0)
    found = train.evaluate(model, windows, 5, R=21, tau=0.3, first=2)
    rows = torch.stack([torch.from_numpy(windows.window(i)) for i in range(2, 7)])
    with torch.no_grad():
        h, s, log_w = model.jacobi(rows[:, :-1], R=21, tau=0.3)
    steps = (log_w.exp() >= 0.3).sum(-1) - 1  # (5, 8)
    kept = s * (torch.arange(4) <= steps[..., None])
    logits = model.lm_head((kept[..., None] * h).sum(2))
    nll = -logits.log_softmax(-1).gather(-1, rows[:, 1:, None]).mean()
    assert found["loss"] == pytest.approx(nll.item(), abs=1e-9)
    assert found["steps"] == pytest.approx(steps.double().mean().item())
    assert found["stopped"] == pytest.approx([(steps == k).double().mean().item() for k in range(4)])
    assert found["weight"] == pytest.approx(s.mean((0, 1)).tolist())
    assert 0 < found["steps"] < 3 and model.training
    soft = train.evaluate(model, windows, 5, first=2)
    fixed = model(rows[:, :-1], rows[:, 1:])
    assert soft["loss"] == pytest.approx(fixed.loss.item(), abs=1e-9)
    assert soft["steps"] == pytest.approx(((fixed.log_w.exp() >= 1e-4).sum(-1) - 1.0).mean().item())


def test_evaluation_in_batches():
    """Catches batches that overlap, or a mean of means: 1,100 windows are more than one batch of them; and a
    window of more tokens than a batch."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [train.windows_at_a_time(T, cpu) for T in (64, 2048)] == [16, 1]
    assert [train.windows_at_a_time(T, gpu) for T in (256, 32_768)] == [64, 1]
    model = PonderLM(Config(31, 8, 8, 1, 1, block_size=8))
    windows = Windows(np.random.default_rng(0).integers(31, size=9000).astype("uint16"), 8, seed=0)
    found = train.evaluate(model, windows, 1100, R=0)["loss"]
    parts = [train.evaluate(model, windows, n, R=0, first=i)["loss"] * n for i, n in ((0, 300), (300, 800))]
    assert found == pytest.approx(sum(parts) / 1100, abs=1e-6)


def test_rates_and_doors():
    """Catches a group whose rate is not applied, and arguments that the loop passes by."""

    class Other(PonderLM):
        method = "other"

        def param_groups(self, router_rate):
            decided = [self.router.proj.weight, self.model.norm.weight]
            rest = [p for p in self.parameters() if all(p is not x for x in decided)]
            return [{"params": rest, "rate": 1.0}, {"params": decided, "rate": 0.0}]

    seen, asked = [], []

    def own(model, x, y, R, price):
        seen.append((type(model), len(x)))
        return objective(model, x, y, R)

    def corpus(data, tokenizer, vocab_size):
        asked.append((data, tokenizer, vocab_size))
        return open_corpus("text.txt", tokenizer, vocab_size)

    run, _ = go("--steps 2 --data its-own", make_model=Other, objective=own, corpus=corpus)
    assert seen == [(Other, 4)] * 4
    assert asked == [("its-own", "bytes", 257)]
    assert checkpoint(run)["model"]["router.proj.weight"].count_nonzero() == 0
    assert checkpoint(run)["model"]["model.norm.weight"].unique().tolist() == [1]
    with pytest.raises(UserError, match="method 'other': go on with python -m lab"):
        go("--resume")


def test_learning_rate():
    """Catches a schedule that starts at zero, overshoots, or does not end at a tenth."""
    config = TrainConfig(steps=100, warmup=0.1, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[0] == 0.1 and max(rates) == rates[9] == 1.0
    assert rates[100] == pytest.approx(0.1) and math.isclose(rates[55], 0.55)
    assert rates == [*sorted(rates[:10]), *sorted(rates[10:])[::-1]]


# -- Settings --------------------------------------------------------------------------------------


def test_command_line(capsys):
    """Catches a preset whose values a flag does not change or --help does not show, unknown flags that
    pass, and a wrong value with more than a sentence."""
    config, shape = parse(shlex.split("--preset 70m --steps 7 --ponder-steps 5"))
    assert config.steps == 7 and config.preset == "70m"
    assert shape.ponder_steps == 5 and shape.hidden_size == 512 and len(shape.offset) == 6
    assert parse(["--device", "cpu"]) == (TrainConfig(device="cpu"), train.PRESETS["tiny"][1])
    for argv in (["--ponder-step", "5"], ["--preset", "huge"], ["--steps", "many"], ["--method", "looped"]):
        with pytest.raises(SystemExit):
            parse(argv)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        parse(["--preset", "70m", "--help"])
    assert "28610" in capsys.readouterr().out
    with pytest.raises(UserError, match="hidden_size = 33 is not divisible"):
        parse(shlex.split("--preset 70m --hidden-size 33"))
    with pytest.raises(UserError, match=r"tau = 2.0: it must lie in 0 \.\. 1"):
        parse(["--tau", "2"])


@pytest.mark.parametrize(
    "wrong",
    [
        *(dict(steps=0), dict(micro_batch_size=0), dict(seed=-1), dict(tau=2.0), dict(clip=-1.0)),
        *(dict(learning_rate=math.nan), dict(warmup=2.0), dict(betas=(0.9, 1.5)), dict(precision="int8")),
        *(dict(steps="x"), dict(tau="x"), dict(data=5), dict(seed=[1]), dict(steps=True), dict(resume=1)),
        *(dict(name=""), dict(name=".."), dict(name="."), dict(name="a/b"), dict(eval_every=2.5)),
    ],
    ids=str,
)
def test_settings_refused(wrong):
    """Catches a setting that fails after hours of training, or writes where it should not."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainConfig(**wrong)


def test_folder_of_ids():
    """Catches a preset's tokenizer that is forced upon a folder of ids, and a text without a window."""
    Path("ids").mkdir()
    for name in ("train.bin", "val.bin"):
        np.arange(500, dtype=np.uint16).tofile(f"ids/{name}")
    assert train.pick_tokenizer(TrainConfig(data="ids")) is None
    assert train.pick_tokenizer(TrainConfig(data="ids", tokenizer="gpt2")) == "gpt2"
    assert train.pick_tokenizer(TrainConfig("small", data="text.txt")) == "bpe"
    with pytest.raises(UserError, match="smaller --block-size"):
        go("--block-size 100000")


# -- It goes on exactly ----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_resume_is_exact(monkeypatch, capsys, precision):
    """Catches any state that a checkpoint lacks: after three signals losses and weights are equal bit for
    bit, through several epochs. And --resume of another run than the last."""
    handler = signal.getsignal(signal.SIGINT)
    flags = f"--steps 70 --eval-every 20 --precision {precision}"
    whole, results = go(f"{flags} --name whole")
    for step in (7, 33, 39):  # between checkpoints, and just before one
        with monkeypatch.context() as patch:
            interrupt_at(patch, step, signal.SIGINT if step == 33 else signal.SIGTERM)
            run, nothing = go(flags)
        assert nothing is None and checkpoint(run)["step"] == step + 1
        assert "python train.py --resume --name x\n" in capsys.readouterr().out
        flags = "--resume"
    run, again = go(flags)
    assert_same(whole, run)
    assert results == again
    assert signal.getsignal(signal.SIGINT) is handler


def test_interrupted_evaluation(monkeypatch):
    """Catches a checkpoint that a signal within its evaluation prevents, a final evaluation that is waited
    for, or lost, and files of a write that was cut short, which stay for good."""
    whole, results = go("--name whole")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 0, function="evaluate")
        run, nothing = go()
    assert nothing is None and checkpoint(run)["step"] == 10
    assert [row["step"] for row in log(run) if "val" in row] == [10]
    for function in ("save_checkpoint", "final_report"):
        with monkeypatch.context() as patch:
            patch.setattr(train, "unigram_entropy", None)  # not reached
            patch.setattr(TrainConfig, "eval_every", 100)
            interrupt_at(patch, 0, function=function)
            assert go("--resume --eval-every 30")[1] is None
    assert checkpoint(run)["step"] == 30 and not (run / "results.json").exists()
    (run / "trainer.pt.tmp").touch()
    assert go("--resume --eval-every 10")[1] == results and not list(run.glob("*.tmp"))
    assert torch.equal(load(run).lm_head.weight, load(whole).lm_head.weight)


def test_more_steps(capsys):
    """Catches a longer training that starts anew or is refused, and a shorter one that passes."""
    run, _ = go("--steps 20")
    with pytest.raises(UserError, match="has done 20 steps already: go on with a larger --steps"):
        go("--resume --steps 10")
    go("--resume --name x --steps 24 --learning-rate 0.001")
    assert "resumed at step 20" in capsys.readouterr().out
    assert [row["step"] for row in log(run) if "loss" in row] == list(range(1, 25))
    starts = [json.loads(x) for x in (run / "log.jsonl").read_text().splitlines() if "torch" in x]
    assert starts[-1]["changed"] == {"steps": [20, 24], "learning_rate": [0.01, 0.001]}
    assert read_run(run)[0].steps == 24


def test_changed_settings_are_refused():
    """Catches a resumed training that is another one, without a word; and one that is touched."""
    run, _ = go("--steps 2")
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    flags = "--resume --batch-size 4 --ponder-steps 1 --log-every 7 --router-offset 0 1"
    with pytest.raises(UserError, match="without --resume") as error:
        go(flags)
    for line in ("batch_size: 8 -> 4", "ponder_steps: 2 -> 1", r"router_offset: None -> [0.0, 1.0]"):
        assert line in str(error.value)
    assert "log_every" not in str(error.value)
    Path("text.txt").rename("moved.txt")
    Path("text.txt").write_text("another text, longer than the one before. " * 300)
    with pytest.raises(UserError, match=r"corpus: .* -> "):
        go("--resume")
    assert before == {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    go("--resume --data moved.txt --steps 3")


def test_nothing_to_resume():
    """Catches a stack trace where there is no run, or a train.json that is none, or of an older version."""
    with pytest.raises(UserError, match=r"python train\.py"):
        parse(["--resume"])
    with pytest.raises(UserError, match=r"x is no run, .*: train one, without --resume"):
        parse(shlex.split("--resume --name x"))
    run, _ = go("--steps 1")
    config = json.loads((run / "train.json").read_text())
    old = {**config, "config": config["config"] | {"init_from": None}}
    for text in ("", "[]", '{"config": {}, "corpus": {}}', json.dumps(old), '{"config": {"model": {'):
        (run / "train.json").write_text(text)
        with pytest.raises(UserError, match=r"train\.json"):
            parse(["--resume"])
    early = {**config, "config": {k: v for k, v in config["config"].items() if k != "router_rate"}}
    (run / "train.json").write_text(json.dumps(early))
    assert read_run(run)[0].router_rate == 1  # to be scored; but not to go on, in another order of weights
    with pytest.raises(UserError, match=r"is of an earlier version: it can be sampled"):
        go("--resume --name x --steps 2")
    (run / "step-00000250").mkdir()
    with pytest.raises(UserError, match="can be sampled as it is, but not be resumed"):
        parse(["--resume"])


# -- Files that are whole --------------------------------------------------------------------------


def test_full_disk():
    """Catches a half-written checkpoint or log, and a message that helps nobody."""
    run, _ = go("--steps 10")
    before = (run / "trainer.pt").read_bytes()
    with full_disk(200_000), pytest.raises(UserError, match=r"cannot write out/x/trainer.pt .*free"):
        go("--resume --steps 20 --eval-every 5")
    assert (run / "trainer.pt").read_bytes() == before and not list(run.glob("*.tmp"))
    with full_disk(3000), pytest.raises(UserError, match=r"cannot write out/x/"):
        go("--resume --steps 400 --eval-every 400")
    go("--resume --steps 20")
    assert checkpoint(run)["step"] == 20


class Malice:
    def __reduce__(self):
        return os.mkdir, ("malice",)


def in_bytes(change):
    """A change of the bytes of trainer.pt."""
    return lambda file: file.write_bytes(change(file.read_bytes()))


def in_content(change):
    """A change of what trainer.pt holds, with the optimizer's state of its first parameter."""

    def damage(file):
        content = torch.load(file, weights_only=True)
        change(content, content["optimizer"]["state"][0])
        torch.save(content, file)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        in_bytes(lambda _: pickle.dumps(Malice())),
        in_bytes(lambda b: b[: len(b) // 2]),
        in_bytes(lambda _: b""),
        in_bytes(lambda _: b"hello"),
        in_content(lambda content, _: content.clear()),
        in_content(lambda content, _: content.update(step="3")),
        in_content(lambda content, _: content.update(step=-3)),
        in_content(lambda content, _: content.update(seconds=math.nan)),
        in_content(lambda content, _: content["model"].popitem()),
        in_content(lambda content, _: content["optimizer"].update(state={})),
        # which the fused kernel would read beyond its end
        in_content(lambda _, first: first.update(exp_avg=torch.zeros(3))),
        in_content(lambda _, first: first.update(exp_avg_sq=torch.zeros(3))),
        in_content(lambda _, first: first.update(exp_avg=first["exp_avg"].to_sparse())),
        in_content(lambda _, first: first.update(step=torch.zeros(3))),
    ],
)
def test_damaged_checkpoint(damage):
    """Catches code that a checkpoint runs, a stack trace for a damaged one, and files that are touched."""
    run, _ = go("--steps 2 --eval-every 2")
    damage(run / "trainer.pt")
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    with pytest.raises(UserError, match=r"trainer.pt is damaged .*model.safetensors; .*--name"):
        go("--resume --steps 4")
    assert not Path("malice").exists()
    assert before == {file: file.stat().st_mtime_ns for file in run.rglob("*")}


def test_a_view_for_a_state():
    """Catches a state that claims more memory than it has, which the fused kernel writes beyond."""
    run, _ = go("--steps 2")
    view = lambda x: torch.zeros(1, 1).expand(x.shape)  # noqa: E731
    in_content(lambda _, first: first.update(exp_avg_sq=view(first["exp_avg_sq"])))(run / "trainer.pt")
    model = load(run)
    optimizer = torch.optim.AdamW(model.param_groups(), fused=True)
    train.load_checkpoint(run, model, optimizer)
    for values in optimizer.state_dict()["state"].values():
        for value in values.values():
            assert value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes


def test_one_process_a_run():
    """Catches two processes that write one run, and a new one that overwrites what is there."""
    go("--steps 10")
    with pytest.raises(UserError, match="out/x exists"):
        go("--data not-read")
    with train.locked(Path("out/x")), pytest.raises(UserError, match="another process is training"):
        go("--resume --steps 30")
    for name in ("model.safetensors.index.json", "model.safetensors", "tokenizer.json", "step-00000250"):
        Path("out/own").mkdir()
        Path("out/own", name).write_text("kept")
        with pytest.raises(UserError, match="own exists"):
            train.check_free(Path("out/own"))
        Path("out/own", name).unlink()
        Path("out/own").rmdir()
    Path("out/own").mkdir()
    for name in (".lock", "train.json.tmp", "train.json", "tokenizer.json", "log.jsonl"):
        train.check_free(Path("out/own"))  # a training that was killed before its first checkpoint
        Path("out/own", name).touch()
    go("--name own --steps 1")


def test_divergence_stops():
    """Catches a training that goes on with nan, and a name that it then blocks."""
    with pytest.raises(
        UserError, match=r"step \d+ is not finite \(.*lower --learning-rate: nothing is saved"
    ):
        go("--steps 5 --learning-rate 1e12")
    run, _ = go("--steps 5")
    with pytest.raises(UserError, match=r"last checkpoint, --resume --name x"):
        go("--resume --steps 10 --learning-rate 1e12")
    assert checkpoint(run)["step"] == 5


@pytest.mark.parametrize("log_every, noticed", [(1, 6), (4, 8), (100, 10)])
def test_gradients_that_are_not_finite(monkeypatch, log_every, noticed):
    """Catches a checkpoint of what a gradient of nan has made of the weights, and a training that goes on
    behind the next line of its log, or the next checkpoint."""
    real, done = torch.nn.utils.clip_grad_norm_, []

    def clip(parameters, *args):
        done.append(parameters := [*parameters])
        if len(done) == 6:
            parameters[0].grad.fill_(torch.nan)  # and the penalty cannot count by losses of nan
        return real(parameters, *args)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    with pytest.raises(UserError, match=rf"step {noticed} is not finite"):
        go(f"--steps 20 --log-every {log_every}")
    assert len(done) == noticed and not Path("out/x/trainer.pt").exists()


def test_weights_that_are_not_finite(monkeypatch):
    """Catches a checkpoint of nan whose loss was still a number."""
    step = torch.optim.AdamW.step

    def poisoned(self, *args):
        step(self, *args)
        self.param_groups[1]["params"][0].data[3] = torch.nan

    monkeypatch.setattr(torch.optim.AdamW, "step", poisoned)
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: {"loss": 1.0})
    with pytest.raises(UserError, match=r"step 1 is not finite \(weights nan\)"):
        go("--eval-every 1")
    assert not Path("out/x/trainer.pt").exists() and not Path("out/x/model.safetensors").exists()


def test_torn_log():
    """Catches a log that a kill in the midst of a line makes unreadable, and rows kept twice."""
    whole, _ = go("--name whole")
    run, _ = go("--steps 20")
    with open(run / "log.jsonl", "a") as file:
        file.write(json.dumps({"step": 21, "loss": 7.0}) + '\n5\n{"step": 22, "lo')
    go("--resume --name x --steps 30 --learning-rate 0.01")
    assert [row["step"] for row in log(run) if "loss" in row] == list(range(1, 31))
    assert not any(row.get("loss") == 7.0 for row in log(run)) and len(log(whole)) == len(log(run))


# -- Processes -------------------------------------------------------------------------------------


def start(*command, stderr=subprocess.STDOUT):
    """A process of Python, with one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
    )


def output_of(process):
    """What a process prints that ends well."""
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return output


def start_patched(patches, flags="--steps 2"):
    """main of train.py, after some patches."""
    script = (
        f"import atexit, os, signal, sys, time; sys.path.insert(0, {str(ROOT)!r})\nimport model, train\n"
        f"sys.argv = ['train.py', *{shlex.split(f'{TINY} {flags}')}]; {patches}\n"
        "model.command_line(train.main)"
    )
    return start("-c", script, stderr=subprocess.PIPE)


def wait_for(text, process, stream="stdout"):
    while text not in (line := getattr(process, stream).readline()):
        assert line, process.communicate()


def test_signals():
    """Catches a Ctrl-C that loses the training or fails, and a second one that is not obeyed."""
    flags = [*shlex.split(TINY), "--steps", "100000"]
    for number in (signal.SIGINT, signal.SIGTERM):
        process = start(str(ROOT / "train.py"), *flags, "--name", number.name)
        wait_for("step 3/", process)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output  # so that a script goes no further
        assert f"python train.py --resume --name {number.name}" in output
        run = Path("out", number.name)
        assert checkpoint(run)["step"] == log(run)[-1]["step"]
    # A step that takes forever: the second signal does not wait for it.
    process = start_patched("train.learning_rate = lambda *_: (print('sleeping'), time.sleep(600))")
    wait_for("sleeping", process)
    process.send_signal(signal.SIGINT)
    wait_for("once more", process, "stderr")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("second", [
    "atexit.register(os.kill, os.getpid(), signal.SIGINT)",
    "train.resume_command = lambda run: os.kill(os.getpid(), signal.SIGINT)",
    "real = train.train; train.train = lambda *x: (real(*x), os.kill(os.getpid(), signal.SIGINT))[0]",
])  # fmt: skip
def test_ctrl_c_twice_in_the_final_evaluation(second):
    """Catches a stack trace behind the message that all is saved, wherever the second one comes."""
    process = start_patched(f"train.final_report = lambda *_: os.kill(os.getpid(), signal.SIGINT); {second}")
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors and "Exception" not in errors, errors
    assert "once more to exit at once" in errors and process.returncode in (130, -signal.SIGINT)
    assert checkpoint(Path("out/x"))["step"] == 2


@pytest.mark.parametrize(
    "function, call",
    [("torch.save", 2)]
    + [
        pytest.param(function, call, marks=pytest.mark.slow)
        for function in ("torch.save", "train.save", "train.write_json", "model.save_file")
        for call in (1, 2)
    ],
)
def test_kill_while_it_saves(function, call):
    """Catches a kill before, between or in the midst of the files of a save that leaves a run which cannot
    go on, or goes on otherwise, or whose model is half a file."""
    whole, _ = go("--name whole")
    kill = (
        f"import torch; calls = []; real = {function}; {function} = lambda *a, **k: "
        f"(calls.append(1), len(calls) == {call} and os.kill(os.getpid(), 9), real(*a, **k))[-1]"
    )
    process = start_patched(kill, "--steps 30")
    process.communicate(timeout=100)
    run = Path("out/x")
    if function == "train.write_json" and call == 1:  # killed before there was any setting
        assert not (run / "train.json").exists()
        run, _ = go()
    else:
        assert process.returncode == -9
        if (run / "model.safetensors").exists():
            load(run)
        run, _ = go("--resume --name x")
    assert_same(whole, run)
    assert (run / "results.json").exists()


@pytest.mark.slow
def test_kill_at_any_moment():
    """Catches a moment at which a kill leaves a run that cannot go on, or goes on otherwise."""
    flags = shlex.split(f"{TINY} --eval-every 3")
    begun = time.monotonic()
    output_of(start(str(ROOT / "train.py"), *flags, "--name", "whole"))
    duration = time.monotonic() - begun
    for share in (0.6, 0.8):
        process = start(str(ROOT / "train.py"), *flags)
        time.sleep(share * duration)
        process.kill()
        process.communicate()
        flags = ["--resume", "--name", "x"] if Path("out/x/train.json").exists() else flags
    output_of(start(str(ROOT / "train.py"), *flags))
    assert_same(Path("out/whole"), Path("out/x"))


@pytest.mark.slow
def test_two_processes():
    """Catches gradients summed and not averaged, a batch that depends on the number of processes, R drawn
    by each for itself, a second writer, a process that stops alone at its signal, and a resume that only
    the first process makes. In float64: in float32 Adam turns rounding errors of small gradients into 3e-6.
    """
    Path("double.py").write_text(
        f"import os, signal, sys, torch; sys.path.insert(0, {str(ROOT)!r}); import train\n"
        "torch.set_default_dtype(torch.float64)\n"
        "def rate(step, config, real=train.learning_rate):\n"
        "    if step == 4 and os.environ.get('RANK') == '1' and not config.resume and not sent:\n"
        "        sent.append(os.kill(os.getpid(), signal.SIGTERM))\n"
        "    return real(step, config)\n"
        "sent, train.learning_rate = [], rate\n"
        "if __name__ == '__main__':\n    train.command_line(train.main)\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "double.py"]
    flags = [*shlex.split(TINY), *shlex.split("--steps 8 --eval-every 4 --penalty token --name")]
    output_of(start("double.py", *flags, "one"))
    stopped, _ = start(*torchrun, *flags, "two").communicate(timeout=100)
    assert "step 5/8" in stopped and "python train.py --resume --name two" in stopped, stopped
    one, two = Path("out/one"), Path("out/two")
    assert checkpoint(two)["step"] == 5
    output = output_of(start(*torchrun, "--resume", "--name", "two"))
    assert output.count("step 8/8  loss") == output.count("resumed at step 5") == 1
    for name, x in checkpoint(one)["model"].items():
        assert x.dtype == torch.float64
        torch.testing.assert_close(x, checkpoint(two)["model"][name], atol=1e-9, rtol=0)
    for a, b in zip(log(one), log(two), strict=True):
        assert a == pytest.approx(b, abs=1e-6)
    a, b = (json.loads((run / "results.json").read_text()) for run in (one, two))
    assert a["hard"]["loss"] == pytest.approx(b["hard"]["loss"], abs=1e-9)
