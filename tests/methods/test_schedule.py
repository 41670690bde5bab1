"""Methods that change in the course of their training: by training steps, however these are computed."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from lab_helpers import SHAPE, flags

from lab.engine.states import settle
from lab.figures.comparing import losses
from lab.figures.runs import read_runs
from lab.interop.warm_start import start_from
from lab.interop.weights import load
from lab.methods import PonderConfig, build, configure
from lab.methods.drawn import draw
from lab.train import LabConfig, train


@pytest.fixture
def settings(config):
    """A training of five steps of 8 windows."""
    return replace(LabConfig(**asdict(config)), name="x", steps=5, log_every=1, eval_every=2)


def depths(run):
    """How many steps a token took in each training step, by the log."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [row["K_hat"] for row in rows if "loss" in row]


@pytest.mark.parametrize(
    "method, taken",
    [("lowered", [2, 2, 1, 1, 1]), ("warmup", [2, 2, 1, 1, 0]), ("warmup-jacobi", [2, 2, 1, 1, 0])],
)
def test_depth_goes_by_training_steps(method, taken, settings, shape):
    """Catches a stage of so many micro-batches, and micro-batches of one step that take different depths."""
    shape = configure(shape, method, stage=2)
    weights = []
    for size in (8, 3, 1):
        run, results = train(replace(settings, name=f"by-{size}", micro_batch_size=size), shape)
        assert depths(run) == taken
        assert results["hard"]["steps"] == load(run).config.ponder_steps == taken[-1]
        weights.append(load(run).state_dict())
    for other in weights[1:]:
        for name, tensor in weights[0].items():
            torch.testing.assert_close(other[name], tensor, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method, left", [("lowered", 1), ("warmup", 0)])
def test_resumed_where_no_step_is_left(method, left, settings, shape):
    """Catches a depth that is set only when the next step is trained: the final evaluation was stopped, the
    training resumed, and its results and settings are of another K."""
    run, results = train(settings, configure(shape, method, stage=2))
    files = {name: (run / name).read_text() for name in ("results.json", "config.json")}
    (run / "results.json").unlink()
    run, again = train(replace(settings, resume=True), configure(shape, method, stage=2))
    assert again == results and again["hard"]["steps"] == left
    assert files == {name: (run / name).read_text() for name in files}


def test_resumed_in_the_middle(settings, shape):
    """Catches a schedule that begins anew when a training is resumed."""
    shape = configure(shape, "warmup", stage=2)
    whole, _ = train(settings, shape)
    train(replace(settings, name="y", steps=3), shape)
    resumed, _ = train(replace(settings, name="y", resume=True), shape)
    assert depths(resumed) == depths(whole) == [2, 2, 1, 1, 0]


def test_a_run_that_stops_between_two_stages(settings, shape):
    """Catches a depth that is lowered once more when the model is loaded: its config.json holds the K of the
    last step, not that of the first."""
    run, results = train(replace(settings, steps=3), configure(shape, "warmup", stage=2))
    assert depths(run) == [2, 2, 1]
    assert results["hard"]["steps"] == load(run).config.ponder_steps == 1


@pytest.mark.parametrize("steps, taken", [(2, [2, 2]), (4, [2, 2, 1, 1])])
def test_a_run_that_ends_with_a_stage(steps, taken, settings, shape):
    """Catches a model that is evaluated, saved and decoded at a depth it was never trained at: that of the
    stage after its last training step."""
    run, results = train(replace(settings, steps=steps), configure(shape, "warmup", stage=2))
    assert depths(run) == taken
    assert results["hard"]["steps"] == load(run).config.ponder_steps == taken[-1]
    (run / "results.json").unlink()
    run, again = train(replace(settings, steps=steps, resume=True), configure(shape, "warmup", stage=2))
    assert again == results and load(run).config.ponder_steps == taken[-1]


@pytest.mark.parametrize("method, K", [("warmup", 2), ("warmup-jacobi", 2), ("warmup-jacobi", 0)])
def test_the_embedding_fed_back(method, K):
    """Catches an embedding of another shape than the state in whose place it is fed back: a crash, or other
    losses than those of decoding."""
    shape = configure(PonderConfig(**SHAPE), method, ponder_steps=max(K, 1), fed_back="embedding")
    model = build(shape).double().eval()
    model.config.ponder_steps = K  # as after its last stage
    idx = torch.arange(6)[None]
    cache = model.new_cache()
    decoded = [model.ponder_token(token, i, cache)[0] for i, token in enumerate(idx[0].tolist())]
    torch.testing.assert_close(model(idx).logits[0], torch.stack(decoded))
    if model.iterates:
        found = settle(model, idx)
        torch.testing.assert_close(found.h[:, :, -1], model(idx).h[:, :, -1], atol=1e-4, rtol=0)


def test_a_warm_up_of_a_llama_in_two_processes(shape):
    """Catches a weight that gets no gradient once no state is fed back: with several processes the training
    would end there."""
    model = build(configure(shape, "warmup", stage=1, ponder_steps=1, reread=True)).train()
    model.seen += 1  # the stage without extra steps
    loss, _, _ = model.objective(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long), 1)
    loss.backward()
    assert model.config.ponder_steps == 0 and all(p.grad is not None for p in model.parameters())


