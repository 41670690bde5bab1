"""From the first state of a token to how long the model thinks about it (section 3.2.1).

code          paper      shape         meaning
h0            h^(0)      (..., D)      the state before any pondering
s             s          (..., K+1)    step distribution: s_k = Pr(this token takes k steps)
log_w         log w      (..., K+1)    log of the mask score w_k = s_k + .. + s_K, so w_0 = 1
stop_step     K-hat      (...)         the last step whose mask score is at least tau
tau           tau        scalar        where decoding stops; None: soft masks, nothing is skipped
alpha         alpha      scalar        shifts the distribution to more or fewer steps
ce            ce_k       (..., K+1)    cross-entropy if integration stops after step k, in nats
rho           rho_k      (K+1,)        how far k steps are enough for the tokens: 0, not at all, to 1
relaxed_steps            (...)         a differentiable lower bound of K-hat, which --step-price charges

Reading notes, on what the paper leaves open or prints otherwise, are in docs/reading-notes.md.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from attention import MASKED

TAU = 1e-4  # where the paper stops decoding


def upcast(x):
    """At least float32, whatever the precision of the matrix products."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Router(nn.Module):
    """s = softmax(W h^(0) + offset + alpha [0..K]).

    Reading note 3: the printed alpha is one scalar added to every logit, which cancels in the softmax;
    here it multiplies the step index. Reading note 6: W starts at zero (PonderLM.init_weights), and
    `offset`, K+1 fixed numbers that are saved with the config, says where s starts.
    """

    def __init__(self, D, K, offset):
        super().__init__()
        self.proj = nn.Linear(D, K + 1, bias=False)
        offset = torch.tensor(offset, dtype=torch.float32, device="cpu")  # also while load() builds on "meta"
        self.register_buffer("offset", offset, persistent=False)

    def forward(self, h0, alpha=0.0):
        """h0 (..., D) -> s, log_w, both (..., K+1) and at least float32.

        Without autocast: the eight bits of bfloat16 would move log w by 0.03 where tau = 1e-4 stops.
        """
        with torch.autocast(h0.device.type, enabled=False):
            logits = F.linear(upcast(h0), upcast(self.proj.weight)) + self.offset  # (..., K+1)
            logits = logits + alpha * torch.arange(logits.size(-1), device=h0.device)
            log_s = logits.log_softmax(-1)
            return log_s.exp(), log_mask_score(log_s)


def log_mask_score(log_s):
    """log s -> log w, the tail sums w_k = s_k + .. + s_K. (..., K+1) -> (..., K+1).

    Summed from the end, as logarithms: log(1 - s_0 - ..) would lose the small tails. Rounding may lift
    log w above 0 or above the one before it, which the clamp and cummin take back; a large alpha may take it
    below MASKED; w_0 is 1 by definition.
    """
    log_w = log_s.flip(-1).logcumsumexp(-1).flip(-1)
    log_w = F.pad(log_w[..., 1:], (1, 0))  # w_0 = 1
    return log_w.clamp(min=MASKED, max=0).cummin(-1).values


def stop_step(log_w, tau):
    """K-hat = max{k : w_k >= tau} (section 3.3), as integers in 0..K. (..., K+1) -> (...).

    tau = 0, and None, never stop early: K-hat is K. ValueError: tau is not in [0, 1].
    """
    if tau is not None and not 0 <= tau <= 1:
        raise ValueError(f"tau = {tau}: it must lie in [0, 1]")
    log_tau = math.log(tau) if tau else -math.inf
    if log_tau < 0:
        log_tau -= 1e-6  # rounding must not exclude w = tau; at tau = 1 this would admit w < 1
    return (log_w >= log_tau).sum(-1) - 1  # w never rises with k, so count


def mask_keys(log_w, tau=None):
    """What attention adds to the scores of the keys of a token's slots: log w, (..., K+1) -> (..., K+1).

    Reading note 1: slot k is the one that executes step k, so log w_k goes onto its key, and slot 0 has 0; in
    the paper's figure it is slot k+1. With tau, keys beyond K-hat are hidden from every query, their own
    included.
    """
    if tau is None:
        return log_w
    slot = torch.arange(log_w.size(-1), device=log_w.device)
    return log_w.masked_fill(slot > stop_step(log_w, tau)[..., None], MASKED)


def bottom_mass_penalty(log_w, ce, form="printed"):
    """Minimum-ponder penalty (section 3.4.2), without its weight lambda:

        rho_k   = 1 - sigmoid(10 (CE_k - 0.5))             1: k steps are enough, 0: they are not
        d_rho_k = max(rho_k - rho_{k-1}, 0)                what step k adds to it
        penalty = sum over k >= 1 of mean(Bottom_{d_rho_k}(w_k))

    Bottom_p: the floor(p n) smallest of n numbers.

    Args:
        log_w: (n, K+1) of n tokens, of a micro-batch in training; the gradient flows into these alone.
        ce: (n, K+1) in nats, CE_k of each token, with integration truncated after step k.
        form: 'printed', the sigmoid of the mean cross-entropy, which chooses no token at the losses of
            language models (reading note 2); 'token', the mean of the sigmoids.

    -> the penalty, a scalar, and rho (K+1,). ValueError: another form.
    """
    if form not in ("printed", "token"):
        raise ValueError(f"form = {form!r}: 'printed' or 'token'")
    n = len(ce)
    ce = ce.detach().nan_to_num(nan=math.inf)  # a diverged loss resolves nothing
    if form == "printed":
        ce = ce.mean(0, keepdim=True)  # the sigmoid of the mean, else the mean of the sigmoids
    rho = (1 - torch.sigmoid(10 * (ce - 0.5))).mean(0)  # (K+1,)
    counts = (rho.diff().clamp(min=0) * n).int().tolist()  # rounded down: a small share of few tokens is none
    penalty = log_w.new_zeros(())
    for k, count in enumerate(counts, start=1):
        if count:
            penalty = penalty + log_w[:, k].exp().topk(count, largest=False).values.mean()
    return penalty, rho


def relaxed_steps(log_w):
    """A differentiable lower bound of K-hat at TAU: what --step-price charges. (..., K+1) -> (...).

        relaxed(w) = sum over k >= 1 of max(0, 1 - log w_k / log tau)

    Not the paper's. A step counts 1 at w = 1, 1/2 at 0.01, 0 from tau down, and is pushed equally all the
    way, in log w; w_1 + .. + w_K would push small tails too weakly to fall below tau (reading note 2).
    """
    return (1 - log_w[..., 1:] / math.log(TAU)).clamp(min=0).sum(-1)
