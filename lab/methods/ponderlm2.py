"""PonderLM-2 (arXiv 2509.23184): all K states are fed back, and only the last one predicts.

It is PonderLM-3 with a fixed depth in place of the router: s is one-hot at K, and no key is masked.
"""

from lab.methods import FixedDepth


class PonderLM2(FixedDepth):
    method, title = "ponderlm2", "PonderLM-2"
    defaults = {"refinements": (2, 3)}
