"""Figures and pages beyond the paper's, which the root's analyze.py draws: `python -m lab analyze`.

subject.py opens a model of any method and a text, and measures it token by token. tables.py keeps numbers
and shows them. comparing.py puts several runs side by side, and with it frontier.py, budget.py and
lookup.py; pages.py writes HTML, from templates/, explainer.py a page on which models run, puzzle.py a
picture. To add a figure, write its rows, its table and its drawing, and name it in __main__.py.
"""
