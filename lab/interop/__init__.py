"""Exchange of models with other projects.

weights.py      reads and writes directories of weights: ours, Hugging Face's Llama and GPT-NeoX, and the
                official PonderLM-2
export.py       writes a model of any method as a directory that transformers runs
warm_start.py   training that starts from a trained model
"""
