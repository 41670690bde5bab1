"""Figures and tables from trained runs.

    python analyze.py pareto --runs out/pareto/tiny/*     perplexity against executed extra steps
    python analyze.py depth --runs out/pareto/tiny/*      loss against the step budget K
    python analyze.py pareto --redraw                     the same figure from its saved numbers

Writes <out>/<figure>.csv with the numbers, .md with the same as a table, and .png.

    word        meaning
    K           extra computations a token may take, of any method (methods.py)
    steps       those it does take in decoding, hard-stopped at tau; mean over tokens
    loss        nats per token on the validation windows, as it decodes: fixed point, hard-stopped
    perplexity  exp(loss), per token: per byte for models of bytes
    seeds       runs that differ in nothing else; a spread is their standard deviation
    frontier    no other row is better in steps or perplexity and not worse in the other (means)
"""

import csv
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from tqdm import tqdm

from checkpoint import read_lines, read_results, read_settings
from config import BELONGS_TO, PonderConfig, read_config
from cost import cost
from data import Windows
from device import command_line, pick_device
from methods import load
from train import TrainConfig, open_corpus
from validation import evaluate

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
        place = path.resolve()
        _, config, corpus = read_settings(TrainConfig, place.parent, place.name)
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
        ValueError: they are scored on different texts.
    """
    first, odd = runs[0], {}
    for run in runs:
        if run.corpus != first.corpus:
            raise ValueError(f"{first.path} and {run.path} have different corpora: not comparable")
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


def on_frontier(points):
    """For each (steps, perplexity): does no other have less of one and not more of the other?"""
    better = lambda a, b: a[0] <= b[0] and a[1] <= b[1] and a != b  # noqa: E731
    return [not any(better(other, point) for other in points) for point in points]


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
        raise FileNotFoundError(f"{file} does not exist: draw it once from --runs")

    def value(text):
        try:
            return float(text) if text else None
        except ValueError:
            return text

    with open(file, newline="", encoding="utf-8") as stream:
        return [{name: value(text) for name, text in row.items()} for row in csv.DictReader(stream)]


def markdown(titles, rows):
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def save_rows(out, name, rows, table):
    """Save rows, or without any take the saved ones; print them as a table -> the rows.

    Raises:
        FileNotFoundError, ValueError: nothing was saved, or it is damaged.
    """
    file = out / f"{name}.csv"
    if rows is not None:
        write_csv(file, rows)
    try:
        rows = read_csv(file)
        text = table(rows)
        if not rows:
            raise ValueError("it has no row")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error!r}; draw it from --runs") from None
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
    return rows


def new_figure(x, y, panels=1):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (6.4 * panels, 4.8)
    figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    for panel in axes[0]:
        panel.set(xlabel=x, ylabel=y)
        panel.grid(alpha=0.3)
    return figure, axes[0]


def draw_curves(axes, rows, x, y):
    """One curve for each method of the rows, its points named by K, with the seeds' spread."""
    of_base = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        curve = [row for row in rows if row["method"] == name]
        base = next(i for i, method in enumerate(NAMES.values()) if name.startswith(method))
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


# -- Perplexity against executed steps (section 4.1) -----------------------------------------------


def at_other_taus(runs, taus, device):
    """The PonderLM-3 runs, hard-stopped at each of `taus` instead of at the one they have."""
    found = []
    pairs = [(run, tau) for run in runs if run.shape.label == "ponderlm3" for tau in taus]
    for run, tau in tqdm(pairs, desc="other tau", disable=not pairs):
        _, _, _, tokens = open_corpus(run.config)
        val = Windows(tokens, run.shape.block_size, seed=0)
        if len(tokens) != run.corpus["val_tokens"]:
            raise ValueError(
                f"{run.path} was trained with another corpus than {run.config.data} is"
            )
        count = min(run.config.eval_windows, val.count)
        hard = evaluate(load(run.path).to(device), val, count, device, tau=tau, tau_steps=tau)
        config = replace(run.config, tau=tau)
        found.append(replace(run, config=config, results={"hard": hard}))
    return found


def pareto_rows(runs):
    """One row for each method and K: seeds, executed steps, loss, perplexity, and what it costs."""
    check_comparable(runs)
    rows = []
    for (name, K), group in group_runs(runs).items():
        hard = [run.results["hard"] for run in group]
        row = {"method": name, "K": K, "seeds": len(group)}
        row["steps"], row["steps_std"] = mean_std([h["steps"] for h in hard])
        row["loss"], row["loss_std"] = mean_std([h["loss"] for h in hard])
        row["perplexity"], row["perplexity_std"] = mean_std([math.exp(h["loss"]) for h in hard])
        rows.append(row | vars(cost(group[0].shape, row["steps"])))
    frontier = on_frontier([(row["steps"], row["perplexity"]) for row in rows])
    return [row | {"frontier": int(best)} for row, best in zip(rows, frontier, strict=True)]


