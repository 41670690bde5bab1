"""The figures and tables of one run: each from rows of numbers, which are saved beside it.

A row is a dict (tables.py); `study.rows` measures them, or with --redraw reads the saved ones.
"""

import statistics
from dataclasses import fields
from functools import cached_property
from pathlib import Path

import report as pages
from converge import convergence_rows, exponential_fit
from device import pick_device
from measure import (
    BUCKETS,
    bucket_rows,
    difficulty_rows,
    measure,
    open_subject,
    penalty_rows,
    reference_losses,
    shift_rows,
    tau_rows,
)
from run import find_run, write_json
from tables import COLORS, markdown, new_figure, save_figure, save_rows, tabulate
from words import token_rows

PAPER_L = 0.433  # of the paper's own model (appendix C)
PAPER_R2 = 0.9959
WORDS = ("a", "an", "the", "of", "in", "to", "on", "for", "and", "is")  # the paper has a, the, of
TAUS = (0, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1)
ALPHAS = (-8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4)


class Study:
    """One run and where its figures go; the model is loaded when it is first needed."""

    def __init__(self, options, labels=("ponderlm3",), **changed):
        """changed: {flag of the figure: whether it is not at its default}."""
        self.options, self.labels = options, labels
        saved = options.redraw and (options.run or options.out)  # needs no model
        self.path = Path(saved or find_run(options.run))
        name = "report" if (self.path / "train.json").exists() else f"../report-{self.path.name}"
        # Beside a checkpoint, not in it: it may go away, with all that it holds.
        self.out = options.out or self.path / name
        if not options.redraw:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                way_out = "cannot be made a folder; choose another --out"
                raise ValueError(f"{self.out} {way_out} ({error.strerror})") from None
            return
        for field in fields(options):
            if field.name not in ("run", "out", "redraw"):
                changed[field.name] = getattr(options, field.name) != field.default
        if any(changed.values()):
            names = ", ".join(f"--{name}" for name, is_so in changed.items() if is_so)
            raise ValueError(f"--redraw takes the saved numbers and cannot follow {names}")

    @cached_property
    def subject(self):
        o = self.options
        return open_subject(self.path, o.windows, o.tau, pick_device(o.device), self.labels)

    @cached_property
    def measured(self):
        return measure(self.subject)

    @cached_property
    def difficulties(self):
        """The loss before pondering; with --reference also that of a model that cannot ponder."""
        found, other = {"h(0) alone": self.measured.difficulty}, self.options.reference
        if other:
            return found | {"K = 0 model": reference_losses(self.subject, other)}
        print("note: only the model's own h(0) says what is difficult; --reference RUN, a model")
        print("      trained with --method vanilla, would be a second opinion")
        return found

    def rows(self, name, table, compute, windows=None):
        """The numbers of a figure, computed or as saved; printed as a table."""
        if self.options.redraw:
            return save_rows(self.out, name, None, table)
        rows = save_rows(self.out, name, compute(), table)
        tokens = self.subject.rows[:windows, 1:].numel()
        settings = {"run": str(self.path), "tokens": tokens, "tau": self.subject.tau}
        settings["reference"] = getattr(self.options, "reference", None)
        write_json(self.out / f"{name}.json", settings)
        return rows


def number(value, digits=3):
    """A number that a table can show, also where there was nothing to take a mean of."""
    return "-" if value is None else f"{value:.{digits}f}"


# -- The Jacobi iteration (appendix C) -------------------------------------------------------------


def converge_fits(rows):
    """Exponential fits over all refinements -> {"latents": (L, A, R^2), "router": ..}."""
    n = [row["refinements"] for row in rows]
    return {key: exponential_fit(n, [row[key] for row in rows]) for key in ("latents", "router")}


def converge_table(rows):
    lines = [[f"{r['refinements']:.0f}", f"{r['latents']:.2e}", f"{r['router']:.2e}"] for r in rows]
    fits = converge_fits(rows).values()
    lines.append(["L of the fit", *(number(L) for L, _, _ in fits)])
    lines.append(["R²", *(number(r2, 4) for _, _, r2 in fits)])
    return markdown(["refinements", "RMSE of the latents", "RMSE of s"], lines)


