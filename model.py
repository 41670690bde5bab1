"""PonderLM-3: a LLaMA-style transformer that feeds its last hidden state back up to K times per token.

Each token occupies S = K+1 slots, and a slot is one input vector of the transformer:

token t:   slot 0     slot 1      ..   slot K          all S slots share position id t
input      e(x_t)     h_t^(0)     ..   h_t^(K-1)
output     h_t^(0)    h_t^(1)     ..   h_t^(K)         h_hat_t = sum_k s_{t,k} h_t^(k)

code        paper              shape
idx         x_1 .. x_T         (B, T)          token ids
e           e(x_t)             (B, T, D)       scaled token embeddings
h           h_t^(0..K)         (B, T, S, D)    outputs of the S slots, after the final RMSNorm
latents     h_t^(0..K-1)       (B, T, K, D)    the outputs that are fed back: inputs of slots 1 .. K
s, log_w    s_{t,k}, log w     (B, T, S)       see router.py
steps       K-hat_t            (B, T)          pondering steps that are executed
R           R                  scalar          refinement passes of the Jacobi iteration
tau         tau                scalar          decoding stops where w < tau; None: soft masks, no early exit

s weights the outputs, and log w the keys. With a tau, the outputs and keys beyond K-hat are removed.

Training runs all slots in parallel by Jacobi iteration: K passes that each add one slot per token, R
passes that refine all slots, and one final pass whose outputs count. This approximates the states that
decoding, one slot after another, would compute.

The file has three parts: the settings of a model (Config), the transformer (Llama, with the module names
of Hugging Face's transformers), and the method (PonderLM).
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import pydantic
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import checkpoint

from attention import attend_to_cache, augment, auto, soft_mask_attention
from router import TAU, Router, mask_keys, stop_step, upcast

# -- Settings --------------------------------------------------------------------------------------

# A dataclass that checks the types and ranges of its fields, and raises a ValueError. It is strict: "3" in
# place of 3 is an error, too.
validated_dataclass = pydantic.dataclasses.dataclass(config={"strict": True, "extra": "forbid"})

Size = Annotated[int, Field(ge=1, le=2**20)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@validated_dataclass
class BackboneConfig:
    """Settings of the transformer, named as in Hugging Face's LlamaConfig."""

    # tyro shows the comment beside or above a field as the help of its flag. 257 is the vocabulary size of
    # --tokenizer bytes: 256 bytes and the end of text. For bpe, train.new_settings makes it 4096.

    # vocabulary size for --tokenizer bpe (4096 if omitted). Omit it with any other tokenizer, which has its
    # own size (bytes: 257)
    vocab_size: Size = 257
    hidden_size: Size = 128  # model width (D)
    intermediate_size: Size = 344  # width of the SwiGLU MLP
    num_hidden_layers: Annotated[int, Field(ge=1, le=1000)] = 4  # transformer layers
    num_attention_heads: Size = 4  # query heads (H)
    num_key_value_heads: Size | None = None  # key/value heads (G); None: as many as query heads
    head_dim: Size | None = None  # width of a head (d); None: model width / query heads
    # context length in tokens; at most 2**24, since RoPE computes positions in float32
    block_size: Annotated[int, Field(ge=1, le=2**24)] = 64
    rms_norm_eps: Positive = 1e-5  # epsilon of RMSNorm
    rope_theta: Positive = 10_000.0  # base of RoPE's wavelengths
    tie_word_embeddings: bool = False  # use the embedding table as the output head
    # multiplier of the token embeddings; None: sqrt(2.5 D), which gives new embeddings an RMS of 1
    embed_scale: Positive | None = None

    def __post_init__(self):
        D, H, G = self.hidden_size, self.num_attention_heads, self.kv_heads
        if H % G:
            raise ValueError(f"num_key_value_heads = {G}: it must divide num_attention_heads = {H}")
        if self.head_dim is None and D % H:
            raise ValueError(
                f"hidden_size = {D} is not divisible by num_attention_heads = {H}: set --head-dim, too"
            )
        if self.head_width % 2:
            raise ValueError(
                f"head_dim = {self.head_width} (the width of a head) is odd, but RoPE rotates pairs: set an "
                "even one"
            )

    @property
    def kv_heads(self):
        """Number of key/value heads (G)."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self):
        """Width of a head (d)."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def scale(self):
        """Factor on the embeddings. They start with a standard deviation of sqrt(2/(5D)), so sqrt(2.5 D)
        gives them an RMS of 1, like the normalised states that are fed back."""
        return math.sqrt(2.5 * self.hidden_size) if self.embed_scale is None else self.embed_scale


