import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import small_model
from pretended_cuda import pretended_cuda
from pydantic import ValidationError

import train as train_module
from baselines import build, configure
from corpus.preparation import Windows
from engine.request import Options, Request
from interop import find_model, load
from model import PonderLM
from runtime import UserError
from train import learning_rate, train
from training import config as train_config
from training.config import TrainConfig, parse, read_settings, validation_windows
from training.runs import checkpoints, new_run, read_lines, step_of
from training.validation import TAUS, evaluate, reported


def test_training_learns_and_leaves_a_run(config, monkeypatch, tmp_path, capsys):
    """Catches a loop that does not learn, is not deterministic, or leaves out a promised file."""
    monkeypatch.chdir(tmp_path)
    run, results = train(config)
    entropy = json.loads((run / "results.json").read_text())["unigram_entropy"]
    assert results["fixed"]["loss"] < entropy
    names = {"config.json", "model.safetensors", "tokenizer.json", "train.json", "log.jsonl"}
    names |= {".lock", "loss.png", "results.json", "step-00000020", "step-00000030"}
    assert names == {p.name for p in run.iterdir()}
    rows = read_lines(run / "log.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [5, 10, 15, 20, 25, 30]
    assert [row["step"] for row in rows if "val" in row] == [10, 20, 30]
    config.name = "again"
    again, _ = train(config)
    a, b = (load(r).state_dict() for r in (run, again))
    assert all(torch.equal(a[k], b[k]) for k in a)
    with pytest.raises(UserError, match="--resume, or choose another --name"):
        train(config)
    assert "hard-stopped" in capsys.readouterr().out
    assert find_model(out=config.out) == again


def test_nanogpt_folder_trains_as_it_is(config, monkeypatch, tmp_path):
    """Catches a preset's tokenizer that is forced upon a folder of ids."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    folder = tmp_path / "ids"
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        np.arange(500, dtype=np.uint16).tofile(folder / name)
    config.data, config.steps = str(folder), 2
    run, _ = train(config)
    assert load(run).config.vocab_size == 50_304
    config.tokenizer, config.name = "bytes", "other"
    with pytest.raises(UserError, match=r"token id 499 in .*, beyond the vocabulary of 257"):
        train(config)


def test_micro_batches(config, monkeypatch, tmp_path):
    """Catches gradients of micro-batches that are summed, not averaged; Adam alone would hide it.
    Without the penalty, which counts the tokens of each micro-batch."""
    monkeypatch.chdir(tmp_path)
    config.model.penalty_weight, config.steps, config.log_every = 0.0, 3, 1
    whole, _ = train(config)
    config.micro_batch_size, config.name = 2, "micro"
    parts, _ = train(config)
    a, b = (load(r).state_dict() for r in (whole, parts))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-4, rtol=1e-3)
    a, b = (read_lines(r / "log.jsonl")[1] for r in (whole, parts))
    for name in ("grad_norm", "loss", "K_hat"):
        assert a[name] == pytest.approx(b[name], rel=1e-4)
    config.micro_batch_size = 3
    with pytest.raises(UserError, match="micro_batch_size 3 does not divide batch_size 8"):
        train(config)


def test_evaluation_against_the_definitions():
    """Catches a wrong truncation, a wrong mean, and steps counted at another tau."""
    model = small_model(router_scale=12.0)
    windows = Windows(torch.randint(31, (100,)).numpy().astype("uint16"), 8, seed=0)
    result = evaluate(model, windows, 5, torch.device("cpu"), R=21, tau_steps=0.3, batch_size=2)
    rows = torch.stack([torch.from_numpy(windows.window(i)) for i in range(5)])
    with torch.no_grad():
        h, s, log_w = model.jacobi(rows[:, :-1], R=21)
    nll = lambda x: -model.lm_head(x).log_softmax(-1).gather(-1, rows[:, 1:, None]).mean().item()  # noqa: E731
    assert result["loss"] == pytest.approx(nll((s[..., None] * h).sum(2)), abs=1e-6)
    for i in range(4):
        partial = (s[..., : i + 1, None] * h[:, :, : i + 1]).sum(2) / s[..., : i + 1].sum(-1)[
            ..., None
        ]
        assert result["truncated"][i] == pytest.approx(nll(partial), abs=1e-6)
        assert result["alone"][i] == pytest.approx(nll(h[:, :, i]), abs=1e-6)
        assert result["weight"][i] == pytest.approx(s[..., i].mean().item(), abs=1e-6)
    steps = (log_w.exp() >= 0.3).sum(-1) - 1
    assert result["steps"] == pytest.approx(steps.double().mean().item())
    assert sum(result["stopped"]) == pytest.approx(1)
    hard = evaluate(model, windows, 5, torch.device("cpu"), R=21, tau=0.3, tau_steps=0.3)
    out = model(rows[:, :-1], rows[:, 1:], R=21, tau=0.3)
    assert hard["loss"] == pytest.approx(out.loss.item(), abs=1e-6)


def test_permuted_steps():
    """Catches a control that permutes nothing, or takes other steps: as many steps in all, other
    losses, and the model's own router back in its place."""
    model = small_model(router_scale=12.0)
    router, model.backend = model.router, "fa2"  # which no evaluation in float32 could use
    windows = Windows(torch.arange(200).remainder(31).numpy().astype("uint16"), 8, seed=0)
    kwargs = dict(tau=0.3, tau_steps=0.3, batch_size=32)
    a = evaluate(model, windows, 20, torch.device("cpu"), **kwargs)
    b = evaluate(model, windows, 20, torch.device("cpu"), permute=True, **kwargs)
    assert a["stopped"] == b["stopped"] and abs(a["loss"] - b["loss"]) > 1e-3
    assert model.router is router and model.backend == "fa2"


def test_schedule_and_validation_file(config, monkeypatch, tmp_path):
    """Catches a schedule that is never applied, and validation on the training text."""
    monkeypatch.chdir(tmp_path)
    rates, files = [], []
    monkeypatch.setattr("train.learning_rate", lambda step, c: rates.append(step) or 0.0)
    load_tokens = train_config.load_tokens
    monkeypatch.setattr(
        train_config,
        "load_tokens",
        lambda f, split, *a: files.append(split) or load_tokens(f, split, *a),
    )
    config.steps = 3
    run, _ = train(config)
    assert sorted(set(rates)) == [0, 1, 2] and files == ["train", "val"]
    torch.manual_seed(config.seed)
    start = PonderLM(config.model).state_dict()
    assert all(torch.equal(start[k], v) for k, v in load(run).state_dict().items())


@pytest.mark.parametrize(
    "field,value",
    [
        ("steps", 0),
        ("batch_size", 0),
        ("micro_batch_size", 0),
        ("log_every", 0),
        ("eval_every", 0),
        ("eval_windows", 0),
        ("seed", -1),
        ("tau", 2.0),
        ("clip", -1.0),
        ("learning_rate", math.nan),
        ("warmup", 2.0),
        ("weight_decay", -1.0),
        ("betas", (0.9, 1.5)),
    ],
)
def test_settings_refused(config, field, value):
    """Catches a setting that fails after hours of training, and a run directory left behind."""
    wrong = value[1] if isinstance(value, tuple) else value
    with pytest.raises(ValidationError, match=rf"(?s){field}.*{re.escape(str(wrong))}"):
        replace(config, **{field: value})


def test_divergence_stops(config, monkeypatch, tmp_path):
    """Catches a training that goes on with nan, and a name that it then blocks."""
    monkeypatch.chdir(tmp_path)
    config.learning_rate, config.name = 1e12, "x"
    with pytest.raises(UserError, match=r"step \d+ .*not finite.*lower --learning-rate"):
        train(config)
    config.learning_rate, config.steps = 1e-2, 2
    train(config)


@pytest.mark.parametrize("tau_cost", [1e-4, 1e-2, 1e9])
def test_tau_is_chosen_by_its_cost(config, tau_cost, capsys):
    """Catches a tau that costs more, one that is not the largest, a choice by the windows that are
    reported, numbers of another tau, and commands whose `auto` is not it."""
    run, results = train(replace(config, tau_cost=tau_cost))
    (_, _, val), model, chosen = validation_windows(run), load(run), results["chosen"]
    kwargs = dict(windows=val, device=torch.device("cpu"))
    rows = torch.stack([torch.from_numpy(val.window(i)) for i in range(8, 16)])
    x, y = rows[:, :-1], rows[:, 1:]
    with torch.no_grad():
        loss = {tau: model.eval()(x, y, tau=tau).loss.item() for tau in (0, *TAUS)}
    cheap = [tau for tau in (0, *TAUS) if loss[tau] <= loss[0] + tau_cost]
    assert chosen["tau"] == max(cheap) and (tau_cost < 1 or chosen["tau"] == 0.5)
    again = evaluate(model, count=8, tau=chosen["tau"], tau_steps=chosen["tau"], **kwargs)
    assert chosen == {"tau": chosen["tau"], **again}
    assert f"at tau = {chosen['tau']:g} {again['steps']:.2f}" in capsys.readouterr().out
    assert Request(Options(run=str(run), tau="auto")).choice["tau"] == chosen["tau"]
    (run / "results.json").unlink()
    with pytest.raises(UserError, match="no tau that its training chose; give a number"):
        Request(Options(run=str(run), tau="auto"))


def test_windows_that_are_left_for_tau(config):
    """Catches reported windows that leave none to choose by, where there are few."""
    for there, count in ((100, 8), (16, 8), (15, 8), (9, 5), (2, 1), (1, 1)):
        assert reported(config, SimpleNamespace(count=there)) == count


@pytest.mark.parametrize("steps", [(6, 6), (6, 9), (10, 10), (30, 30)])
def test_the_step_that_is_not_finite(config, monkeypatch, tmp_path, steps):
    """Catches a step that nobody looks at because the next one, a checkpoint or the end comes
    first; a checkpoint of it; and the wrong number, where the steps after it are not, either."""
    first, last = steps
    monkeypatch.chdir(tmp_path)
    real, done = train_module.optimize, []

    def optimize(*args):
        done.append(1)
        logged = real(*args)
        if first <= len(done) <= last:
            logged["grad_norm"] = logged["grad_norm"] * math.inf
        return logged

    monkeypatch.setattr("train.optimize", optimize)
    with pytest.raises(UserError, match=rf"step {first} is not finite \(.*grad_norm inf"):
        train(replace(config, name="x", log_every=100))
    assert len(done) <= first + 1  # at most one step more
    assert [step_of(path) for path in checkpoints("out/x")] == [*range(10, first, 10)][-2:]


@pytest.mark.parametrize(
    "method,own", [("ponderlm3", 0), ("mor-expert", 0), ("mor-token", 2), ("ponderlm1", 0)]
)
def test_a_gpu_is_not_waited_for(config, monkeypatch, tmp_path, method, own):
    """Catches a step that stops the GPU: it waits for the step before and no other (mor-token for
    the lengths of each micro-batch, too), and copies once, its rows of tokens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("train.evaluate", lambda *_, **__: {"loss": 1.0})
    monkeypatch.setattr("train.final_report", lambda *_: {})
    shape = configure(config.model, method)
    config = replace(config, model=shape, steps=5, log_every=100, eval_every=100)
    config = replace(config, device="cuda", precision="bfloat16", micro_batch_size=4)
    if method == "ponderlm3":
        config.ponder_warmup = 3
    with pretended_cuda() as gpu:
        train(config)
    waits, copies = (
        {f"{file} {function}": n for (file, function, _), n in found.items()}
        for found in (gpu.waits(), gpu.moves("h2d"))
    )
    for at_the_ends in ("attention.py milliseconds", "train.py open_training"):
        del waits[at_the_ends]
    saved = ("interop/", "training/runs.py save_checkpoint")
    waits = {where: n for where, n in waits.items() if not where.startswith(saved)}
    expected = {
        "training/runs.py Watch.look": 5,
        "baselines/mor.py TokenChoice.recursions": 5 * own,
    }
    assert waits == {where: n for where, n in expected.items() if n}
    del copies["train.py open_training"]
    assert copies == {"train.py to_device": 5}


def test_backend_of_a_training(config, monkeypatch, tmp_path):
    """Catches `auto` that is measured anew at each resume, or at another size than that of the
    longest pass, and a run that cannot go on elsewhere without saying how."""
    monkeypatch.chdir(tmp_path)
    train(replace(config, name="x", steps=1))
    assert read_settings("out", "x")[1].backend == "sdpa"
    with pytest.raises(UserError, match=r"'cudnn' needs a CUDA device .*; use 'sdpa', or 'auto'"):
        train(parse(["--resume", "--backend", "cudnn"]))
    asked = []

    def measured(shape, G, device, dtype, *, biased, compiled):
        asked.append((shape, G, biased, compiled))
        return "sdpa"

    monkeypatch.setattr("train.fastest_backend", measured)
    train(parse(["--resume", "--steps", "2"]))
    assert not asked
    cpu = torch.device("cpu")
    for method in ("ponderlm3", "pause", "looped", "mor-token", "vanilla"):
        shape = configure(replace(config.model, num_key_value_heads=1), method)
        train_module.choose_backend(replace(config, model=shape), 2, cpu, torch.float32)
    B, H, T, d = 4, 2, 16, 16  # 8 windows by 2 processes, K = 2
    sizes = [((B, H, N, d), 1, biased) for N, biased in ((3 * T, True), (3 * T, False))]
    sizes += 3 * [((B, H, T, d), 1, False)]
    assert asked == [(*size, False) for size in sizes]
    micro = replace(config, micro_batch_size=2, compile=True)
    train_module.choose_backend(micro, 1, cpu, torch.float32)
    assert asked[-1][0][0] == 2 and asked[-1][3]


def test_learning_rate():
    """Catches a schedule that starts at zero, overshoots, or does not end at a tenth."""
    config = TrainConfig(steps=100, warmup=0.1, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[0] == 0.1 and max(rates) == rates[9] == 1.0
    assert rates[100] == pytest.approx(0.1) and rates == [
        *sorted(rates[:10]),
        *sorted(rates[10:])[::-1],
    ]
    assert math.isclose(rates[55], 0.55)


def test_command_line():
    """Catches a preset whose values a flag does not change, and unknown flags that pass."""
    config = parse(["--preset", "70m", "--steps", "7", "--ponder-steps", "5"])
    assert config.steps == 7 and config.model.ponder_steps == 5 and config.model.hidden_size == 512
    assert len(config.model.offset) == 6
    for argv in (["--ponder-step", "5"], ["--preset", "huge"], ["--steps", "many"]):
        with pytest.raises(SystemExit):
            parse(argv)


@pytest.mark.parametrize("preset,millions", [("70m", 70.5), ("410m", 406.6)])
def test_paper_sizes(preset, millions):
    """Catches a shape that is not the paper's: parameters without the router."""
    with torch.device("meta"):
        model = build(parse(["--preset", preset, "--method", "vanilla"]).model)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions


@pytest.mark.parametrize("wrong", [{"steps": "x"}, {"seed": [1]}, {"tau": "x"}, {"data": 5}])
def test_types_of_settings(wrong):
    """Catches a damaged train.json that is noticed only where the value is used."""
    with pytest.raises(ValidationError, match="Input should be a valid"):
        TrainConfig(**wrong)


def test_runs(tmp_path):
    """Catches a run that is overwritten, and a missing one without a word of what to do."""
    with pytest.raises(UserError, match=r"python train\.py"):
        find_model(out=tmp_path)
    with pytest.raises(UserError, match="x does not exist"):
        find_model(tmp_path / "x")
    assert new_run(tmp_path, None, "tiny").name.startswith("tiny-")
