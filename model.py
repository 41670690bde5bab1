"""PonderLM-3: a LLaMA-style transformer that feeds its last state back up to K times per token.

token t:   slot 0     slot 1      ..   slot K          S = K+1 slots, which share position id t
input      e(x_t)     h_t^(0)     ..   h_t^(K-1)
output     h_t^(0)    h_t^(1)     ..   h_t^(K)         h_hat_t = sum_k s_{t,k} h_t^(k)

code        paper              shape
idx         x_1 .. x_T         (B, T)          token ids
e           e(x_t)             (B, T, D)       scaled token embeddings
h           h_t^(0..K)         (B, T, S, D)    outputs of the S slots, after the final RMSNorm
latents     h_t^(0..K-1)       (B, T, K, D)    those that are fed back, inputs of slots 1 .. K
s, log_w    s_{t,k}, log w     (B, T, S)       see router.py
steps       K-hat_t            (B, T)          pondering steps that are executed
R           R                  scalar          refinement passes of the Jacobi iteration
tau         tau                scalar          where decoding stops; None: soft masks, nothing is skipped

s weighs the outputs, log w the keys; with a tau, outputs and keys beyond K-hat are removed. The Jacobi
iteration runs K passes that build up the slots, R that refine them (with R None until one changes next to
nothing), and one whose outputs count. So it comes near the states that decoding computes one after another.

First comes the backbone (Llama, with the names of Hugging Face's transformers), then the method (PonderLM),
then how a model is kept in a directory. Other methods and backbones (lab/) override `states`, `route`,
`mask_keys`, `feed_back` and `integrate`, `Block`, `Norm`, `writers` and `frequency`.
"""

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from attention import attend_to_cache, augment, auto, soft_mask_attention
from router import TAU, Router, mask_keys, stop_step, upcast

