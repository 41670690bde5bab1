"""train.py from its command line to the report of a run, and what it may not wait for."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import same_weights, small_model, tokens
from pretended_cuda import pretended_cuda
from pydantic import ValidationError

from attention import fa2
from baselines import configure
from corpus.preparation import Windows
from engine.request import Options, Request
from interop import find_model, load
from model import PonderLM
from runtime import UserError
from train import learning_rate, train
from training import config as train_config
from training.config import TrainConfig, parse, pick_backend, read_settings, validation_windows
from training.runs import checkpoints, new_run, read_lines
from training.validation import TAUS, choose_tau, evaluate, reported

CPU = torch.device("cpu")


def test_training_learns_and_leaves_a_run(config, capsys):
    """Catches a loop that does not learn, is not deterministic, or leaves out a promised file."""
    run, results = train(config)
    entropy = json.loads((run / "results.json").read_text())["unigram_entropy"]
    assert results["fixed"]["loss"] < entropy
    names = {"config.json", "model.safetensors", "tokenizer.json", "train.json", "log.jsonl"}
    names |= {".lock", "results.json", "step-00000020", "step-00000030"}
    assert names == {p.name for p in run.iterdir()}
    rows = read_lines(run / "log.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [5, 10, 15, 20, 25, 30]
    assert [row["step"] for row in rows if "val" in row] == [10, 20, 30]
    config.name = "again"
    again, _ = train(config)
    assert same_weights(load(run), load(again))
    with pytest.raises(UserError, match="--resume, or choose another --name"):
        train(config)
    assert "hard-stopped" in capsys.readouterr().out
    assert find_model(out=config.out) == again


def test_nanogpt_folder_trains_as_it_is(config, monkeypatch, tmp_path):
    """Catches a preset's tokenizer that is forced upon a folder of ids."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    folder = tmp_path / "ids"
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        np.arange(500, dtype=np.uint16).tofile(folder / name)
    config = replace(config, data=str(folder), steps=2, batch_size=1, eval_windows=1)
    monkeypatch.setattr("train.evaluate", lambda *_, **__: {"loss": 1.0})
    monkeypatch.setattr("train.final_report", lambda *_: {})
    run, _ = train(config)
    assert load(run).config.vocab_size == 50_304
    with pytest.raises(UserError, match=r"token id 499 in .*, beyond the vocabulary of 257"):
        train(replace(config, tokenizer="bytes", name="other"))


def test_micro_batches(config):
    """Catches gradients of micro-batches that are summed, not averaged; Adam alone would hide it.
    Without the penalty, which counts the tokens of each micro-batch."""
    config.model.penalty_weight, config.steps, config.log_every = 0.0, 3, 1
    whole, _ = train(config)
    parts, _ = train(replace(config, micro_batch_size=2, name="micro"))
    a, b = (load(r).state_dict() for r in (whole, parts))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-4, rtol=1e-3)
    a, b = (read_lines(r / "log.jsonl")[1] for r in (whole, parts))
    for name in ("grad_norm", "loss", "K_hat"):
        assert a[name] == pytest.approx(b[name], rel=1e-4)
    with pytest.raises(UserError, match="micro_batch_size 3 does not divide batch_size 8"):
        train(replace(config, micro_batch_size=3, name="third"))


def test_evaluation_against_the_definitions():
    """Catches a wrong truncation, a wrong mean, and steps counted at another tau."""
    model = small_model(router_scale=12.0)
    windows = Windows(tokens(T=100)[0].numpy().astype("uint16"), 8, seed=0)
    result = evaluate(model, windows, 5, CPU, R=21, tau_steps=0.3, batch_size=2)
    rows = torch.stack([torch.from_numpy(windows.window(i)) for i in range(5)])
    with torch.no_grad():
        h, s, log_w = model.jacobi(rows[:, :-1], R=21)
    nll = lambda x: -model.lm_head(x).log_softmax(-1).gather(-1, rows[:, 1:, None]).mean().item()  # noqa: E731
    assert result["loss"] == pytest.approx(nll((s[..., None] * h).sum(2)), abs=1e-6)
    for i in range(4):
        some = s[..., : i + 1, None]
        partial = (some * h[:, :, : i + 1]).sum(2) / some.sum(2)
        assert result["truncated"][i] == pytest.approx(nll(partial), abs=1e-6)
        assert result["alone"][i] == pytest.approx(nll(h[:, :, i]), abs=1e-6)
        assert result["weight"][i] == pytest.approx(s[..., i].mean().item(), abs=1e-6)
    steps = (log_w.exp() >= 0.3).sum(-1) - 1
    assert result["steps"] == pytest.approx(steps.double().mean().item())
    assert sum(result["stopped"]) == pytest.approx(1)
    hard = evaluate(model, windows, 5, CPU, R=21, tau=0.3, tau_steps=0.3)
    out = model(rows[:, :-1], rows[:, 1:], R=21, tau=0.3)
    assert hard["loss"] == pytest.approx(out.loss.item(), abs=1e-6)


