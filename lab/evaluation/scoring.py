"""Scoring texts: the loss of each token, soft and as it decodes, in windows of the model's length.

A text is scored in windows that lie half a window apart, so that each token but the first ones has at least
T/2 tokens before it. A window's Jacobi iteration ends on its own: no score depends on what else is scored, or
on padding.

places    (n, 4)    of each window its text, where it begins and ends there, and the first id that it predicts
"""

from typing import NamedTuple

import numpy as np
import torch

from lab.common import progress
from lab.engine.states import stopped_states


def cut(texts, T, most=None):
    """Texts, arrays of ids -> places of windows that read at most T ids each and predict all ids but the
    first of a text. `most`: only so many windows, evenly spread."""
    n, hop = np.array([len(ids) for ids in texts]), max(T // 2, 1)
    counts = np.where(n < 2, 0, 1 + np.maximum(-(-(n - 1 - T) // hop), 0))  # windows of each text
    ends = counts.cumsum()
    chosen = np.arange(ends[-1])
    if most and most < len(chosen):
        chosen = np.linspace(0, ends[-1] - 1, most).astype(int)
    text = np.searchsorted(ends, chosen, side="right")
    start = hop * (chosen - (ends - counts)[text])
    first = np.where(start == 0, 1, start + T + 1 - hop)  # what the window before has not predicted
    return np.stack([text, start, np.minimum(start + T + 1, n[text]), first], axis=1)


class Scores(NamedTuple):
    """Of the n tokens that are predicted, in the order of the text."""

    soft: torch.Tensor  # (n,) loss in nats, all steps run
    hard: torch.Tensor  # (n,) stopped at tau, as decoding has it
    steps: torch.Tensor  # (n,) executed steps at tau


def batches(texts, places, batch_tokens, device):
    """Yield windows in batches of at most `batch_tokens` tokens, the longest first: which they are, inputs x
    and targets y (B, T), padded behind, and their lengths (B,)."""
    read = places[:, 2] - places[:, 1] - 1  # ids that are read in each
    order = np.argsort(-read, kind="stable")
    with progress(total=int(read.sum()), unit=" tokens", leave=False) as bar:
        while len(order):
            size = max(1, batch_tokens // int(read[order[0]]))
            batch, order = order[:size], order[size:]
            lengths = torch.from_numpy(read[batch])
            ids = torch.zeros(len(batch), int(lengths.max()) + 1, dtype=torch.long)
            for row, (text, start, end, _) in enumerate(places[batch]):
                ids[row, : end - start] = torch.from_numpy(texts[text][start:end].astype(np.int64))
            yield batch, ids[:, :-1].to(device), ids[:, 1:].to(device), lengths.to(device)
            bar.update(int(lengths.sum()))


@torch.no_grad()
def score(model, texts, places, tau=1e-4, batch_tokens=4096):
    """Score what windows predict, so many tokens at once at most -> Scores."""
    scores = [None] * len(places)
    for batch, x, y, lengths in batches(texts, places, batch_tokens, model.lm_head.weight.device):
        h, s, steps = stopped_states(model, x, 0, lengths=lengths)  # 0: all run
        soft = hard = model.cross_entropy(model.integrate(h, s, steps), y)
        if model.has_router:  # otherwise tau changes nothing
            h, s, steps = stopped_states(model, x, tau, lengths=lengths)
            hard = model.cross_entropy(model.integrate(h, s, steps), y)
        found = soft.cpu(), hard.cpu(), steps.cpu()
        for row, i in enumerate(batch):
            _, start, end, first = places[i]
            scores[i] = [values[row, first - start - 1 : end - start - 1] for values in found]
    return Scores(*(torch.cat(parts) for parts in zip(*scores, strict=True)))
