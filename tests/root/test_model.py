"""PonderLM: all tokens at once, one after another and from a cache are the same function; and its files."""

import math
import shutil

import helpers
import pytest
import torch
import torch.nn.functional as F
from helpers import PonderLM2, in_bytes, in_config, in_tensors, small_model, tokens
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.func import functional_call

from attention import LOG_W_HIDDEN, auto, eager, sdpa
from checkpoint import load, open_model, save
from common import UserError
from model import Config, PonderLM, has_settled
from router import mask_keys
from tokenizer import Tokenizer
from train import objective


class PrintedIndex(PonderLM):
    """Reading note 1: w_k on the key of slot k+1, as the paper's figure has it."""

    @staticmethod
    def mask_keys(log_w, tau=None):
        printed = F.pad(log_w[..., :-1], (1, 0))
        return (
            printed
            if tau is None
            else printed.masked_fill(mask_keys(log_w, tau) <= LOG_W_HIDDEN, LOG_W_HIDDEN)
        )


@pytest.mark.parametrize("kind", [PonderLM, PonderLM2, PrintedIndex])
@pytest.mark.parametrize("K", [0, 1, 3])
def test_jacobi_equals_sequential(kind, K):
    """Catches a wrong slot order, position, mask or router timing."""
    helpers.assert_jacobi_is_sequential(small_model(kind=kind, ponder_steps=K), printed=kind is PrintedIndex)


@pytest.mark.parametrize("K", [0, 1, 3])
def test_number_of_passes(K, monkeypatch):
    """Catches a bound or a tolerance that stops before the chain is settled, and idle passes."""
    model, calls, idx = small_model(ponder_steps=K), [], tokens(T=5, B=2)
    transform = model.transform
    monkeypatch.setattr(model, "transform", lambda *args: calls.append(1) or transform(*args))
    for how, passes in ((0, K + 1), (2, K + 3 if K else 1), (10**6, 5 * K + 1), (None, 5 * K + 1)):
        calls.clear()
        model.jacobi(idx, R=how, tolerance=0)
        assert len(calls) == passes
    with torch.no_grad():
        exact = model.jacobi(idx, R=27)[0]
        passes = []
        for tolerance in (1e-4, 1e-9):
            calls.clear()
            error = (model.jacobi(idx, tolerance=tolerance)[0] - exact).norm() / exact.norm()
            passes.append(len(calls))
            assert error < 2 * tolerance
            assert error > 0 or K < 3 or len(calls) == 5 * K + 1  # which is exact by all passes alone
        assert passes[0] < passes[1] or K < 3


def test_tolerance_by_type():
    """Catches an iteration in half precision that waits for float32's tolerance, and the reverse."""
    model, idx, calls = small_model(block_size=64).float(), tokens(T=64), []
    model.model.register_forward_pre_hook(lambda *_: calls.append(1))

    def passes(model, half=False, **how):
        calls.clear()
        with torch.no_grad(), torch.autocast(idx.device.type, torch.bfloat16, enabled=half):
            model.jacobi(idx, **how)
        return len(calls)

    single, half = passes(model), passes(model, half=True)
    assert half < single < 20 and passes(model, half=True, tolerance=1e-4) > 60
    assert passes(model.bfloat16()) < single
    a = torch.ones(100)
    for change, at_float32, at_bfloat16 in ((0.5e-4, True, True), (4e-3, False, True), (2e-2, False, False)):
        assert has_settled(a, a + change) == at_float32 == has_settled(a.double(), a.double() + change)
        assert has_settled(a.bfloat16(), a + change, tolerance=2 * change)
        with torch.autocast(a.device.type, torch.bfloat16):
            assert has_settled(a, a + change) == at_bfloat16
    assert has_settled(a.bfloat16(), (a + 8e-3).bfloat16())  # the next number of this type
    assert not has_settled(a.bfloat16(), (a + 4e-2).bfloat16())


@pytest.mark.parametrize("tau", [0, 1e-4, 0.3])
@pytest.mark.parametrize("alpha", [0.0, 2.0])
@pytest.mark.parametrize("kind,K", [(PonderLM, 3), (PonderLM, 1), (PonderLM, 0), (PonderLM2, 2)])
def test_hard_stopping_parallel_sequential_and_cached_agree(tau, kind, K, alpha):
    """Catches a key that stopping should hide, an integration that runs on, a wrong cache, an alpha that
    decoding ignores."""
    model = small_model(kind=kind, ponder_steps=K, router_scale=12.0)
    steps = helpers.assert_three_forms_agree(model, tau, alpha)
    if kind is PonderLM and K == 3 and tau == 0.3 and not alpha:
        assert 0 in steps and 3 in steps and len(set(steps)) > 2


