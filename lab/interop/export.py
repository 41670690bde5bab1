"""A model of any method as a directory that transformers runs, with a modelling file of its own.

    model/
        config.json, model.safetensors     this project's form, as part of transformers'
        generation_config.json             holds tau
        modeling_ponderlm.py               the model, which trust_remote_code=True runs

The modelling file is no second implementation. It is assembled from the project's own files: it holds the
code that the template (templates/modeling_ponderlm.py.txt) uses, and the code that this code uses. It needs
nothing but torch and transformers.
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
    """Write a directory that transformers' AutoModelForCausalLM and weights.load both read.

    A model without pondering (K = 0) is written as a Llama or GPT-NeoX, which transformers knows.

    Args:
        model: of any method.
        directory: where to write.
        tau: for the generation config.
        begin, end: ids of the tokens before and after a text, for the same; None: there is none.
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
    """The text of modeling_ponderlm.py for models of a config's method and backbone."""
    method = find(config.method)
    backbone = find_backbone(config.backbone)
    chosen = (
        f"from {method.__module__} import {method.__name__}\n"
        f"from {backbone.__module__} import {backbone.__name__}\n"
        f"METHOD, BACKBONE = {method.__name__}, {backbone.__name__}\n"
    )
    return inlined(TEMPLATE.read_text("utf-8").replace("# METHOD, BACKBONE\n", chosen))


def inlined(text):
    """Replace the imports of a Python text from the project by the code that they import.

    What that code imports from other packages replaces the line `# IMPORTS`.
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
    """Statements of the project's files, each behind the statements that it needs, and the imports from other
    packages. Where several files define the same name, the first one that is taken stands for all.

    Args:
        own: names that are defined already.
    """

    def __init__(self, own):
        self.names = own
        self.imports = {}  # texts, in their order
        self.statements = []

    def take(self, file, name):
        """Take the statements that define a name in a file, and everything that they need."""
        if name in self.names:
            return
        for node, text in names_in(file).get(name, ()):
            other = file_of(node.module) if isinstance(node, ast.ImportFrom) else None
            if other:
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
    if isinstance(node, ast.Import | ast.ImportFrom):
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
    """A statement with its text, as a list: an import of several names is one statement for each name.

    Args:
        node: the statement.
        lines: of its file. Comments right above the statement, other than headings, belong to its text.
    """
    if isinstance(node, ast.Import | ast.ImportFrom):
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
