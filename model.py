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
R           R                  scalar          refinement passes; training draws it (R)
tau         tau                scalar          where decoding stops; None: soft masks, no stopping

The file has three parts: the settings, LLaMA as Hugging Face's transformers has it (with a bias on
keys, shared positions, and vectors as inputs), and PonderLM. No function reads or writes a file.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import checkpoint

from attention import attend_to_cache, augment, soft_mask_attention
from router import FixedDepth, Router, slot_bias, stop_step, upcast
from runtime import strict_dataclass

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
    # llama3's: factor, low and high frequency factor, window that it was first trained with
    rope_scaling: tuple[Positive, Positive, Positive, Positive] | None = None
    tie_word_embeddings: bool = False  # the head is the embedding table
    embed_scale: Positive | None = None  # None: sqrt(2.5 D)
    backbone: str = "llama"  # or a file of backbones/: gpt_neox, which alone follows the next two
    rotary_pct: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of a head that RoPE turns
    parallel_residual: bool = True  # attention and MLP read the same x

    def __post_init__(self):
        D, H = self.hidden_size, self.num_attention_heads
        if H % self.key_value_heads:
            raise ValueError(f"{H} heads cannot share {self.key_value_heads} key/value heads")
        if self.head_dim is None and D % H:
            raise ValueError(f"hidden_size = {D} is not divisible by {H} heads; give head_dim")
        if self.rotary_width % 2 or not self.rotary_width:
            share = "" if self.rotary_pct == 1 else f" times rotary_pct = {self.rotary_pct}"
            raise ValueError(f"head_dim = {self.head_width}{share} is odd, but RoPE rotates pairs")
        if self.rope_scaling and not self.rope_scaling[1] < self.rope_scaling[2]:
            raise ValueError(f"rope_scaling = {self.rope_scaling}: low is not below high")

    @property
    def key_value_heads(self):  # G
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self):  # d
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_width(self):
        return int(self.head_width * self.rotary_pct)

    @property
    def scale(self):
        """Embeddings times sqrt(2.5 D) have the RMS of a normed state, 1, at initialisation."""
        return math.sqrt(2.5 * self.hidden_size) if self.embed_scale is None else self.embed_scale


@strict_dataclass
class PonderConfig(LlamaConfig):
    """A backbone and how it ponders. A method in baselines/ may add settings of its own."""

    # or of baselines/: ponderlm2, vanilla, looped, .., ablation-mask, ..; try --method NAME --help
    method: str = "ponderlm3"
    # K, steps beyond the first of any method
    ponder_steps: Annotated[int, Field(ge=0, le=1000)] = 3
    # None: rising linearly from 0 to 6
    router_offset: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] | None = None
    # training draws R from this range
    refinements: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(lt=2**31)]] = (2, 3)
    # what multiplies a state that is fed back; None: 1. Of a former Llama it is measured
    feedback_scale: Positive | None = None
    backprop_passes: Count | None = None  # gradients through the last n passes; None: all
    # of thinking: bottom mass by the cross-entropy of the batch, as the paper prints it (at losses
    # like its own it never acts), or by that of each token; or the mean of w_1 + .. + w_K, whose
    # weight is a price in nats for a step
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


# -- LLaMA -----------------------------------------------------------------------------------------


