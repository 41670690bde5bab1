"""Scoring texts: the loss of each token, soft and as it decodes, in windows of the model's length.

A text is scored in windows that lie half a window apart, so that each token but the first ones has
at least T/2 tokens before it. A window's Jacobi iteration ends on its own: no score depends on what
else is scored, or on padding.
"""

from dataclasses import dataclass

import torch

from lab.common import progress
from lab.engine.prefill import stopped_states


@dataclass
class Window:
    """Part of a text: token ids, of which those from `first` on are predicted here."""

    ids: list
    first: int  # at least 1: the first id only is read

    @property
    def predictions(self):
        """Where its predictions are made: the places before those ids."""
        return slice(self.first - 1, len(self.ids) - 1)


def cut(ids, T):
    """The Windows of a text, which read at most T ids; each id but the first is predicted once."""
    windows, done = [], 1
    for start in range(0, len(ids) - 1, max(T // 2, 1)):
        end = min(start + T + 1, len(ids))
        windows.append(Window(ids[start:end], done - start))
        done = end
        if end == len(ids):
            break
    return windows


@dataclass
class Scores:
    """Of the n tokens that are predicted, in the order of the text."""

    soft: torch.Tensor  # (n,) loss in nats, all steps run
    hard: torch.Tensor  # (n,) stopped at tau, as decoding has it
    steps: torch.Tensor  # (n,) executed steps at tau


def batches(windows, batch_tokens, device):
    """Yield Windows in batches of at most `batch_tokens` tokens, the longest first: which they are,
    inputs x and targets y (B, T), padded behind, and the windows' lengths (B,)."""
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i].ids))
    with progress(total=sum(len(w.ids) - 1 for w in windows), unit=" tokens", leave=False) as bar:
        while order:
            size = max(1, batch_tokens // (len(windows[order[0]].ids) - 1))
            batch, order = order[:size], order[size:]
            lengths = torch.tensor([len(windows[i].ids) - 1 for i in batch], device=device)
            ids = torch.zeros(len(batch), int(lengths.max()) + 1, dtype=torch.long)
            for row, i in enumerate(batch):
                ids[row, : len(windows[i].ids)] = torch.tensor(windows[i].ids)
            yield batch, ids[:, :-1].to(device), ids[:, 1:].to(device), lengths
            bar.update(int(lengths.sum()))


@torch.no_grad()
def score(model, windows, tau=1e-4, batch_tokens=4096):
    """Score what Windows predict -> Scores."""
    rows = [None] * len(windows)
    for batch, x, y, lengths in batches(windows, batch_tokens, model.lm_head.weight.device):
        h, s, steps = stopped_states(model, x, 0, lengths=lengths)  # 0: all run
        soft = hard = model.cross_entropy(model.integrate(h, s, steps), y)
        if model.has_router:  # otherwise tau changes nothing
            h, s, steps = stopped_states(model, x, tau, lengths=lengths)
            hard = model.cross_entropy(model.integrate(h, s, steps), y)
        for row, i in enumerate(batch):
            part = windows[i].predictions
            rows[i] = [values[row, part].cpu() for values in (soft, hard, steps)]
    return Scores(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
