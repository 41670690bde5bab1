"""router.py: probabilities at their extremes, against sums and loops that say plainly what they are."""

import math
import random

import pytest
import torch

from attention import LOG_W_HIDDEN
from router import Router, bottom_mass_penalty, log_mask_score, mask_keys, relaxed_steps, stop_step


def extreme_logits(n=2000):
    """Lists of one to six numbers of float32, ordinary and huge, the same and near the ends of exp."""
    draw = random.Random(0)
    kinds = (
        lambda: draw.uniform(-90, 90),
        lambda: draw.choice([0.0, 88.5, -88.5, 2.0**-100, 2.0**100, -(2.0**100)]),
        lambda: draw.choice([-1, 1]) * 2.0 ** draw.uniform(-100, 100),
    )
    for _ in range(n):
        some = draw.choices(kinds, k=draw.randint(1, 4))  # of one kind alone as well
        yield torch.tensor([draw.choice(some)() for _ in range(draw.randint(1, 6))]).tolist()


def test_mask_score_is_the_tail_sum():
    """log w against the exact tail sums, in float32, at any logits: no NaN, w_0 = 1, w never rises."""
    for logits in extreme_logits():
        exact = [x - max(logits) for x in logits]
        log_z = math.log(math.fsum(math.exp(x) for x in exact))
        log_w = log_mask_score(torch.tensor(logits).log_softmax(-1))
        assert log_w[0] == 0 and (log_w.diff() <= 0).all(), logits
        for k in range(1, len(exact)):
            tail_top = max(exact[k:])
            tail = math.log(math.fsum(math.exp(x - tail_top) for x in exact[k:])) + tail_top - log_z
            expected = max(min(tail, 0), LOG_W_HIDDEN)
            assert log_w[k].item() == pytest.approx(expected, rel=2e-6, abs=1e-5), logits


def test_mask_score_gradient():
    """Catches a wrong gradient of the tail sums, numerically."""
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: log_mask_score(x.log_softmax(-1))[:, 1:], logits)


def test_stop_step_is_the_last_step_above_tau():
    """Catches an off-by-one in K-hat = max{k : w_k >= tau}; keys hidden before it, or seen behind."""
    draw = random.Random(1)
    for logits in extreme_logits():
        tau = draw.choice([0.0, 1e-4, 0.3, 1.0, draw.random()])
        log_w = log_mask_score(torch.tensor(logits).log_softmax(-1))
        visible = [tau == 0 or bool(w >= math.log(tau) - 1e-6 * (tau < 1)) for w in log_w]
        stop = int(stop_step(log_w, tau))
        assert stop == max(k for k, v in enumerate(visible) if v), (logits, tau)
        assert stop == [*visible, False].index(False) - 1
        expected = [w if k <= stop else LOG_W_HIDDEN for k, w in enumerate(log_w.tolist())]
        assert mask_keys(log_w, tau).tolist() == expected and mask_keys(log_w) is log_w


def test_tau_of_1():
    """Catches a step that passes tau = 1 because its w rounds to 1, as it does in float32 if s_0 is tiny."""
    for dtype in (torch.float32, torch.float64):
        log_w = log_mask_score(torch.tensor([-40.0, 0.0, -1.0], dtype=dtype).log_softmax(-1))
        assert log_w[1].exp() == 1 and int(stop_step(log_w, 1.0)) == 0
        assert int(stop_step(log_w, 0.999)) == 1


def test_stop_step_at_tau_itself():
    """Catches a wrong comparison at tau itself, and a tau that is no probability."""
    for K in range(1, 64):  # of an even distribution w_k is (K+1-k)/(K+1), rounded
        log_w = log_mask_score(torch.zeros(K + 1).log_softmax(-1))
        assert [int(stop_step(log_w, (K + 1 - k) / (K + 1))) for k in range(K + 1)] == [*range(K + 1)]
    for tau in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="tau"):
            stop_step(log_w, tau)


def test_alpha_shifts_and_a_scalar_would_not():
    """Catches an alpha that cancels in the softmax (reading note 3), and an offset that is not added."""
    torch.manual_seed(0)
    router, h0 = Router(16, 3, [0.0, 2.0, 4.0, 6.0]), torch.randn(5, 16)
    torch.nn.init.normal_(router.proj.weight)
    k = torch.arange(4)
    means = [(router(h0, alpha)[0] * k).sum(-1).mean().item() for alpha in (-4, -1, 0, 1, 4)]
    assert means == sorted(means) and means[-1] - means[0] > 1
    s, _ = router(h0, 0.7)
    torch.testing.assert_close(s, (h0 @ router.proj.weight.T + 0.7 * k + 2.0 * k).softmax(-1))


def test_router_keeps_float32_under_autocast():
    """Catches log w rounded to bfloat16's eight bits, which moves it by 0.03 near tau."""
    router, h0 = Router(16, 3, [0.0] * 4), torch.randn(5, 16)
    torch.nn.init.normal_(router.proj.weight, std=3)
    with torch.autocast("cpu", torch.bfloat16):
        _, log_w = router(h0)
    assert log_w.dtype == torch.float32
    torch.testing.assert_close(log_w, router(h0)[1], atol=0, rtol=0)