def draw_converge(study, windows=8):  # float64, and many passes: fewer of them
    def compute():
        subject = study.subject
        return convergence_rows(subject.model, subject.rows[:windows, :-1])

    rows = study.rows("converge", converge_table, compute, windows)
    figure, (axes,) = new_figure("refinement passes after the ladder", "RMSE to the fixed point")
    n = [row["refinements"] for row in rows]
    names = {"latents": "latents h", "router": "step distribution s"}
    for (key, (L, A, r2)), color, marker in zip(
        converge_fits(rows).items(), COLORS, "os", strict=False
    ):
        axes.semilogy(n, [row[key] for row in rows], marker, color=color, label=names[key])
        if L is not None:
            label = f"fit, L = {L:.3f}, R² = {r2:.4f}"
            axes.semilogy(n, [A * L**i for i in n], "--", color=color, linewidth=1, label=label)
    axes.set_title(f"the paper's model: L = {PAPER_L}, R² = {PAPER_R2}", fontsize=9)
    axes.legend(fontsize=8)
    save_figure(figure, study.out / "converge.png")


# -- Where more computation helps (section 4.3) ----------------------------------------------------


def depths(row, prefix):
    """The columns prefix_0, prefix_1, .. of a row, in order."""
    return [row[key] for key in row if key.startswith(prefix) and key[len(prefix) :].isdigit()]


def bucket_table(rows):
    steps = range(1, len(depths(rows[0], "gain_")) + 1)
    columns = [("difficulty by", "difficulty_by", ""), ("bucket", "bucket", "")]
    columns += [("tokens", "tokens", ".0f"), ("difficulty", "difficulty", ".3f")]
    columns += [("steps", "steps", ".2f"), *((f"ΔCE_{i}", f"gain_{i}", ".3f") for i in steps)]
    columns += [(f"ΔCE_{i}, not renormalised", f"raw_gain_{i}", ".3f") for i in steps]
    return tabulate(rows, columns)


def difficulty_table(rows):
    columns = [("difficulty by", "difficulty_by", ""), ("executed steps", "steps", ".0f")]
    columns += [("tokens", "tokens", ".0f"), ("mean difficulty", "difficulty", ".3f")]
    return tabulate(rows, columns)


def draw_buckets(study):
    rows = study.rows(
        "buckets", bucket_table, lambda: bucket_rows(study.measured, study.difficulties)
    )
    stops = study.rows(
        "difficulty", difficulty_table, lambda: difficulty_rows(study.measured, study.difficulties)
    )
    definitions = list(dict.fromkeys(row["difficulty_by"] for row in rows))
    figure, panels = new_figure("", "", panels=len(definitions) + 1)
    for axes, name in zip(panels, definitions, strict=False):
        for row, color in zip(
            (r for r in rows if r["difficulty_by"] == name), COLORS, strict=False
        ):
            gains, b = depths(row, "gain_"), BUCKETS.index(row["bucket"])
            if row["tokens"]:
                places = [i + 0.27 * (b - 1) for i in range(1, len(gains) + 1)]
                axes.bar(places, gains, 0.25, color=color, label=row["bucket"])
        axes.set(xlabel="step i", ylabel="gain of step i, ΔCE_i, nats", title=f"by {name}")
        axes.set_xticks(range(1, len(gains) + 1))
        axes.legend(title="tokens", fontsize=8)
    for axes in panels[1 : len(definitions)]:
        axes.sharey(panels[0])
    for name, marker, color in zip(definitions, "os", COLORS[3:], strict=False):
        mine = [r for r in stops if r["difficulty_by"] == name and r["tokens"]]
        place = [r["steps"] for r in mine], [r["difficulty"] for r in mine]
        panels[-1].plot(*place, marker=marker, color=color, label=f"by {name}")
    panels[-1].set(xlabel="executed steps", ylabel="mean difficulty of the tokens, nats")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    panels[-1].legend(fontsize=8)
    save_figure(figure, study.out / "buckets.png")


