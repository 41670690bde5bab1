"""Directories of weights: ours, Hugging Face's Llama and GPT-NeoX, the official PonderLM-2; in and out.

form of config.json     known by                     read as
our own                 "format": "ponderlm-3"       the fields of the method's Config
Hugging Face Llama      "model_type": "llama"        K = 0, embedding scale 1
Hugging Face GPT-NeoX   "model_type": "gpt_neox"     the same, as Pythia
official PonderLM-2     one of these two, and        K = num_latent_thoughts, method ponderlm2
                        num_latent_thoughts

Ours is read as the root writes it, the others by transformers. Only JSON and safetensors are read: loading a
model never runs code from its files. A setting that is not understood is refused by name: a misread model
would talk nonsense.
"""

from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import load_file

import checkpoint
from checkpoint import FORMAT, from_json, newest_run
from common import UserError, one_line, read_json, user_error_if_unreadable
from lab.common import locate
from lab.methods import PonderConfig, build, check_settings, find
from model import Config, PonderLM
from sample import INCLUDED

FOR_TRANSFORMERS = "ponderlm"  # model_type where export.py has put our form into config.json
PUZZLES = INCLUDED.parent / "lookup"  # another model that comes with the code
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


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
    found = newest_run(default=otherwise)
    if found == otherwise:
        print(f"there is no run in out/ yet: this is the model that comes with the code, {otherwise.name}")
    return found


# -- Models ----------------------------------------------------------------------------------------

# What our form says by saying nothing: the root's models, which know nothing of other methods.
PAPER = {"method": "ponderlm3", "backbone": "llama", "backbone_options": {}, "reread": False}


def read_config(directory):
    """The settings of a directory of weights, a PonderConfig or a subclass of it.

    Raises:
        UserError: a file that is missing or damaged, unknown or missing fields, wrong values, or a model
            that cannot be represented here.
    """
    content, file = our_form(directory), Path(directory, "config.json")
    if content is None:
        with user_error_if_unreadable(file):
            theirs = kind_of(file).config_class.from_pretrained(directory)
            content = asdict(PonderConfig()) | from_others(theirs.to_dict())
    return parse_config(content, file)


def our_form(directory):
    """The settings in a config.json of our own form, also within transformers'; None: it is another's."""
    if not is_model(directory):
        raise UserError(f"{directory} holds no trained model: it has no {SINGLE}")
    content = read_json(Path(directory, "config.json"))
    if content.get("model_type") == FOR_TRANSFORMERS:
        content = content.get("ponder") or {}
    if content.pop("format", None) == FORMAT:
        return content


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


def load(directory):
    """The model of a directory of weights, whatever its method, in float32 on the CPU, to evaluate.

    Raises:
        UserError: as read_config; or tensors that are damaged or do not fit the config.
    """
    config, directory = read_config(directory), Path(directory)
    with user_error_if_unreadable(directory):
        if our_form(directory) is None:
            tensors = read_others(directory)
        else:
            tensors = {name: x.float() for name, x in load_file(directory / SINGLE).items()}
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors[TABLE]
        with torch.device("meta"):  # the tensors that were read become its parameters
            model = build(config)
        model.load_state_dict(tensors, assign=True)
    model.tie_head()
    return model.eval()


def save(model, directory, begin=None, end=None):
    """As checkpoint.save; a model with K = 0 as a Llama or a GPT-NeoX of transformers, which has the
    embedding scale in its table, and the tokenizer's ids of the `begin` and `end` of a text."""
    if model.config.method != "vanilla":
        checkpoint.save(as_root(model), directory)
    else:
        to_others(model, {"bos_token_id": begin, "eos_token_id": end}).save_pretrained(directory)


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
    plain.tie_head()
    return plain.train(model.training)


# -- Models of transformers ------------------------------------------------------------------------

SIZES = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
SIZES += ("tie_word_embeddings",)  # fields of the same name
LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
TABLE = "model.embed_tokens.weight"
NEOX = {  # a GPT-NeoX has other names outside of its blocks
    "model.embed_tokens.": "gpt_neox.embed_in.",
    "model.norm.": "gpt_neox.final_layer_norm.",
    "model.": "gpt_neox.",
}


