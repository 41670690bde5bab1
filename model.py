"""PonderLM-3: a LLaMA-style transformer that feeds its last state back up to K times per token.

token t:   slot 0      slot 1      ...   slot K         S = K+1 slots share position id t
input      e(x_t)      h_t^(0)     ...   h_t^(K-1)
output     h_t^(0)     h_t^(1)     ...   h_t^(K)        h_hat_t = sum_k s_{t,k} h_t^(k)

code        paper              shape
idx         x_1 .. x_T         (B, T)          token ids
e           e(x_t)             (B, T, D)       scaled token embeddings
h           h_t^(0..K)         (B, T, S, D)    outputs of the S slots, after the final RMSNorm
latents     h_t^(0..K-1)       (B, T, K, D)    those that are fed back, as inputs of slots 1 .. K
s, log_w    s_{t,k}, log w     (B, T, S)       see router.py
bias        log w              (B, T, S)       on the keys of the slots
steps       K-hat_t            (B, T)          pondering steps that are executed
R           R                  scalar          refinement passes; training draws it
tau         tau                scalar          where decoding stops; None: soft masks, no stopping

First comes the method, PonderLM; then its backbone, LLaMA as Hugging Face's transformers has it
(with a bias on keys, shared positions, and vectors as inputs); then the settings of both. No
function reads or writes a file.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import checkpoint

from attention import attend_to_cache, augment, sdpa, soft_mask_attention
from router import Router, slot_bias, stop_step, upcast
from runtime import strict_dataclass

MAX_LOGITS = 2**26  # at a time, in float32 a quarter of a GiB


class PonderLM(nn.Module):
    """The model. A method of baselines/ overrides what it does in another way."""

    def __init__(self, config, Backbone=None):
        super().__init__()
        self.config = config
        self.backend = sdpa  # of attention; how it runs is no property of the weights
        self.recompute = False  # keep no activations of a pass, compute them again in backward
        self.model = (Backbone or Llama)(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router = self.make_router()
        self.feedback = Feedback(config.hidden_size) if config.reread else None
        self.apply(self._init_weights)
        self.tie()

    def make_router(self):
        return Router(self.config.hidden_size, self.config.ponder_steps, self.config.offset)

    def forward(self, idx, targets=None, *, R=None, tau=None, alpha=0.0):
        """Score a batch of sequences in parallel.

        Args:
            idx: (B, T) token ids.
            targets: (B, T) the tokens that follow, -100 where there is none to predict.
            R: refinement passes; None: as many as the fixed point takes.
            tau: None for soft masks; else hard stopping as in decoding: keys of slots beyond K-hat
                are hidden, and integration stops at K-hat.
            alpha: shifts the step distribution, see router.py.

        Returns:
            PonderOutput. Its loss is the mean cross-entropy; train.py adds the penalty.
        """
        h, s, log_w = self.states(idx, R, tau, alpha)
        steps = self.executed(log_w, tau)
        return self.predict(h, s, log_w, steps, targets)

    def states(self, idx, R=None, tau=None, alpha=0.0):
        """h (B, T, S, D), s, log_w (B, T, S) after R refinements; None: the fixed point.

        This is where one method differs from another: see baselines/.
        """
        if R is None:
            return self.fixed_point(idx, tau, alpha)
        return self.jacobi(idx, R, tau, alpha)

    # The Jacobi iteration (section 3.4.1)

    def jacobi_pass(self, e, latents, bias=None, alpha=0.0):
        """One pass over all slots that have an input:

            h^(0), h^(1), .. = Transformer([e(x_1), h_1^(0), h_1^(1), .., e(x_2), h_2^(0), ..])

        Args:
            e: (B, T, D). latents: (B, T, n, D), inputs of the slots 1 .. n, for any n <= K.
            bias: (B, T, S) on the keys of the slots, of which the first n+1 count; None: no bias.

        Returns:
            h (B, T, n+1, D), and s, log_w (B, T, S) by the new h^(0).
        """
        (B, T, D), slots = e.shape, latents.size(2) + 1
        x = torch.cat([e[:, :, None], latents], dim=2)  # (B, T, slots, D)
        x = x.flatten(1, 2)  # (B, T*slots, D), slot k of token t at t*slots + k
        positions = torch.arange(T, device=e.device).repeat_interleave(slots)  # shared by a token
        if bias is not None:
            bias = bias[..., :slots].flatten(1)  # (B, T*slots)
        h = self.transform(x, positions, bias).view(B, T, slots, D)
        return h, *self.route(h, alpha)

    def iterate(self, e, tau, alpha):
        """Yield the next latents (B, T, min(p, K), D), and h, s, log_w, after pass p = 1, 2, ..

        Pass 1 runs slot 0 alone, pass 2 slots 0 and 1, and so on: the ladder, K passes. Then all S
        slots run in each pass, which replaces all latents and mask scores at once.
        """
        (B, T, D), K = e.shape, self.config.ponder_steps
        latents, bias = e.new_empty(B, T, 0, D), None  # nothing to feed back yet
        while True:
            h, s, log_w = self.jacobi_pass(e, latents, bias, alpha)
            latents, bias = self.feed_back(h[:, :, :K], e[:, :, None]), self.key_bias(log_w, tau)
            yield latents, (h, s, log_w)

    def jacobi(self, idx, R, tau=None, alpha=0.0):
        """All states of all tokens in parallel: the ladder, R refinements, and the final pass.

        Args:
            idx: (B, T) token ids.
            R: refinements. K (T-1) are exact, since each pass settles one more latent of the chain;
                what goes beyond is not run.
            tau: None for the soft mask; else the keys of slots k > K-hat are hidden from everyone.
            alpha: shifts the step distribution, see router.py.

        Returns:
            h (B, T, S, D), s (B, T, S), log_w (B, T, S) of the final pass.
        """
        e, K = self.embed(idx), self.config.ponder_steps
        if R < 0:
            raise ValueError(f"R = {R}: the number of refinements must be >= 0")
        passes = K + min(R, K * (e.size(1) - 1)) + 1
        without_grad = 0  # the first passes, which are constants to the backward pass
        if self.training and self.config.backprop_passes:
            without_grad = passes - self.config.backprop_passes
        iteration, grad = self.iterate(e, tau, alpha), torch.is_grad_enabled()
        for p in range(1, passes + 1):
            with torch.set_grad_enabled(grad and p > without_grad):  # also within the generator
                _, found = next(iteration)
        return found

    def fixed_point(self, idx, tau=None, alpha=0.0, tolerance=1e-4):
        """As `jacobi`, with as many refinements as it takes: what sequential decoding computes.

        It stops when a pass has changed the latents by less than `tolerance` (relative norm), and
        after K T + 1 passes at the latest, where it is exact.
        """
        e, K, before = self.embed(idx), self.config.ponder_steps, None
        last = K * e.size(1) + 1
        for p, (latents, found) in enumerate(self.iterate(e, tau, alpha), start=1):
            if p == last:
                return found
            if p > K and (latents - before).float().norm() < tolerance * latents.float().norm():
                return found
            before = latents

    # The parts of a pass

    def embed(self, idx):
        """(B, T) -> (B, T, D), at unit RMS like the normed states that fill the other slots."""
        if idx.dim() != 2 or idx.is_floating_point() or not len(idx):
            raise ValueError(f"idx {[*idx.shape]}, {idx.dtype}: token ids (B, T) are needed")
        if not 0 < idx.size(1) <= self.config.block_size:
            raise ValueError(f"{idx.size(1)} tokens; the window is 1 to {self.config.block_size}")
        try:
            return self.model.embed_tokens(idx) * self.config.scale
        except IndexError:  # on a CPU
            V = self.config.vocab_size
            raise ValueError(f"ids outside the vocabulary, 0 to {V - 1}") from None

    def transform(self, x, positions, key_bias=None, cache=None, norm=True):
        """The backbone, (B, N, D) -> (B, N, D); with `recompute` its activations are not kept."""
        run = self.model if norm else self.model.stack
        if self.recompute and torch.is_grad_enabled():
            return checkpointed(run, x, positions, key_bias, self.backend, cache)
        return run(x, positions, key_bias, self.backend, cache)

    def route(self, h, alpha=0.0):
        """Step distributions of tokens, by h^(0) of their states so far, (..., n+1, D)."""
        return self.router(h[..., 0, :], alpha)

    def feed_back(self, h, e):
        """Outputs of slots, (..., D), as the next inputs: unchanged, except in a former Llama,
        which reads its token's e (..., D) again."""
        return h if self.feedback is None else self.feedback(h, e)

    def key_bias(self, log_w, tau=None):
        """Mask scores (..., S) -> bias on the keys of the slots; None, without masks: no bias."""
        return slot_bias(log_w, tau)

    # From states to predictions (section 3.2.3)

    def executed(self, log_w, tau):
        """Pondering steps that decoding at tau executes. (..., S) -> (...)."""
        return stop_step(log_w, tau)

    def step_weights(self, s, steps=None):
        """What each state counts for in h_hat: s_k up to K-hat, never renormalised.

        s (..., S), steps (...) or None for all -> (..., S).
        """
        if steps is None:
            return s
        return s.masked_fill(torch.arange(s.size(-1), device=s.device) > steps[..., None], 0)

    def integrate(self, h, s, steps=None):
        """h_hat = sum over k <= K-hat of s_k h^(k).

        h (B, T, S, D), s (B, T, S), steps (B, T) or None for all -> (B, T, D).
        """
        return (self.step_weights(s, steps)[..., None] * h).sum(2).to(h.dtype)

    def predict(self, h, s, log_w, steps, targets=None):
        """States, integrated up to `steps` (None: all), to losses -> PonderOutput."""
        out = PonderOutput(self.lm_head, self.integrate(h, s, steps), steps, h, s, log_w)
        if targets is not None:
            out.ce = self.cross_entropy(out.h_hat, targets)
            out.loss = out.ce.sum() / (targets != -100).sum()
        return out

    def cross_entropy(self, states, targets):
        """In nats, of each token: (B, T, D) and (B, T) -> (B, T), 0 where there is no target.

        Where there would be more than MAX_LOGITS logits, only some rows are made at a time, in
        the backward pass as well.
        """

        def of_rows(states, targets):  # (n, D), (n,) -> (n,)
            return F.cross_entropy(upcast(self.lm_head(states)), targets, reduction="none")

        states, rows = states.flatten(0, 1), targets.flatten()
        if rows.numel() * self.config.vocab_size <= MAX_LOGITS:
            return of_rows(states, rows).view(targets.shape)
        n = max(1, MAX_LOGITS // self.config.vocab_size)
        pairs = zip(states.split(n), rows.split(n), strict=True)
        return torch.cat([checkpointed(of_rows, *pair) for pair in pairs]).view(targets.shape)

    @torch.no_grad()
    def partial_losses(self, h, s, targets):
        """ce_{t,i} of the partial states sum_{j <= i} s_j h^(j), i < K (section 3.4.2).

        Not renormalised, as printed. -> (B, T, K), without gradient.
        """
        stops = [torch.full_like(targets, i) for i in range(self.config.ponder_steps)]
        losses = [self.cross_entropy(self.integrate(h, s, steps), targets) for steps in stops]
        return torch.stack(losses, dim=-1)

    # Decoding (section 3.3)

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=1e-4, alpha=0.0):
        """Read one token: slot 0, the router, then slots 1..K-hat; each one attends to the cache.

        This is the model as it decodes: what `forward` does for all tokens at once, slot by slot.
        An executed slot leaves one key and one value a layer, a skipped one nothing.

        Returns:
            logits (V,) of the next token, and K-hat, the pondering steps executed.
        """
        e, positions = self.embed_token(token, position)  # all slots of a token share its position
        h = self.run_slot(0, e, positions, self.key_bias(e.new_zeros(1, 1)), cache)  # log w_0 = 0
        s, log_w = self.route(h[:, :, None], alpha)  # (1, 1, S)
        bias, steps = self.key_bias(log_w), self.executed(log_w, tau)
        s, steps = self.step_weights(s, steps), int(steps)
        h_hat = s[..., :1] * h
        for k in range(1, steps + 1):  # stop as soon as w_k < tau
            x = self.feed_back(h, e)
            h = self.run_slot(k, x, positions, None if bias is None else bias[..., k], cache)
            h_hat = h_hat + s[..., k : k + 1] * h
        return self.lm_head(h_hat.to(h.dtype))[0, 0], steps

    def run_slot(self, k, x, positions, bias, cache):
        """Slot k of one token, (1, 1, D) -> (1, 1, D), against all slots so far."""
        return self.model(x, positions, bias, cache=cache)

    def new_cache(self):
        """What `ponder_token` keeps of the tokens before: here one LayerCache a layer."""
        return [LayerCache() for _ in self.model.layers]

    def embed_token(self, token, position):
        """One token's embedding (1, 1, D) and position id (1,)."""
        device = self.lm_head.weight.device
        idx = torch.tensor([[token]], device=device)
        return self.embed(idx), torch.tensor([position], device=device)

    # Weights

    def _init_weights(self, module):
        """Truncated normal, std sqrt(2/(5D)); writers to the residual stream less, by depth."""
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


