"""What is it worth at the price of its training? Losses against slots and against text.

word         meaning
loss         nats per token as it decodes, stopped at the tau that its training chose
slots        that ran forward in training, in millions: training forwards (baselines/cost.py) times
             the tokens that were read
read         text: tokens that were read, in millions, again and again where the corpus is shorter
difference   a run's loss minus that of the reference with the same seed (and K, where the reference
             was trained with several): below 0 the run is better
interval     half the width of the 95 % interval of its mean (Student's t over the seeds)
"""

from analysis.comparing import Comparison, draw_curves, over_seeds
from analysis.frontier import interval, with_interval
from analysis.tables import new_figure, save_figure, tabulate
from baselines.cost import cost
from model import strict_dataclass
from runtime import UserError


def budget_rows(runs, reference):
    """One row for each method and K: loss, steps, slots, text and the difference to `reference`."""
    losses = {}  # of the reference, by seed and K
    for run in runs:
        pair = run.config.seed, run.shape.ponder_steps
        if run.shape.method == reference and pair in losses:
            raise UserError(f"{run.path}: another {reference} with its K and seed: leave one out")
        if run.shape.method == reference:
            losses[pair] = stopped(run)["loss"]
    if not losses:
        raise UserError(f"no run of {reference} among those given: name one with --reference")
    one = len({K for _, K in losses}) == 1

    def measure(run):
        scores, seed, K = stopped(run), run.config.seed, run.shape.ponder_steps
        same = next((x for (s, k), x in losses.items() if s == seed and (one or k == K)), None)
        if same is None:
            raise UserError(f"{run.path}: no {reference} with its seed (and K): leave it out")
        text = run.config.steps * run.config.batch_size * run.shape.block_size / 1e6
        forwards = cost(run.shape, scores["steps"]).training_forwards
        row = {"steps": scores["steps"], "loss": scores["loss"], "read": text}
        return [row | {"slots": forwards * text, "difference": scores["loss"] - same}]

    frame = over_seeds(runs, measure).drop(columns=["read_std", "slots_std"])
    frame["interval"] = list(map(interval, frame.difference_std, frame.seeds))
    return frame


def stopped(run):
    """Its scores at the tau that its training chose, where it chose one."""
    return run.results["chosen"] or run.results["hard"]


def budget_table(frame):
    columns = {"method": "method", "K": "K:.0f", "seeds": "seeds:.0f", "text, M": "read:.2f"}
    columns |= {"training slots, M": "slots:.1f", "extra steps": "steps:.2f", "loss": "loss:.4f"}
    return tabulate(with_interval(frame), columns | {"difference, 95 %": "difference:.4f"})


@strict_dataclass
class Budget(Comparison):
    """Losses against what training took, slots and text, by pairs of seeds: table and figure."""

    reference: str = "vanilla"  # the method that others are compared with

    def draw(self):
        frame = self.frame(
            "budget", budget_table, lambda runs, device: budget_rows(runs, self.reference)
        )
        labels = {"steps": "executed extra steps per token"}
        labels |= {
            "slots": "slots that ran in training, millions",
            "read": "text read, millions of tokens",
        }
        differ = [x for x in labels if frame[x].max() > 1.01 * frame[x].min() + 0.01]
        figure, panels = new_figure(
            "", "loss, nats per token (lower is better)", panels=len(differ)
        )
        for axes, x in zip(panels, differ, strict=True):
            draw_curves(axes, frame, frame.method, x, "loss")
            axes.set(xlabel=labels[x])
        save_figure(figure, self.out / "budget.png", legend_of=panels[0])
