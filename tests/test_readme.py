"""The README's commands run, shortened, in a throw-away directory."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OF_ONE_RUN = ("converge", "buckets", "shift", "tokens", "tau", "penalty", "heatmap", "report")
SHORT = {  # appended to a command, so that it takes seconds
    "train.py": "--steps 2 --batch-size 2 --eval-windows 2 --log-every 1",
    "train.py --resume": "--steps 4 --eval-windows 2 --log-every 1",
    "sample.py": "--max-new-tokens 3",
    **{f"analyze.py {name}": "--windows 2" for name in OF_ONE_RUN},
    "evaluate.py": "--windows 3",
    "bench.py attention": "--lengths 256 --widths 56 --repeats 1",
    "bench.py train": "--preset tiny --windows 1 --repeats 1",
    "bench.py decode": "--batch-sizes 1 --prompts 4 --new-tokens 2 --repeats 1 --contexts 8",
}


def readme_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]


COMMANDS = [line for line in readme_commands() if line.startswith(("python ", "torchrun "))]
COMMANDS = [line for line in COMMANDS if "--nnodes" not in line]  # which takes two machines
COMMANDS = [line for line in COMMANDS if "lambada" not in line]  # which takes a network
IN_REPORT = tuple(f"python analyze.py {name} " for name in OF_ONE_RUN[:6])  # which is run, too
COMMANDS = [line for line in COMMANDS if not line.startswith(IN_REPORT)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where the commands run: with the repository's prepared corpora, if there are any yet."""
    directory = tmp_path_factory.mktemp("readme")
    (directory / "data").mkdir()
    for corpus in (ROOT / "data").glob("pydocs-*"):
        (directory / "data" / corpus.name).symlink_to(corpus)
    (directory / "my_texts").mkdir()
    for i in range(40):
        (directory / "my_texts" / f"{i}.txt").write_text(f"{i}: Once upon a time.\n" * 40)
    (directory / "my_tasks").mkdir()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, language in (("capitals.yaml", "yaml"), ("capitals.jsonl", "json")):
        (block,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
        (directory / "my_tasks" / name).write_text(block)
    return directory


def test_readme_has_the_main_commands():
    """Catches a README from which this test reads nothing."""
    scripts = {line.split()[1] for line in COMMANDS}
    assert {"train.py", "sample.py", "bench.py", "attention.py", "router.py", "model.py"} <= scripts
    assert "make test" in readme_commands() and "make demo" in readme_commands()


@pytest.mark.parametrize("line", COMMANDS)
def test_readme_command(line, directory):
    """Catches a README whose commands have drifted from the scripts; in its order, since sampling
    takes the newest run."""
    program, *words = shlex.split(line)
    launch = words[: [word.endswith(".py") for word in words].index(True)]
    script, *arguments = words[len(launch) :]
    if program == "torchrun":
        launch = ["-m", "torch.distributed.run", "--standalone", *launch]
        arguments += ["--preset", "tiny"]
    two_words = f"{script} {(arguments or [''])[0]}"
    short = SHORT.get(two_words, SHORT.get(script, ""))
    short = short.replace("--batch-size 2", "") if launch else short
    short = "" if "--tasks" in arguments else short
    short += " --data my_texts" if "2048" in arguments else ""  # a BPE of much text takes a minute
    # Compiling takes minutes: test_compiled_blocks, which is slow, does it.
    arguments = [word for word in arguments if word != "--compile"]
    command = [sys.executable, *launch, str(ROOT / script), *arguments, *short.split()]
    environment = os.environ | {"PYTHONUTF8": "1"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() and "Traceback" not in done.stderr


def test_tutorial():
    """Catches a tutorial that shows other numbers than the code computes."""
    command = [sys.executable, str(ROOT / "tour.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    steps = re.split(r"(?m)^\d+\. .*\n\n", done.stdout)[1:]
    assert len(steps) == 10
    text = (ROOT / "README.md").read_text("utf-8")
    for shown in steps:
        block = shown.strip("\n")
        assert f"```\n{block}\n```\n" in text, shown


def test_reading_order():
    """Catches a file that the README leaves out, or lists before one that it imports."""
    text = (ROOT / "README.md").read_text("utf-8").split("## Reading order")[1].split("\n## ")[0]
    table = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    files = re.findall(r"`(\w+)\.py`", table)
    assert sorted(files) == sorted(file.stem for file in ROOT.glob("*.py"))
    for i, file in enumerate(files[1:]):  # the tour comes first
        source = (ROOT / f"{file}.py").read_text("utf-8")
        imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
        assert not imported & set(files[i + 2 :]), (file, imported & set(files[i + 2 :]))


def test_links():
    """Catches a link to a file, a function in it, or a heading that is not there."""
    text = (ROOT / "README.md").read_text("utf-8")
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?s)```.*?```", "", text))
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\[([^\]]*)\]\(([^)\s]*)\)", text)
    assert len(links) > 30
    for name, target in links:
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target:
            assert (ROOT / target).is_file(), target
            if name.startswith("`"):
                function = name.strip("`").split(".")[-1]
                source = (ROOT / target).read_text("utf-8")
                assert re.search(rf"(?m)^ *(def |class )?{function}\b", source), name


def test_readme_python(directory):
    """Catches a README whose Python has drifted from the code; it uses a run of the commands."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    code = "\n".join(blocks) + "\nprint(len(samples), len(samples[0].tokens))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "2"