def test_permuted_steps():
    """Catches a control that permutes nothing, or takes other steps: as many steps in all, other
    losses, and the model's own router back in its place."""
    model = small_model(router_scale=12.0)
    router, model.backend = model.router, fa2  # which no evaluation in float32 could use
    windows = Windows(torch.arange(200).remainder(31).numpy().astype("uint16"), 8, seed=0)
    kwargs = dict(tau=0.3, tau_steps=0.3, batch_size=32)
    a, b = (evaluate(model, windows, 20, CPU, permute=p, **kwargs) for p in (False, True))
    assert a["stopped"] == b["stopped"] and abs(a["loss"] - b["loss"]) > 1e-3
    assert model.router is router and model.backend is fa2


def test_schedule_and_validation_file(config, monkeypatch):
    """Catches a schedule that is never applied, and validation on the training text."""
    rates, files, load_tokens = [], [], train_config.load_tokens
    monkeypatch.setattr("train.learning_rate", lambda step, *_: rates.append(step) or 0.0)
    record = lambda f, split, *a: files.append(split) or load_tokens(f, split, *a)  # noqa: E731
    monkeypatch.setattr(train_config, "load_tokens", record)
    config.steps = 3
    run, _ = train(config)
    assert sorted(set(rates)) == [0, 1, 2] and files == ["train", "val"]
    torch.manual_seed(config.seed)
    assert same_weights(PonderLM(config.model), load(run))


@pytest.mark.parametrize(
    "wrong",
    [
        *(dict(steps=0), dict(micro_batch_size=0), dict(seed=-1), dict(tau=2.0), dict(clip=-1.0)),
        *(dict(learning_rate=math.nan), dict(warmup=2.0), dict(betas=(0.9, 1.5))),
        *(dict(steps="x"), dict(tau="x"), dict(data=5), dict(seed=[1])),
    ],
    ids=str,
)
def test_settings_refused(wrong):
    """Catches a setting that fails after hours of training, and a damaged train.json that is
    noticed only where the value is used."""
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        TrainConfig(**wrong)


def test_divergence_stops(config):
    """Catches a training that goes on with nan, and a name that it then blocks."""
    config = replace(config, name="x", steps=3, learning_rate=1e12)
    with pytest.raises(UserError, match=r"step \d+ .*not finite.*lower --learning-rate"):
        train(config)
    train(replace(config, steps=2, learning_rate=1e-2))


def test_tau_is_chosen_by_its_cost(config, capsys):
    """Catches a tau that costs more, one that is not the largest, a choice by the windows that are
    reported, numbers of another tau, and commands whose `auto` is not it."""
    run, results = train(replace(config, tau_cost=1e-2))
    (_, _, val), model, chosen = validation_windows(run), load(run), results["chosen"]
    rows = torch.stack([torch.from_numpy(val.window(i)) for i in range(8, 16)])
    x, y = rows[:, :-1], rows[:, 1:]
    with torch.no_grad():
        loss = {tau: model.eval()(x, y, tau=tau).loss.item() for tau in (0, *TAUS)}
    for cost in (1e-4, 1e-2, 1e9):
        tau = max(tau for tau in (0, *TAUS) if loss[tau] <= loss[0] + cost)
        assert choose_tau(model, val, 8, CPU, cost) == tau
    assert tau == 0.5 and chosen["tau"] == choose_tau(model, val, 8, CPU, 1e-2)
    again = evaluate(model, val, 8, CPU, tau=chosen["tau"], tau_steps=chosen["tau"])
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


@pytest.mark.parametrize("log_every, noticed", [(1, 6), (4, 8), (100, 10)])
def test_gradients_that_are_not_finite(config, monkeypatch, log_every, noticed):
    """Catches a checkpoint of what a gradient of nan has made of the weights, and a training that
    goes on behind the next line of its log, or the next checkpoint."""
    real, done = torch.nn.utils.clip_grad_norm_, []

    def clip(parameters, *args):
        done.append(parameters := [*parameters])
        if len(done) == 6:
            parameters[0].grad.fill_(torch.nan)
        return real(parameters, *args)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    with pytest.raises(UserError, match=rf"step {noticed} is not finite"):
        train(replace(config, name="x", steps=20, log_every=log_every))
    assert len(done) == noticed and checkpoints("out/x") == []


