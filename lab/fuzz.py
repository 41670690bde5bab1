"""What can a stranger's file do? The files of a run, of a Hugging Face Llama, of prepared texts and of JSON
lines (FILES) are damaged at random, and read by the commands that read them.

    python -m lab fuzz                                 a thousand forms of each file; prints a table
    python -m lab fuzz --gguf FILE                     of this GGUF, too, which is best a small one
    python -m lab fuzz --forms 50 --files config.json --seed 1

A form is bytes that are changed, cut or added, or, of JSON, values that are replaced, dropped or added. It
passes if the command gives a result or says what is wrong in a sentence: no traceback, no signal, at most 10
seconds and ten times the file in memory (beside 200 MB, which any command takes), and nothing written into
the folders around the one that it runs in. What does not pass is kept, and named.
"""

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import tyro

import analyze
import sample
import train
from data import Tokenizer, Windows, open_corpus
from lab.common import command_line, progress
from lab.corpora.huggingface import save_pretrained
from lab.corpora.preparation import prepare
from lab.engine.__main__ import ManyOptions
from lab.engine.__main__ import main as decode
from lab.figures.comparing import Pareto
from lab.interop.__main__ import main as convert
from lab.methods import PonderConfig, configure
from lab.train import LabConfig
from lab.train import train as train_in_lab
from model import Config, UserError

SECONDS, MEMORY = 10, 200 * 2**20
ODD = None, True, -1, 0, 1, 3, 2.5, 10**30, -1e-300, float("inf"), "", "x", "../../../x", [], [1], {}
ODD += "/etc/passwd", "\ud800", [[]], {"a": 1}, "1e999", 2**31, 2**63, "nan"


def make_run():
    """A finished run of a small model, a Llama of Hugging Face, a folder of token ids, one of JSON lines."""
    text = "the quick brown fox jumps over the lazy dog, é of a kind.\n" * 60
    Path("text.txt").write_text(text, "utf-8")
    Path("lines").mkdir()
    Path("lines/a.jsonl").write_text(
        "".join(json.dumps({"text": text[:99], "n": i}) + "\n" for i in range(9))
    )
    shape = Config(257, 16, 32, 1, 2, head_dim=8, block_size=16, ponder_steps=2, refinements=(1, 1))
    config = train.TrainConfig(name="run", out=".", data="text.txt", steps=2, batch_size=2, eval_windows=2)
    train.train(replace(config, device="cpu", precision="float32"), shape)
    plain = LabConfig(**vars(config) | {"name": "plain", "device": "cpu", "precision": "float32"})
    train_in_lab(plain, configure(PonderConfig(**vars(shape)), "vanilla"))
    convert("plain", to=Path("llama"))
    save_pretrained(Tokenizer.bytes(), "llama")  # in place of ours, beside which nothing is read
    Path("llama/generation_config.json").write_text('{"eos_token_id": [255, 256]}')
    Path("llama/special_tokens_map.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    Path("llama/chat_template.jinja").write_text("{{ messages[0].content }}")
    prepared = next(Path("data").iterdir())
    shutil.copytree(prepared, "bins")


def read_run():
    sample.main(run="run", prompt="the", max_new_tokens=2, seed=0)


def decode_run():
    decode(ManyOptions(run="run", prompt="the", max_new_tokens=2, seed=0, device="cpu"))


def convert_run():
    convert("run", to=Path("converted"))


def convert_llama():
    convert("llama", to=Path("converted"))


def decode_llama():
    decode(ManyOptions(run="llama", prompt="the", max_new_tokens=2, seed=0, device="cpu"))


def convert_gguf():
    convert("model.gguf", to=Path("converted"))


def resume():
    train.train(*train.parse(["--resume", "--out=.", "--name=run", "--steps=3", "--device=cpu"]))


def draw():
    analyze.main("tau", run=Path("run"), windows=1, data="text.txt", device="cpu")


def compare():
    analyze.main("pareto", runs=("run",))


def compare_in_lab():
    Pareto(("run",), device="cpu").draw()


def read_ids():
    corpus = open_corpus("bins")
    Windows(corpus.train, 16, 0).rows(0, 2)


def read_text():
    open_corpus("text.txt", "bytes")


def read_lines():
    prepare("lines", "bytes", cache=Path("data"))


FILES = {  # and the commands that read them
    "run/config.json": (read_run, decode_run, convert_run),
    "run/model.safetensors": (read_run, convert_run),
    "run/tokenizer.json": (read_run, decode_run, convert_run),
    "run/train.json": (resume, draw, compare, compare_in_lab),
    "run/trainer.pt": (resume,),
    "run/log.jsonl": (resume,),
    "run/results.json": (compare, compare_in_lab),
    "llama/config.json": (decode_llama, convert_llama),
    "llama/generation_config.json": (decode_llama,),
    "llama/model.safetensors": (decode_llama,),
    "llama/tokenizer.json": (decode_llama, convert_llama),
    "llama/tokenizer_config.json": (decode_llama, convert_llama),
    "llama/special_tokens_map.json": (decode_llama, convert_llama),
    "llama/chat_template.jinja": (decode_llama, convert_llama),
    "bins/train.bin": (read_ids,),
    "bins/meta.json": (read_ids,),
    "bins/tokenizer.json": (read_ids,),
    "lines/a.jsonl": (read_lines,),
    "text.txt": (read_text,),
}


def damage(content, rng):
    """Another form of a file (bytes)."""
    if rng.random() < 0.6:
        with contextlib.suppress(ValueError):
            value = json.loads(content)
            for _ in range(rng.choice([1, 1, 2, 5])):
                value = replaced(value, rng)
            return json.dumps(value).encode("utf-8", "surrogatepass")
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 3, 30])):
        at = rng.randrange(len(content) + 1)
        kind = rng.choice(["change", "cut", "add", "double"])
        if kind == "change" and at < len(content):
            content[at] = rng.randrange(256)
        elif kind == "cut":
            del content[at : at + rng.choice([1, 8, 10**9])]
        elif kind == "add":
            content[at:at] = rng.choice([b"\0", b"\n", b"{", b'"', b"[" * 5000, rng.randbytes(9), b"1e999"])
        else:
            content[at:at] = content[: rng.choice([1, 100, 10**6])]
    return bytes(content)


