"""The further forms of attention against the definition, channels in half precision, the choice."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_is_attention, attention_inputs, outputs_and_gradients
from placement import TEST_DEVICE
from pretended_cuda import pretended_cuda
from torch.backends import cuda as flags
from torch.nn.attention import flex_attention as flex_module

from attention import BACKENDS, MASKED, SHORT, eager
from lab.kernels import attention
from lab.kernels import flex as flex_form
from lab.kernels.attention import attend_to_slots, exact, fastest, find, flex, missing
from lab.kernels.channels import attend, augment, decoding_kernels, key_channels, query_channels
from model import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-11), (torch.float32, 5e-5)])
@pytest.mark.parametrize("G", [4, 2, 1])
@pytest.mark.parametrize("N,d", [(1, 8), (17, 7), (33, 8), (40, 56), (19, 64)])
def test_exact_equals_eager(dtype, tolerance, G, N, d):
    """Catches errors of the channels (scale, unit, padding) or a head group, in outputs and all
    gradients."""
    assert_is_attention(exact, attention_inputs(4, G, N, d, dtype), tolerance)


# -- One slot of all tokens against several --------------------------------------------------------


def to_slots_by_hand(q, k, v, log_w):
    """Token by token: of every slot, those of the tokens up to t."""
    (_, H, T, d), n = q.shape, k.size(2) // q.size(2)
    k, v = (x.repeat_interleave(H // k.size(1), dim=1) for x in (k, v))
    out = []
    for t in range(T):
        seen = [slot * T + j for slot in range(n) for j in range(t + 1)]
        scores = (k[:, :, seen] @ q[:, :, t, :, None])[..., 0] / math.sqrt(d) + log_w[:, None, seen]
        out.append((scores.softmax(-1)[:, :, None] @ v[:, :, seen])[:, :, 0])
    return torch.stack(out, dim=2)


def inputs_of_slots(T, n, G=2, d=16):
    q, k, v, log_w = attention_inputs(4, G, n * T, d, log_w=(-8, 0))
    return [q.detach()[:, :, :T].requires_grad_(), k, v, log_w]


def assert_same(forms, leaves, tolerance):
    for a, b in zip(*(outputs_and_gradients(form, leaves) for form in forms), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("G", [4, 2])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("short", [True, False])
def test_attend_to_slots(short, n, G, monkeypatch):
    """Catches a slot that is seen too early or without its log w, and mixed-up head groups, in the
    form for short texts and in the one for long ones."""
    assert n * 11 <= SHORT
    monkeypatch.setattr(attention, "SHORT", SHORT if short else 0)
    assert_same((attend_to_slots, to_slots_by_hand), inputs_of_slots(11, n, G), 1e-11)


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """torch refuses gradients of FlexAttention on a CPU, but its definition has them."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_module, "_warn_once", lambda *_, **__: None, raising=False)


@pytest.mark.parametrize("G", [4, 2])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-11), (torch.float32, 5e-5)])
def test_flex_equals_eager(flex_on_cpu, G, dtype, tolerance):
    """Catches log w on another key or of another row, a scale or a block mask that is wrong, and a
    log w without gradient. 140 slots are two blocks."""
    leaves = attention_inputs(4, G, 140, 16, dtype, log_w=(-8, 0))
    assert_is_attention(flex, leaves, tolerance)
    plain = eager(*leaves[:3], None)
    torch.testing.assert_close(flex(*leaves[:3], None), plain, atol=tolerance, rtol=0)


def test_flex_to_slots(flex_on_cpu):
    """Catches a block or a key that is seen too early, where a token sees several slots of each. 140
    tokens are two blocks, and one of both slots."""
    by_flex = lambda *leaves: attend_to_slots(*leaves, flex)  # noqa: E731
    assert_same((by_flex, attend_to_slots), inputs_of_slots(140, 2), 1e-11)


