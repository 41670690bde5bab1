"""Directories of weights: ours, Hugging Face's Llama and GPT-NeoX, the official PonderLM-2; in and out.

    model/
        config.json         what the model is, in one of these forms
        model.safetensors   the tensors, under the names of Hugging Face, plus router.proj;
                            or shards, listed by model.safetensors.index.json

form of config.json     known by                     read as
our own                 "format": "ponderlm-3"       the fields of the method's Config
Hugging Face Llama      "model_type": "llama"        K = 0, embedding scale 1
Hugging Face GPT-NeoX   "model_type": "gpt_neox"     the same, as Pythia
official PonderLM-2     one of these two, and        K = num_latent_thoughts, method ponderlm2
                        num_latent_thoughts

Only JSON and safetensors are read: loading a model never runs code from its files. A setting that is not
understood is refused by name: a misread model would talk nonsense.
"""

import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter
from safetensors import safe_open
from safetensors.torch import save_file

import model as root
from data import UserError, newest_run, one_line, read_json, reading, write_json, write_whole
from lab.common import locate
from lab.methods import PonderConfig, build, check_settings, find
from model import FORMAT, Config, PonderLM, from_json
from sample import INCLUDED

FOR_TRANSFORMERS = "ponderlm"  # model_type where export.py has put our form into config.json
PUZZLES = INCLUDED.parent / "lookup"  # another model that comes with the code
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Of each tensor the file that holds it, which is beside the index.
File = Annotated[str, Field(pattern=r"^[^/\\]+\.safetensors$")]
PLACES = TypeAdapter(Annotated[dict[str, File], Field(min_length=1)])

# -- Places ----------------------------------------------------------------------------------------


def is_model(directory):
    """Whether a directory looks like one of weights."""
    return any((Path(directory) / name).is_file() for name in (SINGLE, INDEX))


def find_model(run=None, otherwise=None):
    """The directory of a run or another model: as given, or the newest run, or `otherwise`.

    Raises:
        UserError: there is none that has a model.
    """
    if run is not None:
        if not is_model(place := locate(run)):
            raise UserError(f"{run} holds no {SINGLE}: give the directory of a model")
        return place
    try:
        return newest_run()
    except UserError:
        if otherwise is None:
            raise
        print(f"there is no run in out/ yet: this is the model that comes with the code, {otherwise.name}")
        return otherwise


# -- config.json -----------------------------------------------------------------------------------

# What our form says by saying nothing: the root's models, which know nothing of other methods.
PAPER = {"method": "ponderlm3", "backbone": "llama", "backbone_options": {}, "reread": False}


def read_config(directory):
    """The settings of a directory of weights, a PonderConfig or a subclass of it.

    Raises:
        UserError: a file that is missing or damaged, unknown or missing fields, wrong values, or a model
            that cannot be represented here.
    """
    if not is_model(directory):
        raise UserError(f"{directory} holds no trained model: it has no {SINGLE}")
    content = read_json(file := Path(directory, "config.json"))
    if content.get("model_type") == FOR_TRANSFORMERS:
        content = content.get("ponder")
    with reading(file):
        if "format" not in content:
            content = {"format": FORMAT, **asdict(PonderConfig()), **from_others(content)}
        if (form := content.pop("format")) != FORMAT:
            raise ValueError(f"format {form!r}: only {FORMAT!r} is known")
    return parse_config(content, file)


