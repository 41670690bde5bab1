"""Every method: causal, decodes from its cache what it scores, survives a file, trains."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lab_helpers import LLAMA3, NEOX, decode, method_model, small_model, tokens

import lab.methods as methods
from attention import eager
from common import UserError
from lab.interop.weights import load
from lab.methods import FixedDepth, PonderConfig, PonderLM3, all_methods, build, configure, find
from lab.train import parse
from sample import stream
from train import train

METHODS = [kind.method for kind in all_methods()]


def texts(T=12):
    return tokens(T, B=2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("position", [10, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 11))])
def test_causal_to_the_bit(method, position):
    """Catches any look at later tokens, such as a choice of MoR's tokens by their rank."""
    model, idx = method_model(method), texts()
    with torch.no_grad():
        before = model(idx, R=8).logits
        for token in range(0, 31, 4):  # another token may choose another depth
            changed = idx.clone()
            changed[:, position] = token
            after = model(changed, R=8).logits
            assert torch.equal(before[:, :position], after[:, :position])
            assert token == idx[0, position] or not torch.equal(before[0, position], after[0, position])


TURNED = NEOX | dict(backbone_options={"rotary_pct": 0.5})
AFTER = NEOX | dict(backbone_options={"rotary_pct": 0.5, "parallel_residual": 0.0})
CASES = [(method, dict(ponder_steps=K)) for method in METHODS for K in (1, 3) if method != "vanilla"]
CASES += [(method, settings) for method in METHODS for settings in (TURNED, AFTER)]
CASES += [("vanilla", {}), ("ponderlm3", dict(backbone="llama3", backbone_options=LLAMA3))]


@pytest.mark.parametrize("method, settings", CASES)
def test_cached_decoding_equals_scoring(method, settings):
    """Any method and backbone: logits to 1e-9 in float64, the same steps, and no key too many."""
    model, taken = method_model(method, **settings), set()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # which a new model has at 0
            torch.nn.init.normal_(parameter, std=0.3)
    for idx in tokens(T=12, B=3):
        with torch.no_grad():
            out = model(idx[None], R=11 * model.config.ponder_steps, tau=0.1)
        logits, steps, cache = decode(model, idx, 0.1)
        assert (logits - out.logits[0]).abs().max() < 1e-9
        assert steps == out.steps[0].tolist()
        if hasattr(cache[0], "slots"):  # the grid's
            layers = cache[-1].slots
        else:
            layers = [cache[-1]] if hasattr(cache[0], "keys") else [loop[-1] for loop in cache]
        keys = torch.cat([layer.keys for layer in layers if layer.keys is not None], dim=2)
        per_layer = keys.unique(dim=2).size(2)  # Ouro has some of them in several loops
        assert per_layer == len(idx) + sum(steps)  # the cost table: 1 + steps a token
        taken.update(steps)
    assert len(taken) > 1 or method != "ponderlm3"


@pytest.mark.parametrize("method", METHODS)
def test_training_gradients(method):
    """Catches a detached path, an unused parameter, and `recompute` that changes a gradient."""
    model, idx = method_model(method).train(), texts()

    def loss():
        return model.objective(idx, idx, 1)[0]

    gradients = []
    for recompute in (False, True):
        model.recompute = recompute
        model.zero_grad()
        loss().backward()
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients.append([p.grad.clone() for p in parameters])
    for a, b in zip(*gradients, strict=True):
        assert torch.isfinite(a).all() and torch.allclose(a, b, atol=1e-12, rtol=0)
    with torch.no_grad():  # along the gradient the loss falls as it says
        before = loss()
        slope = sum(g.square().sum() for g in gradients[0])
        for p, g in zip(parameters, gradients[0], strict=True):
            p -= 1e-7 * g
        after = loss()
    assert abs((before - after) / (1e-7 * slope) - 1) < 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_train_and_evaluate(method, config, shape):
    """Catches a method that the root cannot train, evaluate, save, resume or sample from; a parameter or
    setting that a file loses, and a class that reads another's weights."""
    shape, config = configure(shape, method), replace(config, name=method, steps=3, eval_every=2)
    run, results = train(config, shape, build, find(method).objective)
    K = shape.ponder_steps
    assert results["hard"]["loss"] < 6 and len(results["hard"]["stopped"]) == K + 1
    run, again = train(replace(config, steps=4, resume=True), shape, build, find(method).objective)
    assert again["hard"]["loss"] != results["hard"]["loss"]
    model, idx, trained = load(run), texts(T=16), torch.load(run / "trainer.pt")["model"]
    assert type(model) is find(method) and model.config == shape
    assert trained.keys() == model.state_dict().keys()
    assert all(torch.equal(x, trained[name]) for name, x in model.state_dict().items())
    out = model(idx, idx, tau=1e-4)
    assert out.steps.float().mean() == K or "mor" in method or find(method).has_router
    found = [*stream(model, [3, 1, 4], 4, temperature=0)]
    expected = model(torch.tensor([[3, 1, 4]]), tau=1e-4)
    assert found[0] == (int(expected.logits[0, -1].argmax()), int(expected.steps[0, -1]))


