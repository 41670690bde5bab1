"""From the first state of a token to how long the model thinks about it (section 3.2.1).

code               paper     shape          meaning
h0                 h^(0)     (..., D)       the state before any pondering
s                  s         (..., K+1)     step distribution: Pr(this token takes k steps)
log_w              log w     (..., K+1)     mask score w_k = s_k + ... + s_K, as a logarithm
stop_step(...)     K-hat     (...)          the last step whose mask score is at least tau
slot_bias(...)     log w     (..., K+1)     bias on the keys of a token's slots
tau                tau       scalar         where decoding stops; None: the soft mask, no stopping
alpha              alpha     scalar         shifts the distribution to more or fewer steps
ce                 ce_i      (..., K+1)     cross-entropy if integration stops after step i
rho                rho_i     (K+1,)         how far depth i resolves the tokens, 0 to 1

    python router.py     four tokens, from s to w to K-hat
"""

import math

import torch
import tyro
from torch import nn

from attention import MASKED
from runtime import UserError, command_line


def upcast(x):
    """At least float32, whatever the precision of the matrix products."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mask_score(log_s):
    """log s -> log w, the tail sums of s (section 3.2.1). (..., K+1) -> (..., K+1).

    Summed from the end by logaddexp, never as a logarithm of a sum, which loses the small tails.
    logaddexp(a, b) is never below its larger argument, also after rounding, so w never increases
    with k. Rounding may lift log w above 0; the clamp takes that back, and w_0 is 1 by definition.
    """
    tails = [log_s[..., -1]]
    for k in reversed(range(log_s.size(-1) - 1)):
        tails.append(torch.logaddexp(log_s[..., k], tails[-1]))
    tails[-1] = torch.zeros_like(tails[-1])
    return torch.stack(tails[::-1], dim=-1).clamp(min=MASKED, max=0)


class Router(nn.Module):
    """s = softmax(W h^(0) + offset + alpha [0..K]).

    Reading note 3: the printed alpha is one scalar added to every logit, which cancels in the
    softmax. Here it multiplies the step index. Reading note 6: `offset` is where training starts, a
    list of K+1 fixed numbers; W starts at zero.
    """

    def __init__(self, D, K, offset=None):
        super().__init__()
        self.proj = nn.Linear(D, K + 1, bias=False)
        # A buffer with numbers even where weights are only shapes (the meta device).
        offset = torch.tensor(offset or [0.0] * (K + 1), dtype=torch.float32, device="cpu")
        self.register_buffer("offset", offset, persistent=False)  # saved with the config

    def forward(self, h0, alpha=0.0):
        """h0 (..., D) -> s, log_w, both (..., K+1) and at least float32.

        Autocast is off: eight bits of mantissa would move log w by 0.03 near tau = 1e-4.

        Raises:
            ValueError: alpha is infinite or nan.
        """
        if not math.isfinite(alpha):
            raise ValueError(f"alpha = {alpha}: the router can be shifted by a finite number")
        with torch.autocast(h0.device.type, enabled=False):
            logits = nn.functional.linear(upcast(h0), upcast(self.proj.weight))
            steps = torch.arange(logits.size(-1), device=h0.device)
            log_s = (logits + self.offset + alpha * steps).log_softmax(-1)
            return log_s.exp(), mask_score(log_s)


def stop_step(log_w, tau):
    """K-hat = max{k : w_k >= tau} (section 3.3), as integers in 0..K. (..., K+1) -> (...).

    tau = 0, and None, never stop early: K-hat is K.

    Raises:
        UserError: tau is outside [0, 1].
    """
    if tau is not None and not 0 <= tau <= 1:
        raise UserError(f"tau = {tau} is not a probability: it must lie in [0, 1]")
    threshold = math.log(tau) if tau else -math.inf
    return (log_w >= threshold).sum(-1) - 1  # w never increases with k, so count


def slot_bias(log_w, tau=None):
    """Mask scores -> bias on the keys of a token's slots, both (..., K+1).

    Reading note 1: slot k is the one that executes step k, so log w_k is the bias of its key, and
    slot 0 has none. (The paper's figure puts w_k on the column of h^(k), the input of slot k+1.)
    With tau, slots beyond K-hat are not there: no query sees their keys, not even the slots' own.
    """
    if tau is None:
        return log_w
    slot = torch.arange(log_w.size(-1), device=log_w.device)
    return log_w.masked_fill(slot > stop_step(log_w, tau)[..., None], MASKED)


def bottom_mass_penalty(log_w, ce, form):
    """Minimum-ponder penalty (section 3.4.2), without its weight lambda.

    The sum over depths k of the mean of the smallest w_k: of as many tokens as depth k resolves
    and depth k-1 did not, a fraction d_rho_k of all.

    Args:
        log_w: (..., K+1) mask scores; the gradient flows into these alone.
        ce: (..., K+1) cross-entropy of each token with integration truncated after step i, in nats.
        form: 'printed' or 'token', see below.

    Returns:
        The penalty, a scalar, and rho (K+1,).
    """
    if log_w.shape != ce.shape or log_w.dim() < 2 or not log_w.numel():
        raise ValueError(f"log_w {[*log_w.shape]}, ce {[*ce.shape]}: not (.., K+1) of some tokens")
    ce = ce.detach().flatten(0, -2)  # (B*T, K+1)
    if form == "token":  # the mean of the sigmoids: the soft share of resolved tokens
        rho = torch.sigmoid(-10 * (ce - 0.5)).mean(0)
    elif form == "printed":
        # Reading note 2: as printed, the sigmoid of the mean cross-entropy. At 2.6 nats rho is 1e-9
        # and no element is ever chosen.
        rho = torch.sigmoid(-10 * (ce.mean(0) - 0.5))
    else:
        raise ValueError(f"penalty form {form!r} is neither 'printed' nor 'token'")
    w = log_w[..., 1:].exp().flatten(0, -2).sort(dim=0).values  # (B*T, K), smallest first
    count = (rho.diff().clamp(min=0) * len(w)).floor()  # (K,)
    bottom = torch.arange(len(w), device=w.device)[:, None] < count  # (B*T, K)
    return ((w * bottom).sum(0) / count.clamp(min=1)).sum(), rho


def expected_steps(log_w):
    """The steps that s expects, w_1 + .. + w_K, in the mean over tokens: ACT's ponder cost (Graves,
    arXiv 1603.08983). (..., K+1) -> a scalar."""
    return log_w[..., 1:].exp().sum(-1).mean()


def show():
    tau = 1e-4
    print(f"Four tokens, K = 3, tau = {tau:g}\n{'':11}{'s_0..s_3':^36}{'w_0..w_3':^36}K-hat")
    logits = {
        "easy": [9, 2, -6, -9],
        "medium": [4, 5, 3, -7],
        "hard": [0, 2, 4, 6],
        "even": [0] * 4,
    }
    for name, row in logits.items():
        log_s = torch.tensor(row, dtype=torch.float32).log_softmax(-1)
        log_w = mask_score(log_s)
        columns = "".join(f"{x:9.5f}" for x in [*log_s.exp(), *log_w.exp()])
        print(f"{name:8}{columns}    {stop_step(log_w, tau)}")
    print("\nThe hard token with the router's distribution shifted by alpha")
    for alpha in (-8, -4, 0, 4):
        log_s = (torch.tensor(logits["hard"]) + alpha * torch.arange(4.0)).log_softmax(-1)
        log_w = mask_score(log_s)
        print(f"alpha {alpha:+d}   w = {[round(x, 5) for x in log_w.exp().tolist()]}", end="")
        print(f"   K-hat {stop_step(log_w, tau)}")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(show, description=__doc__))
