"""Jacobi iteration over executed slots only: skipping pays where all tokens run at once, too.

PonderLM.jacobi runs all S slots of every token and hides those beyond K-hat. Here a pass holds the slots
k <= K-hat_t of each token and no others, in the order of the text.

    pass 1   x1 x2 x3 x4                 slot 0 of every token; the router reads h^(0)
    pass 2   x1 .  x2 h2 x3 h3 x4 h4     K-hat = 0 1 2 1: one more slot of each token that wants one
    pass 3   x1 .  x2 h2 x3 h3 h3 x4 h4  K-hat is new after each pass, and so on until nothing changes

A slot sits out while w is below tau, and comes back when w rises. Its input is the output of the slot before
in the last pass; so a token may run at most one slot more than it did in that pass. This rule also makes the
ladder of the first passes.

code      symbol      shape           meaning
h         h_t^(k)     (B, T, S, D)    the newest output of each slot
steps     K-hat_t     (B, T)          steps by the newest mask scores
ran                   (B, T)          how many slots of a token ran in the last pass, at first none
rows                  (R,)            the rows that have not settled
active                (R, T, S)       which of their slots are in a pass
order                 (R, N)          which slots t*S + k these are; rows with fewer than N slots are padded
"""

import math
from dataclasses import dataclass

import torch

from attention import LOG_W_HIDDEN
from lab.kernels import decoding_kernels
from model import runs_in_half_precision
from router import stop_step


@dataclass
class Settled:
    """The states of all tokens, as decoding has them."""

    h: torch.Tensor  # (B, T, S, D), 0 beyond K-hat
    s: torch.Tensor  # (B, T, S)
    log_w: torch.Tensor  # (B, T, S)
    steps: torch.Tensor  # (B, T) K-hat, 0 behind the end of a row
    passes: int
    slots: int  # that ran, in all passes and rows: what it cost


def within(idx, lengths):
    """Which positions of idx (B, T) hold a token: those before `lengths` (B,), or all if that is None."""
    if lengths is None:
        return torch.ones_like(idx, dtype=torch.bool)
    return torch.arange(idx.size(1), device=idx.device) < lengths[:, None]


def shape_block(idx):
    """N is rounded up to a multiple of this: a GPU chooses, or builds, its kernels for every new shape."""
    return 1 if idx.device.type == "cpu" else 64