def test_flex_is_compiled_once_a_length(flex_on_cpu):
    """Catches a log w that is part of the compiled code: each step would compile anew."""
    made = []
    torch._dynamo.reset()
    count = lambda graph, _: made.append(graph) or graph  # noqa: E731
    run = torch.compile(flex_form.biased, dynamic=False, backend=count)
    for N, seed in ((12, 0), (12, 1), (20, 2), (12, 3)):
        leaves = attention_inputs(N=N, dtype=torch.float32, seed=seed)
        found = run(*leaves, flex_form.causal_blocks(N, CPU))
        torch.testing.assert_close(found, eager(*leaves), atol=1e-5, rtol=0)
    assert len(made) == 2


# -- log w in half precision -----------------------------------------------------------------------


@pytest.mark.parametrize("d", [24, 56, 64, 120, 128])
@pytest.mark.parametrize("dtype,bits", [(torch.bfloat16, 16), (torch.float16, 20)])
def test_bias_in_half_precision(d, dtype, bits):
    """Catches a log w that is rounded to 8 bits, or multiplied by a rounded sqrt(d) (0.2 % at 56):
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
    q, k, v, _ = (x.to(dtype) for x in attention_inputs(N=12, d=d, dtype=torch.float32))
    log_w = torch.zeros(2, 12)
    log_w[:, 5] = MASKED
    assert augment(q, k, v, log_w)[1].isfinite().all()
    seen = exact(q, k, v, log_w)
    rest = [i for i in range(12) if i != 5]
    without = exact(q[:, :, rest], k[:, :, rest], v[:, :, rest], log_w[:, rest])
    torch.testing.assert_close(seen[:, :, rest], without, atol=2e-2, rtol=0)
    v[:, :, 5] = 1e4  # a weight of 1e-6 would be seen
    assert (exact(q, k, v, log_w)[:, :, rest] - seen[:, :, rest]).abs().max() == 0


def test_decoding_kernels():
    """Catches decoding that waits for a cuDNN plan at each slot, and training that loses cuDNN."""
    with decoding_kernels(CUDA):
        assert not flags.cudnn_sdp_enabled()
        assert flags.flash_sdp_enabled() and flags.mem_efficient_sdp_enabled()
    assert flags.cudnn_sdp_enabled()
    with decoding_kernels(CPU):
        assert flags.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    "dtype, masked, shares",
    [("bfloat16", False, True), ("bfloat16", True, False), ("float32", 0, 0)],
)
def test_keys_that_heads_share(dtype, masked, shares, monkeypatch):
    """Catches N x N scores on CUDA: the only form there that shares keys in float32, or with a
    mask, has them."""
    own, asked = F.scaled_dot_product_attention, []

    def watch(*args, enable_gqa, **kwargs):
        asked.append(enable_gqa)
        return own(*args, enable_gqa=enable_gqa, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    with pretended_cuda():
        q, k, v, _ = (x.detach().to("cuda", getattr(torch, dtype)) for x in attention_inputs(G=2))
        mask = torch.ones(17, 17, dtype=torch.bool, device="cuda").tril() if masked else None
        found, expected = attend(q, k, v, 8, mask), eager(q, k, v, None)
    assert asked == [shares] and (found - expected).norm() < 1e-2 * expected.norm()


# -- The choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_kernels_by_name(name, monkeypatch):
    """Catches a kernel that is not the one named, and a choice that outlives the call."""
    found = []

    def form(*args):
        on = flags.cudnn_sdp_enabled(), flags.flash_sdp_enabled()
        found.append((*on, flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()))
        return args[0]

    monkeypatch.setattr(attention, "exact", form)
    attention.FORMS[name](*attention_inputs())
    assert found == [(name == "cudnn", name == "flash", False, False)]
    assert flags.cudnn_sdp_enabled() and flags.math_sdp_enabled()


def test_fastest(monkeypatch, capsys):
    """Catches a choice that is not the fastest, one kernel that fails and takes all with it, a
    failure without its reason, and FlexAttention compiled where it cannot win."""
    times = {"exact": [3.0, 9.0, 4.0], "cudnn": [5.0, 2.0, 2.5], "flex": [1.0]}

    def measure(name, *_, **__):
        if name not in times:
            raise torch.OutOfMemoryError(f"{name} is out of memory\nsecond line")
        return times[name]

    def on_cuda(d, **kwargs):
        return fastest((2, 4, 12, d), 2, CUDA, torch.bfloat16, **kwargs)

    monkeypatch.setattr(attention, "milliseconds", measure)
    for device in (CPU, torch.device("mps")):  # nothing is measured
        assert fastest((2, 4, 12, 64), 2, device, torch.bfloat16) == "auto"
    assert on_cuda(56) == "cudnn" and on_cuda(64) == "flex"
    assert on_cuda(64, biased=False) == on_cuda(64, compiled=True) == "cudnn"
    assert on_cuda(56, slots=2) == "flex" and on_cuda(56, slots=2, compiled=True) == "exact"
    first = capsys.readouterr().out.splitlines()[0]
    assert "(2, 4, 12, 56), ms forward and backward: cudnn 2.50, exact 4.00; not flash: " in first
    assert first.endswith("flash is out of memory") and "fa2" not in first
    times.clear()
    with pytest.raises(UserError, match=r"not exact: .*use a smaller --micro-batch-size"):
        on_cuda(56)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("biased", [True, False])
def test_what_is_measured(biased, slots):
    """Catches a measurement that cannot run, of keys without a log w or of several slots."""
    with pretended_cuda():
        of = dict(device="cuda", dtype=torch.float32)
        assert attention.milliseconds("exact", (2, 4, 12, 8), 2, biased, slots, **of) == 7 * [1.0]


HERE = attention.FORMS if torch.backends.cuda.is_built() else attention.FORMS.keys() - attention.ON_CUDA
CASES = [*((name, 1) for name in sorted(HERE)), *((name, 2) for name in ("exact", "flex") if name in HERE)]


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name, slots", CASES)
def test_errors_on_a_device(name, slots, dtype, tolerance):
    """Catches a kernel of a GPU that computes something else, in outputs or gradients: relative
    errors against float64, where keys are of one slot of each token, and of two."""
    if needs := missing(name, TEST_DEVICE, dtype):
        pytest.skip(f"{name} needs {needs}")
    q, k, v, log_w = attention_inputs(4, 2, 130 * slots, 56, log_w=(-8, 0))
    exactly = [x.detach().to(dtype).double().requires_grad_() for x in (q[:, :, -130:], k, v)]
    leaves = [x.detach().to(dtype).requires_grad_() for x in exactly]
    form = find(name, TEST_DEVICE, dtype)
    forms = (form, eager) if slots == 1 else (lambda *x: attend_to_slots(*x, form), to_slots_by_hand)
    found = outputs_and_gradients(forms[0], [*leaves, log_w.detach().float().requires_grad_()])
    expected = outputs_and_gradients(forms[1], [*exactly, log_w])
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() / b.norm() < tolerance


def test_find():
    """Catches a silent fallback: what cannot run is refused by name, with the way out."""
    for name in ("auto", "eager", "sdpa", "exact"):
        assert find(name, CPU, torch.float64) is attention.FORMS[name]
    assert BACKENDS.items() <= attention.FORMS.items()
    assert find("flex", CUDA, torch.float32) is flex
    for name in attention.ON_CUDA:
        with pytest.raises(UserError, match=rf"'{name}' needs a CUDA device \(this is cpu\).*'sdpa'"):
            find(name, CPU)
    with pytest.raises(UserError, match=r"'cudnn' needs half precision \(this is torch.float32\);"):
        find("cudnn", CUDA, torch.float32)
    with pytest.raises(UserError, match="'fa3' is not one of auto, eager, sdpa, fa2, exact, cudnn"):
        find("fa3", CPU)
