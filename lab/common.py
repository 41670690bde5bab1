"""What the rooms of the lab share: types of settings, JSON that is checked, models by name."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from tqdm import tqdm

import data
from data import UserError

Count = Annotated[int, Field(ge=1, lt=2**31)]
Given = Annotated[str, Field(min_length=1)]

progress = partial(tqdm, disable=None)  # a bar, where stderr is a terminal


# -- Files -----------------------------------------------------------------------------------------


def settings_of(run):
    """What train.json of a run says of its training, unchecked; {} where there is none."""
    file = Path(run, "train.json")
    config = data.read_json(file).get("config") if file.is_file() else None
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
    where = f"{name} is not a directory here; as a model of the Hugging Face Hub it"
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(name), allow_patterns=list(files)))
    except ImportError:
        raise UserError(f"{where} needs a package: pip install huggingface_hub") from None
    except Exception as error:  # a download fails in any way
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"{where} cannot be fetched ({reason}); check the name, or give a directory"
        ) from None


def autocast(device, dtype):
    """The context in which a model computes in `dtype`; its weights stay in float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
