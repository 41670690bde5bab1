"""PonderLM-3: a LLaMA-style transformer that feeds its last state back up to K times per token.

token t:   slot 0      slot 1      ...   slot K         S = K+1 slots share position id t
input      e(x_t)      h_t^(0)     ...   h_t^(K-1)
output     h_t^(0)     h_t^(1)     ...   h_t^(K)        h_hat_t = sum_k s_{t,k} h_t^(k)

code        paper              shape
idx         x_1 .. x_T         (B, T)          token ids
e           e(x_t)             (B, T, D)       scaled token embeddings
h           h_t^(0..K)         (B, T, S, D)    outputs of the S slots, after the final RMSNorm
s, log_w    s_{t,k}, log w     (B, T, S)       see router.py
steps       K-hat_t            (B, T)          pondering steps that are executed
iters       R                  scalar          refinement passes of the Jacobi iteration
"""

import math
from dataclasses import asdict, dataclass, replace
from itertools import count, pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import weights
from attention import MASKED, slot_bias
from config import PONDER, PonderConfig, read_config
from formats import to_llama
from llama import Block, LayerCache, Llama
from router import AlwaysRouter, Router, bottom_mass_penalty, stop_step, upcast


@dataclass
class PonderOutput:
    logits: torch.Tensor  # (B, T, V)
    steps: torch.Tensor  # (B, T) executed pondering steps, K-hat
    s: torch.Tensor  # (B, T, K+1) step distribution
    log_w: torch.Tensor  # (B, T, K+1) log of the mask score
    loss: torch.Tensor | None = None  # ce + penalty_weight * penalty
    ce: torch.Tensor | None = None  # mean cross-entropy in nats
    penalty: torch.Tensor | None = None  # bottom-mass penalty; only in training mode
    rho: torch.Tensor | None = None  # (K+1,) share of tokens resolved at each depth


