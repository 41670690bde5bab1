"""Directories of weights: ours, Hugging Face's Llama, the official PonderLM-2; read and written.

    model/
        config.json         what the model is, in one of three forms
        model.safetensors   the tensors, under the names of Hugging Face Llama, plus router.proj;
                            or shards, listed by model.safetensors.index.json

form of config.json     known by                     read as
our own                 "format": "ponderlm-3"       every field of the method's Config
Hugging Face Llama      "model_type": "llama"        K = 0, embedding scale 1
official PonderLM-2     the same, and                K = num_latent_thoughts, method ponderlm2
                        "recurrent_model": true      (of num_jacobi_iterations 0: looped)

Only JSON and safetensors are read: loading a model never runs code from its files. A setting that
is not understood is refused by name: a misread model would talk nonsense. Beside its
command, __main__.py, this room imports baselines and below.
"""

import json
import math
import shutil
from dataclasses import asdict, fields
from pathlib import Path

import pydantic
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import runtime
from baselines import build, find, unused_settings
from model import PonderConfig
from runtime import UserError, one_line, read_json, write_json

FORMAT = "ponderlm-3"
INCLUDED = Path(__file__).parent.parent / "models" / "shakespeare"  # a model to begin with
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# -- Places ------------------------------------------------------------------------------------


def is_model(directory):
    """Whether a directory looks like one of weights."""
    return any((Path(directory) / name).is_file() for name in (SINGLE, INDEX))


def find_model(run=None, out="out", otherwise=None):
    """The directory of a run, a checkpoint or another model: as given, or the newest run in `out`;
    `otherwise` that directory, which is said.

    Raises:
        UserError: there is none that has a model.
    """
    if run is None and otherwise and not any(Path(out).glob(f"*/{SINGLE}")):
        print(f"no run in {out}/ yet: this is the model that comes with the code, {otherwise.name}")
        return otherwise
    if run is None:
        return newest_run(out, SINGLE)
    place = locate(run)
    if not is_model(place):
        raise UserError(
            f"{run} holds no {SINGLE}; give the directory of a model, or train one: python train.py"
        )
    return place


def newest_run(out, file):
    """The run in `out` whose `file` is the newest. UserError: no run has one."""
    runs = sorted(Path(out).glob(f"*/{file}"), key=lambda f: f.stat().st_mtime)
    if not runs:
        raise UserError(f"no run with {file} in {out}/; train one first: python train.py")
    return runs[-1].parent


def locate(name):
    """The directory of a model: a path, or the name of a model on the Hugging Face Hub, fetched.

    Raises:
        UserError: neither; or a name of the Hub that cannot be fetched.
    """
    files = ["config.json", "*.safetensors", INDEX, "tokenizer.json", "tokenizer_config.json"]
    return runtime.locate(name, files)


# -- config.json -----------------------------------------------------------------------------------

# Fields that older files lack.
LATER = {"rope_scaling", "feedback_scale"}
# Fields that PonderConfig once had. Now they are methods, or settings of one method.
OLD = {"router", "ablation", "printed_mask_index", "penalty"}
OF_OTHERS = {"accumulate", "pause_token", "capacities"}


