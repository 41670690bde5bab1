"""How much could deciding gain? A model that is good at every depth (methods/drawn.py) is given steps.

The gain of step k is the loss with k - 1 steps for all tokens, minus that with k for all. A share of the
tokens takes k steps, the others k - 1. Which ones, is told by one of three rules:

column       meaning
step, share  k, and the share of the tokens that take it
predicted    loss, nats a token: those whose gain is the largest as a linear function of h^(0) predicts it,
             fitted on the first half of the windows. All losses are of the second half
random       as many at random
largest      those whose gain is the largest: a bound, since nobody knows it before
"""

from functools import partial

import torch

from common import UserError
from lab.figures.comparing import Comparison, over_seeds
from lab.figures.subject import rerouted
from lab.figures.tables import COLORS, LINES
from lab.methods.drawn import Drawn, imposed
from model import Count, validated_dataclass

SHARES = 0, 0.25, 0.5, 0.75, 1
RULES = "predicted", "random", "largest"


@torch.no_grad()
def given(model, windows, steps):
    """Every token takes its `steps` (W, T), whatever the router says. -> losses (W, T), h^(0) (W, T, D)"""
    found = []
    for rows, some in zip(windows.split(16), steps.to(windows).split(16), strict=True):
        with rerouted(model, partial(imposed, some)):
            out = model(rows[:, :-1], rows[:, 1:])
        found.append((out.ce.cpu(), out.h[:, :, 0].cpu()))
    return [torch.cat(part) for part in zip(*found, strict=True)]


def predict(h0, gain, other):
    """gain (n,) as a linear function of h0 (n, D), by least squares; its values at `other` (m, D). -> (m,)"""
    h0, other = (torch.nn.functional.pad(x.double(), (0, 1), value=1) for x in (h0, other))  # and a constant
    return other @ torch.linalg.lstsq(h0, gain.double()[:, None]).solution[:, 0]


def take_most(values, share, k):
    """k steps for this share of the tokens, those with the largest values (n,), k - 1 for the others."""
    steps = torch.full(values.shape, k - 1)
    steps[values.argsort(descending=True, stable=True)[: round(share * len(values))]] = k
    return steps


def depth_rows(model, windows):
    """A row for each step and share."""
    W, T, half = len(windows), windows.size(1) - 1, len(windows) // 2
    at = [given(model, windows, torch.full((W, T), k)) for k in range(model.config.ponder_steps + 1)]
    h0, generator = at[0][1], torch.Generator().manual_seed(0)
    for k in range(1, len(at)):
        gain = at[k - 1][0] - at[k][0]  # (W, T)
        predicted = predict(h0[:half].flatten(0, 1), gain[:half].flatten(), h0[half:].flatten(0, 1))
        random = torch.rand(predicted.shape, generator=generator)
        for share in SHARES:
            row = {"step": k, "share": share}
            for name, values in zip(RULES, (predicted, random, gain[half:].flatten()), strict=True):
                steps = take_most(values, share, k).view(-1, T)
                row[name] = given(model, windows[half:], steps)[0].double().mean().item()
            yield row


@validated_dataclass
class Depth(Comparison):
    """What would steps gain that go to the right tokens? Of runs of --method drawn."""

    windows: Count = 512  # of validation text; by the first half gains are predicted
    sheet = "steps a token", "loss, nats a token"
    by = ["step", "share"]
    columns = {"K": "K", "seeds": "seeds", "step": "step", "share": "share:g"}
    columns |= {name: f"{name}:.4f" for name in RULES}

    def measure(self, run):
        if not issubclass(run.method, Drawn):
            raise UserError(f"{run.path} is a {run.method.title}: give runs of --method drawn")
        one = self.subject(run, self.windows)
        return list(depth_rows(one.model, one.windows))

    def picture(self, frame, axes):
        for (K, step), curve in over_seeds(frame, self.by).groupby(["K", "step"], sort=False):
            for name, look in zip(RULES, LINES, strict=False):
                label = f"K = {K}: {name}" if step == 1 else None
                axes.plot(curve.step - 1 + curve.share, curve[name], look, color=COLORS[K], label=label)
