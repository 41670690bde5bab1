"""The numbers of a figure, kept as CSV and shown as a table in Markdown, and the sheet that the figure is
drawn on.

frame       a pandas.DataFrame with a row for each line of the table; NaN: there is no number
columns     {title: "key:format"}: which columns of a frame a table shows, and how
cells       a frame of texts: the content of the table
"""

import pandas as pd

from common import atomic_write

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = ["#D55E00", "#0072B2", "#000000", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777"]
MARKERS = "os^DvpPX"
LINES = "-", "--", ":", "-."


def look_of(i):
    """The look of the i-th line of a figure: another one for each, also where there are more lines than
    colours."""
    return {
        "color": COLORS[i % len(COLORS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": LINES[(i + i // len(COLORS)) % len(LINES)],
    }


def show(value, form, std=None):
    """A number as text, with its standard deviation, if there is one; '-' if there is no number."""
    if pd.isna(value):
        return "-"
    text = f"{value:{form}}"
    if not pd.isna(std):
        text += f" ± {std:{form.removeprefix('+')}}"
    return text


def tabulate(frame, columns):
    """The cells of a frame. A number is shown with its `<key>_std`, if there is such a column."""
    cells = {}
    rows = frame.to_dict("records")
    for title, column in columns.items():
        key, _, form = column.partition(":")
        cells[title] = [show(row[key], form, row.get(f"{key}_std")) for row in rows]
    return pd.DataFrame(cells)


def markdown(cells):
    """A table in Markdown."""
    lines = [cells.columns, ["---"] * cells.shape[1], *cells.to_numpy()]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def save(out, name, frame, cells):
    """Write the numbers of a figure to out/<name>.csv; print their table, and write it to out/<name>.md."""
    text = markdown(cells)
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / f"{name}.csv", lambda part: frame.to_csv(part, index=False))
    atomic_write(out / f"{name}.md", lambda part: part.write_text(text, encoding="utf-8"))
    print(f"{text}\nwritten: {out / name}.csv, .md")


def new_figure(title, x, y, panels=1):
    """A figure with panels side by side, all with the labels x and y. -> the figure, a list of its axes"""
    from matplotlib import rc
    from matplotlib.figure import Figure

    rc("font", size=12)
    width = 6.4 if panels == 1 else 5 * panels
    figure = Figure(figsize=(width, 4.8), layout="constrained")
    figure.suptitle(title, fontsize=13)
    (axes,) = figure.subplots(1, panels, squeeze=False)
    for panel in axes:
        panel.set(xlabel=x, ylabel=y)
        panel.grid(alpha=0.3)
    return figure, axes


def save_figure(figure, file):
    """Write a figure to a PNG file. One legend of all its panels, if there is one, stands below."""
    handles = {}  # label: what it stands for
    for axes in figure.axes:
        of_panel, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, of_panel, strict=True))
    if handles:
        look = {"fontsize": 8 if len(figure.axes) == 1 else 10, "handlelength": 2.5, "columnspacing": 1}
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=2, **look)
    atomic_write(file, lambda part: figure.savefig(part, dpi=150, format="png"))
    print(f"written: {file}")
