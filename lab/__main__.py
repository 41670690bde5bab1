"""python -m lab COMMAND ..      every command has --help

train      train a model of any pondering method (--method), also from a trained model (--init-from)
sample     continue many texts at once, with a model of any method
analyze    draw figures that analyze.py does not, write a page that runs a model
evaluate   measure perplexity and bits per byte on texts, or compare two models
bench      measure speed and memory
convert    show a directory of weights, or convert it to or from the Hugging Face format
corpus     prepare a corpus: JSON lines, large streams, or the lookup task
worth      show what extra steps are worth on puzzles: a table and a figure
puzzle     show how a model solves puzzles, one lookup per extra step
"""

import runpy
import sys
from pathlib import Path

COMMANDS = {
    "train": "lab.train",
    "sample": "lab.engine",
    "analyze": "lab.figures",
    "evaluate": "lab.evaluation",
    "bench": "lab.bench",
    "convert": "lab.interop",
    "corpus": "lab.corpora",
    "worth": "lab.figures.lookup",
    "puzzle": "lab.figures.puzzle",
}

# `python -OO` drops docstrings.
HELP = __doc__.strip() if __doc__ else f"python -m lab COMMAND --help; commands: {', '.join(COMMANDS)}"


def main():
    name, *flags = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return print(HELP)
    if name not in COMMANDS:
        sys.exit(f"error: there is no command {name!r}: give one of {', '.join(COMMANDS)}")
    sys.argv = [f"python -m lab {name}", *flags]
    try:
        runpy.run_module(COMMANDS[name], run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "lab") or Path(__file__).parents[1].joinpath(f"{package}.py").exists():
            raise  # a bug of this project
        needs = f"python -m lab {name} needs the package {error.name}"
        sys.exit(f"error: {needs}: pip install -r lab/requirements.txt")


if __name__ == "__main__":
    main()
