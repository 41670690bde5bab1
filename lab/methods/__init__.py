"""Other methods on PonderLM-3's own backbone. To add a method, add a file here.

A method is a subclass of PonderLM3 or FixedDepth, in a file of its name. What follows a hyphen tells the
methods of one file apart: `mor-token` is in mor.py. Every method declares `method` and `title`. What else
differs from model.PonderLM it declares or overrides:

what the commands ask
    method, title         its name for --method, and in tables and figures
    Config                its settings; a dataclass that extends PonderConfig
    defaults              settings that follow from the name of the method
    unused                settings of PonderConfig that it does not follow
    has_router            whether s is learned, and tokens stop early
    priced                whether its loss has a price on steps
    iterates              whether its states are a fixed point of the Jacobi iteration
    grid                  whether slot k sees slots up to k only (grid.py)

the states of all tokens at once
    states                h, s and log_w by the token ids; by default `jacobi`, which calls `jacobi_pass`
    embed                 token ids -> inputs of slot 0
    transform             inputs -> outputs, through the backbone and its final norm
    feed_back             the output of a slot -> the input of the next one
    route                 the state of slot 0 -> s and log w
    mask_keys             log w -> what attention adds to the scores of keys; None: nothing
    integrate             states and s -> the state that predicts

one token after the other
    ponder_token          reads one token behind a cache; must agree with `states`
    new_cache             the cache that it needs

training
    objective             the loss of a micro-batch
    cross_entropy         the loss of each token by the states that predict
    partial_losses        that loss with integration stopped after each step, for the bottom-mass penalty
    param_groups          learning rates; a parameter of its own belongs in a module of its own
    feedback_rate         what multiplies the learning rate of g, see Feedback
    init_weights          initial weights, module by module
    tie_head              lets the head share the embedding table
    training_forwards     slots that run for each token in training: its cost

set from outside, and followed by everything that calls the backbone
    backend               the form of attention, one of attention.BACKENDS
    recompute             whether to recompute activations in the backward pass

A backbone (lab/backbones) is a subclass of model.Llama. It overrides `Block`, `Norm`, `residual_projections`
and `inverse_frequencies` of RoPE. `stack` is its blocks without the final norm, which looped.py calls.

A method that iterates, or is on the grid, and overrides neither `states`, `transform`, `ponder_token` nor
`new_cache` is decoded in batches by the engine; any other one by engine/simple.py, one text at a time.
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

    # how the model ponders, for example ponderlm3, grid, ponderlm2, looped or vanilla; a wrong name lists all
    method: str = "ponderlm3"
    backbone: str = "llama"  # the transformer: llama, gpt_neox or llama3
    # settings of the transformer, as names and numbers, for example rotary_pct 0.25. gpt_neox has rotary_pct
    # and parallel_residual; llama3 has factor, low_freq_factor, high_freq_factor and
    # original_max_position_embeddings
    backbone_options: dict = field(default_factory=dict)
    # feed back the token's embedding plus g times the state, with a learned g that starts at 0; off: the
    # state alone. On by default for a Llama that learns to ponder
    reread: bool = False

    def __post_init__(self):
        super().__post_init__()
        options = {}
        for name, value in self.backbone_options.items():
            options[name] = float(value) if isinstance(value, str) else value  # a command line has strings
        self.backbone_options = options
        plain = self.ponder_steps == 0
        # train.py trains a PonderLM-3 without steps; a warm-up ends without.
        may_be_plain = self.method.partition("-")[0] in ("ponderlm3", "warmup")
        if plain != (self.method == "vanilla") and not (plain and may_be_plain):
            needed = "takes no extra steps" if self.method == "vanilla" else "takes at least one extra step"
            value = "--ponder-steps 0" if self.method == "vanilla" else "--ponder-steps 1 or more"
            raise ValueError(
                f"ponder_steps = {self.ponder_steps}, but the method {self.method} {needed}: give {value}"
            )


class Feedback(nn.Module):
    """What a model that was initialised from a Llama feeds back: e + g h, with a learned g (D,) that starts
    at 0."""

    def __init__(self, D):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D))  # g

    def forward(self, h, e):
        return e + self.weight * h


class PonderLM3(PonderLM):
    """model.PonderLM with what commands, tables and figures ask of a method; see the table above."""

    title = "PonderLM-3"
    Config = PonderConfig
    defaults = {}
    unused = ()  # beside the settings of parts that it does not have, see unused_settings
    has_router = True
    iterates = True
    grid = False
    priced = True
    feedback_rate = 1.0  # what multiplies the learning rate of g

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
        """The loss of a micro-batch; arguments and results as those of train.objective, the paper's loss."""
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
        log_w = torch.zeros_like(s)
        return s, log_w

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
    """The classes of all methods: PonderLM-3, and those in the files of this folder that declare a `method`.

    Raises:
        UserError: two methods have the same name, or one has no title.
    """
    found = [PonderLM3]
    for file in pkgutil.iter_modules(__path__):
        module = import_module(f"{__name__}.{file.name}")
        for kind in vars(module).values():
            is_own = isinstance(kind, type) and kind.__module__ == module.__name__
            if is_own and "method" in vars(kind):
                found.append(kind)
    known = {}
    for kind in found:
        other = known.setdefault(kind.method, kind)
        if other is not kind:
            raise UserError(
                f"{other.__module__} and {kind.__module__} both declare {kind.method!r}: rename one"
            )
        if "title" not in vars(kind) and kind is not PonderLM3:
            raise UserError(f"{kind.__module__}: the method {kind.method!r} has no title: declare one")
    return found


