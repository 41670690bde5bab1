"""What is it worth at the price of its training? Losses against slots and against text.

word         meaning
loss         nats per token as it decodes, hard-stopped at tau
slots        that ran forward in training, in millions: training forwards (methods/cost.py) times
             the tokens that were read
read         text: tokens that were read, in millions, again and again where the corpus is shorter
difference   a run's loss minus that of the reference with the same seed (and K, where the reference
             was trained with several): below 0 the run is better
interval     half the width of the 95 % interval of its mean (Student's t over the seeds)
"""

from lab.common import strict_dataclass
from lab.figures.comparing import Comparison, draw_curves, over_seeds
from lab.figures.frontier import with_interval
from lab.figures.tables import new_figure, save_figure, tabulate
from lab.intervals import interval
from lab.methods.cost import cost
from model import UserError


def budget_rows(runs, reference):
    """One row for each method, setting and K: loss, steps, slots, text and the difference to `reference`.

    Raises:
        UserError: a run without its reference, or with two; or one that began from another model.
    """
    losses = {}  # of the reference, by seed and K
    for run in runs:
        pair = run.config.seed, run.shape.ponder_steps
        if run.recipe["init_from"]:
            raise UserError(f"{run.path} began from a model, whose training is not counted: leave it out")
        if run.shape.method == reference and pair in losses:
            raise UserError(f"{run.path}: another {reference} with its K and seed: leave one out")
        if run.shape.method == reference:
            losses[pair] = run.results["hard"]["loss"]
    if not losses:
        raise UserError(f"no run of {reference} among those given: name one with --reference")
    one = len({K for _, K in losses}) == 1

    def measure(run):
        hard, seed, K = run.results["hard"], run.config.seed, run.shape.ponder_steps
        same = next((x for (s, k), x in losses.items() if s == seed and (one or k == K)), None)
        if same is None:
            raise UserError(f"{run.path}: no {reference} with its seed (and K): leave it out")
        text = run.config.steps * run.config.batch_size * run.shape.block_size / 1e6
        forwards = cost(run.shape, hard["steps"]).training_forwards
        row = {"steps": hard["steps"], "loss": hard["loss"], "read": text}
        return [row | {"slots": forwards * text, "difference": hard["loss"] - same}]

    frame = over_seeds(runs, measure).drop(columns=["read_std", "slots_std"])
    frame["interval"] = list(map(interval, frame.difference_std, frame.seeds))
    return frame


def budget_table(frame):
    columns = {"method": "method", "K": "K:.0f", "seeds": "seeds:.0f", "text, M": "read:.2f"}
    columns |= {"training slots, M": "slots:.1f", "extra steps": "steps:.2f", "loss": "loss:.4f"}
    return tabulate(with_interval(frame), columns | {"difference, 95 %": "difference:.4f"})


@strict_dataclass
class Budget(Comparison):
    """Losses against what training took, slots and text, by pairs of seeds: table and figure."""

    reference: str = "vanilla"  # the method that others are compared with

    def draw(self):
        frame = self.frame("budget", budget_table, lambda runs, device: budget_rows(runs, self.reference))
        labels = {"steps": "executed extra steps per token"}
        labels |= {
            "slots": "slots that ran in training, millions",
            "read": "text read, millions of tokens",
        }
        differ = [x for x in labels if frame[x].max() > 1.01 * frame[x].min() + 0.01]
        figure, panels = new_figure("", "loss, nats per token (lower is better)", panels=len(differ))
        for axes, x in zip(panels, differ, strict=True):
            draw_curves(axes, frame, frame.method, x, "loss")
            axes.set(xlabel=labels[x])
        save_figure(figure, self.out / "budget.png")
