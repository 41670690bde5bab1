"""Pictures for the pages: two of how PonderLM-3 computes, and one that compares methods.

    python -m docs.pictures       writes passes.png, masks.png and pareto.png to docs/figures

passes.png   which slots run in which pass of the Jacobi iteration
masks.png    which slots a slot attends to, by Jacobi iteration and on the grid
pareto.png   loss against extra steps of the methods in docs/figures/pareto.csv
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from common import command_line
from lab.figures.comparing import draw_curves
from lab.memory import slots_of_passes

FIGURES = Path(__file__).parent / "figures"
WORDS = "the", "capital", "of", "France"
K = 2  # pondering steps
R = 2  # refinement passes
SLOTS = K + 1
WHITE, BLUE, ORANGE, GREEN = "#ffffff", "#74aeea", "#e69f00", "#009e73"


def visible(T, K, on_grid):
    """Which keys a query sees, (T (K+1), T (K+1)) of bool: slot k of token t stands at t (K+1) + k.

    By Jacobi iteration a slot sees all slots before it. On the grid it sees slot (t', k') if and only if
    t' <= t and k' <= k.
    """
    place = np.arange(T * (K + 1))
    token, slot = np.divmod(place, K + 1)
    if on_grid:
        return (token <= token[:, None]) & (slot <= slot[:, None])
    return place <= place[:, None]


def draw_cells(axes, colours, palette):
    """Draw a matrix as coloured cells, with a line between any two and a thick one between tokens."""
    axes.imshow(colours, cmap=ListedColormap(palette), vmin=0, vmax=len(palette) - 1, aspect="auto")
    rows, columns = colours.shape
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#aaaaaa", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    for start in range(0, columns, SLOTS):
        axes.axvline(start - 0.5, color="black", linewidth=1.5)


def label_slots(axes):
    """Below each column the number of its slot, and above each group of columns its word."""
    axes.set_xticks(range(len(WORDS) * SLOTS), [str(k) for _ in WORDS for k in range(SLOTS)])
    above = axes.secondary_xaxis("top")
    above.set_xticks([SLOTS * t + K / 2 for t in range(len(WORDS))], WORDS)
    above.tick_params(length=0)


def draw_passes():
    passes = slots_of_passes(K, R)
    phases = [1] * K + [2] * R + [3]  # of each pass: growing, refining, final
    colours = np.zeros((len(passes), len(WORDS) * SLOTS))
    for i, (slots, phase) in enumerate(zip(passes, phases, strict=True)):
        for t in range(len(WORDS)):
            colours[i, t * SLOTS : t * SLOTS + slots] = phase

    figure = Figure(figsize=(8, 3.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    palette = [BLUE, ORANGE, GREEN]
    draw_cells(axes, colours, [WHITE, *palette])
    label_slots(axes)
    axes.set_yticks(range(len(passes)), [f"pass {i + 1}" for i in range(len(passes))])
    axes.set_xlabel(
        "slot; slot 0 reads the embedding, and any other what the slot to its left put out in the pass above"
    )
    labels = f"growing: K = {K} passes", f"refining: R = {R} passes", "final: its outputs count"
    handles = [Patch(color=colour, label=label) for colour, label in zip(palette, labels, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def draw_masks():
    figure = Figure(figsize=(8, 4.4), layout="constrained", dpi=150)
    panels = figure.subplots(1, 2)
    titles = "PonderLM-3: all slots before it", "the grid: no deeper slot than itself"
    for axes, title, on_grid in zip(panels, titles, (False, True), strict=True):
        draw_cells(axes, visible(len(WORDS), K, on_grid).astype(int), [WHITE, BLUE])
        label_slots(axes)
        axes.set_yticks(
            range(len(WORDS) * SLOTS), [f"{word} {k}" for word in WORDS for k in range(SLOTS)], fontsize=8
        )
        for start in range(0, len(WORDS) * SLOTS, SLOTS):
            axes.axhline(start - 0.5, color="black", linewidth=1.5)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("slot that is seen")
    panels[0].set_ylabel("slot that attends")
    return figure


def draw_methods():
    frame = pd.read_csv(FIGURES / "pareto.csv")
    # A PonderLM-3 stands in the file once for each threshold at which it stops: one curve goes through these.
    frame["method"] = frame.method.str.replace(
        r"PonderLM-3.*", "PonderLM-3, at three values of τ", regex=True
    )
    frame["method"] = frame.method.replace(
        {"vanilla": "plain", "LoopedLM": "looped transformer", "Pause": "pause tokens"}
    )
    figure = Figure(figsize=(8, 5.4), layout="constrained", dpi=150)
    axes = figure.subplots()
    draw_curves(axes, frame, "method", "steps", "loss")
    axes.set(
        title="Loss of each method against its extra steps (the number in a point is K)",
        xlabel="executed extra steps per byte, mean",
        ylabel="loss, nats per byte",
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure


def main():
    for name, draw in (("passes", draw_passes), ("masks", draw_masks), ("pareto", draw_methods)):
        draw().savefig(FIGURES / f"{name}.png")
        print(f"written: {FIGURES / name}.png")


if __name__ == "__main__":
    command_line(main)