def read_config(directory):
    """The settings of a directory of weights, a PonderConfig or a subclass of it.

    Raises:
        UserError: a file that is missing or damaged, unknown or missing fields, wrong values, or a
            model that cannot be represented here.
    """
    directory = Path(directory)
    file = directory / "config.json"
    if not is_model(directory):
        if any(directory.glob("pytorch_model*.bin")):
            raise UserError(
                f"{directory} has its weights in a pickle file, which can run code and is not "
                f"read: save them as {SINGLE} (transformers' save_pretrained does)"
            )
        raise UserError(f"{directory} holds no trained model: it has no {SINGLE}")
    if not file.is_file():
        raise UserError(f"{directory} holds no trained model: it has no config.json")
    content = read_json(file)
    form = content.pop("format", None)
    if form not in (FORMAT, None):
        raise UserError(f"{file} has format {form!r}; only {FORMAT!r} can be read, and Llama")
    try:
        if form is None:
            content = asdict(PonderConfig()) | from_llama(content)
        return parse_config(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: a field is missing or of a wrong type: {error!r}") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def parse_config(content):
    """Fields of our own form, as json reads them -> the settings.

    Raises:
        UserError: unknown or missing fields, an unknown method, or wrong values.
    """
    if not isinstance(content, dict):
        raise UserError(f"{content!r} is not a JSON object")
    if OLD & content.keys():
        content = rename(content)
    Config = find(content.get("method")).Config
    return from_json(Config, content, LATER)


def from_json(kind, content, later=()):
    """A settings dataclass from its fields in JSON, of which only those of `later` may be missing.

    Raises:
        UserError: unknown or missing fields, or wrong values.
    """
    known = {f.name for f in fields(kind)}
    if odd := (content.keys() - known) | (known - content.keys() - set(later)):
        raise UserError(f"unknown or missing fields {sorted(odd)}")
    try:
        return pydantic.TypeAdapter(kind).validate_json(json.dumps(content))
    except pydantic.ValidationError as error:
        raise UserError(one_line(error)) from None


def rename(content):
    """Fields of an old file, which spread the method over several of them -> as they are now."""
    variants = {
        f"ablation-{content.get('ablation')}": content.get("ablation") is not None,
        "ablation-index": bool(content.get("printed_mask_index")),
        "ablation-penalty": content.get("penalty") == "batch",
    }
    chosen = [name for name, is_so in variants.items() if is_so]
    if len(chosen) > 1:
        raise UserError(f"it is {' and '.join(chosen)} at once: only one can be represented")
    method = content.get("method")
    if method in ("ponderlm3", "ponderlm2"):
        method = "ponderlm2" if content.get("router") == "always" else method
        method = "vanilla" if content.get("ponder_steps") == 0 else (chosen or [method])[0]
    kind, default = find(method), PonderConfig()
    dropped = OLD | (OF_OTHERS - {f.name for f in fields(kind.Config)})
    new = {name: value for name, value in content.items() if name not in dropped}
    return (
        new | {"method": method} | {name: getattr(default, name) for name in unused_settings(kind)}
    )


# -- Other people's config.json --------------------------------------------------------------------

# Of config.json: what a Llama may have here.
ONLY = {
    "model_type": ("llama",),
    "architectures": (None, ["LlamaForCausalLM"]),
    "hidden_act": (None, "swish", "silu"),  # two names of one function
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
    "interpolation": (None, False),  # of PonderLM-2: weights the states by their predictions
    "tie_word_embeddings": (None, False, True),
    "scale_embeds": (None, False, True),
    "recurrent_model": (None, False, True),
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads",)
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def from_llama(config):
    """config.json of a Llama, or of an official PonderLM-2 -> the fields of PonderConfig it sets.

    Raises:
        UserError: something that PonderConfig cannot represent, by the name of its field.
        KeyError, TypeError, AttributeError: a field that is missing or of a wrong type.
    """
    for name, known in ONLY.items():
        if (value := config.get(name)) not in known:
            raise UserError(f"{name} = {value!r}: it has to be {' or '.join(map(repr, known))}")
    theta, scaling = rope_of(config)
    given = dict(
        num_key_value_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        block_size=config.get("max_position_embeddings", 2048),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        embed_scale=math.sqrt(2.5 * config["hidden_size"]) if config.get("scale_embeds") else 1.0,
        rope_theta=theta,
        rope_scaling=scaling,
        method="vanilla",
        ponder_steps=0,
    )
    given |= {name: config[name] for name in SIZES}
    return given | (from_ponderlm2(config) if config.get("recurrent_model") else {})


def rope_of(config):
    """theta and llama3's scaling (or None), from either of the two ways to write them down.

    Where the two differ, the choice is that of transformers 5.
    """
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(place) or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1) != 1:
        raise UserError(f"partial_rotary_factor = {rope['partial_rotary_factor']}: only 1 is read")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{place} is of type {kind!r}: only 'default' and 'llama3' are known")
    return theta, [rope[name] for name in LLAMA3]


def from_ponderlm2(config):
    """The fields that the official code of PonderLM-2 adds to a Llama's."""
    K, J = config["num_latent_thoughts"], config["num_jacobi_iterations"]
    if J == 0:  # their way to say that the stack of layers runs K more times, without latents
        return dict(method="looped", ponder_steps=K)
    iters = (2, 3) if config.get("random_jacobi_iterations") else (J, J)
    return dict(method="ponderlm2", ponder_steps=K, iters=iters)


def to_llama(config, tensors):
    """Fields and tensors of a model with K = 0 -> config.json and tensors of a Llama.

    A Llama has no embedding scale: it goes into the table. A head that shared the table then keeps
    the unscaled one.
    """
    scale, table = config["embed_scale"], "model.embed_tokens.weight"
    tensors = tensors | {table: tensors[table] * scale}
    tied = config["tie_word_embeddings"] and scale == 1
    if tied:
        tensors.pop("lm_head.weight", None)
    same = (*SIZES, "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
    rope = {"rope_type": "default"}
    if config["rope_scaling"]:
        rope = {"rope_type": "llama3", **dict(zip(LLAMA3, config["rope_scaling"], strict=True))}
        rope[LLAMA3[-1]] = int(rope[LLAMA3[-1]])
    llama = {name: config[name] for name in same} | dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        max_position_embeddings=config["block_size"],
        tie_word_embeddings=tied,
        rope_scaling=rope if config["rope_scaling"] else None,  # transformers 4, with rope_theta
        rope_parameters={"rope_theta": config["rope_theta"], **rope},  # transformers 5
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        torch_dtype="float32",
        bos_token_id=None,  # the tokenizer's: interop/__main__.py sets both
        eos_token_id=None,
    )
    return llama, tensors


# -- Tensors -----------------------------------------------------------------------------------


def shards(directory):
    """The files of a model and the names of the tensors in each, as {file: names or None for all}.

    Raises:
        UserError: a shard is missing, or the index is damaged.
    """
    directory = Path(directory)
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: None}
    places = read_json(directory / INDEX).get("weight_map")
    if not places or not isinstance(places, dict):
        raise UserError(f"{directory / INDEX} has no weight_map")
    found = {}
    for tensor, name in places.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith("safetensors"):
            raise UserError(f"{directory / INDEX}: {name!r} is not a safetensors file beside it")
        found.setdefault(directory / name, []).append(tensor)
    for file in found:
        if not file.is_file():
            raise UserError(f"{file} is missing, a shard that {INDEX} lists")
    return found


