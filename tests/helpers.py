"""What the tests of the root share, and those of the lab too: small models, golden files, a full disk.

Nothing here needs more than requirements.txt. What needs the lab is in lab_helpers.py.
"""

import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from placement import TEST_DEVICE
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from attention import LOG_W_HIDDEN, eager
from checkpoint import save
from model import Config, PonderLM
from router import upcast
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"


# -- Models ----------------------------------------------------------------------------------------


SHAPE = dict(vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2, block_size=32)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=2)


def small_model(seed=0, router_scale=5.0, kind=PonderLM, **settings):
    """A float64 model in evaluation mode whose router has random weights, so that tokens differ.

    Random weights alone spread s too evenly for any w to fall below a tau; router_scale makes the
    router decided.
    """
    torch.manual_seed(seed)
    settings = SHAPE | {"ponder_steps": 3} | settings
    settings = {"router_offset": (0.0,) * (settings["ponder_steps"] + 1)} | settings
    model = kind(Config(**settings))
    if model.router is not None:
        torch.nn.init.normal_(model.router.proj.weight, std=router_scale / model.config.hidden_size**0.5)
    return model.double().eval().to(TEST_DEVICE)


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    """A directory of a model with a window of 16 bytes, whose texts end now and then."""
    model, folder = small_model(seed=2, vocab_size=257, block_size=16).float(), tmp_path_factory.mktemp("run")
    with torch.no_grad():
        model.lm_head.weight[256] = 4 * model.lm_head.weight[100]
    save(model, folder)
    Tokenizer.named("bytes").save(folder / "tokenizer.json")
    return str(folder)


class PonderLM2(PonderLM):
    """PonderLM-2: each token takes all K steps, the last state alone predicts, and no key has a weight."""

    method = "ponderlm2"
    mask_keys = staticmethod(lambda log_w, tau=None: None)

    def __init__(self, config):
        super().__init__(config)
        self.router = None

    def route(self, h, alpha=0.0):
        s = upcast(h.new_zeros(*h.shape[:-2], self.config.ponder_steps + 1))
        s[..., -1] = 1
        return s, torch.zeros_like(s)


def read_golden(name, kind=PonderLM2):
    """A golden file: a model with its weights, its other tensors, and the official config."""
    with safe_open(GOLDEN / name, "pt") as file:
        official = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key).to(TEST_DEVICE) for key in file.keys()}  # noqa: SIM118
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = {name: official[name] for name in (*names, "rms_norm_eps", "rope_theta")}
    model = kind(Config(ponder_steps=official["num_latent_thoughts"], **shape))
    model.eval().to(TEST_DEVICE)
    model.load_state_dict({k: tensors.pop(k) for k in list(tensors) if k.endswith(".weight")})
    return model, tensors, official


def tokens(T=10, B=1, V=31, seed=0):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def decode(model, idx, tau=1e-4, alpha=0.0):
    """Read idx (T,) token by token -> logits (T, V), the steps of each, and the cache."""
    cache = model.new_cache()
    pairs = [model.ponder_token(int(token), t, cache, tau, alpha) for t, token in enumerate(idx)]
    logits, steps = zip(*pairs, strict=True)
    return torch.stack(logits), [*steps], cache


@torch.no_grad()
def sequential(model, idx, tau=None, alpha=0.0, printed=False):
    """Section 3.3 without a cache: for every slot the whole prefix anew. (T,) -> logits, steps.

    tau None runs all K steps with soft masks; printed: by the paper's index, w_k on the key of slot k+1.
    """
    inputs, positions, bias, logits, steps, log_w = [], [], [], [], [], None
    feedback = getattr(model, "feedback", None)
    for t, token in enumerate(idx):
        e = model.embed(token[None, None])[0, 0]
        x, h_hat, k, stop = e, 0, 0, 0
        while k <= stop:
            inputs.append(x)
            positions.append(t)
            bias.append(0.0 if k == 0 else float(log_w[k - 1 if printed else k]))
            rows = torch.stack(inputs)[None], torch.tensor(positions)
            h = model.model(*rows, torch.tensor([bias], dtype=x.dtype), eager)[0, -1]
            if k == 0:
                s, log_w = model.route(h[None], alpha)
                w = log_w.exp()
                stop = max(j for j in range(len(w)) if not tau or w[j] >= tau)
            h_hat = h_hat + s[k] * h
            x, k = (e + feedback.weight * h if feedback else h), k + 1
        logits.append(model.lm_head(h_hat))
        steps.append(stop)
    return torch.stack(logits), steps


