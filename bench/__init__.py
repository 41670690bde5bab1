"""Speed and memory, as ratios of two things measured in one run: `python -m bench`.

kernels.py measures attention, training_step.py a step of training, decoding.py early exit, each
against the plain thing that it replaces; timing.py takes the medians and writes the results. A
measurement of something new is a new file with a function that is a command of __main__.py.

acceptance.py runs them on a GPU, with what is required of them, and with the checks of checks.py;
report.py puts what came out into docs/speed.md. Nothing may import this folder, and it may import
all but evaluation/.
"""