def parse_config(content, file):
    """Fields of our own form, as JSON has them -> the settings of the method that they name.

    Raises:
        UserError: unknown or missing fields, an unknown method, or wrong values; with the `file`.
    """
    content = PAPER | content
    try:
        config = from_json(find(content["method"]).Config, content)
        check_settings(config)
        return config
    except (UserError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {one_line(error)}") from None


# -- Other people's config.json --------------------------------------------------------------------

# What a field of config.json has to be, where it is there.
ONLY = {
    "sliding_window": (None,),
    "quantization_config": (None,),
    "interpolation": (None, False),  # of PonderLM-2: weights the states by their predictions
    "scale_embeds": (None, False, True),
    "recurrent_model": (None, False, True),
}
ONLY_OF = {
    "llama": {
        "architectures": (None, ["LlamaForCausalLM"]),
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
    },
    "gpt_neox": {
        "architectures": (None, ["GPTNeoXForCausalLM"]),
        "hidden_act": (None, "gelu"),
        "attention_bias": (None, True),
        "use_parallel_residual": (None, False, True),
    },
}
# Fields of the same name, and never lacking.
SIZES = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
# Our name of a field: theirs, and what it is where config.json lacks it.
NAMES = {
    "block_size": ("max_position_embeddings", 2048),
    "tie_word_embeddings": ("tie_word_embeddings", False),
}
NAMES_OF = {
    "llama": {
        "num_key_value_heads": ("num_key_value_heads", None),
        "head_dim": ("head_dim", None),
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
    },
    "gpt_neox": {"rms_norm_eps": ("layer_norm_eps", 1e-5)},
}
# Of RoPE: its base, and the share of a head that is turned, with what it is where it lacks.
ROPE_OF = {
    "llama": ("rope_theta", "partial_rotary_factor", 1.0),
    "gpt_neox": ("rotary_emb_base", "rotary_pct", 0.25),
}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def from_others(config):
    """config.json of a Llama, a GPT-NeoX or an official PonderLM-2 -> what it sets of a PonderConfig.

    Raises:
        ValueError: something that PonderConfig cannot represent, by the name of its field.
        KeyError, TypeError: a field that is missing or of a wrong type.
    """
    check_only(config, {"model_type": tuple(ONLY_OF)})
    kind = config["model_type"]
    check_only(config, ONLY | ONLY_OF[kind])
    names = NAMES | NAMES_OF[kind]
    given = dict(method="vanilla", ponder_steps=0, **read_rope(config))
    given |= {name: config[name] for name in SIZES}
    given |= {ours: config.get(theirs, default) for ours, (theirs, default) in names.items()}
    given["embed_scale"] = None if config.get("scale_embeds") else 1.0
    ponders = config.get("recurrent_model", bool(config.get("num_latent_thoughts")))
    return given | (from_ponderlm2(config) if ponders else {})


def check_only(config, only):
    for name, known in only.items():
        if (value := config.get(name)) not in known:
            raise ValueError(f"{name} = {value!r}: it has to be {' or '.join(map(repr, known))}")


def read_rope(config):
    """config.json of a Llama or GPT-NeoX, in either of the two ways to write RoPE down -> fields.

    Where the two differ, the choice is that of transformers 5.
    """
    base, turned, default = ROPE_OF[config["model_type"]]
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = dict(config.get(place) or {})
    theta = rope.get("rope_theta", config.get(base, 10_000.0))
    share = rope.get("partial_rotary_factor", config.get(turned, default))
    neox = config["model_type"] == "gpt_neox"
    if not neox and share != 1:
        raise ValueError(f"partial_rotary_factor = {share}: only 1 is read")
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = ("default",) if neox else ("default", "llama3")
    if kind not in known:
        raise ValueError(f"{place} is of type {kind!r}: it has to be {' or '.join(known)}")
    backbone, options = config["model_type"], {}
    if neox:
        parallel = config.get("use_parallel_residual") is not False
        options = {"rotary_pct": share, "parallel_residual": float(parallel)}
    elif kind == "llama3":
        backbone, options = "llama3", {name: rope[name] for name in LLAMA3}
    return dict(rope_theta=theta, backbone=backbone, backbone_options=options)


def write_rope(config):
    """Fields of a model -> RoPE as config.json has it, in both ways."""
    backbone, options = config["backbone"], config["backbone_options"]
    rope, written = {"rope_type": "default"}, {"rope_scaling": None}
    if backbone == "llama3":
        rope = written["rope_scaling"] = {"rope_type": "llama3"} | options
        rope[LLAMA3[-1]] = int(rope[LLAMA3[-1]])
    rope = {"rope_theta": config["rope_theta"], **rope}
    if backbone == "gpt_neox":
        written["rotary_emb_base"] = config["rope_theta"]
        written["use_parallel_residual"] = bool(options.get("parallel_residual", 1))
        written["rotary_pct"] = rope["partial_rotary_factor"] = options.get("rotary_pct", 1.0)
    else:
        written["rope_theta"] = config["rope_theta"]
    return written | {"rope_parameters": rope}


def from_ponderlm2(config):
    """The fields that the official code of PonderLM-2 adds to others'."""
    K, J = config["num_latent_thoughts"], config["num_jacobi_iterations"]
    refinements = (J, J)
    if config.get("random_jacobi_iterations"):  # what the code draws from in training
        refinements = (2, 4) if config["model_type"] == "gpt_neox" else (2, 3)
    return dict(method="ponderlm2", ponder_steps=K, refinements=refinements)


def to_others(config, tensors, ids):
    """Fields and tensors of a model with K = 0 -> config.json and tensors of a Llama or GPT-NeoX.

    They have no embedding scale: it goes into the table. A head that shared the table then keeps
    the unscaled one. `ids`: bos_token_id and eos_token_id, of the tokenizer.
    """
    scale, table = config["embed_scale"], "model.embed_tokens.weight"
    tensors = tensors | {table: tensors[table] * scale}
    tied = config["tie_word_embeddings"] and scale == 1
    if tied:
        tensors.pop("lm_head.weight", None)
    config = config | {"tie_word_embeddings": tied}
    kind = "gpt_neox" if config["backbone"] == "gpt_neox" else "llama"
    names = NAMES | NAMES_OF[kind]
    fields = {"model_type": kind, "torch_dtype": str(tensors[table].dtype)[6:]} | ids
    fields |= {name: known[-1] for name, known in ONLY_OF[kind].items()}
    fields |= {name: config[name] for name in SIZES}
    fields |= {theirs: config[ours] for ours, (theirs, _) in names.items()}
    if kind == "gpt_neox":
        tensors = {neox_name(name): tensor for name, tensor in tensors.items()}
    return fields | write_rope(config), tensors


# A GPT-NeoX has other names outside of its blocks.
NEOX_NAMES = {
    "model.embed_tokens.": "gpt_neox.embed_in.",
    "model.layers.": "gpt_neox.layers.",
    "model.norm.": "gpt_neox.final_layer_norm.",
    "lm_head.": "embed_out.",
}


def neox_name(name, back=False):
    """A tensor's name here -> as GPT-NeoX has it, or back; others as they are."""
    for ours, theirs in NEOX_NAMES.items():
        before, after = (theirs, ours) if back else (ours, theirs)
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name


# -- Tensors -----------------------------------------------------------------------------------


def shards(directory):
    """The files of a model and the names of the tensors in each, as {file: names or None for all}.

    Raises:
        UserError: the index is damaged, or names what is no safetensors file beside it.
    """
    directory, found = Path(directory), {}
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: None}
    content = read_json(directory / INDEX)
    with reading(directory / INDEX):
        for tensor, name in PLACES.validate_python(content["weight_map"]).items():
            found.setdefault(directory / name, []).append(tensor)
    return found


