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

s weighs the outputs, log w the keys, tau hides both beyond K-hat, and the Jacobi iteration repeats a pass
until it has the states that decoding computes one after another.

The method comes first (PonderLM), then its backbone (Llama, with the names of Hugging Face's
transformers), then how a model is kept in a directory.
"""

import json
import math
import os
import shutil
import sys
import types
import typing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from attention import attend_to_cache, augment, auto, soft_mask_attention
from router import Router, hide_stopped, stop_step, upcast


@dataclass
class Config:
    """The shape of a model and how it ponders. Names of the backbone are Hugging Face's."""

    vocab_size: int = 257  # V
    hidden_size: int = 128  # D
    intermediate_size: int = 344  # of SwiGLU
    num_hidden_layers: int = 4
    num_attention_heads: int = 4  # H
    num_key_value_heads: int | None = None  # G; None: H
    head_dim: int | None = None  # d; None: D / H
    block_size: int = 64  # the window, in tokens
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False  # the head is the embedding table
    embed_scale: float | None = None  # None: sqrt(2.5 D)

    ponder_steps: int = 3  # K: how many steps a token may take beyond the first
    router_offset: tuple[float, ...] | None = None  # None: rising linearly from 0 to 6
    refinements: tuple[int, int] = (2, 3)  # training draws R from this range
    # printed: the bottom mass as the paper prints it; token: by the cross-entropy of each token
    penalty: Literal["printed", "token"] = "printed"
    penalty_weight: float = 0.5  # lambda, which the paper does not give

    def __post_init__(self):
        check_types(self)
        D, H, K = self.hidden_size, self.num_attention_heads, self.ponder_steps
        # Positions beyond 2^24 are not exact in float32.
        most = {"num_hidden_layers": 1000, "ponder_steps": 1000, "block_size": 2**24, "rope_theta": 1e12}
        for name, value in vars(self).items():
            least = 0 if name in ("ponder_steps", "penalty_weight") else 1 if type(value) is int else 1e-30
            high = most.get(name, 2**20)
            if type(value) in (int, float) and not least <= value <= high:
                raise ValueError(f"{name} = {value}: it must lie in {least} .. {high}")
        if H % self.G:
            raise ValueError(f"num_key_value_heads = {self.G}: {H} heads cannot share so many")
        if self.head_dim is None and D % H:
            raise ValueError(f"hidden_size = {D} is not divisible by {H} heads; give head_dim")
        if self.d % 2:
            raise ValueError(f"head_dim = {self.d} is odd, but RoPE rotates pairs")
        if len(self.offset) != K + 1:
            raise ValueError(f"router_offset {self.router_offset}: K+1 = {K + 1} numbers are needed")
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