# -- Each method against its equations, one sequence and one token at a time -----------------------


def run(model, rows, positions, norm=True):
    """The backbone on a list of vectors, by the definition of attention."""
    x, positions = torch.stack(rows)[None], torch.tensor(positions)
    return (model.model if norm else model.model.stack)(x, positions, None, eager)[0]


def embedding(model, token):
    return model.model.embed_tokens.weight[token] * model.config.scale


def compare(model, idx, logits, extra=0.0):
    """Logits, loss and all gradients of the model against those of the written-out form."""
    found, _, out = model.objective(idx, idx, None)
    assert (out.logits - logits).abs().max() < 1e-10
    compare_gradients(model, found, F.cross_entropy(logits.flatten(0, 1), idx.flatten()) + extra)


def compare_gradients(model, found, loss):
    a, b = (torch.autograd.grad(x, list(model.parameters())) for x in (found, loss))
    assert abs(found - loss) < 1e-10
    for x, y in zip(a, b, strict=True):
        assert x.abs().max() > 0 and (x - y).abs().max() < 1e-10


def compare_scores(model, idx, logits):
    """Logits in evaluation, and that who has left stays as it is. -> the steps"""
    out = model(idx, idx)
    last = model.lm_head(model.states(idx)[0][:, :, -1])
    assert (out.logits - logits).abs().max() < 1e-10 and (last - logits).abs().max() < 1e-10
    return out.steps


def test_pause():
    """Catches copies at other places or positions, an unscaled pause, another slot's logits."""
    model = method_model("pause", embed_scale=32**0.5)
    idx, S, logits = texts(T=6), 4, []
    row = model.pause.weight[0]
    for sequence in idx:
        rows, positions = [], []
        for t, token in enumerate(sequence):
            rows += [embedding(model, token)] + 3 * [row * 32**0.5]
            positions += 4 * [t]
        logits.append(model.lm_head(run(model, rows, positions)[S - 1 :: S]))
    compare(model, idx, torch.stack(logits))


@pytest.mark.parametrize("accumulate", [True, False])
def test_ponderlm1(accumulate):
    """Catches a mixture of part of the vocabulary or without its scale, and the other update."""
    model = method_model("ponderlm1", accumulate=accumulate, embed_scale=32**0.5, ponder_steps=2)
    idx, logits = texts(T=6), []
    for sequence in idx:
        first = rows = [embedding(model, token) for token in sequence]
        for _ in range(2):
            p = model.lm_head(run(model, rows, range(6))).softmax(-1)
            mixtures = [sum(p[t, v] * embedding(model, v) for v in range(31)) for t in range(6)]
            last = rows if accumulate else first
            rows = [e + m for e, m in zip(last, mixtures, strict=True)]
        logits.append(model.lm_head(run(model, rows, range(6))))
    compare(model, idx, torch.stack(logits))


def test_ouro():
    """Catches a loop without the norm between, another loss over the exits, a wrong sign of the entropy."""
    model, idx, loss = method_model("ouro", router_scale=1.0).train(), texts(T=6), 0
    targets = idx.flip(1)
    for sequence, ids in zip(idx, targets, strict=True):
        rows, left = [embedding(model, token) for token in sequence], 1.0
        for k in range(4):
            rows = list(run(model, rows, range(6)))
            h = torch.stack(rows)
            stop = torch.sigmoid(-model.router.proj(h)[:, 0]) if k < 3 else 1.0
            ce = F.cross_entropy(model.lm_head(h), ids, reduction="none")
            s, left = left * stop, left * (1 - stop)
            loss = loss + (s * ce).mean() / 2 + 0.05 * (s * s.log()).mean() / 2
    compare_gradients(model, model.objective(idx, targets, None)[0], loss)


