"""The paper's figures, and the curve over tau, each from a trained model and windows of its validation text.

    python analyze.py converge     the Jacobi iteration approaching its fixed point (appendix B)
    python analyze.py buckets      what each step gains for easy and for hard tokens (section 4.3)
    python analyze.py shift        the router shifted to fewer and to more steps (section 4.3)
    python analyze.py tokens       which tokens and words get how many steps (appendix C)
    python analyze.py tau          loss and steps against where pondering stops (section 3.3)
    python analyze.py pareto --runs out/a out/b      perplexity against executed steps (section 4.1)

Of the newest run in out/, or --run. The numbers go to <run>/report/<figure>.csv, the drawing to .png
beside it (pareto: out/analyze/).

    code         paper         shape        meaning
    windows                    (W, T+1)     token ids; n = W T tokens are read and as many predicted
    steps        K-hat         (n,)         executed steps of each token, at tau
    ce           CE_i          (n, K+1)     loss in nats, integration truncated after step i, renormalised
    difficulty   l_t           (n,)         loss before any pondering, by h^(0) alone: CE_0
    gain_i       Delta CE_i    (n,)         CE_{i-1} - CE_i, what step i gains

A figure's numbers are rows, {column: value}; the mean of no tokens is nan.
"""

import csv
import math
import re
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from matplotlib import rc
from matplotlib.figure import Figure

from data import (
    SOURCES,
    UserError,
    Windows,
    command_line,
    newest_run,
    open_corpus,
    read_json,
    reading,
    write_whole,
)
from model import Count, Share, settings
from router import TAU, stop_step
from sample import open_model
from train import pick_tokenizer, windows_at_a_time

BUCKETS = "easy", "medium", "hard"
ALPHAS = -8, -4, -3, -2, -1, 0, 1, 2, 4
TAUS = 0, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7  # at 1 rounding decides
WORDS = "a", "the", "of", "and", "to", "in", "is", "that", "for", "not", "with"


# -- What each token costs and takes ---------------------------------------------------------------


@torch.no_grad()
def by_token(windows, find):
    """Apply find(x, y) -> tensors (B, T, ..) to batches of windows (W, T+1). -> each (n, ..), on the CPU"""
    size = windows_at_a_time(windows.size(1) - 1, windows.device)
    found = [find(rows[:, :-1], rows[:, 1:]) for rows in windows.split(size)]
    return [torch.cat([x.flatten(0, 1).cpu() for x in part]) for part in zip(*found, strict=True)]


def losses_by_depth(model, windows, tau):
    """With soft masks and all K steps: ce (n, K+1), and where decoding at tau would stop, steps (n,)."""

    def find(x, y):
        h, s, log_w = model.states(x)
        s = s + 1e-30  # the first ones may have underflowed
        truncated = (s[..., None] * h).cumsum(2) / s.cumsum(-1)[..., None]  # (B, T, K+1, D)
        ce = [model.cross_entropy(state, y) for state in truncated.unbind(2)]
        return torch.stack(ce, dim=-1), stop_step(log_w, tau)

    return by_token(windows, find)


def decoded(model, windows, tau, alpha=0.0):
    """Loss and executed steps of each token as decoding has them, hard-stopped at tau. -> (n,), (n,)"""

    def find(x, y):
        out = model(x, y, tau=tau, alpha=alpha)
        return out.ce, out.steps

    return by_token(windows, find)


def mean(x):
    return x.double().mean().item()


def by_bucket(difficulty, columns):
    """Of each third by difficulty: its name, its tokens, and the mean of each column. All (n,)."""
    rank = difficulty.argsort(stable=True).argsort()  # of each token
    bucket = rank * len(BUCKETS) // len(rank)
    for b, name in enumerate(BUCKETS):
        chosen = bucket == b
        yield {"bucket": name, "tokens": int(chosen.sum())} | {k: mean(x[chosen]) for k, x in columns.items()}


# -- The numbers of the figures --------------------------------------------------------------------


