"""Other methods on PonderLM-3's own backbone. To add a method, add a file here.

A method is a subclass of PonderLM3 or FixedDepth, in a file of its name; `mor-token` is in mor.py:
what follows a hyphen tells the methods of one file apart.

It declares the first row always, the others where it differs, as any method of model.PonderLM:

method, title                             --method, and its name in tables and figures
Config, defaults, unused                  settings of its own, implied ones, ignored ones
has_router                                is s learned?
iterates, grid                            are its states a Jacobi fixed point? or K+1 exact passes?
feed_back, mask_keys, integrate           inputs of the next slots; log w of keys; what predicts
states, route, ponder_token, new_cache    all tokens at once; their s; one token behind a cache
param_groups                              learning rates; a learned number belongs in a module of its own
objective                                 its loss in training
training_forwards                         slots that run for a token in training

Whoever overrides states, ponder_token or a part of them is decoded by engine/simple.py, one text at a time.
`python -m pytest tests/methods -k NAME` runs the tests of one method.
"""

import pkgutil
from dataclasses import asdict, field, fields
from importlib import import_module

import torch
from torch import nn

from common import UserError, one_line
from lab import backbones
from model import Config, Llama, PonderLM, validated_dataclass
from router import upcast
from train import objective as of_paper


@validated_dataclass
class PonderConfig(Config):
    """The settings of any method: which one, on which transformer."""

    method: str = "ponderlm3"
    backbone: str = "llama"  # or a file of lab/backbones: gpt_neox, llama3
    backbone_options: dict = field(default_factory=dict)  # its own settings
    reread: bool = False  # what is fed back is e(x_t) + g h, not h: a former Llama (warm_start.py)

    def __post_init__(self):
        super().__post_init__()
        numbers = {k: float(x) if isinstance(x, str) else x for k, x in self.backbone_options.items()}
        self.backbone_options = numbers  # a command line has strings
        plain = self.ponder_steps == 0
        # train.py trains a PonderLM-3 without steps; a warm-up ends without.
        may_be_plain = self.method.partition("-")[0] in ("ponderlm3", "warmup")
        if plain != (self.method == "vanilla") and not (plain and may_be_plain):
            raise ValueError(
                f"ponder_steps = {self.ponder_steps}, method {self.method}: vanilla takes 0, others more"
            )


class Feedback(nn.Module):
    """What a former Llama is fed: e + g h, with a learned g (D,) that starts at 0."""

    def __init__(self, D):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D))  # g

    def forward(self, h, e):
        return e + self.weight * h


class PonderLM3(PonderLM):
    """model.PonderLM with what commands, tables and figures ask of a method."""

    title = "PonderLM-3"
    Config = PonderConfig
    defaults = {}  # settings that the name of the method implies
    unused = ()  # settings of PonderConfig that it does not follow, beside those of parts it lacks
    has_router = True  # a learned s and early exit
    iterates = True  # its states are a fixed point of the Jacobi iteration
    grid = False  # slot k sees slots up to k only, see grid.py
    priced = True  # does its loss have a price on steps?
    feedback_rate = 1.0  # learning rate of g, times the peak

    def __init__(self, config):
        super().__init__(config, find_backbone(config.backbone))
        self.feedback = Feedback(config.hidden_size) if config.reread else None

    def feed_back(self, h, e):
        return h if self.feedback is None else self.feedback(h, e)

    def param_groups(self, router_rate=1.0):
        groups = super().param_groups(router_rate)
        if self.feedback is None:
            return groups
        g = self.feedback.weight
        groups[1]["params"] = [p for p in groups[1]["params"] if p is not g]
        return [*groups, {"params": [g], "lr_scale": self.feedback_rate, "weight_decay": 0.0}]

    def objective(self, x, y, R, price=0.0):
        """The loss of a micro-batch, as train.objective: here it is the paper's."""
        return of_paper(self, x, y, R, price)

    @classmethod
    def training_forwards(kind, config, steps, training_steps):
        """Slots that run for each token in training, the mean over the range of R.

        Args:
            config: the model's settings, as its training began.
            steps: extra steps a token, as the trained model decodes.
            training_steps: how many there were.
        """
        K = config.ponder_steps
        if not kind.iterates or not K:
            return K + 1
        return K * (K + 1) / 2 + (K + 1) * (sum(config.refinements) / 2 + 1)


