"""Draw figures of trained models.

    python analyze.py curve        loss and K-hat against training steps, also while the training runs
    python analyze.py converge     the Jacobi iteration approaching its fixed point (appendix B)
    python analyze.py buckets      what each pondering step gains for easy and for hard tokens (section 4.3)
    python analyze.py shift        the router shifted to fewer and to more steps (section 4.3)
    python analyze.py tokens       which tokens and words get how many steps (appendix C)
    python analyze.py tau          loss and steps against the early-exit threshold (section 3.3)
    python analyze.py pareto --runs out/a out/b      perplexity against executed steps (section 4.1)

A figure is drawn of the newest run in out/, or of --run; curve and pareto compare several --runs. The
numbers go to <run>/report/<figure>.csv and the drawing to a .png beside it (those of several runs to
out/analyze/).

    code            paper         shape        meaning
    windows                       (W, T+1)     token ids of W windows, with n = W T inputs and as many targets
    steps           K-hat         (n,)         executed pondering steps of each token, at tau
    truncated_ce    CE_i          (n, K+1)     loss in nats with integration truncated after step i and
                                               the weights renormalised to a sum of 1 (reading note 11:
                                               else CE_0 mostly measures how much weight was cut off)
    difficulty      l_t           (n,)         loss before any pondering, from h^(0) alone: truncated_ce[:, 0]
    gain_i          Delta CE_i    (n,)         CE_{i-1} - CE_i, what step i gains

The numbers of a figure are rows, {column: value}. The mean of no tokens is nan.
"""

import csv
import json
import math
import re
import shlex
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from matplotlib import rc
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.text import Text

from checkpoint import newest_run, open_model
from common import (
    UserError,
    atomic_write,
    check_writable,
    command_line,
    read_json,
    user_error_if_unreadable,
)
from data import TOKENIZERS, Windows, is_prepared, open_corpus, pick_tokenizer, read_corpus
from hardware import eval_batch_size
from model import Count, Fraction, validated_dataclass
from router import TAU, stop_step
from sources import SOURCES
from tokenizer import load_tokenizer

BUCKETS = "easy", "medium", "hard"
ALPHAS = -8, -4, -3, -2, -1, 0, 1, 2, 4
# tau = 1 is left out: no step passes it, so that every model takes none.
TAUS = 0, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7
WORDS = "a", "the", "of", "and", "to", "in", "is", "that", "for", "not", "with"
CONVERGE_WINDOWS = 8


# -- What each token costs and takes ---------------------------------------------------------------


@torch.no_grad()
def by_token(model, windows, measure):
    """Measure something of every token.

    Args:
        model: the PonderLM that `measure` runs; its vocabulary decides how many windows fit at once.
        windows: (W, T+1).
        measure: a function from inputs and targets, (B, T) each, to a tuple of tensors (B, T, ..).

    Returns:
        A list with one tensor (n, ..) on the CPU for each tensor of the tuple, n being all tokens.
    """
    batch_size = eval_batch_size(windows.size(1) - 1, model.config.vocab_size, windows.device)
    batches = []
    for batch in windows.split(batch_size):
        batches.append(measure(batch[:, :-1], batch[:, 1:]))
    results = []
    for parts in zip(*batches, strict=True):
        results.append(torch.cat([part.flatten(0, 1).cpu() for part in parts]))
    return results


def losses_by_depth(model, windows, tau):
    """truncated_ce (n, K+1), with soft masks and all K steps; and steps (n,), the last step that decoding at
    tau would execute."""

    def measure(x, y):
        h, s, log_w = model.states(x)
        s = s + 1e-30  # the first ones may have underflowed to 0
        truncated = (s[..., None] * h).cumsum(2) / s.cumsum(-1)[..., None]  # (B, T, K+1, D)
        ce = [model.cross_entropy(state, y) for state in truncated.unbind(2)]
        return torch.stack(ce, dim=-1), stop_step(log_w, tau)

    return by_token(model, windows, measure)