@torch.no_grad()
def converge(model, windows, most=12):
    """RMSE to the fixed point of the latents and of s that R = 0 .. `most` refinements leave (appendix B).

    R counts from the end of the ladder. In float64, on the first 8 windows; the fixed point is where a pass
    no longer changes the latents.
    """
    K, device = model.config.ponder_steps, windows.device
    device = "cpu" if device.type == "mps" else device  # which has no float64
    model, idx = deepcopy(model).to(device).double(), windows[:8, :-1].to(device)
    fixed, fixed_s, _ = model.jacobi(idx, tolerance=1e-14)

    def rmse(a, b):  # within each token, and the mean over tokens
        return mean((a - b).square().flatten(2).mean(-1).sqrt())

    rows = []
    for R in range(most + 1):
        h, s, _ = model.jacobi(idx, R)
        latents = rmse(h[:, :, :K], fixed[:, :, :K])
        rows.append({"refinements": R, "latents": latents, "s": rmse(s, fixed_s)})
    return rows


def exponential_fit(n, errors):
    """errors = A L^n by least squares on their logarithms -> L, A and R^2 of the logarithms.

    Errors below 1e-12 of the largest are rounding and left out; nan if fewer than two are left.
    """
    n, errors = np.array(n, dtype=float), np.array(errors, dtype=float)
    kept = errors > 1e-12 * errors.max()
    if kept.sum() < 2:
        return math.nan, math.nan, math.nan
    x, y = n[kept], np.log(errors[kept])
    slope, start = np.polyfit(x, y, 1)
    return math.exp(slope), math.exp(start), np.corrcoef(x, y)[0, 1] ** 2


def buckets(model, windows, tau=TAU):
    """What step i gains, and how many steps are taken, by thirds of the difficulty, which is also the first
    term of gain_1: chance alone makes hard tokens gain (reading note 11)."""
    ce, steps = losses_by_depth(model, windows, tau)
    gains = {f"gain_{i}": ce[:, i - 1] - ce[:, i] for i in range(1, ce.size(1))}
    return [*by_bucket(ce[:, 0], {"difficulty": ce[:, 0], "steps": steps, **gains})]


def shift(model, windows, tau=TAU, alphas=ALPHAS):
    """Steps of each bucket, and how its loss changes, with the router shifted by alpha."""
    ce, _ = losses_by_depth(model, windows, tau)
    found = {alpha: decoded(model, windows, tau, alpha) for alpha in sorted({0, *alphas})}
    unshifted, _ = found[0]
    return [
        {"alpha": alpha, **row}
        for alpha, (loss, steps) in found.items()
        for row in by_bucket(ce[:, 0], {"steps": steps, "change": loss - unshifted})
    ]


def find_words(pieces):
    """Tokens (bytes) of one window -> (word, first, last): the tokens that make up each word.

    A word is ASCII letters with no other letter, digit or underscore beside them, and its first token may
    begin with a space. One that the window cuts, or that shares a token with anything else, is left out.
    """
    ends, text = np.cumsum([len(piece) for piece in pieces]), b"".join(pieces)
    for match in re.finditer(rb"(?<![\w\x80-\xff])[A-Za-z]+(?![\w\x80-\xff])", text):
        first, last = (int(np.searchsorted(ends, i, "right")) for i in (match.start(), match.end() - 1))
        is_cut = match.start() == 0 or match.end() == len(text)
        if not is_cut and b"".join(pieces[first : last + 1]).removeprefix(b" ") == match[0]:
            yield match[0].decode(), first, last


def show_token(token):
    """The bytes of a token as one readable line."""
    text = token.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def tokens(model, windows, tokenizer, tau=TAU, words=WORDS, least=50):
    """Steps after each token that comes `least` times, and after the last token of each of some words;
    and, of words of several tokens, after those inside and those at the end. share_k takes k steps."""
    _, steps = decoded(model, windows, tau)
    x, T, K = windows[:, :-1].flatten().tolist(), windows.size(1) - 1, model.config.ponder_steps
    pieces = {token: tokenizer.decode([token]) for token in sorted({*x})}
    places = {("token", token): [] for token in pieces}  # which tokens a row counts
    places |= {("word", word): [] for word in words}
    places |= {("compound", part): [] for part in ("inside a word", "at its end")}
    for i, token in enumerate(x):
        places["token", token].append(i)
    for start in range(0, len(x), T):
        for word, first, last in find_words([pieces[token] for token in x[start : start + T]]):
            if word.lower() in words:
                places["word", word.lower()].append(start + last)
            if last > first:
                places["compound", "inside a word"] += range(start + first, start + last)
                places["compound", "at its end"].append(start + last)
    return [
        {"kind": kind, "text": show_token(pieces[text]) if kind == "token" else text}
        | {"tokens": len(at), "steps": mean(steps[at])}
        | {f"share_{k}": mean(steps[at] == k) for k in range(K + 1)}
        for (kind, text), at in places.items()
        if kind != "token" or len(at) >= least
    ]


