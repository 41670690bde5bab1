"""Jacobi iteration over executed slots only, so that skipped slots save time also where all tokens run at
once.

PonderLM.jacobi runs all S slots of every token and hides those beyond K-hat. Here a pass holds only the slots
k <= K-hat_t of each token, in the order of the text.

    pass 1   x1 x2 x3 x4                 slot 0 of every token; the router reads h^(0)
    pass 2   x1 .  x2 h2 x3 h3 x4 h4     K-hat = 0 1 2 1: one more slot of each token that wants one
    pass 3   x1 .  x2 h2 x3 h3 h3 x4 h4  K-hat is computed anew after each pass; the last pass changes nothing

A slot sits out while its w is below tau, and comes back when w rises. The input of slot k is the output of
slot k-1 in the pass before, so a token may run at most one slot more than it ran in that pass. Because of
this rule the first passes grow one slot at a time.

code      symbol      shape           meaning
h         h_t^(k)     (B, T, S, D)    the newest output of each slot
steps     K-hat_t     (B, T)          steps by the newest mask scores
ran                   (B, T)          how many slots of a token ran in the last pass; 0 before the first pass
rows                  (R,)            indices of the rows that have not settled
active                (R, T, S)       which slots of these rows are in a pass
order                 (R, N)          indices t*S + k of the active slots, in the order of the text; a row
                                      with fewer than N of them is padded with inactive slots
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
    steps: torch.Tensor  # (B, T) K-hat, 0 after the end of a row
    passes: int
    slots: int  # how many slots ran, in all passes and rows together


def within(idx, lengths):
    """Which positions of idx (B, T) hold a token, (B, T): those before `lengths` (B,), or all if `lengths` is
    None."""
    if lengths is None:
        return torch.ones_like(idx, dtype=torch.bool)
    return torch.arange(idx.size(1), device=idx.device) < lengths[:, None]


def shape_block(idx):
    """N is rounded up to a multiple of this number. On a GPU every new shape costs time, since kernels are
    chosen or built for it."""
    return 1 if idx.device.type == "cpu" else 64


def run_slots(model, e, h, log_w, active, N, cache):
    """Run the active slots of R rows through the backbone, at most N per row.

    Rows with fewer active slots are padded with inactive ones, which run, too. They stand after the active
    slots, where the causal mask hides them. What they write into h is never read: an active slot k reads
    slot k-1 of its token, which was active in the pass before.

    Args:
        model: a PonderLM.
        e: (R, T, D) embeddings.
        h: (R, T, S, D) the outputs so far.
        log_w: (R, T, S).
        active: (R, T, S).
        N: the number of slots in the sequence that runs.
        cache: as in `settle`.

    Returns:
        (R, T, S, D): h with the new outputs.
    """
    S = h.size(2)
    # Active slots first, in the order of the text.
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
    """Compute the states of all tokens in parallel, as decoding at tau has them (sections 3.3 and 3.4.1).

    A row has settled when a pass has changed its latents by at most `tolerance` (relative norm), and has not
    changed K-hat at all. After K*T + 1 passes the latents are exact, so no row takes more passes than that. A
    row that has settled sits out, so that its results do not depend on other rows.

    Args:
        model: a PonderLM whose latents are a fixed point (model.iterates).
        idx: (B, T) token ids.
        tau, alpha: as in PonderLM.ponder_token.
        lengths: (B,) the number of tokens in each row, at least 1; padding follows them. None: T.
        tolerance: None: 1e-5, or 1e-2 in half precision. With 0, a row settles when nothing changes any more.
        cache: one object per layer whose `attend` takes the place of the model's attention. Before each pass
            its `rows` is set to the indices of the rows in the pass; see cache.PromptLayer.

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
    s, log_w = model.route(h)  # (B, T, S) each, here for their shapes and dtypes alone
    s = torch.zeros_like(s)
    log_w = torch.zeros_like(log_w)
    steps = torch.zeros_like(idx)
    ran = torch.zeros_like(idx)
    slot = torch.arange(S, device=idx.device)

    def wanted(rows):
        """Which slots of the rows with these indices (R,) the next pass runs, (R, T, S)."""
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
        # The host needs two results of a pass. They are copied at once, since each copy waits for a GPU.
        moves, counts = torch.stack([moves, following.flatten(1).sum(1)]).tolist()
        left = [i for i, row_moves in enumerate(moves) if row_moves]
        counts = [counts[i] for i in left]
        left = torch.tensor(left, dtype=torch.long).to(idx.device)
        rows = rows[left]
        following = following[left]
    # The steps of the last pass. In a row that has settled, stop_step says the same.
    steps = (ran - 1) * inside
    h = h * (slot <= steps[..., None])[..., None]
    return Settled(h, s, log_w, steps, passes, slots)