def test_a_depth_that_is_never_drawn():
    """Catches a router that is lost to NaN once one of its weights s is rounded to 0."""
    shape = configure(PonderConfig(**SHAPE), "drawn", ponder_steps=1, drawn=0.0, router_offset=(0.0, 120.0))
    for entropy in (0.0, 0.1):
        model = build(replace(shape, entropy=entropy)).train()
        idx = torch.arange(8)[None]
        model.objective(idx, idx, 1)[0].backward()
        assert model.router.proj.weight.grad.isfinite().all()


def test_depths_are_drawn_by_window():
    """Catches draws by the place in a micro-batch: with others, or with two processes, another training."""
    windows = torch.arange(24).view(4, 6)
    steps, numbers = draw(windows, 7, 3)
    for part in (windows[:3], windows[3:]):
        at = slice(0, 3) if len(part) == 3 else slice(3, 4)
        assert torch.equal(draw(part, 7, 3)[0], steps[at]) and torch.equal(draw(part, 7, 3)[1], numbers[at])
    assert not torch.equal(draw(windows, 8, 3)[0], steps)  # another step draws others
    assert not torch.equal(numbers[0], numbers[1])


def test_drawn_depths_go_by_training_steps(settings, shape):
    """Catches a share of drawn tokens, or their depths, that depend on how a batch is split."""
    shape = configure(shape, "drawn", drawn=1.0, drawn_until=4, penalty_weight=0.0)
    one, _ = train(replace(settings, name="one"), shape)
    many, _ = train(replace(settings, name="many", micro_batch_size=3), shape)
    assert depths(one) == pytest.approx(depths(many), abs=1e-6)
    for name, tensor in load(one).state_dict().items():
        torch.testing.assert_close(load(many).state_dict()[name], tensor, atol=1e-4, rtol=0)


def test_a_new_training_begins_at_its_first_step(settings, shape):
    """Catches the steps of the model that a training begins from, counted as its own: it draws no depth."""
    for method in ("drawn", "lowered"):
        shape = configure(shape, method)
        run, _ = train(replace(settings, name=method), shape)
        assert load(run).seen == 5 and start_from(run, load(run).config).seen == 0


def test_what_a_lowered_depth_cost(settings, shape):
    """Catches K and slots of the last stage alone, in the table of the runs."""
    run, _ = train(settings, configure(shape, "lowered", stage=2))
    (found,) = read_runs(flags([run]))
    (row,) = losses(found, (), 0, "cpu")
    read = 5 * 8 * 16 / 1e6
    assert row["read"] == read and row["slots"] == pytest.approx(read * (3 + 3 + 2 + 2 + 2) / 5)
    assert found.K == 2 and found.model_config.ponder_steps == 1