def perplexity(loss):
    return math.exp(loss) if loss < 709 else math.inf


def tau_curve(model, windows, taus=TAUS):
    """Loss, perplexity and steps hard-stopped at each tau; change: of the loss to that of all K steps."""
    rows = []
    for tau in sorted({0, *taus}):
        loss, steps = map(mean, decoded(model, windows, tau))
        rows.append({"tau": tau, "loss": loss, "perplexity": perplexity(loss), "steps": steps})
    return [row | {"change": row["loss"] - rows[0]["loss"]} for row in rows]


def pareto(runs):
    """Perplexity against executed steps, as each run scored itself: a row a run. frontier is 1 where no other
    run has fewer steps or less perplexity without more of the other. UserError: no finished run, or scores
    on different windows."""
    rows, scored = [], {}  # text, tokens, T and number of windows -> a run that was scored on them
    for run in map(Path, runs):
        if not (run / "results.json").is_file():
            print(f"left out, not a finished run: {run}")
            continue
        content, results = read_json(run / "train.json"), read_json(run / "results.json")
        with reading(f"{run}: train.json or results.json"):
            shape, corpus, hard = content["model"], content["corpus"], results["hard"]
            text = corpus["val_sha256"], corpus["tokenizer"], shape["block_size"]
            scored[*text, results.get("windows", content["config"]["eval_windows"])] = run
            row = {"run": run.name, "method": shape["method"], "K": int(shape["ponder_steps"])}
            row |= {"steps": float(hard["steps"]), "loss": float(hard["loss"])}
        rows.append(row | {"perplexity": perplexity(row["loss"])})
    if not rows:
        raise UserError("there is no finished run among --runs; --runs out/* gives all that are in out/")
    if len(scored) > 1:
        which = ", ".join(map(str, scored.values()))
        raise UserError(f"scored on different texts, tokens or numbers of windows: {which}; give alike ones")
    points = [(row["steps"], row["perplexity"]) for row in rows]
    for row, p in zip(rows, points, strict=True):
        row["frontier"] = int(not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points))
    return rows


# -- Drawing ---------------------------------------------------------------------------------------

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLORS = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000"
RING = {"s": 130, "facecolor": "none", "linewidth": 1.5, "zorder": 3}


def sheet(title, panels=1):
    """A figure and its axes."""
    rc("legend", fontsize=8, title_fontsize=8)
    figure = Figure(figsize=(max(5.2 * panels, 6.4), 4.4), layout="constrained", dpi=150)
    figure.suptitle(title)
    axes = figure.subplots(1, panels, squeeze=False, subplot_kw={"axisbelow": True})[0]
    for panel in axes:
        panel.grid(alpha=0.3)
    return figure, axes


def column(rows, key, **wanted):
    """The values of one column, of the rows that have the `wanted` ones; rows of no tokens are left out."""
    chosen = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
    return [row[key] for row in chosen if row.get("tokens") != 0]


def draw_converge(rows, axes):
    n = column(rows, "refinements")
    for key, name, look, color in (("latents", "latents h", "o", 0), ("s", "step distribution s", "s", 2)):
        axes.semilogy(n, column(rows, key), look, color=COLORS[color], label=name)
        L, A, r2 = exponential_fit(n, column(rows, key))
        if math.isfinite(L):
            label = f"fit A L^n: L = {L:.3f}, R² = {r2:.4f}"
            axes.semilogy(n, [A * L**i for i in n], "--", color=COLORS[color], label=label)
    axes.set(xlabel="refinements R", ylabel="RMSE to the fixed point")
    axes.legend(title="the paper's model: L = 0.433, R² = 0.9959")


