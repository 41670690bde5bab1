"""Many sequences at once, each with early exit: sample.py's decoder, made fast.

batching.py has the Engine, rows.py the state of its rows and a pass over them, cache.py their keys
and values, prefill.py reads prompts in parallel, slot_step.py runs one slot of each row through
products.py, compiled.py makes one program of a pass, cuda_graphs.py replays passes on a GPU. All of
these may be changed as long as they decode what sample.py decodes: tests/engine compares every
logit with it. request.py has what every decoder shares, sample.py too: options, the choice of a
token, prompts, printing. puzzle.py shows what each step looks up.
The folder may import the method, baselines, corpus and interop.
"""
