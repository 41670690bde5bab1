"""Transformers that can take the place of model.Llama, one file each; the file's name is the backbone's name.

A file has a class `Backbone`, a subclass of model.Llama:

Block, Norm            the classes of its blocks and of its final norm
residual_projections   names of the matrices whose output is added to the residual stream
inverse_frequencies    the angle by which RoPE rotates each pair of components from one position to the next
Options                a dataclass that checks config.backbone_options
unused                 settings of the config that the backbone does not follow

Methods do not know which backbone they have.
"""