# A dataclass that checks its fields, or raises a ValueError: no "3" for 3, no number out of its range.
settings = pydantic.dataclasses.dataclass(config={"strict": True, "extra": "forbid"})
Size = Annotated[int, Field(ge=1, le=2**20)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@settings
class Config:
    """The shape of a model and how it ponders. Names of the backbone are Hugging Face's."""

    vocab_size: Size = 257  # V
    hidden_size: Size = 128  # D
    intermediate_size: Size = 344  # of SwiGLU
    num_hidden_layers: Annotated[int, Field(ge=1, le=1000)] = 4
    num_attention_heads: Size = 4  # H
    num_key_value_heads: Size | None = None  # G; None: H
    head_dim: Size | None = None  # d; None: D / H
    block_size: Annotated[int, Field(ge=1, le=2**24)] = 64  # T, the window; RoPE counts in float32
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 10_000.0
    tie_word_embeddings: bool = False  # the head is the embedding table
    embed_scale: Positive | None = None  # None: sqrt(2.5 D)

    ponder_steps: Annotated[int, Field(ge=0, le=1000)] = 3  # K: steps that a token may take
    router_offset: tuple[Finite, ...] | None = None  # None: rising linearly from 0 to 6
    refinements: tuple[int, int] = (2, 3)  # training draws R from this range
    # printed: the bottom mass as the paper prints it; token: by the cross-entropy of each token
    penalty: Literal["printed", "token"] = "printed"
    penalty_weight: NotNegative = 0.5  # lambda, which the paper does not give

    def __post_init__(self):
        D, H, K = self.hidden_size, self.num_attention_heads, self.ponder_steps
        if H % self.G:
            raise ValueError(f"num_key_value_heads = {self.G}: {H} heads cannot share so many")
        if self.head_dim is None and D % H:
            raise ValueError(f"hidden_size = {D} is not divisible by {H} heads; give head_dim")
        if self.d % 2:
            raise ValueError(f"head_dim = {self.d} is odd, but RoPE rotates pairs")
        if len(self.offset) != K + 1:
            raise ValueError(f"router_offset = {self.router_offset}: K+1 = {K + 1} numbers are needed")
        low, high = self.refinements
        if not 0 <= low <= high < 2**31:
            raise ValueError(f"refinements = {self.refinements}: give 0 <= low <= high")

    @property
    def G(self):
        """Key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def d(self):
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def scale(self):
        """Embeddings times sqrt(2.5 D) have the RMS of a normed state, 1, at initialisation."""
        return math.sqrt(2.5 * self.hidden_size) if self.embed_scale is None else self.embed_scale

    @property
    def offset(self):
        """Where the router starts (reading note 6): s = softmax(offset)."""
        if self.router_offset is not None:
            return self.router_offset
        return tuple(6 * k / max(self.ponder_steps, 1) for k in range(self.ponder_steps + 1))


# -- LLaMA -----------------------------------------------------------------------------------------


def rotate(x, cos, sin):
    """RoPE: turn each pair (x_i, x_{i+d/2}) by its angle. x (B, heads, N, d)."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        D, self.d, self.H, self.G = config.hidden_size, config.d, config.num_attention_heads, config.G
        self.q_proj = nn.Linear(D, self.H * self.d, bias=False)
        self.k_proj = nn.Linear(D, self.G * self.d, bias=False)
        self.v_proj = nn.Linear(D, self.G * self.d, bias=False)
        self.o_proj = nn.Linear(self.H * self.d, D, bias=False)

    def forward(self, x, angles, log_w, backend, cache):
        B, N, _ = x.shape
        q = self.q_proj(x).view(B, N, self.H, self.d).transpose(1, 2)  # (B, H, N, d)
        k = self.k_proj(x).view(B, N, self.G, self.d).transpose(1, 2)  # (B, G, N, d)
        v = self.v_proj(x).view(B, N, self.G, self.d).transpose(1, 2)
        q, k = rotate(q, *angles), rotate(k, *angles)
        out = cache.attend(q, k, v, log_w) if cache else soft_mask_attention(q, k, v, log_w, backend)
        return self.o_proj(out.transpose(1, 2).reshape(B, N, -1))  # (B, N, D)


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        D, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, inner, bias=False)
        self.up_proj = nn.Linear(D, inner, bias=False)
        self.down_proj = nn.Linear(inner, D, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, angles, log_w, backend, cache):
        x = x + self.self_attn(self.input_layernorm(x), angles, log_w, backend, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    # What another backbone has otherwise (lab/backbones).
    Block, Norm = Block, nn.RMSNorm
    writers = "o_proj.weight", "down_proj.weight"  # whose output is added to the residual stream

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.Block(config) for _ in range(config.num_hidden_layers))
        self.norm = self.Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, positions, log_w=None, backend=auto, cache=None):
        """Vectors (B, N, D) at positions (N,) or (B, N), log w of their keys (B, N) -> (B, N, D).

        `cache`: an object for each layer whose `attend(q, k, v, log_w)` takes the place of attention among
        these N; a LayerCache takes one slot (N = 1) and knows all before it.
        """
        return self.norm(self.stack(x, positions, log_w, backend, cache))

    def stack(self, x, positions, log_w=None, backend=auto, cache=None):
        """The blocks, without the final norm."""
        angles = self.angles(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, angles, log_w, backend, cache and cache[i])
        return x

    def angles(self, positions, dtype):
        """Positions (N,) -> cos and sin of RoPE's angles, (N, d) each; (B, N) -> (B, 1, N, d)."""
        angle = positions.float()[..., None] * self.frequency(positions.device)  # (.., N, d/2)
        angle = torch.cat([angle, angle], dim=-1)  # (.., N, d)
        if positions.dim() == 2:
            angle = angle[:, None]  # the same for all heads
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def frequency(self, device):
        """How far each pair of a head is turned from one position to the next, (d/2,)."""
        d = self.config.d
        return self.config.rope_theta ** -(torch.arange(0, d, 2, device=device) / d)


class LayerCache:
    """Keys and values of the C slots executed so far in one layer, (B, G, C, d') each."""

    def __init__(self):
        self.keys = self.values = None

    def attend(self, q, k, v, log_w):
        """The newest slot against all so far, its own included. A key keeps its log w as a channel."""
        d = q.size(-1)
        q, k, v = augment(q, k, v, log_w)
        self.append(k, v)
        return attend_to_cache(q, self.keys, self.values, d)

    def append(self, k, v):
        if self.keys is not None:
            k, v = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        self.keys, self.values = k, v


# -- PonderLM-3 ------------------------------------------------------------------------------------


