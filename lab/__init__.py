"""Everything beyond the paper's method, on top of the scripts at the root, which know nothing of it.

methods/     other methods on the same backbone, one file each: PonderLM-1 and -2, LoopedLM, the grid, ..
backbones/   GPT-NeoX (Pythia) and Llama 3's RoPE
kernels.py   further forms of attention, for half precision and for decoding
engine/      many sequences at once, parallel prompts, compiled passes, CUDA graphs
interop/     weights of other projects, read and written; pondering added to a trained Llama
corpora/     tokenizers of Hugging Face, JSON lines, Parquet, the lookup task
figures/     figures and pages beyond the paper's
evaluation/  perplexity, bits per byte, two models compared
bench.py     speed, as ratios, and memory, by the formula in memory.py
runs/        one shell script for each claim

`python -m lab` lists the commands. Packages: lab/requirements.txt.
"""
