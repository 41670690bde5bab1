"""Other methods on PonderLM-3's own backbone, one file each, found by the name of their file.

A method is a subclass of model.PonderLM. It declares `method` (its name for --method), `title` and
`color` (for tables and figures), and where they differ its settings (`Config`) and what it costs
(`training_forwards`). `--method NAME` looks in the file of that name. What follows a hyphen tells
the methods of one file apart: `mor-token` is in mor.py. To add a method, add a file; nothing else.

These files import model and router, and nothing above them.
"""

import pkgutil
from dataclasses import asdict, fields
from importlib import import_module

from model import PonderLM
from runtime import UserError


def methods_in(file):
    """The classes of a file of this folder that declare a method."""
    module = import_module(f"{__name__}.{file}")
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
    return [kind for kind in kinds if kind.__module__ == module.__name__ and "method" in vars(kind)]


def files():
    return [file.name for file in pkgutil.iter_modules(__path__) if not file.name.startswith("_")]


def all_methods():
    """The classes of all methods, PonderLM-3 first."""
    return [PonderLM, *(kind for file in files() for kind in methods_in(file))]


def find(name):
    """The class of a method, by its name.

    Raises:
        UserError: there is none of this name.
    """
    if name == PonderLM.method:
        return PonderLM
    file = name.partition("-")[0]
    found = [kind for kind in methods_in(file) if kind.method == name] if file in files() else []
    if not found:
        known = ", ".join(kind.method for kind in all_methods())
        raise UserError(f"method {name!r} is not one of {known}")
    return found[0]


def configure(config, method, **changes):
    """The settings of another method: what `config` says, then what the name `method` implies."""
    kind = find(method)
    shared = {f.name for f in fields(kind.Config)}
    kept = {name: value for name, value in asdict(config).items() if name in shared}
    return kind.Config(**{**kept, "method": method, **kind.defaults, **changes})


def check_settings(config):
    """Refuse what the method of a config would not follow.

    Raises:
        UserError: an unknown method, or a setting that it ignores.
    """
    kind = find(config.method)
    if not isinstance(config, kind.Config):
        raise ValueError(f"{config.method} has a {kind.Config.__name__}; make it by configure()")
    for field in fields(config):
        if field.name in kind.unused and getattr(config, field.name) != field.default:
            value = getattr(config, field.name)
            raise UserError(f"{field.name} = {value}: {config.method} does not follow it; leave it")


def build(config):
    """A new model of the method that config.method names, with random weights.

    Raises:
        UserError: as check_settings.
    """
    check_settings(config)
    return find(config.method)(config)
