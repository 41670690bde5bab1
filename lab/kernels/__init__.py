"""Faster and more exact forms of what the root writes plainly. Nothing in the root knows them.

attention.py has more forms of soft-mask attention and says which is fastest here, channels.py carries
log w through half precision. `train` and `bench` ask for them by name. Each is tested against the plain
form, outputs and gradients.
"""