@pytest.mark.parametrize("kind, low, high", [(PonderLM, 0, 1e-7), (PrintedIndex, 1e-3, math.inf)])
def test_mask_index(kind, low, high):
    """Reading note 1: masking slot k by w_k, soft and hard agree to 1e-7. By the printed index, w_(k-1),
    the slot after the last executed one stays visible, and the logits move by more than 1e-3."""
    assert low <= helpers.distance_of_masks(small_model(kind=kind, router_scale=2000.0)) < high


@pytest.mark.parametrize("backend", [auto, eager, sdpa])
@pytest.mark.parametrize("kwargs", [{}, {"tau": 0.3}, {"alpha": 1.0}])
@pytest.mark.parametrize("kind", [PonderLM, PonderLM2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_causality_to_the_bit(backend, kwargs, kind, dtype):
    """Catches any path from a token to an earlier output."""
    model = small_model(kind=kind).to(dtype)
    model.backend = backend
    idx = tokens(T=16, B=2)
    changed = idx.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 31
    with torch.no_grad():
        a, b = (model(x, R=3, **kwargs) for x in (idx, changed))
    for name in ("logits", "s", "log_w", "steps"):
        assert torch.equal(getattr(a, name)[:, :9], getattr(b, name)[:, :9]), name
    assert not torch.equal(a.logits[:, 9], b.logits[:, 9])


def test_k0_is_llama():
    """Catches a backbone that is not Llama's: logits of transformers' LlamaForCausalLM, float64."""
    transformers = pytest.importorskip("transformers")
    model = small_model(ponder_steps=0, head_dim=10, rms_norm_eps=1e-3, rope_theta=500.0)
    c = model.config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    names += ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    shape = {name: getattr(c, name) for name in names}
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    config = transformers.LlamaConfig(**shape, rope_parameters=rope)
    llama = transformers.LlamaForCausalLM(config).double().eval()
    weights = model.state_dict()
    del weights["router.proj.weight"]  # of one number, whose softmax is 1
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * c.scale
    llama.load_state_dict(weights)
    idx = tokens(T=20, B=2)
    with torch.no_grad():
        # transformers computes RMSNorm and RoPE in float32
        torch.testing.assert_close(model(idx).logits, llama(idx).logits, atol=2e-6, rtol=0)


def test_training_loss_and_its_gradient():
    """Catches a detach in the iteration, in attention or on the way to log w: the gradient is that of finite
    differences."""
    model, (idx, y) = small_model().train(), (tokens(T=6, B=2, seed=seed) for seed in (0, 1))
    torch.manual_seed(1)
    directions = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def loss(way):
        weights = {name: p + way * directions[name] for name, p in model.named_parameters()}
        return functional_call(model, weights, (idx, y), {"R": 2}).loss

    start = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, start, rtol=1e-5, atol=0)


def test_recompute():
    """Catches activations that are kept, and another gradient: equal to 1e-12, in float64."""
    model, idx, calls, found = small_model(penalty_weight=0.3).train(), tokens(B=2), [], []
    model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    for model.recompute in (False, True):
        model.zero_grad()
        loss, _, _ = objective(model, idx[:, :-1], idx[:, 1:], 2)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert len(calls) == (1 + 2) * (3 + 2 + 1)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    with torch.no_grad():
        model(idx, R=2)
    assert len(calls) == (1 + 2 + 1) * (3 + 2 + 1)  # nothing is computed twice without gradients


def test_logits_are_made_late():
    """Catches logits that cost memory in training: of a large vocabulary they are gigabytes."""
    model, heads = small_model(), []
    model.lm_head.register_forward_pre_hook(lambda *_: heads.append(1))
    out = model(tokens())
    assert not heads and out.logits.shape == (1, 10, 31)


@pytest.mark.parametrize(
    "wrong",
    [
        *(dict(ponder_steps=-1), dict(ponder_steps=1001), dict(hidden_size=0), dict(vocab_size=2**21)),
        *(dict(vocab_size=True), dict(num_hidden_layers="2"), dict(head_dim=7), dict(rope_theta=math.inf)),
        *(dict(num_key_value_heads=3), dict(hidden_size=30), dict(penalty="no"), dict(unknown=1)),
        *(dict(router_offset=(0.0, 1.0)), dict(router_offset=(0.0, 1.0, 2.0, math.nan))),
        *(dict(refinements=(3, 2)), dict(refinements=(-1, 2))),
    ],
    ids=str,
)
def test_config_refuses(wrong):
    """Catches a config that would fail later, far from its cause."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(**wrong)


@pytest.mark.parametrize("T", [0, 33])
def test_input_refused(T):
    """Catches a text that does not fit the window, and becomes an error of somebody else."""
    with pytest.raises(ValueError, match="tokens, but this model reads 1 to"):
        small_model()(tokens(T=T))


def test_initialisation():
    """Catches a wrong init: unit RMS of scaled embeddings, 1/sqrt(2L) into the residual stream."""
    torch.manual_seed(0)
    model = PonderLM(Config(hidden_size=256, num_hidden_layers=8)).requires_grad_(False)
    layer = model.model.layers[3]
    # a normal of this std cut at 3 std has 0.986 of it
    std = 0.986 * math.sqrt(2 / (5 * 256))
    assert layer.mlp.up_proj.weight.std().item() == pytest.approx(std, rel=0.02)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(std / 4, rel=0.02)
    assert layer.self_attn.o_proj.weight.std().item() == pytest.approx(std / 4, rel=0.02)
    embeddings = model.model.embed_tokens.weight * model.config.scale
    assert embeddings.square().mean().sqrt() == pytest.approx(0.986, rel=0.02)
    assert not model.router.proj.weight.any()


# -- Files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_files(tied, tmp_path):
    """Catches a parameter or setting lost in a file, weights kept twice or for one user, odd names."""
    how = dict(tie_word_embeddings=tied, router_offset=(0.0, 1.0, 2.0, 0.5), refinements=(1, 4))
    model, blocks = (small_model(**how).float() for _ in range(2))
    blocks.model.layers = torch.nn.ModuleList(map(torch.compile, blocks.model.layers))
    for name, saved in (("plain", model), ("whole", torch.compile(model)), ("blocks", blocks)):
        saved.tie_head()
        save(saved, tmp_path / name)
        again = load(tmp_path / name)
        assert again.config == model.config and not again.training
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
        with torch.no_grad():
            assert torch.equal(again(tokens(), R=3).logits, model(tokens(), R=3).logits)
        names = load_file(tmp_path / name / "model.safetensors").keys()
        assert not any("_orig_mod" in name for name in names) and ("lm_head.weight" in names) != tied
        modes = {file.name: file.stat().st_mode for file in (tmp_path / name).iterdir()}
        assert modes.keys() == {"config.json", "model.safetensors"} and len({*modes.values()}) == 1


@pytest.mark.parametrize(
    "damage, message",
    [
        (shutil.rmtree, "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (in_bytes(lambda _: b'{"format": ', "config.json"), ""),
        (in_bytes(lambda _: b"[]", "config.json"), ""),
        (in_bytes(lambda _: b"\1\0\0\0"), ""),
        (in_config(format="other"), "PonderLM-3"),
        (in_config(method="looped"), "python -m lab"),
        (in_config("rope_theta", "penalty"), "penalty, rope_theta"),
        (in_config(unknown=1), "unknown"),
        (in_config(hidden_size="32"), "hidden_size"),
        (in_config(router_offset=[0, 1]), "router_offset"),
        (in_config(hidden_size=2**20, vocab_size=2**20), "size"),  # terabytes that are not asked for
        (in_tensors(lambda tensors: tensors.pop("router.proj.weight")), "router.proj.weight"),
        (in_tensors(lambda tensors: tensors.update(other=torch.ones(1))), "other"),
        (in_tensors(lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)})), "norm"),
    ],
)
def test_damaged_files(damage, message, tmp_path):
    """Catches a damaged model that is read or asks for all memory, and a message without where and what."""
    folder = tmp_path / "run"
    save(small_model(), folder)
    Tokenizer.named("bytes").save(folder / "tokenizer.json")
    open_model(folder, "cpu")
    damage(folder)
    with pytest.raises((OSError, ValueError, RuntimeError, SafetensorError, TypeError)):
        load(folder)
    with pytest.raises(UserError, match=f"run cannot be read: .*{message}"):
        open_model(folder, "cpu")
