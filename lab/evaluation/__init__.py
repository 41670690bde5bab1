"""What a model scores on texts.

texts.py      the texts: the validation text of a run, or any other
scoring.py    the loss of each token, with all steps and as the model decodes
__main__.py   the command: perplexity and bits per byte, also as the difference between two models
"""
