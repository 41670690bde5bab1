"""What a model scores on texts: `python -m lab evaluate`.

texts.py opens the texts, scoring.py has the loss of each token, soft and as the model decodes, and
perplexity.py what is reported of them. A new measure of a text belongs in scoring.py. Benchmarks: see
docs/data.md.
"""
