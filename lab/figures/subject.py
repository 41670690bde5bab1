"""A trained model of any method on a text: the loss and the steps of each token.

code         paper         shape         meaning
windows                    (W, T+1)      token ids; n = W T tokens are read, and as many are predicted
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
    """The model of a run on the first windows of its validation text.

    Args:
        path: directory of the run.
        windows: how many.
        tau: where it stops; None: that of the run's evaluation.
        device: of the model and the windows.
        data, other: as texts.validation_corpus, whose errors it raises.
    """
    config, tokenizer, val = validation_windows(path, data, other)
    rows = val.stack(0, min(windows, val.count))
    if tau is None:
        tau = config.tau
    return Subject(Path(path), load(path).to(device), tokenizer, rows.to(device), tau)


def decoded_tokens(subject):
    """Each token as decoding has it, hard-stopped at tau.

    Returns:
        For the n tokens of all windows, one after the other: (n,) losses, (n,) executed steps, and (n,)
        whether the most probable token is the one that follows.
    """
    model = subject.model

    def find(x, y):
        h, s, steps = stopped_states(model, x, subject.tau)
        h_hat = model.integrate(h, s, steps)
        return model.cross_entropy(h_hat, y), steps, model.lm_head(h_hat).argmax(-1) == y

    return by_token(subject.model, subject.windows, find)


@contextmanager
def rerouted(model, change):
    """A context in which `change` has the last word on the routing: it maps s and log_w (B, T, S) to others.

    `change` may get only some of the windows: those that have settled drop out of later passes.
    """
    own = model.route
    model.route = lambda h, alpha=0.0: change(*own(h, alpha))
    try:
        yield
    finally:
        del model.route
