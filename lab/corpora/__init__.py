"""From text to token ids. Nothing here knows a model.

sources.py       where texts come from; another source is another function there
tokenizers.py    the tokenizers of Hugging Face's models, in addition to those of tokenizer.py
preparation.py   texts of any size to a folder of token ids
lookup.py        a task whose difficulty is known
"""
