"""Write a model of any method as a directory that transformers runs, with a modelling file of its own.

    model/
        config.json, model.safetensors     this project's settings, as one field of transformers' config
        generation_config.json             holds tau
        modeling_ponderlm.py               the model, which trust_remote_code=True runs

The modelling file is no second implementation, but is assembled from the project's own files: it holds the
code that the template (templates/modeling_ponderlm.py.txt) uses, and whatever that code uses in turn. To run
it, one needs only torch and transformers.
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
# Names that two files define. kernels.augment serves also where attention.augment is used: both add log w to
# the scores, and all keys of a cache then have the same channels.
INTERCHANGEABLE = {"augment"}


def export(model, directory, tau=1e-4, begin=None, end=None):
    """Write a directory that transformers' AutoModelForCausalLM and weights.load both read.

    A model without pondering (K = 0) is written as a Llama or GPT-NeoX, which transformers knows.

    Args:
        model: a model of any method.
        directory: where to write.
        tau: the tau in the generation config.
        begin, end: ids of the tokens that begin and end a text, for the configs; None: there is no such
        token.
    """
    save(model, directory, begin=begin, end=end)
    if model.config.method == "vanilla":
        return
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    config = {
        "model_type": FOR_TRANSFORMERS,
        "architectures": ["PonderLMForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_ponderlm.PonderLMConfig",
            "AutoModelForCausalLM": "modeling_ponderlm.PonderLMForCausalLM",
        },
        "tie_word_embeddings": model.config.tie_word_embeddings,
        "dtype": str(model.lm_head.weight.dtype).removeprefix("torch."),
        "ponder": {"format": FORMAT, **asdict(model.config)},
    }
    write_json(Path(directory, "config.json"), config | ids)
    write_json(Path(directory, "generation_config.json"), ids | {"tau": tau})
    text = modelling_file(model.config)
    atomic_write(Path(directory, "modeling_ponderlm.py"), lambda file: file.write_text(text, "utf-8"))


# -- The modelling file ----------------------------------------------------------------------------


def modelling_file(config):
    """The text of modeling_ponderlm.py for models with the method and the backbone of a config."""
    method = find(config.method)
    backbone = find_backbone(config.backbone)
    chosen = (
        f"from {method.__module__} import {method.__name__}\n"
        f"from {backbone.__module__} import {backbone.__name__}\n"
        f"METHOD, BACKBONE = {method.__name__}, {backbone.__name__}\n"
    )
    return inlined(TEMPLATE.read_text("utf-8").replace("# METHOD, BACKBONE\n", chosen))


def inlined(text):
    """In a Python text, replace the imports from the project by the code that they import.

    That code needs imports from other packages, which replace the line `# IMPORTS`.
    """
    body = ast.parse(text).body
    lines = text.splitlines(keepends=True)
    ours = [node for node in body if isinstance(node, ast.ImportFrom) and file_of(node.module)]
    own_names = set()
    for node in body:
        if node not in ours:
            own_names |= names_of(node)
    code = Code(own_names)
    for node in ours:
        lines[node.lineno - 1] = ""
        for alias in node.names:
            code.take(file_of(node.module), alias.name)
    lines[ours[0].lineno - 1] = "\n\n".join(code.statements) + "\n\n"
    return "".join(lines).replace("# IMPORTS\n", "".join(code.imports))


class Code:
    """Statements of the project's files, in an order in which each follows the statements that it needs, and
    the imports from other packages.

    Args:
        own: names that are defined already. They take the place of the project's.
    """

    def __init__(self, own):
        self.names = own
        self.file_of_name = {}  # {name that was taken: the file that defines it}
        self.imports = {}  # the texts of imports are its keys, without repetition and in order
        self.statements = []  # texts

    def take(self, file, name):
        """Take the statements that define a name in a file, and everything that these statements need.

        Raises:
            RuntimeError: another file defines the same name, and the two are not interchangeable.
        """
        if name in self.names:
            self.check_same(file, name)
            return
        for node, text in names_in(file).get(name, ()):
            other = file_of(node.module) if isinstance(node, ast.ImportFrom) else None
            if other:
                self.take(other, node.names[0].name)
            elif is_import(node):
                self.imports[text] = None
            else:
                self.names |= names_of(node)
                self.file_of_name |= dict.fromkeys(names_of(node), file)
                for part in ast.walk(node):
                    if isinstance(part, ast.Name):
                        self.take(file, part.id)
                self.statements.append(text)

    def check_same(self, file, name):
        """Raise a RuntimeError if `file` defines a name that was taken from another file."""
        taken_from = self.file_of_name.get(name, file)
        defines = any(not is_import(node) for node, _ in names_in(file).get(name, ()))
        if defines and taken_from != file and name not in INTERCHANGEABLE:
            raise RuntimeError(
                f"{taken_from} and {file} both define {name}, but the exported file can hold only one: "
                "rename one"
            )


def is_import(node):
    """Whether a statement is an import."""
    return isinstance(node, ast.Import | ast.ImportFrom)


def file_of(module):
    """The file of a module of the project; None for a module of another package."""
    place = ROOT / module.replace(".", "/")
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file():
            return file
    return None


def names_of(node):
    """The names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if is_import(node):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    return {part.id for part in names if isinstance(part.ctx, ast.Store)}


@cache
def names_in(file):
    """The names that a file defines: {name: [(statement, its text)]}."""
    source = file.read_text("utf-8")
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        for statement, text in statements_of(node, lines):
            for name in names_of(statement):
                found.setdefault(name, []).append((statement, text))
    return found


def statements_of(node, lines):
    """Split a statement of a module into statements that define one name each, if it is an import.

    Args:
        node: the statement.
        lines: the lines of its file.

    Returns:
        [(statement, its text)]. Comments right above a statement, other than headings, belong to its text.
    """
    if is_import(node):
        pairs = []
        for alias in node.names:
            single = copy(node)
            single.names = [alias]
            pairs.append((single, ast.unparse(single) + "\n"))
        return pairs
    first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])]) - 1
    while lines[first - 1].startswith("#") and not lines[first - 1].startswith("# --"):
        first -= 1
    return [(node, "\n".join(lines[first : node.end_lineno]) + "\n")]
