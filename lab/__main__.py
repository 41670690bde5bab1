"""python -m lab COMMAND ..      each has --help

train      as train.py, and --method, --init-from
sample     as sample.py for many sequences at once, and for any method
analyze    figures and pages beyond the paper's
evaluate   perplexity and bits per byte of texts; two models compared
bench      speed and memory, as ratios
convert    weights: what a directory holds; ours, Hugging Face's
corpus     prepare texts: JSON lines, large streams, the lookup task
worth      what thinking is worth where the answer is known: a table
puzzle     a model solves puzzles, a lookup a step
"""

import runpy
import sys

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


def main():
    name, *flags = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return print(__doc__.strip())
    if name not in COMMANDS:
        sys.exit(f"error: {name!r} is not one of {', '.join(COMMANDS)}")
    sys.argv = [f"python -m lab {name}", *flags]
    try:
        runpy.run_module(COMMANDS[name], run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("lab", "model", "data", "train", ""):
            raise  # a bug of ours
        needs = f"python -m lab {name} needs the package {error.name}"
        sys.exit(f"error: {needs}: pip install -r lab/requirements.txt")


if __name__ == "__main__":
    main()