def library():
    """transformers, which takes seconds to import, without its bars."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


def kind_of(file):
    """The class of transformers of a config.json. ValueError: another one is named."""
    kinds = {"llama": library().LlamaForCausalLM, "gpt_neox": library().GPTNeoXForCausalLM}
    if (name := read_json(file).get("model_type")) not in kinds:
        raise ValueError(f"model_type = {name!r} is not read, but {', '.join(kinds)} and our own form are")
    return kinds[name]


def from_others(config):
    """The config of a Llama, a GPT-NeoX or an official PonderLM-2, as a dict -> fields of a PonderConfig.

    Raises:
        ValueError: something that PonderConfig cannot represent, by the name of its field.
        KeyError: a field that is missing.
    """
    neox, rope = config["model_type"] == "gpt_neox", config["rope_parameters"]
    rope_types = ("default",) if neox else ("default", "llama3")
    only = dict(hidden_act="gelu" if neox else "silu", attention_bias=neox, mlp_bias=False)
    only |= dict(interpolation=False, sliding_window=None, quantization_config=None)
    for name, known in only.items():
        if (value := config.get(name)) not in (known, None):
            raise ValueError(f"{name} = {value!r}: only {known!r} is read")
    if rope["rope_type"] not in rope_types or not (neox or rope.get("partial_rotary_factor", 1) == 1):
        raise ValueError(f"rope_parameters = {rope}: only {' and '.join(rope_types)} are read")
    given = dict(method="vanilla", ponder_steps=0) | {name: config[name] for name in SIZES}
    given |= dict(block_size=config["max_position_embeddings"], rope_theta=rope["rope_theta"])
    given["embed_scale"] = None if config.get("scale_embeds") else 1.0
    if neox:
        options = {"rotary_pct": rope["partial_rotary_factor"]}
        options["parallel_residual"] = float(config["use_parallel_residual"])
        given |= dict(rms_norm_eps=config["layer_norm_eps"], backbone="gpt_neox", backbone_options=options)
    else:
        given |= {name: config[name] for name in ("num_key_value_heads", "head_dim", "rms_norm_eps")}
    if rope["rope_type"] == "llama3":
        given |= dict(backbone="llama3", backbone_options={name: float(rope[name]) for name in LLAMA3})
    if config.get("recurrent_model", bool(config.get("num_latent_thoughts"))):
        K, J = config["num_latent_thoughts"], config["num_jacobi_iterations"]
        drawn = (2, 4 if neox else 3) if config.get("random_jacobi_iterations") else (J, J)
        given |= dict(method="ponderlm2", ponder_steps=K, refinements=drawn)
    return given


def read_others(directory):
    """The tensors of a model of transformers, under our names, in float32. ValueError: they are not all."""
    how = dict(dtype=torch.float32, use_safetensors=True, output_loading_info=True)
    how["ignore_mismatched_sizes"] = True  # so that info names them
    try:
        other, info = kind_of(directory / "config.json").from_pretrained(directory, **how)
    except Exception as error:  # transformers has no class for what is wrong with a file
        raise ValueError(one_line(error)) from None
    if odd := {name: found for name, found in info.items() if found}:
        raise ValueError(f"its tensors are not those of its config.json: {odd}")
    return renamed(other.state_dict(), {theirs: ours for ours, theirs in NEOX.items()})


def to_others(model, ids):
    """A model with K = 0 as a Llama or GPT-NeoX of transformers.

    They have no embedding scale: it goes into the table. A head that shared the table then keeps
    the unscaled one. `ids`: bos_token_id and eos_token_id, of the tokenizer.
    """
    config, tensors = model.config, tensors_of(model)
    options, kind = config.backbone_options, library().LlamaForCausalLM
    tensors[TABLE] = tensors[TABLE] * config.scale
    shape = ids | {name: getattr(config, name) for name in SIZES}
    shape |= dict(max_position_embeddings=config.block_size)
    shape["tie_word_embeddings"] = config.tie_word_embeddings and config.scale == 1
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.backbone == "gpt_neox":
        rope["partial_rotary_factor"] = options.get("rotary_pct", 1.0)
        parallel = bool(options.get("parallel_residual", 1))
        shape |= dict(layer_norm_eps=config.rms_norm_eps, use_parallel_residual=parallel)
        kind, tensors = library().GPTNeoXForCausalLM, renamed(tensors, NEOX)
    else:
        shape |= dict(
            rms_norm_eps=config.rms_norm_eps, num_key_value_heads=config.kv_heads, head_dim=config.head_width
        )
    if config.backbone == "llama3":
        rope |= options | {"rope_type": "llama3", LLAMA3[-1]: int(options[LLAMA3[-1]])}
    other = kind(kind.config_class(**shape, rope_parameters=rope)).to(tensors["lm_head.weight"].dtype)
    other.load_state_dict(tensors)
    return other


def renamed(tensors, names):
    """Tensors under other names, by their beginnings: {one: another}."""
    found = {}
    for name, tensor in tensors.items():
        before = next((before for before in names if name.startswith(before)), "")
        found[names.get(before, "") + name.removeprefix(before)] = tensor
    return found
