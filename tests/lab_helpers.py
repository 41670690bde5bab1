"""What the tests of the lab share: models of each method, a small training.

What they share with those of the root is in helpers.py, and can be imported from here as well.
"""

import contextlib
import io
import runpy
import signal
import sys
import warnings
from unittest.mock import patch

import pytest
import torch
from helpers import GOLDEN, ROOT, SHAPE, decode, full_disk, python, start, tokens  # noqa: F401
from placement import DEVICE, TEST_DEVICE

from lab.interop.weights import save
from lab.methods import PonderConfig, build, configure, find, unused_settings
from tokenizer import Tokenizer
from train import TrainConfig

LLAMA3 = dict(  # options of backbones/llama3.py that matter within a few tokens
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8.0
)
NEOX = dict(backbone="gpt_neox", num_key_value_heads=None)


@pytest.fixture(autouse=True)
def tokens_alone(request, monkeypatch):
    """On a GPU tests compare tokens and steps: nobody can look at logits within a CUDA graph."""
    if DEVICE != "cpu" and "logits" in request.fixturenames:
        request.getfixturevalue("logits")  # which looks at them
        monkeypatch.undo()
        monkeypatch.setattr(request.module, "compare", lambda seen: None)


def small_model(seed=0, router_scale=5.0, method="ponderlm3", **kwargs):
    """As helpers.small_model, of any method. ponder_steps=0 is the method vanilla."""
    torch.manual_seed(seed)
    method = "vanilla" if kwargs.get("ponder_steps") == 0 else method
    config = configure(PonderConfig(**SHAPE), method, **kwargs)
    if config.router_offset is None and "router_offset" not in unused_settings(find(method)):
        config.router_offset = (0.0,) * (config.ponder_steps + 1)
    model = build(config)
    if model.feedback:
        torch.nn.init.normal_(model.feedback.weight, std=1.5)
    if model.has_router:
        for weight in (p for p in model.router.parameters() if p.dim() == 2):
            torch.nn.init.normal_(weight, std=router_scale / config.hidden_size**0.5)
    return model.double().eval().to(TEST_DEVICE)


@pytest.fixture
def config(tmp_path):
    """A training of a second; its model is `shape`."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
    how = dict(steps=30, batch_size=8, learning_rate=1e-2, device="cpu", precision="float32")
    how |= dict(log_every=5, eval_every=10, eval_windows=8)
    return TrainConfig("tiny", data=str(text), out=str(tmp_path / "out"), **how)


@pytest.fixture
def shape():
    """Of the model of `config`."""
    return PonderConfig(257, 32, 64, 1, 2, head_dim=16, block_size=16, ponder_steps=2)


def method_model(method, **kwargs):
    """A small model whose MoR routers are as undecided as its PonderLM-3 router is not."""
    kwargs = {"router_scale": 12.0, **kwargs} if find(method).has_router else kwargs
    return small_model(seed=2, method=method, **kwargs)


def same_weights(a, b):
    """Whether two models have the same tensors under the same names, bit for bit."""
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def save_for_bytes(model, folder):
    """Save a model of bytes with its tokenizer. -> the directory"""
    save(model.float(), folder)
    Tokenizer.named("bytes").save(folder / "tokenizer.json")
    return folder


def records(frame):
    """The rows of a frame as dicts, None for nothing."""
    frame = frame.astype(object)
    return frame.where(frame.notna(), None).to_dict("records")


def flags(runs):
    return tuple(map(str, runs))


def run_command(what, arguments, folder, out=None):
    """Run a script of the root, or a module, as `python` does, in this process; `out` is its standard output.
    -> its exit, what it printed if there is no `out`, and its errors"""
    name, *arguments = *what.split(), *arguments
    name = str(ROOT / name) if name.endswith(".py") else name
    printed, said = (io.TextIOWrapper(io.BytesIO(), code) for code in ("utf-8", "ascii"))
    code = None
    with (
        contextlib.chdir(folder),
        patch.object(sys, "argv", [name, *arguments]),
        patch.object(signal, "signal"),  # the tests keep theirs
        contextlib.redirect_stdout(out or printed),
        contextlib.redirect_stderr(said),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # of a module that was imported before
        try:
            if name.endswith(".py"):
                runpy.run_path(name, run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            sys.stdout.flush()
        except SystemExit as end:
            code = end.code
    printed.flush()
    said.flush()
    return code, printed.buffer.getvalue().decode(), said.buffer.getvalue().decode()
