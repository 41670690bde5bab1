"""Directories of weights, to a config and tensors and back.

    model/
        config.json         every field of PonderConfig, and "format": "ponderlm-3"
        model.safetensors   the tensors, under the names of Hugging Face Llama, plus router.proj

Only JSON and safetensors are read: loading a model never runs code from its files.
"""

import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

FORMAT = "ponderlm-3"


def from_json(kind, settings):
    """A dataclass (of dataclasses) from what JSON kept of it, which has no tuples.

    Raises:
        ValueError: fields that are unknown or missing, or a value that its dataclass refuses.
    """
    if not isinstance(settings, dict):
        raise ValueError(f"{settings!r} is no JSON object")
    odd = settings.keys() ^ {field.name for field in fields(kind)}
    if odd:
        raise ValueError(f"unknown or missing fields {sorted(odd)}")
    values = {}
    for field in fields(kind):
        value, nested = settings[field.name], field.default_factory
        value = from_json(nested, value) if is_dataclass(nested) else value
        values[field.name] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"a field of a wrong type: {error}") from None


def read_config(directory):
    """The config of a directory of weights, a dict of PonderConfig fields.

    Raises:
        FileNotFoundError: the directory or one of its two files is missing.
        ValueError: a file that is damaged, or of a format that is not known here.
    """
    config_file, tensor_file = (Path(directory) / f for f in ("config.json", "model.safetensors"))
    for file in (config_file, tensor_file):
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist; {directory} holds no trained model")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        found = config.pop("format", None) if isinstance(config, dict) else config["format"]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{config_file} is not a JSON object: {error}") from None
    if found != FORMAT:
        raise ValueError(f"{config_file} has format {found!r}; only {FORMAT!r} can be read")
    return config


def read_tensors(directory):
    """The tensors of a directory of weights, by name. ValueError: the file is damaged."""
    tensor_file = Path(directory) / "model.safetensors"
    try:
        return load_file(tensor_file)
    except SafetensorError as error:
        raise ValueError(f"{tensor_file} is damaged or no safetensors file: {error}") from None


def write_directory(directory, config, tensors):
    """Write both files, each under a temporary name first, so that no half-written file remains."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors.tmp")
    text = json.dumps({"format": FORMAT, **config}, indent=2)
    (directory / "config.json.tmp").write_text(text + "\n", encoding="utf-8")
    for name in ("model.safetensors", "config.json"):
        os.replace(directory / f"{name}.tmp", directory / name)