def replaced(value, rng):
    """JSON in which a value, somewhere, is another one, is gone, or has a key more."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice([*value])
        kind = rng.random()
        if kind < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.25:
            return value | {rng.choice(["x", "__class__", key + " "]): rng.choice(ODD)}
        return value | {key: replaced(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], replaced(value[at], rng), *value[at + rng.choice([1, 1, 1, 2]) :]]
    return rng.choice(ODD)


def outcome(command, size):
    """Run a command in a process of its own -> 'result', 'sentence', or what is wrong."""
    read, write = os.pipe()
    if not (child := os.fork()):
        signal.alarm(SECONDS)
        before, said = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "result"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                command()
            except UserError as error:
                said = "sentence" if str(error).strip() else "an error without words"
            except SystemExit as error:
                said = "sentence" if isinstance(error.code, str) else f"exit {error.code}"
            except BaseException:
                said = traceback.format_exc()[-1500:]
        used = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        if used > MEMORY + 10 * size:
            said = f"{used / 2**20:,.0f} MB of memory"
        os.write(write, said.encode("utf-8", "replace"))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return f"more than {SECONDS} s" if status == -signal.SIGALRM else said or f"ended by signal {-status}"


def attempt(name, command, content, clean):
    """Run a command where one file has this content -> as outcome, or what it wrote outside."""
    with TemporaryDirectory() as around:
        inside = Path(around, "a/b/c/d")
        shutil.copytree(clean, inside)
        (inside / name).write_bytes(content)
        os.chdir(inside)
        said = outcome(command, len(content))
        outside = [
            x for x in Path(around).rglob("*") if not (x.is_relative_to(inside) or inside.is_relative_to(x))
        ]
        os.chdir("/")
        return f"wrote {outside[0]}" if outside else said


def main(
    forms: int = 1000, seed: int = 0, files: tuple[str, ...] = (), gguf: Path | None = None,
    out: Path = Path("out/fuzz"),
):  # fmt: skip
    """Damage files and read them.

    Args:
        forms: of each file, shared by the commands that read it
        seed: of the damage
        files: these alone, by the ends of their names
        gguf: a file of llama.cpp, to be damaged, too
        out: where the forms go that do not pass
    """
    hunted = FILES | ({"model.gguf": (convert_gguf,)} if gguf else {})
    if forms < 1 or any(not any(name.endswith(end) for name in hunted) for end in files):
        raise UserError(f"forms = {forms}, files = {files}: give 1 or more, and of {', '.join(hunted)}")
    torch.set_num_threads(1)
    out, failed, gguf = out.absolute(), 0, gguf and gguf.absolute()
    with TemporaryDirectory() as clean:
        os.chdir(clean)
        with contextlib.redirect_stdout(io.StringIO()):
            make_run()
            if gguf:
                shutil.copy(gguf, "model.gguf")
        print(f"{'file':24}{'forms':>7}{'results':>9}{'sentences':>11}{'others':>8}{'slowest, s':>12}")
        for name, commands in hunted.items():
            if files and not name.endswith(files):
                continue
            content = Path(clean, name).read_bytes()
            with TemporaryDirectory() as undamaged, contextlib.redirect_stdout(io.StringIO()):
                os.chdir(shutil.copytree(clean, undamaged, dirs_exist_ok=True))
                for command in commands:  # in this process: what it imports, its forks need not
                    command()
            rng, found, slowest = random.Random(f"{seed} {name}"), Counter(), 0
            for i in progress(range(forms), desc=name, leave=False):
                form, command, start = damage(content, rng), commands[i % len(commands)], time.monotonic()
                said = attempt(name, command, form, clean)
                slowest = max(slowest, time.monotonic() - start)
                found[said if said in ("result", "sentence") else "other"] += 1
                if said not in ("result", "sentence"):
                    out.mkdir(parents=True, exist_ok=True)
                    kept = out / f"{name.replace('/', '-')}.{command.__name__}.{i}"
                    kept.write_bytes(form)
                    kept.with_name(kept.name + ".txt").write_text(said)
                    print(f"{kept}: {said.strip().splitlines()[-1]:.150}")
            row = f"{found['result']:9}{found['sentence']:11}{found['other']:8}{slowest:12.1f}"
            print(f"{name:24}{forms:7}{row}", flush=True)
            failed += found["other"]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    command_line(lambda: tyro.cli(main, prog="python -m lab fuzz", description=__doc__))
