"""Jacobi iteration over executed slots only: where all tokens run at once, skipping pays as well.

PonderLM.jacobi runs all S slots of every token and hides those beyond K-hat. Here they are left
out: the sequence of a pass holds the slots k <= K-hat_t and no other, in the order of the text.

    pass 1   x1 x2 x3 x4                 slot 0 of every token; the router reads h^(0)
    pass 2   x1 .  x2 h2 x3 h3 x4 h4     K-hat = 0 1 2 1: one more slot of those that want one
    pass 3   x1 .  x2 h2 x3 h3 h3 x4 h4  K-hat anew after each pass; and so on until it stands still

A slot sits out while w says so and comes back when w rises. Its input is the output of the slot
before in the last pass, so that a token may run at most one slot more than it did then. That also
makes the ladder of the first passes.

code      symbol      shape           meaning
h         h_t^(k)     (B, T, S, D)    the newest output of each slot
steps     K-hat_t     (B, T)          steps by the newest mask scores
ran                   (B, T)          how many slots of a token ran in the last pass, at first none
rows                  (R,)            the rows that still move
active                (R, T, S)       which of their slots are in a pass
order                 (R, N)          the places t*S + k of these; a row with fewer is padded behind
"""

from dataclasses import dataclass

import torch

from attention import MASKED
from lab.kernels import decoding_kernels
from model import is_half
from router import stop_step


@dataclass
class Settled:
    h: torch.Tensor  # (B, T, S, D), 0 beyond K-hat
    s: torch.Tensor  # (B, T, S)
    log_w: torch.Tensor  # (B, T, S)
    steps: torch.Tensor  # (B, T) K-hat, 0 behind a row's end
    passes: int
    slots: int  # that ran, in all passes and rows: what it cost


def within(idx, lengths):
    """Which of the places of idx (B, T) hold a token: those before `lengths` (B,), None: all."""
    if lengths is None:
        return torch.ones_like(idx, dtype=torch.bool)
    return torch.arange(idx.size(1), device=idx.device) < lengths[:, None]


def shape_block(idx):
    """N is a multiple of this: for every new shape a GPU has to choose, or build, its kernels."""
    return 1 if idx.device.type == "cpu" else 64