class Feedback(nn.Module):
    """What a former Llama is fed: e + g h, with a learned g (D,) that starts at 0."""

    def __init__(self, D):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D))  # g

    def forward(self, h, e):
        return e + self.weight * h


@dataclass
class PonderOutput:
    head: nn.Linear
    h_hat: torch.Tensor  # (B, T, D) the integrated states, which the head reads
    steps: torch.Tensor  # (B, T) executed pondering steps, K-hat
    h: torch.Tensor  # (B, T, S, D) states
    s: torch.Tensor  # (B, T, S) step distribution
    log_w: torch.Tensor  # (B, T, S) log of the mask score
    ce: torch.Tensor | None = None  # (B, T) cross-entropy in nats, 0 where there is no target
    loss: torch.Tensor | None = None  # its mean
    auxiliary: torch.Tensor | None = None  # a loss of the method's own, weighted (MoR's routers)

    @property
    def logits(self):
        """(B, T, V), made when they are asked for: of a large vocabulary they are gigabytes."""
        with torch.set_grad_enabled(self.h_hat.requires_grad):
            return self.head(self.h_hat)


def slots_of_passes(K, R):
    """Slots per token in each Jacobi pass: the ladder 1 .. K, R refinements, the final pass."""
    return [*range(1, K + 1), *[K + 1] * (R + 1)]