def decoded(model, windows, tau, alpha=0.0):
    """Loss and executed steps of each token as in decoding, hard-stopped at tau. (n,) each"""

    def measure(x, y):
        out = model(x, y, tau=tau, alpha=alpha)
        return out.ce, out.steps

    return by_token(model, windows, measure)


def mean(x):
    return x.double().mean().item()


def by_bucket(difficulty, columns):
    """Yield a row for each third of the tokens by difficulty.

    Args:
        difficulty: (n,).
        columns: {name: (n,)}, of which a row has the means.
    """
    # Sorting twice gives the rank of each token.
    rank = difficulty.argsort(stable=True).argsort()
    bucket = rank * len(BUCKETS) // len(rank)
    for b, name in enumerate(BUCKETS):
        chosen = bucket == b
        row = {"bucket": name, "tokens": int(chosen.sum())}
        for column, values in columns.items():
            row[column] = mean(values[chosen])
        yield row


# -- The numbers of the figures --------------------------------------------------------------------


@torch.no_grad()
def converge(model, windows, most=12):
    """How far R = 0 .. `most` refinements are from the fixed point (appendix B), on the first 8 windows,
    in float64.

    R counts from the end of the growing passes. The fixed point is where a pass no longer changes the
    latents.

    Returns:
        Rows with the RMSE of the latents and of s.
    """
    K = model.config.ponder_steps
    device = windows.device
    if device.type == "mps":  # it has no float64
        device = torch.device("cpu")
    model = deepcopy(model).to(device).double()
    idx = windows[:CONVERGE_WINDOWS, :-1].to(device)
    fixed, fixed_s, _ = model.jacobi(idx, tolerance=1e-14)

    def rmse(a, b):
        """Within each token; then the mean over tokens."""
        return mean((a - b).square().flatten(2).mean(-1).sqrt())

    rows = []
    for R in range(most + 1):
        h, s, _ = model.jacobi(idx, R)
        latents_error = rmse(h[:, :, :K], fixed[:, :, :K])
        rows.append({"refinements": R, "latents": latents_error, "s": rmse(s, fixed_s)})
    return rows


def exponential_fit(n, errors):
    """Fit errors = A L^n by least squares on their logarithms.

    Errors below 1e-12 of the largest are rounding and are left out.

    Returns:
        L, A, and R^2 of the logarithms; nan if fewer than two errors are left.
    """
    n = np.array(n, dtype=float)
    errors = np.array(errors, dtype=float)
    kept = errors > 1e-12 * errors.max()
    if kept.sum() < 2:
        return math.nan, math.nan, math.nan
    x = n[kept]
    y = np.log(errors[kept])
    slope, start = np.polyfit(x, y, 1)
    return math.exp(slope), math.exp(start), np.corrcoef(x, y)[0, 1] ** 2


def buckets(model, windows, tau=TAU):
    """What step i gains, and how many steps are taken, by thirds of the difficulty.

    The difficulty is also the first term of gain_1. So part of the gain of hard tokens is regression to
    the mean (reading note 11).
    """
    truncated_ce, steps = losses_by_depth(model, windows, tau)
    difficulty = truncated_ce[:, 0]
    columns = {"difficulty": difficulty, "steps": steps}
    for i in range(1, truncated_ce.size(1)):
        columns[f"gain_{i}"] = truncated_ce[:, i - 1] - truncated_ce[:, i]
    return list(by_bucket(difficulty, columns))


def shift(model, windows, tau=TAU, alphas=ALPHAS):
    """Steps of each bucket, and how its loss changes, with the router shifted by alpha."""
    truncated_ce, _ = losses_by_depth(model, windows, tau)
    unshifted_loss, _ = decoded(model, windows, tau, alpha=0)
    rows = []
    for alpha in sorted({0, *alphas}):
        loss, steps = decoded(model, windows, tau, alpha)
        columns = {"steps": steps, "change": loss - unshifted_loss}
        for row in by_bucket(truncated_ce[:, 0], columns):
            rows.append({"alpha": alpha, **row})
    return rows


