"""PonderLM-1 (arXiv 2505.20674): the embedding of the token that the model expects next is fed back, K times.

    e_i = e_{i-1} + softmax(lm_head(F(e_{i-1}))) E, i = 1 .. K; logits = lm_head(F(e_K))

F is the transformer, and E the scaled embedding table; the softmax is over the whole vocabulary. Each pass
sees its own keys only. The LLaMA form in PonderLM-2's code does not accumulate: there, e_i = e_0 + .., which
`--no-accumulate` gives.
"""

from lab.methods import PonderConfig
from lab.methods.looped import LoopedLM
from model import validated_dataclass
from router import upcast


def mixture(model, h):
    """The mean of the scaled embeddings, weighted by how probable each token is after states h.
    (..., D) -> (..., D)"""
    p = upcast(model.lm_head(h)).softmax(-1)  # (..., V)
    return p.to(h.dtype) @ model.model.embed_tokens.weight.to(h.dtype) * model.config.scale


@validated_dataclass
class PonderLM1Config(PonderConfig):
    # add each predicted embedding to the input of the previous pass; off: to the token's own embedding
    accumulate: bool = True


class PonderLM1(LoopedLM):
    method = "ponderlm1"
    title = "PonderLM-1"
    Config = PonderLM1Config

    def next_input(self, x, e, y, h):
        base = x if self.config.accumulate else e
        return base + mixture(self, h)
