"""Numbers of a figure: kept as CSV, shown as a table in Markdown; and the sheet that they fill.

frame       a pandas.DataFrame, a row for each line of the table; NaN: nothing to measure
columns     {title: "key:format"}, what a table shows of a frame
cells       a frame of texts: a table before it is Markdown or HTML
table       columns, or a function that makes cells of a frame
"""

import pandas as pd

from runtime import UserError, write_text, writing

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLORS = ["#D55E00", "#0072B2", "#000000", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777"]
MARKERS, LINES = "os^DvpPX", ("-", "--", ":", "-.")


def show(value, form, std=None):
    """A number, with its standard deviation if there is one; '-' where there is no number."""
    if pd.isna(value):
        return "-"
    return f"{value:{form}}" + ("" if pd.isna(std) else f" ± {std:{form}}")


def tabulate(frame, columns):
    """The cells of a frame. A number is shown with its `<key>_std`, if there is such a column."""
    cells, rows = {}, frame.to_dict("records")
    for title, column in columns.items():
        key, _, form = column.partition(":")
        cells[title] = [show(row[key], form, row.get(f"{key}_std")) for row in rows]
    return pd.DataFrame(cells)


def markdown(cells):
    lines = [cells.columns, ["---"] * cells.shape[1], *cells.to_numpy()]
    lines = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def read(file):
    """The frame of a CSV file. Nothing but an empty field is NaN: 'nan' may be a token."""
    return pd.read_csv(file, dtype={"text": str}, keep_default_na=False, na_values=[""])


def save(out, name, rows, table):
    """Keep the numbers of a figure, or without any take the kept ones; print their table.

    Args:
        rows: a frame or a list of dicts; None: they are in out/<name>.csv

    Returns:
        the frame, as the file has it, so that a redrawn figure is the same to the byte; its cells.

    Raises:
        UserError: there are no numbers.
    """
    file = out / f"{name}.csv"
    if rows is not None:
        if not len(rows):
            raise UserError(f"there is nothing to put into {file}: give more text")
        out.mkdir(parents=True, exist_ok=True)
        write_text(file, pd.DataFrame(rows).to_csv(index=False))
    if not file.is_file():
        raise UserError(f"{file} does not exist: draw it once without --redraw")
    frame = read(file)
    cells = table(frame) if callable(table) else tabulate(frame, table)
    write_text(out / f"{name}.md", markdown(cells))
    print(markdown(cells))
    return frame, cells


def new_figure(x, y, panels=1):
    from matplotlib.figure import Figure

    size = (6.4 * panels, 4.8) if panels < 3 else (4.4 * panels, 3.6)
    figure = Figure(figsize=size, layout="constrained")
    (axes,) = figure.subplots(1, panels, squeeze=False)
    for panel in axes:
        panel.set(xlabel=x, ylabel=y)
        panel.grid(alpha=0.3)
    return figure, axes


def save_figure(figure, file, legend_of=None):
    """Write a figure; `legend_of`: axes whose legend goes below all of them."""
    if legend_of:
        look = {"loc": "outside lower center", "fontsize": 8, "handlelength": 5}
        look["ncols"] = 2 * len(figure.axes)
        figure.legend(*legend_of.get_legend_handles_labels(), **look)
    with writing(file):
        figure.savefig(file, dpi=300)
    print(f"written: {file.with_suffix('')}.csv, .md, .png")