@validated_dataclass
class PonderingConfig:
    """How the model ponders."""

    ponder_steps: Annotated[int, Field(ge=0, le=1000)] = 3  # maximum number of pondering steps per token (K)
    # initial logits of the router: K+1 numbers, one for each number of steps from 0 to K. None: rising
    # linearly from 0 to 6, which favours K steps
    router_offset: tuple[Finite, ...] | None = None
    # two numbers, the lowest and the highest number of refinement passes (R); each training step draws its R
    # from this range, both ends included. A refinement pass recomputes all slots (tokens and their extra
    # steps) in parallel. With more passes, training is slower, but matches more closely what decoding
    # computes
    refinements: tuple[int, int] = (2, 3)
    # how the penalty on steps that tokens do not need is computed (router.bottom_mass_penalty). printed: as
    # printed in the paper, from the mean cross-entropy; at usual losses, this penalty is zero. token: a
    # variant, from the cross-entropy of each token
    penalty: Literal["printed", "token"] = "printed"
    penalty_weight: NonNegative = 0.5  # weight of this penalty (lambda; the paper gives no value)

    def __post_init__(self):
        K = self.ponder_steps
        if len(self.offset) != K + 1:
            raise ValueError(
                f"router_offset = {self.router_offset}: for {K} pondering steps it needs {K + 1} numbers"
            )
        low, high = self.refinements
        if not 0 <= low <= high < 2**31:
            raise ValueError(
                f"refinements = {self.refinements}: give two numbers from 0 to 2**31 - 1, the larger one last"
            )

    @property
    def offset(self):
        """The router starts at s = softmax(offset). The default puts 86 % on step K for K = 3, so at
        first hardly any step is masked (reading note 6)."""
        if self.router_offset is not None:
            return self.router_offset
        K = self.ponder_steps
        return tuple(6 * k / max(K, 1) for k in range(K + 1))


@validated_dataclass
class Config(PonderingConfig, BackboneConfig):
    """All settings of a model, which its config.json keeps."""

    def __post_init__(self):
        BackboneConfig.__post_init__(self)
        PonderingConfig.__post_init__(self)


# -- LLaMA -----------------------------------------------------------------------------------------


