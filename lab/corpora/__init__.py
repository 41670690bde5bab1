"""Text becomes token ids, and token ids become batches.

preparation.py does it: it finds text, writes a prepared corpus and reads batches from it.
tokenizers.py turns text into ids, huggingface.py with the tokenizers of Hugging Face's models.
streaming.py writes very large corpora, lookup.py a task of known difficulty. `python -m lab corpus`
prepares one. Another source of text is a function of preparation.py.
Nothing here knows a model or a training. Imports from the project: runtime alone.
"""
