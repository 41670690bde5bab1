"""Faster forms of what the root writes plainly. Nothing in the root knows them.

attention.py has more forms of soft-mask attention and says which is fastest here; blocks.py makes
the blocks of a Llama train faster. train.py and bench ask for them by name. Each is tested against
the plain form, outputs and gradients. These files import the method (model and below).
"""
