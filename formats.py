"""Foreign config.json: Hugging Face's Llama and the official PonderLM-2, to our settings and back.

Each function takes and gives dictionaries of fields, as json reads them. What is not understood is
refused by name: a model that is read wrongly speaks, but nonsense.
"""

import math

# Of config.json: what a Llama must have here, if it says anything about it.
ONLY = {
    "architectures": (None, ["LlamaForCausalLM"]),
    "hidden_act": ("swish", "silu"),  # two names of one function
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
    "interpolation": (None, False),  # of PonderLM-2: weights the states by their predictions
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def from_llama(config):
    """config.json of a Llama, or of an official PonderLM-2 -> the PonderConfig fields that it sets.

    Raises:
        ValueError: something that PonderConfig cannot represent, by the name of its field.
    """
    if config.get("model_type") != "llama":
        raise ValueError(f"model_type = {config.get('model_type')!r}: only 'llama' can be read")
    for name, known in ONLY.items():
        if config.get(name, known[0]) not in known:
            raise ValueError(f"{name} = {config[name]!r}: only {known[-1]!r} can be represented")
    for name in ("tie_word_embeddings", "scale_embeds", "recurrent_model"):
        if config.get(name) not in (None, False, True):
            raise ValueError(f"{name} = {config[name]!r} is neither true nor false")
    missing = [name for name in (*SIZES, "num_attention_heads") if config.get(name) is None]
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    theta, scaling = rope_of(config)
    given = dict(
        num_key_value_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        block_size=config.get("max_position_embeddings", 2048),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        embed_scale=math.sqrt(2.5 * config["hidden_size"]) if config.get("scale_embeds") else 1.0,
        rope_theta=float(theta),
        rope_scaling=scaling,
        method="vanilla",
        ponder_steps=0,
    )
    given |= {name: config[name] for name in (*SIZES, "num_attention_heads")}
    return given | (from_ponderlm2(config) if config.get("recurrent_model") else {})


def rope_of(config):
    """theta and llama3's scaling (or None), from either of the two ways to write them down.

    What counts where they differ is as in transformers 5.
    """
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(place) or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"partial_rotary_factor = {rope['partial_rotary_factor']}: only 1 is read")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{place} is of type {kind!r}: only 'default' and 'llama3' are known")
    missing = [name for name in LLAMA3 if rope.get(name) is None]
    if missing:
        raise ValueError(f"{place} has no {missing[0]}, which llama3 needs")
    return theta, tuple(float(rope[name]) for name in LLAMA3)


def from_ponderlm2(config):
    """The fields that the official code of PonderLM-2 adds to a Llama's."""
    K, J = config.get("num_latent_thoughts"), config.get("num_jacobi_iterations")
    if K is None or J is None:
        raise ValueError("recurrent_model needs num_latent_thoughts and num_jacobi_iterations")
    if J == 0:  # their way to say that the stack of layers runs K more times, without latents
        return dict(method="looped", ponder_steps=K)
    drawn = config.get("random_jacobi_iterations")
    iters = (2, 3) if drawn else (J, J)
    return dict(method="ponderlm2", ponder_steps=K, router="always", iters=iters)


def to_llama(config, tensors):
    """Fields of PonderConfig and tensors of a model with K = 0 -> config.json and tensors of a
    Llama.

    A Llama has no embedding scale: it goes into the table. A head that shared the table with
    another scale than 1 gets a table of its own.
    """
    scale = config["embed_scale"]
    tied = config["tie_word_embeddings"] and scale == 1
    table = tensors["model.embed_tokens.weight"]
    tensors = tensors | {"model.embed_tokens.weight": table if scale == 1 else table * scale}
    if tied:
        tensors.pop("lm_head.weight", None)
    same = (*SIZES, "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    rope = {"rope_type": "default"}
    if config["rope_scaling"]:
        rope = {"rope_type": "llama3", **dict(zip(LLAMA3, config["rope_scaling"], strict=True))}
        rope[LLAMA3[-1]] = int(rope[LLAMA3[-1]])
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    llama |= {name: config[name] for name in same}
    llama |= dict(
        max_position_embeddings=config["block_size"],
        tie_word_embeddings=tied,
        rope_theta=config["rope_theta"],  # as transformers 4 has it
        rope_scaling=rope if config["rope_scaling"] else None,
        rope_parameters={"rope_theta": config["rope_theta"], **rope},  # transformers 5
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        torch_dtype="float32",
        bos_token_id=None,  # which are the tokenizer's, see weights.main
        eos_token_id=None,
    )
    return llama, tensors