def shift_table(rows):
    """A line for each alpha; steps and change of the loss of each bucket."""
    titles = ["difficulty by", "alpha", "steps", *(f"{b}: steps, Δloss" for b in BUCKETS)]
    lines = {}
    for r in rows:
        start = [r["difficulty_by"], f"{r['alpha']:g}", number(r["all_steps"], 2)]
        line = lines.setdefault((r["difficulty_by"], r["alpha"]), start)
        line.append(f"{number(r['steps'], 2)}, {number(r['loss_change'], 4)}")
    return markdown(titles, lines.values())


def draw_shift(study, alphas=ALPHAS):
    rows = study.rows(
        "shift", shift_table, lambda: shift_rows(study.subject, study.difficulties, alphas)
    )
    definitions = list(dict.fromkeys(row["difficulty_by"] for row in rows))
    labels = "executed steps of these tokens", "Δloss to alpha = 0, nats"
    figure, panels = new_figure(*labels, panels=len(definitions))
    for axes, name in zip(panels, definitions, strict=True):
        for bucket, color, marker in zip(BUCKETS, COLORS, "o^s", strict=False):
            mine = [r for r in rows if (r["difficulty_by"], r["bucket"]) == (name, bucket)]
            mine = [r for r in mine if r["tokens"]]
            place = [r["steps"] for r in mine], [r["loss_change"] for r in mine]
            axes.plot(*place, marker=marker, color=color, label=bucket)
            middle = [r for r in mine if r["alpha"] == 0]
            place = [r["steps"] for r in middle], [r["loss_change"] for r in middle]
            axes.plot(*place, color=color, marker=marker, markersize=11, markerfacecolor="white")
        axes.set_title(f"difficulty by {name}; large: alpha = 0")
        axes.legend(title="tokens", fontsize=8)
        axes.sharey(panels[0])
    save_figure(figure, study.out / "shift.png")


# -- Which tokens (appendix D) ---------------------------------------------------------------------


def token_table(rows, most=10):
    """The words; and of the tokens the ones with most and with fewest steps."""
    tokens = sorted((r for r in rows if r["kind"] == "token"), key=lambda r: -r["steps"])
    shown = [r | {"kind": "most steps"} for r in tokens[:most]]
    shown += [r | {"kind": "fewest steps"} for r in tokens[most:][-most:]]
    shown = [r for r in rows if r["kind"] == "word"] + shown
    shown = [r | {"text": f"“{r['text']}”"} for r in shown]
    columns = [("", "kind", ""), ("token", "text", ""), ("count", "count", ".0f")]
    columns += [("mean steps", "steps", ".3f"), ("pruned", "pruned", ".2%")]
    return tabulate(shown, columns)


def compound_table(rows):
    inside, at_end = rows[0]["non_terminal_tokens"], rows[0]["terminal_tokens"]
    columns = [("steps", "steps", ".0f"), (f"inside, {inside:.0f} tokens", "non_terminal", ".2%")]
    columns += [(f"last token of a word, {at_end:.0f}", "terminal", ".2%")]
    return tabulate(rows, columns)


def draw_tokens(study, names=WORDS, least=50):
    found = []

    def compute(part):
        if not found:
            T, tokenizer = study.subject.rows.size(1) - 1, study.subject.tokenizer
            found.extend(token_rows(study.measured, tokenizer, T, names, least))
        return found[part]

    rows = study.rows("tokens", token_table, lambda: compute(0))
    compound = study.rows("compound", compound_table, lambda: compute(1))
    figure, (left, right) = new_figure("", "", panels=2)
    named = [r for r in rows if r["kind"] == "word" and r["count"]]
    names = [f"{r['text']}\n{r['count']:.0f}" for r in named]
    left.bar(names, [r["steps"] for r in named], color=COLORS[1])
    left.set(xlabel="word, and how often it comes", ylabel="mean steps after its last token")
    for key, place, color in (("non_terminal", -0.2, COLORS[1]), ("terminal", 0.2, COLORS[0])):
        shares = [100 * (r[key] or 0) for r in compound]
        label = {"non_terminal": "inside a word", "terminal": "last token of a word"}[key]
        right.bar([r["steps"] + place for r in compound], shares, 0.38, color=color, label=label)
    right.set(xlabel="executed steps", ylabel="% of the tokens", xticks=range(len(compound)))
    right.legend(fontsize=8)
    save_figure(figure, study.out / "tokens.png")


