"""The router: predicts from a token's first hidden state how many pondering steps to take (section 3.2.1).

code          paper      shape         meaning
h0            h^(0)      (..., D)      hidden state of a token before any pondering
s             s          (..., K+1)    step distribution: s_k = Pr(this token takes k steps)
log_w         log w      (..., K+1)    log of the mask score w_k = s_k + .. + s_K, so w_0 = 1
stop_step     K-hat      (...)         the last step whose mask score is at least tau
tau           tau        scalar        decoding stops where w < tau; None: soft masks, no step is skipped
alpha         alpha      scalar        shifts the distribution to more (> 0) or fewer (< 0) steps
ce            ce_k       (..., K+1)    loss in nats of the prediction from s_0 h^(0) + .. + s_k h^(k) alone
rho           rho_k      (K+1,)        degree to which k steps suffice for a good prediction, from 0 to 1
relaxed_steps            (...)         a differentiable lower bound of K-hat, which --step-price charges

D: width of the model; K: maximum number of pondering steps. docs/reading-notes.md discusses what the paper
leaves open, or prints in a form that cannot be meant ("reading note 3" below).
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from attention import LOG_W_HIDDEN

TAU = 1e-4  # the paper's threshold for stopping early
LOG_W_BELOW_ONE = -1e-30  # stands for log w where w is less than 1, but rounds to 1


def upcast(x):
    """x in float32, or in float64 if it is in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Router(nn.Module):
    """s = softmax(W h^(0) + offset + alpha [0..K]).

    In the paper, alpha is one number that is added to every logit, which the softmax cancels. Here it is
    multiplied by the step index (reading note 3). W starts at zero (PonderLM.init_weights), so s starts at
    softmax(offset). The offset is K+1 fixed numbers, saved with the config. By default it lets nearly all
    tokens start with K steps, so that no step is masked before it has learned anything (reading note 6).
    """

    def __init__(self, D, K, offset):
        super().__init__()
        self.proj = nn.Linear(D, K + 1, bias=False)
        # The device is explicit because a model is loaded under torch.device("meta") (checkpoint.py), and
        # this buffer is not among the saved weights that fill it.
        offset = torch.tensor(offset, dtype=torch.float32, device="cpu")
        self.register_buffer("offset", offset, persistent=False)

    def forward(self, h0, alpha=0.0):
        """Predict the step distribution.

        Autocast is off here: bfloat16 has 8 significant bits, so near log tau = -9.2 its error is 0.03,
        enough to change K-hat. (In attention, where log w is only added to scores, such an error does no
        harm.)

        Args:
            h0: (..., D).
            alpha: shift of the step distribution.

        Returns:
            s and log_w, both (..., K+1) and at least float32.
        """
        with torch.autocast(h0.device.type, enabled=False):
            logits = F.linear(upcast(h0), upcast(self.proj.weight)) + self.offset  # (..., K+1)
            logits = logits + alpha * torch.arange(logits.size(-1), device=h0.device)
            log_s = logits.log_softmax(-1)
            return log_s.exp(), log_mask_score(log_s)


def log_mask_score(log_s):
    """The log of the tail sums w_k = s_k + .. + s_K, from log s. (..., K+1) -> (..., K+1).

    The sums run from the end, in log space, because 1 - s_0 - .. - s_{k-1} would lose small tails.
    Rounding may lift log w above the one before it, which cummin undoes; or to 0 and above, although w_1 is
    less than 1, which the upper clamp undoes, so that no step passes tau = 1. A very negative alpha could
    push log w below LOG_W_HIDDEN, hence the lower clamp.
    """
    log_w = log_s.flip(-1).logcumsumexp(-1).flip(-1)[..., 1:]
    log_w = log_w.clamp(min=LOG_W_HIDDEN, max=LOG_W_BELOW_ONE)
    return F.pad(log_w, (1, 0)).cummin(-1).values  # w_0 = 1 by definition


def stop_step(log_w, tau):
    """K-hat = max{k : w_k >= tau}, the last step that is executed (section 3.3).

    Args:
        log_w: (..., K+1).
        tau: a number in [0, 1]. At 0, or None, nothing stops early: K-hat is K.

    Returns:
        (...), integers in 0..K.

    Raises:
        ValueError: tau is outside [0, 1].
    """
    if tau is not None and not 0 <= tau <= 1:
        raise ValueError(f"tau = {tau}: it must lie in [0, 1]")
    if tau is None or tau == 0:
        log_tau = -math.inf
    elif tau == 1:
        log_tau = 0.0  # no margin for rounding here: with one, a w slightly below 1 would pass
    else:
        log_tau = math.log(tau) - 1e-6  # so that rounding does not exclude w = tau
    return (log_w >= log_tau).sum(-1) - 1  # w never rises with k, so counting finds the last one


