"""Numbers of a figure: kept as CSV, shown as a table in Markdown; and the sheet that they fill.

frame       a pandas.DataFrame, a row for each line of the table; NaN: nothing to measure
columns     {title: "key:format"}, what a table shows of a frame
cells       a frame of text, what the table has
"""

import pandas as pd

from common import atomic_write

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLORS = ["#D55E00", "#0072B2", "#000000", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777"]
MARKERS, LINES = "os^DvpPX", ("-", "--", ":", "-.")


def show(value, form, std=None):
    """A number, with its standard deviation if there is one; '-' where there is no number."""
    if pd.isna(value):
        return "-"
    return f"{value:{form}}" + ("" if pd.isna(std) else f" ± {std:{form.removeprefix('+')}}")


def tabulate(frame, columns):
    """The cells of a frame. A number is shown with its `<key>_std`, if there is such a column."""
    cells, rows = {}, frame.to_dict("records")
    for title, column in columns.items():
        key, _, form = column.partition(":")
        cells[title] = [show(row[key], form, row.get(f"{key}_std")) for row in rows]
    return pd.DataFrame(cells)


def markdown(cells):
    lines = [cells.columns, ["---"] * cells.shape[1], *cells.to_numpy()]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def save(out, name, frame, cells):
    """Keep the numbers of a figure as out/<name>.csv, the cells of their table as .md, and print it."""
    text = markdown(cells)
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / f"{name}.csv", lambda part: frame.to_csv(part, index=False))
    atomic_write(out / f"{name}.md", lambda part: part.write_text(text, encoding="utf-8"))
    print(f"{text}\nwritten: {out / name}.csv, .md")


def new_figure(x, y, panels=1):
    from matplotlib.figure import Figure

    size = (6.4 * panels, 4.8) if panels < 3 else (4.4 * panels, 3.6)
    figure = Figure(figsize=size, layout="constrained")
    (axes,) = figure.subplots(1, panels, squeeze=False)
    for panel in axes:
        panel.set(xlabel=x, ylabel=y)
        panel.grid(alpha=0.3)
    return figure, axes


def save_figure(figure, file):
    """Write a figure, with the legend of its first panel, if it has one, below."""
    look = {"loc": "outside lower center", "fontsize": 8, "handlelength": 5}
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, ncols=2 * len(figure.axes), **look)
    atomic_write(file, lambda part: figure.savefig(part, dpi=300, format="png"))
    print(f"written: {file}")
