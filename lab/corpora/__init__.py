"""Text becomes token ids.

sources.py finds texts and preparation.py writes them as a folder of ids, which data.py and train.py read.
tokenizers.py turns text into ids as Hugging Face's models do, and lookup.py is a task of known difficulty.
Another source of text is a function of sources.py. Nothing here knows a model.
"""
