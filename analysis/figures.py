"""The figures and tables of one run. Each is drawn from a frame of numbers that is kept beside it.

measuring.py, convergence.py and words.py make the frame. Here stand what its table shows, columns
or a function that makes the cells, and a function that draws (tables.py).
"""

from dataclasses import fields
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import measuring
from analysis.convergence import convergence_rows, exponential_fit
from analysis.measuring import BUCKETS, by_each
from analysis.tables import COLORS, new_figure, save, save_figure, show, tabulate
from analysis.words import token_rows
from interop import find_model
from model import Count, Given, strict_dataclass
from runtime import UserError, pick_device, write_json
from training.config import Share

PAPER_L = 0.433  # of the paper's own model (appendix C)
PAPER_R2 = 0.9959


@strict_dataclass
class Study:
    """One run and where its figures go: the flags of analyze.py that all its figures have."""

    run: Given | None = None  # directory of a trained model; by default the newest in out/
    windows: Count = 256  # validation windows to measure
    tau: Share | None = None  # where pondering stops; by default where the run scored it
    out: Path | None = None  # where the results go; by default <run>/report
    redraw: bool = False  # from the numbers saved there, without the model
    device: str = "auto"  # auto, cpu, cuda or mps

    needs = "has_router"  # what the method must have, see measuring.open_subject
    reference = None

    def __post_init__(self):
        changed = {f.name for f in fields(self) if getattr(self, f.name) != f.default}
        if (changed := sorted(changed - {"run", "out", "redraw"})) and self.redraw:
            names = ", ".join(f"--{name}" for name in changed)
            raise UserError(f"--redraw takes the saved numbers and cannot follow {names}")
        kept = self.redraw and (self.run or self.out)  # needs no model
        self.path = Path(kept or find_model(self.run))
        name = "report" if (self.path / "train.json").exists() else f"../report-{self.path.name}"
        # Beside a checkpoint, not in it: it may go away, with all that it holds.
        self.out, self.tables = self.out or self.path / name, {}
        if not self.redraw:  # now, rather than after minutes of measuring
            self.out.mkdir(parents=True, exist_ok=True)

    @cached_property
    def subject(self):
        """The model and its text, when they are first needed."""
        device = pick_device(self.device)
        return measuring.open_subject(self.path, self.windows, self.tau, device, self.needs)

    @cached_property
    def measured(self):
        return measuring.measure(self.subject)

    @cached_property
    def difficulties(self):
        """{name: (n,)}: the loss before pondering; with --reference also that of another model."""
        found = {"h(0) alone": self.measured.difficulty}
        if self.reference:
            return found | {"K = 0 model": measuring.reference_losses(self.subject, self.reference)}
        print("note: only the model's own h(0) says what is difficult; --reference RUN, a model")
        print("      trained with --method vanilla, would be a second opinion")
        return found

    def frame(self, name, table, compute, windows=None):
        """The numbers of a figure, computed or as saved; printed as a table."""
        rows = None if self.redraw else compute()
        frame, self.tables[name] = save(self.out, name, rows, table)
        if not self.redraw:
            tokens = self.subject.rows[:windows, 1:].numel()
            about = {"run": str(self.path), "tokens": tokens, "tau": self.subject.tau}
            write_json(self.out / f"{name}.json", about | {"reference": self.reference})
        return frame


# -- The Jacobi iteration (appendix C) -------------------------------------------------------------


def converge_fits(frame):
    """Exponential fits over all refinements -> {"latents": (L, A, R^2), "router": ..}."""
    return {key: exponential_fit(frame.refinements, frame[key]) for key in ("latents", "router")}


def converge_table(frame):
    columns = {"refinements": "refinements:.0f", "RMSE of the latents": "latents:.2e"}
    cells = tabulate(frame, columns | {"RMSE of s": "router:.2e"})
    L, _, r2 = zip(*converge_fits(frame).values(), strict=True)
    cells.loc[len(cells)] = ["L of the fit", *(show(value, ".3f") for value in L)]
    cells.loc[len(cells)] = ["R²", *(show(value, ".4f") for value in r2)]
    return cells


