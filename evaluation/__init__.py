"""What a trained model scores on texts: `python -m evaluation`.

perplexity.py scores files and a run's validation text, by the losses of scoring.py: soft and as the
model decodes. Another method needs no change here; a new measure of a text belongs in scoring.py.
It may import every folder but analysis/ and bench/. Benchmarks: see docs/data.md.
"""
