"""A trained model of any method and a text, and what each token costs and takes there.

code         paper         shape         meaning
windows                    (W, T+1)      token ids; n = W T tokens are read and as many predicted
steps        K-hat         (n,)          executed steps of each token, at tau
"""

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from analyze import by_token
from lab.engine.states import stopped_states
from lab.evaluation.texts import validation_windows
from lab.interop.weights import load
from model import PonderLM
from tokenizer import Tokenizer


@dataclass
class Subject:
    """A trained model and the validation windows that it is measured on."""

    path: Path
    model: PonderLM
    tokenizer: Tokenizer
    windows: torch.Tensor
    tau: float


def open_subject(path, windows=256, tau=None, device="cpu", data=None, other=False):
    """A run's model with the first `windows` of its validation text; tau None: where it was scored.
    `data`, `other` and errors: see validation_windows."""
    config, tokenizer, val = validation_windows(path, data, other)
    rows = val.stack(0, min(windows, val.count))
    tau = config.tau if tau is None else tau
    return Subject(Path(path), load(path).to(device), tokenizer, rows.to(device), tau)


def decoded(subject):
    """Of each token as decoding has it, hard-stopped at tau: the loss, the steps, and whether the token that
    follows is the most probable one. -> (n,) each"""
    model = subject.model

    def find(x, y):
        h, s, steps = stopped_states(model, x, subject.tau)
        h_hat = model.integrate(h, s, steps)
        return model.cross_entropy(h_hat, y), steps, model.lm_head(h_hat).argmax(-1) == y

    return by_token(subject.windows, find)


@contextmanager
def rerouted(model, change):
    """Within it `change` has the last word on s and log_w (B, T, S) of the router: it takes both and gives
    both. A pass may hold some of the windows alone."""
    own = model.route
    model.route = lambda h, alpha=0.0: change(*own(h, alpha))
    try:
        yield
    finally:
        del model.route
