"""Figures and pages beyond the paper's, which the root's analyze.py draws: `python -m lab analyze`.

subject.py opens a model of any method and a text, and measures it token by token. tables.py keeps numbers
and shows them; comparing.py puts several runs side by side. explainer.py fills in the pages of templates/.
To add a figure of several runs, write a subclass of comparing.Comparison, and name it in __main__.py.
"""
