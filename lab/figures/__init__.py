"""Figures and pages beyond those of the paper, which analyze.py at the root draws: `python -m lab analyze`.

subject.py      a model of any method on a text, measured token by token
tables.py       numbers kept as CSV and shown as tables, and the sheet of a figure
runs.py         trained runs, as a figure of several reads and names them
comparing.py    several runs side by side
explainer.py    a page that runs models, from templates/

Every other file is one figure: at its head the columns of its CSV, then what is measured, the rows, the
drawing. To add a figure of several runs, write a subclass of comparing.Comparison, and name it in
__main__.py.
"""
