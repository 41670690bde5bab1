"""The pages: the tour, the results, how-to pages, the log, and the figures that they show.

tour.py prints the numbers of tour.md, and notebook.py makes tour.ipynb of both. pictures.py draws the
passes and the masks, and tables.py writes the tables of the pages from their CSVs. Tests run every
command of every page and compare what is printed, so that a page can be changed as long as it stays
true. docs.tour imports the model and its ablations; no code imports docs.
"""