def find_words(pieces):
    """Find the words of a window.

    A word is ASCII letters with no other letter, digit or underscore beside them, and its first token may
    begin with a space. Words that the window cuts, or that share a token with anything else, are left
    out.

    Args:
        pieces: the bytes of each token.

    Yields:
        (word, first, last): the tokens that make up each word.
    """
    text = b"".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces])  # of each token, in bytes
    for match in re.finditer(rb"(?<![\w\x80-\xff])[A-Za-z]+(?![\w\x80-\xff])", text):
        is_cut = match.start() == 0 or match.end() == len(text)
        if is_cut:
            continue
        # The first token that ends after a byte is the one that holds the byte.
        first = int(np.searchsorted(ends, match.start(), "right"))
        last = int(np.searchsorted(ends, match.end() - 1, "right"))
        covered = b"".join(pieces[first : last + 1])
        if covered.removeprefix(b" ") == match[0]:
            yield match[0].decode(), first, last


def show_token(token):
    """The bytes of a token as one readable line."""
    text = token.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def drawable(text):
    """A text in which characters that the figure's font lacks, such as Chinese ones, are spelled out."""
    font = get_font(findfont(FontProperties()))
    return "".join(c if font.get_char_index(ord(c)) else f"U+{ord(c):04X}" for c in text)


def tokens(model, windows, tokenizer, tau=TAU, words=WORDS, least=50):
    """How many steps are taken after tokens and words.

    Args:
        words: which words get a row. The steps after a word are those after its last token.
        least: a token gets a row if it occurs that often.

    Returns:
        Rows for tokens, for words, and for the places in words of several tokens: inside, and at the end.
        In each, share_k is the fraction that takes k steps.
    """
    _, steps = decoded(model, windows, tau)
    K = model.config.ponder_steps
    T = windows.size(1) - 1
    ids = windows[:, :-1].flatten().tolist()
    pieces = {token: tokenizer.decode([token]) for token in sorted(set(ids))}

    # Where in `ids` each of them stands
    token_places = {token: [] for token in pieces}
    for i, token in enumerate(ids):
        token_places[token].append(i)
    word_places = {word: [] for word in words}
    inside = []
    at_end = []
    for start in range(0, len(ids), T):
        window = [pieces[token] for token in ids[start : start + T]]
        for word, first, last in find_words(window):
            if word.lower() in word_places:
                word_places[word.lower()].append(start + last)
            if last > first:
                inside += range(start + first, start + last)
                at_end.append(start + last)

    def row(kind, text, places):
        taken = steps[places]
        shares = {f"share_{k}": mean(taken == k) for k in range(K + 1)}
        return {"kind": kind, "text": text, "tokens": len(places), "steps": mean(taken), **shares}

    rows = []
    for token, places in token_places.items():
        if len(places) >= least:
            rows.append(row("token", show_token(pieces[token]), places))
    if not rows:
        print(f"note: no token occurs {least} times, so none is drawn: use more --windows")
    for word, places in word_places.items():
        rows.append(row("word", word, places))
    rows.append(row("compound", "inside a word", inside))
    rows.append(row("compound", "at its end", at_end))
    return rows


def perplexity(loss):
    return math.exp(loss) if loss < 709 else math.inf  # exp overflows above that


def tau_curve(model, windows, taus=TAUS):
    """Loss, perplexity and steps, hard-stopped at each tau. `change` is the loss minus that with all K
    steps."""
    rows = []
    for tau in sorted({0, *taus}):
        losses, steps = decoded(model, windows, tau)
        loss = mean(losses)
        row = {"tau": tau, "loss": loss, "perplexity": perplexity(loss), "steps": mean(steps)}
        rows.append(row)
    for row in rows:
        row["change"] = row["loss"] - rows[0]["loss"]
    return rows