def find(name):
    """The class of a method, by its name.

    Raises:
        UserError: there is none of this name.
    """
    known = {kind.method: kind for kind in all_methods()}
    if name not in known:
        raise UserError(f"there is no method {name!r}: choose --method from {', '.join(known)}")
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
        raise UserError(f"there is no backbone {name!r}: choose --backbone from llama, {', '.join(others)}")
    return Llama


def configure(config, method, **changes):
    """The settings of another method.

    Args:
        config: settings of some method, of which those that the other method has are kept.
        method: the name of the other method; what its name implies comes second.
        changes: what comes last.

    Raises:
        UserError: there is no such method, or a setting is out of its range.
    """
    kind = find(method)
    shared = {f.name for f in fields(kind.Config)}
    kept = {name: value for name, value in asdict(config).items() if name in shared}
    try:
        return kind.Config(**{**kept, "method": method, **kind.defaults, **changes})
    except ValueError as error:
        raise UserError(str(error)) from None


def unused_settings(kind):
    """The names of the settings of PonderConfig that a method does not follow."""
    unused = set(kind.unused)
    if not kind.has_router:
        unused |= {"router_offset", "penalty", "penalty_weight"}
    if not (kind.iterates or kind.grid):
        unused.add("reread")
    return unused


def check_settings(config):
    """Refuse settings that the method or the backbone of a config would not follow.

    Raises:
        UserError: the method or the backbone is unknown, or does not follow a setting that is not at its
            default.
        ValueError: the config is not of the method's type.
    """
    kind = find(config.method)
    backbone = find_backbone(config.backbone)
    if backbone is Llama and config.backbone_options:
        given = " ".join(f"{name} {value}" for name, value in config.backbone_options.items())
        raise UserError(
            f"--backbone-options {given}: the backbone llama has no options: omit --backbone-options"
        )
    if backbone is not Llama:
        try:
            backbone.Options(**config.backbone_options)
        except (TypeError, ValueError) as error:
            known = ", ".join(option.name for option in fields(backbone.Options))
            raise UserError(
                f"--backbone-options for {config.backbone}: {one_line(error)}; the options are {known}"
            ) from None
    if not isinstance(config, kind.Config):
        raise ValueError(f"{config.method} has a {kind.Config.__name__}; make it by configure()")
    ignored_by = dict.fromkeys(getattr(backbone, "unused", ()), config.backbone)
    ignored_by |= dict.fromkeys(unused_settings(kind), config.method)
    for setting in fields(config):
        value = getattr(config, setting.name)
        if setting.name in ignored_by and value != setting.default:
            flag = "--" + setting.name.replace("_", "-")
            raise UserError(
                f"{setting.name} = {value}, but {ignored_by[setting.name]} does not use it: omit {flag}"
            )


def build(config):
    """A new model of the method and backbone that a config names, with random weights.

    Raises:
        UserError: as check_settings.
    """
    check_settings(config)
    return find(config.method)(config)