def has_moved(before, after, active, following, tolerance):
    """Whether a pass has changed the latents of a row, or the choice of slots that run.

    Args:
        before, after: (R, T, S, D) outputs before and after the pass.
        active, following: (R, T, S) the slots of this pass and of the next one.
        tolerance: the largest relative norm of a change that counts as none.

    Returns:
        (R,) booleans.
    """
    fed_back = following[..., 1:, None]  # the outputs that are inputs of the next pass
    change = ((after - before)[:, :, :-1] * fed_back).flatten(1).norm(dim=1)  # (R,)
    size = (after[:, :, :-1] * fed_back).flatten(1).norm(dim=1)
    return (change > tolerance * size) | (following != active).flatten(1).any(1)


def stopped_states(model, idx, tau, alpha=0.0, lengths=None):
    """The states that decoding at tau would compute, for any method. The arguments are those of `settle`.

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
    """Compute the states of all tokens in parallel on the grid (methods/grid.py), as decoding at tau has
    them.

    K+1 passes are exact: pass k runs slot k of the tokens that take k steps or more.

    Args:
        model, idx, tau, alpha, lengths: as in `settle`.
        cache: one cache.GridPrompt per layer.

    Returns:
        Settled; for each of the n keys in `cache` its slot, (n,); and whether that slot was executed, (B, n).
    """
    e = model.embed(idx)  # (B, T, D)
    inside = within(idx, lengths)  # (B, T)
    B, T, D = e.shape
    S = model.config.ponder_steps + 1
    block = shape_block(idx)
    slot = torch.arange(S, device=idx.device)
    h = e.new_zeros(B, T, S, D)
    token_of_key = []  # for each slot so far: (B, N) the token to which each of its N keys belongs
    executed = []  # for each slot so far: (B, N) whether the key is one of a slot that ran, and no padding

    def run(k, x, active, N, log_w):
        """Run slot k of the active tokens, at most N per row, and put its outputs into h.

        Args:
            k: the slot.
            x: (B, T, D) its inputs.
            active: (B, T) the tokens that run it.
            N: the number of tokens in the sequence that runs; rows with fewer active ones are padded.
            log_w: (B, T, S), or (B, T, 1) for slot 0.
        """
        # Active tokens first, in the order of the text.
        order = (~active).sort(dim=1, stable=True).indices[:, :N]  # (B, N)
        is_active = active.gather(1, order)  # (B, N)
        token_of_key.append(order)
        executed.append(is_active)
        # A query of token t sees the keys of tokens up to t, of all slots so far.
        tokens = torch.cat(token_of_key, dim=1)  # (B, keys so far)
        sees = tokens[:, None, :] <= order[:, :, None]  # (B, N, keys so far)
        for layer in cache:
            layer.mask = sees[:, None]  # (B, 1, N, keys so far), the same for all heads
        key_log_w = model.mask_keys(log_w)
        if key_log_w is None:
            key_log_w = torch.zeros_like(log_w[..., 0])
        else:
            key_log_w = key_log_w[..., k]  # (B, T)
        key_log_w = key_log_w.gather(1, order).masked_fill(~is_active, LOG_W_HIDDEN)
        in_order = order[..., None].expand(-1, -1, D)  # (B, N, D)
        with decoding_kernels(idx.device):
            out = model.model(x.gather(1, in_order), order, key_log_w, model.backend, cache)
        out = (out * is_active[..., None]).to(h.dtype)
        h[:, :, k] = h[:, :, k].scatter(1, in_order, out)

    log_w_of_slot_0 = torch.zeros(B, T, 1, dtype=torch.float32, device=idx.device)
    run(0, e, inside, T, log_w_of_slot_0)
    s, log_w = model.route(h[:, :, :1], alpha)  # (B, T, S) each
    steps = stop_step(log_w, tau) * inside
    wanted = (slot <= steps[..., None]) & inside[..., None]  # (B, T, S)
    # counts[k][b]: how many tokens of row b run slot k. The only copy to the host, which waits for a GPU.
    counts = wanted.sum(1).T.tolist()
    for k in range(1, S):
        if not any(counts[k]):
            break
        x = model.feed_back(h[:, :, k - 1], e)
        N = math.ceil(max(counts[k]) / block) * block
        run(k, x, wanted[..., k], N, log_w)
    found = Settled(h, s, log_w, steps, passes=len(executed), slots=sum(map(sum, counts)))
    slots_of_keys = [slot[k].expand(order.size(1)) for k, order in enumerate(token_of_key)]
    return found, torch.cat(slots_of_keys), torch.cat(executed, dim=1)