def draw_converge(study, windows=8):  # float64, and many passes: fewer of them
    def compute():
        subject = study.subject
        if not subject.model.config.ponder_steps:
            raise UserError(f"{study.path} has K = 0: nothing is fed back that could converge")
        return convergence_rows(subject.model, subject.rows[:windows, :-1])

    frame = study.frame("converge", converge_table, compute, windows)
    figure, (axes,) = new_figure("refinement passes after the ladder", "RMSE to the fixed point")
    names = {"latents": "latents h", "router": "step distribution s"}
    fits = converge_fits(frame).items()
    for (key, (L, A, r2)), color, marker in zip(fits, COLORS, "os", strict=False):
        n = frame.refinements
        axes.semilogy(n, frame[key], marker, color=color, label=names[key])
        if not np.isnan(L):
            label = f"fit, L = {L:.3f}, R² = {r2:.4f}"
            axes.semilogy(n, [A * L**i for i in n], "--", color=color, linewidth=1, label=label)
    axes.set_title(f"the paper's model: L = {PAPER_L}, R² = {PAPER_R2}", fontsize=9)
    axes.legend(fontsize=8)
    save_figure(figure, study.out / "converge.png")


# -- Where more computation helps (section 4.3) ----------------------------------------------------


def gains(frame):
    """The columns gain_1, gain_2, .. of a frame."""
    return frame.filter(regex=r"^gain_\d+$")


def bucket_table(frame):
    if not frame.bucket.isin(BUCKETS).all():
        raise ValueError(f"a bucket is not one of {BUCKETS}")
    steps = range(1, gains(frame).shape[1] + 1)
    columns = {"difficulty by": "difficulty_by", "bucket": "bucket"}
    columns |= {"tokens": "tokens:.0f", "difficulty": "difficulty:.3f"}
    columns |= {"steps": "steps:.2f"} | {f"ΔCE_{i}": f"gain_{i}:.3f" for i in steps}
    columns |= {f"ΔCE_{i}, not renormalised": f"raw_gain_{i}:.3f" for i in steps}
    return tabulate(frame, columns)


def draw_buckets(study):
    def compute(rows):
        return by_each(study.difficulties, lambda each: rows(study.measured, each))

    frame = study.frame("buckets", bucket_table, lambda: compute(measuring.bucket_rows))
    columns = {"difficulty by": "difficulty_by", "executed steps": "steps:.0f"}
    columns |= {"tokens": "tokens:.0f", "mean difficulty": "difficulty:.3f"}
    stops = study.frame("difficulty", columns, lambda: compute(measuring.difficulty_rows))
    frame, stops = (f[f.tokens > 0].groupby("difficulty_by", sort=False) for f in (frame, stops))
    figure, panels = new_figure("", "", panels=len(frame) + 1)
    for axes, (name, mine) in zip(panels, frame, strict=False):
        places = np.arange(1, gains(mine).shape[1] + 1)
        for bucket, row in zip(mine.bucket, gains(mine).to_numpy(), strict=True):
            b = BUCKETS.index(bucket)
            axes.bar(places + 0.27 * (b - 1), row, 0.25, color=COLORS[b], label=bucket)
        axes.set(xlabel="step i", ylabel="gain of step i, ΔCE_i, nats", title=f"by {name}")
        axes.set_xticks(places)
        axes.legend(title="tokens", fontsize=8)
    for axes in panels[1 : len(frame)]:
        axes.sharey(panels[0])
    for (name, mine), marker, color in zip(stops, "os", COLORS[3:], strict=False):
        panels[-1].plot(mine.steps, mine.difficulty, marker=marker, color=color, label=f"by {name}")
    panels[-1].set(xlabel="executed steps", ylabel="mean difficulty of the tokens, nats")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    panels[-1].legend(fontsize=8)
    save_figure(figure, study.out / "buckets.png")