# -- Where to stop (section 3.3) -------------------------------------------------------------------


def tau_table(rows):
    columns = [("tau", "tau", "g"), ("precision", "precision", ""), ("loss", "loss", ".4f")]
    columns += [("perplexity", "perplexity", ".4f"), ("steps", "steps", ".2f")]
    columns += [("Δloss", "change", "+.1e"), ("mean absolute Δloss", "moved", ".1e")]
    return tabulate(rows, columns)


def draw_tau(study, taus=TAUS):
    rows = study.rows("tau", tau_table, lambda: tau_rows(study.subject, taus))
    curve = [r for r in rows if r["precision"] == "float32"]
    rounded = next(r for r in rows if r["precision"] == "bfloat16")
    figure, panels = new_figure("tau; 0 at the left edge", "", panels=3)
    lowest = min(r["perplexity"] for r in curve)
    ways = {
        "perplexity": "perplexity",
        "steps": "executed steps",
        "moved": "mean absolute Δloss of a token\nto tau = 0, nats",
    }
    for axes, (key, label), color in zip(panels, ways.items(), COLORS, strict=False):
        shown = [r for r in curve if r[key] or key == "steps"]  # no 0 on the logarithmic axis
        axes.plot([r["tau"] for r in shown], [r[key] for r in shown], "o-", color=color)
        axes.axvline(rounded["tau"], color="#777777", linestyle=":")
        axes.set_xscale("symlog", linthresh=1e-6)
        axes.set(xlim=(0, 1.3), ylabel=label)
    panels[0].set_ylim(0.99 * lowest, 1.15 * lowest)  # the rest is of no use to anyone
    panels[2].set_yscale("log")
    label = "what rounding to bfloat16 moves"
    panels[2].axhline(rounded["moved"], color="#0072B2", linestyle="--", label=label)
    panels[2].legend(fontsize=8)
    save_figure(figure, study.out / "tau.png")


# -- The penalty's ratio (section 3.4.2) -----------------------------------------------------------


def penalty_table(rows):
    """Means over the batches, depth by depth."""
    titles = {"ce": "mean ce_i", "rho_token": "rho_i, per token", "rho_batch": "rho_i, printed"}
    titles |= {"count_token": "w_i penalised, per token", "count_batch": "w_i penalised, printed"}
    means = []
    for i in sorted({r["depth"] for r in rows}):
        mine = [r for r in rows if r["depth"] == i]
        means.append({"depth": i} | {key: statistics.mean(r[key] for r in mine) for key in titles})
    columns = [("depth i", "depth", ".0f"), *((title, key, ".3g") for key, title in titles.items())]
    return tabulate(means, columns)


def draw_penalty(study):
    def compute():
        config, T = study.subject.config, study.subject.rows.size(1) - 1
        return penalty_rows(study.measured, T, config.micro_batch_size or config.batch_size)

    rows = study.rows("penalty", penalty_table, compute)
    figure, (axes,) = new_figure("mean cross-entropy ce_i of a batch, nats", "rho_i")
    for form, label, color, marker in (
        ("token", "mean of the tokens' sigmoids", COLORS[0], "o"),
        ("batch", "sigmoid of the mean, as printed", COLORS[1], "^"),
    ):
        place = [r["ce"] for r in rows], [r[f"rho_{form}"] for r in rows]
        axes.semilogy(*place, marker, color=color, markersize=4, alpha=0.6, label=label)
    size = max(r["tokens"] for r in rows)
    axes.axhline(
        1 / size, color="black", linestyle=":", label=f"one token of a batch of {size:.0f}"
    )
    axes.legend(fontsize=8)
    save_figure(figure, study.out / "penalty.png")


# -- A page ----------------------------------------------------------------------------------------


def draw_heatmap(study, text=None):
    file = study.out / "heatmap.json"
    if not study.options.redraw:
        pages.save_text(file, pages.read_text(study.subject, text))
    print(f"written: {pages.heatmap_page(file)}")
