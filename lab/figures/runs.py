"""Trained runs that stand side by side in a figure: how they are read, named, and checked against each other.

A name, in the column `method`, is the title of the run's method and those of its settings that are not at
their defaults: 'PonderLM-3, step_price 0.03'. Considered are the method's own settings, and those in which
runs of the same method and the same K differ. So runs with one name are the same training with other seeds
or another K.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path

import pandas as pd

from common import UserError, read_json, user_error_if_unreadable
from lab.interop.weights import read_config
from lab.methods import PonderConfig, all_methods, configure, find
from lab.train import read_run
from train import TrainConfig

# Settings that are no part of a recipe: names; the method, K and the seed, which have columns of their own;
# and settings that change the speed alone.
NOT_IN_RECIPE = {"preset", "name", "out", "resume", "data", "tokenizer", "method", "seed", "ponder_steps"}
NOT_IN_RECIPE |= {"log_every", "eval_every", "device", "attention", "compile", "recompute"}
NOT_IN_RECIPE |= {"micro_batch_size"}
# Columns that say where and on what a run was trained. Two runs of a pair agree in them, and in the seed.
ORIGIN = ["machine", "precision", "text"]


@dataclass
class Run:
    """A finished training."""

    path: Path
    config: TrainConfig  # the settings of the training
    initial_model_config: PonderConfig  # the model's settings as the training began; a method may lower K
    model_config: PonderConfig  # the settings of the trained model
    corpus: dict  # fingerprint of the corpus
    results: dict  # results.json

    @property
    def method(self):
        """The class of its method."""
        return find(self.model_config.method)

    @property
    def K(self):
        """The most extra computations that a token may take, at the start of the training."""
        return self.initial_model_config.ponder_steps

    @property
    def recipe(self):
        """The settings that can affect the result, {name: value}. init_from counts only as given or not."""
        settings = vars(self.config) | vars(self.model_config)
        settings["init_from"] = settings.get("init_from") is not None
        left_out = set(NOT_IN_RECIPE)
        if not self.method.iterates:
            left_out.add("refinements")
        return {name: value for name, value in settings.items() if name not in left_out}

    @property
    def scored(self):
        """How many windows it was scored on."""
        return self.results.get("windows", self.config.eval_windows)

    @property
    def speed(self):
        """Tokens per second at the end of its training.

        Raises:
            UserError: its log is missing or damaged.
        """
        file = self.path / "log.jsonl"
        with user_error_if_unreadable(file):
            log = pd.read_json(file, lines=True)
            return log["tokens_per_second"].dropna().iloc[-1]

    @property
    def origin(self):
        """Where and on what it was trained: {column of ORIGIN: text}, with None for what an older run did not
        record, or an included model, which has no log. A run that was resumed elsewhere has several machines
        or precisions.

        Raises:
            UserError: its log is damaged.
        """
        machines = []
        precisions = []
        file = self.path / "log.jsonl"
        with user_error_if_unreadable(file):
            lines = file.read_text("utf-8").splitlines() if file.exists() else []
            for line in lines:
                row = json.loads(line)
                if "machine" in row:  # the row with which a training begins or resumes
                    threads = "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"
                    machines.append(f"{row['machine']}, {threads}, torch {row['torch']}")
                    precisions.append(row["precision"])
        corpus = {key: value for key, value in self.corpus.items() if key != "name"}
        digest = hashlib.sha256(json.dumps(corpus, sort_keys=True).encode()).hexdigest()
        return {"machine": each_once(machines), "precision": each_once(precisions), "text": digest[:12]}

    def title(self, names):
        """The title of its method and the settings that are not at their defaults.

        Args:
            names: the settings that are considered.
        """
        recipe = self.recipe
        model_defaults = configure(PonderConfig(), self.model_config.method)
        defaults = vars(TrainConfig()) | vars(model_defaults) | {"init_from": False}
        parts = [self.method.title]
        for name in sorted(names):
            if recipe[name] != defaults[name]:
                parts.append(f"{name} {as_typed(recipe[name])}")
        return ", ".join(parts)


def each_once(texts):
    """The different ones among some texts, as one text; None if there are none."""
    return "; ".join(dict.fromkeys(texts)) or None


def as_typed(value):
    """The value of a setting as one types it after its flag: '1 2' for (1, 2)."""
    if isinstance(value, tuple):
        return " ".join(as_typed(part) for part in value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def read_runs(directories):
    """The finished runs among some directories; the other directories are printed.

    Raises:
        UserError: no run is finished, one is damaged, or two are the same training.
    """
    runs = []
    for path in map(Path, directories):
        file = path / "results.json"
        if not file.is_file():
            print(f"note: {path} is not a finished run, and is left out")
            continue
        config, initial_model_config, corpus = read_run(path)
        results = read_json(file)
        with user_error_if_unreadable(file):
            for way in ("trained", "fixed", "hard"):
                if not float(results[way]["loss"]) >= 0:
                    raise ValueError("a loss is negative or not a number: train this run again")
        runs.append(Run(path, config, initial_model_config, read_config(path), corpus, results))
    if not runs:
        raise UserError(
            "there is no finished run among those given: name some, for instance --runs out/*, or train one "
            "with python train.py"
        )
    for a, b in combinations(runs, 2):
        if identity(a) == identity(b):
            what = "repeat the same training (same settings and seed)"
            if getattr(a.config, "init_from", None) != getattr(b.config, "init_from", None):
                what = "differ only in the model that they began with, and so would have the same name"
            raise UserError(f"{a.path} and {b.path} {what}: keep one of them in --runs")
    return runs


def identity(run):
    """What tells one training from another."""
    return run.model_config.method, run.K, run.config.seed, run.recipe, run.origin


def named(runs):
    """{name: the runs that have it}, in the order of all_methods() and by rising K."""
    groups = {}
    general = {field.name for field in fields(PonderConfig)}
    for kind in all_methods():
        of_kind = sorted((run for run in runs if run.method is kind), key=lambda run: run.K)
        own = {field.name for field in fields(kind.Config)} - general
        names = own | differing_settings(of_kind)
        for run in of_kind:
            groups.setdefault(run.title(names), []).append(run)
    return groups


def differing_settings(runs):
    """The names of the settings in which runs with the same K differ."""
    names = set()
    for a, b in combinations(runs, 2):
        if a.K == b.K:
            recipe = b.recipe
            shared = a.recipe.keys() & recipe.keys()
            names |= {name for name in shared if a.recipe[name] != recipe[name]}
    return names


def check_comparable(runs, one_text=True):
    """Refuse runs whose losses cannot be compared, and print what else differs beside the method.

    Args:
        runs: of read_runs.
        one_text: whether they must have been scored on the same text. A figure that scores them itself, on
            another text, does not need that.

    Raises:
        UserError: they were scored on different texts, or on different windows of one.
    """
    first = runs[0]
    for run in runs:
        what = difference_in_scoring(first, run, one_text)
        if what:
            raise UserError(
                f"{first.path} and {run.path} are scored on different {what}: remove one of them from --runs"
            )
    for name in ("steps", "batch_size", "learning_rate"):
        values = {getattr(run.config, name) for run in runs}
        if len(values) > 1:
            print(f"note: the runs also differ in {name}: {', '.join(map(str, sorted(values)))}")


def check_one_recipe(runs, row_of, but=()):
    """Refuse runs that a table would average in one row, although they are not seeds of one recipe.

    Args:
        runs: of read_runs.
        row_of: a function from a run to what tells its row of the table from others.
        but: names of settings in which the runs of a row may differ.

    Raises:
        UserError: two runs of one row differ in their method, K or another setting.
    """
    for a, b in combinations(runs, 2):
        if row_of(a) != row_of(b):
            continue
        different = [name for name in differing_settings([a, b]) if name not in but]
        if a.K != b.K:
            different.append("ponder_steps")
        if max(a.K, b.K) == 0:  # plain models, also of different methods: only their training may differ
            different = [name for name in different if name in vars(a.config)]
        elif a.model_config.method != b.model_config.method:
            different.append("method")
        if different:
            flags = ", ".join("--" + name.replace("_", "-") for name in sorted(different))
            raise UserError(
                f"{a.path} and {b.path} would be averaged in one row, although they differ in {flags}: "
                "remove one of them from --runs"
            )


def difference_in_scoring(a, b, one_text):
    """What differs in how two runs were scored, in words; None if nothing does."""
    if one_text and a.corpus | {"name": ""} != b.corpus | {"name": ""}:
        return "corpora"
    if a.model_config.block_size != b.model_config.block_size:
        return "windows"
    if a.scored != b.scored:
        return "numbers of windows"
    return None


def refuse_without_router(run):
    """Refuse a run whose method lacks PonderLM-3's router.

    Raises:
        UserError: the method lacks it.
    """
    if not run.method.priced:  # that is: it has a router like PonderLM-3's, not just a gate
        raise UserError(
            f"{run.path} (method {run.model_config.method}) has no router like PonderLM-3's: remove it from "
            "--runs"
        )
