"""Mixture-of-Recursions (Bae et al., 2025, arXiv 2507.10524): the stack of layers runs up to K+1 times, on
ever fewer tokens, and a router says on which.

This is the simplest form in that paper: all recursions share the whole stack, which thus is PonderLM-3's
backbone. Two other things in the paper are left out: first and last layers that are not shared, and keys that
recursions share.

code       symbol    shape
x          x         (B, T, D)    residual stream, carried from recursion to recursion
active     A_r       (B, T)       the tokens that take part in recursion r
depth      i         (B, T)       how many recursions a token takes, 1 .. N_r = K+1; its extra steps are i - 1
logit      l_t       (B, T)       the router's logit for taking part in a recursion
gate       g_t       (B, T)       the factor with which a recursion's output is added

Expert choice: each recursion chooses a fixed number of tokens per sequence, by top-k. Whether a token is
chosen then depends on later tokens, so top-k is used in training only. In evaluation and decoding a token
continues while the router says so. Token choice: each token chooses its depth at the start, which is causal.
"""

import torch
import torch.nn.functional as F
from torch import nn

from attention import LOG_W_HIDDEN
from lab.methods.looped import LoopedLM
from model import Output
from router import upcast


class MoR(LoopedLM):
    """What both forms share: recursion on some tokens, the loss, and how steps are counted. The cache of a
    recursion holds only the tokens that took part in it."""

    def recur(self, x, active, n):
        """Run the stack on the active tokens alone.

        The active tokens keep their positions, and see only each other: they come first, in the order of the
        text, and the other tokens come after them, where the causal mask hides them.

        Args:
            x: (B, T, D).
            active: (B, T).
            n: how many tokens of a sequence run; no sequence may have more active ones. Scoring gives T, so
                that rounding does not depend on what later tokens choose.

        Returns:
            (B, T, D), 0 for tokens that are not active.
        """
        if not n:
            return torch.zeros_like(x)
        order = (~active).sort(dim=1, stable=True).indices[:, :n]  # (B, n)
        in_order = order[..., None].expand(-1, -1, x.size(-1))  # (B, n, D)
        y = self.stack(x.gather(1, in_order), order)
        y = y * active.gather(1, order)[..., None]
        return torch.zeros_like(x, dtype=y.dtype).scatter(1, in_order, y)

    def router_logits(self, router, x):
        """The logits of a router, in float32 at least: a rounded logit could have the other sign.

        Args:
            router: a Linear, D -> n.
            x: (..., D).

        Returns:
            (..., n).
        """
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(upcast(x), upcast(router.weight))

    def distribution(self, depth):
        """The step distribution of tokens that take `depth` (B, T) recursions: s, which is one-hot at the
        last recursion, and its log w, (B, T, S) each."""
        slots = torch.arange(self.config.ponder_steps + 1, device=depth.device)
        steps = depth[..., None] - 1
        s = upcast((slots == steps).to(self.lm_head.weight.dtype))
        return s, torch.zeros_like(s).masked_fill(slots > steps, LOG_W_HIDDEN)

    def forward(self, idx, targets=None, **how):
        out = super().forward(idx, targets, **how)
        out.steps = (out.log_w > LOG_W_HIDDEN).sum(-1) - 1  # the recursions after the first, whatever tau is
        return out

    def states(self, idx, R=None, tau=None, alpha=0.0):
        h, s, log_w, _ = self.recursions(idx)
        return h, s, log_w

    def objective(self, x, y, R, price=0.0):
        """Cross-entropy plus the loss of the routers."""
        h, s, log_w, router_loss = self.recursions(x)
        steps = (log_w > LOG_W_HIDDEN).sum(-1) - 1
        out = Output(self.lm_head, self.integrate(h, s, steps), steps, h, s, log_w)
        out.ce = self.cross_entropy(out.h_hat, y)
        out.loss = out.ce.sum() / (y != -100).sum().clamp(min=1)
        return out.loss + router_loss, router_loss, out