class PonderLM(nn.Module):
    methods = PONDER  # which values of config.method this class is for

    def __init__(self, config):
        super().__init__()
        if config.method not in self.methods:
            raise ValueError(f"{config.method} is no {type(self).__name__}; use methods.build")
        self.config = config
        self.backend = "auto"  # attention backend; how it runs is no property of the weights
        self.recompute = False  # keep no activations of a pass, compute them again in backward
        D, K = config.hidden_size, config.ponder_steps
        self.model = Llama(config)
        self.lm_head = nn.Linear(D, config.vocab_size, bias=False)
        learned = config.label == "ponderlm3"
        self.router = Router(D, K, config.offset) if learned else AlwaysRouter(K)
        self.router.requires_grad_(config.ablation != "router")  # its weights start at 0
        self.masks = learned  # without a learned router every w is 1 and there is no bias
        self.apply(self._init_weights)
        self._tie()

    def _tie(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _init_weights(self, module):
        """Truncated normal, std sqrt(2/(5D)); layers that write to the residual stream by depth."""
        std = math.sqrt(2 / (5 * self.config.hidden_size))
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
        if isinstance(module, Block):  # after its children
            for linear in (module.self_attn.o_proj, module.mlp.down_proj):
                linear.weight.data /= math.sqrt(2 * self.config.num_hidden_layers)
        if isinstance(module, Router):
            nn.init.zeros_(module.proj.weight)

    def set_offset(self, offset):
        """Move the router's offset, K+1 numbers or None for the default, in the config as well."""
        self.config = replace(self.config, router_offset=offset)
        self.router.offset.copy_(torch.tensor(self.config.offset))

    def embed(self, idx):
        """(B, T) -> (B, T, D), at unit RMS like the normed states that fill the other slots."""
        if not 0 < idx.size(1) <= self.config.block_size:
            raise ValueError(f"{idx.size(1)} tokens; the window is 1 to {self.config.block_size}")
        return self.model.embed_tokens(idx) * self.config.scale

    def feed_back(self, h):
        """Outputs of slots, (..., D), as the next inputs: unchanged, but for a former Llama's."""
        return h if self.config.feedback_scale is None else h * self.config.feedback_scale

    def key_bias(self, log_w, tau=None):
        """Mask scores (..., K+1) -> bias on the keys of the slots; beyond K-hat: not to be seen."""
        seen = torch.zeros_like(log_w) if self.config.ablation == "mask" else log_w
        bias = slot_bias(seen, self.config.printed_mask_index)
        if tau:
            slot = torch.arange(bias.size(-1), device=bias.device)
            bias = bias.masked_fill(slot > stop_step(log_w, tau)[..., None], MASKED)
        return bias

    def passes(self, idx, tau=None, alpha=0.0, without_gradient=0):
        """The Jacobi iteration (section 3.4.1), without end: yields h, s, log_w after each pass.

        Pass 1 runs slot 0 alone, pass 2 slots 0 and 1, and so on: the ladder. From pass K+1 on all
        S slots run, and each pass replaces all latents at once by its outputs:
            h^(0..K) = Transformer([e(x_1), h_1^(0), .., h_1^(K-1), e(x_2), ..])
        where the latents on the right are those of the pass before.
        The first `without_gradient` passes are constants to the backward pass.
        """
        B, T = idx.shape
        e = self.embed(idx)[:, :, None]  # (B, T, 1, D)
        tokens = torch.arange(T, device=idx.device)
        inputs, bias = e, None
        for n in count(1):
            slots = inputs.size(2)
            x = inputs.flatten(1, 2)  # (B, T*slots, D), slot k of token t at t*slots + k
            positions = tokens.repeat_interleave(slots)  # all slots of a token share its position
            with torch.set_grad_enabled(torch.is_grad_enabled() and n > without_gradient):
                h = self.transform(x, positions, bias).view(B, T, slots, -1)
                s, log_w = self.router(h[:, :, 0], alpha)  # again after every pass
            yield h, s, log_w
            inputs = torch.cat([e, self.feed_back(h[:, :, : self.config.ponder_steps])], dim=2)
            if self.masks:
                bias = self.key_bias(log_w, tau)[..., : inputs.size(2)].flatten(1)  # (B, T*slots)

    def transform(self, x, positions, bias=None, norm=True):
        """One pass of the backbone, (B, N, D) -> (B, N, D); its activations are kept, or not."""
        run = self.model if norm else self.model.stack
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(run, x, positions, bias, self.backend, use_reentrant=False)
        return run(x, positions, bias, self.backend)

    def jacobi(self, idx, iters=None, tau=None, alpha=0.0, tolerance=1e-4):
        """All states of all tokens in parallel: K ladder passes, R refinements, one final pass.

        Args:
            idx: (B, T) token ids.
            iters: R. None: in training a draw from config.iters; in evaluation as many as it takes
                for the relative change of the latents to fall below `tolerance`. K (T-1) are
                always enough: each pass settles one more latent of the chain, the ladder's K too.
            tau: None for the soft mask; else the keys of slots k > K-hat are hidden from everyone.
            alpha: shifts the step distribution, see router.py.

        Returns:
            h (B, T, S, D), s (B, T, S), log_w (B, T, S) of the final pass.
        """
        (_, T), K = idx.shape, self.config.ponder_steps
        if iters is not None and iters < 0:
            raise ValueError(f"iters = {iters}: the number of refinement passes R must be >= 0")
        if iters is None and self.training:
            low, high = self.config.iters
            iters = int(torch.randint(low, high + 1, ()))
        last = K * (T - 1) if iters is None else min(iters, K * (T - 1))
        constant = 0
        if self.training and self.config.backprop_passes:
            constant = K + last + 1 - self.config.backprop_passes
        before = None  # the latents that went into pass n; n = -K .. -1 is the ladder
        for n, (h, s, log_w) in enumerate(self.passes(idx, tau, alpha, constant), start=-K):
            if n == last:
                return h, s, log_w
            if iters is None:
                latents = h[:, :, :K].detach().float()
                if n >= 0 and (latents - before).norm() < tolerance * latents.norm():
                    return h, s, log_w
                before = latents

    def states(self, idx, iters=None, tau=None, alpha=0.0):
        """h (B, T, S, D), s and log_w (B, T, S) of all tokens: how one method differs from another.

        The classes of methods.py answer this their own way, and ignore what does not concern them.
        """
        return self.jacobi(idx, iters, tau, alpha)

    def executed(self, log_w, tau):
        """Pondering steps that decoding at tau executes. (..., K+1) -> (...)."""
        return stop_step(log_w, tau or 0)

    def step_weights(self, s, steps=None):
        """What each state counts for in h_hat: s_k up to K-hat, never renormalised.

        s (..., S), steps (...) or None for all -> (..., S).
        """
        if self.config.ablation == "integration":
            steps = torch.full_like(s[..., 0], s.size(-1) - 1) if steps is None else steps
            return F.one_hot(steps.long(), s.size(-1)).to(s.dtype)
        if steps is None:
            return s
        return s.masked_fill(torch.arange(s.size(-1), device=s.device) > steps[..., None], 0)

    def integrate(self, h, s, steps=None):
        """h_hat = sum over k <= K-hat of s_k h^(k) (section 3.2.3).

        h (B, T, S, D), s (B, T, S), steps (B, T) or None for all -> (B, T, D).
        """
        return (self.step_weights(s, steps)[..., None] * h).sum(2).to(h.dtype)

    def token_losses(self, states, targets, rows=8192):
        """Cross-entropy of each token, (B, T, D) and (B, T) -> (B, T), no gradient.

        The head is applied to `rows` tokens at a time, to keep few logits in memory.
        """
        losses = []
        with torch.no_grad():
            for i in range(0, targets.numel(), rows):
                logits = upcast(self.lm_head(states.flatten(0, 1)[i : i + rows]))
                y = targets.flatten()[i : i + rows]
                losses.append(F.cross_entropy(logits, y, reduction="none"))
        return torch.cat(losses).view(targets.shape)

    def forward(self, idx, targets=None, *, iters=None, tau=None, alpha=0.0):
        """Score a batch of sequences in parallel.

        Args:
            idx: (B, T) token ids.
            targets: (B, T) the tokens that follow, -100 where there is none to predict.
            iters: R, see `jacobi`.
            tau: None for soft masks; else hard stopping as in decoding: keys of slots beyond K-hat
                are hidden, and integration stops at K-hat.
            alpha: shifts the step distribution, see router.py.

        Returns:
            PonderOutput. Its loss has the penalty in training mode only.
        """
        h, s, log_w = self.states(idx, iters, tau, alpha)
        steps = self.executed(log_w, tau)
        logits = self.lm_head(self.integrate(h, s, steps))
        out = PonderOutput(logits, steps, s, log_w)
        if targets is None:
            return out
        ce = F.cross_entropy(upcast(logits).flatten(0, 1), targets.flatten(), reduction="none")
        out.ce = out.loss = ce.sum() / (targets != -100).sum()
        if self.training and self.masks and self.config.penalty_weight:
            depths = self.truncated_losses(h, s, targets)  # (B, T, K): depths 0 .. K-1
            depths = torch.cat([depths, ce.detach().view(*targets.shape, 1)], dim=-1)
            valid = targets != -100
            penalty = bottom_mass_penalty(log_w[valid], depths[valid], self.config.penalty)
            out.penalty, out.rho = penalty
            out.loss = out.ce + self.config.penalty_weight * out.penalty
        return out

    def truncated_losses(self, h, s, targets):
        """ce_{t,i} of the partial states h^(<= i) = sum_{j <= i} s_j h^(j), i < K (section 3.4.2).

        Not renormalised, as printed. -> (B, T, K), no gradient.
        """
        with torch.no_grad():
            depths = [torch.full_like(targets, i) for i in range(self.config.ponder_steps)]
            partial = [self.integrate(h, s, i) for i in depths]
        return torch.stack([self.token_losses(state, targets) for state in partial], dim=-1)

    def new_cache(self):
        """What `ponder_token` keeps of the tokens before: one LayerCache a layer."""
        return [LayerCache() for _ in self.model.layers]

    def place(self, token, position):
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
            logits (V,) of the next token, and K-hat, the pondering steps executed (section 3.3).
        """
        x, positions = self.place(token, position)  # all slots of a token share its position
        unmasked = torch.zeros(1, 1, device=x.device) if self.masks else None
        h = self.model(x, positions, unmasked, cache=cache)
        s, log_w = self.router(h, alpha)  # (1, 1, K+1)
        bias, steps = self.key_bias(log_w), self.executed(log_w, tau)
        s = self.step_weights(s, steps)
        h_hat = s[..., :1] * h
        for k in range(1, int(steps) + 1):  # stop as soon as w_k < tau
            x = self.feed_back(h)
            h = self.model(x, positions, bias[..., k] if self.masks else None, cache=cache)
            h_hat = h_hat + s[..., k : k + 1] * h
        return self.lm_head(h_hat.to(h.dtype))[0, 0], int(steps)

    @classmethod
    def from_pretrained(cls, directory):
        """A model from a directory of weights (weights.py), in float32 on the CPU, to evaluate.

        Raises:
            FileNotFoundError, ValueError: as read_config and weights.read_tensors; or tensors that
                do not fit the config.
        """
        config, tensors = read_config(directory), dict(weights.read_tensors(directory))
        table, head = (tensors.get(f"{x}.weight") for x in ("model.embed_tokens", "lm_head"))
        if config.tie_word_embeddings and table is not None:
            if head is not None and not torch.equal(head, table):
                raise ValueError(f"{directory}: tie_word_embeddings, but lm_head.weight differs")
            tensors["lm_head.weight"] = table
        with torch.device("meta"):  # the tensors that were read become its parameters
            model = cls(config)
        if wrong := weights.differences(tensors, model.state_dict()):
            raise ValueError(f"{directory}: the tensors do not fit config.json: {wrong}")
        model.load_state_dict(tensors, assign=True)
        model._tie()
        return model.eval()

    def save_pretrained(self, directory, exact=False):
        """Write config.json and model.safetensors.

        With K = 0 that is a Llama, which transformers.LlamaForCausalLM.from_pretrained loads, too.
        It has the embedding scale in its table. `exact` keeps the two apart, for training to go on.
        """
        config, tensors = asdict(self.config), self.state_dict()
        if self.config.label == "vanilla" and not exact:
            config, tensors = to_llama(config | {"embed_scale": self.config.scale}, tensors)
        else:
            config = {"format": weights.FORMAT, **config}
            if self.config.tie_word_embeddings:
                del tensors["lm_head.weight"]
        weights.write_directory(directory, config, tensors)


if __name__ == "__main__":
    torch.manual_seed(0)
    config = PonderConfig(vocab_size=257, router_offset=(0, 0, 0, 0))
    model, idx = PonderLM(config).double().eval(), torch.randint(257, (2, 32))
    K, T = config.ponder_steps, idx.size(1)
    with torch.no_grad():
        iterates = [
            h for (h, _, _), _ in zip(model.passes(idx), range(K + K * T + 1), strict=False)
        ]
        exact = iterates[-1][:, :, :K]
        print(f"Jacobi iteration, random weights, K = {K}, T = {T}, float64: after the ladder of")
        print(f"{K} passes, {K * (T - 1)} refinements settle every latent exactly.\n")
        print("refinements  relative RMSE to the fixed point    contraction")
        errors = [(h[:, :, :K] - exact).norm() / exact.norm() for h in iterates[K - 1 :]]
        for n, (error, following) in enumerate(pairwise(errors)):
            if n <= 12 or n % 15 == 0:
                print(f"{n:11d}  {error:29.2e}    {following / max(error, 1e-300):11.2f}")
        print(f"\n{K * (T - 1):11d}  {errors[K * (T - 1)]:29.2e}")
