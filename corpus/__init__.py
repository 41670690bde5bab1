"""Text becomes token ids, and token ids become batches.

preparation.py finds text and writes prepared corpora, streaming.py very large ones, lookup.py a
task of known difficulty. tokenizers.py turns text into ids, batches.py reads prepared corpora.
`python -m corpus` prepares one. Another source of text is a function of preparation.py.
Nothing here knows a model or a training. Imports from the project: runtime alone.
"""
