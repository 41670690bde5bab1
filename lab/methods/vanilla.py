"""The backbone alone: K = 0, a plain Llama. One pass, one slot a token."""

from lab.methods import FixedDepth


class Vanilla(FixedDepth):
    method, title = "vanilla", "vanilla"
    defaults = {"ponder_steps": 0, "router_offset": None}
    unused = ("reread",)
