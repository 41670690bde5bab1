"""Other methods on PonderLM-3's own backbone. To add a method, add a file here.

A method is a subclass of PonderLM3 or FixedDepth, in the file of its name. If a file has several methods, a
hyphen and a further word tell them apart: `mor-token` is in mor.py. Every method declares `method` and
`title`. Where a method differs from model.PonderLM in something else, it declares or overrides that:

what the commands ask for
    method, title         the name for --method, and the name in tables and figures
    Config                the settings; a dataclass that extends PonderConfig
    defaults              settings that the name of the method implies
    unused                settings of PonderConfig that the method does not follow, besides those that
                          `unused_settings` finds; and "router_rate", if it has a router that does not learn
    has_router            whether s is learned, and tokens stop early
    priced                whether the loss has a price on steps
    iterates              whether the states are a fixed point of the Jacobi iteration
    grid                  whether slot k sees slots up to k only (grid.py)

the states of all tokens at once
    states                token ids -> h, s and log_w; by default `jacobi`, which calls `jacobi_pass`
    embed                 token ids -> inputs of slot 0
    transform             inputs -> outputs, through the backbone and its final norm
    feed_back             the output of a slot -> the input of the next one
    route                 the state of slot 0 -> s and log w
    mask_keys             log w -> what attention adds to the scores of keys; None: nothing
    integrate             states and s -> the state that predicts

one token after the other
    ponder_token          reads one token, given the cache of the tokens before; must agree with `states`
    new_cache             the empty cache for `ponder_token`

training
    objective             the loss of a micro-batch
    cross_entropy         the states that predict -> the loss of each token
    partial_losses        the same with integration stopped after each step, for the bottom-mass penalty
    param_groups          groups of parameters with their learning rates
    feedback_rate         a factor on the learning rate of g, see Feedback
    init_weights          initial weights, module by module
    tie_head              lets the head share the embedding table
    training_forwards     how many slots run for each token in training: what training costs

set from outside, and followed by everything that calls the backbone
    backend               the form of attention, one of attention.BACKENDS
    recompute             whether to recompute activations in the backward pass

A method that has a parameter puts it into a module, since initial weights and the export to transformers
(interop/export.py) go through the modules of a model.

A backbone (lab/backbones) is a subclass of model.Llama. It overrides `Block`, `Norm`, `residual_projections`
and `inverse_frequencies` of RoPE. `stack` runs the blocks without the final norm; looped.py calls it.

The engine decodes a method in batches if it iterates, or is on the grid, and overrides none of `states`,
`transform`, `ponder_token` and `new_cache`. Any other method is decoded by engine/simple.py, one text at a
time. `python -m pytest tests/methods -k NAME` runs the tests of one method.
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
    """The size of the model, how it ponders (--method), and on which transformer (--backbone)."""

    # how the model ponders (docs/methods.md says more of each). ponderlm3: a router chooses the number of
    # extra steps for each token (the PonderLM-3 paper). ponderlm2, ponderlm1, pause, looped, ouro,
    # mor-expert, mor-token: other papers' methods. grid, grid-fixed: ponderlm3 and ponderlm2 with an
    # attention mask that makes training cheaper. vanilla: a plain transformer without extra steps. shared,
    # shared-grid: one learned number of steps for all tokens. lowered: the number of steps falls during
    # training, on a schedule. warmup, warmup-jacobi: the same, down to no steps at all. drawn, drawn-shared:
    # random numbers of steps. ablation-mask, ablation-integration, ablation-router, ablation-index,
    # ablation-price, ablation-price-grid: ponderlm3 with one part changed
    method: str = "ponderlm3"
    backbone: str = "llama"  # the transformer: llama, llama3 (a llama with scaled RoPE) or gpt_neox
    # settings of the transformer, as names and numbers, for example rotary_pct 0.25. llama has none. llama3
    # has factor, low_freq_factor, high_freq_factor and original_max_position_embeddings. gpt_neox has
    # rotary_pct (a fraction) and parallel_residual (1 or 0)
    backbone_options: dict = field(default_factory=dict)
    # each extra step reads the token's embedding plus g times the last state (g is learned, and starts at 0)
    # instead of the last state alone. On by default if --init-from is a model without extra steps
    reread: bool = False

    def __post_init__(self):
        super().__post_init__()
        options = {}
        for name, value in self.backbone_options.items():
            options[name] = float(value) if isinstance(value, str) else value  # a command line gives strings
        self.backbone_options = options
        K = self.ponder_steps
        if self.method == "vanilla" and K > 0:
            raise ValueError(
                f"--ponder-steps {K} has no effect, since the method vanilla takes no extra steps: omit it, "
                "or use --ponder-steps 0"
            )
        # A PonderLM-3 may have no extra steps, as in train.py, and a warm-up ends without them.
        may_be_plain = self.method.partition("-")[0] in ("vanilla", "ponderlm3", "warmup")
        if K == 0 and not may_be_plain:
            raise ValueError(
                f"--ponder-steps 0 is too small: the method {self.method} takes at least one extra step, so "
                "use 1 or more"
            )


class Feedback(nn.Module):
    """The input of the next slot in a model that was initialised from a Llama: e + g h, with a learned g (D,)
    that starts at 0."""

    def __init__(self, D):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D))  # g

    def forward(self, h, e):
        return e + self.weight * h


class PonderLM3(PonderLM):
    """model.PonderLM with the attributes that commands, tables and figures need; see the table above."""

    title = "PonderLM-3"
    Config = PonderConfig
    defaults = {}
    unused = ()
    has_router = True
    iterates = True
    grid = False
    priced = True
    feedback_rate = 1.0

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
        vectors = groups[1]  # see PonderLM.param_groups
        vectors["params"] = [p for p in vectors["params"] if p is not g]
        return [*groups, {"params": [g], "lr_scale": self.feedback_rate, "weight_decay": 0.0}]

    def objective(self, x, y, R, price=0.0):
        """The loss of a micro-batch. By default this is the paper's loss, train.objective, whose arguments
        and results all methods share."""
        return of_paper(self, x, y, R, price)

    @classmethod
    def training_forwards(kind, config, steps, training_steps):
        """How many slots run for each token in training, on average over the range of R.

        Args:
            config: the settings of the model at the start of its training.
            steps: extra steps per token in decoding, after training.
            training_steps: how many steps the training has.
        """
        K = config.ponder_steps
        if not kind.iterates or not K:
            return K + 1
        growing = K * (K + 1) / 2  # 1 + .. + K slots
        mean_R = sum(config.refinements) / 2
        return growing + (K + 1) * (mean_R + 1)  # R refinements and the final pass run K+1 slots each


class FixedDepth(PonderLM3):
    """Every token takes all K steps, and only the last state predicts. There is no router and no mask."""

    has_router = False
    priced = False

    def __init__(self, config):
        super().__init__(config)
        self.router = None

    def route(self, h, alpha=0.0):
        """s is one-hot at K, and log_w is 0, whatever alpha is. (..., n, D) -> (..., S) each"""
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
    """The last executed state.

    Args:
        h: (..., n, D), the states.
        steps: K-hat, a tensor (...) or an integer.

    Returns:
        (..., D).
    """
    if not torch.is_tensor(steps):
        return h[..., steps, :]
    at = steps.long()[..., None, None].expand(*h.shape[:-2], 1, h.size(-1))
    return h.gather(-2, at)[..., 0, :]


def all_methods():
    """The classes of all methods: PonderLM-3, and each class in the files of this folder that declares a
    `method`.

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
    """The class of the method with this name.

    Raises:
        UserError: there is no such method.
    """
    known = {kind.method: kind for kind in all_methods()}
    if name not in known:
        raise UserError(f"there is no method {name!r}: choose --method from {', '.join(known)}")
    return known[name]


