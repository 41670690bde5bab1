"""Packed and quantized weights: products as the plain ones, and good enough to decode with."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_bfloat16, small_model

from lab.corpora.tokenizers import Tokenizer
from lab.engine import products
from lab.engine.batching import Engine
from lab.engine.products import FEW, LARGE, WEIGHTS, Packed, Plain, Small, gated, matrix
from lab.interop import INCLUDED, load
from model import UserError

TEXTS = (
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n"
    "The slings and arrows of outrageous fortune",
    "Return a copy of the array.\n\nParameters\n----------\naxis : int, optional\n"
    "    The axis along which the values are computed.",
    "Return the number of elements in the list.\n\nIf the key is not found, a KeyError is raised; otherwise\n"
    "the value is returned as it is.",
    "Open a file and return a stream.\n\nThe mode is a string that says whether it is read or written.",
    "Compute the sum of all elements of the input tensor along a dimension.\n\n"
    "Args:\n    input (Tensor): the input tensor.\n    dim (int): the dimension to reduce.",
    "Draw a line from one point to another.\n\nSee Also\n--------\nplot : Draw lines and markers.",
    "Test whether the graph is connected, and raise an error if it has no nodes.",
)


FEWER_BITS = [pytest.param(weights, marks=needs_bfloat16) for weights in WEIGHTS[1:]]


def randoms(*shapes):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g) for shape in shapes]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("weights", ["float32", *FEWER_BITS])
@pytest.mark.parametrize("rows", [1, 2, FEW, FEW + 1, 33])
@pytest.mark.parametrize("inputs, outputs", [(8, 6), (96, 257), (300, 700), (512, 1376)])
@torch.inference_mode()
def test_products(weights, rows, inputs, outputs, compiled):
    """Catches a form that computes another product, or adds or gates otherwise: in float32 to
    1e-5 of its size, in bfloat16 to 2 %, by codes of 8 bits to 3 %."""
    weight, x, other = randoms((outputs, inputs), (rows, inputs), (rows, outputs))
    how = torch.float32, rows, weights, compiled
    first, second = (matrix(w, *how) for w in (weight, weight.flip(0)))
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 3e-2}[weights]
    plain, flipped = x @ weight.T, x @ weight.flip(0).T
    for found, expected in (
        (first(x), plain),
        (first.added(other, x) - other, plain),
        (gated(first, second, x), F.silu(plain) * flipped),
    ):
        assert found.dtype == torch.float32
        assert (found - expected).norm() < tolerance * expected.norm()


@needs_bfloat16
def test_forms():
    """Catches matrices that are never packed, or small ones that are."""
    (weight,) = randoms((512, 512))
    kind = lambda rows, *weights: type(matrix(weight, torch.float32, rows, *weights))  # noqa: E731
    assert kind(8) is Packed and kind(LARGE // weight.numel() - 1) is Plain
    assert kind(8, "float32") is Packed and kind(8, "int8") is kind(1, "bfloat16") is Small
    assert type(matrix(weight.double(), torch.float64, 8)) is Plain
    assert type(matrix(weight, torch.bfloat16, 1)) is Packed
    assert type(matrix(weight, torch.float32, 8, compiled=True)) is Plain  # as it has to be


def test_frozen():
    """Catches weights that the compiler packs where that is slower."""
    small, large = (torch.nn.Linear(n, n, device="meta") for n in (64, products.CACHED))
    assert not products.is_frozen(small, 8) and products.is_frozen(small, 8, "int8")
    assert products.is_frozen(large, FEW) and not products.is_frozen(large, FEW - 1)
    assert not products.is_frozen(large, FEW, "bfloat16")  # it is read as it is


@needs_bfloat16
@torch.inference_mode()
def test_codes_do_not_depend_on_the_batch():
    """Catches weights of 8 bits that are others for few rows than for many."""
    weight, x = randoms((256, 96), (FEW, 96))
    few, many = (matrix(weight, torch.float32, rows, "int8")(x) for rows in (FEW, FEW + 1))
    exact = x.bfloat16().float() @ weight.T
    assert (few - many).norm() < 5e-3 * exact.norm()  # both are rounded to bfloat16
    assert (few - exact).norm() > 1e-3 * exact.norm()


def loss(model, monkeypatch, **options):
    """Nats a byte of the texts but for their first bytes, as the engine decodes them."""
    found = []
    for text in TEXTS:
        ids, seen = Tokenizer.bytes().encode(text), []

        def forced(logits, u, *choice, ids=ids, seen=seen):  # what comes is what stands there
            seen.append(logits[0])
            return torch.tensor([ids[len(seen)]])

        monkeypatch.setattr("lab.engine.rows.choose", forced)
        engine = Engine(model, 1, prefill="sequential", **options)
        engine.generate([ids[:1]], len(ids) - 1)
        found += F.cross_entropy(torch.stack(seen), torch.tensor(ids[1:]), reduction="none")
    return torch.stack(found).mean()


@pytest.mark.parametrize("weights", FEWER_BITS)
@pytest.mark.parametrize("tau, alpha, most", [(0.0, 0.0, 1.3), (1e-4, 0.0, 1.3), (0.5, -60.0, 2.3)])
def test_loss(weights, tau, alpha, most, monkeypatch):
    """Catches weights of few bits whose errors pile up over the steps: the loss of the included model with
    all steps, early exit, and without steps (alpha), to 0.002 nats; and that they are used."""
    how = dict(tau=tau, alpha=alpha)
    exact, found = (loss(load(INCLUDED), monkeypatch, **how, weights=w) for w in ("float32", weights))
    assert 0 < abs(found - exact) < 2e-3
    assert exact < most


def test_cpu_without_bfloat16(monkeypatch):
    """Catches a CPU without AVX-512 on which an engine of bfloat16 cannot begin."""
    monkeypatch.setattr("lab.engine.products.onednn", SimpleNamespace(_is_mkldnn_bf16_supported=bool))
    model = small_model().float()
    half = Engine(model, 2, dtype=torch.bfloat16)
    assert len(half.generate([[1], [2]], 4, seed=0)[1].tokens) == 4
    with pytest.raises(UserError, match="weights = int8 needs a CPU with bfloat16"):
        Engine(model, 2, weights="int8")


def test_refused():
    """Catches weights of few bits that are silently left out."""
    with pytest.raises(UserError, match="weights = int8 is for float32 on a CPU"):
        Engine(small_model(), 1, weights="int8")  # float64
