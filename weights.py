"""Directories of weights, to a config and tensors and back.

    model/
        config.json         what the model is, in one of three forms
        model.safetensors   the tensors, under the names of Hugging Face Llama, plus router.proj;
                            or shards, listed by model.safetensors.index.json

form of config.json     known by                     read as
our own                 "format": "ponderlm-3"       every field of PonderConfig
Hugging Face Llama      "model_type": "llama"        K = 0, embedding scale 1
official PonderLM-2     the same, and                K = num_latent_thoughts, router "always"
                        "recurrent_model": true      (of num_jacobi_iterations 0: LoopedLM)

Only JSON and safetensors are read: loading a model never runs code from its files.

    python weights.py DIR                 what a directory holds
    python weights.py DIR --to OTHER      write it anew; a model without pondering as a Llama
"""

import json
import os
import re
import shutil
from dataclasses import field, fields, is_dataclass
from pathlib import Path

import torch
import tyro
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from formats import from_llama

FORMAT = "ponderlm-3"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# -- Places ------------------------------------------------------------------------------------


def is_model(directory):
    """Whether a directory looks like one of weights."""
    return any((Path(directory) / name).is_file() for name in (SINGLE, INDEX))


def locate(name):
    """The directory of a model: a path, or the name of a model on the Hugging Face Hub, fetched.

    Raises:
        FileNotFoundError: neither; or a name of the Hub that cannot be fetched.
    """
    path = Path(name)
    if path.exists():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or path.parent.exists():
        raise FileNotFoundError(f"{name} does not exist")
    where = f"{name} is no directory here; as a model of the Hugging Face Hub it"
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileNotFoundError(f"{where} needs a package: pip install huggingface_hub") from None
    files = ["config.json", "*.safetensors", INDEX, "tokenizer.json", "tokenizer_config.json"]
    try:
        return Path(snapshot_download(str(name), allow_patterns=files))
    except Exception as error:  # a download fails in any way
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise FileNotFoundError(
            f"{where} cannot be fetched ({reason}): check the name and the network, or download "
            "the model elsewhere and give its directory"
        ) from None


# -- config.json -------------------------------------------------------------------------------


