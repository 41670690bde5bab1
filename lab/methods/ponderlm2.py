"""PonderLM-2 (arXiv 2509.23184): every token takes all K steps, and only the last state predicts.

The model is PonderLM-3 with a fixed depth in place of the router: s is one-hot at K, and no key is masked.
"""

from lab.methods import FixedDepth


class PonderLM2(FixedDepth):
    method = "ponderlm2"
    title = "PonderLM-2"
    defaults = {"refinements": (2, 3)}  # also where a preset has others for PonderLM-3
