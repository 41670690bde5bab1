"""The backbone alone: K = 0, a plain Llama. One pass, one slot a token."""

from model import PonderLM


class Vanilla(PonderLM):
    method, title = "vanilla", "vanilla"
    color, marker = "#000000", "^"
    defaults = {"ponder_steps": 0, "router_offset": None}
    unused = ("backprop_passes", "feedback_scale")
    has_router = False

    @staticmethod
    def training_forwards(config, steps):
        return 1