@torch.no_grad()
def assert_jacobi_is_sequential(model, printed=False):
    """After R = K(T-1) refinements the parallel form is the sequential one, to 1e-9 in float64; and more
    passes come closer."""
    K, idx = model.config.ponder_steps, tokens()
    expected, _ = sequential(model, idx[0], printed=printed)
    errors = [(model(idx, R=R).logits[0] - expected).abs().max() for R in (0, 2, 4, 8, K * 9)]
    assert errors[-1] < 1e-9
    assert not K or errors[0] > 1e-6  # otherwise the test could not tell
    assert not K or all(a > 2 * b for a, b in pairwise(errors) if a > 1e-10)


@torch.no_grad()
def assert_three_forms_agree(model, tau, alpha=0.0):
    """Parallel, sequential and cached: logits to 1e-9, the same steps; a cache of executed slots. -> steps"""
    idx = tokens(T=12)
    expected, steps = sequential(model, idx[0], tau, alpha)
    out = model(idx, tau=tau, alpha=alpha, R=model.config.ponder_steps * 11)
    logits, cached_steps, cache = decode(model, idx[0], tau, alpha)
    assert (out.logits[0] - expected).abs().max() < 1e-9
    assert (logits - expected).abs().max() < 1e-9
    assert out.steps[0].tolist() == cached_steps == steps
    assert cache[0].keys.size(2) == len(steps) + sum(steps)
    return steps


@torch.no_grad()
def distance_of_masks(model):
    """By how much logits of soft masks differ from those of hard ones, with a router that is always sure."""
    idx = tokens(T=12)
    soft, hard = model(idx, R=33), model(idx, R=33, tau=1e-4)
    w = soft.log_w.exp()
    assert (w < 1e-9).any() and ((w < 1e-9) | (w > 0.9)).all()
    return (soft.logits - hard.logits).abs().max()


# -- Attention -------------------------------------------------------------------------------------


def attention_inputs(H=4, G=4, N=17, d=8, dtype=torch.float64, log_w=(-80.0, 0.0), seed=0):
    """q, k, v and a key bias in the range log_w, of which gradients can be taken."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, H, N, d, generator=g, dtype=dtype)
    k, v = (torch.randn(2, G, N, d, generator=g, dtype=dtype) for _ in range(2))
    low, high = log_w
    bias = low + (high - low) * torch.rand(2, N, generator=g, dtype=dtype)
    bias[:, 0] = 0  # the first slot of a sequence is always visible
    return [x.requires_grad_() for x in (q, k, v, bias)]


def outputs_and_gradients(form, leaves):
    out = form(*leaves)
    g = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


def assert_is_attention(form, leaves, tolerance):
    """A form of soft-mask attention against the definition: outputs and all gradients."""
    found, expected = (outputs_and_gradients(function, leaves) for function in (form, eager))
    for name, a, b in zip(("out", "dq", "dk", "dv", "dlog_w"), found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: n + m)


def assert_masked_key_is_gone(form, augment, d, dtype):
    """In half precision, too: a key of LOG_W_HIDDEN does not overflow, and no weight of it is seen."""
    q, k, v, _ = (x.to(dtype) for x in attention_inputs(N=12, d=d, dtype=torch.float32))
    log_w = torch.zeros(2, 12)
    log_w[:, 5] = LOG_W_HIDDEN
    assert augment(q, k, v, log_w)[1].isfinite().all()
    seen, rest = form(q, k, v, log_w), [i for i in range(12) if i != 5]
    without = form(q[:, :, rest], k[:, :, rest], v[:, :, rest], log_w[:, rest])
    torch.testing.assert_close(seen[:, :, rest], without, atol=2e-2, rtol=0)
    v[:, :, 5] = 1e4  # a weight of 1e-6 would be seen
    assert (form(q, k, v, log_w)[:, :, rest] - seen[:, :, rest]).abs().max() == 0


# -- Files and processes ---------------------------------------------------------------------------


def start(*command, cwd=".", **environment):
    """Python in a process of its own, which has one thread."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    how = dict(cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, *map(str, command)], **how)


def python(*command, cwd=ROOT, **environment):
    """Run Python in a process of its own, from the root or elsewhere. -> what became of it"""
    process = start(*command, cwd=cwd, **environment)
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()  # if it hangs
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def in_bytes(change, name="model.safetensors"):
    """A damage of a folder: a change of the bytes of a file."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def in_config(*without, **changes):
    """A damage of a folder: fields of config.json that are changed, or left out."""

    def damage(folder):
        file = folder / "config.json"
        content = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in content.items() if k not in without}))

    return damage


def in_tensors(change, name="model.safetensors"):
    """A damage of a folder: a change of a dict of the tensors of a file."""

    def damage(folder):
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)

    return damage


@contextmanager
def full_disk(size):
    """What stands for it: within it no file grows beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