def for_products(x):
    """x at the precision of the matrix products. Autocast would cast it once for each of them."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def rotary_angles(positions, config):
    """Position ids (...,) -> the factors of a head and of its halves exchanged, both (..., d).

    d: the numbers of a head that are turned, in LLaMA all.
    """
    d = config.rotary_width
    frequency = config.rope_theta ** -(torch.arange(0, d, 2, device=positions.device) / d)  # (d/2,)
    if config.rope_scaling:
        frequency = llama3_scaling(frequency, *config.rope_scaling)
    angle = positions.float()[..., None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def llama3_scaling(frequency, factor, low, high, window):
    """Llama 3's RoPE for longer texts: slow rotations get `factor` times slower, fast ones do not.

    A rotation counts by how many turns it makes in the first `window` of the training: below `low`
    it is slow, above `high` fast, between them a mean of both by how far it is.
    """
    turns = window * frequency / (2 * math.pi)
    fast = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (fast + (1 - fast) / factor)


def apply_rotary(x, angles, d):
    """Turn the halves of every head in x (B, N, heads*d) against each other: RoPE, half-split."""
    cos, sin = angles  # of all heads: with those of one a CPU would take twice the time
    exchanged = x.unflatten(-1, (-1, d)).roll(d // 2, -1).flatten(-2)
    return torch.addcmul(x * cos, exchanged, sin)


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
        (B, N, _), projections = x.shape, (self.q_proj, self.k_proj, self.v_proj)
        if N > 1:  # one product, of three matrices put together
            qkv = F.linear(x, torch.cat([linear.weight for linear in projections]))
        else:  # which would take longer than the products
            qkv = torch.cat([linear(x) for linear in projections], dim=-1)
        qk, v = qkv.split(((self.H + self.G) * self.d, self.G * self.d), dim=-1)
        qk, v = apply_rotary(qk, angles, self.d).view(B, N, -1, self.d), v.view(B, N, -1, self.d)
        q, k = qk.transpose(1, 2).split((self.H, self.G), dim=1)
        v = v.transpose(1, 2)
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
        x = for_products(x)
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
    name, unused = "llama", ("rotary_pct", "parallel_residual")  # settings that it does not follow
    Block, Norm = Block, nn.RMSNorm

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.Block(config) for _ in range(config.num_hidden_layers))
        self.norm = self.Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, positions, key_bias, backend="auto", cache=None):
        """Input vectors (B, N, D), positions (N,) or (B, N), key bias (B, N) or None -> (B, N, D).

        `cache`, one LayerCache a layer, holds the keys and values of all slots before these N.
        """
        return self.norm(self.stack(x, positions, key_bias, backend, cache))

    def stack(self, x, positions, key_bias, backend="auto", cache=None):
        """The same without the final norm: what LoopedLM and MoR apply again and again."""
        heads = self.config.num_attention_heads + self.config.key_value_heads
        angles = rotary_angles(positions, self.config)
        angles = [for_products(y.to(x.dtype)).tile(heads) for y in angles]  # (.., N, heads*d)
        for i, layer in enumerate(self.layers):
            x = layer(x, angles, key_bias, backend, cache and cache[i])
        return x


class LayerCache:
    """Keys and values of the slots executed so far in one layer, (B, G, M, d') each."""

    def __init__(self):
        self.keys = self.values = None

    def attend(self, q, k, v, key_bias):
        """New slots against all so far. The bias enters the cache as a channel of the key."""
        d = q.size(-1)
        q, k, v = augment(q, k, v, key_bias)
        if self.keys is not None:
            k, v = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        self.keys, self.values = k, v
        return attend_to_cache(q, k, v, d)


# -- PonderLM-3 ------------------------------------------------------------------------------------


@dataclass
class PonderOutput:
    head: nn.Linear
    h_hat: torch.Tensor  # (B, T, D) what it reads: the integrated states
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


def checkpointed(function, *args):
    """function(*args), whose activations are not kept but computed again in the backward pass.

    Nothing here draws random numbers, so that no random state has to be kept, either.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def slots_of_passes(K, R):
    """Slots per token in each Jacobi pass: the ladder 1 .. K, R refinements, the final pass."""
    return [*range(1, K + 1), *[K + 1] * (R + 1)]


LOGITS = 2**26  # numbers, in float32 a quarter of a GiB


class PonderLM(nn.Module):
    method, title = "ponderlm3", "PonderLM-3"  # --method, and its name in tables and figures
    color, marker = "#D55E00", "o"
    Config = PonderConfig
    defaults = {}  # settings that the name of the method implies
    unused = ()  # settings of PonderConfig that it does not follow, beside those of parts it lacks
    has_router = True  # a learned s, soft masks and early exit
    mixes = True  # where there is a router: all states predict together, weighted by s
    routes_first = True  # h^(0) alone decides s, before the first step
    iterates = True  # its states are a fixed point of the Jacobi iteration
    interleaves = True  # its longest pass runs all S slots of every token, not one

    def __init__(self, config, Backbone=Llama):
        super().__init__()
        if not isinstance(config, PonderConfig):
            raise TypeError(f"config = {config!r:.80}: {self.title} takes a PonderConfig")
        if (config.method, config.backbone) != (self.method, Backbone.name):
            found = f"{config.method} ({config.backbone})"
            raise ValueError(f"{found} is not {self.method}; build it by baselines.build")
        self.config = config
        self.backend = "auto"  # attention backend; how it runs is no property of the weights
        self.recompute = False  # keep no activations of a pass, compute them again in backward
        D, K = config.hidden_size, config.ponder_steps
        self.model = Backbone(config)
        self.lm_head = nn.Linear(D, config.vocab_size, bias=False)
        self.router = Router(D, K, config.offset) if self.has_router else FixedDepth(K)
        self.apply(self._init_weights)
        self.tie()

    def tie(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _init_weights(self, module):
        """Truncated normal, std sqrt(2/(5D)); layers that write to the residual stream by depth."""
        std = math.sqrt(2 / (5 * self.config.hidden_size))
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
        if isinstance(module, self.model.Block):  # after its children
            for linear in module.writers():
                linear.weight.data /= math.sqrt(2 * self.config.num_hidden_layers)
        if isinstance(module, Router):
            nn.init.zeros_(module.proj.weight)

    def set_offset(self, offset):
        """Move the router's offset, K+1 numbers or None for the default, in the config as well."""
        self.config = replace(self.config, router_offset=offset)
        for cell, number in zip(self.router.offset, self.config.offset, strict=True):
            cell.fill_(number)  # a copy to a GPU would wait for it

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

    def feed_back(self, h):
        """Outputs of slots, (..., D), as the next inputs: unchanged, but for a former Llama's."""
        return h if self.config.feedback_scale is None else h * self.config.feedback_scale

    def key_bias(self, log_w, tau=None):
        """Mask scores (..., S) -> bias on the keys of the slots; None without a learned router."""
        return slot_bias(log_w, tau) if self.has_router else None

    def transform(self, x, positions, key_bias=None, norm=True):
        """The backbone, (B, N, D) -> (B, N, D); its activations are kept, or not."""
        run = self.model if norm else self.model.stack
        if self.recompute and torch.is_grad_enabled():
            return checkpointed(run, x, positions, key_bias, self.backend)
        return run(x, positions, key_bias, self.backend)

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

    def route(self, h, alpha=0.0):
        """Step distributions of tokens by the states of their slots so far, (..., n+1, D)."""
        return self.router(h[..., 0, :], alpha)

    def jacobi(self, idx, R, tau=None, alpha=0.0):
        """All states of all tokens in parallel, by a fixed number of passes.

        Pass 1 runs slot 0 alone, pass 2 slots 0 and 1, and so on: the ladder, K passes. Then all S
        slots run R + 1 times. Each pass replaces all latents and mask scores at once.

        Args:
            idx: (B, T) token ids.
            R: refinements. K (T-1) are exact, since each pass settles one more latent of the chain;
                what goes beyond is not run.
            tau: None for the soft mask; else the keys of slots k > K-hat are hidden from everyone.
            alpha: shifts the step distribution, see router.py.

        Returns:
            h (B, T, S, D), s (B, T, S), log_w (B, T, S) of the final pass.
        """
        (B, T), K = idx.shape, self.config.ponder_steps
        if R < 0:
            raise ValueError(f"R = {R}: the number of refinements must be >= 0")
        passes = K + min(R, K * (T - 1)) + 1
        constant = 0  # so many passes are constants to the backward pass
        if self.training and self.config.backprop_passes:
            constant = passes - self.config.backprop_passes
        grad = torch.is_grad_enabled()
        e = self.embed(idx)
        latents, bias = e.new_empty(B, T, 0, e.size(-1)), None  # nothing to feed back yet
        for p in range(1, passes + 1):
            with torch.set_grad_enabled(grad and p > constant):
                h, s, log_w = self.jacobi_pass(e, latents, bias, alpha)
            latents = self.feed_back(h[:, :, :K])  # (B, T, min(p, K), D)
            bias = self.key_bias(log_w, tau)
        return h, s, log_w

    def fixed_point(self, idx, tau=None, alpha=0.0, tolerance=1e-4):
        """As `jacobi`, with as many refinements as it takes: what sequential decoding computes.

        It stops when a pass has changed the latents by less than `tolerance` (relative norm), and
        after K T + 1 passes at the latest, where it is exact.
        """
        e, K = self.embed(idx), self.config.ponder_steps
        B, T = idx.shape
        latents, bias = e.new_empty(B, T, 0, e.size(-1)), None
        for p in range(1, K * T + 2):
            h, s, log_w = self.jacobi_pass(e, latents, bias, alpha)
            before, latents = latents, self.feed_back(h[:, :, :K])
            if p > K and (latents - before).float().norm() < tolerance * latents.float().norm():
                break
            bias = self.key_bias(log_w, tau)
        return h, s, log_w

    def states(self, idx, R=None, tau=None, alpha=0.0):
        """h (B, T, S, D), s, log_w (B, T, S) after R = `R` refinements; None: the fixed point.

        This is where one method differs from another: see baselines/.
        """
        if R is None:
            return self.fixed_point(idx, tau, alpha)
        return self.jacobi(idx, R, tau, alpha)

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

    def forward(self, idx, targets=None, *, R=None, tau=None, alpha=0.0):
        """Score a batch of sequences in parallel.

        Args:
            idx: (B, T) token ids.
            targets: (B, T) the tokens that follow, -100 where there is none to predict.
            R: R; None: the fixed point.
            tau: None for soft masks; else hard stopping as in decoding: keys of slots beyond K-hat
                are hidden, and integration stops at K-hat.
            alpha: shifts the step distribution, see router.py.

        Returns:
            PonderOutput. Its loss is the mean cross-entropy; train.py adds the penalty.
        """
        h, s, log_w = self.states(idx, R, tau, alpha)
        steps = self.executed(log_w, tau)
        return self.predict(h, s, log_w, steps, targets)

    def predict(self, h, s, log_w, steps, targets=None):
        """States, integrated up to `steps` (None: all), to losses -> PonderOutput."""
        out = PonderOutput(self.lm_head, self.integrate(h, s, steps), steps, h, s, log_w)
        if targets is not None:
            out.ce = self.cross_entropy(out.h_hat, targets)
            out.loss = out.ce.sum() / (targets != -100).sum()
        return out

    def cross_entropy(self, states, targets):
        """In nats, of each token: (B, T, D) and (B, T) -> (B, T), 0 where there is no target.

        Where all logits would take more than LOGITS numbers, there are only some rows of them at a
        time, in the backward pass as well.
        """
        rows = max(1, LOGITS // self.config.vocab_size)
        pairs = zip(states.flatten(0, 1).split(rows), targets.flatten().split(rows), strict=True)
        whole = targets.numel() <= rows
        losses = [
            self.row_losses(*p) if whole else checkpointed(self.row_losses, *p) for p in pairs
        ]
        return torch.cat(losses).view(targets.shape)

    def row_losses(self, states, targets):
        """(n, D) and (n,) -> (n,)."""
        return F.cross_entropy(upcast(self.lm_head(states)), targets, reduction="none")

    @torch.no_grad()
    def token_losses(self, states, targets):
        """As cross_entropy, without gradient."""
        return self.cross_entropy(states, targets)

    @torch.no_grad()
    def partial_losses(self, h, s, targets):
        """ce_{t,i} of the partial states sum_{j <= i} s_j h^(j), i < K (section 3.4.2).

        Not renormalised, as printed. -> (B, T, K), without gradient.
        """
        depths = [torch.full_like(targets, i) for i in range(self.config.ponder_steps)]
        losses = [self.token_losses(self.integrate(h, s, i), targets) for i in depths]
        return torch.stack(losses, dim=-1)

    # Decoding (section 3.3)

    def new_cache(self):
        """What `ponder_token` keeps of the tokens before: here one LayerCache a layer."""
        return [LayerCache() for _ in self.model.layers]

    def embed_token(self, token, position):
        """One token's embedding (1, 1, D) and position id (1,)."""
        device = self.lm_head.weight.device
        idx = torch.tensor([[token]], device=device)
        return self.embed(idx), torch.tensor([position], device=device)

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=1e-4, alpha=0.0):
        """Read one token: slot 0, the router, then slots 1..K-hat; each one attends to the cache.

        This is the model as it decodes: what `forward` does for all tokens at once, slot by slot.
        An executed slot leaves one key and one value a layer, a skipped one nothing.

        Returns:
            logits (V,) of the next token, and K-hat, the pondering steps executed.
        """
        x, positions = self.embed_token(token, position)  # all slots of a token share its position
        # Slot 0 has no bias, but its cached keys need the channel that those of the others have.
        unmasked = torch.zeros(1, 1, device=x.device) if self.has_router else None
        h = self.model(x, positions, unmasked, cache=cache)
        s, log_w = self.router(h, alpha)  # (1, 1, S)
        bias, steps = self.key_bias(log_w), self.executed(log_w, tau)
        s, steps = self.step_weights(s, steps), int(steps)
        h_hat = s[..., :1] * h
        for k in range(1, steps + 1):  # stop as soon as w_k < tau
            x = self.feed_back(h)
            h = self.model(x, positions, bias[..., k] if self.has_router else None, cache=cache)
            h_hat = h_hat + s[..., k : k + 1] * h
        return self.lm_head(h_hat.to(h.dtype))[0, 0], steps

    # What a token costs, see baselines/cost.py

    @staticmethod
    def training_forwards(config, steps):
        """Passes of the stack for each training token, forward, with R as the mean of its range."""
        K, R = config.ponder_steps, sum(config.refinements) / 2
        return sum(slots_of_passes(K, 0)) + R * (K + 1)

    @staticmethod
    def vocabulary_products(steps):
        """Products with a table of the vocabulary, head or embedding, for each decoded token."""
        return 1
