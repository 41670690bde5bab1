"""From a transformer to PonderLM-3 in ten parts, on four words and a small random model.

    python -m docs.tour           all of them
    python -m docs.tour 4 6       these

docs/tour.md tells the story; here is what its parts print. The weights are random: the numbers show
how the parts fit together, not what a trained model does. The states of all parts but the first are
those of the whole model, router and mask included.
"""

from itertools import chain, pairwise
from typing import Literal

import torch
import torch.nn.functional as F
import tyro

from common import command_line
from model import Config, PonderLM
from router import bottom_mass_penalty

WORDS = ["the", "capital", "of", "France", "is", "Paris", "Rome", "."]
TEXT = ["the", "capital", "of", "France"]
K, T, TAU = 2, len(TEXT), 0.2
S = K + 1
EXACT = K * (T - 1)  # refinements after which the Jacobi iteration is exact


def small_model():
    config = Config(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, block_size=8, ponder_steps=K, router_offset=(0.0, 0.0, 0.0),
    )  # fmt: skip
    model = PonderLM(config)
    torch.manual_seed(59)
    for p in model.parameters():  # by numbers that all versions of torch draw alike
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.15)
    torch.nn.init.normal_(model.router.proj.weight, std=0.8)  # a router that is decided
    return model.double().eval(), torch.tensor([[WORDS.index(word) for word in TEXT]])


def table(titles, rows=()):
    """Print columns of 9 characters behind a first one of 14; numbers with three digits."""
    for cells in (titles, *rows):
        cells = [f"{c:.3f}" if isinstance(c, float) else str(c) for c in cells]
        print((f"{cells[0]:14}" + "".join(f"{cell:>9}" for cell in cells[1:])).rstrip())


def by_word(*columns):
    """Rows of a table: each word of TEXT, then its cells of each column or list of columns."""
    for word, *groups in zip(TEXT, *columns, strict=True):
        lists = [group if isinstance(group, list) else [group] for group in groups]
        yield [word, *chain(*lists)]


def small(x):
    return f"{x:.0e}" if x > 1e-12 else "< 1e-12"


def one_after_another(model, idx):
    """All states by definition: slot by slot, each attending to all before it. -> (1, T, S, D)"""
    e, inputs, bias, states = model.embed(idx)[0], [], [], []
    for t in range(T):
        log_w = torch.zeros(S, dtype=e.dtype)  # slot 0 is never masked
        for k in range(S):
            inputs.append(e[t] if k == 0 else states[-1])
            bias.append(log_w[k])
            positions = torch.arange(t + 1).repeat_interleave(S)[: len(inputs)]
            h = model.transform(torch.stack(inputs)[None], positions, torch.stack(bias)[None])
            states.append(h[0, -1])
            if k == 0:
                log_w = model.router(states[-1])[1]
    return torch.stack(states).view(1, T, S, -1)


def passes(model, idx, number):
    """The states (1, T, slots, D) after each pass of the Jacobi iteration."""
    e = model.embed(idx)
    latents, bias = e[:, :, None][:, :, :0], None  # nothing to feed back yet
    for _ in range(number):
        x = torch.cat([e[:, :, None], latents], dim=2)  # (1, T, slots, D)
        positions = torch.arange(T).repeat_interleave(x.size(2))
        log_w = None if bias is None else bias[..., : x.size(2)].flatten(1)
        h = model.transform(x.flatten(1, 2), positions, log_w).view_as(x)
        yield h
        _, log_w = model.route(h)
        latents, bias = model.feed_back(h[:, :, :K], e[:, :, None]), model.mask_keys(log_w)


def transformer(model, idx):
    """A transformer: one state a token, which predicts the next token"""
    h = model.transform(model.embed(idx), torch.arange(T))  # (1, T, D)
    p = model.lm_head(h).softmax(-1)[0]
    print(f"tokens {tuple(idx.shape)} -> states {tuple(h.shape)} -> probabilities of {len(WORDS)}")
    table(["after", *WORDS], by_word(p.tolist()))


def interleave(model, idx):
    """Interleave: S = K + 1 slots a token, room for K of its states"""
    seen = []  # what goes into the transformer in each pass
    hook = model.model.register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    *_, h, _ = passes(model, idx, S + 1)  # h: what the last pass is fed
    hook.remove()
    (x, positions), columns = seen[-1], []
    for slot, t in enumerate(positions[: 3 * S].tolist()):
        known = {"e(x)": model.embed(idx)[0, t], **{f"h({k})": h[0, t, k] for k in range(K)}}
        name = next(name for name, state in known.items() if torch.equal(x[0, slot], state))
        columns.append((TEXT[t], name, slot % S, t))
    for title, *row in zip(("token", "input", "slot", "position"), *columns, strict=True):
        table([title, *row])


def feed_back(model, idx):
    """Feed back: the output of a slot is the input of the next"""
    h = one_after_another(model, idx)[0]
    moved = (h[:, 1:] - h[:, :-1]).norm(dim=-1) / h[:, :-1].norm(dim=-1)  # (T, K)
    table(["change", *(f"to h({k + 1})" for k in range(K))], by_word(moved.tolist()))
    print(f"{T} tokens took {T * S} runs of the transformer, each waiting for the one before")


