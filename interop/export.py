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
import inspect
from dataclasses import asdict
from pathlib import Path

from baselines import find, find_backbone
from interop import FOR_TRANSFORMERS, FORMAT, save, write_directory
from runtime import UserError, write_json, write_text

ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "interop" / "templates" / "modeling_ponderlm.py.txt"
BEFORE = ("runtime/__init__.py", "attention.py", "router.py", "model.py")
BEHIND = ("engine/prefill.py", "evaluation/scoring.py")


def export(model, directory, tau=1e-4, begin=None, end=None):
    """Write a directory that transformers' AutoModelForCausalLM loads, and `interop.load`, too.

    Without pondering (K = 0) it is a Llama or GPT-NeoX, which transformers knows.

    Args:
        tau: of the generation config. begin, end: the tokenizer's ids, for the same.

    Raises:
        UserError: tau is outside [0, 1].
    """
    if not 0 <= tau <= 1:
        raise UserError(f"tau = {tau} is not a probability: it must lie in [0, 1]")
    directory = Path(directory)
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    if model.config.method == "vanilla":
        save(model, directory)
    else:
        tensors = model.state_dict()
        if tied := model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        places = ("AutoConfig", "Config"), ("AutoModelForCausalLM", "ForCausalLM")
        config = {
            "model_type": FOR_TRANSFORMERS,
            "architectures": ["PonderLMForCausalLM"],
            "auto_map": {auto: f"modeling_ponderlm.PonderLM{name}" for auto, name in places},
            "tie_word_embeddings": tied,
            "dtype": str(model.lm_head.weight.dtype)[6:],
            "ponder": {"format": FORMAT, **asdict(model.config)},
        }
        write_directory(directory, config | ids, tensors)
        write_text(directory / "modeling_ponderlm.py", modelling_file(model.config))
        ids["tau"] = tau
    write_json(directory / "generation_config.json", ids)


# -- The modelling file ----------------------------------------------------------------------------


def files_of(module):
    """The file of a method, behind those of the methods whose classes it takes."""
    classes = [kind for kind in vars(module).values() if isinstance(kind, type)]
    taken = {kind.__module__: inspect.getmodule(kind) for kind in classes}
    others = [m for name, m in taken.items() if name.startswith("baselines.") and m != module]
    return [*(file for other in others for file in files_of(other)), inspect.getsourcefile(module)]


def modelling_file(config):
    """The text of modeling_ponderlm.py for models of a config's method and backbone."""
    method, backbone = find(config.method), find_backbone(config.backbone)
    own = [inspect.getsourcefile(backbone), *files_of(inspect.getmodule(method))]
    files = dict.fromkeys([*(ROOT / name for name in BEFORE), *map(Path, own)])
    files |= dict.fromkeys(ROOT / name for name in BEHIND)
    template = TEMPLATE.read_text("utf-8")
    chosen = f"METHOD, BACKBONE = {method.__name__}, {backbone.__name__}\n"
    imports, code = needed(template + chosen, files)
    template = template.replace("# IMPORTS\n", "".join(imports))
    return template.replace("# CODE\n", "\n\n".join(code) + "\n\n" + chosen)


def needed(text, files):
    """What a text needs of some files, directly or not: import lines, and statements."""
    found = [statement for file in files for statement in statements(file)]
    own = {name for node in ast.parse(text).body for name in names_of(node)}
    left, chosen, done = used(ast.parse(text)), set(), set()
    while left - done:
        new = left - done
        done |= new
        for i, (names, _, node) in enumerate(found):
            if new & names - own and i not in chosen:
                chosen.add(i)
                left = left | used(node)
    kept = [found[i] for i in sorted(chosen)]
    is_import = ast.Import | ast.ImportFrom
    imports = {line: None for _, line, node in kept if isinstance(node, is_import)}
    return list(imports), [code for _, code, node in kept if not isinstance(node, is_import)]


def used(node):
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def names_of(node):
    """The names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    return {part.id for part in names if isinstance(part.ctx, ast.Store)}


def statements(file):
    """Yield (names, text, node) for each statement of a file: with the comments right above it, an
    import of others' packages as one for each name, and no imports of the project's."""
    source = file.read_text("utf-8")
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.If | ast.Expr):  # what runs as a script, docstrings
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            ours = ROOT / (getattr(node, "module", None) or node.names[0].name).replace(".", "/")
            for alias in node.names:
                if not (ours.is_dir() or ours.with_suffix(".py").exists()):
                    node.names = [alias]
                    copied = ast.parse(ast.unparse(node)).body[0]
                    yield names_of(copied), ast.unparse(node) + "\n", copied
            continue
        first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])]) - 1
        while lines[first - 1].startswith("#") and not lines[first - 1].startswith("# --"):
            first -= 1
        yield names_of(node), "\n".join(lines[first : node.end_lineno]) + "\n", node
