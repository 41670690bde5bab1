import math
import sys
import types

import pytest
import torch
from torch.backends import cuda as flags
from torch.nn import attention as kernels
from torch.nn.attention import flex_attention as flex_module

import attention
from attention import (
    BACKENDS,
    MASKED,
    attend_to_cache,
    augment,
    decoding_kernels,
    fastest_backend,
    key_channels,
    pick_backend,
    query_channels,
    soft_mask_attention,
)
from runtime import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def inputs(H=4, G=4, N=17, d=8, dtype=torch.float64, log_w=(-80.0, 0.0), seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, H, N, d, generator=g, dtype=dtype)
    k, v = (torch.randn(2, G, N, d, generator=g, dtype=dtype) for _ in range(2))
    low, high = log_w
    bias = low + (high - low) * torch.rand(2, N, generator=g, dtype=dtype)
    bias[:, 0] = 0  # the first slot of a sequence is always visible
    return [x.requires_grad_() for x in (q, k, v, bias)]


def outputs_and_gradients(function, leaves):
    out = function(*leaves)
    g = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


def literal(q, k, v, log_w):
    """Section 3.2.2 query by query, head by head."""
    out = torch.zeros_like(q)
    for b in range(q.size(0)):
        for h in range(q.size(1)):
            g = h * k.size(1) // q.size(1)
            for i in range(q.size(2)):
                scores = [
                    q[b, h, i] @ k[b, g, j] / q.size(-1) ** 0.5 + log_w[b, j] for j in range(i + 1)
                ]
                p = torch.stack(scores).softmax(0)
                out[b, h, i] = sum(p[j] * v[b, g, j] for j in range(i + 1))
    return out


def test_eager_is_the_definition():
    """Catches a wrong scale, bias, causal mask or head grouping in the reference itself."""
    leaves = inputs(H=4, G=2, N=5, d=4, log_w=(-5, 0))
    out = soft_mask_attention(*leaves, backend="eager")
    torch.testing.assert_close(out, literal(*leaves), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-11), (torch.float32, 5e-5)])