def literal_penalty(w, ce, form):
    """Section 3.4.2 with loops, without lambda; w and ce are nested lists [token][k]."""
    T, depths, rho, total = len(ce), len(ce[0]), [], 0.0
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    for i in range(depths):
        if form == "token":
            rho.append(sum(1 - sigmoid(10 * (ce[t][i] - 0.5)) for t in range(T)) / T)
        else:
            rho.append(1 - sigmoid(10 * (sum(ce[t][i] for t in range(T)) / T - 0.5)))
    for k in range(1, depths):
        delta = max(rho[k] - rho[k - 1], 0)
        smallest = sorted(w[t][k] for t in range(T))[: math.floor(delta * T)]
        if smallest:
            total += sum(smallest) / len(smallest)
    return total


@pytest.mark.parametrize("form", ["token", "printed"])
@pytest.mark.parametrize("level", [0.2, 0.6, 1.2])
def test_penalty_against_loops(form, level):
    """Catches any slip in rho, its positive part, the count or the choice of the smallest."""
    g = torch.Generator().manual_seed(0)
    log_w = log_mask_score(torch.randn(63, 4, generator=g, dtype=torch.float64).log_softmax(-1))
    ce = level * 2 * torch.rand(63, 4, generator=g, dtype=torch.float64)
    ce -= 0.15 * level * torch.tensor([0, 3, 0, 3])  # deeper is better, but for one step
    actual, _ = bottom_mass_penalty(log_w, ce, form)
    expected = literal_penalty(log_w.exp().tolist(), ce.tolist(), form)
    assert actual.item() == pytest.approx(expected, abs=1e-12)
    assert expected > 0 or level != 0.6


def test_penalty_gradient_reaches_only_the_chosen():
    """Catches a gradient through rho, or into elements outside the bottom fraction."""
    log_w = torch.tensor([[0.0, -1.0], [0.0, -2.0], [0.0, -0.5], [0.0, -3.0]], requires_grad=True)
    ce = torch.tensor([[9, -9.0], [9, -9], [9, 9], [9, 9]], requires_grad=True)
    penalty, rho = bottom_mass_penalty(log_w, ce, "token")
    penalty.backward()
    assert rho.tolist() == pytest.approx([0, 0.5], abs=1e-2) and ce.grad is None
    assert log_w.grad[:, 0].tolist() == [0] * 4
    assert (log_w.grad[:, 1] != 0).tolist() == [False, True, False, True]


def test_relaxed_steps():
    """Catches a gradient in log w that differs where w > tau, or is there below; w_0 counted."""
    w = torch.tensor([[1, 1, 0.01, 1e-5], [1, 0.5, 2e-4, 0.9e-4]], dtype=torch.float64)
    log_w = w.log().requires_grad_()
    steps = relaxed_steps(log_w)
    steps.sum().backward()
    slope = 1 / math.log(1e4)
    expected = [1.5, 1 - slope * math.log(2) + 1 - slope * math.log(5e3)]
    assert steps.tolist() == pytest.approx(expected, abs=1e-12)
    assert log_w.grad.flatten().tolist() == pytest.approx([0, slope, slope, 0, 0, slope, slope, 0], abs=1e-12)
    decided = torch.tensor([[1, 1, 1, 1], [1, 1, 1e-4, 0], [1, 1e-4, 1e-9, 0]]).double().log().clamp(min=-1e4)
    assert relaxed_steps(decided).tolist() == pytest.approx([3, 1, 0], abs=1e-12)


def test_printed_penalty_is_inactive():
    """Reading note 2: at a mean cross-entropy of 2.6 nats the printed penalty is exactly zero."""
    g = torch.Generator().manual_seed(0)
    log_w = log_mask_score(torch.randn(4096, 4, generator=g).log_softmax(-1))
    ce = 2.6 + 0.8 * torch.randn(4096, 1, generator=g) + 0.2 * torch.arange(3, -1, -1)
    ce += 2.6 - ce[..., -1].mean()
    printed, rho = bottom_mass_penalty(log_w, ce, "printed")
    assert printed.item() == 0 and rho.max() < 1e-8
    assert bottom_mass_penalty(log_w, ce, "token")[0].item() > 0


@pytest.mark.parametrize("form", ["token", "printed"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_diverged_losses_resolve_nothing(form, bad):
    """Catches a loss that is not finite taken for one of 0, so that the penalty presses on all steps."""
    log_w = log_mask_score(torch.randn(100, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1))
    ce = torch.full((100, 4), 3.0)
    ce[:, -1] = bad
    penalty, rho = bottom_mass_penalty(log_w, ce, form)
    assert penalty.item() == 0 and rho[-1].item() == 0
    with pytest.raises(ValueError, match=form.title()):
        bottom_mass_penalty(log_w, ce, form.title())
