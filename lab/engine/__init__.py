"""Many sequences at once, each with early exit: what sample.py does for one, made fast.

    simple.py        one slot of one sequence after the other: the definition
    choosing.py      the choice of a token, which all decoders share
    batching.py      the Engine: many sequences, each pass one slot of each
    rows.py          the state of its rows, and a pass over them
    cache.py         their keys and values
    slot_step.py     one slot of each row through the backbone
    states.py        the states of all tokens as decoding has them, in parallel: for prompts, scores, figures
    compiled.py      a pass as one program, on a CPU
    cuda_graphs.py   passes that are replayed, on a GPU
    request.py       what the command `python -m lab sample` is asked for, and what it shows

Everything below choosing.py may be changed as long as it decodes what simple.py decodes: tests compare every
logit.
"""