class ExpertChoice(MoR):
    """x_t <- x_t + g_t Stack(x[A_r])_t for t in A_r, with g = 0.1 sigmoid(l) and l = w_r . x.

    In training, A_r are the floor(c_r T) tokens of A_{r-1} (at least one) with the largest g, c_r = 1,
    K/(K+1), .., 1/(K+1). A binary cross-entropy of weight 1e-3 trains the router to predict which tokens
    these are. Otherwise a token continues while sigmoid(l) >= 1/2.
    """

    method = "mor-expert"
    title = "MoR, expert choice"

    def __init__(self, config):
        super().__init__(config)
        S = config.ponder_steps + 1
        self.routers = nn.ModuleList(nn.Linear(config.hidden_size, 1, bias=False) for _ in range(S))
        self.routers.apply(self.init_weights)

    def places(self, r, T):
        """How many tokens of a sequence of T top-k chooses for recursion r."""
        S = self.config.ponder_steps + 1
        return max(1, (S - r) * T // S)

    def choose(self, logit, active, r):
        """Which tokens take part in recursion r. All do in the first one.

        Args:
            logit: (B, T) of the router of this recursion.
            active: (B, T) the tokens that took part in the recursion before.
            r: the recursion.

        Returns:
            (B, T) booleans.
        """
        if r == 0:
            return active
        if not self.training:
            return active & (logit >= 0)
        n = self.places(r, logit.size(1))
        top = logit.masked_fill(~active, -torch.inf).topk(n, dim=1).indices
        return torch.zeros_like(active).scatter(1, top, True)

    def recursions(self, idx):
        """h (B, T, S, D), s and log_w (B, T, S) each, and the loss of the routers."""
        T = idx.size(1)
        x = self.embed(idx)
        h = []
        depth = 0
        loss = 0.0
        active = torch.ones_like(idx, dtype=torch.bool)
        for r, router in enumerate(self.routers):
            logit = self.router_logits(router, x)[..., 0]  # (B, T)
            chosen = self.choose(logit, active, r)
            loss = loss + self.router_loss(logit, chosen, active)
            active = chosen
            depth = depth + chosen.long()
            n = self.places(r, T) if self.training else T
            gate = 0.1 * logit.sigmoid()[..., None].to(x.dtype)  # (B, T, 1)
            x = x + gate * self.recur(x, active, n)
            h.append(self.model.norm(x))
        s, log_w = self.distribution(depth)
        return torch.stack(h, dim=2), s, log_w, 1e-3 * loss

    def router_loss(self, logit, chosen, active):
        """How well a router predicts which of the active tokens are chosen: their mean binary cross-entropy.

        Args:
            logit, chosen, active: (B, T).
        """
        loss = F.binary_cross_entropy_with_logits(logit, chosen.to(logit.dtype), reduction="none")
        # loss[active].mean() would make the host wait for a GPU.
        return (loss * active).sum() / active.sum().clamp(min=1)

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        x, positions = self.read(token, position)
        steps = -1  # the first recursion, which always runs, is no extra step
        for router, layers in zip(self.routers, cache, strict=True):
            logit = self.router_logits(router, x)
            if steps >= 0 and logit < 0:
                break
            gate = 0.1 * logit.sigmoid().to(x.dtype)
            x = x + gate * self.stack(x, positions, layers)
            steps += 1
        return self.lm_head(self.model.norm(x))[0, 0], steps

    @staticmethod
    def training_forwards(config, steps, training_steps):
        return 1 + config.ponder_steps / 2


class TokenChoice(MoR):
    """p = softmax(W x_0), i = argmax p; y_r = Stack(y_{r-1}), y_0 = x_0; out = x_0 + p_i y_i.

    The loss of the routers spreads the tokens over the depths: 0.1 N_r sum_r f_r P_r, where f_r is the
    fraction of tokens with depth r and P_r the mean of p_r, plus 1e-5 mean(logsumexp(W x_0)^2). f_r and P_r
    are those of one micro-batch, so the loss of a batch depends on how the batch is split.
    """

    method = "mor-token"
    title = "MoR, token choice"

    def __init__(self, config):
        super().__init__(config)
        self.depths = nn.Linear(config.hidden_size, config.ponder_steps + 1, bias=False)  # W
        self.depths.apply(self.init_weights)

    def choose(self, x):
        """Choose the depth of each token, given x_0 (B, T, D).

        Returns:
            depth (B, T) in 1 .. N_r, its p_i (B, T, 1), and p and the logits (B, T, N_r).
        """
        logits = self.router_logits(self.depths, x)
        p = logits.softmax(-1)
        best = p.max(-1, keepdim=True)
        return best.indices[..., 0] + 1, best.values.to(x.dtype), p, logits

    def recursions(self, idx):
        """As ExpertChoice.recursions."""
        T = idx.size(1)
        S = self.config.ponder_steps + 1
        x = self.embed(idx)
        y = x
        depth, gate, p, logits = self.choose(x)
        h = []
        recursions = torch.arange(1, S + 1, device=idx.device)[:, None, None]
        takes_part = depth[None] >= recursions  # (S, B, T)
        lengths = [T] * S
        if self.training:  # only here does the host wait for a GPU
            lengths = takes_part.sum(-1).amax(-1).tolist()
        for active, n in zip(takes_part, lengths, strict=True):  # (B, T), of each recursion
            y = torch.where(active[..., None], self.recur(y, active, n), y)
            h.append(self.model.norm(x + gate * y))
        f = F.one_hot(depth - 1, S).to(p.dtype).mean((0, 1))  # (N_r,)
        loss = 0.1 * S * (f * p.mean((0, 1))).sum() + 1e-5 * logits.logsumexp(-1).square().mean()
        s, log_w = self.distribution(depth)
        return torch.stack(h, dim=2), s, log_w, loss

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=None, alpha=0.0):
        x, positions = self.read(token, position)
        y = x
        depth, gate, _, _ = self.choose(x)
        for layers in cache[: int(depth)]:
            y = self.stack(y, positions, layers)
        return self.lm_head(self.model.norm(x + gate * y))[0, 0], int(depth) - 1

    @staticmethod
    def training_forwards(config, steps, training_steps):
        """See PonderLM3. Padding is not counted: at each depth, a batch is padded to the row with the most
        tokens."""
        return 1 + steps