@pytest.mark.parametrize("H,G", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("N,d", [(1, 8), (17, 7), (33, 8), (40, 56), (19, 64)])
@pytest.mark.parametrize("backend", ["sdpa", "kept"])
def test_forms_equal_eager(backend, dtype, tolerance, H, G, N, d):
    """Catches errors of the augmentation (scale, channel, padding) in outputs and all gradients."""
    leaves = inputs(H, G, N, d, dtype)
    expected = outputs_and_gradients(attention.eager, leaves)
    actual = outputs_and_gradients(attention.FORMS[backend], leaves)
    for name, a, b in zip(("out", "dq", "dk", "dv", "dlog_w"), actual, expected, strict=True):
        torch.testing.assert_close(
            a, b, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("backend", ["eager", "kept", "sdpa"])
@pytest.mark.parametrize("value", [0.0, -80.0, MASKED])
def test_extreme_masks(backend, value):
    """Catches NaN and overflow: w = 1 is plain attention, a masked key is one that is not there."""
    q, k, v, _ = inputs(N=12, dtype=torch.float32)
    bias = torch.zeros(2, 12)
    bias[:, 5] = value
    leaves = [q, k, v, bias.requires_grad_()]
    results = outputs_and_gradients(lambda *x: soft_mask_attention(*x, backend=backend), leaves)
    assert all(torch.isfinite(x).all() for x in results)
    if value == 0:
        expected = soft_mask_attention(q, k, v, None, backend)
    else:
        rest = [i for i in range(12) if i != 5]
        expected = results[0].clone()
        expected[:, :, rest] = soft_mask_attention(q[:, :, rest], k[:, :, rest], v[:, :, rest])
    torch.testing.assert_close(results[0], expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("H,G", [(4, 4), (4, 2)])
def test_kept_scores_in_half_precision(H, G):
    """Catches scores, or differences of the backward pass, that are rounded to 8 bits, also under
    autocast: `kept` is about as near to float64 as the flash kernel."""
    leaves = [x.detach().bfloat16().requires_grad_() for x in inputs(H, G, 65, 24, log_w=(-9, 0))]
    leaves[3] = leaves[3].detach().float().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = outputs_and_gradients(attention.eager, exact)
    errors = {}
    for name in ("kept", "sdpa"):
        with torch.autocast("cpu", torch.bfloat16):
            found = outputs_and_gradients(attention.FORMS[name], leaves)
        pairs = zip(found, expected, strict=True)
        errors[name] = torch.stack([(a - b).norm() / b.norm() for a, b in pairs])
    assert (errors["kept"] < 2 * errors["sdpa"]).all(), errors


@pytest.mark.parametrize("d", [24, 56, 64, 120, 128])
@pytest.mark.parametrize("dtype,bits", [(torch.bfloat16, 16), (torch.float16, 20)])
def test_bias_in_half_precision(d, dtype, bits):
    """Catches a bias that is rounded to 8 bits, or multiplied by a rounded sqrt(d) (0.2 % at 56):
    what queries and keys carry makes sqrt(d) log w to 16 bits in bfloat16, 20 in float16 (of which
    the smallest number is 6e-8)."""
    log_w = -torch.logspace(-3, 2, 400, dtype=torch.float64)
    q, k = query_channels(d, dtype).double(), key_channels(log_w, d, dtype).double()
    torch.testing.assert_close(k @ q / math.sqrt(d), log_w, rtol=2**-bits, atol=1e-7)
    assert key_channels(log_w, d, dtype).shape == (400, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [8, 24, 56, 128])
def test_masked_in_half_precision(d, dtype):
    """Catches a hidden key that overflows (-1e4 sqrt(128) is -1e5, beyond float16), or is seen."""
    q, k, v, _ = (x.to(dtype) for x in inputs(N=12, d=d, dtype=torch.float32))
    bias = torch.zeros(2, 12)
    bias[:, 5] = MASKED
    assert augment(q, k, v, bias)[1].isfinite().all()
    seen = soft_mask_attention(q, k, v, bias)
    rest = [i for i in range(12) if i != 5]
    without = soft_mask_attention(q[:, :, rest], k[:, :, rest], v[:, :, rest])
    torch.testing.assert_close(seen[:, :, rest], without, atol=2e-2, rtol=0)
    v[:, :, 5] = 1e4  # a weight of 1e-6 would be seen
    assert (soft_mask_attention(q, k, v, bias)[:, :, rest] - seen[:, :, rest]).abs().max() == 0


def test_cache_equals_parallel():
    """Catches a bias that does not travel with its cached key, and mixed-up head groups."""
    q, k, v, log_w = inputs(H=6, G=2, N=9, d=6)
    expected = attention.eager(q, k, v, log_w)
    qa, ka, va = augment(q, k, v, log_w)
    for i in range(9):
        out = attend_to_cache(qa[:, :, i : i + 1], ka[:, :, : i + 1], va[:, :, : i + 1], d=6)
        torch.testing.assert_close(out[:, :, 0], expected[:, :, i], atol=1e-12, rtol=0)


def test_gradient_of_the_mask_numerically():
    """Catches an analytic gradient that agrees between backends and is wrong in both."""
    leaves = inputs(H=2, G=1, N=5, d=4, log_w=(-3, 0))
    assert torch.autograd.gradcheck(attention.sdpa, leaves)


@pytest.mark.parametrize("H,G", [(4, 4), (4, 2)])
@pytest.mark.parametrize("d", [7, 56, 64])
def test_fa2_layout(monkeypatch, H, G, d):
    """Catches a wrong layout, scale or grouping in the call of flash-attn, where it is missing.

    The stand-in has flash_attn_func's documented signature: (B, N, H, d), GQA by fewer key heads.
    """

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        assert causal and dropout_p == 0
        assert q.shape[-1] % 8 == 0 and q.shape[:2] == k.shape[:2]  # (B, N, ...)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        scores = q @ k.mT * softmax_scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)

    stand_in = types.ModuleType("flash_attn")
    stand_in.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    leaves = inputs(H, G, 13, d)
    expected = outputs_and_gradients(attention.eager, leaves)
    for a, b in zip(outputs_and_gradients(attention.fa2, leaves), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """torch refuses gradients of FlexAttention on a CPU, but its definition has them."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_module, "_warn_once", lambda *_, **__: None, raising=False)


@pytest.mark.parametrize("H,G", [(4, 4), (4, 2)])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-11), (torch.float32, 5e-5)])
def test_flex_equals_eager(flex_on_cpu, H, G, dtype, tolerance):
    """Catches a bias on another key or of another row, a scale or a block mask that is wrong, and a
    bias without gradient. 140 slots are two blocks."""
    leaves = inputs(H, G, 140, 16, dtype, log_w=(-8, 0))
    expected = outputs_and_gradients(attention.eager, leaves)
    for a, b in zip(outputs_and_gradients(attention.flex, leaves), expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    plain = attention.eager(*leaves[:3], None)
    torch.testing.assert_close(attention.flex(*leaves[:3], None), plain, atol=tolerance, rtol=0)


def test_flex_is_compiled_once_a_length(flex_on_cpu):
    """Catches a bias that is part of the compiled code: each step would compile anew."""
    made = []

    def count(graph, _):
        made.append(graph)
        return graph

    torch._dynamo.reset()
    run = torch.compile(attention.biased_flex, dynamic=False, backend=count)
    for N, seed in ((12, 0), (12, 1), (20, 2), (12, 3)):
        leaves = inputs(N=N, dtype=torch.float32, seed=seed)
        found = run(*leaves, attention.causal_blocks(N, CPU))
        torch.testing.assert_close(found, attention.eager(*leaves), atol=1e-5, rtol=0)
    assert len(made) == 2


@pytest.mark.parametrize("name", ["cudnn", "flash", "fa4"])
def test_kernels_by_name(name, monkeypatch):
    """Catches a kernel that is not the one named, and a choice that outlives the call."""
    found = []

    def sdpa(*args):
        on = flags.cudnn_sdp_enabled(), flags.flash_sdp_enabled()
        found.append((*on, flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()))
        return args[0]

    monkeypatch.setattr(attention, "sdpa", sdpa)
    monkeypatch.setattr(attention, "use_flash", lambda version: found.append(version))
    attention.FORMS[name](*inputs())
    version = {"cudnn": [], "flash": [None], "fa4": ["FA4"]}[name]
    assert found == [*version, (name == "cudnn", name != "cudnn", False, False)]
    assert flags.cudnn_sdp_enabled() and flags.math_sdp_enabled()


@pytest.mark.skipif(not attention.has_versions(), reason="needs torch 2.13")
def test_version_of_flash(monkeypatch):
    """Catches FA4 that is registered again for every call, or stays where `flash` is asked for."""
    made, removed = [], []
    handle = types.SimpleNamespace(remove=lambda: removed.append(1))
    known = kernels._registry._FLASH_ATTENTION_IMPLS
    monkeypatch.setitem(known, "FA4", lambda: made.append(1) or handle)
    leaves = inputs()
    expected = attention.eager(*leaves)
    for form in (attention.fa4, attention.fa4, attention.flash, attention.flash):
        torch.testing.assert_close(form(*leaves), expected, atol=1e-11, rtol=0)
    assert (len(made), len(removed)) == (1, 1)


def test_decoding_kernels(monkeypatch):
    """Catches decoding that waits for a cuDNN plan at each slot, and training that loses cuDNN."""
    with decoding_kernels(CUDA):
        assert not flags.cudnn_sdp_enabled()
        assert flags.flash_sdp_enabled() and flags.mem_efficient_sdp_enabled()
    assert flags.cudnn_sdp_enabled()
    asked = []
    monkeypatch.setattr(
        attention, "decoding_kernels", lambda device: asked.append(device) or decoding_kernels(CUDA)
    )
    q, k, v, _ = inputs()
    attend_to_cache(q[:, :, -1:], k, v, 8)
    assert asked == [CPU]


def test_flash_attn_4_is_not_2(monkeypatch, tmp_path):
    """Catches `auto` that takes fa2, and fails, where flash-attn-4 alone is installed: its package
    makes flash_attn a name without flash_attn_func."""
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    (tmp_path / "flash_attn/cute/__init__.py").touch()
    (tmp_path / "flash_attn/cute/interface.py").write_text("_flash_attn_fwd = _flash_attn_bwd = 1")
    monkeypatch.syspath_prepend(tmp_path)
    attention.installed.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(attention, "has_versions", lambda: True)
        assert pick_backend("auto", "cuda") == "sdpa" and pick_backend("fa4", "cuda") == "fa4"
        with pytest.raises(
            UserError, match=r"'fa2' needs the package flash-attn \(not installed\)"
        ):
            pick_backend("fa2", "cuda")
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]
    attention.installed.cache_clear()


def test_fastest_backend(monkeypatch, capsys):
    """Catches a choice that is not the fastest, one kernel that fails and takes all with it, a
    failure without its reason, and FlexAttention compiled where it cannot win."""
    times = {"sdpa": [3.0, 9.0, 4.0], "cudnn": [5.0, 2.0, 2.5], "flex": [1.0]}

    def measure(name, *_, **__):
        if name not in times:
            raise torch.OutOfMemoryError(f"{name} is out of memory\nsecond line")
        return times[name]

    def resolve(d, **kwargs):
        return fastest_backend((2, 4, 12, d), 2, CUDA, torch.bfloat16, **kwargs)

    half, full = torch.bfloat16, torch.float32
    rule = {(512, half): "kept", (513, half): "sdpa", (12, full): "sdpa"}
    for (N, dtype), backend in rule.items():  # nothing is measured
        assert fastest_backend((2, 4, N, 8), 2, CPU, dtype) == backend
        assert fastest_backend((2, 4, N, 8), 2, torch.device("mps"), dtype) == "sdpa"
    monkeypatch.setattr(attention, "milliseconds", measure)
    assert resolve(56) == "cudnn" and resolve(64) == "flex" and resolve(64, biased=False) == "cudnn"
    first = capsys.readouterr().out.splitlines()[0]
    assert "(2, 4, 12, 56), ms forward and backward: cudnn 2.50, sdpa 4.00; not flash: " in first
    assert first.endswith("flash is out of memory") and "fa2" not in first
    times.clear()
    with pytest.raises(UserError, match=r"not sdpa: .*use a smaller --micro-batch-size"):
        resolve(56)


@pytest.mark.skipif(
    not torch.cuda.is_available() or not attention.installed("flash_attn:flash_attn_func"),
    reason="needs CUDA and flash-attn",
)
def test_fa2_on_cuda():
    """Catches what the stand-in cannot: the real kernel, in bfloat16, against eager in float32."""
    leaves = [x.detach().cuda() for x in inputs(4, 2, 130, 56, torch.float32, log_w=(-8, 0))]
    expected = outputs_and_gradients(attention.eager, [x.clone().requires_grad_() for x in leaves])
    half = [x.to(torch.bfloat16).requires_grad_() for x in leaves]
    for a, b in zip(outputs_and_gradients(attention.fa2, half), expected, strict=True):
        assert (a.float() - b).norm() / b.norm() < 2e-2


def test_auto_and_refusals():
    """Catches a silent fallback: what cannot run is refused by name, with the way out."""
    assert pick_backend("auto", "cpu") == "sdpa"
    assert set(attention.FORMS) == {*BACKENDS} - {"auto"}
    for name in BACKENDS[4:]:
        with pytest.raises(
            UserError, match=rf"'{name}' needs a CUDA device \(this is cpu\).*'sdpa'"
        ):
            pick_backend(name, "cpu")
    with pytest.raises(UserError, match=r"'cudnn' needs half precision \(this is torch.float32\);"):
        pick_backend("cudnn", "cuda", torch.float32)
    assert pick_backend("flex", "cuda", torch.float32) == "flex"
    with pytest.raises(ValueError, match="'fa3' is not one of auto, eager, kept, sdpa, cudnn"):
        pick_backend("fa3", "cpu")
    q, k, v, log_w = inputs()
    with pytest.raises(UserError, match="'flash' needs"):
        soft_mask_attention(q, k, v, log_w, backend="flash")
    with pytest.raises(ValueError, match=r"4 % 3"):
        soft_mask_attention(q, k[:, :3], v[:, :3], log_w)
    with pytest.raises(ValueError, match="key_bias"):
        soft_mask_attention(q, k, v, log_w[:, 1:])
    with pytest.raises(ValueError, match="do not fit"):
        soft_mask_attention(q, k[:, :, 1:], v, log_w)
