"""The figures and tables of one run: a class each, whose fields are its flags for analyze.py.

measuring.py, convergence.py and words.py make a frame of numbers, which is kept beside the figure.
Here stand what its table shows, columns or a function that makes the cells, and `draw` (tables.py).
"""

from functools import cache, cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
from pydantic import Field

from analysis import measuring
from analysis.convergence import convergence_rows, exponential_fit
from analysis.measuring import BUCKETS, by_each
from analysis.tables import COLORS, new_figure, save, save_figure, show, tabulate
from analysis.words import token_rows
from interop import find_model
from model import Count, Given, strict_dataclass
from runtime import UserError, pick_device
from training.config import Share
from training.validation import TAUS

PAPER_L = 0.433  # of the paper's own model (appendix C)
PAPER_R2 = 0.9959
Alpha = Annotated[float, Field(ge=-1e6, le=1e6)]


@strict_dataclass
class Study:
    """One run and where its figures go: the flags that all figures of one run have."""

    run: Given | None = None  # directory of a trained model; by default the newest in out/
    windows: Count = 256  # validation windows to measure
    tau: Share | None = None  # where pondering stops; by default where the run scored it
    out: Path | None = None  # where the results go; by default <run>/report
    redraw: bool = False  # from the numbers saved there, without the model
    device: str = "auto"  # auto, cpu, cuda or mps

    needs = "has_router"  # what the method must have: see baselines

    def __post_init__(self):
        kept = self.redraw and (self.run or self.out)  # needs no model
        self.path = Path(kept or find_model(self.run))
        self.out, self.tables = self.out or self.path / "report", {}

    @cached_property
    def subject(self):
        """The model and its text, when they are first needed."""
        device = pick_device(self.device)
        found = measuring.open_subject(self.path, self.windows, self.tau, device)
        if not (found.model.config.ponder_steps and getattr(found.model, self.needs)):
            what = {"has_router": "has no router", "iterates": "is not trained by iterating"}
            raise UserError(f"{self.path} is of method {found.model.method}: it {what[self.needs]}")
        return found

    @cached_property
    def measured(self):
        return measuring.measure(self.subject)

    def frame(self, name, table, compute):
        """The numbers of a figure, computed or as saved; printed as a table."""
        rows = None if self.redraw else compute()
        frame, self.tables[name] = save(self.out, name, rows, table)
        return frame


# -- The Jacobi iteration (appendix C) -------------------------------------------------------------


def converge_table(frame):
    columns = {"refinements": "refinements:.0f", "RMSE of the latents": "latents:.2e"}
    cells = tabulate(frame, columns | {"RMSE of s": "router:.2e"})
    fits = [exponential_fit(frame.refinements, frame[key]) for key in ("latents", "router")]
    cells.loc[len(cells)] = ["L of the fit", *(show(L, ".3f") for L, _, _ in fits)]
    cells.loc[len(cells)] = ["R²", *(show(r2, ".4f") for _, _, r2 in fits)]
    return cells


@strict_dataclass
class Converge(Study):
    """The Jacobi iteration approaching its fixed point, with an exponential fit (8 windows)."""

    needs = "iterates"

    def draw(self):
        def compute():
            return convergence_rows(self.subject.model, self.subject.rows[:8, :-1])

        frame = self.frame("converge", converge_table, compute)
        labels = "refinement passes after the ladder", "RMSE to the fixed point"
        (figure, (axes,)), n = new_figure(*labels), frame.refinements
        for key, name, marker, color in (
            ("latents", "latents h", "o", COLORS[0]),
            ("router", "step distribution s", "s", COLORS[1]),
        ):
            axes.semilogy(n, frame[key], marker, color=color, label=name)
            L, A, r2 = exponential_fit(n, frame[key])
            if not np.isnan(L):
                label = f"fit, L = {L:.3f}, R² = {r2:.4f}"
                axes.semilogy(n, [A * L**i for i in n], "--", color=color, linewidth=1, label=label)
        axes.set_title(f"the paper's model: L = {PAPER_L}, R² = {PAPER_R2}", fontsize=9)
        axes.legend(fontsize=8)
        save_figure(figure, self.out / "converge.png")


# -- Where more computation helps (section 4.3) ----------------------------------------------------


def gains(frame):
    """The columns gain_1, gain_2, .. of a frame."""
    return frame.filter(regex=r"^gain_\d+$")


def bucket_table(frame):
    steps = range(1, gains(frame).shape[1] + 1)
    columns = {"difficulty by": "difficulty_by", "bucket": "bucket"}
    columns |= {"tokens": "tokens:.0f", "difficulty": "difficulty:.3f"}
    columns |= {"steps": "steps:.2f"} | {f"ΔCE_{i}": f"gain_{i}:.3f" for i in steps}
    return tabulate(frame, columns)


