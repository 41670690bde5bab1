"""The results of an acceptance run as the section 'CUDA' of docs/speed.md."""

import shutil
from pathlib import Path
from typing import Annotated

import pandas as pd
import tyro

from runtime import UserError, read_json, write_text

PAGE = Path(__file__).parent.parent / "docs" / "speed.md"
BEGIN, END = "<!-- python -m bench report writes this -->", "<!-- until here -->"
QUESTIONS = {"a": "is it right?", "b": "is it good?", "c": "is it fast?", "d": "does it save?"}
TO_RUN = """\
Nothing has been run on a GPU yet. These commands will, each in less than ten minutes and without a
network. They end with a table, and with an error where a requirement is not met:

- `bash runs/gpu.sh a`, is it right? Every form of attention against float64, the equivalence tests
  on CUDA, training steps against a CPU's, decoding with CUDA graphs against none.
- `bash runs/gpu.sh b`, is it good? `small`, trained for minutes, and without pondering on as many
  tokens.
- `bash runs/gpu.sh c`, is it fast? Attention and the training steps of three sizes against plain
  ones.
- `bash runs/gpu.sh d`, does it save? Early exit, graphs, prompts and contexts, and `transformers`
  beside it.

`python -m bench report out/gpu` then puts the results here."""


def short(x):
    """A cell: numbers in three digits, a blank where there is none."""
    if not isinstance(x, float):
        return "" if x is None else str(x)
    if pd.isna(x):
        return ""
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}"


