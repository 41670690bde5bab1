"""From trained runs to comparable rows, and from rows to files, tables and curves.

run         what a finished run directory holds (run.py)
group       runs that differ in nothing but their seed
row         one line of a table: a dict, saved as CSV, from which every figure can be redrawn
"""

import csv
import statistics
from dataclasses import dataclass
from pathlib import Path

from config import BELONGS_TO, PonderConfig, read_config
from run import read_results
from settings import TrainConfig, read_run

NAMES = {
    "ponderlm3": "PonderLM-3",
    "ponderlm2": "PonderLM-2",
    "vanilla": "vanilla",
    "looped": "LoopedLM",
    "pause": "Pause",
    "ponderlm1": "PonderLM-1",
    "mor-expert": "MoR, expert choice",
    "mor-token": "MoR, token choice",
}
# Okabe and Ito's colours, which the colour-blind can tell apart, one for each method; its variants
# share it and have markers and lines of their own.
COLORS = ["#D55E00", "#0072B2", "#000000", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777"]
MARKERS, LINES = "os^DvpPX", ("-", "--", ":", "-.")
# Settings that change neither what is learned nor how it is scored; `group_runs` knows the seed.
IRRELEVANT = {"preset", "name", "out", "resume", "seed", "data", "tokenizer", "model", "log_every"}
IRRELEVANT |= {"eval_every", "device", "precision", "backend", "compile", "recompute"}
# Settings that say which method it is; all others should be the same in a comparison.
OF_METHOD = set(BELONGS_TO) | {"ponder_steps", "iters", "tau"}
DEFAULTS = vars(TrainConfig()) | vars(PonderConfig())


@dataclass
class Run:
    path: Path
    config: TrainConfig
    shape: PonderConfig  # of the trained model
    corpus: dict
    results: dict

    @property
    def settings(self):
        """What could matter of the settings beside label and seed, {name: value}."""
        left_out = IRRELEVANT | {"method", "router"}
        if self.shape.label not in ("ponderlm3", "ponderlm2"):
            left_out |= {"iters"}
        found = vars(self.config) | vars(self.config.model)
        return {name: value for name, value in found.items() if name not in left_out}


def read_runs(directories, redraw=False):
    """The finished ones among some runs; the others are named. To redraw none are needed: [].

    Raises:
        ValueError: none is finished, or a run is damaged; or runs are given to redraw from.
    """
    if redraw and directories:
        raise ValueError("--redraw takes the saved numbers and --runs makes new ones; give one")
    if redraw:
        return []
    runs = []
    for path in map(Path, directories):
        if not (path / "results.json").is_file():
            print(f"left out, not a finished run: {path}")
            continue
        _, config, corpus = read_run(path)
        run = Run(path, config, read_config(path), corpus, read_results(path))
        if run.results["hard"]["steps"] > run.shape.ponder_steps:
            raise ValueError(f"{path}/results.json: more steps than its {run.shape.ponder_steps}")
        runs.append(run)
    if not runs:
        raise ValueError("no finished run among those given; train one: python train.py")
    return runs


def brief(value, others):
    """A setting in few digits, if that tells it from the others."""
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.4g}"
    others = [other for other in others if isinstance(other, float) and other != value]
    return str(value) if short in [f"{other:.4g}" for other in others] else short


def group_runs(runs):
    """{(name, K): runs that differ in their seed alone}, names in the order of NAMES.

    The name says what is not at its default, of a method's own settings and of those in which its
    runs with the same K differ: 'PonderLM-3, penalty_weight 0'.

    Raises:
        ValueError: the same settings and seed twice.
    """
    groups = {}
    for label, name in NAMES.items():
        mine = sorted(
            (r for r in runs if r.shape.label == label), key=lambda r: r.shape.ponder_steps
        )
        named = set(BELONGS_TO) - {"router"}
        for run in mine:
            for other in mine:
                if run.shape.ponder_steps == other.shape.ponder_steps:
                    named |= {k for k, v in run.settings.items() if v != other.settings[k]}
        for run in mine:
            special = [k for k in sorted(named) if run.settings[k] != DEFAULTS[k]]
            values = {k: brief(run.settings[k], [r.settings[k] for r in mine]) for k in special}
            variant = "".join(f", {k} {value}" for k, value in values.items())
            group = groups.setdefault((name + variant, run.shape.ponder_steps), [])
            for other in group:
                if other.config.seed == run.config.seed:
                    same = f"{other.path} and {run.path} are the same training"
                    raise ValueError(f"{same}: method, settings and seed; give one of them")
            group.append(run)
    return groups