def test_ouro_with_a_saturated_gate():
    """Catches a gradient that is NaN where a share of s is 0 in float32."""
    model, idx = small_model(method="ouro").float().train(), texts(T=6)
    torch.nn.init.constant_(model.router.proj.bias, 200.0)
    model.objective(idx, idx.flip(1), None)[0].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("training", [True, False])
def test_expert_choice(training):
    """Catches an inactive token that is seen or moved, a wrong count, gate or routers' loss."""
    model = method_model("mor-expert", ponder_steps=2).train(training)
    idx, logits, verdicts, counts = texts(T=10), [], [[], [], []], (10, 6, 3)
    for sequence in idx:
        rows, active = [embedding(model, token) for token in sequence], list(range(10))
        for r in range(3):
            score = {t: (model.routers[r].weight[0] * rows[t]).sum() for t in active}
            chosen = sorted(active, key=lambda t: score[t], reverse=True)[: counts[r]]
            if not training and r:
                chosen = [t for t in active if score[t].sigmoid() >= 0.5]
            for t in active:
                p = score[t].sigmoid()
                verdicts[r].append(-(p if t in chosen else 1 - p).log())
            active = sorted(chosen)
            if active:
                y = run(model, [rows[t] for t in active], active, norm=False)
            rows = list(rows)
            for t, state in zip(active, y, strict=False):
                rows[t] = rows[t] + 0.1 * score[t].sigmoid() * state
        logits.append(model.lm_head(model.model.norm(torch.stack(rows))))
    logits = torch.stack(logits)
    if training:
        compare(model, idx, logits, 1e-3 * sum(sum(v) / len(v) for v in verdicts))
    else:
        assert len(compare_scores(model, idx, logits).unique()) > 1


@pytest.mark.parametrize("training", [True, False])
def test_token_choice(training):
    """Catches a gate inside the recursion, an exited token that is seen, a wrong balancing loss."""
    model = method_model("mor-token").train(training)
    idx, logits, ps, depths, z = texts(T=10), [], [], [], []
    for sequence in idx:
        first = rows = [embedding(model, token) for token in sequence]
        scores = [model.depths.weight @ x for x in first]
        p = [score.softmax(-1) for score in scores]
        depth = [int(score.argmax()) + 1 for score in scores]
        for r in range(1, 5):
            active = [t for t in range(10) if depth[t] >= r]
            y = run(model, [rows[t] for t in active], active, norm=False) if active else []
            rows = list(rows)
            for t, state in zip(active, y, strict=True):
                rows[t] = state
        out = [first[t] + p[t].max() * rows[t] for t in range(10)]
        logits.append(model.lm_head(model.model.norm(torch.stack(out))))
        z += [score.exp().sum().log() ** 2 for score in scores]
        ps, depths = ps + p, depths + depth
    balance = sum(depths.count(r + 1) / 20 * sum(p[r] for p in ps) / 20 for r in range(4))
    logits = torch.stack(logits)
    assert len(set(depths)) > 2
    if training:
        compare(model, idx, logits, 0.1 * 4 * balance + 1e-5 * sum(z) / 20)
    else:
        steps = compare_scores(model, idx, logits)
        assert steps.flatten().tolist() == [d - 1 for d in depths]


def test_routing_is_not_rounded():
    """Catches a verdict of MoR's routers in bfloat16, which could fall on the other side of 1/2."""
    model = method_model("mor-token").float()
    x = model.embed(texts())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model.router_logits(model.depths, x)
    assert torch.equal(logits, F.linear(x, model.depths.weight))


# -- Settings --------------------------------------------------------------------------------------


def test_command_line():
    """Catches a method whose name does not choose its settings, or that other flags cannot."""
    model = lambda *flags: parse(["--preset", "tiny", *flags])[1]  # noqa: E731
    assert model("--method", "vanilla").ponder_steps == 0
    assert (model("--method", "ponderlm2").refinements, model().refinements) == ((2, 3), (1, 1))
    assert model("--method", "ponderlm2", "--refinements", "1", "1").refinements == (1, 1)


