"""Speed and memory, as ratios of two things measured in one run: `python -m lab bench`.

attention.py measures attention, training_step.py a step of training and decoding.py early exit,
each against the plain thing that it replaces. timing.py takes the medians. Nothing may import this
folder.
"""