def read_tensors(directory):
    """Yield (name, tensor), in torch's default type (float32), of a directory of weights.

    The files are memory-mapped, and mapped anew for each tensor, so that never more than one of
    them is in memory beside its copy.

    Raises:
        UserError: a file that is missing or damaged, or a tensor of a type
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
                        raise UserError(f"{file}: {name} is of type {tensor.dtype}, quantized?")
                    tensor = tensor.to(torch.get_default_dtype(), copy=True)
                if not tensor.sum().isfinite():  # in place of a mask as large as the tensor
                    raise UserError(f"{file}: {name} has numbers that are not finite; damaged?")
                yield name, tensor
        except (SafetensorError, OSError) as error:
            with open(file, "rb") as start:
                if start.read(30).startswith(b"version https://git-lfs"):
                    raise UserError(f"{file} is a Git LFS pointer; run: git lfs pull") from None
            raise UserError(f"{file} is damaged or no safetensors file: {error}") from None


def differences(found, expected):
    """What keeps tensors from being those of a model, both by name; '' if nothing does."""
    shared = found.keys() & expected.keys()
    shapes = {name: (tuple(found[name].shape), tuple(expected[name].shape)) for name in shared}
    kinds = {
        "missing": expected.keys() - found.keys(),
        "unknown": found.keys() - expected.keys(),
        "of another shape": {f"{x} is {a}, not {b}" for x, (a, b) in shapes.items() if a != b},
    }
    return "; ".join(
        f"{len(names)} {what}: {', '.join(sorted(names)[:3])}" + ", .." * (len(names) > 3)
        for what, names in kinds.items()
        if names
    )


def write_directory(directory, config, tensors):
    """Write both files, each under a temporary name first, so that no half-written file remains."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    temporary = directory / f"{SINGLE}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    write_json(directory / "config.json", config)
    shutil.copymode(directory / "config.json", temporary)  # save_file lets only its owner read it
    temporary.replace(directory / SINGLE)


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
    if wrong := differences(tensors, model.state_dict()):
        raise UserError(f"{directory}: the tensors do not fit config.json: {wrong}")
    model.load_state_dict(tensors, assign=True)
    model.tie()
    return model.eval()


def save(model, directory, exact=False):
    """Write config.json and model.safetensors.

    With K = 0 that is a Llama, which transformers.LlamaForCausalLM.from_pretrained loads, too. It
    has the embedding scale in its table. `exact` keeps the two apart, for training to go on.
    """
    config, tensors = asdict(model.config), model.state_dict()
    if model.config.method == "vanilla" and not exact:
        config, tensors = to_llama(config | {"embed_scale": model.config.scale}, tensors)
    else:
        config = {"format": FORMAT, **config}
        if model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
    write_directory(directory, config, tensors)