def find_backbone(name):
    """The class of the backbone with this name: model.Llama, or that of a file in lab/backbones.

    Raises:
        UserError: there is no such backbone.
    """
    others = [file.name for file in pkgutil.iter_modules(backbones.__path__)]
    if name in others:
        return import_module(f"lab.backbones.{name}").Backbone
    if name != "llama":
        raise UserError(f"there is no backbone {name!r}: choose --backbone from llama, {', '.join(others)}")
    return Llama


def configure(config, method, **changes):
    """The settings of a method, made from those of another one.

    Args:
        config: settings of any method. Those that `method` has, too, are kept.
        method: the name of the method. Its `defaults` override the settings that are kept.
        changes: settings that override both.

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
    """Refuse settings that the method or the backbone in a config would not follow.

    Raises:
        UserError: the method or the backbone is unknown; or a setting that one of them does not follow is not
            at its default.
        ValueError: the config is not of the method's type.
    """
    kind = find(config.method)
    backbone = find_backbone(config.backbone)
    if backbone is Llama and config.backbone_options:
        given = " ".join(f"{name} {value}" for name, value in config.backbone_options.items())
        raise UserError(
            f"--backbone-options {given} has no effect on the backbone llama, which has no options: omit "
            "--backbone-options"
        )
    if backbone is not Llama:
        known = [option.name for option in fields(backbone.Options)]
        for name in config.backbone_options:
            if name not in known:
                raise UserError(
                    f"the backbone {config.backbone} has no option {name}: --backbone-options can be "
                    f"{', '.join(known)}"
                )
        try:
            backbone.Options(**config.backbone_options)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"--backbone-options do not fit the backbone {config.backbone} ({one_line(error)}): give "
                f"numbers for {', '.join(known)}"
            ) from None
    if not isinstance(config, kind.Config):
        raise ValueError(
            f"the settings of {config.method} must be a {kind.Config.__name__}, not a "
            f"{type(config).__name__}: make them with configure()"
        )
    ignored_by = dict.fromkeys(getattr(backbone, "unused", ()), config.backbone)
    ignored_by |= dict.fromkeys(unused_settings(kind), config.method)
    for setting in fields(config):
        value = getattr(config, setting.name)
        if setting.name in ignored_by and value != setting.default:
            flag = "--" + setting.name.replace("_", "-")
            raise UserError(f"{ignored_by[setting.name]} does not use {flag} (given as {value}): omit it")


def build(config):
    """A new model, with random weights, of the method and the backbone that a config names.

    Raises:
        UserError: as check_settings.
    """
    check_settings(config)
    return find(config.method)(config)
