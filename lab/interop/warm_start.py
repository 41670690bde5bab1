"""A training that starts from a trained model, `python -m lab train --init-from`: to continue its training,
or to add pondering to it.

A Llama has never read its own states. So each extra step reads the token's embedding again, plus as much of
the state before as a learned vector g lets through: e(x_t) + g h^(k-1), with g = 0 at the start. Then h^(1),
h^(2), .. start out equal to h^(0), on the grid exactly, and the loss at training step 0 is that of the Llama,
wherever the router starts. Reading note 12 says what else was tried.

A model that takes K steps can be trained to take more: the new rows of its router are copies of the last row.
"""

from dataclasses import replace
from pathlib import Path

import torch

from common import UserError
from data import is_prepared
from lab.corpora.tokenizers import load_tokenizer
from lab.interop.weights import load, locate, read_config
from lab.methods import build, configure, find, unused_settings

# The settings that are fixed by the weights.
BACKBONE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
BACKBONE += ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
BACKBONE += ("embed_scale", "backbone", "backbone_options")
FEEDBACK_RATE = 3e-3  # peak learning rate of g, which has to grow from 0 in a trained Llama


def follows(method, setting):
    """Whether a method follows a setting: `router_offset` if it has PonderLM-3's router, with a row for each
    step; `reread` if its states are its next inputs."""
    return setting not in unused_settings(find(method))


def start_defaults(config, shape, name, method=None, ponder_steps=None):
    """The defaults of a training that starts from a model.

    A model that ponders keeps its method, and its steps unless there are more `ponder_steps`. A model that
    does not ponder becomes a model of `method`.

    Args:
        config: the LabConfig with the defaults of a training from scratch.
        shape: the settings of its model, from which those of the method are taken.
        name: the directory of the model to start from, or its name on the Hub.
        method: None: ponderlm3.
        ponder_steps: None: as the model has.

    Returns:
        The LabConfig and the settings of the model.
    """
    base = read_config(locate(name))
    window = min(base.block_size, shape.block_size)
    rate = config.learning_rate / 2
    config = replace(config, init_from=name, learning_rate=rate, router_rate=1.0, step_price=0.0)
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
    """The router's offset of a config for K steps; further steps get the offset of the last one."""
    return (*config.offset, *config.offset[-1:] * (K - config.ponder_steps))


def check_ids(place, data):
    """Check that a text comes in the token ids of the model in the directory `place`.

    Raises:
        UserError: the model has no tokenizer, or `data` is a prepared corpus in the ids of another tokenizer.
    """
    own_file = place / "tokenizer.json"
    if not own_file.is_file():
        raise UserError(
            f"{place} has no tokenizer.json: add that of the model, or name another tokenizer, for instance "
            "--tokenizer bytes"
        )
    if not is_prepared(data):
        return
    file = Path(data, "tokenizer.json")
    if not file.is_file():
        print(f"note: {data} has no tokenizer.json: its ids are assumed to be those of {place}")
    elif load_tokenizer(file).digest != load_tokenizer(own_file).digest:
        raise UserError(
            f"--data {data} was not prepared with the tokenizer of {place}: prepare its text again, with "
            f"python -m lab corpus prepare --tokenizer {place}"
        )


def start_from(directory, config):
    """A model by `config` with the weights of `directory`; only the parts that it adds are new.

    Raises:
        UserError: as check_start and carried_over.
    """
    check_start(directory, config)
    return carried_over(load(locate(directory)), config)


def check_start(directory, config):
    """Check that the training of a model can continue as `config` says.

    Raises:
        UserError: as weights.read_config; or the model has another method or shape.
    """
    base = read_config(locate(directory))
    K = base.ponder_steps
    T = base.block_size
    if base.method not in ("vanilla", config.method):
        raise UserError(
            f"{directory} has the method {base.method}, which cannot be changed: use --method {base.method}"
        )
    for name in BACKBONE:
        attribute = "scale" if name == "embed_scale" else name
        wanted = getattr(config, attribute)
        has = getattr(base, attribute)
        if wanted != has:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{name} = {wanted}, but the weights of {directory} are for {has}: omit {flag}")
    if config.ponder_steps < K:
        raise UserError(
            f"ponder_steps = {config.ponder_steps}, but {directory} takes {K} steps, and steps can only be "
            f"added: use --ponder-steps {K} or more"
        )
    if config.block_size > T:
        raise UserError(
            f"block_size = {config.block_size}, but {directory} was trained on windows of {T} tokens: use "
            f"--block-size {T} or less"
        )


def carried_over(base, config):
    """A new model by `config` with the weights of `base`.

    PonderLM-3's router gets further rows, copies of its last one; a gate that is the same for all steps stays
    as it is.

    Raises:
        UserError: the method has weights for each step, and `config` takes more steps than `base`.
    """
    model = build(config)
    K = base.config.ponder_steps
    tensors = base.state_dict()
    if base.config.method == "vanilla":  # what makes it ponder is new
        for name, tensor in model.state_dict().items():
            if not name.startswith(("model.", "lm_head.")):
                tensors[name] = tensor
    if follows(base.config.method, "router_offset"):
        rows = tensors["router.proj.weight"]
        copies = rows[-1:].expand(config.ponder_steps - K, -1)
        tensors["router.proj.weight"] = torch.cat([rows, copies])
    # Buffers count the steps of a training, and a new training begins.
    tensors |= {name: x for name, x in model.named_buffers() if name in tensors}
    try:
        model.load_state_dict(tensors)
    except RuntimeError:
        raise UserError(
            f"ponder_steps = {config.ponder_steps}, but {config.method} has weights for each step, and this "
            f"model has them for {K} steps: leave --ponder-steps at {K}"
        ) from None
    return model