@pytest.mark.parametrize(
    "method,own",
    [("ponderlm3", 0), ("grid", 0), ("mor-expert", 0), ("mor-token", 2), ("ponderlm1", 0)],
)
def test_a_gpu_is_not_waited_for(config, monkeypatch, method, own):
    """Catches a step that stops the GPU: none is waited for but where a line is logged, at the end
    (and in mor-token for the lengths of each micro-batch); it copies once, its rows of tokens."""
    monkeypatch.setattr("train.evaluate", lambda *_, **__: {"loss": 1.0})
    monkeypatch.setattr("train.final_report", lambda *_: {})
    shape = configure(config.model, method)
    config = replace(config, model=shape, steps=3, log_every=100, eval_every=100)
    config = replace(config, device="cuda", precision="bfloat16", micro_batch_size=4)
    if method == "ponderlm3":
        config.model.reread = True
    with pretended_cuda() as gpu:
        train(config)
    waits, copies = (
        {f"{file} {function}": n for (file, function, _), n in found.items()}
        for found in (gpu.seen("wait"), gpu.seen("h2d"))
    )
    for at_the_ends in ("kernels/attention.py milliseconds", "training/config.py open_training"):
        del waits[at_the_ends]
    saved = ("interop/", "training/runs.py save_checkpoint")
    waits = {where: n for where, n in waits.items() if not where.startswith(saved)}
    expected = {"training/runs.py Session.log": 1}
    expected |= {"baselines/mor.py TokenChoice.recursions": 3 * own} if own else {}
    assert waits == expected
    del copies["training/config.py open_training"]
    assert copies == {"train.py to_device": 3}


def test_backend_of_a_training(config, monkeypatch):
    """Catches `auto` that is measured anew at each resume, or at another size than that of the
    longest pass, and a run that cannot go on elsewhere without saying how."""
    train(replace(config, name="x", steps=1))
    assert read_settings("out", "x")[1].backend == "sdpa"
    with pytest.raises(UserError, match=r"'cudnn' needs a CUDA device .*; use 'sdpa', or 'auto'"):
        train(parse(["--resume", "--backend", "cudnn"]))
    asked = []

    def measured(shape, G, device, dtype, *, biased, compiled, slots):
        asked.append((shape, G, biased, slots, compiled))
        return "sdpa"

    monkeypatch.setattr("kernels.attention.fastest", measured)
    train(parse(["--resume", "--steps", "2"]))
    assert not asked
    for method in ("ponderlm3", "pause", "looped", "mor-token", "vanilla", "grid"):
        shape = configure(replace(config.model, num_key_value_heads=1), method)
        pick_backend(replace(config, model=shape), 2, CPU, torch.float32)
    B, H, T, d = 4, 2, 16, 16  # 8 windows by 2 processes, K = 2
    sizes = [((B, H, N, d), 1, biased, 1) for N, biased in ((3 * T, True), (3 * T, False))]
    sizes += [*3 * [((B, H, T, d), 1, False, 1)], ((B, H, T, d), 1, True, 3)]
    assert asked == [(*size, False) for size in sizes]
    pick_backend(replace(config, micro_batch_size=2, compile=True), 1, CPU, torch.float32)
    assert asked[-1][0][0] == 2 and asked[-1][-1]


def test_learning_rate():
    """Catches a schedule that starts at zero, overshoots, or does not end at a tenth."""
    config = TrainConfig(steps=100, warmup=0.1)
    rates = [learning_rate(step, config, 1.0) for step in range(101)]
    assert rates[0] == 0.1 and max(rates) == rates[9] == 1.0
    assert rates[100] == pytest.approx(0.1) and math.isclose(rates[55], 0.55)
    assert rates == [*sorted(rates[:10]), *sorted(rates[10:])[::-1]]


def test_command_line():
    """Catches a preset whose values a flag does not change, and unknown flags that pass."""
    config = parse(["--preset", "70m", "--steps", "7", "--ponder-steps", "5"])
    assert config.steps == 7 and config.model.ponder_steps == 5 and config.model.hidden_size == 512
    assert len(config.model.offset) == 6
    for argv in (["--ponder-step", "5"], ["--preset", "huge"], ["--steps", "many"]):
        with pytest.raises(SystemExit):
            parse(argv)


def test_runs(tmp_path):
    """Catches a missing run without a word of what to do, and one whose name says nothing."""
    with pytest.raises(UserError, match=r"python train\.py"):
        find_model(out=tmp_path)
    with pytest.raises(UserError, match="x does not exist"):
        find_model(tmp_path / "x")
    assert new_run(tmp_path, None, "tiny").name.startswith("tiny-")
