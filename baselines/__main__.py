"""`python -m baselines`: what a token costs."""

from dataclasses import asdict

import tyro

from baselines import configure
from baselines.cost import PAPER, PAPER_PARAMETERS, cost, paper_flops, parameters
from interop import read_config
from runtime import command_line
from training.config import PRESETS
from training.runs import read_results


def main(run: str | None = None):
    """What a token costs: the compute column of the paper's table and the shapes, or a model's.

    Args:
        run: directory of a trained model
    """
    if run is not None:
        config, steps = read_config(run), read_results(run)["hard"]["steps"]
        costs = asdict(cost(config, steps))
        print(f"{run}: {config.method}, {steps:.2f} of {config.ponder_steps} extra steps a token")
        for name, value in costs.items():
            print(f"{name:20}{value:18,.2f}")
        return
    print(f"The paper's column, 6 N (1 + steps) with N = {PAPER_PARAMETERS / 1e9:.2f} G parameters")
    print(f"{'':26}{'steps':>7}{'G FLOPs':>10}{'printed':>10}")
    for name, (steps, printed) in PAPER.items():
        flops = paper_flops(PAPER_PARAMETERS, steps) / 1e9
        print(f"{name:26}{steps:7.2f}{flops:10.2f}{printed:10.2f}")
    print(f"\nThe shapes, without a router\n{'':8}{'parameters':>12}{'without tables':>16}")
    for name in ("70m", "410m"):
        shape = configure(PRESETS[name].model, "vanilla")
        print(f"{name:8}" + "{:11.1f}M{:15.1f}M".format(*(n / 1e6 for n in parameters(shape))))


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m baselines"))