def shift_table(frame):
    """A line for each alpha; steps and change of the loss of each bucket."""
    cells = [
        f"{show(steps, '.2f')}, {show(change, '.4f')}"
        for steps, change in zip(frame.steps, frame.loss_change, strict=True)
    ]
    keys = ["difficulty_by", "alpha", "all_steps", "bucket"]
    cells = frame[keys].assign(cell=cells).set_index(keys).cell.unstack(sort=False)[[*BUCKETS]]
    cells = cells.rename(columns=lambda bucket: f"{bucket}: steps, Δloss").reset_index()
    cells["alpha"] = [show(alpha, "g") for alpha in cells.alpha]
    cells["all_steps"] = [show(steps, ".2f") for steps in cells.all_steps]
    return cells.rename(columns={"difficulty_by": "difficulty by", "all_steps": "steps"})


def draw_shift(study):
    def compute():
        found = measuring.shifted(study.subject, study.alphas)
        return by_each(study.difficulties, lambda each: measuring.shift_rows(found, each))

    frame = study.frame("shift", shift_table, compute)
    definitions = frame.difficulty_by.unique()
    labels = "executed steps of these tokens", "Δloss to alpha = 0, nats"
    figure, panels = new_figure(*labels, panels=len(definitions))
    for axes, name in zip(panels, definitions, strict=True):
        for bucket, color, marker in zip(BUCKETS, COLORS, "o^s", strict=False):
            mine = frame.query("difficulty_by == @name and bucket == @bucket and tokens > 0")
            axes.plot(mine.steps, mine.loss_change, marker=marker, color=color, label=bucket)
            middle = mine[mine.alpha == 0]
            look = {"marker": marker, "markersize": 11, "markerfacecolor": "white"}
            axes.plot(middle.steps, middle.loss_change, color=color, **look)
        axes.set_title(f"difficulty by {name}; large: alpha = 0")
        axes.legend(title="tokens", fontsize=8)
        axes.sharey(panels[0])
    save_figure(figure, study.out / "shift.png")


# -- Which tokens (appendix D) ---------------------------------------------------------------------


def token_table(frame, most=10):
    """The words; and of the tokens the ones with most and with fewest steps."""
    tokens = frame[frame.kind == "token"].sort_values("steps", ascending=False, kind="stable")
    parts = [frame[frame.kind == "word"], tokens[:most].assign(kind="most steps")]
    parts += [tokens[most:][-most:].assign(kind="fewest steps")]
    shown = pd.concat(parts)
    columns = {"": "kind", "token": "text", "count": "count:.0f"}
    columns |= {"mean steps": "steps:.3f", "pruned": "pruned:.2%"}
    return tabulate(shown.assign(text="“" + shown.text + "”"), columns)


def compound_table(frame):
    inside, at_end = frame.non_terminal_tokens[0], frame.terminal_tokens[0]
    columns = {"steps": "steps:.0f", f"inside, {inside:.0f} tokens": "non_terminal:.2%"}
    columns |= {f"last token of a word, {at_end:.0f}": "terminal:.2%"}
    return tabulate(frame, columns)


def draw_tokens(study):
    @cache
    def compute():
        T, tokenizer = study.subject.rows.size(1) - 1, study.subject.tokenizer
        return token_rows(study.measured, tokenizer, T, study.words, study.least)

    frame = study.frame("tokens", token_table, lambda: compute()[0])
    compound = study.frame("compound", compound_table, lambda: compute()[1])
    figure, (left, right) = new_figure("", "", panels=2)
    named = frame[(frame.kind == "word") & (frame["count"] > 0)]
    names = [f"{text}\n{count:.0f}" for text, count in zip(named.text, named["count"], strict=True)]
    left.bar(names, named.steps, color=COLORS[1])
    left.set(xlabel="word, and how often it comes", ylabel="mean steps after its last token")
    for key, label, place, color in (
        ("non_terminal", "inside a word", -0.2, COLORS[1]),
        ("terminal", "last token of a word", 0.2, COLORS[0]),
    ):
        shares = 100 * compound[key].fillna(0)
        right.bar(compound.steps + place, shares, 0.38, color=color, label=label)
    right.set(xlabel="executed steps", ylabel="% of the tokens", xticks=compound.steps)
    right.legend(fontsize=8)
    save_figure(figure, study.out / "tokens.png")


