"""`train.py --grow 1:2000,2:500,3:500`: learn to take one step, then two, then three (K : steps).

Each stage is a run of its own, NAME-K1, NAME-K2, .., which begins from the one before
(warm_start.py): another part of the text (seed + 1, ..), its own warm-up and cosine, the first
one's tokenizer, and half the default learning rate. The same command, which NAME-grow.json keeps,
goes on where it was stopped.
"""

import argparse
import glob
import os
import re
from pathlib import Path

from runtime import UserError, read_json, write_json
from training.config import check, parse
from training.runs import check_name


def grows(argv):
    return any(re.match("--grow(=|$)", flag) for flag in argv)


def stages(argv):
    """The command lines of the stages that `argv` asks for, those left; itself without --grow.

    Raises:
        UserError: no schedule, a flag that the schedule sets, a stage that train.py would refuse,
            or stages of this name that another command has begun.
    """
    if not grows(argv):
        yield argv
        return
    usage = "train.py --grow K:steps,K:steps,.. [other flags]"
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=usage)
    known.add_argument("--grow")
    known.add_argument("--name", default="grown")
    known.add_argument("--out", default="out")
    known.add_argument("--seed", type=int, default=0)
    known.add_argument("--tokenizer")
    known.add_argument("--vocab-size", "--vocab_size")
    o, flags = known.parse_known_args(argv)
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*(,[1-9]\d*:[1-9]\d*)*", o.grow):
        raise UserError(f"--grow {o.grow}: it should be K:steps,K:steps,.., as in 1:2000,2:500")
    schedule = [tuple(map(int, stage.split(":"))) for stage in o.grow.split(",")]
    depths = [K for K, _ in schedule]
    if depths != sorted(set(depths)):
        raise UserError(f"--grow {o.grow}: each stage needs more steps a token than the one before")
    for flag in ("--steps", "--ponder-steps", "--router-offset", "--resume", "--init-from"):
        if any(re.match(f"{flag}(=|$)", x.replace("_", "-")) for x in flags):
            raise UserError(f"{flag} does not go with --grow, which says it for each stage")
    each = [
        ["--seed", str(o.seed + i), "--ponder-steps", str(K), "--steps", str(steps)]
        for i, (K, steps) in enumerate(schedule)
    ]
    for of_stage in each:  # before the first of them is trained
        check(parse([*flags, *of_stage]))
    runs = [Path(o.out, f"{o.name}-K{K}") for K in depths]
    begun = [(run / "train.json").is_file() for run in runs]
    if begun != sorted(begun, reverse=True):
        missing = runs[begun.index(False)]
        raise UserError(f"{missing} is gone, but not the stages after it: give another --name")
    check_name(o.name)
    kept = Path(o.out, f"{o.name}-grow.json")
    if any(Path(o.out).glob(f"{glob.escape(o.name)}-K*/train.json")):
        before = read_json(kept).get("command") if kept.is_file() else None
        if before != argv:
            command = " ".join(map(str, before or ["a command that is not known any more"]))
            raise UserError(
                f"{o.out}/{o.name}-K.. were begun by {command!r}: go on with that, or give another "
                "--name"
            )
    elif os.environ.get("RANK", "0") == "0":  # one of several processes
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, {"command": argv})
    start = []  # of the first stage: what a vocabulary is made by
    for flag, value in (("--tokenizer", o.tokenizer), ("--vocab-size", o.vocab_size)):
        start += [flag, value] if value else []
    for run, of_stage in zip(runs, each, strict=True):
        where = ["--out", o.out, "--name", run.name]
        if not (run / "train.json").is_file():
            yield [*start, *flags, *where, *of_stage]
        elif not (run / "results.json").is_file():
            yield ["--resume", *where]
        else:
            print(f"{run} is trained; with another --name it would be trained anew")
        start = ["--init-from", str(run)]
