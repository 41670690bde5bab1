"""Which setting? Chosen by one part of the validation text, reported on another.

choose, choose_steps    loss in nats a token and executed steps as it decodes, hard-stopped at the tau of
                        each run, on windows that results.json does not have: by these one chooses
loss, steps             the same on the windows of results.json: these one reports
trained, fixed          soft masks there, with the R of the training and at the fixed point
stop_k                  share of tokens there whose last step is k
"""

from lab.common import Count, Given, strict_dataclass
from lab.evaluation.texts import validation_windows
from lab.figures.comparing import Comparison, over_seeds
from lab.interop import load
from model import UserError
from train import evaluate


def choose_rows(runs, windows, device, data=None):
    """One row for each method, K and setting in which the runs differ; the best by `choose` first."""

    def numbers(run):
        _, _, val = validation_windows(run.path, data)
        first, hard = run.config.eval_windows, run.results["hard"]
        if val.count < first + windows:
            raise UserError(
                f"{run.path}: {first} of {val.count} windows are reported, less than {windows} left"
            )
        other = evaluate(load(run.path).to(device), val, windows, tau=run.config.tau, first=first)
        row = {"choose": other["loss"], "choose_steps": other["steps"]}
        row |= {"loss": hard["loss"], "steps": hard["steps"]}
        row |= {way: run.results[way]["loss"] for way in ("trained", "fixed")}
        return [row | {f"stop_{k}": share for k, share in enumerate(hard["stopped"])}]

    return over_seeds(runs, numbers).sort_values("choose", kind="stable")


@strict_dataclass
class Choose(Comparison):
    """Settings compared by a part of the validation text that is not reported: a table."""

    windows: Count = 256  # to choose by, behind those of the final evaluation
    data: Given | None = None  # the text that they were scored on, if that is no named corpus

    def draw(self):
        columns = {"method": "method", "K": "K:.0f", "seeds": "seeds:.0f", "to choose by": "choose:.4f"}
        columns |= {"loss": "loss:.4f", "extra steps": "steps:.2f"}
        columns |= {"as trained": "trained:.4f", "at the fixed point": "fixed:.4f"}
        self.frame("choose", columns, lambda runs, device: choose_rows(runs, self.windows, device, self.data))
