"""Other methods on PonderLM-3's own backbone, one file each, found by the name of their file.

A method is a subclass of PonderLM3 or FixedDepth, in a file of its name; `mor-token` is in mor.py:
what follows a hyphen tells the methods of one file apart. To add a method, add a file, no more.

It declares the first row always, the others where it differs:

method, title                             --method, and its name in tables and figures
Config, defaults, unused                  settings of its own, implied ones, ignored ones
has_router, mixes                         is s learned? do all states predict, weighted by it?
iterates, grid                            are its states a Jacobi fixed point? or K+1 exact passes?
states, route, ponder_token, new_cache    all tokens at once; their s; one token behind a cache
training_forwards                         what it costs

These files import model and below. cost.py adds up what a token costs.
"""

import pkgutil
from dataclasses import asdict, fields
from importlib import import_module

import torch
from pydantic import ValidationError

import backbones
from model import Llama, PonderConfig, PonderLM, slots_of_passes
from router import upcast
from runtime import UserError, one_line


class PonderLM3(PonderLM):
    """model.PonderLM with what commands, tables and figures ask of a method."""

    method, title = "ponderlm3", "PonderLM-3"
    Config = PonderConfig
    defaults = {}  # settings that the name of the method implies
    unused = ()  # settings of PonderConfig that it does not follow, beside those of parts it lacks
    has_router = True  # a learned s and early exit
    mixes = True  # where there is a router: all states predict together, weighted by s
    iterates = True  # its states are a fixed point of the Jacobi iteration
    grid = False  # slot k sees slots up to k only, see grid.py
    interleaves = True  # in its longest pass there are keys of S slots for every token, not one

    @classmethod
    def training_forwards(kind, config, steps):
        """Passes of the stack for each training token, the mean over the range of R. A slot without
        gradient counts a third: it leaves out the backward pass, which is two thirds (6 N, 2 N)."""
        if not kind.iterates or not config.ponder_steps:
            return config.ponder_steps + 1
        lowest, highest = config.refinements
        K, n = config.ponder_steps, config.backprop_passes or 0
        passes = [slots_of_passes(K, R) for R in range(lowest, highest + 1)]
        return sum((sum(p) + 2 * sum(p[-n:])) / 3 for p in passes) / len(passes)


class FixedDepth(PonderLM3):
    """Every token takes all K steps and only the last state counts: no router, no mask."""

    has_router = False

    def make_router(self):
        return None

    def route(self, h, alpha=0.0):
        """s one-hot at K, and log_w = 0. No finite alpha moves them. (..., n+1, D) -> (..., S)."""
        s = upcast(h.new_zeros(*h.shape[:-2], self.config.ponder_steps + 1))
        s[..., -1] = 1
        return s, torch.zeros_like(s)

    def key_bias(self, log_w, tau=None):
        return None


def methods_in(file):
    """The classes of a file of this folder that declare a method."""
    module = import_module(f"{__name__}.{file}")
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
    return [kind for kind in kinds if kind.__module__ == module.__name__ and "method" in vars(kind)]


def files():
    return [file.name for file in pkgutil.iter_modules(__path__) if not file.name.startswith("_")]


def all_methods():
    """The classes of all methods, PonderLM-3 first."""
    return [PonderLM3, *(kind for file in files() for kind in methods_in(file))]


def find(name):
    """The class of a method, by its name.

    Raises:
        UserError: there is none of this name.
    """
    if name == PonderLM3.method:
        return PonderLM3
    file = name.partition("-")[0]
    found = [kind for kind in methods_in(file) if kind.method == name] if file in files() else []
    if not found:
        known = ", ".join(kind.method for kind in all_methods())
        raise UserError(f"method {name!r} is not one of {known}")
    return found[0]


def find_backbone(name):
    """The class of a transformer: model.Llama, or the one in the file of backbones/ of that name.

    Raises:
        UserError: there is none of this name.
    """
    others = [file.name for file in pkgutil.iter_modules(backbones.__path__)]
    if name in others:
        return import_module(f"backbones.{name}").Backbone
    if name != Llama.name:
        raise UserError(f"backbone {name!r} is not one of {', '.join([Llama.name, *others])}")
    return Llama


def configure(config, method, **changes):
    """The settings of another method: what `config` says, then what the name `method` implies."""
    kind = find(method)
    shared = {f.name for f in fields(kind.Config)}
    kept = {name: value for name, value in asdict(config).items() if name in shared}
    return kind.Config(**{**kept, "method": method, **kind.defaults, **changes})


def unused_settings(kind):
    """The settings of PonderConfig that a method does not follow, as it lacks what they set."""
    unused = set(kind.unused)
    unused |= set() if kind.has_router else {"router_offset", "penalty", "penalty_weight"}
    unused |= set() if kind.iterates else {"backprop_passes"}
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
        except ValidationError as error:
            raise UserError(f"backbone_options: {one_line(error)}") from None
    if not isinstance(config, kind.Config):
        raise ValueError(f"{config.method} has a {kind.Config.__name__}; make it by configure()")
    for field in fields(config):
        if (value := getattr(config, field.name)) == field.default:
            continue
        for who, unused in (
            (config.method, unused_settings(kind)),
            (backbone.name, backbone.unused),
        ):
            if field.name in unused:
                way_out = f"leave it at {field.default}"
                raise UserError(f"{field.name} = {value}: {who} does not follow it; {way_out}")


def build(config):
    """A new model of the method and backbone that a config names, with random weights.

    Raises:
        UserError: as check_settings.
    """
    check_settings(config)
    return find(config.method)(config, find_backbone(config.backbone))
