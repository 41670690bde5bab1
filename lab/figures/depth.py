"""How much could be gained by deciding which tokens take a step? A model that is good at every depth
(methods/drawn.py) is told how many steps each token takes.

The gain of step k at a token is the loss if all tokens take k - 1 steps, minus the loss if all take k. In
each row a fraction of the tokens takes k steps, and the others take k - 1. Three rules say which tokens take
k:

column       meaning
step, share  k, and the fraction of the tokens that take k steps
predicted    loss, nats per token, if the tokens with the largest predicted gain take k; a linear function
             of h^(0) predicts it, fitted on the first half of the windows. All losses are of the second half
random       loss if as many random tokens take k steps
largest      loss if the tokens with the largest gain take k steps: a bound, as nobody knows the gain before
"""

from functools import partial

import torch

from common import UserError
from lab.figures.comparing import ABOUT, Comparison, over_seeds
from lab.figures.subject import rerouted
from lab.figures.tables import COLORS, LINES
from lab.methods.drawn import Drawn, imposed
from model import Count, validated_dataclass

SHARES = 0, 0.25, 0.5, 0.75, 1
# The columns of the three rules, and how the legend says it.
RULES = {"predicted": "by a predicted gain", "random": "at random", "largest": "by the true gain"}


@torch.no_grad()
def given(model, windows, steps):
    """Score windows (W, T+1) with given `steps` (W, T), whatever the router says.

    Returns:
        The losses (W, T) and h^(0) (W, T, D).
    """
    losses = []
    first_states = []
    for rows, steps_of_rows in zip(windows.split(16), steps.to(windows).split(16), strict=True):
        with rerouted(model, partial(imposed, steps_of_rows)):
            out = model(rows[:, :-1], rows[:, 1:])
        losses.append(out.ce.cpu())
        first_states.append(out.h[:, :, 0].cpu())
    return torch.cat(losses), torch.cat(first_states)


def predict(h0, gain, other):
    """Fit gain (n,) as a linear function of h0 (n, D) by least squares.

    Returns:
        (m,) its values at `other` (m, D).
    """
    h0 = torch.nn.functional.pad(h0.double(), (0, 1), value=1)  # with a constant
    other = torch.nn.functional.pad(other.double(), (0, 1), value=1)
    return other @ torch.linalg.lstsq(h0, gain.double()[:, None]).solution[:, 0]


def take_most(values, share, k):
    """Steps (n,): k for the fraction `share` of the tokens that has the largest values (n,), else k - 1."""
    steps = torch.full(values.shape, k - 1)
    steps[values.argsort(descending=True, stable=True)[: round(share * len(values))]] = k
    return steps


def depth_rows(model, windows):
    """Yield the row of each step and share, for windows (W, T+1)."""
    W = len(windows)
    T = windows.size(1) - 1
    K = model.config.ponder_steps
    half = W // 2
    losses = []  # (W, T) if all tokens take k steps
    for k in range(K + 1):
        loss, first_states = given(model, windows, torch.full((W, T), k))
        losses.append(loss)
        if k == 0:
            h0 = first_states  # (W, T, D)
    generator = torch.Generator().manual_seed(0)
    for k in range(1, K + 1):
        gain = losses[k - 1] - losses[k]  # (W, T)
        predicted = predict(h0[:half].flatten(0, 1), gain[:half].flatten(), h0[half:].flatten(0, 1))
        random = torch.rand(predicted.shape, generator=generator)
        for share in SHARES:
            row = {"step": k, "share": share}
            for name, values in zip(RULES, (predicted, random, gain[half:].flatten()), strict=True):
                steps = take_most(values, share, k).view(-1, T)
                loss, _ = given(model, windows[half:], steps)
                row[name] = loss.double().mean().item()
            yield row


@validated_dataclass
class Depth(Comparison):
    """Plot how much lower the loss would be if steps went to the tokens that gain from them. For runs of
    --method drawn."""

    # number of windows (pieces as long as the model's context) to measure; the gain of a step is fitted on
    # the first half of them and tested on the second
    windows: Count = 512
    sheet = "If some of the tokens take one step more", "steps per token, mean", "loss, nats per token"
    by = ["step", "share"]
    columns = ABOUT | {"step": "step", "share": "share:g"}
    columns |= {name: f"{name}:.4f" for name in RULES}

    def measure(self, run):
        if not issubclass(run.method, Drawn):
            raise UserError(
                f"{run.path} was trained with --method {run.model_config.method}: give runs that were "
                "trained with --method drawn"
            )
        one = self.subject(run, self.windows)
        return list(depth_rows(one.model, one.windows))

    def picture(self, frame, axes):
        models = over_seeds(frame, self.by).groupby(["method", "K"], sort=False)
        for i, ((method, K), rows) in enumerate(models):
            color = COLORS[i % len(COLORS)]
            for step, curve in rows.groupby("step"):
                for rule, look in zip(RULES, LINES, strict=False):
                    label = f"{method}, K = {K:.0f}: tokens chosen {RULES[rule]}" if step == 1 else None
                    axes.plot(curve.step - 1 + curve.share, curve[rule], look, color=color, label=label)