class PonderLM(nn.Module):
    """The model. What another method does otherwise, it overrides."""

    method, title = "ponderlm3", "PonderLM-3"
    Config = Config

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.backend = auto  # of attention; how it runs is no property of the weights
        self.recompute = False  # keep no activations of a pass, compute them again in the backward pass
        self.model = self.make_backbone()
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router = self.make_router()
        self.apply(self.init_weights)
        self.tie()

    def make_backbone(self):
        return Llama(self.config)

    def make_router(self):
        return Router(self.config.hidden_size, self.config.ponder_steps, self.config.offset)

    def forward(self, idx, targets=None, *, R=None, tau=None, alpha=0.0):
        """Score a batch of sequences in parallel.

        Args:
            idx: (B, T) token ids.
            targets: (B, T) the tokens that follow; -100 where there is none to predict.
            R: refinement passes; None: as many as the fixed point takes, which is what decoding computes.
            tau: None for soft masks; else hard stopping as in decoding: keys of slots beyond K-hat are
                hidden, and integration stops at K-hat.
            alpha: shifts the step distribution, see router.py.

        Returns:
            Output. Its loss is the mean cross-entropy; train.py adds the penalty.
        """
        h, s, log_w = self.states(idx, R, tau, alpha)
        steps = self.executed(log_w, tau)
        out = Output(self.lm_head, self.integrate(h, s, steps), steps, h, s, log_w)
        if targets is not None:
            out.ce = self.cross_entropy(out.h_hat, targets)
            out.loss = out.ce.sum() / (targets != -100).sum().clamp(min=1)
        return out

    def states(self, idx, R=None, tau=None, alpha=0.0):
        """h (B, T, S, D), s and log_w (B, T, S). This is where one method differs from another."""
        return self.jacobi(idx, R, tau, alpha)

    # -- The Jacobi iteration (section 3.4.1) ------------------------------------------------------

    def jacobi(self, idx, R=None, tau=None, alpha=0.0, tolerance=1e-4):
        """All states of all tokens in parallel: S^(n+1) = Transformer(S^(n)), again and again.

        Pass 1 runs slot 0 alone, pass 2 slots 0 and 1, and so on: a ladder of K passes, as PonderLM-2 begins
        (reading note 8, docs/reading-notes.md). Then come R refinements of all S slots, and a last pass whose
        outputs count. Each pass replaces all latents at once, and the router reads the new h^(0). K (T-1)
        refinements are exact: each settles one more latent of the chain; what goes beyond is not run. The
        gradient flows through all passes, of which the paper says nothing.

        Args:
            idx: (B, T) token ids.
            R: None: until a pass changes the latents by less than `tolerance` (relative norm).
            tau: None for the soft mask; else the keys of slots k > K-hat are hidden from everyone.

        Returns:
            h (B, T, S, D), s (B, T, S), log_w (B, T, S) of the last pass.
        """
        e, K = self.embed(idx), self.config.ponder_steps
        B, T, D = e.shape
        exact = K * (T - 1)
        refinements = exact if R is None else min(R, exact)
        latents, log_w_of_keys = e.new_empty(B, T, 0, D), None  # nothing to feed back yet
        for _ in range(K + refinements + 1):
            h = self.jacobi_pass(e, latents, log_w_of_keys)  # (B, T, slots, D); on the ladder slots < S
            s, log_w = self.route(h, alpha)
            # Pass n of the ladder has n slots, of which at most K are fed back: 0, 1, .. K latents, then K.
            before, latents = latents, self.feed_back(h[:, :, :K], e[:, :, None])
            log_w_of_keys = self.mask_keys(log_w, tau)
            if R is None and has_settled(before, latents, tolerance):
                break
        return h, s, log_w

    def jacobi_pass(self, e, latents, log_w=None):
        """One pass over all slots that have an input: h of [e(x_1), h_1^(0), .., e(x_2), h_2^(0), ..].

        Args:
            e: (B, T, D). latents: (B, T, n, D), inputs of the slots 1 .. n, for any n <= K.
            log_w: (B, T, S) on the keys, of which the first n+1 count; None: all fully visible.

        Returns:
            h (B, T, n+1, D).
        """
        (B, T, D), slots = e.shape, latents.size(2) + 1
        x = torch.cat([e[:, :, None], latents], dim=2)  # (B, T, slots, D)
        x = x.view(B, T * slots, D)  # interleaved: slot k of token t stands at t*slots + k
        positions = torch.arange(T, device=e.device).repeat_interleave(slots)  # a token's slots share one
        if log_w is not None:
            log_w = log_w[..., :slots].flatten(1)  # (B, T*slots)
        return self.transform(x, positions, log_w).view(B, T, slots, D)

    # -- The parts of a pass -----------------------------------------------------------------------

    def embed(self, idx):
        """(B, T) -> (B, T, D), at unit RMS like the normed states that fill the other slots."""
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
        """Step distributions by h^(0), the first of states (..., n+1, D) -> s, log_w, (..., S) each."""
        return self.router(h[..., 0, :], alpha)

    def feed_back(self, h, e):
        """Outputs of slots, (..., D), as inputs of the next ones: unchanged. e are the embeddings."""
        return h

    def mask_keys(self, log_w, tau=None):
        """Mask scores (..., S) -> what attention adds to the scores of these keys, (..., S)."""
        return hide_stopped(log_w, tau)

    # -- From states to predictions (section 3.2.3) ------------------------------------------------

    def executed(self, log_w, tau):
        """Pondering steps that decoding at tau executes. (..., S) -> (...)."""
        return stop_step(log_w, tau)

    def step_weights(self, s, steps):
        """What each state counts for in h_hat: s_k up to K-hat, never renormalised.

        s (..., S), steps (...) -> (..., S).
        """
        slot = torch.arange(s.size(-1), device=s.device)
        return s.masked_fill(slot > steps[..., None], 0)

    def integrate(self, h, s, steps):
        """h_hat = sum over k <= K-hat of s_k h^(k). (..., S, D), (..., S), (...) -> (..., D)."""
        return (self.step_weights(s, steps)[..., None] * h).sum(-2).to(h.dtype)

    def cross_entropy(self, states, targets):
        """In nats, of each token: (B, T, D) and (B, T) -> (B, T), 0 where there is no target."""
        logits = upcast(self.lm_head(states)).flatten(0, 1)  # (B*T, V)
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)

    @torch.no_grad()
    def partial_losses(self, h, s, targets):
        """ce_{t,i} of the partial states sum_{j <= i} s_j h^(j), i < K (section 3.4.2).

        Not renormalised, as printed. -> (B, T, K), without gradient.
        """
        stops = [torch.full_like(targets, i) for i in range(self.config.ponder_steps)]
        losses = [self.cross_entropy(self.integrate(h, s, stop), targets) for stop in stops]
        return torch.stack(losses, dim=-1)

    # -- Decoding (section 3.3) --------------------------------------------------------------------

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=1e-4, alpha=0.0):
        """Read one token: slot 0, the router, then slots 1 .. K-hat; each attends to the cache.

        What `forward` does for all tokens at once, slot by slot. An executed slot leaves one key and one
        value a layer in the cache; a skipped one costs nothing and leaves nothing.

        Returns:
            logits (V,) of the next token, and K-hat, the pondering steps executed.
        """
        device = self.lm_head.weight.device
        e = self.embed(torch.tensor([[token]], device=device))  # (1, 1, D)
        positions = torch.tensor([position], device=device)  # of all slots of the token
        h = self.run_slot(0, e, positions, None, cache)  # w_0 = 1
        s, log_w = self.route(h[:, :, None], alpha)  # (1, 1, S)
        K_hat, log_w = self.executed(log_w, tau), self.mask_keys(log_w)  # what is skipped leaves no key
        s = self.step_weights(s, K_hat)
        h_hat = s[..., :1] * h
        for k in range(1, int(K_hat) + 1):  # stop as soon as w_k < tau
            h = self.run_slot(k, self.feed_back(h, e), positions, log_w, cache)
            h_hat = h_hat + s[..., k : k + 1] * h
        return self.lm_head(h_hat.to(h.dtype))[0, 0], int(K_hat)

    def run_slot(self, k, x, positions, log_w, cache):
        """Slot k of one token against all slots so far: (1, 1, D), log_w (1, 1, S) -> (1, 1, D)."""
        log_w = x.new_zeros(1, 1) if log_w is None else log_w[..., k]
        return self.model(x, positions, log_w, self.backend, cache)

    def new_cache(self):
        """What `ponder_token` keeps of the tokens before: a LayerCache for each layer."""
        return [LayerCache() for _ in self.model.layers]

    # -- Weights -----------------------------------------------------------------------------------

    def init_weights(self, module):
        """Truncated normal, std sqrt(2/(5D)); what writes to the residual stream less, by depth."""
        std = math.sqrt(2 / (5 * self.config.hidden_size))
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
        if isinstance(module, self.model.Block):  # after its children
            for linear in module.writers():
                linear.weight.data /= math.sqrt(2 * self.config.num_hidden_layers)
        if isinstance(module, Router):
            nn.init.zeros_(module.proj.weight)

    def tie(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def param_groups(self, router_rate=1.0):
        """Parameters for the optimizer; `rate` is what the learning rate of each is multiplied by.

        Matrices decay, vectors and W of the router do not. W starts at zero and is read through a softmax: at
        the rate of the others it hardly moves, so that all tokens take as many steps as the offset says.
        """
        learned = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        router = [p for name, p in learned if name.startswith("router.")]
        rest = [p for name, p in learned if not name.startswith("router.")]
        return [
            {"params": [p for p in rest if p.dim() >= 2], "rate": 1.0},
            {"params": [p for p in rest if p.dim() < 2], "rate": 1.0, "weight_decay": 0.0},
            {"params": router, "rate": router_rate, "weight_decay": 0.0},
        ]


def has_settled(before, after, tolerance):
    """Whether a pass has changed the latents by less than `tolerance`. Not on the ladder, which adds some."""
    if before.shape != after.shape:
        return False
    return (after - before).float().norm() < tolerance * after.float().norm()


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


# -- LLaMA -----------------------------------------------------------------------------------------


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def apply_rotary(x, cos, sin):
    """RoPE: turn each pair (x_i, x_{i+d/2}) by its angle. x (B, heads, N, d)."""
    return (x * cos + rotate_half(x) * sin).to(x.dtype)


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
        q, k = apply_rotary(q, *angles), apply_rotary(k, *angles)
        if cache is not None:
            out = cache.attend(q, k, v, log_w)
        else:
            out = soft_mask_attention(q, k, v, log_w, backend)
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

    def writers(self):
        """The layers that write to the residual stream."""
        return self.self_attn.o_proj, self.mlp.down_proj

    def forward(self, x, angles, log_w, backend, cache):
        x = x + self.self_attn(self.input_layernorm(x), angles, log_w, backend, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    Block, Norm = Block, nn.RMSNorm

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.Block(config) for _ in range(config.num_hidden_layers))
        self.norm = self.Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, positions, log_w=None, backend=auto, cache=None):
        """Vectors (B, N, D) at positions (N,) or (B, N), log w of their keys (B, N) -> (B, N, D).

        `cache`: an object for each layer whose `attend(q, k, v, log_w)` takes the place of attention
        among these N, such as a LayerCache, which knows all slots before them.
        """
        return self.norm(self.stack(x, positions, log_w, backend, cache))

    def stack(self, x, positions, log_w=None, backend=auto, cache=None):
        """The blocks, without the final norm."""
        angles = self.angles(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, angles, log_w, backend, cache and cache[i])
        return x

    def frequency(self, device):
        """How far each pair of a head is turned from one position to the next, (d/2,)."""
        d = self.config.d
        return self.config.rope_theta ** -(torch.arange(0, d, 2, device=device) / d)

    def angles(self, positions, dtype):
        """Positions (N,) -> cos and sin of the angles, (N, d) each; (B, N) -> (B, 1, N, d)."""
        angle = positions.float()[..., None] * self.frequency(positions.device)  # (.., N, d/2)
        angle = torch.cat([angle, angle], dim=-1)  # (.., N, d)
        if positions.dim() == 2:
            angle = angle[:, None]  # the same for all heads
        return angle.cos().to(dtype), angle.sin().to(dtype)


