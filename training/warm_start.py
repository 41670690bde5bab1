"""Begin from a trained model: `train.py --init-from`, to go on with it or to add pondering to it.

A Llama knows nothing of its own states as input. Reading note 12 has the measurements behind this:

feedback_scale   A state is fed back at the length that the residual stream had before the final
                 norm, so that a pondering step begins as one more turn through the layers and its
                 output as a good state. At the length of the embeddings it would be a bad one.
SHALLOW          At step 0 the router hardly ponders: 0.7 % of s lies beyond step 0, and log w hides
                 the keys of the new slots. The loss is the Llama's.
ponder_warmup    But from there the router would never open, since states that count for nothing get
                 no gradient. So in the first steps it learns nothing, and its offset is led to
                 where a model from scratch starts. The other weights have time to follow.
ponder_from      A model that takes K steps learns to take more in the same way. The new rows of its
                 router are copies of the last, and their offset is led from SHALLOW to the last's.
"""

from dataclasses import fields, replace
from pathlib import Path

import torch

from baselines import build, configure, find, unused_settings
from corpus.preparation import is_prepared, open_tokenizer
from corpus.tokenizers import load_tokenizer
from interop import load, locate, read_config
from model import LlamaConfig
from runtime import UserError

BACKBONE = {f.name for f in fields(LlamaConfig)} - {"block_size"}  # what the weights fix
SHALLOW = -5.0  # the router's offset at the beginning, times k


def can_warm_up(method):
    """Whether a method has a router whose offset can be led."""
    return "router_offset" not in unused_settings(find(method))


def feeds_back(method):
    """Whether a method's states are its own next inputs, at a length that can be chosen."""
    return "feedback_scale" not in unused_settings(find(method))


def start_defaults(defaults, name, method=None, steps=None, ponder_steps=None):
    """A TrainConfig whose `defaults` become those of a training that begins from the model `name`.

    A model that ponders goes on as it is, or with more `ponder_steps`. One that does not becomes a
    `method` (None: ponderlm3) with what `defaults` says of that. A router that is led to more steps
    has a warm-up of 3 in 10 of the `steps`.
    """
    base, shape = read_config(locate(name)), defaults.model
    window = min(base.block_size, shape.block_size)
    defaults = replace(defaults, learning_rate=defaults.learning_rate / 2)
    warmup = round(0.3 * (steps or defaults.steps))
    if base.method != "vanilla" and method in (None, base.method):
        K = base.ponder_steps if ponder_steps is None else ponder_steps
        model = replace(base, block_size=window)
        if base.ponder_steps >= K or not can_warm_up(base.method):
            return replace(defaults, model=model)
        model = replace(model, ponder_steps=K, router_offset=longer(base, K))
        return replace(defaults, model=model, ponder_warmup=warmup, ponder_from=base.ponder_steps)
    backbone = {name: getattr(base, name) for name in BACKBONE}
    model = configure(shape, method or "ponderlm3", **backbone, block_size=window)
    warmup = warmup if can_warm_up(model.method) else 0
    return replace(defaults, model=model, ponder_warmup=warmup)


def longer(config, K):
    """The router's offset of a config for K steps: the further ones have the last one's."""
    return (*config.offset, *config.offset[-1:] * (K - config.ponder_steps))


def tokenizer_beside(config):
    """Where the tokenizer of a training's model is, as `prepare` takes it: that of --init-from, or
    when it is resumed its own, since the first model may be gone.

    Raises:
        UserError: as check_ids.
    """
    place = locate(config.init_from) if not config.resume else Path(config.out, config.name)
    check_ids(place, config.data)
    return str(place)


def check_ids(place, data):
    """Refuse to feed a model the ids of others.

    Raises:
        UserError: it has no tokenizer, or `data` is a prepared corpus with the ids of another one.
    """
    if not (place / "tokenizer.json").is_file():
        raise UserError(f"{place} has no tokenizer.json; name a tokenizer, for instance bytes")
    file, own = Path(data) / "tokenizer.json", open_tokenizer(str(place))
    if is_prepared(data) and not file.is_file():
        print(f"note: {data} has no tokenizer.json; its ids are taken for those of {place}")
    elif is_prepared(data) and load_tokenizer(file).digest != own.digest:
        raise UserError(f"{data} has ids of another tokenizer than that of {place}")