def mask_keys(log_w, tau=None):
    """The bias that attention adds to the scores of the keys of a token's slots. (..., K+1) -> (..., K+1).

    A token has K+1 slots in the sequence: slot 0 reads its embedding, and slot k reads the output of slot
    k-1. Slot k executes step k, so if step k is skipped, so is slot k. That is why the key of slot k gets
    log w_k, and the key of slot 0, which always runs, gets log w_0 = 0. In the paper's figure, log w_k is on
    slot k+1 (reading note 1). With a tau, the keys of slots beyond K-hat are hidden from every query, their
    own included.
    """
    if tau is None:
        return log_w
    slot = torch.arange(log_w.size(-1), device=log_w.device)
    is_skipped = slot > stop_step(log_w, tau)[..., None]
    return log_w.masked_fill(is_skipped, LOG_W_HIDDEN)


def resolved_fraction(ce, form="printed"):
    """rho, the degree to which k steps suffice (section 3.4.2), for each k.

    There are two forms. 'printed' is the formula that the paper prints: the sigmoid of the mean loss. 'token'
    is the mean of the tokens' sigmoids, which makes rho the fraction of tokens that are resolved (reading
    note 2).

    With the paper's factor of 10, 1 - sigmoid falls from 0.88 to 0.12 between losses of 0.3 and 0.7 nats. So
    a token counts as resolved if its loss is below about half a nat. But the printed form takes the mean loss
    of all tokens first, so its rho is close to 0 or to 1, unless that mean is near half a nat.

    Args:
        ce: (n, depths) in nats, the cross-entropy of n tokens.
        form: 'printed' or 'token'.

    Returns:
        (depths,), from 0 (not at all) to 1 (fully).

    Raises:
        ValueError: form is neither of the two.
    """
    ce = ce.detach().nan_to_num(nan=math.inf)  # a NaN loss counts as infinitely bad
    if form == "printed":
        return 1 - torch.sigmoid(10 * (ce.mean(0) - 0.5))
    if form == "token":
        return (1 - torch.sigmoid(10 * (ce - 0.5))).mean(0)
    raise ValueError(f"form = {form!r}: it must be 'printed' or 'token'")


def bottom_mass_penalty(log_w, ce, form="printed"):
    """The bottom-mass penalty, which the paper calls minimum-ponder penalty (section 3.4.2), without its
    weight lambda.

    It should push w_k down where step k is not needed. Say that going from k-1 to k steps resolves a
    fraction d_rho_k more of the tokens. Then the penalty selects that fraction of the tokens, those whose
    w_k is smallest, since they rely on step k the least, and lowers their w_k. (The paper does not say why
    as many tokens should give up step k as were resolved by it.)

        rho_k   = 1 - sigmoid(10 (mean CE_k - 0.5))        1: k steps suffice, 0: they do not (printed form)
        d_rho_k = max(rho_k - rho_{k-1}, 0)                what step k adds to it
        penalty = sum over k >= 1 of mean(Bottom_{d_rho_k}(w_k))

    Bottom_p selects the floor(p n) smallest of n numbers.

    Args:
        log_w: (n, K+1), for the n tokens of a micro-batch. Only log_w receives a gradient.
        ce: (n, K+1) in nats, CE_k of each token: the loss of predicting from s_0 h^(0) + .. + s_k h^(k).
        form: 'printed' or 'token', see resolved_fraction. The printed form selects no tokens at the
            losses that language models actually reach (reading note 2).

    Returns:
        The penalty, a scalar, and rho (K+1,).

    Raises:
        ValueError: form is neither of the two.
    """
    rho = resolved_fraction(ce, form)  # (K+1,)
    d_rho = rho.diff().clamp(min=0)  # (K,)
    counts = (d_rho * len(ce)).int()  # rounded down, so a small fraction of few tokens is no token

    penalty = log_w.new_zeros(())
    for k, count in enumerate(counts.tolist(), start=1):  # tolist() waits for a GPU, once per micro-batch
        if count > 0:
            w_k = log_w[:, k].exp()
            penalty = penalty + w_k.topk(count, largest=False).values.mean()
    return penalty, rho


def relaxed_steps(log_w):
    """A differentiable lower bound of K-hat at TAU, which --step-price charges. (..., K+1) -> (...).

        relaxed(w) = sum over k >= 1 of max(0, 1 - log w_k / log tau)

    This is not in the paper. A step counts 1 at w = 1, 1/2 at w = 0.01 and 0 from tau down. Between them it
    is linear in log w, so a small tail is pushed as hard as a large one, until it is below tau. The expected
    number of steps, w_1 + .. + w_K, would push small tails too weakly for that (reading note 2).
    """
    return (1 - log_w[..., 1:] / math.log(TAU)).clamp(min=0).sum(-1)