class LayerCache:
    """Keys and values of the slots executed so far in one layer, (B, G, M, d') each."""

    def __init__(self):
        self.keys = self.values = None

    def attend(self, q, k, v, log_w):
        """New slots against all so far. A key carries its log w into the cache, as a channel."""
        d = q.size(-1)
        q, k, v = augment(q, k, v, log_w)
        self.append(k, v)
        return attend_to_cache(q, self.keys, self.values, d)

    def append(self, k, v):
        if self.keys is not None:
            k, v = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        self.keys, self.values = k, v


# -- A model in a directory: config.json, model.safetensors, and a tokenizer.json (data.py) --------

FORMAT = "ponderlm-3"
# What a config.json says of its method, where it is the paper's.
PAPER = {"method": "ponderlm3", "backbone": "llama", "backbone_options": {}, "reread": False}
PAPER |= {"backprop_passes": None}


class UserError(Exception):
    """What a user can mend: wrong input, a missing file, a full disk. It says what is wrong and the way
    out, and a command ends with this one line. Every other error is a bug and keeps its traceback."""


def save(model, directory):
    """Write config.json and model.safetensors: each file whole, or as it was before."""
    tensors = {name: x.detach().cpu().contiguous() for name, x in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    config = {"format": FORMAT, "method": model.method, **asdict(model.config)}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / "model.safetensors", lambda file: save_file(tensors, file))
    write_json(directory / "config.json", config)
    shutil.copymode(directory / "config.json", directory / "model.safetensors")  # safetensors hides its files


