"""The tables of the pages, from their CSVs.

    python -m docs.tables           writes the tables of README.md, docs/*.md and models/*/README.md anew

A comment above a table says what it shows, as JSON:

    <!-- table {"file": "docs/figures/x.csv", "rows": {"always one": {"method": "PonderLM-2", "K": 1}},
                "columns": {"loss": "loss .4f ±", "minus no extra steps": "loss +.4f - no extra steps"}} -->

rows       {title: {column: value}}, or {title: method}: the rows of the file that are its seeds
columns    {title: "COLUMN FORMAT"}: their mean; with ± the standard deviation over seeds, too; with - TITLE
           the mean difference to the row of that title, by pairs of runs that agree in seed, machine,
           precision and text (as far as the file says them), and its 95 % interval; with ~ TITLE the
           difference of the means of all runs, and its 95 % interval by Welch's t. "seed count" is
           the number of runs

A table of numbers without such a comment has one that says where they are from: <!-- by hand: .. -->.
"""

import json
import re
from pathlib import Path

import pandas as pd

from common import atomic_write
from lab.intervals import interval, unpaired

ROOT = Path(__file__).parents[1]
ORIGIN = "machine", "precision", "text"  # in which the two runs of a pair agree, beside the seed
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
    """What a column shows of the row `title`. ValueError: one of its runs has no such value."""
    column, form, *more = spec.split(" ", 3)
    sign, other = [*more, None, None][:2]
    mine = chosen(frame, rows[title])[column]
    if mine.isna().any():  # a mean would leave it out, and the number of seeds would count it
        raise ValueError(f"{rows[title]} has a row without {column}")
    if form == "count":
        return str(len(mine))
    value, within = mine.mean(), None
    if sign in ("-", "~") and other == title:
        return ""
    if sign == "±":
        within = mine.std()
    elif sign == "-":
        differences = pairs(chosen(frame, rows[title]), chosen(frame, rows[other]), column)
        value = differences.mean()
        within = interval(differences.std(), len(differences))
    elif sign == "~":
        value, within = unpaired(mine, chosen(frame, rows[other])[column])
    shown = format(value, form).replace("-", "−")
    if float(format(value, form)) == 0:
        shown = shown.lstrip("+−")  # of a zero, the sign says nothing
    if within is None or pd.isna(within):
        return shown
    return f"{shown} ± {format(within, form.removeprefix('+'))}"


def pairs(mine, others, column):
    """The differences of a column between the runs of two frames that make a pair."""
    keys = ["seed", *(name for name in ORIGIN if name in mine)]
    both = mine.merge(others, on=keys, suffixes=("", "_of_other"))  # NaN, of what is not known, equals NaN
    return both[column] - both[f"{column}_of_other"]


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
            atomic_write(page, lambda part, after=after: part.write_text(after, encoding="utf-8"))
            print(f"written: {page.relative_to(ROOT)}")