# What old Llamas and Pythias saved and nobody needs: the frequencies of RoPE, the causal mask.
LEFTOVERS = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")


def read_tensors(directory):
    """Yield (name, tensor), in torch's default type (float32), of a directory of weights.

    The files are memory-mapped, and mapped anew for each tensor, so that never more than one of them is in
    memory beside its copy.

    Raises:
        UserError: a file that is missing or damaged, or a tensor of a type that holds no plain numbers, or
            with numbers that are not finite.
    """
    for file, names in shards(directory).items():
        with reading(file):
            with open(file, "rb") as start:
                if start.read(30).startswith(b"version https://git-lfs"):
                    raise ValueError("it is a Git LFS pointer; run: git lfs pull")
            with safe_open(file, "pt") as tensors:
                names = names or list(tensors.keys())
            for name in names:
                if name.endswith(LEFTOVERS):
                    continue
                with safe_open(file, "pt") as tensors:
                    tensor = tensors.get_tensor(name)
                    if not tensor.is_floating_point() or tensor.element_size() < 2:
                        raise ValueError(f"{name} is of type {tensor.dtype}, quantized?")
                    tensor = tensor.to(torch.get_default_dtype(), copy=True)
                if not tensor.sum().isfinite():  # in place of a mask as large as the tensor
                    raise ValueError(f"{name} has numbers that are not finite; damaged?")
                yield neox_name(name, back=True), tensor


def write_directory(directory, config, tensors):
    """Write both files, each whole or not at all."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_json(directory / "config.json", config)
    with_form = dict(metadata={"format": "pt"})  # without which transformers does not read it
    write_whole(directory / SINGLE, lambda file: save_file(tensors, file, **with_form))
    shutil.copymode(directory / "config.json", directory / SINGLE)  # save_file lets only its owner read it


# -- Models ----------------------------------------------------------------------------------------


def load(directory):
    """The model of a directory of weights, whatever its method, in float32 on the CPU, to evaluate.

    Raises:
        UserError: as read_config and read_tensors; or tensors that do not fit the config.
    """
    config, tensors = read_config(directory), dict(read_tensors(directory))
    table = tensors.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and table is not None:
        head = tensors.setdefault("lm_head.weight", table)
        if not torch.equal(head, table):
            raise UserError(f"{directory}: tie_word_embeddings, but lm_head.weight differs")
    with torch.device("meta"):  # the tensors that were read become its parameters
        model = build(config)
    with reading(directory):  # torch names what is missing, unknown or of another shape
        model.load_state_dict(tensors, assign=True)
    model.tie()
    return model.eval()


def tensors_of(model):
    """What a model's state_dict holds, also of one whose blocks are compiled."""
    return {name.replace("_orig_mod.", ""): x for name, x in model.state_dict().items()}


def as_root(model):
    """A model as the root has it, with the same tensors, where that is all there is to it; else the model."""
    config = asdict(model.config)
    if config.keys() != asdict(PonderConfig()).keys() or config != config | PAPER:
        return model
    with torch.device("meta"):
        plain = PonderLM(Config(**{f.name: getattr(model.config, f.name) for f in fields(Config)}))
    plain.load_state_dict(tensors_of(model), assign=True)
    plain.tie()
    return plain.train(model.training)


def save(model, directory, exact=False, begin=None, end=None):
    """As model.save; a model with K = 0 as a Llama or a GPT-NeoX, which transformers loads, too.

    That has the embedding scale in its table, and the tokenizer's ids of the `begin` and `end` of a text.
    `exact` keeps scale and table apart, for training to go on.
    """
    if model.config.method != "vanilla" or exact:
        return root.save(as_root(model), directory)
    ids = {"bos_token_id": begin, "eos_token_id": end}
    config = asdict(model.config) | {"embed_scale": model.config.scale}
    write_directory(directory, *to_others(config, tensors_of(model), ids))
