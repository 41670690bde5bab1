"""Read and write directories of weights: this project's, Hugging Face's Llama and GPT-NeoX, and those of the
official PonderLM-2.

form of config.json              recognised by               read as
this project's                   "format": "ponderlm-3"      the fields of the method's Config
Hugging Face Llama               "model_type": "llama"       a vanilla model (K = 0) with embedding scale 1
Hugging Face GPT-NeoX (Pythia)   "model_type": "gpt_neox"    the same, on the backbone gpt_neox
official PonderLM-2              one of the last two, and    a ponderlm2 with K = num_latent_thoughts
                                 num_latent_thoughts

This project's form is read here, the other forms by transformers. Only JSON and safetensors are read: loading
a model never runs code from its files. A setting that is not understood is refused by name, since a model
that is misread would produce nonsense.
"""

from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import load_file

import checkpoint
from checkpoint import FORMAT, from_json, newest_run
from common import UserError, one_line, read_json, refuse_lfs_pointer, user_error_if_unreadable
from lab.common import locate
from lab.methods import PonderConfig, build, check_settings, find
from model import Config, PonderLM
from sample import INCLUDED

FOR_TRANSFORMERS = "ponderlm"  # the model_type in a config.json that export.py has written
PUZZLES = INCLUDED.parent / "lookup"  # another model that comes with the code
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


# -- Places ----------------------------------------------------------------------------------------


def is_model(directory):
    """Whether a directory holds weights, by the names of its files."""
    return any((Path(directory) / name).is_file() for name in (SINGLE, INDEX))


def find_model(run=None, otherwise=None):
    """The directory of a model: `run` if it is given, or else the newest run, or else `otherwise`.

    Raises:
        UserError: there is no such directory, or it holds no model.
    """
    if run is not None:
        place = locate(run)
        if not is_model(place):
            raise UserError(f"{run} has no {SINGLE}: give the directory of a model")
        return place
    found = newest_run(default=otherwise)
    if found == otherwise:
        print(f"there is no run in out/ yet: using the model that comes with the code, {otherwise.name}")
    return found


# -- Models ----------------------------------------------------------------------------------------

# What a config.json that train.py writes leaves out, since the root has only this method and backbone.
PAPER = {"method": "ponderlm3", "backbone": "llama", "backbone_options": {}, "reread": False}


def read_config(directory):
    """The settings of the model in a directory: a PonderConfig, or a subclass of it.

    Raises:
        UserError: a file is missing or damaged, fields are unknown, missing or out of their range, or the
            model cannot be represented here.
    """
    file = Path(directory, "config.json")
    content = our_form(directory)
    if content is None:
        with user_error_if_unreadable(file):
            theirs = kind_of(file).config_class.from_pretrained(directory)
            content = asdict(PonderConfig()) | from_others(theirs.to_dict())
    return parse_config(content, file)


def our_form(directory):
    """The fields of a config.json in this project's form, which may be one field of transformers' form; None
    if it has neither.

    Raises:
        UserError: the directory holds no weights, or its config.json cannot be read.
    """
    if not is_model(directory):
        raise UserError(f"{directory} has no {SINGLE}: give the directory of a trained model")
    content = read_json(Path(directory, "config.json"))
    if content.get("model_type") == FOR_TRANSFORMERS:
        content = content.get("ponder") or {}
    return content if content.pop("format", None) == FORMAT else None


