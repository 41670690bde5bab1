"""What a model scores on texts: `python -m lab evaluate`.

texts.py opens the texts, scoring.py has the loss of each token, and perplexity.py what is reported of them.
"""