def check_comparable(runs):
    """Name what differs between the runs beside the method, which a comparison should not have.

    Raises:
        ValueError: they are scored on different texts, or windows of them.
    """
    first, odd = runs[0], {}
    for run in runs:
        for what, a, b in (
            ("corpora", first.corpus, run.corpus),
            ("windows", first.shape.block_size, run.shape.block_size),
            ("numbers of windows", first.config.eval_windows, run.config.eval_windows),
        ):
            if a != b:
                raise ValueError(f"{first.path} and {run.path} are scored on different {what}")
        for name, value in run.settings.items():
            if name not in OF_METHOD and value != first.settings.get(name, value):
                odd.setdefault(name, {str(first.settings[name])}).add(str(value))
    for name, values in odd.items():
        print(f"note: the runs differ in {name}, too: {', '.join(sorted(values))}")


def mean_std(values):
    """Mean, and standard deviation, which one value does not have: None."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def show(mean, std, digits):
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


# -- Saved numbers ---------------------------------------------------------------------------------


def write_csv(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_csv(file):
    """What write_csv wrote: numbers as float, nothing as None, other text as it is."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: draw it once without --redraw")

    def value(text):
        try:
            return float(text) if text else None
        except ValueError:
            return text

    with open(file, newline="", encoding="utf-8") as stream:
        return [{name: value(text) for name, text in row.items()} for row in csv.DictReader(stream)]


def markdown(titles, rows):
    lines = [titles, ["---"] * len(titles), *rows]
    lines = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def tabulate(rows, columns):
    """Rows as a table. columns: (title, key, format), where a row may have None: '-'."""

    def cell(value, form):
        return "-" if value is None else f"{value:{form}}"

    titles, keys, forms = zip(*columns, strict=True)
    cells = [[cell(r[k], form) for k, form in zip(keys, forms, strict=True)] for r in rows]
    return markdown(titles, cells)


def save_rows(out, name, rows, table):
    """Save rows, or without any take the saved ones; print them as a table -> the rows.

    Raises:
        FileNotFoundError, ValueError: nothing was saved, or it is damaged.
    """
    file = out / f"{name}.csv"
    if rows is not None and not rows:
        raise ValueError(f"there is nothing to put into {file}: give more text")
    if rows is not None:
        write_csv(file, rows)
    try:
        rows = read_csv(file)
        if not rows:
            raise ValueError("it has no row")
        text = table(rows)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"{error!r:.200}"  # which may quote the whole file
        raise ValueError(f"{file} is damaged: {reason}; draw it without --redraw") from None
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
    return rows


def new_figure(x, y, panels=1):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (6.4 * panels, 4.8) if panels < 3 else (4.4 * panels, 3.6)
    figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    for panel in axes[0]:
        panel.set(xlabel=x, ylabel=y)
        panel.grid(alpha=0.3)
    return figure, axes[0]


def method_index(name):
    """The place in NAMES of the method that a row's name begins with. ValueError: there is none."""
    for i, method in enumerate(NAMES.values()):
        if name.startswith(method):
            return i
    raise ValueError(f"{name!r} is no method")


def draw_curves(axes, rows, x, y):
    """One curve for each method of the rows, its points named by K, with the seeds' spread."""
    of_base = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        curve = [row for row in rows if row["method"] == name]
        base = method_index(name)
        variant = of_base[base] = of_base.get(base, -1) + 1
        color, marker = COLORS[base], MARKERS[(base + variant) % len(MARKERS)]
        spread = [[row.get(f"{axis}_std") for row in curve] for axis in (x, y)]
        spread = [[v or 0 for v in values] if any(values) else None for values in spread]
        axes.errorbar(
            [row[x] for row in curve], [row[y] for row in curve], xerr=spread[0], yerr=spread[1],
            color=color, marker=marker, label=name, linestyle=LINES[variant % len(LINES)],
            linewidth=1.2, elinewidth=0.6, capsize=2, markersize=10, markerfacecolor="white",
        )  # fmt: skip
        place = {"fontsize": 7, "ha": "center", "va": "center_baseline", "clip_on": True}
        for row in curve:
            axes.text(row[x], row[y], f"{row['K']:.0f}", color=color, zorder=5, **place)


def save_figure(figure, file):
    figure.savefig(file, dpi=300)
    import matplotlib.pyplot as plt

    plt.close(figure)
    print(f"written: {file.with_suffix('')}.csv, .md, .png")
