"""A model that ponders, for transformers: a directory with a modelling file of its own.

    model/
        config.json, model.safetensors     our own form, as part of transformers'
        generation_config.json             has tau
        modeling_ponderlm.py               the model, which trust_remote_code=True runs

The modelling file is no second implementation: it is put together from the project's own files, of
which it holds what the template (templates/modeling_ponderlm.py.txt) uses, and what that uses. It
needs torch and transformers alone.
"""

import ast
from copy import copy
from dataclasses import asdict
from functools import cache
from pathlib import Path

from checkpoint import FORMAT
from common import atomic_write, write_json
from lab.interop.weights import FOR_TRANSFORMERS, save
from lab.methods import find, find_backbone

ROOT = Path(__file__).parents[2]
TEMPLATE = Path(__file__).parent / "templates" / "modeling_ponderlm.py.txt"


def export(model, directory, tau=1e-4, begin=None, end=None):
    """Write a directory that transformers' AutoModelForCausalLM loads, and `interop.load`, too.

    Without pondering (K = 0) it is a Llama or GPT-NeoX, which transformers knows.

    Args:
        tau: of the generation config. begin, end: the tokenizer's ids, for the same.
    """
    save(model, directory, begin=begin, end=end)
    if model.config.method == "vanilla":
        return
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    places = ("AutoConfig", "Config"), ("AutoModelForCausalLM", "ForCausalLM")
    config = {
        "model_type": FOR_TRANSFORMERS,
        "architectures": ["PonderLMForCausalLM"],
        "auto_map": {auto: f"modeling_ponderlm.PonderLM{name}" for auto, name in places},
        "tie_word_embeddings": model.config.tie_word_embeddings,
        "dtype": str(model.lm_head.weight.dtype)[6:],
        "ponder": {"format": FORMAT, **asdict(model.config)},
    }
    write_json(Path(directory, "config.json"), config | ids)
    write_json(Path(directory, "generation_config.json"), ids | {"tau": tau})
    text = modelling_file(model.config)
    atomic_write(Path(directory, "modeling_ponderlm.py"), lambda file: file.write_text(text, "utf-8"))


# -- The modelling file ----------------------------------------------------------------------------


def modelling_file(config):
    """The text of modeling_ponderlm.py for models of a config's method and backbone."""
    kinds = find(config.method), find_backbone(config.backbone)
    chosen = [f"from {kind.__module__} import {kind.__name__}\n" for kind in kinds]
    chosen += "METHOD, BACKBONE = {}, {}\n".format(*(kind.__name__ for kind in kinds))
    template = TEMPLATE.read_text("utf-8").replace("# METHOD, BACKBONE\n", "".join(chosen))
    return inlined(template)


def inlined(text):
    """A Python text in which the code itself stands where it was imported from the project.

    What that code imports of others' packages goes to the line `# IMPORTS`.
    """
    body, lines = ast.parse(text).body, text.splitlines(keepends=True)
    ours = [node for node in body if isinstance(node, ast.ImportFrom) and file_of(node.module)]
    code = Code({name for node in body if node not in ours for name in names_of(node)})
    for node in ours:
        lines[node.lineno - 1] = ""
        for alias in node.names:
            code.take(file_of(node.module), alias.name)
    lines[ours[0].lineno - 1] = "\n\n".join(code.statements) + "\n\n"
    return "".join(lines).replace("# IMPORTS\n", "".join(code.imports))


class Code:
    """Statements of the project's files, each behind those that it needs; imports of others'.

    Of several of one name the first that is taken stands for all.
    """

    def __init__(self, own):
        self.names = own  # that are defined already
        self.imports, self.statements = {}, []

    def take(self, file, name):
        """Take what a name in a file stands for, and all that this needs, directly or not."""
        for node, text in () if name in self.names else names_in(file).get(name, ()):
            if isinstance(node, ast.ImportFrom) and (other := file_of(node.module)):
                self.take(other, node.names[0].name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.imports[text] = None
            else:
                self.names |= names_of(node)
                for part in ast.walk(node):
                    if isinstance(part, ast.Name):
                        self.take(file, part.id)
                self.statements.append(text)


def file_of(module):
    """The file of a module of the project; None of another package's."""
    place = ROOT / module.replace(".", "/")
    found = place.with_suffix(".py"), place / "__init__.py"
    return next((file for file in found if file.is_file()), None)


def names_of(node):
    """The names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    return {part.id for part in names if isinstance(part.ctx, ast.Store)}


@cache
def names_in(file):
    """The names of a file: {name: [(statement, its text with the comments right above it)]}. An
    import of several names is one statement for each."""
    source, found = file.read_text("utf-8"), {}
    lines = source.splitlines()
    for node in ast.parse(source).body:
        first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])]) - 1
        while lines[first - 1].startswith("#") and not lines[first - 1].startswith("# --"):
            first -= 1
        pairs = [(node, "\n".join(lines[first : node.end_lineno]) + "\n")]
        if isinstance(node, ast.Import | ast.ImportFrom):
            nodes = [copy(node) for _ in node.names]
            for one, alias in zip(nodes, node.names, strict=True):
                one.names = [alias]
            pairs = [(one, ast.unparse(one) + "\n") for one in nodes]
        for one, text in pairs:
            for name in names_of(one):
                found.setdefault(name, []).append((one, text))
    return found
