"""Many sequences at once, each with early exit: sample.py's decoder, made fast.

batching.py has the Engine, cache.py the keys and values of its rows, prefill.py reads prompts in
parallel, slot_step.py runs one slot of each row, cuda_graphs.py replays that step on a GPU. All of
these may be changed as long as they decode what sample.py decodes: tests/engine compares every
logit with it. choosing.py and printing.py, from logits to tokens and samples, serve sample.py too.
The folder may import the method (model and below); only its __main__ imports sample.py.
"""