@strict_dataclass
class Buckets(Study):
    """Which tokens gain by which step, and which of them take it."""

    # a trained model without pondering, on the same text: its losses are a second difficulty
    reference: Given | None = None

    @cached_property
    def difficulties(self):
        """{name: (n,)}: the loss before pondering; with --reference also that of another model."""
        found = {"h(0) alone": self.measured.difficulty}
        if self.reference:
            found["K = 0 model"] = measuring.reference_losses(self.subject, self.reference)
        return found

    def draw(self):
        def compute(rows):
            return by_each(self.difficulties, lambda each: rows(self.measured, each))

        frame = self.frame("buckets", bucket_table, lambda: compute(measuring.bucket_rows))
        columns = {"difficulty by": "difficulty_by", "executed steps": "steps:.0f"}
        columns |= {"tokens": "tokens:.0f", "mean difficulty": "difficulty:.3f"}
        stops = self.frame("difficulty", columns, lambda: compute(measuring.difficulty_rows))
        names = frame.difficulty_by.unique()
        figure, (*panels, last) = new_figure("", "", panels=len(names) + 1)
        for axes, name, marker, color in zip(panels, names, "os", COLORS[3:], strict=False):
            mine = frame.query("difficulty_by == @name and tokens > 0")
            places = np.arange(1, gains(mine).shape[1] + 1)
            for bucket, row in zip(mine.bucket, gains(mine).to_numpy(), strict=True):
                b = BUCKETS.index(bucket)
                axes.bar(places + 0.27 * (b - 1), row, 0.25, color=COLORS[b], label=bucket)
            axes.set(xlabel="step i", ylabel="gain of step i, ΔCE_i, nats", title=f"by {name}")
            axes.set_xticks(places)
            axes.legend(title="tokens", fontsize=8)
            if axes is not panels[0]:
                axes.sharey(panels[0])
            mine = stops.query("difficulty_by == @name and tokens > 0")
            look = {"marker": marker, "color": color, "label": f"by {name}"}
            last.plot(mine.steps, mine.difficulty, **look)
        last.set(xlabel="executed steps", ylabel="mean difficulty of the tokens, nats")
        last.xaxis.get_major_locator().set_params(integer=True)
        last.legend(fontsize=8)
        save_figure(figure, self.out / "buckets.png")


def shift_table(frame):
    """A line for each alpha; steps and change of the loss of each bucket."""
    columns = {"difficulty by": "difficulty_by", "alpha": "alpha:g", "steps": "all_steps:.2f"}
    columns |= {"bucket": "bucket", "of": "steps:.2f", "change": "loss_change:.4f"}
    cells = tabulate(frame, columns).set_index([*columns][:4])
    cells = (cells.of + ", " + cells.change).unstack(sort=False)[[*BUCKETS]]
    return cells.rename(columns=lambda bucket: f"{bucket}: steps, Δloss").reset_index()


@strict_dataclass
class Shift(Buckets):
    """What fewer or more steps do to easy and to hard tokens: the router shifted by alpha."""

    # what the router's logits are shifted by, times the step index
    alphas: tuple[Alpha, ...] = (-8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4)

    def draw(self):
        def compute():
            found = measuring.shifted(self.subject, self.alphas)
            return by_each(self.difficulties, lambda each: measuring.shift_rows(found, each))

        frame = self.frame("shift", shift_table, compute)
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
        save_figure(figure, self.out / "shift.png")


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


@strict_dataclass
class Tokens(Study):
    """Which tokens and words get how many steps; long words, inside and at their end."""

    # words to look for; their steps are those after their last token. The paper has a, the, of
    words: tuple[str, ...] = ("a", "an", "the", "of", "in", "to", "on", "for", "and", "is")

    def draw(self):
        @cache
        def compute():
            T, tokenizer = self.subject.rows.size(1) - 1, self.subject.tokenizer
            return token_rows(self.measured, tokenizer, T, self.words)

        frame = self.frame("tokens", token_table, lambda: compute()[0])
        columns = {"steps": "steps:.0f", "inside a word": "non_terminal:.2%"}
        columns |= {"of tokens": "non_terminal_tokens:.0f", "at its end": "terminal:.2%"}
        columns |= {"of": "terminal_tokens:.0f"}
        compound = self.frame("compound", columns, lambda: compute()[1])
        figure, (left, right) = new_figure("", "", panels=2)
        named = frame[(frame.kind == "word") & (frame["count"] > 0)]
        names = named.text + "\n" + named["count"].astype(int).astype(str)
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
        save_figure(figure, self.out / "tokens.png")


# -- Where to stop (section 3.3) -------------------------------------------------------------------


@strict_dataclass
class Tau(Study):
    """Loss, perplexity and executed steps against tau."""

    taus: tuple[Share, ...] = (0, 1e-6, 1e-5, *reversed(TAUS), 0.7, 1)  # where pondering stops

    def draw(self):
        columns = {"tau": "tau:g", "loss": "loss:.4f", "perplexity": "perplexity:.4f"}
        columns |= {"steps": "steps:.2f", "Δloss": "change:+.1e"}
        columns |= {"mean absolute Δloss": "moved:.1e", "chosen by cost": "chosen"}
        frame = self.frame("tau", columns, lambda: measuring.tau_rows(self.subject, self.taus))
        figure, panels = new_figure("tau; 0 at the left edge", "", panels=3)
        moved = "mean absolute Δloss of a token\nto tau = 0, nats"
        ways = ("perplexity", "perplexity"), ("steps", "executed steps"), ("moved", moved)
        for axes, (key, label), color in zip(panels, ways, COLORS, strict=False):
            axes.plot(frame.tau, frame[key], "o-", color=color, label="hard-stopped at tau")
            for tau in frame.tau[frame.chosen == 1]:
                axes.axvline(tau, color="#009E73", label="chosen by its cost")
            axes.set_xscale("symlog", linthresh=1e-6)
            axes.set(xlim=(0, 1.3), ylabel=label)
        lowest = frame.perplexity.min()
        panels[0].set_ylim(0.99 * lowest, 1.15 * lowest)  # the rest is of no use to anyone
        panels[2].set_yscale("symlog", linthresh=1e-7)
        save_figure(figure, self.out / "tau.png", legend_of=panels[0])


ALL = (Converge, Buckets, Shift, Tokens, Tau)
