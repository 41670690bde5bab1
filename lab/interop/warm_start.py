"""Begin from a trained model: `python -m lab train --init-from`, to go on with it or to add pondering to it.

A Llama knows nothing of its own states as input. So each step of it reads its token again, and of the
state before what a learned vector g lets through, from nothing on: e(x_t) + g h^(k-1). Then h^(1), h^(2),
.. begin as what h^(0) is, on the grid exactly: the loss of step 0 is the Llama's, wherever the router
starts. Reading note 12 has what else was tried.

A model that takes K steps learns to take more: the new rows of its router are copies of the last.
"""

from dataclasses import replace
from pathlib import Path

import torch

from common import UserError
from data import is_prepared
from lab.corpora.tokenizers import load_tokenizer
from lab.interop.weights import load, locate, read_config
from lab.methods import build, configure, find, unused_settings

# What the weights fix of a model's settings.
BACKBONE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
BACKBONE += ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
BACKBONE += ("embed_scale", "backbone", "backbone_options")
FEEDBACK_RATE = 3e-3  # peak learning rate of g, which has to grow from 0 in a trained Llama


def follows(method, setting):
    """Whether a setting means something to a method: `router_offset` to one with PonderLM-3's router, a
    row for each step; `reread` to one whose states are its own next inputs."""
    return setting not in unused_settings(find(method))


def start_defaults(config, shape, name, method=None, ponder_steps=None):
    """Defaults of a training (a TrainConfig and its model's Config) -> those of one from the model `name`.

    A model that ponders goes on as it is, or with more `ponder_steps`. One that does not becomes a
    `method` (None: ponderlm3) with what `shape` says of that.
    """
    base = read_config(locate(name))
    window = min(base.block_size, shape.block_size)
    config = replace(config, init_from=name, learning_rate=config.learning_rate / 2)
    config = replace(config, router_rate=1.0, step_price=0.0)
    if base.method != "vanilla" and method in (None, base.method):
        K = base.ponder_steps if ponder_steps is None else ponder_steps
        model = replace(base, block_size=window)
        if base.ponder_steps < K and follows(base.method, "router_offset"):
            model = replace(model, ponder_steps=K, router_offset=longer(base, K))
        return config, model
    method = method or "ponderlm3"
    backbone = {name: getattr(base, name) for name in BACKBONE}
    reread = base.method == "vanilla" and follows(method, "reread")
    return config, configure(shape, method, **backbone, block_size=window, reread=reread)


def longer(config, K):
    """The router's offset of a config for K steps: the further ones have the last one's."""
    return (*config.offset, *config.offset[-1:] * (K - config.ponder_steps))


def check_ids(place, data):
    """Refuse to feed the model in the directory `place` the ids of others.

    Raises:
        UserError: it has no tokenizer, or `data` is a prepared corpus with the ids of another one.
    """
    if not (place / "tokenizer.json").is_file():
        raise UserError(f"{place} has no tokenizer.json; name a tokenizer, for instance --tokenizer bytes")
    if not is_prepared(data):
        return
    file, own = Path(data, "tokenizer.json"), load_tokenizer(place / "tokenizer.json")
    if not file.is_file():
        print(f"note: {data} has no tokenizer.json; its ids are taken for those of {place}")
    elif load_tokenizer(file).digest != own.digest:
        raise UserError(f"{data} has ids of another tokenizer than that of {place}")


def start_from(directory, config):
    """A new model of config.method with the weights of `directory`; only what it adds is new.

    Raises:
        UserError: as check_start.
    """
    check_start(directory, config)
    return carried_over(load(locate(directory)), config)


def check_start(directory, config):
    """Refuse a model that cannot go on as `config` says.

    Raises:
        UserError: as read_config; or a model of another method or shape.
    """
    had = read_config(locate(directory))
    K, T = had.ponder_steps, had.block_size
    if had.method not in ("vanilla", config.method):
        raise UserError(f"{directory} is a {had.method} and can only go on as that: --method {had.method}")
    for name in BACKBONE:
        what = "scale" if name == "embed_scale" else name
        ours, theirs = getattr(config, what), getattr(had, what)
        if ours != theirs:
            raise UserError(f"{name} = {ours}: {directory} has {theirs}; leave it as it is")
    if config.ponder_steps < K:
        raise UserError(f"ponder_steps = {config.ponder_steps}: {directory} takes {K}, which can only grow")
    if config.block_size > T:
        raise UserError(f"block_size = {config.block_size}: {directory} was trained on windows of {T} tokens")


def carried_over(base, config):
    """A new model by `config` with the weights of `base`. PonderLM-3's router gets further rows, copies of
    its last; a gate that is the same for all steps stays as it is.

    Raises:
        UserError: routers that are made for as many steps as `base` takes.
    """
    model, K = build(config), base.config.ponder_steps
    tensors = base.state_dict()
    if base.config.method == "vanilla":  # what makes it ponder is new
        backbone = ("model.", "lm_head.")
        tensors |= {k: x for k, x in model.state_dict().items() if not k.startswith(backbone)}
    if follows(base.config.method, "router_offset"):
        rows = tensors["router.proj.weight"]
        copies = rows[-1:].expand(config.ponder_steps - K, -1)
        tensors["router.proj.weight"] = torch.cat([rows, copies])
    # Buffers say how far a training has come, and this one begins.
    tensors |= {name: x for name, x in model.named_buffers() if name in tensors}
    try:
        model.load_state_dict(tensors)
    except RuntimeError:
        raise UserError(
            f"{config.method} has weights for each step, so that one of {K} steps cannot go on with "
            f"{config.ponder_steps}; leave --ponder-steps at {K}"
        ) from None
    return model