def run_slots(model, e, h, log_w, active, N, cache):
    """Run the active slots of R rows through the backbone, at most N per row.

    Args:
        model: a PonderLM.
        e: (R, T, D) embeddings.
        h: (R, T, S, D) the last outputs.
        log_w: (R, T, S).
        active: (R, T, S).
        N: the length of the sequence.
        cache: as in `settle`.

    Returns:
        (R, T, S, D): h with the new outputs.
    """
    S = h.size(2)
    order = (~active).flatten(1).sort(stable=True).indices[:, :N]  # (R, N)
    in_order = order[..., None].expand(-1, -1, e.size(-1))  # (R, N, D)
    first = e[:, :, None]  # (R, T, 1, D) inputs of slot 0
    x = torch.cat([first, model.feed_back(h[:, :, :-1], first)], dim=2)  # (R, T, S, D)
    x = x.flatten(1, 2).gather(1, in_order)  # (R, N, D)
    key_log_w = model.mask_keys(log_w)  # (R, T, S), or None
    if key_log_w is not None:
        key_log_w = key_log_w.flatten(1).gather(1, order)  # (R, N)
    with decoding_kernels(e.device):
        out = model.model(x, order // S, key_log_w, model.backend, cache)  # (R, N, D)
    return h.flatten(1, 2).scatter(1, in_order, out.to(h.dtype)).view_as(h)


@torch.no_grad()
def settle(model, idx, tau=1e-4, alpha=0.0, *, lengths=None, tolerance=None, cache=None):
    """The states of all tokens as decoding at tau has them, in parallel (sections 3.3 and 3.4.1).

    A row has settled when a pass has changed its latents by at most `tolerance` (relative norm) and K-hat not
    at all; and after K*T + 1 passes at the latest, where it is exact. It then sits out, so that its results
    do not depend on other rows.

    Args:
        model: a PonderLM whose latents are a fixed point (model.iterates).
        idx: (B, T) token ids.
        tau, alpha: as PonderLM.ponder_token.
        lengths: (B,) tokens of each row, at least 1; padding follows them. None: T.
        tolerance: None: 1e-5, or what half precision can reach. With 0 it ends when nothing changes.
        cache: one object per layer whose `attend` takes the place of the model's attention, and whose `rows`
            is set to the rows that a pass is about; see cache.PromptLayer.

    Returns:
        Settled.
    """
    e = model.embed(idx)  # (B, T, D)
    inside = within(idx, lengths)  # (B, T)
    if tolerance is None:
        tolerance = 1e-2 if runs_in_half_precision(e) else 1e-5
    B, T = idx.shape
    S = model.config.ponder_steps + 1
    block = shape_block(idx)
    h = e.new_zeros(B, T, S, e.size(-1))
    s, log_w = (torch.zeros_like(x) for x in model.route(h))  # (B, T, S) each
    steps = torch.zeros_like(idx)
    ran = torch.zeros_like(idx)
    slot = torch.arange(S, device=idx.device)

    def wanted(rows):
        """Which slots of some rows the next pass runs, (R, T, S)."""
        last = torch.minimum(steps, ran)[rows, :, None]
        return (slot <= last) & inside[rows, :, None]

    rows = torch.arange(B, device=idx.device)
    following = wanted(rows)
    counts = following.flatten(1).sum(1).tolist()  # slots of each row in the next pass
    slots = 0
    passes = 0
    while len(rows) and passes < (S - 1) * T + 1:
        passes += 1
        active = following
        slots += sum(counts)
        for layer in cache or ():
            layer.rows = rows
        N = math.ceil(max(counts) / block) * block
        before = h[rows]
        after = run_slots(model, e[rows], before, log_w[rows], active, N, cache)
        h[rows] = after
        s[rows], log_w[rows] = model.route(after, alpha)
        steps[rows] = stop_step(log_w[rows], tau)
        ran[rows] = active.sum(-1)

        following = wanted(rows)
        moves = has_moved(before, after, active, following, tolerance)
        # All that the host has to know about a pass, in one copy.
        moves, counts = torch.stack([moves, following.flatten(1).sum(1)]).tolist()
        left = [i for i, row_moves in enumerate(moves) if row_moves]
        counts = [counts[i] for i in left]
        left = torch.tensor(left, dtype=torch.long).to(idx.device)
        rows = rows[left]
        following = following[left]
    steps = (ran - 1) * inside
    h = h * (slot <= steps[..., None])[..., None]
    return Settled(h, s, log_w, steps, passes, slots)


def has_moved(before, after, active, following, tolerance):
    """Whether a pass has changed the latents of a row, or which of its slots run.

    Args:
        before, after: (R, T, S, D) outputs before and after the pass.
        active, following: (R, T, S) the slots of this pass and of the next one.
        tolerance: of the relative norm of the change.

    Returns:
        (R,) booleans.
    """
    fed_back = following[..., 1:, None]  # the outputs that are inputs of the next pass
    change = ((after - before)[:, :, :-1] * fed_back).flatten(1).norm(dim=1)  # (R,)
    size = (after[:, :, :-1] * fed_back).flatten(1).norm(dim=1)
    return (change > tolerance * size) | (following != active).flatten(1).any(1)


def stopped_states(model, idx, tau, alpha=0.0, lengths=None):
    """The states of any method, as decoding at tau has them. Arguments as those of `settle`.

    Returns:
        h (B, T, S, D), s (B, T, S) and the executed steps (B, T).
    """
    if model.iterates:
        found = settle(model, idx, tau, alpha, lengths=lengths)
        return found.h, found.s, found.steps
    out = model(idx, tau=tau, alpha=alpha)
    return out.h, out.s, out.steps


@torch.no_grad()
def read_on_grid(model, idx, tau=1e-4, alpha=0.0, *, lengths=None, cache):
    """As `settle`, on the grid (methods/grid.py), where K+1 passes are exact: pass k runs slot k of the
    tokens that take k steps or more.

    Args:
        model, idx, tau, alpha, lengths: as in `settle`.
        cache: one cache.GridPrompt per layer.

    Returns:
        Settled; and of the n keys in `cache` their slots (n,), and whether they were executed (B, n).
    """
    e = model.embed(idx)  # (B, T, D)
    inside = within(idx, lengths)  # (B, T)
    S = model.config.ponder_steps + 1
    N = idx.size(1)
    block = shape_block(idx)
    slot = torch.arange(S, device=idx.device)
    h = e.new_zeros(*idx.shape, S, e.size(-1))
    x = e  # (B, T, D) inputs of slot k
    active = inside  # (B, T) which tokens run slot k
    tokens = []  # for each slot the tokens that its keys belong to, (B, N)
    executed = []  # and whether they ran, (B, N): rows with fewer than N are padded
    log_w = torch.zeros_like(x[..., :1], dtype=torch.float32)  # of slot 0, before there is any routing
    for k in range(S):
        order = (~active).sort(dim=1, stable=True).indices[:, :N]  # (B, N)
        here = active.gather(1, order)
        tokens.append(order)
        executed.append(here)
        key_log_w = model.mask_keys(log_w)
        if key_log_w is None:
            key_log_w = torch.zeros_like(log_w[..., 0])
        else:
            key_log_w = key_log_w[..., k]
        key_log_w = key_log_w.gather(1, order).masked_fill(~here, LOG_W_HIDDEN)
        for layer in cache:
            layer.mask = (torch.cat(tokens, dim=1)[:, None] <= order[..., None])[:, None]
        in_order = order[..., None].expand(-1, -1, x.size(-1))  # (B, N, D)
        with decoding_kernels(idx.device):
            out = model.model(x.gather(1, in_order), order, key_log_w, model.backend, cache)
        h[:, :, k] = h[:, :, k].scatter(1, in_order, (out * here[..., None]).to(h.dtype))
        if k == 0:
            s, log_w = model.route(h[:, :, :1], alpha)
            steps = stop_step(log_w, tau) * inside
            wanted = (slot <= steps[..., None]) & inside[..., None]  # (B, T, S)
            # All that the host has to know, in one copy: how many slots k each row has, by slot.
            counts = [*wanted.sum(1).T.tolist(), [0]]
        N = math.ceil(max(counts[k + 1]) / block) * block
        if not N:
            break
        active = wanted[..., k + 1]
        x = model.feed_back(h[:, :, k], e)
    found = Settled(h, s, log_w, steps, k + 1, sum(map(sum, counts)))
    slots_of_keys = [slot[k].expand(order.size(1)) for k, order in enumerate(tokens)]
    return found, torch.cat(slots_of_keys), torch.cat(executed, dim=1)
