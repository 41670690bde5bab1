"""Models of others, in and out: Hugging Face's Llama and GPT-NeoX, the official PonderLM-2, transformers.

weights.py reads and writes directories of weights, export.py writes what transformers runs, and warm_start.py
teaches a Llama to ponder. `python -m lab convert` shows a directory and writes it anew.
"""
