"""What a model has cost to train, beside its loss: which way to a model that ponders is cheapest?

word        meaning
slots       of the stack, run forward and backward in training, in all: for each token of text, the
            slots of every pass. A pass without gradients counts a third of one. A run that began
            from another one has that one's, too
loss        hard-stopped at tau, as decoding has it, and its executed steps
"""

from analysis.comparing import compared, draw_curves, over_seeds
from analysis.tables import new_figure, save_figure
from baselines import find
from model import slots_of_passes
from runtime import UserError
from training.config import read_run


def slots_of_token(config, steps):
    """Slots that train a token, of a model (PonderConfig) that executes so many steps."""
    kind, last = find(config.method), config.backprop_passes
    if not (kind.iterates and last):
        return kind.training_forwards(config, steps)
    low, high = config.refinements
    each = [slots_of_passes(config.ponder_steps, R) for R in range(low, high + 1)]
    return sum(sum(slots) + 2 * sum(slots[-last:]) for slots in each) / (3 * len(each))


def slots_of_run(config, steps):
    """Slots of a whole training (TrainConfig), and of those that it goes back to.

    Raises:
        UserError: it began from what is not a run, or not here any more.
    """
    tokens = config.steps * config.batch_size * config.model.block_size
    own = tokens * slots_of_token(config.model, steps)
    if not config.init_from:
        return own
    try:
        _, before, _ = read_run(config.init_from)
    except UserError as error:
        raise UserError(f"what {config.init_from} has cost to train is unknown: {error}") from None
    return own + slots_of_run(before, before.model.ponder_steps)


def cost_rows(runs):
    """One row for each method and K, over the seeds."""

    def numbers(run):
        hard = run.results["hard"]
        row = {"steps": hard["steps"], "loss": hard["loss"]}
        return [row | {"slots": slots_of_run(run.config, hard["steps"]) / 1e6}]

    return over_seeds(runs, numbers).drop(columns="slots_std")


def cost_table(frame):
    columns = {"slots, millions": "slots:.2f", "extra steps": "steps:.2f", "loss": "loss:.4f"}
    return compared(frame.sort_values("slots"), columns)


def draw_cost(study):
    frame = study.frame("cost", cost_table, cost_rows)
    figure, (axes,) = new_figure("slots in training, millions (points: K)", "loss per token, nats")
    draw_curves(axes, frame, "slots", "loss")
    axes.set_xscale("log")
    figure.legend(loc="outside lower center", fontsize=7)
    save_figure(figure, study.out / "cost.png")
