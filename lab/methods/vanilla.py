"""The backbone alone, without pondering: K = 0, one pass of one slot per token."""

from lab.methods import FixedDepth


class Vanilla(FixedDepth):
    method = "vanilla"
    title = "vanilla"
    defaults = {"ponder_steps": 0, "router_offset": None}
    unused = ("reread",)