def pareto_table(rows):
    titles = [
        "method",
        "K",
        "seeds",
        "extra steps",
        "loss",
        "perplexity",
        "MFLOPs, 6N",
        "MFLOPs, 2N",
    ]
    titles += ["keys a layer", "training forwards", "frontier"]
    lines = []
    for r in rows:
        line = [r["method"], f"{r['K']:.0f}", f"{r['seeds']:.0f}"]
        line += [show(r["steps"], r["steps_std"], 2), show(r["loss"], r["loss_std"], 4)]
        line += [show(r["perplexity"], r["perplexity_std"], 3)]
        line += [f"{r['paper_flops'] / 1e6:.2f}", f"{r['forward_flops'] / 1e6:.2f}"]
        line += [f"{r['cache_entries']:.2f}", f"{r['training_forwards']:.1f}"]
        lines.append([*line, "yes" if r["frontier"] else ""])
    return markdown(titles, lines)


def pareto(
    runs: tuple[str, ...] = (),
    taus: tuple[float, ...] = (),
    out: Path = Path("out/analyze"),
    redraw: bool = False,
    device: str = "auto",
):
    """Perplexity against the mean executed extra steps of every method: table and figure.

    Args:
        runs: directories of trained runs
        taus: evaluate the PonderLM-3 among them at these, too; each makes a curve
        out: where pareto.csv, .md and .png go
        redraw: from the numbers saved there, without runs
        device: auto, cpu, cuda or mps; where they are evaluated
    """
    rows, loaded = None, read_runs(runs, redraw)
    if not redraw:
        rows = pareto_rows(loaded + at_other_taus(loaded, taus, pick_device(device)))
    rows = save_rows(out, "pareto", rows, pareto_table)
    best = sorted((row["steps"], row["perplexity"]) for row in rows if row["frontier"])
    low, high = min(p for _, p in best), max(p for _, p in best)
    margin = 0.15 * (high - low) + 0.01
    far = any(row["perplexity"] > high + margin for row in rows)
    labels = "executed extra steps per token (points: K)", "perplexity per token"
    figure, panels = new_figure(*labels, panels=1 + far)  # all; and what is near the frontier
    for axes in panels:
        draw_curves(axes, rows, "steps", "perplexity")
        axes.step(
            *zip(*best, strict=True), where="post", color="#BBBBBB", zorder=0, label="frontier"
        )
    panels[-1].set_ylim(low - margin, high + margin)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(
        *handles, loc="outside lower center", ncols=2 * len(panels), fontsize=8, handlelength=5
    )
    save_figure(figure, out / "pareto.png")


# -- Loss against the step budget (section 4.4) ----------------------------------------------------


def training_loss(run):
    """Mean logged training cross-entropy of the last tenth of the steps, in nats."""
    rows = [row for row in read_lines(run.path / "log.jsonl") if "ce" in row]
    last = [row["ce"] for row in rows if row["step"] > 0.9 * run.config.steps]
    if not last:
        raise ValueError(f"{run.path}/log.jsonl has no line of the last tenth of the steps")
    return statistics.mean(last)


def depth_rows(runs):
    """One row for each K of PonderLM-3, over the seeds.

    Raises:
        ValueError: no run is of PonderLM-3.
    """
    runs, rows = [run for run in runs if run.shape.label == "ponderlm3"], []
    if not runs:
        raise ValueError("none of the runs is a PonderLM-3; train one: python train.py")
    check_comparable(runs)
    for (name, K), group in group_runs(runs).items():
        row = {"method": name, "K": K, "seeds": len(group)}
        for key, values in {
            "training_loss": [training_loss(run) for run in group],
            "loss": [run.results["hard"]["loss"] for run in group],
            "steps": [run.results["hard"]["steps"] for run in group],
        }.items():
            row[key], row[f"{key}_std"] = mean_std(values)
        rows.append(
            row | {"training_forwards": cost(group[0].shape, row["steps"]).training_forwards}
        )
    return rows


def depth_table(rows):
    titles = ["method", "K", "seeds", "training loss", "validation loss", "extra steps"]
    lines = []
    for r in rows:
        keys = (("training_loss", 3), ("loss", 4), ("steps", 2))
        numbers = [show(r[key], r[f"{key}_std"], digits) for key, digits in keys]
        line = [r["method"], f"{r['K']:.0f}", f"{r['seeds']:.0f}", *numbers]
        lines.append([*line, f"{r['training_forwards']:.1f}"])
    return markdown([*titles, "training forwards"], lines)


def depth(runs: tuple[str, ...] = (), out: Path = Path("out/analyze"), redraw: bool = False):
    """PonderLM-3's loss against its step budget K: table and figure.

    Args:
        runs: directories of trained runs; those of other methods are left out
        out: where depth.csv, .md and .png go
        redraw: from the numbers saved there, without runs
    """
    loaded = read_runs(runs, redraw)
    rows = None if redraw else depth_rows(loaded)
    rows = save_rows(out, "depth", rows, depth_table)
    figure, (axes,) = new_figure("K, the step budget", "validation loss, nats per token")
    draw_curves(axes, rows, "K", "loss")
    axes.set_xticks(sorted({row["K"] for row in rows}))
    axes.xaxis.set_major_formatter("{x:.0f}")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    save_figure(figure, out / "depth.png")


if __name__ == "__main__":
    commands = {"pareto": pareto, "depth": depth}
    command_line(lambda: tyro.extras.subcommand_cli_from_dict(commands, description=__doc__))