def checkpointed(function, *args):
    """function(*args), whose activations are not kept but computed again in the backward pass.

    Nothing here draws random numbers, so that no random state has to be kept, either.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


# -- LLaMA -----------------------------------------------------------------------------------------


def apply_rotary(x, angles):
    """RoPE: rotate each number of a head's first half with its partner in the second half.

    x (B, heads, N, d); the rotation's minus sign is part of sin, see Llama.angles.
    """
    cos, sin = angles  # (N, d) or (B, 1, N, d) each
    exchanged = x.roll(x.size(-1) // 2, dims=-1)
    return (x * cos + exchanged * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        D, d = config.hidden_size, config.head_width
        self.d, self.H, self.G = d, config.num_attention_heads, config.key_value_heads
        self.q_proj = nn.Linear(D, self.H * d, bias=False)
        self.k_proj = nn.Linear(D, self.G * d, bias=False)
        self.v_proj = nn.Linear(D, self.G * d, bias=False)
        self.o_proj = nn.Linear(self.H * d, D, bias=False)

    def forward(self, x, angles, key_bias, backend, cache):
        B, N, _ = x.shape
        q = self.q_proj(x).view(B, N, self.H, self.d).transpose(1, 2)  # (B, H, N, d)
        k = self.k_proj(x).view(B, N, self.G, self.d).transpose(1, 2)  # (B, G, N, d)
        v = self.v_proj(x).view(B, N, self.G, self.d).transpose(1, 2)
        q, k = apply_rotary(q, angles), apply_rotary(k, angles)
        if cache is None:
            out = soft_mask_attention(q, k, v, key_bias, backend)
        else:
            out = cache.attend(q, k, v, key_bias)
        return self.o_proj(out.transpose(1, 2).reshape(B, N, -1))  # (B, N, D)


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        D, F_ = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, F_, bias=False)
        self.up_proj = nn.Linear(D, F_, bias=False)
        self.down_proj = nn.Linear(F_, D, bias=False)

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

    def forward(self, x, angles, key_bias, backend, cache):
        x = x + self.self_attn(self.input_layernorm(x), angles, key_bias, backend, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    name = "llama"
    unused = ()  # settings that it does not follow
    Block, Norm = Block, nn.RMSNorm

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.Block(config) for _ in range(config.num_hidden_layers))
        self.norm = self.Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, positions, key_bias, backend=sdpa, cache=None):
        """Input vectors (B, N, D), positions (N,) or (B, N), key bias (B, N) or None -> (B, N, D).

        `cache`, one LayerCache a layer, holds the keys and values of all slots before these N.
        """
        return self.norm(self.stack(x, positions, key_bias, backend, cache))

    def stack(self, x, positions, key_bias, backend=sdpa, cache=None):
        """The same without the final norm: what LoopedLM and MoR apply again and again."""
        angles = self.angles(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, angles, key_bias, backend, cache and cache[i])
        return x

    def frequency(self, device):
        """How far each pair of a head's numbers is turned from one position to the next, (d/2,)."""
        d = self.config.head_width
        return self.config.rope_theta ** -(torch.arange(0, d, 2, device=device) / d)

    def angles(self, positions, dtype):
        """Position ids -> cos, and sin with a minus for the first half of a head, as factors of x.

        (N,) -> (N, d), (B, N) -> (B, 1, N, d) each.
        """
        angle = positions.float()[..., None] * self.frequency(positions.device)  # (.., N, d/2)
        if positions.dim() == 2:
            angle = angle[:, None]  # the same for all heads
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


