"""Early-exit decoding of many sequences at once: sample.py decodes one sequence, and this is made fast.

    simple.py        one slot of one sequence at a time: the definition
    choosing.py      the choice of a token, which both decoders share
    batching.py      the Engine: many sequences at once, of which each pass runs one slot each
    rows.py          the state of the Engine's rows, and a pass over them
    cache.py         the keys and values of the rows
    slot_step.py     one slot of each row through the backbone
    states.py        the states of all tokens as decoding has them, in parallel: for prompts, scores, figures
    compiled.py      a pass as one program, on a CPU
    cuda_graphs.py   passes that are replayed, on a GPU
    request.py       a request to the command `python -m lab sample`: its flags, prompts and output

The files from batching.py down may change as long as the Engine decodes what simple.py decodes: tests compare
every logit.
"""
