"""The loss of each token of texts, with all steps and as the model decodes, in windows of the model's length.

Windows lie half a window apart, so that each token, except for the first ones, is predicted from at least T/2
tokens. The Jacobi iteration of each window ends on its own. So no score depends on what else is scored, or on
padding.

places    (n, 4)    for each window its text, where it begins and ends there, and the first id it predicts
"""

from typing import NamedTuple

import numpy as np
import torch

from lab.common import progress
from lab.engine.states import stopped_states


def cut(texts, T, most=None):
    """Cut texts into windows that predict all ids but the first one of each text.

    A window reads up to T ids, and the next one begins T/2 ids later. Each predicts what the one before has
    not predicted. With one text of 9 ids and T = 4, for example:

        text  start  end  first      the window reads ids 0 .. 3 and predicts 1 .. 4
           0      0    5      1
           0      2    7      5      reads 2 .. 5, predicts 5 and 6
           0      4    9      7      reads 4 .. 7, predicts 7 and 8

    Args:
        texts: arrays of ids.
        T: how many ids a window reads at most.
        most: how many windows, evenly spread; None: all.

    Returns:
        places (n, 4).
    """
    n = np.array([len(ids) for ids in texts])
    hop = max(T // 2, 1)
    further = np.maximum(np.ceil((n - 1 - T) / hop), 0).astype(int)  # windows after the first one
    counts = np.where(n < 2, 0, 1 + further)  # windows of each text
    ends = counts.cumsum()
    first_of_text = ends - counts  # the number of each text's first window
    chosen = np.arange(ends[-1])
    if most and most < len(chosen):
        chosen = np.linspace(0, ends[-1] - 1, most).astype(int)
    text = np.searchsorted(ends, chosen, side="right")
    number_in_text = chosen - first_of_text[text]
    start = hop * number_in_text
    first = np.where(start == 0, 1, start + T + 1 - hop)  # what the window before has not predicted
    return np.stack([text, start, np.minimum(start + T + 1, n[text]), first], axis=1)


class Scores(NamedTuple):
    """Of the n tokens that are predicted, in the order of the texts."""

    soft: torch.Tensor  # (n,) loss in nats, with all steps
    hard: torch.Tensor  # (n,) loss in nats, stopped at tau, as the model decodes
    steps: torch.Tensor  # (n,) executed steps at tau


def batches(texts, places, batch_tokens, device):
    """Yield windows in batches, the longest windows first.

    Args:
        texts, places: as `cut`.
        batch_tokens: how many tokens a batch has at most, if its windows are not longer.
        device: of the tensors.

    Yields:
        The numbers of B windows, their inputs x and targets y (B, T), padded at the end, and their lengths
        (B,).
    """
    read = places[:, 2] - places[:, 1] - 1  # ids that each window reads
    order = np.argsort(-read, kind="stable")
    with progress(total=int(read.sum()), unit=" tokens", leave=False) as bar:
        while len(order):
            size = max(1, batch_tokens // int(read[order[0]]))
            batch = order[:size]
            order = order[size:]
            lengths = torch.from_numpy(read[batch])
            ids = torch.zeros(len(batch), int(lengths.max()) + 1, dtype=torch.long)
            for row, (text, start, end, _) in enumerate(places[batch]):
                ids[row, : end - start] = torch.from_numpy(texts[text][start:end].astype(np.int64))
            yield batch, ids[:, :-1].to(device), ids[:, 1:].to(device), lengths.to(device)
            bar.update(int(lengths.sum()))


@torch.no_grad()
def score(model, texts, places, tau=1e-4, batch_tokens=4096):
    """The Scores of what windows predict. Arguments as those of `batches`; tau: where decoding stops."""
    scores = [None] * len(places)
    for batch, x, y, lengths in batches(texts, places, batch_tokens, model.lm_head.weight.device):
        h, s, steps = stopped_states(model, x, 0, lengths=lengths)  # tau = 0: all slots run
        soft = model.cross_entropy(model.integrate(h, s, steps), y)
        hard = soft
        if model.has_router:  # without a router tau changes nothing
            h, s, steps = stopped_states(model, x, tau, lengths=lengths)
            hard = model.cross_entropy(model.integrate(h, s, steps), y)
        found = soft.cpu(), hard.cpu(), steps.cpu()
        for row, i in enumerate(batch):
            _, start, end, first = places[i]
            scores[i] = [values[row, first - start - 1 : end - start - 1] for values in found]
    return Scores(*(torch.cat(parts) for parts in zip(*scores, strict=True)))