def draw_buckets(rows, axes):
    gains = [key for key in rows[0] if key.startswith("gain")]
    for b, row in enumerate(rows):
        if row["tokens"]:
            label = f"{row['bucket']}: loss {row['difficulty']:.2f}, {row['steps']:.2f} steps in the mean"
            places = [i + 0.27 * (b - 1) for i in range(1, len(gains) + 1)]
            axes.bar(places, [row[key] for key in gains], 0.25, color=COLORS[b], label=label)
    axes.set(xlabel="step i", ylabel="gain of step i, CE(i-1) - CE(i), nats per token")
    axes.set_xticks(range(1, len(gains) + 1))
    axes.legend(title="thirds by the loss of h^(0) alone, nats")


def draw_shift(rows, axes):
    for bucket, color, marker in zip(BUCKETS, COLORS, "o^s", strict=False):
        x, y = (column(rows, key, bucket=bucket) for key in ("steps", "change"))
        axes.plot(x, y, color=color, marker=marker, label=bucket)
        x, y = (column(rows, key, bucket=bucket, alpha=0) for key in ("steps", "change"))
        axes.scatter(x, y, edgecolor=color, **RING)
    axes.scatter([], [], edgecolor="black", label="alpha = 0, not shifted", **RING)
    axes.set(xlabel="executed steps of these tokens, mean", ylabel="change of their loss, nats per token")
    axes.legend(title="thirds by the loss of h^(0) alone")


def draw_tokens(rows, left, right, most=12):
    ranked = sorted(zip(column(rows, "steps", kind="token"), column(rows, "text", kind="token"), strict=True))
    most = min(most, (len(ranked) + 1) // 2)
    for name, part, color in (("fewest", ranked[:most], 0), ("most", ranked[most:][-most:], 2)):
        labels = [f"“{text}”" for _, text in part]
        left.barh(labels, [steps for steps, _ in part], color=COLORS[color], label=f"{name} steps")
    left.set(xlabel="executed steps after the token, mean")
    left.tick_params(axis="y", labelsize=7)
    for label in left.get_yticklabels():
        label.set_parse_math(False)  # a dollar is a dollar
    left.legend(title="of the frequent tokens, those with the", loc="lower right")
    shares = [key for key in rows[0] if key.startswith("share")]
    for text, place, color in (("inside a word", -0.2, 3), ("at its end", 0.2, 4)):
        bars = [100 * share for key in shares for share in column(rows, key, kind="compound", text=text)]
        right.bar([k + place for k in range(len(bars))], bars, 0.38, color=COLORS[color], label=text)
    right.set(xlabel="executed steps", ylabel="share of these tokens, %", xticks=range(len(shares)))
    right.legend(title="of words of several tokens, those")


def draw_tau(rows, left, right):
    for axes, key, color in ((left, "perplexity", 0), (right, "steps", 2)):
        axes.plot(column(rows, "tau"), column(rows, key), "o-", color=COLORS[color])
        axes.set_xscale("symlog", linthresh=1e-6)
        axes.set(xlabel="tau; 0, at the left edge, takes all K steps", xlim=(0, 1.3))
    lowest = min(column(rows, "perplexity"))
    if math.isfinite(lowest):
        left.set(ylim=(0.99 * lowest, 1.15 * lowest))
    left.set(ylabel="perplexity per token; the axis ends 15 % above the lowest")
    right.set(ylabel="executed steps per token, mean")


def draw_pareto(rows, axes):
    for i, method in enumerate(dict.fromkeys(column(rows, "method"))):
        x, y, K = (column(rows, key, method=method) for key in ("steps", "perplexity", "K"))
        axes.plot(x, y, "os^Dv"[i % 5], color=COLORS[i % len(COLORS)], label=method)
        for k, *at in zip(K, x, y, strict=True):
            axes.annotate(f"K = {k}", at, (6, 6), textcoords="offset points", fontsize=7)
    x, y = (column(rows, key, frontier=1) for key in ("steps", "perplexity"))
    axes.scatter(x, y, edgecolor="#777777", label="on the frontier", **RING)
    axes.set(xlabel="executed extra steps per token, mean", ylabel="perplexity per token")
    axes.legend()
    axes.margins(0.1)


DRAWINGS = {  # title, panels, and what draws rows into them
    "converge": ("How fast the Jacobi iteration reaches its fixed point", 1, draw_converge),
    "buckets": ("What each pondering step gains, for easy and for hard tokens", 1, draw_buckets),
    "shift": ("The router shifted to fewer and to more steps", 1, draw_shift),
    "tokens": ("Which tokens get how many pondering steps", 2, draw_tokens),
    "tau": ("Pondering stops as soon as the mask score is below tau", 2, draw_tau),
    "pareto": ("Perplexity against executed steps", 1, draw_pareto),
}


# -- The command -----------------------------------------------------------------------------------


def open_windows(run, model_config, count, data=None):
    """The first `count` windows, in their fixed random order, that a run was scored on, (W, T+1).

    A run may come from a stranger, so no file is opened because its train.json names it: `data` says
    where the text is, unless it is one of SOURCES. UserError: it does not, or it is another text.
    """
    content = read_json(file := Path(run, "train.json"))
    with reading(file):  # also of a run that the lab began, which has more settings
        preset, named, tokenizer = (content["config"][name] for name in ("preset", "data", "tokenizer"))
        known = dict(content["corpus"])
        vocab_size = content["model"]["vocab_size"]  # as asked for; config.json has it padded
    if data is None and named not in SOURCES:
        raise UserError(f"{run} was trained on {named!r}: no file is opened since a run says so, give --data")
    data = data or named
    corpus = open_corpus(data, pick_tokenizer(preset, data, tokenizer), vocab_size)
    if any(corpus.fingerprint[key] != known.get(key) for key in ("val_sha256", "tokenizer")):
        raise UserError(f"{data} is not the text, or not in the tokens, that {run} was scored on")
    val = Windows(corpus.val, model_config.block_size, seed=0)
    return val.stack(0, min(count, val.count))


def write_csv(file, rows):
    def write(part):
        with open(part, "w", newline="", encoding="utf-8") as stream:
            table = csv.DictWriter(stream, rows[0])
            table.writeheader()
            table.writerows(rows)

    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, write)