def run_slots(model, e, h, log_w, active, N, cache):
    """The active slots of some rows through the backbone, at most N a row.

    Args:
        e: (R, T, D). h: (R, T, S, D) the last outputs. log_w: (R, T, S). active: (R, T, S).

    Returns:
        h with the new outputs.
    """
    order = (~active).flatten(1).sort(stable=True).indices[:, :N]  # (R, N)
    places, first = order[..., None].expand(-1, -1, e.size(-1)), e[:, :, None]
    x = torch.cat([first, model.feed_back(h[:, :, :-1], first)], dim=2)  # (R, T, S, D)
    x = x.flatten(1, 2).gather(1, places)  # (R, N, D)
    key_log_w = model.mask_keys(log_w)  # (R, T, S), or None
    if key_log_w is not None:
        key_log_w = key_log_w.flatten(1).gather(1, order)  # (R, N)
    with decoding_kernels(e.device):
        out = model.model(x, order // h.size(2), key_log_w, model.backend, cache)  # (R, N, D)
    return h.flatten(1, 2).scatter(1, places, out.to(h.dtype)).view_as(h)


@torch.no_grad()
def settle(model, idx, tau=1e-4, alpha=0.0, *, lengths=None, tolerance=None, cache=None):
    """All states of all tokens as decoding at tau has them, in parallel (sections 3.3, 3.4.1).

    A row is done when a pass has changed its latents by at most `tolerance` (relative norm) and K-hat not at
    all, after K*T + 1 passes at the latest, where it is exact. It then sits out, so that it does not depend
    on its neighbours.

    Args:
        model: a PonderLM whose latents are a fixed point (model.iterates).
        idx: (B, T) token ids.
        tau, alpha: as PonderLM.ponder_token.
        lengths: (B,) tokens of each row, at least 1; padding follows them. None: T.
        tolerance: None: 1e-5, or what half precision can reach; with 0 it goes on until nothing moves.
        cache: one object a layer whose `attend` takes the place of the model's attention, and whose `rows`
            are told which rows a pass is about; see cache.PromptLayer.
    """
    e, inside = model.embed(idx), within(idx, lengths)  # (B, T, D), (B, T)
    if tolerance is None:
        tolerance = 1e-2 if is_half(e) else 1e-5
    (B, T), S, device = idx.shape, model.config.ponder_steps + 1, idx.device
    h = e.new_zeros(B, T, S, e.size(-1))
    s, log_w = (torch.zeros_like(x) for x in model.route(h))  # (B, T, S)
    steps, ran, slot = torch.zeros_like(idx), torch.zeros_like(idx), torch.arange(S, device=device)

    def wanted(rows):  # -> (R, T, S)
        return (slot <= torch.minimum(steps, ran)[rows, :, None]) & inside[rows, :, None]

    block, rows, slots = shape_block(idx), torch.arange(B, device=device), 0
    following = wanted(rows)
    counts = following.flatten(1).sum(1).tolist()  # slots of each row in this pass
    for passes in range(1, (S - 1) * T + 2):  # noqa: B007
        active, before, N = following, h[rows], -(-max(counts) // block) * block
        slots += sum(counts)
        for layer in cache or ():
            layer.rows = rows
        h[rows] = after = run_slots(model, e[rows], before, log_w[rows], active, N, cache)
        s[rows], log_w[rows] = model.route(after, alpha)
        steps[rows] = stop_step(log_w[rows], tau)
        ran[rows] = active.sum(-1)

        following = wanted(rows)
        fed_back = following[..., 1:, None]  # the outputs that are
        change = ((after - before)[:, :, :-1] * fed_back).flatten(1).norm(dim=1)  # (R,)
        size = (after[:, :, :-1] * fed_back).flatten(1).norm(dim=1)
        moving = (change > tolerance * size) | (following != active).flatten(1).any(1)
        # All that the host has to know of a pass, in one copy.
        moves, counts = torch.stack([moving, following.flatten(1).sum(1)]).tolist()
        left = [i for i, moves_on in enumerate(moves) if moves_on]
        if not left:
            break
        counts = [counts[i] for i in left]
        left = torch.tensor(left).to(device)
        rows, following = rows[left], following[left]
    steps = (ran - 1) * inside
    return Settled(h * (slot <= steps[..., None])[..., None], s, log_w, steps, passes, slots)


def stopped_states(model, idx, tau, alpha=0.0, lengths=None):
    """h (B, T, S, D), s (B, T, S) and executed steps (B, T) of any method, as decoding at tau has
    them; arguments as those of `settle`."""
    if model.iterates:
        found = settle(model, idx, tau, alpha, lengths=lengths)
        return found.h, found.s, found.steps
    out = model(idx, tau=tau, alpha=alpha)
    return out.h, out.s, out.steps


@torch.no_grad()
def read_on_grid(model, idx, tau=1e-4, alpha=0.0, *, lengths=None, cache):
    """As `settle` on the grid (methods/grid.py), where K+1 passes are exact: pass k runs slot k
    of the tokens that take k steps or more.

    Args:
        cache: a cache.GridPrompt a layer.

    Returns:
        Settled; and of the n keys in `cache` the slot (n,), and whether it was executed (B, n).
    """
    e, inside, S = model.embed(idx), within(idx, lengths), model.config.ponder_steps + 1
    (_, N), block, slot = idx.shape, shape_block(idx), torch.arange(S, device=idx.device)
    x, h = e, e.new_zeros(*idx.shape, S, e.size(-1))  # of x (B, T, D)
    active, tokens, executed = inside, [], []
    log_w = torch.zeros_like(x[..., :1], dtype=torch.float32)  # of slot 0, before any routing
    for k in range(S):
        order = (~active).sort(dim=1, stable=True).indices[:, :N]  # (B, N)
        here = active.gather(1, order)
        tokens, executed = [*tokens, order], [*executed, here]
        key_log_w = model.mask_keys(log_w)
        key_log_w = torch.zeros_like(log_w[..., 0]) if key_log_w is None else key_log_w[..., k]
        key_log_w = key_log_w.gather(1, order).masked_fill(~here, MASKED)
        for layer in cache:
            layer.mask = (torch.cat(tokens, dim=1)[:, None] <= order[..., None])[:, None]
        rows = order[..., None].expand(-1, -1, x.size(-1))  # (B, N, D)
        with decoding_kernels(idx.device):
            out = model.model(x.gather(1, rows), order, key_log_w, model.backend, cache)
        h[:, :, k] = h[:, :, k].scatter(1, rows, (out * here[..., None]).to(h.dtype))
        if k == 0:
            s, log_w = model.route(h[:, :, :1], alpha)
            steps = stop_step(log_w, tau) * inside
            wanted = (slot <= steps[..., None]) & inside[..., None]  # (B, T, S)
            # All that the host has to know, in one copy: slots of each row in each pass.
            counts = [*wanted.sum(1).T.tolist(), [0]]
        N = -(-max(counts[k + 1]) // block) * block
        if not N:
            break
        active, x = wanted[..., k + 1], model.feed_back(h[:, :, k], e)
    found = Settled(h, s, log_w, steps, k + 1, sum(map(sum, counts)))
    slot = torch.cat([slot[k].expand(t.size(1)) for k, t in enumerate(tokens)])
    return found, slot, torch.cat(executed, dim=1)
