"""What the rooms of the lab share: settings of a run, models by name, a bar."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from tqdm import tqdm

from common import UserError, one_line, read_json

Given = Annotated[str, Field(min_length=1)]

progress = partial(tqdm, disable=None)  # a bar, where stderr is a terminal


def settings_of(run):
    """What train.json of a run says of its training, unchecked; {} where there is none."""
    file = Path(run, "train.json")
    config = read_json(file).get("config") if file.is_file() else None
    return config if isinstance(config, dict) else {}


def locate(name, files=("*.json", "*.safetensors")):
    """The directory of a model: a path, or a name on the Hugging Face Hub, whose `files` are
    fetched: by default all that is read here, which has no code and no pickles.

    Raises:
        UserError: neither; or a name of the Hub that cannot be fetched.
    """
    path = Path(name)
    if path.exists():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or path.parent.exists():
        raise UserError(f"{name} does not exist")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=list(files)))
    except Exception as error:  # a download fails in any way
        raise UserError(f"{name} is no directory here, nor can it be fetched: {one_line(error)}") from None


def autocast(device, dtype):
    """The context in which a model computes in `dtype`; its weights stay in float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
