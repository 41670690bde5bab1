"""What is inside a model before it takes an extra step: how well the state after each layer would predict.

column       meaning
layer        1 .. the number of layers; 0: the embedding
loss         nats a token if the head read the state of slot 0 after this layer, through the final norm: in
             the last row that of h^(0)
size         root mean square of this state's numbers, mean over tokens
weights      root mean square of the layer's weights; in row 0 of the embedding's
"""

from contextlib import contextmanager

import pandas as pd
import torch

from analyze import by_token
from common import UserError
from lab.figures.comparing import ABOUT, Comparison
from model import Count, validated_dataclass

# Methods whose first pass does not compute h^(0) as the output of all layers on slot 0 alone.
NOT_SLOT_0_ALONE = {"pause", "mor-expert", "mor-token"}


@contextmanager
def states_of_slot_0(model):
    """A context that yields a list. It receives the states of the first pass, which runs slot 0 alone: after
    the embedding and after each layer, (B, T, D) each."""
    found = []

    def before_first(layer, inputs):
        if not found:
            found.append(inputs[0])

    def after(layer, inputs, output):
        if len(found) <= len(model.model.layers):
            found.append(output)

    layers = model.model.layers
    hooks = [layers[0].register_forward_pre_hook(before_first)]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def layer_rows(subject):
    """A row for each layer of one run: the columns above."""
    model = subject.model

    def find(x, y):
        with states_of_slot_0(model) as states:
            model.states(x, R=0)
        losses = [model.cross_entropy(model.model.norm(state), y) for state in states]
        sizes = [state.square().mean(-1).sqrt() for state in states]
        return *losses, *sizes

    found = [values.double().mean().item() for values in by_token(subject.model, subject.windows, find)]
    parts = [model.model.embed_tokens, *model.model.layers]
    rows = []
    for n, part in enumerate(parts):
        squares = sum(p.detach().square().sum() for p in part.parameters())
        count = sum(p.numel() for p in part.parameters())
        row = {"layer": n, "loss": found[n], "size": found[len(parts) + n]}
        rows.append(row | {"weights": (squares / count).sqrt().item()})
    return pd.DataFrame(rows)


@validated_dataclass
class Within(Comparison):
    """Print a table of how well the next token could be predicted from the state after each layer, before any
    extra step."""

    windows: Count = 512  # number of windows (pieces as long as the model's context) to measure
    by = ["layer"]
    columns = ABOUT | {"layer": "layer", "loss": "loss:.4f", "size": "size:.2f", "weights": "weights:.4f"}

    def measure(self, run):
        if run.model_config.method in NOT_SLOT_0_ALONE:
            raise UserError(
                f"{run.path} uses the method {run.model_config.method}, whose first pass does not run slot 0 "
                "alone: remove it from --runs"
            )
        return layer_rows(self.subject(run, self.windows))