def parse_config(content, file):
    """The settings of a method from the fields of a config.json in this project's form.

    Args:
        content: the fields, as JSON has them; one of them names the method.
        file: the config.json, for messages.

    Raises:
        UserError: fields are unknown, missing or out of their range, or the method is unknown.
    """
    content = PAPER | content
    try:
        config = from_json(find(content["method"]).Config, content)
        check_settings(config)
        return config
    except (UserError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {one_line(error)}") from None


def load(directory):
    """The model in a directory, of any method, in float32, on the CPU and in evaluation mode.

    Raises:
        UserError: see read_config; or the tensors are damaged, or do not fit the config.
    """
    config = read_config(directory)
    directory = Path(directory)
    for file in sorted(directory.glob("*.safetensors")):
        refuse_lfs_pointer(file)
    with user_error_if_unreadable(directory):
        if our_form(directory) is None:
            tensors = read_others(directory)
        else:
            # They are copied: the tensors of a file lie at addresses with no alignment, which makes products
            # of a few rows slower.
            found = load_file(directory / SINGLE)
            tensors = {name: x.to(torch.float32, copy=True) for name, x in found.items()}
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors[TABLE]
        with torch.device("meta"):  # no memory is needed: the tensors that were read become the parameters
            model = build(config).eval()
        model.load_state_dict(tensors, assign=True)
    model.tie_head()
    return model


def save(model, directory, begin=None, end=None):
    """Write a model to a directory: a vanilla model as a Llama or GPT-NeoX of transformers, a model of any
    other method as checkpoint.save does.

    Args:
        model: a model of any method.
        directory: where to write.
        begin, end: ids of the tokens that begin and end a text, for transformers' config; None: there is no
            such token.
    """
    if model.config.method == "vanilla":
        ids = {"bos_token_id": begin, "eos_token_id": end}
        to_others(model, ids).save_pretrained(directory)
    else:
        checkpoint.save(as_core_model(model), directory)


def tensors_of(model):
    """The state_dict of a model. If the model's blocks are compiled, their names are as if they were not."""
    return {name.replace("_orig_mod.", ""): x for name, x in model.state_dict().items()}


def as_core_model(model):
    """The root's PonderLM with the tensors of a model, if the root has such models; otherwise the model
    itself."""
    config = asdict(model.config)
    if config.keys() != asdict(PonderConfig()).keys():  # settings of another method
        return model
    if any(config[name] != value for name, value in PAPER.items()):
        return model
    shared = {field.name: getattr(model.config, field.name) for field in fields(Config)}
    with torch.device("meta"):
        plain = PonderLM(Config(**shared))
    plain.load_state_dict(tensors_of(model), assign=True)
    plain.tie_head()
    return plain.train(model.training)


# -- Models of transformers ------------------------------------------------------------------------

# Fields that have the same names here and in transformers.
SIZES = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
SIZES += ("tie_word_embeddings",)
LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
TABLE = "model.embed_tokens.weight"
NEOX = {  # beginnings of names: {ours: that of transformers' GPT-NeoX}
    "model.embed_tokens.": "gpt_neox.embed_in.",
    "model.norm.": "gpt_neox.final_layer_norm.",
    "model.": "gpt_neox.",
}


def library():
    """The package transformers, without its progress bars. It takes seconds to import."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


def kind_of(file):
    """The class of transformers to which a config.json belongs.

    Raises:
        ValueError: its models cannot be read here.
    """
    kinds = {"llama": library().LlamaForCausalLM, "gpt_neox": library().GPTNeoXForCausalLM}
    name = read_json(file).get("model_type")
    if name not in kinds:
        raise ValueError(
            f"model_type = {name!r} is not supported: give a model of this project, or one of type "
            f"{', '.join(kinds)}"
        )
    return kinds[name]


def from_others(config):
    """The fields of a PonderConfig from the config of a Llama, a GPT-NeoX or an official PonderLM-2.

    Args:
        config: the config of transformers, a dict.

    Raises:
        ValueError: PonderConfig cannot represent a setting, which the message names.
        KeyError: a field is missing.
    """
    neox = config["model_type"] == "gpt_neox"
    rope = config["rope_parameters"]
    check_others(config, rope, neox)
    given = {name: config[name] for name in SIZES}
    given["method"] = "vanilla"
    given["ponder_steps"] = 0
    given["block_size"] = config["max_position_embeddings"]
    given["rope_theta"] = rope["rope_theta"]
    # Official PonderLM-2 models may scale their embeddings as we do; a Llama or GPT-NeoX does not.
    given["embed_scale"] = None if config.get("scale_embeds") else 1.0
    if neox:
        given["backbone"] = "gpt_neox"
        given["backbone_options"] = {
            "rotary_pct": rope["partial_rotary_factor"],
            "parallel_residual": float(config["use_parallel_residual"]),
        }
        given["rms_norm_eps"] = config["layer_norm_eps"]
    else:
        for name in ("num_key_value_heads", "head_dim", "rms_norm_eps"):
            given[name] = config[name]
    if rope["rope_type"] == "llama3":
        given["backbone"] = "llama3"
        given["backbone_options"] = {name: float(rope[name]) for name in LLAMA3}
    # In an official PonderLM-2, recurrent_model turns the latent thoughts on or off. Without this field,
    # num_latent_thoughts says whether there are any.
    has_thoughts = bool(config.get("num_latent_thoughts"))
    is_ponderlm2 = config.get("recurrent_model", has_thoughts)
    if is_ponderlm2:
        given["method"] = "ponderlm2"
        given["ponder_steps"] = config["num_latent_thoughts"]
        R = config["num_jacobi_iterations"]
        if config.get("random_jacobi_iterations"):
            given["refinements"] = (2, 4 if neox else 3)  # the range from which the official code draws R
        else:
            given["refinements"] = (R, R)
    return given


def check_others(config, rope, neox):
    """Refuse settings of a Llama or GPT-NeoX that PonderConfig cannot represent.

    Args:
        config: the config of transformers, a dict.
        rope: its rope_parameters.
        neox: whether it is that of a GPT-NeoX.

    Raises:
        ValueError: there is such a setting.
    """
    only = {
        "hidden_act": "gelu" if neox else "silu",
        "attention_bias": neox,
        "mlp_bias": False,
        "interpolation": False,
        "sliding_window": None,
        "quantization_config": None,
    }
    for name, known in only.items():
        value = config.get(name)
        if value not in (known, None):
            raise ValueError(f"{name} = {value!r} is not supported (only {known!r} is): use another model")
    rope_types = ("default",) if neox else ("default", "llama3")
    rotates_as_known = neox or rope.get("partial_rotary_factor", 1) == 1
    if rope["rope_type"] not in rope_types or not rotates_as_known:
        known = " and ".join(rope_types)
        raise ValueError(
            f"rope_parameters = {rope} is not supported (only RoPE of type {known} is): use another model"
        )


def read_others(directory):
    """The tensors of a model of transformers, in float32, under our names.

    Raises:
        ValueError: the file is damaged, or its tensors do not fit the config.
    """
    kind = kind_of(directory / "config.json")
    try:
        other, info = kind.from_pretrained(
            directory,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named in `info`, and refused below
        )
    except Exception as error:  # for a damaged file, transformers raises many classes of errors
        raise ValueError(one_line(error)) from None
    wrong = {kind: sorted(map(str, found)) for kind, found in info.items() if found}
    if wrong:
        first = "; ".join(f"{kind} {', '.join(found[:2])}" for kind, found in wrong.items())
        raise ValueError(
            f"the tensors do not fit the config.json beside them ({first}): use the config.json that belongs "
            "to these weights"
        )
    return renamed(other.state_dict(), {theirs: ours for ours, theirs in NEOX.items()})


def to_others(model, ids):
    """A vanilla model as a Llama or GPT-NeoX of transformers.

    These have no embedding scale, so the scale is multiplied into the embedding table. A head that shares the
    table then gets a table of its own, without the scale.

    Args:
        model: a vanilla model.
        ids: a dict of bos_token_id and eos_token_id.
    """
    config = model.config
    options = config.backbone_options
    tensors = tensors_of(model)
    tensors[TABLE] = tensors[TABLE] * config.scale
    shape = ids | {name: getattr(config, name) for name in SIZES}
    shape["max_position_embeddings"] = config.block_size
    shape["tie_word_embeddings"] = config.tie_word_embeddings and config.scale == 1
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.backbone == "gpt_neox":
        kind = library().GPTNeoXForCausalLM
        tensors = renamed(tensors, NEOX)
        shape["layer_norm_eps"] = config.rms_norm_eps
        shape["use_parallel_residual"] = bool(options.get("parallel_residual", 1))
        rope["partial_rotary_factor"] = options.get("rotary_pct", 1.0)
    else:
        kind = library().LlamaForCausalLM
        shape["rms_norm_eps"] = config.rms_norm_eps
        shape["num_key_value_heads"] = config.kv_heads
        shape["head_dim"] = config.head_width
    if config.backbone == "llama3":
        rope |= options
        rope["rope_type"] = "llama3"
        original = options["original_max_position_embeddings"]
        rope["original_max_position_embeddings"] = int(original)  # transformers wants an integer
    other = kind(kind.config_class(**shape, rope_parameters=rope)).to(tensors["lm_head.weight"].dtype)
    other.load_state_dict(tensors)
    return other


def renamed(tensors, names):
    """Tensors under other names.

    Args:
        tensors: {name: tensor}.
        names: {beginning of a name: what replaces it}; the first beginning that fits counts.
    """
    found = {}
    for name, tensor in tensors.items():
        for before, after in names.items():
            if name.startswith(before):
                name = after + name.removeprefix(before)
                break
        found[name] = tensor
    return found
