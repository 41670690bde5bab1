"""Transformers that may stand where model.Llama does, one file each, found by its name.

A file has a class `Backbone` with Llama's interface: embed_tokens, layers, norm, rope_cos_sin,
stack, forward and residual_projections. `name` is that of the file, `unused` are settings that it does
not follow, `Options` checks what config.backbone_options says. No method knows which one it has.
These files import model and below.
"""
