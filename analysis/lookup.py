"""Does depth follow difficulty, where that is known? The lookup task (corpus/lookup.py)."""

import pandas as pd
import torch

from analysis.comparing import Comparison, curve_names, draw_curves, over_seeds
from analysis.measuring import open_subject, stopped
from analysis.tables import new_figure, save_figure
from corpus.lookup import CHAINS, LOOKUPS, lookups_asked
from model import Given, strict_dataclass
from training.config import Share


@torch.no_grad()
def answers(subject):
    """Of each token that takes a known number of lookups: that number, whether the next token is
    predicted (the most probable one), and the executed steps -> (n,) each, decoded at tau."""
    found = []
    for x, y, h_hat, steps in stopped(subject, subject.tau):
        right = subject.model.lm_head(h_hat).argmax(-1) == y
        asked = lookups_asked(x, subject.tokenizer)
        found.append([values[asked >= 0].cpu() for values in (asked, right, steps)])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def lookup_rows(runs, tau, device, data=None):
    """One row for each method, K and number of lookups, 0 for filler, over the seeds.

    Asked of at most 1024 lines, of the corpus `data` if that is given.
    """

    def numbers(run):
        asked, right, steps = answers(open_subject(run.path, 1024, tau, device, data))
        tokens = pd.DataFrame({"accuracy": right.double(), "steps": steps.double()})
        found = tokens.groupby(asked.numpy()).mean().reindex([0, *LOOKUPS])
        return found.rename_axis("lookups").reset_index()

    frame = over_seeds(runs, numbers, by=["lookups"], one_text=not data)
    return frame.sort_values("K", kind="stable")


@strict_dataclass
class Lookup(Comparison):
    """Does depth follow difficulty? Models that were trained on the lookup task."""

    tau: Share | None = None  # where pondering stops; by default where each run scored it
    # the prepared corpus that all are asked about; by default what each was trained on
    data: Given | None = None

    def draw(self):
        def rows(runs, device):
            return lookup_rows(runs, self.tau, device, self.data)

        columns = {"method": "method", "K": "K:.0f", "seeds": "seeds:.0f", "lookups": "lookups:.0f"}
        columns |= {"accuracy": "accuracy:.3f", "extra steps": "steps:.2f"}
        frame = self.frame("lookup", columns, rows)
        x = "lookups that the next token takes (0: filler)"
        figure, (left, right) = new_figure(x, "", panels=2)
        for axes, y in ((left, "accuracy"), (right, "steps")):
            draw_curves(axes, frame, curve_names(frame), "lookups", y)
        left.axhline(1 / CHAINS, color="#777777", linestyle=":", label="guessing; lookups - 1")
        right.plot(LOOKUPS, [n - 1 for n in LOOKUPS], color="#777777", linestyle=":")
        left.set_ylabel("share of right answers")
        right.set_ylabel("executed steps")
        save_figure(figure, self.out / "lookup.png", legend_of=left)
