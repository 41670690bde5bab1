"""A training step on a CPU is the same function, computed faster."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import small_model
from torch import nn

from attention import KeptSoftmax
from train import objective
from training import on_cpu


def test_gradient_of_the_norm():
    """Catches a wrong term of the gradient that RMSNorm's own formula gives."""
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: on_cpu.FusedNorm.apply(x, w, 1e-3), (x, w))
    expected = nn.functional.rms_norm(x, (8,), w, 1e-3)
    torch.testing.assert_close(on_cpu.FusedNorm.apply(x, w, 1e-3), expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_step_is_the_same(recompute):
    """Catches a norm or an attention of the fast step that differs: loss and all gradients."""
    found, model, idx = [], small_model().train(), torch.randint(31, (2, 9))
    model.recompute = recompute
    for backend in ("sdpa", "kept"):
        model.backend = backend
        loss, _, _ = objective(model, idx[:, :-1], idx[:, 1:], R=2)
        weights = list(model.parameters())
        found.append([loss, *torch.autograd.grad(loss, weights)])
        on_cpu.use_fused_norms(model)
    for a, b in pairwise(found):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, atol=1e-10, rtol=0)


def test_norms_are_fused_in_training_only(monkeypatch):
    """Catches norms that are left as they are, and states kept for a gradient nobody takes."""
    model, idx, made = small_model(), torch.randint(31, (1, 4)), []
    apply = on_cpu.FusedNorm.apply
    monkeypatch.setattr(on_cpu.FusedNorm, "apply", lambda *x: made.append(1) or apply(*x))
    on_cpu.use_fused_norms(model)
    with torch.no_grad():
        model(idx, R=0)
    assert not made
    model(idx, R=0)
    K, L = model.config.ponder_steps, model.config.num_hidden_layers
    assert len(made) == (K + 1) * (2 * L + 1)


@pytest.mark.parametrize("most", [2**25, 2**31])
def test_memory_of_an_older_glibc(most, monkeypatch):
    """Catches a threshold that is refused, so that one of 128 KiB is left for good."""
    asked = []
    libc = SimpleNamespace(mallopt=lambda what, size: asked.append((what, size)) or size <= most)
    monkeypatch.setattr(on_cpu.sys, "platform", "linux")
    monkeypatch.setattr(on_cpu.ctypes, "CDLL", lambda _: libc)
    on_cpu.keep_freed_memory()
    assert asked[0] == (on_cpu.M_TRIM_THRESHOLD, on_cpu.GIB)
    assert asked[-1] == (on_cpu.M_MMAP_THRESHOLD, min(most, on_cpu.GIB))


@pytest.mark.parametrize(
    "fast",
    [lambda x: on_cpu.FusedNorm.apply(x, x[0, 0], 1e-3), lambda x: KeptSoftmax.apply(x, x, x, 1.0)],
)
def test_no_second_derivative(fast):
    """Catches a gradient of the gradient that is wrong without a word."""
    x = torch.randn(2, 3, 4, requires_grad=True)
    (g,) = torch.autograd.grad(fast(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