def print_table(rows):
    """The rows in columns; of many tokens the ten with the fewest and the ten with the most steps."""
    many = sorted((row for row in rows if row.get("kind") == "token"), key=lambda row: row["steps"])
    rows = many[:10] + many[10:][-10:] + [row for row in rows if row.get("kind") != "token"]
    lines = [[*rows[0]], *([x if isinstance(x, str) else f"{x:.4g}" for x in row.values()] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


@settings
class Options:
    figure: tyro.conf.Positional[Literal[tuple(DRAWINGS)]]  # one of those above
    run: Path | None = None  # directory of a trained model; None: the newest run in out/
    runs: tuple[str, ...] = ()  # directories of trained runs, for pareto
    data: str | None = None  # the text that the run was scored on, where that needs saying
    windows: Count = 256  # validation windows to measure
    tau: Share = TAU  # where pondering stops
    out: Path | None = None  # where the results go; None: <run>/report, of pareto out/analyze
    device: str = "auto"  # auto, cpu, cuda or mps


def main(o: Annotated[Options, tyro.conf.arg(name="")]):
    if o.figure == "pareto":
        rows, out = pareto(o.runs), o.out or Path("out/analyze")
    elif o.runs:
        raise UserError(f"--runs is for pareto; {o.figure} is of one --run")
    else:
        run = o.run or newest_run()
        model, tokenizer = open_model(run, o.device)
        if not model.config.ponder_steps:
            raise UserError(f"{run} is a model without pondering steps: there is nothing to draw")
        windows = open_windows(run, model.config, o.windows, o.data).to(model.lm_head.weight.device)
        print(f"{run}: {len(windows)} validation windows", flush=True)
        measure = {
            "converge": lambda: converge(model, windows),
            "buckets": lambda: buckets(model, windows, o.tau),
            "shift": lambda: shift(model, windows, o.tau),
            "tokens": lambda: tokens(model, windows, tokenizer, o.tau),
            "tau": lambda: tau_curve(model, windows, {*TAUS, o.tau}),
        }
        rows, out = measure[o.figure](), o.out or run / "report"
    title, panels, draw = DRAWINGS[o.figure]
    file, (figure, axes) = out / f"{o.figure}.csv", sheet(title, panels)
    write_csv(file, rows)
    print_table(rows)
    draw(rows, *axes)
    write_whole(file.with_suffix(".png"), lambda part: figure.savefig(part, format="png"))
    print(f"written: {file} and {o.figure}.png")


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, description=__doc__))