class LayerCache:
    """Keys and values of the slots executed so far in one layer, (B, G, M, d') each."""

    def __init__(self):
        self.keys = self.values = None

    def attend(self, q, k, v, key_bias):
        """New slots against all so far. The bias enters the cache as a channel of the key."""
        d = q.size(-1)
        q, k, v = augment(q, k, v, key_bias)
        self.append(k, v)
        return attend_to_cache(q, self.keys, self.values, d)

    def append(self, k, v):
        if self.keys is not None:
            k, v = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        self.keys, self.values = k, v


# -- Settings --------------------------------------------------------------------------------------

Count = Annotated[int, Field(ge=1, lt=2**31)]
Size = Annotated[int, Field(ge=1, le=2**20)]  # of a matrix: two of them can be multiplied
Given = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@strict_dataclass
class LlamaConfig:
    """The shape of the backbone. The fields are named as in Hugging Face's Llama."""

    vocab_size: Size = 257  # V
    hidden_size: Size = 128  # D
    intermediate_size: Size = 344  # of SwiGLU
    num_hidden_layers: Annotated[int, Field(ge=1, le=1000)] = 4  # blocks
    num_attention_heads: Size = 4  # H
    num_key_value_heads: Size | None = None  # None: as many as query heads
    head_dim: Size | None = None  # None: hidden_size / num_attention_heads
    block_size: Count = 64  # the window, in tokens
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 10_000.0
    tie_word_embeddings: bool = False  # the head is the embedding table
    embed_scale: Positive | None = None  # None: sqrt(2.5 D)
    backbone: str = "llama"  # or a file of backbones/: gpt_neox, llama3
    backbone_options: dict[str, float] = field(default_factory=dict)  # its own settings

    def __post_init__(self):
        D, H = self.hidden_size, self.num_attention_heads
        if H % self.key_value_heads:
            raise ValueError(f"{H} heads cannot share {self.key_value_heads} key/value heads")
        if self.head_dim is None and D % H:
            raise ValueError(f"hidden_size = {D} is not divisible by {H} heads; give head_dim")
        if self.head_width % 2:
            raise ValueError(f"head_dim = {self.head_width} is odd, but RoPE rotates pairs")

    @property
    def key_value_heads(self):  # G
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self):  # d
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def scale(self):
        """Embeddings times sqrt(2.5 D) have the RMS of a normed state, 1, at initialisation."""
        return math.sqrt(2.5 * self.hidden_size) if self.embed_scale is None else self.embed_scale


