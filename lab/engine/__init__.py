"""Many sequences at once, each with early exit: what sample.py does for one, made fast.

batching.py has the Engine, rows.py the state of its rows and a pass over them, cache.py their keys and
values, slot_step.py one slot of each row through the backbone. states.py has the states of all tokens as
decoding has them, in parallel: for prompts, scores and figures. compiled.py makes one program of a pass,
cuda_graphs.py replays passes on a GPU. All of these may be changed as long as they decode what simple.py
decodes, one slot after the other: tests compare every logit. request.py has what both decoders share:
options, the choice of a token, prompts, printing.
"""