@pytest.mark.parametrize(
    "method,settings,message",
    [
        ("vanilla", dict(ponder_steps=3), "--ponder-steps 3 has no effect.* vanilla takes no extra steps"),
        ("grid", dict(ponder_steps=0), "--ponder-steps 0 is too small.* grid takes at least one extra step"),
        ("looped", dict(reread=True), r"looped does not use --reread \(given as True\): omit it"),
        ("ponderlm3", dict(accumulate=False), "accumulate"),
        ("mor", {}, "'mor'"),
        ("looped", dict(penalty_weight=0.1), r"looped does not use --penalty-weight \(given as 0.1\)"),
        ("ponderlm3", dict(backbone="gpt"), "no backbone 'gpt': choose --backbone from llama, gpt_neox"),
        (
            "ponderlm3",
            dict(backbone="gpt_neox", num_key_value_heads=2),
            r"gpt_neox does not use --num-key-value-heads \(given as 2\)",
        ),
        (
            "ponderlm3",
            NEOX | dict(backbone_options={"rotary_pct": 0.04}),
            "rotary_pct 0.04 would rotate 1 of the 32",
        ),
        ("ponderlm3", dict(backbone_options={"rotary_pct": 0.5}), "rotary_pct"),
        ("ponderlm3", dict(backbone="llama3", backbone_options={"rotary_pct": 0.5}), "rotary_pct"),
        ("ponderlm3", dict(backbone="llama3", backbone_options=LLAMA3 | {"factor": True}), "factor = True"),
        (
            *("ponderlm3", dict(backbone="llama3", backbone_options=LLAMA3 | {"low_freq_factor": 4.0})),
            "low_freq_factor = 4",
        ),
    ],
)
def test_refused_settings(method, settings, message):
    """Catches settings that the method, or its backbone, would silently not follow."""
    with pytest.raises((UserError, TypeError), match=message):
        build(configure(PonderConfig(), method, **settings))


def test_registry(monkeypatch):
    """Catches two methods of one title, one that takes the name of another, or passes for PonderLM-3."""
    kinds = all_methods()
    assert kinds[0] is PonderLM3 and len(kinds) == len({kind.title for kind in kinds})
    for own, words in (
        (dict(method="looped", title="My method"), "lab.methods.looped and lab.methods.pause"),
        (dict(method="mine"), "lab.methods.pause: the method 'mine' has no title"),
    ):
        kind = type("Mine", (FixedDepth,), own | {"__module__": "lab.methods.pause"})
        monkeypatch.setattr("lab.methods.pause.Mine", kind, raising=False)
        with pytest.raises(UserError, match=words):
            find("vanilla")


def test_initialisation_of_gpt_neox():
    """Catches loud layers into the residual stream, biases that are not zero, and a Llama by another name."""
    torch.manual_seed(0)
    config = configure(PonderConfig(), "ponderlm3", backbone="gpt_neox", hidden_size=256)
    model, std = build(config), (2 / (5 * 256)) ** 0.5
    for block in model.model.layers:
        for linear in (block.attention.dense, block.mlp.dense_4h_to_h):
            assert linear.weight.std().item() == pytest.approx(std / 8**0.5, rel=0.05)
        assert block.attention.query_key_value.weight.std().item() == pytest.approx(std, rel=0.05)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))


# -- A method of one's own -------------------------------------------------------------------------

MINE = """
from lab.methods import FixedDepth, PonderConfig
from model import validated_dataclass


@validated_dataclass
class MineConfig(PonderConfig):
    gain: float = 1.0  # of the states that are fed back


class Mine(FixedDepth):
    method, title = "mine", "My method"
    Config = MineConfig

    def feed_back(self, h, e):
        return super().feed_back(h, e) * self.config.gain
"""


def test_a_new_method_is_one_file(config, shape, monkeypatch, tmp_path):
    """Catches a list of methods somewhere else: a file in a folder has flags, files and title."""
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "mine.py").write_text(MINE)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path / "methods")])
    assert parse(["--preset", "tiny", "--method", "mine", "--gain", "-0.5"])[1].gain == -0.5
    shape = configure(shape, "mine", ponder_steps=1, gain=-0.5)
    run, _ = train(replace(config, steps=3), shape, build, find("mine").objective)
    model = load(run)
    assert (model.config.gain, model.title, len([*stream(model, [1], 3)])) == (-0.5, "My method", 3)