class PonderLM(nn.Module):
    """The model (section 3.2), in its parallel form (`forward`) and token by token (`ponder_token`)."""

    method, title = "ponderlm3", "PonderLM-3"
    Config = Config

    def __init__(self, config, backbone=Llama):
        super().__init__()
        self.config = config
        self.backend = auto  # of attention; how it runs is no property of the weights
        self.recompute = False  # keep no activations of a pass, compute them again in the backward pass
        self.model = backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router = Router(config.hidden_size, config.ponder_steps, config.offset)
        self.apply(self.init_weights)
        for name, p in self.model.layers.named_parameters():  # smaller, the deeper the stack
            if name.endswith(backbone.writers):
                p.data /= math.sqrt(2 * config.num_hidden_layers)
        self.tie()

    def forward(self, idx, targets=None, *, R=None, tau=None, alpha=0.0):
        """Score a batch of sequences in parallel -> Output, whose loss is the mean cross-entropy.

        Args:
            idx: (B, T) token ids. targets: (B, T) those that follow; -100 where there is none to predict.
            R: refinement passes; None: to the fixed point, which is what decoding computes, to a tolerance.
            tau: None for soft masks; else keys and states beyond K-hat count for nothing, as in decoding.
            alpha: shifts the step distribution, see router.py.
        """
        h, s, log_w = self.states(idx, R, tau, alpha)
        steps = stop_step(log_w, tau)
        out = Output(self.lm_head, self.integrate(h, s, steps), steps, h, s, log_w)
        if targets is not None:
            out.ce = self.cross_entropy(out.h_hat, targets)
            out.loss = out.ce.sum() / (targets != -100).sum().clamp(min=1)
        return out

    def states(self, idx, R=None, tau=None, alpha=0.0):
        """h (B, T, S, D), s and log_w (B, T, S). This is where one method differs from another."""
        return self.jacobi(idx, R, tau, alpha)

    # -- The Jacobi iteration (section 3.4.1) ------------------------------------------------------

    def jacobi(self, idx, R=None, tau=None, alpha=0.0, tolerance=None):
        """All states of all tokens in parallel: run the transformer again and again, each time with the
        output of slot k of the pass before as the input of slot k+1. Slot 0 always reads e.

        Pass 1 runs slot 0 alone, pass 2 slots 0 and 1, and so on: a ladder of K passes, as PonderLM-2 begins
        (reading note 8, docs/reading-notes.md). Then come R refinements of all S slots, and a last pass whose
        outputs count. Each biases keys by the log w of the pass before. The gradient flows through all.

        The K T latents form one chain, t then k, of which the ladder settles the first K and each refinement
        at least one more: K (T-1) refinements are exact, and no more are run. With R None it ends there, or
        when a pass changes the latents by less than `tolerance` (relative norm; None: see has_settled).

        idx, R, tau and alpha are as in `forward`. -> h (B, T, S, D), s and log_w (B, T, S) of the last pass.
        """
        e, K = self.embed(idx), self.config.ponder_steps
        B, T, D = e.shape
        ladder, exact = K, K * (T - 1)
        refinements = exact if R is None else min(R, exact)
        latents, key_log_w = e.new_empty(B, T, 0, D), None  # nothing to feed back yet
        for n in range(ladder + refinements + 1):
            x = torch.cat([e[:, :, None], latents], dim=2)  # (B, T, slots, D); on the ladder slots < S
            slots = x.size(2)
            # Interleaved: slot k of token t stands at t*slots + k. A token's slots share one position.
            positions = torch.arange(T, device=e.device).repeat_interleave(slots)  # (T*slots,)
            bias = None if key_log_w is None else key_log_w[..., :slots].flatten(1)  # (B, T*slots)
            h = self.transform(x.view(B, T * slots, D), positions, bias).view(B, T, slots, D)
            s, log_w = self.route(h, alpha)  # (B, T, S)
            key_log_w = self.mask_keys(log_w, tau)
            before, latents = latents, self.feed_back(h[:, :, :K], e[:, :, None])
            if R is None and n >= ladder and has_settled(before, latents, tolerance):
                break
        return h, s, log_w

    # -- The parts of a pass -----------------------------------------------------------------------

    def embed(self, idx):
        """(B, T) -> (B, T, D), at first of unit RMS, like the normed states in other slots."""
        if not 0 < idx.size(1) <= self.config.block_size:
            raise ValueError(f"{idx.size(1)} tokens; the window is 1 to {self.config.block_size}")
        return self.model.embed_tokens(idx) * self.config.scale

    def transform(self, x, positions, log_w=None, cache=None):
        """The backbone: (B, N, D) -> (B, N, D), through the final RMSNorm."""
        if self.recompute and torch.is_grad_enabled():
            keep = dict(use_reentrant=False, preserve_rng_state=False)  # nothing here is random
            return checkpoint(self.model, x, positions, log_w, self.backend, cache, **keep)
        return self.model(x, positions, log_w, self.backend, cache)

    def route(self, h, alpha=0.0):
        """h^(0), the first of states (..., n, D), -> s and log_w, (..., S) each."""
        return self.router(h[..., 0, :], alpha)

    # What attention adds to the scores of keys: (..., S) -> (..., S); of a method without a mask None.
    mask_keys = staticmethod(mask_keys)

    def feed_back(self, h, e):
        """What the next slot reads of an output h (..., D): h itself (reading note 8). e: the embedding,
        which a former Llama reads again."""
        return h

    # -- From states to predictions (section 3.2.3) ------------------------------------------------

    def integrate(self, h, s, steps):
        """h_hat = sum over k <= K-hat of s_k h^(k), never renormalised.

        h (..., n, D) and s (..., n) of the first n slots, steps a tensor (...) or () -> (..., D).
        """
        slot = torch.arange(s.size(-1), device=s.device)
        s = s.masked_fill(slot > steps[..., None], 0)
        return (s[..., None] * h).sum(-2).to(h.dtype)

    def cross_entropy(self, states, targets):
        """In nats, of each token: (B, T, D) and (B, T) -> (B, T), 0 where there is no target."""
        logits = upcast(self.lm_head(states)).flatten(0, 1)  # (B*T, V)
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)

    @torch.no_grad()
    def partial_losses(self, h, s, targets):
        """ce_{t,i} of the partial states sum_{j <= i} s_j h^(j), i < K (section 3.4.2), not renormalised, as
        printed. -> (B, T, K), without gradient."""
        stops = torch.arange(self.config.ponder_steps, device=h.device)
        return torch.stack([self.cross_entropy(self.integrate(h, s, i), targets) for i in stops], dim=-1)

    # -- Decoding (section 3.3) --------------------------------------------------------------------

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=TAU, alpha=0.0):
        """Read one token: slot 0, the router, then slots 1 .. K-hat; each attends to the cache.

        What `forward` does for all tokens at once, slot by slot. An executed slot leaves one key and one
        value a layer in the cache; a skipped one costs nothing and leaves nothing.
        -> logits (V,) of the next token, and K-hat, the pondering steps executed.
        """
        device = self.lm_head.weight.device
        positions = torch.tensor([position], device=device)  # of all slots of the token
        e = self.embed(torch.tensor([[token]], device=device))  # (1, 1, D)
        visible = e.new_zeros(1, 1)  # log w of slot 0; not None, since all keys of a cache have width d'
        h = [self.transform(e, positions, visible, cache)]
        s, log_w = self.route(torch.stack(h, dim=2), alpha)  # (1, 1, S)
        steps = stop_step(log_w, tau)  # (1, 1)
        key_log_w = self.mask_keys(log_w)  # no tau: what is skipped leaves no key
        for k in range(1, int(steps) + 1):  # stop as soon as w_k < tau
            bias = visible if key_log_w is None else key_log_w[..., k]
            h.append(self.transform(self.feed_back(h[-1], e), positions, bias, cache))
        h_hat = self.integrate(torch.stack(h, dim=2), s[..., : len(h)], steps)
        return self.lm_head(h_hat)[0, 0], int(steps)

    def new_cache(self):
        """What `ponder_token` keeps of the tokens before: a LayerCache for each layer."""
        return [LayerCache() for _ in self.model.layers]

    # -- Weights -----------------------------------------------------------------------------------

    def init_weights(self, module):
        """Truncated normal, std sqrt(2/(5D)); the router starts at its offset."""
        std = math.sqrt(2 / (5 * self.config.hidden_size))
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
        if isinstance(module, Router):  # after its children
            nn.init.zeros_(module.proj.weight)

    def tie(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def param_groups(self, router_rate=1.0):
        """Parameters for the optimizer; `rate` is what the learning rate of each is multiplied by.

        Matrices decay, vectors and W of the router do not. W starts at zero and is read through a softmax: at
        the rate of the others it hardly moves, so that all tokens take as many steps as the offset says.
        """
        router = [p for name, p in self.named_parameters() if name.startswith("router.")]
        rest = [p for name, p in self.named_parameters() if not name.startswith("router.")]
        return [
            {"params": [p for p in rest if p.dim() >= 2], "rate": 1.0},
            {"params": [p for p in rest if p.dim() < 2], "rate": 1.0, "weight_decay": 0.0},
            {"params": router, "rate": router_rate, "weight_decay": 0.0},
        ]


def is_half(x):
    """Whether numbers like x are computed in half precision, which never comes closer than 1e-2."""
    device = x.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return kind in (torch.float16, torch.bfloat16)


def has_settled(before, after, tolerance=None):
    """Did a pass change the latents, of the whole batch, by less than `tolerance`, relatively? None: 1e-2 in
    half precision, else 1e-4."""
    if tolerance is None:
        tolerance = 1e-2 if is_half(after) else 1e-4
    return upcast(after - before).norm() < tolerance * upcast(after).norm()


@dataclass
class Output:
    """What `forward` returns of a batch."""

    head: nn.Linear
    h_hat: torch.Tensor  # (B, T, D) the integrated states, which the head reads
    steps: torch.Tensor  # (B, T) K-hat at the tau of this call; K without one
    h: torch.Tensor  # (B, T, S, D) states
    s: torch.Tensor  # (B, T, S) step distribution
    log_w: torch.Tensor  # (B, T, S) log of the mask score
    ce: torch.Tensor | None = None  # (B, T) cross-entropy in nats, 0 where there is no target
    loss: torch.Tensor | None = None  # its mean over the targets

    @property
    def logits(self):
        """(B, T, V), made when they are asked for: of a large vocabulary they are gigabytes."""
        return self.head(self.h_hat)


# -- A model in a directory: config.json and model.safetensors, beside a tokenizer.json (data.py) ---

FORMAT = "ponderlm-3"


def save(model, directory):
    """Write config.json and model.safetensors: each file whole, or as it was before."""
    tensors = {name: x.cpu().contiguous() for name, x in model.state_dict().items()}
    tensors = {name.replace("_orig_mod.", ""): x for name, x in tensors.items()}  # of a compiled model
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights, shape = directory / "model.safetensors.tmp", directory / "config.json.tmp"
    save_file(tensors, weights)
    config = {"format": FORMAT, "method": model.method, **asdict(model.config)}
    shape.write_text(json.dumps(config, indent=2) + "\n")
    shutil.copymode(shape, weights)  # safetensors lets only their owner read its files
    for part in (weights, shape):
        os.replace(part, part.with_suffix(""))


def load(directory, kind=PonderLM):
    """The model that `save` wrote, in float32 and in evaluation mode. OSError, SafetensorError, ValueError,
    RuntimeError: files that are missing, damaged, or of another kind of model."""
    content = json.loads(Path(directory, "config.json").read_text(encoding="utf-8"))
    if (content.pop("format", None), content.pop("method", None)) != (FORMAT, kind.method):
        raise ValueError(f"config.json is not of a {kind.title} (python -m lab reads and converts others)")
    with torch.device("meta"):  # shapes alone, which the weights then fill
        model = kind(from_json(kind.Config, content))
    tensors = {name: x.float() for name, x in load_file(Path(directory, "model.safetensors")).items()}
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    model.tie()
    return model.eval()


def from_json(kind, content):
    """Settings from what a JSON file holds of them: every field, of its type. ValueError: it does not."""
    if missing := kind.__dataclass_fields__.keys() - content.keys():
        raise ValueError(f"{', '.join(sorted(missing))}: missing")
    return pydantic.TypeAdapter(kind).validate_json(json.dumps(content))