def pareto(runs):
    """Perplexity against executed steps, as each run scored itself: a row for each finished run.

    `frontier` is 1 if no other run is at least as good in both.

    Raises:
        UserError: there is no finished run, or they were evaluated on different windows.
    """
    rows = []
    evaluated = {}  # what a run was evaluated on -> the last such run
    for run in (Path(run) for run in runs):
        if not (run / "results.json").is_file():
            print(f"skipped, not a finished run: {run}")
            continue
        row, evaluated_on = read_result(run)
        rows.append(row)
        evaluated[evaluated_on] = run
    if not rows:
        raise UserError("there is no finished run among --runs: use --runs out/* for all that are in out/")
    if len(evaluated) > 1:
        which = ", ".join(str(run) for run in evaluated.values())
        raise UserError(
            "these runs were evaluated on different data and cannot be compared: pass runs of the same text, "
            f"tokenizer, --block-size and --eval-windows ({which})"
        )
    for row in rows:
        row["frontier"] = int(not any(is_better(other, row) for other in rows))
    return rows


def read_result(run):
    """The row of a finished run in `pareto`, and what identifies the windows that it was evaluated on.

    Raises:
        UserError: train.json or results.json is damaged.
    """
    content = read_json(run / "train.json")
    results = read_json(run / "results.json")
    with user_error_if_unreadable(f"{run}: train.json or results.json"):
        model_settings = content["model"]
        corpus = content["corpus"]
        loss = float(results["hard"]["loss"])
        row = {
            "run": run.name,
            "method": model_settings["method"],
            "K": int(model_settings["ponder_steps"]),
            "steps": float(results["hard"]["steps"]),
            "loss": loss,
            "perplexity": perplexity(loss),
        }
        count = results.get("windows", content["config"]["eval_windows"])
        evaluated_on = (corpus["val_sha256"], corpus["tokenizer"], model_settings["block_size"], count)
        return row, evaluated_on


def is_better(other, row):
    """True if the other row is at least as good in both steps and perplexity, and not equal."""
    not_more_steps = other["steps"] <= row["steps"]
    not_more_perplexity = other["perplexity"] <= row["perplexity"]
    is_equal = other["steps"] == row["steps"] and other["perplexity"] == row["perplexity"]
    return not_more_steps and not_more_perplexity and not is_equal


def curve(runs):
    """The metrics that each run has logged: a row for each line of log.jsonl.

    Raises:
        UserError: a run has no log, or nothing is logged yet.
    """
    rows = []
    runs = [Path(run) for run in runs]
    folder_names = [run.name for run in runs]
    names = {run: run.name if folder_names.count(run.name) == 1 else str(run) for run in runs}
    for run in runs:
        file = run / "log.jsonl"
        if not file.is_file():
            raise UserError(f"{run} has no log.jsonl: give folders of training runs")
        with user_error_if_unreadable(file):
            for line in file.read_text(encoding="utf-8").splitlines():
                logged = json.loads(line)
                if "ce" in logged or "val" in logged:
                    columns = {key: logged.get(key, math.nan) for key in ("loss", "ce", "K_hat", "val")}
                    rows.append({"run": names[run], "step": logged["step"], **columns})
    if not rows:
        raise UserError("nothing is logged yet: wait until the training has printed its first log line")
    return rows


# -- Drawing ---------------------------------------------------------------------------------------

# Okabe and Ito's colours, which colour-blind people can tell apart.
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
    """The values of one column in the rows that have the `wanted` values. Rows whose number of tokens is 0,
    and whose means are nan, are left out."""
    values = []
    for row in rows:
        is_wanted = all(row[name] == value for name, value in wanted.items())
        if is_wanted and row.get("tokens") != 0:
            values.append(row[key])
    return values


def show_literally(texts):
    """Draw texts as they are. Otherwise, matplotlib reads what stands between two $ as a formula."""
    for text in texts:
        text.set_parse_math(False)