def apply_rope(x, cos, sin):
    """RoPE: rotate each pair (x_i, x_{i+d/2}) by its angle.

    Args:
        x: (B, heads, N, d).
        cos, sin: (N, d) or (B, 1, N, d).
    """
    a, b = x.chunk(2, dim=-1)
    rotated = x * cos + torch.cat([-b, a], dim=-1) * sin
    return rotated.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        D = config.hidden_size
        self.H = config.num_attention_heads
        self.G = config.kv_heads
        self.d = config.head_width
        self.q_proj = nn.Linear(D, self.H * self.d, bias=False)
        self.k_proj = nn.Linear(D, self.G * self.d, bias=False)
        self.v_proj = nn.Linear(D, self.G * self.d, bias=False)
        self.o_proj = nn.Linear(self.H * self.d, D, bias=False)

    def forward(self, x, rope, log_w, backend, cache):
        """
        Args:
            x: (B, N, D).
            rope: (cos, sin), from Llama.rope_cos_sin.
            log_w, backend: as in Llama.forward.
            cache: a LayerCache, which takes the place of attention among the N slots, or None.

        Returns:
            (B, N, D).
        """
        B, N, _ = x.shape
        q = self.q_proj(x).view(B, N, self.H, self.d).transpose(1, 2)  # (B, H, N, d)
        k = self.k_proj(x).view(B, N, self.G, self.d).transpose(1, 2)  # (B, G, N, d)
        v = self.v_proj(x).view(B, N, self.G, self.d).transpose(1, 2)  # (B, G, N, d)
        q = apply_rope(q, *rope)
        k = apply_rope(k, *rope)
        if cache is None:
            out = soft_mask_attention(q, k, v, log_w, backend)  # (B, H, N, d)
        else:
            out = cache.attend(q, k, v, log_w)
        return self.o_proj(out.transpose(1, 2).reshape(B, N, -1))  # (B, N, D)


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, rope, log_w, backend, cache):
        x = x + self.self_attn(self.input_layernorm(x), rope, log_w, backend, cache)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Llama(nn.Module):
    # Other transformers (lab/backbones) are subclasses that replace some of these.
    Block = Block
    Norm = nn.RMSNorm
    # The weights whose outputs are added to the residual stream.
    residual_projections = "o_proj.weight", "down_proj.weight"

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.Block(config) for _ in range(config.num_hidden_layers))
        self.norm = self.Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, positions, log_w=None, backend=auto, cache=None):
        """Run the transformer on N slots.

        Args:
            x: (B, N, D), the inputs of the slots.
            positions: (N,) or (B, N), their position ids.
            log_w: (B, N), the bias of their keys; None for plain causal attention.
            backend: the form of attention, see attention.py.
            cache: None, or one object per layer whose `attend(q, k, v, log_w)` takes the place of attention
                among these slots. A LayerCache handles one new slot (N = 1) at a time.

        Returns:
            (B, N, D), after the final norm.
        """
        return self.norm(self.stack(x, positions, log_w, backend, cache))

    def stack(self, x, positions, log_w=None, backend=auto, cache=None):
        """The blocks, without the final norm. Arguments and shapes are those of `forward`. It is a method of
        its own because other transformers (lab/backbones) replace it."""
        rope = self.rope_cos_sin(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache[i]
            x = layer(x, rope, log_w, backend, layer_cache)
        return x

    def rope_cos_sin(self, positions, dtype):
        """cos and sin of RoPE's angles: (N, d) each for positions (N,), and (B, 1, N, d) for (B, N)."""
        angle = positions.float()[..., None] * self.inverse_frequencies(positions.device)  # (.., N, d/2)
        angle = torch.cat([angle, angle], dim=-1)  # (.., N, d)
        if positions.dim() == 2:
            angle = angle[:, None]  # the same for all heads
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def inverse_frequencies(self, device):
        """The angle by which each pair of a head is rotated from one position to the next. (d/2,)"""
        d = self.config.head_width
        return self.config.rope_theta ** -(torch.arange(0, d, 2, device=device) / d)


class LayerCache:
    """Keys and values of the C slots executed so far in one layer, (B, G, C, d') each."""

    def __init__(self):
        self.keys = None
        self.values = None

    def attend(self, q, k, v, log_w):
        """Attention of the newest slot to all so far, its own included. A key keeps its log w as a
        channel."""
        d = q.size(-1)
        q, k, v = augment(q, k, v, log_w)
        self.append(k, v)
        return attend_to_cache(q, self.keys, self.values, d)

    def append(self, k, v):
        if self.keys is None:
            self.keys = k
            self.values = v
        else:
            self.keys = torch.cat([self.keys, k], dim=2)
            self.values = torch.cat([self.values, v], dim=2)


# -- PonderLM-3 ------------------------------------------------------------------------------------


@dataclass
class Output:
    """The result of PonderLM.forward."""

    head: nn.Linear  # maps states to logits
    h_hat: torch.Tensor  # (B, T, D) integrated states, which the head reads
    steps: torch.Tensor  # (B, T) K-hat at the tau of this call; K without one
    h: torch.Tensor  # (B, T, S, D) states
    s: torch.Tensor  # (B, T, S) step distribution
    log_w: torch.Tensor  # (B, T, S) log of the mask score
    ce: torch.Tensor | None = None  # (B, T) cross-entropy in nats, 0 where there is no target
    loss: torch.Tensor | None = None  # its mean over the targets

    @property
    def logits(self):
        """(B, T, V), computed when asked for, because with a large vocabulary they take gigabytes."""
        return self.head(self.h_hat)

    def __repr__(self):
        shapes = {name: tuple(getattr(self, name).shape) for name in ("h_hat", "steps", "h", "s", "log_w")}
        loss = "None" if self.loss is None else f"{self.loss.item():.4f}"
        return f"Output(loss={loss}, " + ", ".join(f"{name}: {shape}" for name, shape in shapes.items()) + ")"


class PonderLM(nn.Module):
    """The model (section 3.2), in its parallel form (`forward`) and token by token (`ponder_token`)."""

    method = "ponderlm3"  # its name in config.json

    def __init__(self, config, backbone=Llama):
        super().__init__()
        self.config = config
        # How the model is run, which is no property of its weights:
        self.backend = auto  # the form of attention
        self.recompute = False  # keep no activations of a pass, but recompute them in the backward pass

        self.model = backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router = Router(config.hidden_size, config.ponder_steps, config.offset)
        self.apply(self.init_weights)
        for name, p in self.model.layers.named_parameters():
            if name.endswith(backbone.residual_projections):
                # Scaled by 1/sqrt(2 L), as in GPT-2, so that the residual stream does not grow with depth.
                p.data /= math.sqrt(2 * config.num_hidden_layers)
        self.tie_head()

    def forward(self, idx, targets=None, *, R=None, tau=None, alpha=0.0):
        """Score a batch of sequences in parallel.

        Args:
            idx: (B, T), token ids.
            targets: (B, T), the tokens that follow them; -100 where there is none to predict.
            R: refinement passes. None: until the latents change by less than a tolerance. The fixed point
                that they approach is what decoding computes.
            tau: None for soft masks. Otherwise keys and states beyond K-hat are removed, as in decoding.
            alpha: shifts the step distribution, see router.py.

        Returns:
            An Output. With targets, its loss is the mean cross-entropy in nats.
        """
        h, s, log_w = self.states(idx, R, tau, alpha)
        steps = stop_step(log_w, tau)
        h_hat = self.integrate(h, s, steps)
        out = Output(head=self.lm_head, h_hat=h_hat, steps=steps, h=h, s=s, log_w=log_w)
        if targets is not None:
            out.ce = self.cross_entropy(h_hat, targets)
            out.loss = out.ce.sum() / (targets != -100).sum().clamp(min=1)
        return out

    def states(self, idx, R=None, tau=None, alpha=0.0):
        """h (B, T, S, D), and s and log_w (B, T, S), of all tokens. Arguments as in `forward`. Methods
        that compute their states otherwise (lab/methods) override this."""
        return self.jacobi(idx, R, tau, alpha)

    # -- The Jacobi iteration (section 3.4.1) ------------------------------------------------------

    def jacobi(self, idx, R=None, tau=None, alpha=0.0, tolerance=None):
        """Compute all states of all tokens in parallel.

        The transformer runs again and again. In each pass, slot k+1 reads the output of slot k from the
        previous pass, slot 0 always reads e, and the keys are biased by the log w of the previous pass.
        The gradient flows through all passes.

        How many passes are enough? Put the K T latents in the order h_1^(0) .. h_1^(K-1), h_2^(0) ... Each
        depends only on embeddings and on the latents before it: through the inputs of the slots that it
        sees, and through the log w of their keys, which is a function of h^(0). So if the first m latents
        are exact before a pass, the first m + 1 are exact after it. The K growing passes make those of token
        1 exact, and K (T-1) refinements all others, so no more refinements are ever run. The final pass then
        has exact inputs, and all its outputs are exact. (With T = 2 and K = 1: pass 1 makes h_1^(0) exact,
        since slot 0 of token 1 sees only itself. In pass 2, slot 1 of token 1 reads it; so h_2^(0), which
        attends to that slot, is exact.)

        Args:
            idx, R, tau, alpha: as in `forward`. With R None, the iteration ends when a pass changes the
                latents by less than the tolerance, or when they are exact.
            tolerance: relative change of the latents, see `has_settled`.

        Returns:
            h (B, T, S, D), s (B, T, S) and log_w (B, T, S) of the last pass.
        """
        e = self.embed(idx)  # (B, T, D)
        B, T, D = e.shape
        K = self.config.ponder_steps
        latents = e.new_empty(B, T, 0, D)  # there is nothing to feed back yet
        key_log_w = None

        # Growing the slots: pass 1 runs slot 0 alone, pass 2 slots 0 and 1, .., pass K slots 0 .. K-1.
        # This is how PonderLM-2 begins (reading note 8).
        for _ in range(K):
            h, s, log_w = self.jacobi_pass(e, latents, key_log_w, alpha)
            # (B, T, 1 .. K, D), one more each time. feed_back returns h itself; e is for other methods.
            latents = self.feed_back(h, e[:, :, None])
            key_log_w = self.mask_keys(log_w, tau)  # (B, T, S)

        # Refining: all slots, in every pass.
        until_exact = K * (T - 1)
        refinements = until_exact if R is None else min(R, until_exact)
        for _ in range(refinements):
            h, s, log_w = self.jacobi_pass(e, latents, key_log_w, alpha)
            previous = latents
            latents = self.feed_back(h[:, :, :K], e[:, :, None])  # (B, T, K, D)
            key_log_w = self.mask_keys(log_w, tau)
            if R is None and has_settled(previous, latents, tolerance):
                return h, s, log_w

        # The final pass, whose outputs count.
        return self.jacobi_pass(e, latents, key_log_w, alpha)

    def jacobi_pass(self, e, latents, key_log_w, alpha):
        """One pass over n slots per token: slot 0 reads e, slots 1 .. n-1 read the latents.

        Args:
            e: (B, T, D).
            latents: (B, T, n-1, D).
            key_log_w: (B, T, S), of which the first n are used; None for no bias.
            alpha: see router.py.

        Returns:
            h (B, T, n, D), s (B, T, S) and log_w (B, T, S).
        """
        x = torch.cat([e[:, :, None], latents], dim=2)  # (B, T, n, D)
        B, T, n, D = x.shape
        # The slots are interleaved: slot k of token t stands at t*n + k. A token's slots share its position.
        positions = torch.arange(T, device=e.device).repeat_interleave(n)  # (T*n,)
        bias = None if key_log_w is None else key_log_w[..., :n].flatten(1)  # (B, T*n)
        h = self.transform(x.view(B, T * n, D), positions, bias)  # (B, T*n, D)
        h = h.view(B, T, n, D)
        s, log_w = self.route(h, alpha)  # (B, T, S) each
        return h, s, log_w

    # -- The parts of a pass -----------------------------------------------------------------------

    def embed(self, idx):
        """Scaled token embeddings. (B, T) -> (B, T, D)

        Raises:
            ValueError: there are no tokens, or more than the context length.
        """
        T = idx.size(1)
        if not 0 < T <= self.config.block_size:
            raise ValueError(
                f"the input has {T} tokens, but this model reads 1 to {self.config.block_size}: shorten it, "
                "or use a model with a larger block_size"
            )
        return self.model.embed_tokens(idx) * self.config.scale

    def transform(self, x, positions, log_w=None, cache=None):
        """The transformer, through the final RMSNorm. (B, N, D) -> (B, N, D), see Llama.forward."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(
                self.model, x, positions, log_w, self.backend, cache,
                use_reentrant=False,
                preserve_rng_state=False,  # nothing in the model is random
            )  # fmt: skip
        return self.model(x, positions, log_w, self.backend, cache)

    def route(self, h, alpha=0.0):
        """Apply the router to h^(0), the first of the n states. (..., n, D) -> s and log_w, (..., S) each."""
        return self.router(h[..., 0, :], alpha)

    def mask_keys(self, log_w, tau=None):
        """The bias of the keys of a token's slots. (..., S) -> (..., S), see router.mask_keys. A method
        without a mask (lab/methods) returns None."""
        return mask_keys(log_w, tau)

    def feed_back(self, h, e):
        """The input of the next slot, given an output h (..., D): h itself, after the final RMSNorm. As in
        PonderLM-2, it is not projected; the paper does not say (reading note 8). The embedding e is not used
        here; other methods (lab/methods) read it again."""
        return h

    # -- From states to predictions (section 3.2.3) ------------------------------------------------

    def integrate(self, h, s, steps):
        """h_hat = sum over k <= K-hat of s_k h^(k), never renormalised.

        Args:
            h: (..., n, D), the states of the first n slots.
            s: (..., n).
            steps: K-hat, a tensor (...) or an integer.

        Returns:
            (..., D).
        """
        slot = torch.arange(s.size(-1), device=s.device)
        last = steps[..., None] if torch.is_tensor(steps) else steps
        s = s.masked_fill(slot > last, 0)
        return (s[..., None] * h).sum(-2).to(h.dtype)

    def cross_entropy(self, states, targets):
        """The loss of each token in nats, 0 where there is no target. (B, T, D) and (B, T) -> (B, T)"""
        logits = upcast(self.lm_head(states)).flatten(0, 1)  # (B*T, V)
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view(targets.shape)

    @torch.no_grad()
    def partial_losses(self, h, s, targets, depths):
        """The losses ce_{t,i} of the partial sums over j <= i of s_j h^(j) (section 3.4.2). As printed,
        these are not renormalised.

        Args:
            h: (B, T, S, D).
            s: (B, T, S).
            targets: (B, T).
            depths: the values of i, n integers in 0..K.

        Returns:
            (B, T, n) in nats, without gradient.
        """
        ce = h.new_empty(*targets.shape, 0, dtype=upcast(h).dtype)  # (B, T, 0), what no depths give
        for i in depths:
            partial = self.integrate(h, s, i)  # (B, T, D)
            ce = torch.cat([ce, self.cross_entropy(partial, targets)[..., None]], dim=-1)
        return ce

    # -- Decoding (section 3.3) --------------------------------------------------------------------

    @torch.no_grad()
    def ponder_token(self, token, position, cache, tau=TAU, alpha=0.0):
        """Read one token: slot 0, the router, then slots 1 .. K-hat, each of which attends to the cache.

        This is what `forward` does for all tokens at once. An executed slot leaves one key and one value per
        layer in the cache. A skipped slot costs nothing and leaves nothing.

        Args:
            token: its id.
            position: its index in the context.
            cache: from `new_cache`. The slots that run here are added to it.
            tau: stop as soon as w_k < tau.
            alpha: see router.py.

        Returns:
            Logits (V,) of the next token, and K-hat, the number of pondering steps executed.
        """
        device = self.lm_head.weight.device
        positions = torch.tensor([position], device=device)  # shared by all slots of the token
        e = self.embed(torch.tensor([[token]], device=device))  # (1, 1, D)
        # log w of slot 0. It is zeros, not None: augment() adds the extra channel only where there is a
        # log w, and all cached keys need the same width.
        fully_visible = e.new_zeros(1, 1)

        h = [self.transform(e, positions, fully_visible, cache)]  # (1, 1, D) per slot
        s, log_w = self.route(torch.stack(h, dim=2), alpha)  # (1, 1, S)
        K_hat = stop_step(log_w, tau)  # (1, 1)
        steps = int(K_hat)
        key_log_w = self.mask_keys(log_w)  # without tau, because a skipped slot leaves no key to hide
        for k in range(1, steps + 1):
            # None: a method of the lab that masks no keys
            bias = fully_visible if key_log_w is None else key_log_w[..., k]  # (1, 1)
            x = self.feed_back(h[-1], e)
            h.append(self.transform(x, positions, bias, cache))
        h_hat = self.integrate(torch.stack(h, dim=2), s[..., : len(h)], K_hat)  # (1, 1, D)
        return self.lm_head(h_hat)[0, 0], steps

    def new_cache(self):
        """An empty cache for `ponder_token`: a LayerCache for each layer."""
        return [LayerCache() for _ in self.model.layers]

    # -- Weights -----------------------------------------------------------------------------------

    def init_weights(self, module):
        """Truncated normal with std sqrt(2/(5D)), the "small init" of Nguyen & Salazar (arXiv 1910.05895),
        since the paper does not say (reading note 8); zero for the router, so that it starts at its
        offset."""
        std = math.sqrt(2 / (5 * self.config.hidden_size))
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
        if isinstance(module, Router):  # `apply` comes here after the router's own Linear
            nn.init.zeros_(module.proj.weight)

    def tie_head(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def param_groups(self, router_rate=1.0):
        """Parameter groups for the optimizer, each with `lr_scale`, a factor on the learning rate.

        Weight decay applies to matrices, but not to vectors, nor to W of the router, which it would pull back
        to its offset.

        Args:
            router_rate: the factor of W. W starts at zero and acts through a softmax. At the learning rate
                of the other weights it hardly moves, and then all tokens take as many steps as the offset
                says.
        """
        router = [p for name, p in self.named_parameters() if name.startswith("router.")]
        others = [p for name, p in self.named_parameters() if not name.startswith("router.")]
        matrices = [p for p in others if p.dim() >= 2]
        vectors = [p for p in others if p.dim() < 2]
        return [
            {"params": matrices, "lr_scale": 1.0},
            {"params": vectors, "lr_scale": 1.0, "weight_decay": 0.0},
            {"params": router, "lr_scale": router_rate, "weight_decay": 0.0},
        ]


def runs_in_half_precision(x):
    """True if computation on x runs in half precision, where iterates never agree to better than 1e-2."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return dtype in (torch.float16, torch.bfloat16)


def has_settled(previous, latents, tolerance=None):
    """True if a pass changed the latents of the batch by less than the tolerance, in relative norm.
    The default tolerance is 1e-2 in half precision, and 1e-4 otherwise."""
    if tolerance is None:
        tolerance = 1e-2 if runs_in_half_precision(latents) else 1e-4
    return upcast(latents - previous).norm() < tolerance * upcast(latents).norm()
