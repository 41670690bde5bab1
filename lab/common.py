"""What the folders of the lab share: the settings of a run, models by name, progress bars, autocast."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from tqdm import tqdm

from common import UserError, one_line, read_json

NonEmpty = Annotated[str, Field(min_length=1)]  # a flag's text; "" is refused

progress = partial(tqdm, disable=None)  # a progress bar, if stderr is a terminal


def settings_of(run):
    """The settings in the train.json of a run, unchecked; {} if it has no train.json."""
    file = Path(run, "train.json")
    config = read_json(file).get("config") if file.is_file() else None
    return config if isinstance(config, dict) else {}


def locate(name, files=("*.json", "*.safetensors")):
    """The directory of a model.

    Args:
        name: a path; or the name of a model on the Hugging Face Hub, which is then downloaded.
        files: patterns of the files to download. The default is every file that this project reads; code and
            pickles are left out.

    Raises:
        UserError: there is no such path, and the name is none of the Hub's or cannot be downloaded.
    """
    path = Path(name)
    if path.exists():
        return path
    is_name_on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(name))
    if not is_name_on_hub or path.parent.exists():  # if the folder above it exists, a path was meant
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
    """A context in which matrix products are computed in `dtype` if that is half precision, and otherwise in
    the precision of the weights. The weights stay as they are."""
    in_half_precision = dtype in (torch.float16, torch.bfloat16)
    return torch.autocast(device.type, dtype if in_half_precision else None, enabled=in_half_precision)