class FixedDepth(PonderLM3):
    """Every token takes all K steps and only the last state counts: no router, no mask."""

    has_router = priced = False

    def __init__(self, config):
        super().__init__(config)
        self.router = None

    def route(self, h, alpha=0.0):
        """s one-hot at K, and log_w = 0. No finite alpha moves them. (..., n+1, D) -> (..., S)."""
        s = upcast(h.new_zeros(*h.shape[:-2], self.config.ponder_steps + 1))
        s[..., -1] = 1
        return s, torch.zeros_like(s)

    def mask_keys(self, log_w, tau=None):
        return None

    def objective(self, x, y, R, price=0.0):
        out = self(x, y, R=R)
        return out.loss, torch.zeros_like(out.loss), out


def last_alone(h, steps):
    """The state at `steps` (...), or an integer, of h (..., n, D). -> (..., D)"""
    if not torch.is_tensor(steps):
        return h[..., steps, :]
    at = steps.long()[..., None, None].expand(*h.shape[:-2], 1, h.size(-1))
    return h.gather(-2, at)[..., 0, :]


def all_methods():
    """The classes of all methods, PonderLM-3 first: those that declare one, in the files of this folder."""
    found = [PonderLM3]
    for file in pkgutil.iter_modules(__path__):
        module = import_module(f"{__name__}.{file.name}")
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
        found += [kind for kind in kinds if kind.__module__ == module.__name__ and "method" in vars(kind)]
    known = {}
    for kind in found:
        if (other := known.setdefault(kind.method, kind)) is not kind:
            raise UserError(f"{other.__module__} and {kind.__module__} both have a method {kind.method!r}")
        if "title" not in vars(kind) and kind is not PonderLM3:
            raise UserError(f"{kind.__module__}: the method {kind.method!r} has no title")
    return found


def find(name):
    """The class of a method, by its name.

    Raises:
        UserError: there is none of this name.
    """
    known = {kind.method: kind for kind in all_methods()}
    if name not in known:
        raise UserError(f"method {name!r} is not one of {', '.join(known)}")
    return known[name]


def find_backbone(name):
    """The class of a transformer: model.Llama, or the one in the file of backbones/ of that name.

    Raises:
        UserError: there is none of this name.
    """
    others = [file.name for file in pkgutil.iter_modules(backbones.__path__)]
    if name in others:
        return import_module(f"lab.backbones.{name}").Backbone
    if name != "llama":
        raise UserError(f"backbone {name!r} is not one of {', '.join(['llama', *others])}")
    return Llama


def configure(config, method, **changes):
    """The settings of another method: what `config` says, then what the name `method` implies."""
    kind = find(method)
    shared = {f.name for f in fields(kind.Config)}
    kept = {name: value for name, value in asdict(config).items() if name in shared}
    try:
        return kind.Config(**{**kept, "method": method, **kind.defaults, **changes})
    except ValueError as error:
        raise UserError(str(error)) from None


def unused_settings(kind):
    """The settings of PonderConfig that a method does not follow, as it lacks what they set."""
    unused = set(kind.unused)
    unused |= set() if kind.has_router else {"router_offset", "penalty", "penalty_weight"}
    return unused if kind.iterates or kind.grid else unused | {"reread"}


def check_settings(config):
    """Refuse what the method of a config would not follow.

    Raises:
        UserError: an unknown method or backbone, or a setting that it ignores.
    """
    kind, backbone = find(config.method), find_backbone(config.backbone)
    if backbone is Llama and config.backbone_options:
        raise UserError(f"backbone_options {config.backbone_options}: llama has none; leave them")
    if backbone is not Llama:
        try:
            backbone.Options(**config.backbone_options)
        except (TypeError, ValueError) as error:
            raise UserError(f"backbone_options of {config.backbone}: {one_line(error)}") from None
    if not isinstance(config, kind.Config):
        raise ValueError(f"{config.method} has a {kind.Config.__name__}; make it by configure()")
    who = dict.fromkeys(getattr(backbone, "unused", ()), config.backbone)
    who |= dict.fromkeys(unused_settings(kind), config.method)
    for one in fields(config):
        if one.name in who and (value := getattr(config, one.name)) != one.default:
            wrong = f"{one.name} = {value}: {who[one.name]} does not follow it"
            raise UserError(f"{wrong}; leave it at {one.default}")


def build(config):
    """A new model of the method and backbone that a config names, with random weights.

    Raises:
        UserError: as check_settings.
    """
    check_settings(config)
    return find(config.method)(config)
