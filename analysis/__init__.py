"""Figures and tables from trained models: what `python analyze.py` runs.

From the bottom up: measuring, convergence and words make numbers of one model, as pandas frames;
tables keeps and shows them; figures draws those of one run and comparing those of several; pages
writes HTML, from templates/, explainer a page on which models run, puzzle a picture. To add a
figure, write a function that measures, one that says what its table shows, and one that draws;
analyze.py names it.
This folder may import every other one but evaluation, bench and docs; train.py and sample.py never
load it.
"""
