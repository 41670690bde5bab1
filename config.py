"""The shape of a model, its method, and how it ponders: one dataclass, saved with the weights."""

import math
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Literal

import weights

PONDER = ("ponderlm3", "ponderlm2", "vanilla")  # three settings of PonderLM
OTHERS = ("looped", "pause", "ponderlm1", "mor-expert", "mor-token")  # see methods.py

# Fields that mean something to these methods only.
BELONGS_TO = {
    "router": PONDER[:2],
    "router_offset": ("ponderlm3",),
    "penalty": ("ponderlm3",),
    "penalty_weight": ("ponderlm3",),
    "backprop_passes": PONDER[:2],
    "feedback_scale": PONDER[:2],
    "printed_mask_index": ("ponderlm3",),
    "ablation": ("ponderlm3",),
    "accumulate": ("ponderlm1",),
    "pause_token": ("pause",),
    "capacities": ("mor-expert",),
}


@dataclass
class PonderConfig:
    """The shape of a model and how it ponders. The backbone's fields are named as in HF Llama."""

    vocab_size: int = 257
    hidden_size: int = 128
    intermediate_size: int = 344
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    block_size: int = 64  # the window, in tokens
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    # llama3's: factor, low and high frequency factor, window that it was first trained with
    rope_scaling: tuple[float, float, float, float] | None = weights.later(None)
    tie_word_embeddings: bool = False
    embed_scale: float | None = None  # None: sqrt(2.5 D)
    method: Literal[PONDER + OTHERS] = "ponderlm3"  # what methods.py says of each
    ponder_steps: int = 3  # K, steps beyond the first of any method; 0 is a plain Llama
    router: Literal["learned", "always"] = "learned"  # always: PonderLM-2
    router_offset: tuple[float, ...] | None = None  # None: rising linearly from 0 to 6
    iters: tuple[int, int] = (2, 3)  # training draws R from this range, both ends included
    # what multiplies a state that is fed back; None: 1, or what start.py measures on a Llama
    feedback_scale: float | None = weights.later(None)
    backprop_passes: int | None = None  # gradients through the last n passes; None: through all
    penalty: Literal["token", "batch"] = "token"  # batch: the printed form (reading note 2)
    penalty_weight: float = 0.5  # lambda
    printed_mask_index: bool = False  # True: the printed index (reading note 1)
    # what is missing: log w in attention, s in integration (the last state alone), a learned s
    ablation: Literal["mask", "integration", "router"] | None = weights.later(None)
    accumulate: bool = True  # PonderLM-1: add each mixture to the last input, not to the first
    pause_token: int | None = None  # Pause: an unused id of the vocabulary; None: a row of its own
    capacities: tuple[float, ...] | None = None  # MoR expert-choice; None: 1, K/(K+1), .., 1/(K+1)

    def __post_init__(self):
        D, H, K = self.hidden_size, self.num_attention_heads, self.ponder_steps
        self._check_types()
        if not 0 <= self.penalty_weight < math.inf:
            raise ValueError(f"penalty_weight = {self.penalty_weight}: it must be 0 or more")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"embed_scale = {self.embed_scale}: it must be above 0")
        if self.feedback_scale is not None and not 0 < self.feedback_scale < math.inf:
            raise ValueError(f"feedback_scale = {self.feedback_scale}: it must be above 0")
        if self.penalty not in ("token", "batch"):
            raise ValueError(f"penalty = {self.penalty!r} is neither 'token' nor 'batch'")
        if self.router not in ("learned", "always"):
            raise ValueError(f"router = {self.router!r} is neither 'learned' nor 'always'")
        if self.ablation not in (None, "mask", "integration", "router"):
            raise ValueError(f"ablation = {self.ablation!r} is not mask, integration or router")
        if H % self.key_value_heads:
            raise ValueError(f"{H} heads cannot share {self.key_value_heads} key/value heads")
        if self.head_dim is None and D % H:
            raise ValueError(f"hidden_size = {D} is not divisible by {H} heads; give head_dim")
        if self.head_width % 2:
            raise ValueError(f"head_dim = {self.head_width} is odd, but RoPE rotates pairs")
        if self.rope_scaling is not None and not (
            len(self.rope_scaling) == 4
            and all(0 < x < math.inf for x in self.rope_scaling)
            and self.rope_scaling[1] < self.rope_scaling[2]
        ):
            raise ValueError(f"rope_scaling = {self.rope_scaling}: 4 numbers above 0, low < high")
        if len(self.offset) != K + 1:
            raise ValueError(f"router_offset {self.router_offset} needs K+1 = {K + 1} numbers")
        if len(self.iters) != 2 or not 0 <= self.iters[0] <= self.iters[1]:
            raise ValueError(f"iters = {self.iters} is no range: 0 <= low <= high")
        if self.backprop_passes is not None and self.backprop_passes < 1:
            raise ValueError(f"backprop_passes = {self.backprop_passes}: it must be at least 1")
        self._check_method()

    def _check_types(self):
        """Refuse what JSON may hold in place of a number."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        sizes += ("num_attention_heads", "block_size", "num_key_value_heads", "head_dim")
        for name in (*sizes, "ponder_steps"):
            value, low = getattr(self, name), 0 if name == "ponder_steps" else 1
            optional = name in ("num_key_value_heads", "head_dim")
            if not (value is None and optional) and (type(value) is not int or value < low):
                raise ValueError(f"{name} = {value!r}: it must be a whole number, at least {low}")
        for name, low in (("rms_norm_eps", 0), ("rope_theta", 1e-30)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not low <= value < math.inf:
                raise ValueError(f"{name} = {value!r}: it must be a number above 0")

    def _check_method(self):
        """Refuse settings that the method would not follow."""
        K, c = self.ponder_steps, self.shares
        if self.method not in PONDER + OTHERS:
            raise ValueError(f"method = {self.method!r} is not one of {', '.join(PONDER + OTHERS)}")
        if self.method == "vanilla" and K:
            raise ValueError(f"ponder_steps = {K}: vanilla does not ponder, it must be 0")
        if self.method == "ponderlm2" and self.router != "always":
            raise ValueError("method ponderlm2 is router 'always', not 'learned'")
        for field in fields(self):
            methods = BELONGS_TO.get(field.name, (self.method,))
            if self.method not in methods and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} is for {', '.join(methods)}, not {self.method}")
        if self.pause_token is not None and not 0 <= self.pause_token < self.vocab_size:
            raise ValueError(f"pause_token = {self.pause_token} is outside the vocabulary")
        if len(c) != K + 1 or c[0] != 1 or any(not 0 < b <= a for a, b in pairwise(c)):
            raise ValueError(f"capacities = {c}: K+1 = {K + 1} shares, from 1 on falling, above 0")

    @property
    def key_value_heads(self):
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self):
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def scale(self):
        """Embeddings times sqrt(2.5 D) have the RMS of a normed state, 1, at initialisation."""
        return math.sqrt(2.5 * self.hidden_size) if self.embed_scale is None else self.embed_scale

    @property
    def offset(self):
        if self.router_offset is not None:
            return self.router_offset
        if self.ablation == "router":
            return (0.0,) * (self.ponder_steps + 1)
        return tuple(6 * k / max(self.ponder_steps, 1) for k in range(self.ponder_steps + 1))

    @property
    def shares(self):
        """MoR expert-choice: the share of all tokens that take part in each recursion."""
        S = self.ponder_steps + 1
        return self.capacities or tuple((S - r) / S for r in range(S))

    @property
    def label(self):
        """The name of the method; two settings of PonderLM-3 are methods of their own."""
        if self.method not in PONDER:
            return self.method
        if self.ponder_steps == 0:
            return "vanilla"
        return "ponderlm2" if self.router == "always" else "ponderlm3"


def read_config(directory):
    """The PonderConfig of a directory of weights.

    Raises:
        FileNotFoundError, ValueError: as weights.read_fields; or unknown fields, or wrong values.
    """
    config, complete = weights.read_fields(directory)
    try:
        return weights.from_json(
            PonderConfig, config if complete else asdict(PonderConfig()) | config
        )
    except ValueError as error:
        raise ValueError(f"{directory}: config.json has {error}") from None
