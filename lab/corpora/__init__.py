"""Text becomes token ids. Another source of text is a function of sources.py. Nothing here knows a model."""