# -- Where to stop (section 3.3) -------------------------------------------------------------------


def draw_tau(study):
    columns = {"tau": "tau:g", "precision": "precision", "loss": "loss:.4f"}
    columns |= {"perplexity": "perplexity:.4f", "steps": "steps:.2f", "Δloss": "change:+.1e"}
    columns |= {"mean absolute Δloss": "moved:.1e", "chosen by cost": "chosen"}
    frame = study.frame("tau", columns, lambda: measuring.tau_rows(study.subject, study.taus))
    curve = frame[frame.precision == "float32"]
    rounded = frame[frame.precision == "bfloat16"].iloc[0]
    figure, panels = new_figure("tau; 0 at the left edge", "", panels=3)
    ways = {
        "perplexity": "perplexity",
        "steps": "executed steps",
        "moved": "mean absolute Δloss of a token\nto tau = 0, nats",
    }
    for axes, (key, label), color in zip(panels, ways.items(), COLORS, strict=False):
        shown = curve[(curve[key] != 0) | (key == "steps")]  # no 0 on the logarithmic axis
        axes.plot(shown.tau, shown[key], "o-", color=color)
        axes.axvline(rounded.tau, color="#777777", linestyle=":")
        for tau in curve.tau[curve.chosen == 1]:
            axes.axvline(tau, color="#009E73", label="chosen by its cost")
        axes.set_xscale("symlog", linthresh=1e-6)
        axes.set(xlim=(0, 1.3), ylabel=label)
    lowest = curve.perplexity.min()
    panels[0].set_ylim(0.99 * lowest, 1.15 * lowest)  # the rest is of no use to anyone
    panels[2].set_yscale("log")
    label = "what rounding to bfloat16 moves"
    panels[2].axhline(rounded.moved, color="#0072B2", linestyle="--", label=label)
    panels[2].legend(fontsize=8)
    save_figure(figure, study.out / "tau.png")


# -- The penalty's ratio (section 3.4.2) -----------------------------------------------------------


def penalty_table(frame):
    """Means over the batches, depth by depth."""
    columns = {"depth i": "depth:.0f", "mean ce_i": "ce:.3g"}
    columns |= {"rho_i, per token": "rho_token:.3g", "rho_i, printed": "rho_printed:.3g"}
    columns |= {"w_i penalised, per token": "count_token:.3g"}
    columns |= {"w_i penalised, printed": "count_printed:.3g"}
    return tabulate(frame.groupby("depth").mean().reset_index(), columns)


def draw_penalty(study):
    def compute():
        config, T = study.subject.config, study.subject.rows.size(1) - 1
        batch_size = config.micro_batch_size or config.batch_size
        return measuring.penalty_rows(study.measured, T, batch_size)

    frame = study.frame("penalty", penalty_table, compute)
    figure, (axes,) = new_figure("mean cross-entropy ce_i of a batch, nats", "rho_i")
    for form, label, color, marker in (
        ("token", "mean of the tokens' sigmoids", COLORS[0], "o"),
        ("printed", "sigmoid of the mean, as printed", COLORS[1], "^"),
    ):
        look = {"color": color, "markersize": 4, "alpha": 0.6, "label": label}
        axes.semilogy(frame.ce, frame[f"rho_{form}"], marker, **look)
    n = frame.tokens.max()
    axes.axhline(1 / n, color="black", linestyle=":", label=f"one token of a batch of {n:.0f}")
    axes.legend(fontsize=8)
    save_figure(figure, study.out / "penalty.png")


ALL = (draw_converge, draw_buckets, draw_shift, draw_tokens, draw_tau, draw_penalty)