def table(rows, columns=None):
    """Rows (dicts) in Markdown, of columns {title: key}; None: all."""
    columns = columns or {key: key for key in rows[0]}
    cells = [[short(row[key]) for key in columns.values()] for row in rows]
    lines = [list(columns), ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- What a file of results says -------------------------------------------------------------------


def of_environment(found):
    products = found["operations_per_second"].items()
    products = ", ".join(f"{speed / 1e12:.3g} TFLOP/s in {name}" for name, speed in products)
    yield (
        f"The ceilings: a copy moves {found['bytes_per_second'] / 1e12:.3g} TB/s, square matrix "
        f"products make {products}."
    )
    rows = [
        {"d": row["d"], "in": how, "kernel": f"`{row[how][0][:60]}`"}
        for row in found.get("kernels", ())
        for how in ("training", "decoding")
        if row[how] and row["dtype"] == "bfloat16"
    ]
    if rows:
        yield "The attention kernel in which most of the time goes in bfloat16, by head width d:"
        yield table(rows)


def of_models(*models):
    yield "Losses in nats a token on the validation text, and executed steps:"
    rows = [
        {"method": found["method"], "": kind} | found[kind]
        for found in models
        for kind in ("soft", "hard")
    ]
    yield table(rows, {"method": "method", "": "", "loss": "loss", "steps": "steps"})


def of_attention(found):
    frame = pd.DataFrame(row for row in found["rows"] if row["backend"] != "plain")
    best = frame.loc[frame.groupby(["d", "N"]).time_ratio.idxmin()]
    best["cell"] = best.time_ratio.map("{:.2f} ".format) + best.backend
    best = best.pivot(index="d", columns="N", values="cell").reset_index()
    best.columns = [str(name) if name == "d" else f"N = {name}" for name in best.columns]
    yield "The soft mask in its fastest form, times the fastest plain attention:"
    yield table(best.to_dict("records"))


def of_steps(*presets):
    rows, shown = [], ("plain", "PonderLM-3", "--compile")
    for found in presets:
        size = {"preset": f"`{found['preset']}`", "windows": found["windows"]}
        rows += [size | row for row in found["rows"] if row["case"] in shown]
    optimizer = "with" if presets[0]["optimizer"] else "without"
    yield f"A training step, {optimizer} the optimizer's:"
    columns = {"preset": "preset", "windows": "windows", "": "case", "seconds": "seconds"}
    columns |= {"tokens/s": "tokens_per_second", "MiB": "MiB", "time / plain": "time_ratio"}
    yield table(rows, columns | {"MFU": "mfu"})


def pivot(rows, index, columns, value):
    """A table with a row for each of `index`, and for each of `columns` a column."""
    frame = pd.DataFrame(rows).pivot_table(value, index, columns, aggfunc="first")
    frame.columns = [f"{columns} {name}" for name in frame.columns]
    return table(frame.reset_index().to_dict("records"))


HOW = ["precision", "graphs"]


def of_exit(found):
    frame = pd.DataFrame(found["exit"]).astype({"saved": float})
    frame = frame.groupby([*HOW, "batch"], as_index=False)
    rows = frame[["always_tokens_per_second", "saved"]].median().to_dict("records")
    for row in rows:
        row["cell"] = f"{short(row['always_tokens_per_second'])}, {short(row['saved']) or '-'}"
    yield "Tokens a second of always K, then saved time for each saved slot (medians):"
    yield pivot(rows, HOW, "batch", "cell")


def of_prompts(found):
    yield "Reading a prompt in parallel, and times as long in other ways:"
    columns = {"precision": "precision", "prompt": "prompt", "seconds": "jacobi_seconds"}
    columns |= {"slot by slot": "sequential_ratio", "the simple decoder": "simple_ratio"}
    yield table(found["prompt"], columns | {"in parallel, all slots": "full_ratio"})


def of_contexts(found):
    yield "Milliseconds for a token of K+1 slots, with so many slots before it:"
    yield pivot(found["context"], HOW, "slots", "milliseconds")


def of_others(found):
    rows = [row for row in found["others"] if row["against"] == "transformers"]
    if rows:
        yield "At K = 0, times as many tokens a second as `transformers`:"
        yield pivot(rows, ["precision", "prompt"], "batch", "ratio")


SAYS = {
    "env.json": of_environment,
    "loss-*.json": of_models,
    "attention-*.json": of_attention,
    "train-*.json": of_steps,
    "decode-*-exit.json": of_exit,
    "decode-*-prompt.json": of_prompts,
    "decode-*-context.json": of_contexts,
    "decode-*-others.json": of_others,
}


def state(part, file):
    """One line on how a part was run."""
    line = f"- {part}, {QUESTIONS[part]} "
    if not file.exists():
        return f"{line}Not run yet: `bash runs/gpu.sh {part}`."
    found, where = read_json(file), read_json(file)["machine"]
    line += f"On {where['device']}" + " at toy sizes, which measures nothing" * found["toy"]
    line += f"; torch {where['torch']}, {where['time']}, commit {found['commit']}."
    left = [f"{row['step']} ({row['status']})" for row in found["steps"] if row["status"] != "done"]
    return line + (f" Not all was done: {', '.join(left)}." if left else "")


def section(folder):
    """The text of the section, of the results in folder/a to folder/d."""
    files = {part: folder / part / "summary.json" for part in QUESTIONS}
    if not any(file.exists() for file in files.values()):
        return TO_RUN
    gates = [
        {"": part} | row
        for part, file in files.items()
        if file.exists()
        for row in read_json(file)["gates"]
    ]
    text = ["\n".join(state(part, file) for part, file in files.items()), table(gates)]
    for part in QUESTIONS:
        for name, says in SAYS.items():
            found = [read_json(file) for file in sorted((folder / part).glob(name))]
            text += says(*found) if found else []
    return "\n\n".join(text)


def report(results: Annotated[Path, tyro.conf.Positional] = Path("out/gpu"), page: Path = PAGE):
    """Keep the results of an acceptance run beside the page, and fill its section with them.

    Args:
        results: the folder with those of each part; parts that are not in it stay as they were
        page: with the section, between two lines that say so
    """
    kept = page.parent / "figures" / "cuda"
    parts = [part for part in QUESTIONS if (results / part / "summary.json").exists()]
    if not parts:
        raise UserError(f"{results} holds no results; bash runs/gpu.sh a makes some")
    for part in parts:
        shutil.rmtree(kept / part, ignore_errors=True)
        (kept / part).mkdir(parents=True)
        for file in (results / part).glob("*.json"):
            shutil.copy(file, kept / part)
    write_section(page, section(kept))
    print(f"written: {page}, from {', '.join(parts)} in {kept}")


def write_section(page, text):
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    write_text(page, f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