@strict_dataclass
class PonderConfig(LlamaConfig):
    """A backbone and how it ponders. A method in baselines/ may add settings of its own."""

    # ponderlm3, or another of baselines/: ponderlm2, vanilla, looped, ..; try --method NAME --help
    method: str = "ponderlm3"
    # K: how many steps a token may take beyond the first, in any method
    ponder_steps: Annotated[int, Field(ge=0, le=1000)] = 3
    # None: rising linearly from 0 to 6
    router_offset: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] | None = None
    # training draws R from this range
    refinements: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(lt=2**31)]] = (2, 3)
    reread: bool = False  # what is fed back is e(x_t) + g h, not h: a former Llama (warm_start.py)
    backprop_passes: Count | None = None  # gradients through the last n passes; None: all
    # on steps. printed: the bottom mass as the paper prints it, by the cross-entropy of a batch
    # (at losses like the paper's it never acts); token: by that of each token; mean: the mean of
    # w_1 + .. + w_K, whose weight is a price in nats for a step
    penalty: Literal["printed", "token", "mean"] = "printed"
    penalty_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5  # lambda

    def __post_init__(self):
        super().__post_init__()
        K = self.ponder_steps
        if (K == 0) != (self.method == "vanilla"):
            raise ValueError(
                f"ponder_steps = {K}, method {self.method}: vanilla takes 0, others more"
            )
        if len(self.offset) != K + 1:
            raise ValueError(f"router_offset {self.router_offset} needs K+1 = {K + 1} numbers")
        if self.refinements[0] > self.refinements[1]:
            raise ValueError(f"R = {self.refinements} is an empty range: give low <= high")

    @property
    def offset(self):
        if self.router_offset is not None:
            return self.router_offset
        return tuple(6 * k / max(self.ponder_steps, 1) for k in range(self.ponder_steps + 1))
