"""What the folders of the lab share: the settings of a run, models by name, progress bars, autocast."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from tqdm import tqdm

from common import UserError, one_line, read_json

Given = Annotated[str, Field(min_length=1)]

progress = partial(tqdm, disable=None)  # a progress bar, if stderr is a terminal


def settings_of(run):
    """The settings of a run by its train.json, unchecked; {} if there is none."""
    file = Path(run, "train.json")
    config = read_json(file).get("config") if file.is_file() else None
    return config if isinstance(config, dict) else {}


def locate(name, files=("*.json", "*.safetensors")):
    """The directory of a model.

    Args:
        name: a path, or a name on the Hugging Face Hub, from where the model is fetched.
        files: patterns of the files to fetch; by default everything that is read here, without code or
            pickles.

    Raises:
        UserError: there is no such path, or it cannot be fetched.
    """
    path = Path(name)
    if path.exists():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or path.parent.exists():
        raise UserError(
            f"{name} does not exist: give a directory, or OWNER/NAME of a model on the Hugging Face Hub"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=list(files)))
    except Exception as error:  # a download can fail with any error
        why = one_line(error)
        raise UserError(
            f"{name} is not a directory, and cannot be fetched from the Hub ({why}): check the name and the "
            "network"
        ) from None


def autocast(device, dtype):
    """The context in which a model computes in `dtype`; its weights stay in float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
