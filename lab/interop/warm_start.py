"""Training that starts from a trained model, `python -m lab train --init-from`: it continues the model's
training, or adds pondering to it.

A Llama has never read its own states. So each extra step reads the token's embedding again, plus a part of
the
state before that is set by a learned vector g: e(x_t) + g h^(k-1), with g = 0 at the start. Then h^(1),
h^(2), .. start out equal to h^(0), on the grid exactly, and the loss at training step 0 is that of the Llama,
wherever the router starts. Reading note 12 (docs/reading-notes.md) says what else was tried.

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

# The settings that the weights determine.
BACKBONE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
BACKBONE += ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
BACKBONE += ("embed_scale", "backbone", "backbone_options")
FEEDBACK_RATE = 3e-3  # peak learning rate of g, which has to grow from 0 in a trained Llama


def follows(method, setting):
    """Whether a method follows a setting."""
    return setting not in unused_settings(find(method))


def has_router_rows(method):
    """Whether a method learns PonderLM-3's router, which has a row for each number of steps. Such methods are
    told by `router_offset`, which has a number for each row: they follow this setting, and no others do."""
    return follows(method, "router_offset")


def start_defaults(config, shape, name, method=None, ponder_steps=None):
    """The defaults of a training that starts from a model.

    A model that ponders keeps its method and its steps. A router that has a row for each number of steps gets
    further rows if `ponder_steps` is larger. A model that does not ponder becomes a model of `method`.

    Args:
        config: the LabConfig with the defaults of a training from scratch.
        shape: the default settings of a model that is trained from scratch.
        name: the directory of the model to start from, or its name on the Hub.
        method: the flag --method; None: not given, so that a model that does not ponder becomes a ponderlm3.
        ponder_steps: the flag --ponder-steps; None: not given.

    Returns:
        The LabConfig and the settings of the model.
    """
    base = read_config(locate(name))
    window = min(base.block_size, shape.block_size)
    # Trained weights call for smaller steps than random ones. The router rates and prices of the presets are
    # made for training from scratch.
    rate = config.learning_rate / 2
    config = replace(config, init_from=name, learning_rate=rate, router_rate=1.0, step_price=0.0)
    if base.ponder_steps > 0 and method in (None, base.method):
        K = base.ponder_steps if ponder_steps is None else ponder_steps
        model = replace(base, block_size=window)
        # Other methods take the flag --ponder-steps as it is, unless `carried_over` refuses it.
        if base.ponder_steps < K and has_router_rows(base.method):
            model = replace(model, ponder_steps=K, router_offset=longer(base, K))
        return config, model
    method = method or "ponderlm3"
    backbone = {name: getattr(base, name) for name in BACKBONE}
    has_steps = ponder_steps is None or ponder_steps > 0
    reread = base.ponder_steps == 0 and has_steps and follows(method, "reread")
    return config, configure(shape, method, **backbone, block_size=window, reread=reread)


def longer(config, K):
    """The router's offset of a config, extended to K steps: further steps get the offset of the last one."""
    last = config.offset[-1]
    further_steps = K - config.ponder_steps
    return config.offset + (last,) * further_steps


def check_same_tokenizer(place, data):
    """Check that a text is or will be encoded with the tokenizer of the model in the directory `place`.

    Raises:
        UserError: the model has no tokenizer, or `data` is a corpus that another tokenizer has encoded.
    """
    own_file = place / "tokenizer.json"
    if not own_file.is_file():
        raise UserError(
            f"{place} has no tokenizer.json: copy the model's tokenizer.json into it, or choose another "
            "tokenizer, for instance --tokenizer bytes"
        )
    if not is_prepared(data):
        return
    file = Path(data, "tokenizer.json")
    if not file.is_file():
        print(f"note: {data} has no tokenizer.json: its ids are assumed to be those of {place}")
    elif load_tokenizer(file).digest != load_tokenizer(own_file).digest:
        raise UserError(
            f"--data {data} was not prepared with the tokenizer of {place}: prepare its text again with "
            f"python -m lab corpus prepare TEXT --to FOLDER --tokenizer {place}"
        )


def start_from(directory, config):
    """A model with the settings `config` and the weights of `directory`. Only the parts that `config` adds
    are new.

    Raises:
        UserError: see check_start and carried_over.
    """
    check_start(directory, config)
    return carried_over(load(locate(directory)), config)


def check_start(directory, config):
    """Check that the training of the model in `directory` can continue with the settings `config`.

    Raises:
        UserError: see weights.read_config; or the model has another method or shape.
    """
    base = read_config(locate(directory))
    K = base.ponder_steps
    T = base.block_size
    if K > 0 and base.method != config.method:
        raise UserError(
            f"{directory} uses the method {base.method}, which cannot be changed: use --method {base.method}"
        )
    for name in BACKBONE:
        attribute = "scale" if name == "embed_scale" else name
        wanted = getattr(config, attribute)
        has = getattr(base, attribute)
        if wanted != has:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{flag} {wanted} does not fit the weights of {directory}, which are for {has}: omit {flag}"
            )
    if config.ponder_steps < K:
        raise UserError(
            f"--ponder-steps {config.ponder_steps} is too small: {directory} takes {K} steps, and steps can "
            f"only be added, so use {K} or more"
        )
    if config.block_size > T:
        raise UserError(
            f"--block-size {config.block_size} is too large: {directory} was trained on windows of {T} "
            f"tokens, so use {T} or less"
        )


def carried_over(base, config):
    """A new model with the settings `config` and the weights of the model `base`.

    If `config` takes more steps, PonderLM-3's router gets further rows, copies of its last one. Ouro's gate
    is the same for all steps, and stays as it is.

    Raises:
        UserError: the method has weights for each step, and `config` takes more steps than `base`.
    """
    model = build(config)
    K = base.config.ponder_steps
    tensors = base.state_dict()
    if K == 0:  # the parts with which it will ponder are new
        tensors = {name: x for name, x in tensors.items() if name.startswith(("model.", "lm_head."))}
        for name, tensor in model.state_dict().items():
            if not name.startswith(("model.", "lm_head.")):
                tensors[name] = tensor
    elif has_router_rows(base.config.method):
        rows = tensors["router.proj.weight"]
        copies = rows[-1:].expand(config.ponder_steps - K, -1)
        tensors["router.proj.weight"] = torch.cat([rows, copies])
    # Buffers count the steps of a training, and a new training begins.
    tensors |= {name: x for name, x in model.named_buffers() if name in tensors}
    try:
        model.load_state_dict(tensors)
    except RuntimeError:
        raise UserError(
            f"--ponder-steps {config.ponder_steps} does not fit: {config.method} has weights for each step, "
            f"and this model has them for {K} steps, so use --ponder-steps {K}"
        ) from None
    return model
