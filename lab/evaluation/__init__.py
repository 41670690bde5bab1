"""What a model scores on texts: texts.py opens them, scoring.py has the loss of each token."""
