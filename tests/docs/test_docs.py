"""README.md and the pages of docs/: their commands run, shortened, in a throw-away directory; what
they print, link to and list is there.

Commands run inside this process, since starting Python and importing torch would take longer than
most of them. The corpus is a small text in place of the default one.
"""

import contextlib
import re
import shlex
import shutil

import pandas as pd
import pytest
from lab_helpers import ROOT, python, run_command
from placement import EQUIVALENCE, ON_CPU

import sample
from docs import tables
from lab.intervals import unpaired

README = (ROOT / "README.md").read_text("utf-8")
# In the order of the table in README.md, in which the commands of one use the runs of another.
NAMES = [f"docs/{name}" for name in re.findall(r"\]\(docs/([\w-]+\.md)\)", README.split("## The pages")[1])]
NAMES = ["README.md", *dict.fromkeys(NAMES)]
PAGES = {name: (ROOT / name).read_text("utf-8") for name in NAMES if name != "docs/log.md"}

OF_ONE_RUN = ("converge", "buckets", "shift", "tokens", "tau")
TRAIN = "--steps 2 --batch-size 2 --eval-windows 2 --log-every 1"
SHORT = {  # appended to a command, so that it takes seconds
    "train.py": TRAIN,
    "train.py --resume": "--steps 4 --eval-windows 2 --log-every 1",
    "sample.py": "--max-new-tokens 3",
    **{f"analyze.py {name}": "--windows 2 --data my_texts" for name in OF_ONE_RUN},
    "lab train": TRAIN,
    "lab sample": "--max-new-tokens 3",
    "lab analyze where": "--data my_texts",
    "lab analyze difficulty": "--windows 2 --data my_texts",
    "lab evaluate": "--windows 3",
}


def shell(text):
    """The lines of all blocks of commands, without their comments."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]


COMMANDS = [
    (name, line)
    for name, text in PAGES.items()
    for line in shell(text)
    if line.startswith(("python ", "torchrun "))
    and "--nnodes" not in line  # which takes two machines
    and "zeng123" not in line  # which takes a network
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where the commands run: with some texts."""
    directory = tmp_path_factory.mktemp("pages")
    shutil.copytree(ROOT / "models/docstrings", directory / "models/docstrings")
    (directory / "my_texts").mkdir()
    for i in range(40):
        (directory / "my_texts" / f"{i}.txt").write_text(f"{i}: Once upon a time.\n" * 40)
    return directory


def shortened(line):
    """A command of a page -> the program (a script, or a module), its arguments, torchrun's."""
    program, *words = shlex.split(line)
    if program == "torchrun":
        at = [word.endswith(".py") for word in words].index(True)
        short = TRAIN.replace("--batch-size 2", "") + " --preset tiny --data my_texts"
        return words[at], [*words[at + 1 :], *short.split()], words[:at]
    what, *arguments = words = words[1:] if words[0] == "-m" else words
    names = [" ".join(words[:n]) for n in (3, 2, 1)]
    short = next((SHORT[name] for name in names if name in SHORT), "").split()
    if not {"--resume", "--data", "--corpus"} & {*arguments, *short}:  # the runs here are of these texts
        own = {"train.py": "--data", "lab train": "--data", "lab evaluate": "--corpus"}
        short += [f"{own[name]} my_texts" for name in names if name in own]
    if "--against" in arguments:
        short[short.index("--windows") + 1] = "100"  # fewer have no interval
    return what, [*arguments, *" ".join(short).split()], None


def is_slow(line):
    """Does it take a quarter of a minute?"""
    return pytest.mark.slow if re.search("^torchrun|lab bench", line) else ()