def start_from(directory, config):
    """A new model of config.method with the weights of `directory`; only what it adds is new.

    Raises:
        UserError: as read_config; or a model of another method or shape.
    """
    base = load(locate(directory))
    if base.config.method not in ("vanilla", config.method):
        raise UserError(
            f"{directory} is a {base.config.method} and can only go on as that: --method "
            f"{base.config.method}; a model without pondering can become a {config.method}"
        )
    for name in BACKBONE:
        what = "scale" if name == "embed_scale" else name
        ours, theirs = getattr(config, what), getattr(base.config, what)
        if ours != theirs:
            raise UserError(f"{name} = {ours}: {directory} has {theirs}; leave it as it is")
    if config.ponder_steps < (K := base.config.ponder_steps):
        raise UserError(
            f"ponder_steps = {config.ponder_steps}: {directory} takes {K}, which can become more, "
            "not fewer; leave it as it is"
        )
    if config.block_size > base.config.block_size:
        raise UserError(
            f"block_size = {config.block_size}: {directory} was trained on windows of "
            f"{base.config.block_size} tokens"
        )
    return carried_over(base, config)


def carried_over(base, config):
    """A new model by `config` with the weights of `base`. PonderLM-3's router gets further rows,
    copies of its last; a gate that is the same for all steps stays as it is.

    Raises:
        UserError: routers that are made for as many steps as `base` takes.
    """
    model, K = build(config), base.config.ponder_steps
    tensors = base.state_dict()
    if base.config.method == "vanilla":  # what makes it ponder is new
        backbone = ("model.", "lm_head.")
        tensors |= {k: x for k, x in model.state_dict().items() if not k.startswith(backbone)}
    if can_warm_up(base.config.method):
        rows = tensors["router.proj.weight"]
        copies = rows[-1:].expand(config.ponder_steps - K, -1)
        tensors["router.proj.weight"] = torch.cat([rows, copies])
    try:
        model.load_state_dict(tensors)
    except RuntimeError:
        raise UserError(
            f"{config.method} has weights for each step, so that one of {K} steps cannot go on "
            f"with {config.ponder_steps}; leave --ponder-steps at {K}"
        ) from None
    return model


@torch.no_grad()
def residual_scale(model, idx):
    """How much longer the residual stream is, before the final norm, than the state behind it.

    The median over the tokens of idx (B, T): a Llama's first tokens are often far longer than all
    others.
    """
    x = model.model.stack(model.embed(idx), torch.arange(idx.size(1)), None)  # (B, T, D)
    h = model.model.norm(x)
    return float((x.norm(dim=-1) / h.norm(dim=-1)).median())


def with_feedback(config, windows):
    """The TrainConfig with feedback_scale as the `windows` of its corpus say, where a model that
    does not ponder is to learn it; else the config as it is."""
    model = config.model
    if model.feedback_scale or not feeds_back(model.method):
        return config
    base = load(locate(config.init_from))
    if base.config.method != "vanilla":
        return config
    idx = windows.rows(0, min(32, windows.count))  # (.., T+1)
    T = min(config.model.block_size, base.config.block_size)
    scale = residual_scale(base, idx[:, :T])
    return replace(config, model=replace(model, feedback_scale=float(f"{scale:.3g}")))


def offset_at(step, config):
    """The router's offset at a step of a training, in the first of which it hardly ponders, or
    hardly more than the model that it began from.

    Step 0 has SHALLOW, the end of the warm-up config.model's own; between them the two
    distributions over the steps are mixed.
    """
    if step >= config.ponder_warmup:
        return config.model.router_offset
    target, done = torch.tensor(config.model.offset).double(), step / config.ponder_warmup
    beyond = (torch.arange(len(target)) - config.ponder_from).clamp(min=0)  # 0 .. 0, 1, 2, ..
    shallow = torch.where(beyond > 0, target[config.ponder_from] + SHALLOW * beyond, target)
    mixed = (1 - done) * shallow.softmax(0) + done * target.softmax(0)
    return tuple(mixed.log().tolist())
