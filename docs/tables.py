"""The tables of the pages, from their CSVs.

    python -m docs.tables           writes the tables of README.md, docs/*.md and models/*/README.md anew

A comment above a table says what it shows, as JSON:

    <!-- table {"file": "docs/figures/x.csv", "rows": {"always one": {"method": "PonderLM-2", "K": 1}},
                "columns": {"loss": "loss .4f ±", "minus no thinking": "loss +.4f - no thinking"}} -->

rows       {title: {column: value}}, or {title: method}: the rows of the file that are its seeds
columns    {title: "COLUMN FORMAT"}: their mean; with ± the standard deviation over seeds, too; with - TITLE
           the mean difference to the row of that title, by pairs of seeds, and its 95 % interval

A table of numbers without such a comment has one that says where they are from: <!-- by hand: .. -->.
"""

import json
import re
from pathlib import Path

import pandas as pd

from data import write_whole
from lab.intervals import interval

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"<!-- table (\{.*?\}) -->\n\n(?:\|[^\n]*\n)*\n*", re.DOTALL)


def pages():
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted(ROOT.glob("models/*/README.md")),
    ]


def chosen(frame, wanted):
    """The rows of a frame with the wanted values. ValueError: there is none."""
    wanted = {"method": wanted} if isinstance(wanted, str) else wanted
    for column, value in wanted.items():
        frame = frame[frame[column] == value]
    if frame.empty:
        raise ValueError(f"no row has {wanted}")
    return frame


def cell(frame, rows, title, spec):
    """What a column shows of the row `title`."""
    column, form, *more = spec.split(" ", 3)
    mine = chosen(frame, rows[title])
    values, within = mine[column], None
    if more[:1] == ["-"]:
        if more[1] == title:
            return ""
        other = chosen(frame, rows[more[1]]).set_index("seed")[column]
        values = mine.set_index("seed")[column] - other
        values = values.dropna()
        within = interval(values.std(), len(values))
    elif more[:1] == ["±"]:
        within = values.std()
    shown = format(values.mean(), form).replace("-", "−")
    return (
        shown if within is None or pd.isna(within) else f"{shown} ± {format(within, form.removeprefix('+'))}"
    )


def table(spec):
    """A table in Markdown."""
    frame, rows, columns = pd.read_csv(ROOT / spec["file"]), spec["rows"], spec["columns"]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for title in rows:
        lines.append(
            f"| {title} | " + " | ".join(cell(frame, rows, title, c) for c in columns.values()) + " |"
        )
    return "\n".join(lines) + "\n"


def written_anew(text):
    """A page with its tables as their files have them."""

    def anew(match):
        return f"<!-- table {match[1]} -->\n\n{table(json.loads(match[1]))}\n"

    return TABLE.sub(anew, text)


if __name__ == "__main__":
    for page in pages():
        before = page.read_text("utf-8")
        if (after := written_anew(before)) != before:
            write_whole(page, lambda part, after=after: part.write_text(after, encoding="utf-8"))
            print(f"written: {page.relative_to(ROOT)}")