def jacobi(model, idx):
    """Jacobi: all slots at once, again and again, until the states stand still"""
    exact, rows = one_after_another(model, idx), []
    for n, h in enumerate(passes(model, idx, K * T + 1), start=1):
        states = exact[:, :, : h.size(2)]
        rows.append([f"pass {n}", T * h.size(2), small((h - states).norm() / states.norm())])
    table(["", "slots", "error"], rows)


def router(model, idx):
    """Router: from its first state, each token's distribution over the number of steps"""
    _, s, _ = model.jacobi(idx, EXACT)
    table(["", *(f"s_{k}" for k in range(S))], by_word(s[0].tolist()))


def mask(model, idx):
    """Mask: log w_k on the key of slot k, so that what nobody needs fades out"""
    h, _, log_w = model.jacobi(idx, EXACT)
    titles = ["", *(f"w_{k}" for k in range(S)), *(f"bias {k}" for k in range(S))]
    table(titles, by_word(log_w[0].exp().tolist(), model.mask_keys(log_w)[0].tolist()))
    unmasked = PonderLM(model.config).double()
    unmasked.mask_keys = lambda log_w, tau=None: None
    unmasked.load_state_dict(model.state_dict())
    without = unmasked.jacobi(idx, EXACT)[0]
    moved = (h - without)[0, -1, -1].norm() / h[0, -1, -1].norm()
    print(f"without it the last state would differ by {moved:.0%}")


def integrate(model, idx):
    """Integrate: all states together predict the next token"""
    h, s, _ = model.jacobi(idx, EXACT)
    states = torch.cat([h, model.integrate(h, s, torch.full_like(idx, K))[:, :, None]], dim=2)[
        0, :-1
    ]  # (T-1, S+1, D)
    p = model.lm_head(states).softmax(-1)  # (T-1, S+1, V)
    p = p.gather(-1, idx[0, 1:, None, None].expand(-1, S + 1, 1))[..., 0]
    titles = ["p of the next", *(f"h({k})" for k in range(S)), "h_hat"]
    pairs = zip(pairwise(TEXT), p.tolist(), strict=True)
    table(titles, [[f"{a} {b}", *row] for (a, b), row in pairs])


@torch.enable_grad()
def penalty(model, idx):
    """Penalty: the smallest w are pushed down, of as many tokens as a depth resolves"""
    w = [[0.95, 0.9], [0.9, 0.2], [0.5, 0.1], [0.3, 0.05]]  # made up, as are the losses ce_i
    ce = torch.tensor([[3.0, 2.8, 2.7], [1.5, 0.2, 0.2], [2.0, 0.1, 0.1], [0.3, 0.2, 0.1]])
    log_w = F.pad(torch.tensor(w).log(), (1, 0)).requires_grad_()  # (4, K+1)
    value, rho = bottom_mass_penalty(log_w, ce, "token")
    value.backward()
    print(f"rho = {[round(x, 2) for x in rho.tolist()]}, penalty {value:.3f}")
    pushed = [", ".join(f"w_{k}" for k in (1, 2) if g[k]) for g in log_w.grad.tolist()]
    titles = ["", *(f"ce_{i}" for i in range(S)), "w_1", "w_2", "pushed"]
    table(titles, by_word(ce.tolist(), w, pushed))


def stop(model, idx):
    """Stop: inference runs step k while w_k >= tau"""
    soft, hard = model(idx, R=EXACT), model(idx, R=EXACT, tau=TAU)
    titles = ["", *(f"w_{k}" for k in range(S)), "K-hat"]
    table(titles, by_word(hard.log_w[0].exp().tolist(), hard.steps[0].tolist()))
    run = int((hard.steps + 1).sum())
    gap = (soft.logits.softmax(-1) - hard.logits.softmax(-1)).abs().max()
    print(f"tau = {TAU}: {run} of {T * S} slots run; probabilities move by at most {gap:.3f}")


def cache(model, idx):
    """Cache: token by token, keys of executed slots only, the same function"""
    parallel, keys = model(idx, R=EXACT, tau=TAU), model.new_cache()
    worst, rows = 0, []
    for t, token in enumerate(idx[0].tolist()):
        logits, steps = model.ponder_token(token, t, keys, TAU)
        worst = max(worst, (logits - parallel.logits[0, t]).abs().max().item())
        rows.append([TEXT[t], steps, keys[0].keys.size(2)])
    table(["", "steps", "keys"], rows)
    print(f"logits differ from the parallel form, stopped at tau, by {small(worst)}")


STEPS = (transformer, interleave, feed_back, jacobi, router, mask, integrate, penalty, stop, cache)


Number = Literal[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@torch.no_grad()
def main(steps: tyro.conf.Positional[tuple[Number, ...]] = ()):
    """Print the steps of the tour.

    Args:
        steps: numbers, 1 to 10; by default all
    """
    model, idx = small_model()
    for n in steps or range(1, len(STEPS) + 1):
        step = STEPS[n - 1]
        print(f"{n}. {step.__doc__}\n")
        step(model, idx)
        print()


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m docs.tour"))
