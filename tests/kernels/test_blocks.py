"""A training step with fast blocks is the same function, computed faster."""

import pytest
import torch
from conftest import LLAMA3, NEOX, small_model, tokens
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.attention import FORMS, DenseSoftmax
from kernels.blocks import FusedNorm, compile_blocks, for_products, use_fast_blocks
from train import objective


def loss_and_gradients(model, idx):
    loss, _, _ = objective(model, idx[:, :-1], idx[:, 1:], R=2)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        dict(method="mor-token"),  # whose rows have positions of their own
        dict(backbone="llama3", backbone_options=LLAMA3),
        NEOX | dict(backbone_options={"rotary_pct": 0.5}),  # which stays as it is
    ],
    ids=["llama", "mor", "llama3", "gpt_neox"],
)
def test_step_is_the_same(kwargs, recompute):
    """Catches a norm, product, rotation or attention of the fast step that differs: loss and all
    gradients; and an evaluation that is not that of the plain model, to the last bit."""
    model, idx = small_model(**kwargs).train(), tokens(B=2, T=9)
    model.recompute = recompute
    expected = loss_and_gradients(model, idx)
    with torch.no_grad():
        scored = model.eval()(idx, R=2).logits
    use_fast_blocks(model.train())
    model.backend = FORMS["dense"]
    for a, b in zip(loss_and_gradients(model, idx), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)
    model.backend = FORMS["sdpa"]
    with torch.no_grad():
        assert torch.equal(model.eval()(idx, R=2).logits, scored)


def test_gradient_of_the_norm():
    """Catches a wrong term of the gradient that RMSNorm's own formula gives."""
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: FusedNorm.apply(x, w, 1e-3), (x, w))
    expected = nn.functional.rms_norm(x, (8,), w, 1e-3)
    torch.testing.assert_close(FusedNorm.apply(x, w, 1e-3), expected, atol=1e-14, rtol=0)


def test_norms_are_fused_in_training_only(monkeypatch):
    """Catches norms that are left as they are, and states kept for a gradient nobody takes."""
    model, idx, made = small_model().train(), tokens(T=4), []
    apply = FusedNorm.apply
    monkeypatch.setattr(FusedNorm, "apply", lambda *x: made.append(1) or apply(*x))
    use_fast_blocks(model)
    with torch.no_grad():
        model(idx, R=0)
    model.eval()(idx, R=0)
    assert not made
    model.train()(idx, R=0)
    K, L = model.config.ponder_steps, model.config.num_hidden_layers
    assert len(made) == (K + 1) * (2 * L + 1)


class Casts(TorchDispatchMode):
    """Counts tensors that are cast to bfloat16, by their shape."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.shapes.append(tuple(out.shape))
        return out


def test_one_cast_for_several_products():
    """Catches a normed state that is cast anew for each product, and angles for each layer."""
    model = small_model().float().train()
    use_fast_blocks(model)
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
        model.transform(torch.randn(2, 6, 32), torch.arange(6))
    assert casts.shapes.count((2, 6, 32)) == 2 * 2  # before attention and MLP of two layers
    assert casts.shapes.count((6, 8)) == 2  # cos and sin
    with torch.autocast("cpu", torch.bfloat16):
        assert for_products(torch.ones(1)).dtype == torch.bfloat16
        assert for_products(torch.ones(1).double()).dtype == torch.float64
    assert for_products(torch.ones(1)).dtype == torch.float32


@pytest.mark.parametrize("backend", ["sdpa", "dense"])
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("method", ["ponderlm3", "grid"])
def test_compiled_blocks(method, compiler, backend, monkeypatch):
    """Catches a block that compiles to something else (loss and gradients to 1e-5 in float32), a
    block that is compiled for each layer or in pieces, and lengths, or passes of the grid, beyond
    torch's limit (8, here 2), which would run uncompiled without a word."""
    K, original, made = 2, nn.Module.compile, []

    def count(*graph):
        made.append(1)
        return torch._dynamo.lookup_backend(compiler)(*graph)

    monkeypatch.setattr(
        nn.Module, "compile", lambda block, **how: original(block, backend=count, **how)
    )
    torch._dynamo.reset()
    model, idx = small_model(method=method, ponder_steps=K).float().train(), tokens(B=2)
    model.backend = FORMS[backend]
    expected = loss_and_gradients(model, idx)
    use_fast_blocks(model, norms=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        compile_blocks(model)
        found = loss_and_gradients(model, idx)
    assert len(made) == K + 1
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "fast",
    [lambda x: FusedNorm.apply(x, x[0, 0], 1e-3), lambda x: DenseSoftmax.apply(x, x, x, 1.0)],
)
def test_no_second_derivative(fast):
    """Catches a gradient of the gradient that is wrong without a word."""
    x = torch.randn(2, 3, 4, requires_grad=True)
    (g,) = torch.autograd.grad(fast(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