def draw_curve(rows, left, right):
    runs = list(dict.fromkeys(column(rows, "run")))
    for i, run in enumerate(runs):
        color = COLORS[i % len(COLORS)]
        logged = [row for row in rows if row["run"] == run and not math.isnan(row["ce"])]
        evaluated = [row for row in rows if row["run"] == run and not math.isnan(row["val"])]
        left.plot(column(logged, "step"), column(logged, "ce"), color=color, alpha=0.4, linewidth=1)
        steps = column(evaluated, "step")
        left.plot(steps, column(evaluated, "val"), "o-", color=color, markersize=4, label=run)
        right.plot(column(logged, "step"), column(logged, "K_hat"), color=color, label=run)
    left.set(xlabel="training step", ylabel="cross-entropy, nats per token")
    legend = left.legend(title="thin: training; dots: validation")
    show_literally(legend.get_texts())
    right.set(xlabel="training step", ylabel="K-hat: extra steps per token, mean")
    right.set_ylim(bottom=0)


def draw_converge(rows, axes):
    n = column(rows, "refinements")
    for key, name, marker, color in (
        ("latents", "latents h", "o", COLORS[0]),
        ("s", "step distribution s", "s", COLORS[2]),
    ):
        errors = column(rows, key)
        axes.semilogy(n, errors, marker, color=color, label=name)
        L, A, r2 = exponential_fit(n, errors)
        if math.isfinite(L):
            label = f"fit A L^n: L = {L:.3f}, R² = {r2:.4f}"
            axes.semilogy(n, [A * L**i for i in n], "--", color=color, label=label)
    axes.set(xlabel="refinements R", ylabel="RMSE to the fixed point")
    axes.legend(title="the paper's model: L = 0.433, R² = 0.9959")


def draw_buckets(rows, axes):
    gains = [key for key in rows[0] if key.startswith("gain")]
    for b, row in enumerate(rows):
        if row["tokens"]:
            label = f"{row['bucket']}: loss {row['difficulty']:.2f}, {row['steps']:.2f} steps on average"
            places = [i + 0.27 * (b - 1) for i in range(1, len(gains) + 1)]
            heights = [row[key] for key in gains]
            axes.bar(places, heights, 0.25, color=COLORS[b], label=label)
    axes.set(xlabel="step i", ylabel="gain of step i, CE(i-1) - CE(i), nats per token")
    axes.set_xticks(range(1, len(gains) + 1))
    axes.legend(title="thirds by the loss of h^(0) alone, nats")


def draw_shift(rows, axes):
    for bucket, color, marker in zip(BUCKETS, COLORS, "o^s", strict=False):
        steps = column(rows, "steps", bucket=bucket)
        change = column(rows, "change", bucket=bucket)
        axes.plot(steps, change, color=color, marker=marker, label=bucket)
        steps = column(rows, "steps", bucket=bucket, alpha=0)
        change = column(rows, "change", bucket=bucket, alpha=0)
        axes.scatter(steps, change, edgecolor=color, **RING)
    axes.scatter([], [], edgecolor="black", label="alpha = 0, not shifted", **RING)
    axes.set(xlabel="executed steps of these tokens, mean", ylabel="change of their loss, nats per token")
    axes.legend(title="thirds by the loss of h^(0) alone")


