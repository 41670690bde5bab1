"""The further forms of attention (`dense` also beside sdpa), and the choice among them."""

import pytest
import torch
from conftest import assert_is_attention, attention_inputs, outputs_and_gradients
from placement import TEST_DEVICE
from torch.backends import cuda as flags
from torch.nn.attention import flex_attention as flex_module

from attention import BACKENDS, augment, eager, sdpa
from kernels import attention
from kernels.attention import attend_to_slots, dense, fastest, find, flex, missing
from runtime import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("G", [4, 2])
def test_dense_scores_in_half_precision(G):
    """Catches scores, or differences of the backward pass, that are rounded to 8 bits, also under
    autocast: `dense` is about as near to float64 as the flash kernel."""
    leaves = attention_inputs(4, G, 65, 24, log_w=(-9, 0))
    leaves = [x.detach().bfloat16().requires_grad_() for x in leaves]
    leaves[3] = leaves[3].detach().float().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected, errors = outputs_and_gradients(eager, exact), []
    for form in (dense, sdpa):
        with torch.autocast("cpu", torch.bfloat16):
            found = outputs_and_gradients(form, leaves)
        pairs = zip(found, expected, strict=True)
        errors.append(torch.stack([(a - b).norm() / b.norm() for a, b in pairs]))
    assert (errors[0] < 2 * errors[1]).all(), errors


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """torch refuses gradients of FlexAttention on a CPU, but its definition has them."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_module, "_warn_once", lambda *_, **__: None, raising=False)


@pytest.mark.parametrize("G", [4, 2])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-11), (torch.float32, 5e-5)])
def test_flex_equals_eager(flex_on_cpu, G, dtype, tolerance):
    """Catches a bias on another key or of another row, a scale or a block mask that is wrong, and a
    bias without gradient. 140 slots are two blocks."""
    leaves = attention_inputs(4, G, 140, 16, dtype, log_w=(-8, 0))
    assert_is_attention(flex, leaves, tolerance)
    plain = eager(*leaves[:3], None)
    torch.testing.assert_close(flex(*leaves[:3], None), plain, atol=tolerance, rtol=0)


def test_flex_to_slots(flex_on_cpu):
    """Catches a block or a key that is seen too early, a scale of the wider heads, or a head group,
    where a token sees several slots of each. 140 tokens are two blocks, and one of both slots."""
    q, k, v, bias = attention_inputs(4, 2, 280, 16, log_w=(-8, 0))
    leaves = [q.detach()[:, :, :140].requires_grad_(), k, v, bias]
    forms = [lambda *x, f=f: attend_to_slots(*augment(*x), 16, f) for f in (flex, sdpa)]
    for a, b in zip(*(outputs_and_gradients(form, leaves) for form in forms), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_flex_is_compiled_once_a_length(flex_on_cpu):
    """Catches a bias that is part of the compiled code: each step would compile anew."""
    made = []
    torch._dynamo.reset()
    count = lambda graph, _: made.append(graph) or graph  # noqa: E731
    run = torch.compile(attention.biased_flex, dynamic=False, backend=count)
    for N, seed in ((12, 0), (12, 1), (20, 2), (12, 3)):
        leaves = attention_inputs(N=N, dtype=torch.float32, seed=seed)
        found = run(*leaves, attention.causal_blocks(N, CPU))
        torch.testing.assert_close(found, eager(*leaves), atol=1e-5, rtol=0)
    assert len(made) == 2


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_kernels_by_name(name, monkeypatch):
    """Catches a kernel that is not the one named, and a choice that outlives the call."""
    found = []

    def form(*args):
        on = flags.cudnn_sdp_enabled(), flags.flash_sdp_enabled()
        found.append((*on, flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()))
        return args[0]

    monkeypatch.setattr(attention, "sdpa", form)
    attention.FORMS[name](*attention_inputs())
    assert found == [(name == "cudnn", name == "flash", False, False)]
    assert flags.cudnn_sdp_enabled() and flags.math_sdp_enabled()


def test_fastest(monkeypatch, capsys):
    """Catches a choice that is not the fastest, one kernel that fails and takes all with it, a
    failure without its reason, and FlexAttention compiled where it cannot win."""
    times = {"sdpa": [3.0, 9.0, 4.0], "cudnn": [5.0, 2.0, 2.5], "flex": [1.0]}

    def measure(name, *_, **__):
        if name not in times:
            raise torch.OutOfMemoryError(f"{name} is out of memory\nsecond line")
        return times[name]

    def on_cuda(d, **kwargs):
        return fastest((2, 4, 12, d), 2, CUDA, torch.bfloat16, **kwargs)

    half, full = torch.bfloat16, torch.float32
    rule = {(512, half): "dense", (513, half): "sdpa", (12, full): "sdpa"}
    for (N, dtype), backend in rule.items():  # nothing is measured
        assert fastest((2, 4, N, 8), 2, CPU, dtype) == backend
        assert fastest((2, 4, N, 8), 2, torch.device("mps"), dtype) == "sdpa"
    monkeypatch.setattr(attention, "milliseconds", measure)
    assert on_cuda(56) == "cudnn" and on_cuda(64) == "flex"
    assert on_cuda(64, biased=False) == on_cuda(64, compiled=True) == "cudnn"
    assert on_cuda(56, slots=2) == "flex" and on_cuda(56, slots=2, compiled=True) == "sdpa"
    first = capsys.readouterr().out.splitlines()[0]
    assert "(2, 4, 12, 56), ms forward and backward: cudnn 2.50, sdpa 4.00; not flash: " in first
    assert first.endswith("flash is out of memory") and "fa2" not in first
    times.clear()
    with pytest.raises(UserError, match=r"not sdpa: .*use a smaller --micro-batch-size"):
        on_cuda(56)


HERE = attention.FORMS if torch.backends.cuda.is_built() else attention.ANYWHERE
CASES = [(name, 1) for name in HERE] + [
    (name, 2) for name in HERE if name in ("dense", "sdpa", "flex")
]


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name, slots", CASES)
def test_errors_on_a_device(name, slots, dtype, tolerance):
    """Catches a kernel of a GPU that computes something else, in outputs or gradients: relative
    errors against float64, where keys are of one slot of each token, and of two."""
    if needs := missing(name, TEST_DEVICE, dtype):
        pytest.skip(f"{name} needs {needs}")
    q, k, v, bias = attention_inputs(4, 2, 130 * slots, 56, log_w=(-8, 0))
    exact = [x.detach().to(dtype).double().requires_grad_() for x in (q[:, :, -130:], k, v)]
    leaves = [x.detach().to(dtype).requires_grad_() for x in exact]
    pairs = (find(name, TEST_DEVICE, dtype), [*leaves, bias.detach().float().requires_grad_()])
    found, expected = (
        outputs_and_gradients(
            form if slots == 1 else lambda *x, f=form: attend_to_slots(*augment(*x), 56, f), leaves
        )
        for form, leaves in (pairs, (dense, [*exact, bias]))
    )
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() / b.norm() < tolerance


def test_find():
    """Catches a silent fallback: what cannot run is refused by name, with the way out."""
    assert all(
        find(name, CPU, torch.float64) is attention.FORMS[name] for name in ("dense", "sdpa")
    )
    assert BACKENDS.items() <= attention.FORMS.items()
    assert find("flex", CUDA, torch.float32) is flex
    for name in attention.ON_CUDA:
        with pytest.raises(
            UserError, match=rf"'{name}' needs a CUDA device \(this is cpu\).*'sdpa'"
        ):
            find(name, CPU)
    with pytest.raises(UserError, match=r"'cudnn' needs half precision \(this is torch.float32\);"):
        find("cudnn", CUDA, torch.float32)
    with pytest.raises(UserError, match="'fa3' is not one of auto, eager, dense, sdpa, cudnn"):
        find("fa3", CPU)