@pytest.mark.parametrize("name, line", [pytest.param(*x, marks=is_slow(x[1])) for x in COMMANDS])
def test_command(name, line, directory):
    """Catches a page whose commands have drifted from the code; in the order of the pages, since
    sampling takes the newest run."""
    what, arguments, launch = shortened(line)
    if launch is None:
        code, printed, said = run_command(what, arguments, directory)
        assert not code and printed.strip(), f"{code}\n{printed}\n{said}"
        return
    command = ["-m", "torch.distributed.run", "--standalone", *launch, ROOT / what, *arguments]
    done = python(*command, cwd=directory, PYTHONUTF8="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() and "Traceback" not in done.stderr


def test_python(directory):
    """Catches a page whose Python has drifted from the code; it uses a run of the commands."""
    blocks = re.findall(r"```python\n(.*?)```", "\n".join(PAGES.values()), re.DOTALL)
    assert blocks
    names = {}
    with contextlib.chdir(directory):
        exec("\n".join(blocks), names)
    assert len(names["samples"]) == 2 and len(names["samples"][0].tokens)


def test_code_and_output_of_the_readme(capsys):
    """Catches a loop that does not stand in model.py so, and what sample.py does not print."""
    (loop,) = re.findall(r"```py\n(.*?)```", README, re.DOTALL)
    assert loop in (ROOT / "model.py").read_text("utf-8")
    (shown,) = re.findall(r"```\n(Return the .*?)```", README, re.DOTALL)
    options = dict(prompt="Return the", seed=1, max_new_tokens=47, show_steps=True, device="cpu")
    sample.main(sample.Options(run=str(ROOT / "models/docstrings"), **options))
    printed = capsys.readouterr().out
    assert all(line in printed for line in shown.splitlines())


def test_what_is_listed():
    """Catches a page, script or folder that nobody finds."""
    assert {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")} == set(NAMES[1:])
    text = README.split("## The files")[1].split("\n## ")[0]
    scripts = re.findall(r"(?m)^\| \[`(\w+)\.py`\]", text)
    assert sorted(scripts) == sorted(file.stem for file in ROOT.glob("*.py"))
    folders = {file.parent.name for file in (ROOT / "lab").glob("*/__init__.py")}
    assert folders <= set(re.findall(r"`(\w+)/`", text))


def anchors(text):
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?s)```.*?```", "", text))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


MODELS = [str(file.relative_to(ROOT)) for file in ROOT.glob("models/*/README.md")]


@pytest.mark.parametrize("name", [*PAGES, "docs/log.md", *MODELS])
def test_links(name):
    """Catches a link to a file, a function in it, or a heading that is not there."""
    text = (ROOT / name).read_text("utf-8")
    links = re.findall(r"\[([^\]]*)\]\(([^)\s]*)\)", text)
    assert links or name == "docs/log.md"
    for shown, target in links:
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.is_file(), target
        if anchor:
            assert anchor in anchors(file.read_text("utf-8")), target
        if file.suffix == ".py" and re.fullmatch(r"`[\w.]+`", shown) and not shown.endswith(".py`"):
            function = shown.strip("`").split(".")[-1]
            assert re.search(rf"(?m)^ *(def |class )?{function}\b", file.read_text("utf-8")), shown
    scripts = re.findall(r"\bbash (\S+\.sh)", text)
    assert name == "docs/log.md" or all((ROOT / script).is_file() for script in scripts)


def test_tests_that_are_named():
    """Catches a test that a page or a list of tests names, and that is not there."""
    tests = "\n".join(file.read_text("utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", "\n".join(PAGES.values()))) | ON_CPU
    assert named <= set(re.findall(r"(?m)^def (\w+)", tests))
    assert all((ROOT / "tests" / name).is_file() for name in EQUIVALENCE)


def test_differences_in_tables():
    """Catches a pair of runs from two machines, an interval by runs that have no partner, and an unpaired
    difference that is paired."""
    rows = [("a", 0, "x", 1.0), ("a", 1, "x", 2.0), ("a", 2, "y", 9.0)]
    rows += [("b", 0, "x", 1.5), ("b", 1, "x", 2.7), ("b", 2, "x", 3.0)]
    frame = pd.DataFrame(rows, columns=["method", "seed", "machine", "loss"])
    titles = {"A": "a", "B": "b"}
    assert tables.cell(frame, titles, "A", "loss +.2f - B") == f"−0.60 ± {12.706 * 0.1:.2f}"
    for sign in "-~":
        assert tables.cell(frame, titles, "B", f"loss +.2f {sign} B") == ""
    difference, half = unpaired([1, 2, 9], [1.5, 2.7, 3])
    assert tables.cell(frame, titles, "A", "loss +.2f ~ B") == f"+{difference:.2f} ± {half:.2f}"
    assert tables.cell(frame, titles, "A", "seed count") == "3"
    older = frame.drop(columns="machine")  # of a file that does not say it
    assert tables.cell(older, titles, "A", "loss +.2f - B").startswith("+1.60 ±")


def test_missing_value_in_tables():
    """Catches a run without a loss that counts as a seed, and that the mean leaves out."""
    frame = pd.DataFrame([("a", 0, 1.0), ("a", 1, None)], columns=["method", "seed", "loss"])
    with pytest.raises(ValueError, match="without loss"):
        tables.cell(frame, {"A": "a"}, "A", "loss .2f ±")


def test_tables():
    """Catches a number in a table that is not what its file has, cell by cell (python -m docs.tables writes
    it anew), and a table of numbers that says nothing of where they are from."""
    texts = {page: page.read_text("utf-8") for page in tables.pages()}
    assert len(tables.TABLE.findall("".join(texts.values()))) > 3
    for page, text in texts.items():
        assert tables.written_anew(text) == text, f"{page}: python -m docs.tables"
        assert not re.search(r"(?m)^\|.*\n[^|\n]", text), f"{page}: text right below a table is a row of it"
        for table in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
            if re.search(r"(?<![\w.])\d[\d,]*\.\d", table[0]):
                above = text[: table.start()].rstrip().rsplit("\n\n", 1)[-1]
                assert above.endswith("-->") and ("<!-- table" in above or "<!-- by hand" in above), table[0]