def draw_tokens(rows, left, right, most=12):
    steps = column(rows, "steps", kind="token")
    texts = column(rows, "text", kind="token")
    ranked = sorted(zip(steps, texts, strict=True))
    most = min(most, (len(ranked) + 1) // 2)
    fewest_steps = ranked[:most]
    most_steps = ranked[most:][-most:]  # sliced twice, so that no token is in both lists
    for name, part, color in (("fewest", fewest_steps, COLORS[0]), ("most", most_steps, COLORS[2])):
        labels = [f"“{drawable(text)}”" for _, text in part]
        widths = [steps for steps, _ in part]
        left.barh(labels, widths, color=color, label=f"{name} steps")
    left.set(xlabel="executed steps after the token, mean")
    left.tick_params(axis="y", labelsize=7)
    show_literally(left.get_yticklabels())
    left.legend(title="frequent tokens with the", loc="lower right")

    shares = [key for key in rows[0] if key.startswith("share")]
    for text, offset, color in (("inside a word", -0.2, COLORS[3]), ("at its end", 0.2, COLORS[4])):
        heights = []
        for key in shares:
            heights += [100 * share for share in column(rows, key, kind="compound", text=text)]
        places = [k + offset for k in range(len(heights))]
        right.bar(places, heights, 0.38, color=color, label=text)
    right.set(xlabel="executed steps", ylabel="fraction of these tokens, %", xticks=range(len(shares)))
    right.legend(title="tokens of words of several tokens")


def draw_tau(rows, axes):
    steps = column(rows, "steps")
    losses = column(rows, "loss")
    axes.plot(steps, losses, "o-", color=COLORS[0])
    for i, (tau, x, y) in enumerate(zip(column(rows, "tau"), steps, losses, strict=True)):
        is_above = i % 2 == 0  # in turns, since small values of tau lie close together
        axes.annotate(
            f"{tau:g}", (x, y), (0, 6 if is_above else -6), textcoords="offset points", fontsize=8,
            rotation=60, ha="left" if is_above else "right", va="bottom" if is_above else "top",
        )  # fmt: skip
    lowest = min(losses)
    highest = min(max(losses), lowest + 0.05)  # a large tau may cost much more
    if math.isfinite(lowest):
        axes.set_ylim(lowest - 0.25 * (highest - lowest) - 1e-4, lowest + 1.3 * (highest - lowest) + 1e-4)
    axes.set(
        xlabel="executed steps per token, mean; at each point: tau (0 takes all K steps)",
        ylabel="loss, nats per token",
    )
    axes.margins(x=0.1)


def draw_pareto(rows, axes):
    methods = list(dict.fromkeys(column(rows, "method")))
    for i, method in enumerate(methods):
        steps = column(rows, "steps", method=method)
        perplexities = column(rows, "perplexity", method=method)
        marker = "os^Dv"[i % 5]
        axes.plot(steps, perplexities, marker, color=COLORS[i % len(COLORS)], label=method)
        for K, x, y in zip(column(rows, "K", method=method), steps, perplexities, strict=True):
            axes.annotate(f"K = {K}", (x, y), (6, 6), textcoords="offset points", fontsize=7)
    steps = column(rows, "steps", frontier=1)
    perplexities = column(rows, "perplexity", frontier=1)
    axes.scatter(steps, perplexities, edgecolor="#777777", label="on the frontier", **RING)
    axes.set(xlabel="executed extra steps per token, mean", ylabel="perplexity per token")
    axes.legend()
    axes.margins(0.1)


def name_unit(figure, unit):
    """Write `unit` in place of "token" wherever it stands in a figure. A model of bytes has "byte" there."""
    for text in figure.findobj(Text):
        text.set_text(text.get_text().replace("token", unit))


DRAWINGS = {  # title, number of panels, and the function that draws rows into them
    "curve": ("Training", 2, draw_curve),
    "converge": ("How fast the Jacobi iteration reaches its fixed point", 1, draw_converge),
    "buckets": ("What each pondering step gains, for easy and for hard tokens", 1, draw_buckets),
    "shift": ("The router shifted to fewer and to more steps", 1, draw_shift),
    "tokens": ("Which tokens get how many pondering steps", 2, draw_tokens),
    "tau": ("Loss against steps, if pondering stops once the mask score is below tau", 1, draw_tau),
    "pareto": ("Perplexity against executed steps", 1, draw_pareto),
}


# -- The command -----------------------------------------------------------------------------------


@validated_dataclass
class Options:
    figure: tyro.conf.Positional[Literal[tuple(DRAWINGS)]]  # which figure to draw, see above
    run: Path | None = None  # directory of a trained run; None: the newest one in out/
    runs: tuple[str, ...] = ()  # directories of several runs, for curve and pareto
    data: str | None = None  # the text that the run was evaluated on, unless it is pydocs or pysource
    windows: Count | None = None  # validation windows to measure; None: 256, and 8 for converge
    tau: Fraction | None = None  # early-exit threshold; None: 1e-4
    out: Path | None = None  # folder for the results; None: <run>/report, or out/analyze for several runs
    device: str = "auto"  # cpu, cuda or mps; auto is a GPU if there is one, else the CPU


# The flags that each figure uses.
FLAGS_OF_ONE_RUN = {"run", "data", "windows", "out", "device"}
USED_FLAGS = {
    "curve": {"run", "runs", "out"},
    "converge": FLAGS_OF_ONE_RUN,
    "buckets": FLAGS_OF_ONE_RUN | {"tau"},
    "shift": FLAGS_OF_ONE_RUN | {"tau"},
    "tokens": FLAGS_OF_ONE_RUN | {"tau"},
    "tau": FLAGS_OF_ONE_RUN | {"tau"},
    "pareto": {"runs", "out"},
}


MEASURE_RUNS = {"curve": curve, "pareto": pareto}  # the figures of several runs, by what gives their rows


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    check_flags(options)
    if options.figure in MEASURE_RUNS:
        runs = options.runs
        if not runs and options.figure == "curve":
            runs = (options.run or newest_run(),)
        is_of_one = options.figure == "curve" and len(runs) == 1
        out = options.out or (report_folder(runs[0]) if is_of_one else Path("out/analyze"))
        check_writable(out, "use --out with a folder that can be written")
        rows = MEASURE_RUNS[options.figure](runs)
        unit = "token"
    else:
        run = options.run or newest_run()
        out = options.out or report_folder(run)
        check_writable(out, "use --out with a folder that can be written")
        rows, unit = measure_run(run, options)

    title, panels, draw = DRAWINGS[options.figure]
    figure, axes = sheet(title, panels)
    draw(rows, *axes)
    if unit != "token":
        name_unit(figure, unit)
    if options.figure != "curve":
        print_table(rows)
    table_file = out / f"{options.figure}.csv"
    image_file = table_file.with_suffix(".png")
    write_csv(table_file, rows)
    atomic_write(image_file, lambda temporary: figure.savefig(temporary, format="png"))
    print(f"written: {table_file} and {image_file.name}")


def report_folder(run):
    """The folder for the results of a run.

    Raises:
        UserError: there is no such run. Its folder is not made here, since a training would refuse a folder
            that is not empty (checkpoint.check_free).
    """
    if not Path(run).is_dir():
        raise UserError(f"{run} is not a folder: give the directory of a trained run")
    return Path(run, "report")


def check_flags(options):
    """
    Raises:
        UserError: a flag was given that the figure does not use.
    """
    used = USED_FLAGS[options.figure]
    for field in fields(options):
        is_given = field.name != "figure" and getattr(options, field.name) != field.default
        if is_given and field.name not in used:
            names = [name for name in USED_FLAGS if field.name in USED_FLAGS[name]]
            raise UserError(
                f"{options.figure} does not use --{field.name}: omit it (it is for {', '.join(names)})"
            )
    if options.runs and options.run:
        raise UserError("give either --run or --runs, not both")
    if options.figure == "converge" and (options.windows or 0) > CONVERGE_WINDOWS:
        raise UserError(
            f"--windows {options.windows} is too many: converge measures at most {CONVERGE_WINDOWS}"
        )


def measure_run(run, options):
    """Measure what a figure of one run shows.

    Returns:
        The rows of the figure, and what its tokens are called: "byte" if they are single bytes.

    Raises:
        UserError: the model or its text cannot be read, or the model does not ponder.
    """
    model, tokenizer = open_model(run, options.device)
    if model.config.ponder_steps == 0:
        raise UserError(f"{run} is a model without pondering steps: {options.figure} has nothing to draw")
    is_converge = options.figure == "converge"
    count = options.windows or (CONVERGE_WINDOWS if is_converge else 256)
    tau = TAU if options.tau is None else options.tau
    windows = open_windows(run, model.config, count, options.data).to(model.lm_head.weight.device)
    print(f"{run}: {len(windows)} validation windows", flush=True)
    if is_converge:
        rows = converge(model, windows)
    elif options.figure == "buckets":
        rows = buckets(model, windows, tau)
    elif options.figure == "shift":
        rows = shift(model, windows, tau)
    elif options.figure == "tokens":
        rows = tokens(model, windows, tokenizer, tau)
    else:
        rows = tau_curve(model, windows, {*TAUS, tau})
    unit = "byte" if tokenizer.name == "bytes" else "token"
    return rows, unit


def open_windows(run, model_config, count, data=None):
    """The first `count` of the windows that a run was evaluated on, whose order is random but fixed.

    A run may come from a stranger. So a path is never opened just because the run's train.json names it:
    `data` says where the text is, unless it is one of SOURCES.

    Returns:
        (W, T+1), token ids.

    Raises:
        UserError: `data` does not say where the text is, or it is another text.
    """
    file = Path(run, "train.json")
    content = read_json(file)
    with user_error_if_unreadable(file):  # it may also be that of a run of the lab, which has more settings
        config = content["config"]
        preset = config["preset"]
        recorded_data = config["data"]
        tokenizer = config["tokenizer"]
        corpus_before = dict(content["corpus"])
        vocab_size = content["model"]["vocab_size"]  # as asked for; that of config.json is padded
    if data is None:
        if recorded_data not in SOURCES:
            raise UserError(
                f"{run} was trained on {recorded_data!r}. For safety, paths that are stored in a run are not "
                "opened: pass the text with --data"
            )
        data = recorded_data
    if is_prepared(data):
        corpus = read_corpus(Path(data), load_tokenizer(Path(run, "tokenizer.json")))
    else:
        name = pick_tokenizer(preset, data, tokenizer)
        if name not in TOKENIZERS:
            raise foreign_tokenizer(run, data)
        corpus = open_corpus(data, name, vocab_size)
        is_own = corpus.tokenizer.digest == corpus_before.get("tokenizer")
        if config.get("init_from") and not is_own:
            raise foreign_tokenizer(run, data)
    fingerprint = corpus.fingerprint()
    for key in ("val_sha256", "tokenizer"):
        if fingerprint[key] != corpus_before.get(key):
            raise UserError(
                f"{data} is not the text that {run} was evaluated on, or is tokenized "
                "differently: pass the original text with --data"
            )
    val = Windows(corpus.val, model_config.block_size, seed=0)
    return val.stack(0, min(count, val.count))


def foreign_tokenizer(run, data):
    """The UserError for a run of the lab that took its tokenizer from another model."""
    text, folder = shlex.quote(str(data)), shlex.quote(str(run))
    return UserError(
        f"{run} has the tokenizer of another model, so {data} cannot be encoded here: prepare it with python "
        f"-m lab corpus prepare {text} --tokenizer {folder} --to FOLDER, and pass --data FOLDER"
    )


def write_csv(file, rows):
    def write(temporary):
        with open(temporary, "w", newline="", encoding="utf-8") as stream:
            table = csv.DictWriter(stream, list(rows[0]))
            table.writeheader()
            table.writerows(rows)

    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, write)


def print_table(rows):
    """Print the rows in columns. Of many tokens, the ten with the fewest and the ten with the most steps
    are shown."""
    token_rows = [row for row in rows if row.get("kind") == "token"]
    other_rows = [row for row in rows if row.get("kind") != "token"]
    token_rows.sort(key=lambda row: row["steps"])
    shown = token_rows[:10] + token_rows[10:][-10:] + other_rows

    lines = [list(shown[0])]
    for row in shown:
        lines.append([value if isinstance(value, str) else f"{value:.4g}" for value in row.values()])
    widths = [max(len(cell) for cell in cells) for cells in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells))


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python analyze.py", description=__doc__))
