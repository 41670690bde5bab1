"""Does depth follow difficulty, where that is known? The lookup task (corpora/lookup.py)."""

from dataclasses import replace

import pandas as pd
from pydantic import PositiveInt

from analyze import by_token
from lab.common import Given, strict_dataclass
from lab.corpora.lookup import longest_of, lookups_asked
from lab.engine.prefill import stopped_states
from lab.evaluation.texts import Share
from lab.figures.comparing import Comparison, curve_names, draw_curves, over_seeds
from lab.figures.subject import open_subject
from lab.figures.tables import new_figure, save_figure
from lab.interop.warm_start import longer, start_from
from model import UserError


def answers(subject):
    """Of each token that takes a known number of lookups: that number, whether the next token is
    predicted (the most probable one), and the executed steps -> (n,) each, decoded at tau."""
    model = subject.model

    def find(x, y):
        h, s, steps = stopped_states(model, x, subject.tau)
        right = model.lm_head(model.integrate(h, s, steps)).argmax(-1) == y
        return lookups_asked(x, subject.tokenizer), right, steps

    asked, *found = by_token(subject.windows, find)
    return [values[asked >= 0] for values in (asked, *found)]


def lookup_rows(runs, tau, device, data=None, most=()):
    """One row for each method, K, `most` and number of lookups, 0 for filler, over the seeds.

    Asked of at most 1024 lines, of the corpus `data` if that is given. `most`: the most steps that
    a model may take, instead of K: what the router says of its last step holds for the new ones.
    """

    def numbers(run):
        subject, shape, found = open_subject(run.path, 1024, tau, device, data, other=True), run.shape, []
        for n in most or [shape.ponder_steps]:
            if n < shape.ponder_steps:
                raise UserError(f"--most {n}: {run.path} takes {shape.ponder_steps} steps already")
            if n != shape.ponder_steps:
                grown = replace(shape, ponder_steps=n, router_offset=longer(shape, n))
                subject.model = start_from(run.path, grown).to(device).eval()
            asked, right, steps = answers(subject)
            tokens = pd.DataFrame({"accuracy": right.double(), "steps": steps.double()})
            rows = tokens.groupby(asked.numpy()).mean()
            rows = rows.reindex(range(longest_of(subject.tokenizer) + 1)).rename_axis("lookups")
            found.append(rows.reset_index().assign(most=n))
        return pd.concat(found)

    frame = over_seeds(runs, numbers, by=["most", "lookups"], one_text=not data)
    # grown models differ in what K says already
    frame["method"] = frame.method.str.replace(r", router_offset( -?[\d.]+)+", "", regex=True)
    return frame.sort_values("K", kind="stable")


@strict_dataclass
class Lookup(Comparison):
    """Does depth follow difficulty? Models that were trained on the lookup task."""

    tau: Share | None = None  # where pondering stops; by default where each run scored it
    data: Given | None = None  # the prepared corpus that all are asked about
    most: tuple[PositiveInt, ...] = ()  # steps that each may take, instead of its K

    def draw(self):
        def rows(runs, device):
            return lookup_rows(runs, self.tau, device, self.data, self.most)

        columns = {"method": "method", "K": "K:.0f", "most": "most:.0f", "seeds": "seeds:.0f"}
        columns |= {"lookups": "lookups:.0f"}
        columns |= {"accuracy": "accuracy:.3f", "extra steps": "steps:.2f"}
        frame = self.frame("lookup", columns, rows)
        x = "lookups that the next token takes (0: filler)"
        figure, (left, right) = new_figure(x, "", panels=2)
        names = curve_names(frame)
        if (frame.most != frame.K).any():
            names += frame.most.map(", at most {:.0f} steps".format)
        for axes, y in ((left, "accuracy"), (right, "steps")):
            draw_curves(axes, frame, names, "lookups", y, "most")
        longest = frame.lookups.max()
        right.plot([1, longest], [0, longest - 1], color="#777777", linestyle=":", label="lookups - 1")
        left.set_ylabel("share of right answers")
        right.set_ylabel("executed steps")
        save_figure(figure, self.out / "lookup.png")