def load(directory, kind=PonderLM):
    """The model that `save` wrote, in float32 and in evaluation mode.

    Raises:
        UserError: a file that is missing or damaged, or a model of another kind.
    """
    directory = Path(directory)
    if not (directory / "model.safetensors").is_file():
        raise UserError(f"{directory} has no model.safetensors: it holds no model, or not yet")
    content = read_json(directory / "config.json")
    if content.pop("format", None) != FORMAT:
        raise UserError(f"{directory} is not of the form {FORMAT!r}; python -m lab convert writes it anew")
    for name in PAPER.keys() - kind.Config.__dataclass_fields__.keys():  # settings of the lab's models
        if (value := content.pop(name, PAPER[name])) != (kind.method if name == "method" else PAPER[name]):
            raise UserError(f"{directory}: {name} = {value!r} is not the paper's: python -m lab reads it")
    config = from_json(kind.Config, content, directory / "config.json")
    with torch.device("meta"):  # shapes alone, so that a damaged file asks for no memory
        model = kind(config)
    return fill(model, directory)


def fill(model, directory):
    """Give a model that has only shapes the weights of a directory."""
    file = Path(directory) / "model.safetensors"
    try:
        tensors = {name: x.float() for name, x in load_file(file).items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{file} is damaged: {error}") from None
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors.get("model.embed_tokens.weight")
    shapes = {name: x.shape for name, x in model.state_dict().items()}
    odd = {name for name, shape in shapes.items() if name not in tensors or tensors[name].shape != shape}
    odd |= tensors.keys() - shapes.keys()
    if odd:
        raise UserError(f"{file} does not fit config.json: {', '.join(sorted(odd)[:3])}")
    if bad := [name for name, x in tensors.items() if not x.isfinite().all()]:
        raise UserError(f"{file}: {bad[0]} has numbers that are not finite")
    model.load_state_dict(tensors, assign=True)
    model.tie()
    return model.eval()


def newest_run(out="out"):
    """The run whose weights are the newest, out/<name>. UserError: there is none."""
    runs = sorted(Path(out).glob("*/model.safetensors"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise UserError(f"there is no trained model in {out}/ yet: python train.py trains one")
    return runs[-1].parent


# -- What all scripts share ------------------------------------------------------------------------


def pick_device(name="auto"):
    """'auto' -> CUDA, else MPS, else the CPU; or a device by its name. UserError: it is not here."""
    if name == "auto":
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else mps
    try:
        torch.zeros(1, device=name).cpu()
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError):  # a wrong name, or no such device
        raise UserError(f"device {name!r} is not here: leave --device out, or give cpu") from None


def write_whole(file, write):
    """Let `write(temporary)` make a file and put it in the place of another: whole, or not at all."""
    temporary = file.with_name(file.name + ".tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch has no class for a full disk
        temporary.unlink(missing_ok=True)
        folder = next(path for path in file.absolute().parents if path.exists())
        free = shutil.disk_usage(folder).free / 2**20
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot write {file} ({reason}; {free:,.0f} MiB are free)") from None


def write_json(file, content):
    write_whole(Path(file), lambda part: part.write_text(json.dumps(content, indent=2) + "\n"))


def read_json(file):
    """A file with a JSON object. UserError: it is missing or damaged."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object")
    return content


def from_json(kind, content, file):
    """A dataclass from the fields of a JSON file: all of them and no other, each of its type.

    Raises:
        UserError: which is not so.
    """
    content = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
    if odd := content.keys() ^ kind.__dataclass_fields__.keys():
        raise UserError(f"{file}: unknown or missing fields {', '.join(sorted(odd))}")
    try:
        return kind(**content)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None


def check_types(settings):
    """Refuse a field of a dataclass that has another type than it says. ValueError"""
    for name, kind in typing.get_type_hints(type(settings)).items():
        if not is_of(value := getattr(settings, name), kind):
            raise ValueError(f"{name} = {value!r:.80}: it has to be of type {kind}")


def is_of(value, kind):
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return any(is_of(value, part) for part in parts)
    if typing.get_origin(kind) is Literal:
        return value in parts
    if typing.get_origin(kind) is tuple:
        parts = parts[:1] * len(value) if isinstance(value, tuple) and parts[-1] is ... else parts
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(is_of, value, parts))
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def command_line(main):
    """Run a command: an error that the user can mend is one line, and no stack trace."""
    try:
        main()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except UserError as error:
        sys.exit(f"error: {error}")
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and "can't allocate memory" not in str(error):  # what torch says on a CPU
            raise
        sys.exit("error: there is not enough memory: ask for fewer or smaller things at once")
    except OSError as error:
        if not error.filename:  # not about a file that the user named
            raise
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)
