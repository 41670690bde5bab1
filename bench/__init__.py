"""Speed and memory, as ratios of two things measured in one run: `python -m bench`.

kernels.py measures attention, training_step.py a step of training, decoding.py early exit, each
against the plain thing that it replaces; timing.py takes the medians and writes the results. A
measurement of something new is a new file with a function that is a command of __main__.py. Nothing
may import this folder, and it may import all but evaluation/.
"""
