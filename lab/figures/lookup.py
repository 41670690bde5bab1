"""Does depth follow difficulty, where that is known? The lookup task (corpora/lookup.py)."""

from dataclasses import replace

import pandas as pd
import torch
from pydantic import PositiveInt
from torch import nn

from analyze import by_token
from attention import MASKED
from lab.common import Given, strict_dataclass
from lab.corpora.lookup import KINDS, kinds_of, longest_of, lookups_asked
from lab.engine.prefill import stopped_states
from lab.evaluation.texts import Share
from lab.figures.comparing import Comparison, curve_names, draw_curves, over_seeds
from lab.figures.subject import decoded, open_subject
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


class Stilled(nn.Module):
    """A router that lets some places of a line take no step, whatever it would say of them."""

    def __init__(self, router, places):
        super().__init__()
        self.router, self.places = router, places  # (T,) bool

    def forward(self, h0, alpha=0.0):
        s, log_w = self.router(h0, alpha)  # (B, T, S)
        still = self.places[:, None] & (torch.arange(s.size(-1), device=s.device) > 0)  # (T, S)
        s = s.masked_fill(still, 0)
        return s / s.sum(-1, keepdim=True), log_w.masked_fill(still, MASKED)


def kind_rows(subject):
    """A row for each kind of token: its share of a line and steps; then, with the steps of these tokens
    taken away, the steps of all and the share of right answers, over all numbers of lookups and at the
    one with the fewest. The first row is of all tokens as they are, the last without the steps that
    neither read the table nor answer."""
    model, T = subject.model, subject.windows.size(1) - 1
    _, steps = decoded(subject)
    kinds = kinds_of(T, subject.tokenizer).to(subject.windows.device)
    idle = [KINDS.index(kind) for kind in KINDS if kind not in ("pair", "question")]
    rows, router = [], model.router
    for name, stilled in [("all", []), *((kind, [i]) for i, kind in enumerate(KINDS)), ("idle", idle)]:
        places = torch.isin(kinds, torch.tensor(stilled, device=kinds.device))
        mine = (places if stilled else ~places).repeat(len(subject.windows)).cpu()
        model.router = Stilled(router, places)
        asked, right, _ = answers(subject)
        found = pd.Series(right.double()).groupby(asked.numpy()).mean().drop(0, errors="ignore")
        left = decoded(subject)[1].double().mean().item()
        row = {
            "kind": name,
            "tokens": mine.double().mean().item(),
            "steps": steps[mine].double().mean().item(),
        }
        rows.append(row | {"steps_left": left, "right_left": found.mean(), "worst_left": found.min()})
    model.router = router
    return pd.DataFrame(rows)


@strict_dataclass
class Kinds(Comparison):
    """Which tokens of the lookup task take steps, and which of these steps are used? A table."""

    tau: Share | None = None  # where pondering stops; by default where each run scored it
    data: Given | None = None  # the prepared corpus that all are asked about

    def draw(self):
        def numbers(run, device):
            if not run.method.has_router:
                raise UserError(f"{run.path} is of method {run.shape.method}: it has no router")
            return kind_rows(open_subject(run.path, 400, self.tau, device, self.data, other=True))

        def rows(runs, device):
            return over_seeds(runs, lambda run: numbers(run, device), by=["kind"], one_text=not self.data)

        columns = {"method": "method", "K": "K:.0f", "seeds": "seeds:.0f", "kind": "kind"}
        columns |= {"share of tokens": "tokens:.3f", "steps": "steps:.2f", "steps without": "steps_left:.2f"}
        columns |= {"right without": "right_left:.3f", "fewest right": "worst_left:.3f"}
        self.frame("kinds", columns, rows)
