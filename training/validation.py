"""What a trained model scores: as trained, at the fixed point, hard-stopped; and depth by depth."""

from bisect import bisect_left

import numpy as np
import torch

from attention import sdpa
from runtime import rank_and_size, reduce


class PermutedRouter(torch.nn.Module):
    """The step distributions of a batch, handed out to other tokens of the batch."""

    def __init__(self, s, log_w):
        super().__init__()
        order = torch.randperm(s[..., 0].numel(), generator=torch.Generator().manual_seed(0))
        order = order.to(s.device)
        self.s, self.log_w = (x.flatten(0, 1)[order].view_as(x) for x in (s, log_w))

    def forward(self, h0, alpha=0.0):
        return self.s, self.log_w


def truncate(h, s, i):
    """The integration sum over k <= i of s_k h^(k), without the later steps. -> (B, T, D).

    The weights that are left are made to sum to 1 again: the first states may have almost none.
    """
    s = s[..., : i + 1]
    s = s / s.sum(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)
    return (s[..., None] * h[:, :, : i + 1]).sum(2).to(h.dtype)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # compiling for these shapes would take longer
def evaluate(
    model, windows, count, device, R=None, tau=None, tau_steps=None, permute=False, batch_size=32,
    first=0,
):  # fmt: skip
    """Mean losses over `count` windows from the `first` on, in the order of their seed, in float32.

    R and tau as in PonderLM.states; R None is the fixed point, which decoding computes.
    permute gives each token another one's s and w: as many steps, but not where the router wants.

    Returns:
        dict: loss; steps, the mean executed at `tau_steps` (None: at tau, or 1e-4 without one); and
        per depth 0..K `truncated` (the loss of the integration truncated after step i), `weight`
        (the mean of s_i; both [] where no router mixes states), `alone` (the loss of h^(i) alone),
        `stopped` (share of tokens that stop there).
    """
    was_training, backend = model.training, model.backend
    model.eval()
    model.backend = sdpa  # which can do float32
    S, total = model.config.ponder_steps + 1, 0
    if tau_steps is None:
        tau_steps = 1e-4 if tau is None else tau
    mixes = model.has_router and model.mixes
    kinds = ("truncated", "weight") * mixes + ("alone", "stopped")
    sums = torch.zeros(1 + len(kinds) * S, dtype=torch.float64)
    rank, processes = rank_and_size()
    end = first + count
    for i in range(first + rank * batch_size, end, processes * batch_size):
        rows = [windows.window(j) for j in range(i, min(i + batch_size, end))]
        rows = torch.from_numpy(np.stack(rows)).to(device)
        x, y = rows[:, :-1], rows[:, 1:]
        h, s, log_w = model.states(x, R, tau)
        if permute:
            router, model.router = model.router, PermutedRouter(s, log_w)
            h, s, log_w = model.states(x, R, tau)
            model.router = router
        steps = model.executed(log_w, tau_steps)
        h_hat = model.integrate(h, s, None if tau is None else steps)
        found = [model.cross_entropy(h_hat, y).sum()]
        if mixes:  # otherwise there is nothing to truncate or weigh
            found += [model.cross_entropy(truncate(h, s, i), y).sum() for i in range(S)]
            found += [s[..., i].sum() for i in range(S)]
        found += [model.cross_entropy(h[:, :, i], y).sum() for i in range(S)]
        found += [(steps == i).sum() for i in range(S)]
        sums += torch.stack([x.to(found[0].dtype) for x in found]).cpu().double()
        total += y.numel()
    model.train(was_training)
    model.backend = backend
    sums, total = reduce(sums, device), reduce(torch.tensor(total), device)
    loss, per_depth = (sums[0] / total).item(), (sums[1:] / total).view(-1, S).tolist()
    by_kind = {"truncated": [], "weight": []} | dict(zip(kinds, per_depth, strict=True))
    steps = sum(i * share for i, share in enumerate(by_kind["stopped"]))
    return dict(loss=loss, steps=steps, **by_kind)


def reported(config, windows):
    """How many windows the reported losses are of: the first ones, which leave as many for tau."""
    return min(config.eval_windows, -(-windows.count // 2))


TAUS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 5e-3, 3e-3, 2e-3, 1e-3, 5e-4, 3e-4, 2e-4, 1e-4)


def choose_tau(model, windows, count, device, tau_cost):
    """The largest of TAUS that loses at most `tau_cost` nats to all steps; 0 if none does. Found by
    halving, since a smaller tau loses less.

    It is chosen by up to 128 windows behind the first `count`, which are reported. (A single
    window serves both.) Differences on the same tokens need no more.
    """
    held = min(128, count, windows.count - count)

    def loss(tau):
        first = count if held else 0
        return evaluate(model, windows, held or 1, device, tau=tau, first=first)["loss"]

    limit = loss(None) + tau_cost
    first = bisect_left(TAUS, True, key=lambda tau: loss(tau) <= limit)
    return (*TAUS, 0.0)[first]


def final_report(model, windows, config, device):
    """The losses that count, printed as they come and returned: as trained, at the fixed point,
    hard-stopped at the tau of the config and at one that is chosen."""
    R, iterates = max(config.model.refinements), model.iterates and model.config.ponder_steps > 0
    count = reported(config, windows)

    def measure(title, tau_steps=config.tau, remark="", **kwargs):
        scores = evaluate(model, windows, count, device, tau_steps=tau_steps, **kwargs)
        print(f"  {title:28}  {scores['loss']:.4f}{remark}", flush=True)
        return scores

    print(f"\nvalidation loss in nats per token, {count} windows of {windows.block_size} tokens")
    trained = measure(f"as trained, R = {R}", R=R) if iterates else None
    fixed = measure("at the fixed point" if iterates else model.title)
    hard = permuted = fixed
    chosen = None
    if model.has_router:  # otherwise nothing is masked and all tokens take as many steps
        tau = config.tau
        hard = measure(f"hard-stopped at tau = {tau:g}", tau=tau)
        remark = "  (as many steps elsewhere)"
        if model.mixes:
            permuted = measure("the same, s permuted", remark=remark, tau=tau, permute=True)
        tau = choose_tau(model, windows, count, device, config.tau_cost)
        scores = measure(f"and at tau = {tau:g}", tau, "  (chosen by cost)", tau=tau)
        chosen = {"tau": tau, **scores}
    print(f"executed steps per token: {hard['steps']:.2f} of {model.config.ponder_steps}", end="")
    print(f"; at tau = {chosen['tau']:g} {chosen['steps']:.2f}" if chosen else "")
    print("depth i                      " + "".join(f"{i:8d}" for i in range(len(hard["alone"]))))
    rows = {"mean of s": fixed["weight"], "loss, integrated up to i": fixed["truncated"]}
    rows |= {"loss of h^(i) alone": fixed["alone"], "tokens that stop here": hard["stopped"]}
    for title, row in rows.items():
        if row:  # without a router nothing is weighed
            print(f"  {title:27}" + "".join(f"{x:8.3f}" for x in row))
    trained = trained or fixed
    return dict(trained=trained, fixed=fixed, hard=hard, permuted=permuted, chosen=chosen, R=R)
