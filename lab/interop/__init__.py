"""Models of other projects, read and written.

weights.py      directories of weights: ours, Hugging Face's Llama and GPT-NeoX, the official PonderLM-2
export.py       a model of any method as a directory that transformers runs
warm_start.py   a training that starts from a trained model
"""