def read_json(file):
    """A file with a JSON object. FileNotFoundError; ValueError: it holds something else."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not a JSON object: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")
    return content


def later(default):
    """A field of a dataclass that files from before its time do without."""
    return field(default=default, metadata={"later": True})


def from_json(kind, settings):
    """A dataclass (of dataclasses) from what JSON kept of it, which has no tuples.

    Raises:
        ValueError: fields that are unknown or missing, or a value that its dataclass refuses.
    """
    if not isinstance(settings, dict):
        raise ValueError(f"{settings!r} is no JSON object")
    settings = {f.name: f.default for f in fields(kind) if "later" in f.metadata} | settings
    odd = settings.keys() ^ {f.name for f in fields(kind)}
    if odd:
        raise ValueError(f"unknown or missing fields {sorted(odd)}")
    values = {}
    for f in fields(kind):
        value, nested = settings[f.name], f.default_factory
        value = from_json(nested, value) if is_dataclass(nested) else value
        values[f.name] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"a field of a wrong type: {error}") from None


def read_fields(directory):
    """config.json of a directory of weights -> fields of PonderConfig, and whether those are all.

    Raises:
        FileNotFoundError: config.json or the tensors are missing.
        ValueError: a file that is damaged, or a model that cannot be represented here.
    """
    directory = Path(directory)
    file = directory / "config.json"
    pickles = sorted(f.name for f in directory.glob("pytorch_model*.bin"))
    if not is_model(directory) and pickles:
        raise ValueError(
            f"{directory} has its weights in {pickles[0]}, a pickle file, which can run code and "
            f"is not read: save them as {SINGLE} (transformers' save_pretrained does)"
        )
    if not file.is_file() or not is_model(directory):
        missing = SINGLE if file.is_file() else "config.json"
        raise FileNotFoundError(f"{directory} holds no trained model: it has no {missing}")
    config = read_json(file)
    form = config.pop("format", None)
    if form not in (FORMAT, None):
        raise ValueError(f"{file} has format {form!r}; only {FORMAT!r} can be read, and Llama")
    if form == FORMAT:
        return config, True
    try:
        return from_llama(config), False
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{file} has a field of a wrong type: {error}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


# -- Tensors -----------------------------------------------------------------------------------


def shards(directory):
    """The files of a model and the names of the tensors in each, as {file: names or None for all}.

    Raises:
        FileNotFoundError, ValueError: a shard is missing, or the index is damaged.
    """
    directory = Path(directory)
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: None}
    places = read_json(directory / INDEX).get("weight_map")
    if not places or not isinstance(places, dict):
        raise ValueError(f"{directory / INDEX} has no weight_map")
    found = {}
    for tensor, name in places.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith("safetensors"):
            raise ValueError(f"{directory / INDEX}: {name!r} is no safetensors file beside it")
        found.setdefault(directory / name, []).append(tensor)
    for file in found:
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing, a shard that {INDEX} lists")
    return found


def read_tensors(directory):
    """Yield (name, tensor), in torch's default type (float32), of a directory of weights.

    The files are memory-mapped, and mapped anew for each tensor, so that never more than one of
    them is in memory beside its copy.

    Raises:
        FileNotFoundError, ValueError: a file that is missing or damaged, or a tensor of a type
            that holds no plain numbers, or with numbers that are not finite.
    """
    for file, names in shards(directory).items():
        try:
            with safe_open(file, "pt") as tensors:
                names = names or list(tensors.keys())
            for name in names:
                if name.endswith("rotary_emb.inv_freq"):  # old Llamas saved what config.json says
                    continue
                with safe_open(file, "pt") as tensors:
                    tensor = tensors.get_tensor(name)
                    if not tensor.is_floating_point() or tensor.element_size() < 2:
                        raise ValueError(f"{file}: {name} is of type {tensor.dtype}, quantized?")
                    tensor = tensor.to(torch.get_default_dtype(), copy=True)
                if not tensor.sum().isfinite():  # in place of a mask as large as the tensor
                    raise ValueError(f"{file}: {name} has numbers that are not finite; damaged?")
                yield name, tensor
        except (SafetensorError, OSError) as error:
            with open(file, "rb") as start:
                if start.read(30).startswith(b"version https://git-lfs"):
                    raise ValueError(f"{file} is a Git LFS pointer; run: git lfs pull") from None
            raise ValueError(f"{file} is damaged or no safetensors file: {error}") from None


def differences(found, expected):
    """What keeps tensors from being those of a model, both by name; '' if nothing does."""
    shapes = [
        f"{name} is {tuple(found[name].shape)}, not {tuple(expected[name].shape)}"
        for name in found.keys() & expected.keys()
        if found[name].shape != expected[name].shape
    ]
    lists = {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown": sorted(found.keys() - expected.keys()),
        "of another shape": sorted(shapes),
    }
    return "; ".join(
        f"{len(names)} {what}: {', '.join(names[:3])}" + (", .." if len(names) > 3 else "")
        for what, names in lists.items()
        if names
    )


def write_directory(directory, config, tensors):
    """Write both files, each under a temporary name first, so that no half-written file remains."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / f"{SINGLE}.tmp", metadata={"format": "pt"})
    text = json.dumps(config, indent=2)
    (directory / "config.json.tmp").write_text(text + "\n", encoding="utf-8")
    shutil.copymode(directory / "config.json.tmp", directory / f"{SINGLE}.tmp")  # it was private
    for name in (SINGLE, "config.json"):
        os.replace(directory / f"{name}.tmp", directory / name)


# -- The command line --------------------------------------------------------------------------


def main(directory: tyro.conf.Positional[str], to: Path | None = None):
    """Show what a directory of weights holds, and write it anew.

    Args:
        directory: a model's directory, or its name on the Hugging Face Hub
        to: a new directory. A model without pondering becomes a Hugging Face Llama, which
            transformers loads, any other one a directory of our own
    """
    from methods import load
    from tokenizer import HuggingFaceTokenizer, load_tokenizer

    if to is not None and to.exists() and (to.is_file() or any(to.iterdir())):
        raise FileExistsError(f"{to} exists already; give a new directory")
    place = locate(directory)
    model = load(place)
    config = model.config
    size = sum(p.numel() for p in model.parameters())
    print(f"{place}: {config.label}, K = {config.ponder_steps}, {size:,} parameters")
    for f in fields(config):  # what is not as everywhere
        if (value := getattr(config, f.name)) != f.default:
            print(f"    {f.name} = {value}")
    file = place / "tokenizer.json"
    tokenizer = load_tokenizer(file) if file.is_file() else None
    if tokenizer:
        print(f"tokenizer {tokenizer.name}, {tokenizer.vocab_size:,} tokens")
    if to is None:
        return
    model.save_pretrained(to)
    if tokenizer and config.label == "vanilla":
        ids = {"eos_token_id": tokenizer.end_of_text}
        ids["bos_token_id"] = tokenizer.begin[0] if tokenizer.begin else None
        text = json.dumps(read_json(to / "config.json") | ids, indent=2)
        (to / "config.json").write_text(text + "\n", encoding="utf-8")
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.save_pretrained(to)
    elif tokenizer:
        tokenizer.save(to / "tokenizer.json")
    kind = "a Hugging Face Llama" if config.label == "vanilla" else "our own form"
    print(f"written: {to}, {kind}")


if __name__ == "__main__":
    from device import command_line

    command_line(lambda: tyro.cli(main))
