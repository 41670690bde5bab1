"""Directories of weights: Hugging Face's Llama and GPT-NeoX, official PonderLM-2, in and out."""

from itertools import product

import pytest
import torch
import transformers
from foreign import LLAMA3, make_llama, make_neox, make_tokenizer, official, read_json, write_json
from helpers import in_bytes, in_config, in_tensors
from lab_helpers import NEOX, same_weights, small_model
from safetensors.torch import load_file

import checkpoint as root
import lab.interop.weights as interop
from common import LFS_POINTER, UserError
from lab.engine.batching import Engine
from lab.engine.simple import generate
from lab.interop.__main__ import convert
from lab.interop.weights import as_core_model, load, read_config, save
from lab.methods import PonderLM3


def ids(*shape):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(1))


def logits(model, idx):
    with torch.no_grad():
        return model(idx).logits


def check_equal(model, other, idx=None):
    """Logits of transformers, to 1e-5 (GPT-NeoX) or 1e-4 (Llama); its greedy text, of both decoders."""
    idx = ids(2, 100) if idx is None else idx
    atol = 1e-5 if model.config.backbone == "gpt_neox" else 1e-4
    torch.testing.assert_close(logits(model, idx), logits(other, idx), atol=atol, rtol=0)
    prompt = idx[:, :40]
    greedy = other.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    expected = greedy[:, 40:].tolist()
    assert [s.tokens for s in generate(model, prompt, 8, temperature=0)] == expected
    assert [s.tokens for s in Engine(model, 2).generate(prompt, 8, temperature=0)] == expected


LLAMAS = [dict(tied=tied, rope=rope) for tied, rope in product((False, True), (None, LLAMA3))]
LLAMAS += [dict(G=1), dict(G=4), dict(head_dim=12), dict(rms_norm_eps=0.1), dict(old=True, rope=LLAMA3)]
LLAMAS += [dict(shard="10KB"), dict(shard="10KB", tied=True, dtype="bfloat16")]
NEOXES = [
    dict(use_parallel_residual=parallel, rotary_pct=share)
    for parallel, share in product((True, False), (0.25, 1.0))
]
NEOXES += [dict(tied=True), dict(old=True), dict(shard="10KB", dtype="float16")]


@pytest.mark.parametrize(
    "make,kwargs",
    [(make_llama, kwargs) for kwargs in LLAMAS] + [(make_neox, kwargs) for kwargs in NEOXES],
    ids=lambda x: x.__name__ if callable(x) else ",".join(map(str, x.values()))[:40],
)
def test_others(tmp_path, make, kwargs):
    """Catches a field that is not read, RoPE that is scaled wrongly, another share of a head that is turned,
    the order of heads or of q, k and v, a head that is not tied, a shard that is left out, half precision
    that stays; and from transformers (in a) to here and back (in b) a bit or a setting that is lost."""
    other = make(tmp_path / "a", **kwargs)
    model = load(tmp_path / "a")
    assert model.config.method == "vanilla"
    assert model.config.tie_word_embeddings == kwargs.get("tied", False)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    check_equal(model, other.float())
    save(model, tmp_path / "b")
    back = type(other).from_pretrained(tmp_path / "b").eval()
    assert torch.equal(logits(back, ids(2, 100)), logits(other, ids(2, 100)))
    assert load(tmp_path / "b").config == model.config
    assert back.config.eos_token_id is None and back.config.bos_token_id is None  # no tokenizer
    files = [*(tmp_path / "a").glob("*.safetensors")]
    if "shard" in kwargs:
        assert len(files) > 3
    else:
        a, b = (load_file(tmp_path / x / interop.SINGLE) for x in "ab")
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("backbone", [{}, NEOX], ids=["llama", "gpt_neox"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_scale_is_folded_in(tmp_path, tied, backbone):
    """Catches unscaled or shared scaled embeddings, odd names of compiled blocks, and a checkpoint that
    training could not go on with."""
    model = small_model(ponder_steps=0, tie_word_embeddings=tied, **backbone).float()
    assert model.config.scale != 1
    idx = ids(2, 20) % 31
    expected, blocks = logits(model, idx), model.model.layers
    blocks[0] = torch.compile(blocks[0])
    save(model, tmp_path / "theirs")
    root.save(as_core_model(model), tmp_path / "exact")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    for other in (theirs, load(tmp_path / "theirs")):
        torch.testing.assert_close(logits(other, idx), expected, atol=1e-5, rtol=0)
    exact = load(tmp_path / "exact")
    assert exact.config == model.config
    assert torch.equal(exact.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_the_roots_form(tmp_path, tied):
    """Catches a model of train.py that is read as another, one of ours that the root or others misread."""
    model = root.PonderLM(root.Config(31, 32, 48, 2, 4, block_size=32, tie_word_embeddings=tied)).eval()
    root.save(model, tmp_path)
    written, found = read_json(tmp_path), load(tmp_path)
    assert not interop.PAPER.keys() - {"method"} & written.keys()
    assert type(found) is PonderLM3 and same_weights(found, model)
    assert torch.equal(logits(found, ids(1, 9) % 31), logits(model, ids(1, 9) % 31))
    save(found, tmp_path / "again")
    again = root.load(tmp_path / "again")
    assert read_json(tmp_path / "again") == written and same_weights(again, model)
    assert len({file.stat().st_mode for file in (tmp_path / "again").iterdir()}) == 1
    write_json(tmp_path, written | interop.PAPER)  # as the lab wrote it once
    assert load(tmp_path).config == found.config
    with pytest.raises(ValueError, match="model_type"):
        transformers.AutoConfig.from_pretrained(tmp_path)


# -- Official PonderLM-2 -----------------------------------------------------------------------


@pytest.mark.parametrize("name,K,J", [("fwd_K2_J1", 2, 1), ("neox_K1_J3", 1, 3)])
def test_official_ponderlm2(tmp_path, name, K, J):
    """Catches another K, scale, eps or number of passes than the official code's: logits and loss to 1e-5."""
    expected, metadata = official(tmp_path / "official", f"{name}.safetensors")
    model, idx = load(tmp_path / "official"), expected["input_ids"]
    assert (model.config.method, model.config.ponder_steps) == ("ponderlm2", K)
    assert model.config.refinements == (J, J)
    targets = torch.full_like(idx, -100)
    targets[:, :-1] = idx[:, 1:]
    with torch.no_grad():
        out = model(idx, targets, R=J)
    torch.testing.assert_close(out.logits, expected["logits"], atol=1e-5, rtol=0)
    assert out.loss.item() == pytest.approx(float(metadata["loss"]), abs=1e-5)
    one = generate(model, idx[:, :8], 8, temperature=0)
    assert Engine(model, 2).generate(idx[:, :8], 8, temperature=0) == one
    save(model, tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.config == model.config and same_weights(again, model)


def test_official_settings(tmp_path):
    """Catches a setting that is passed over, no refinement as another model, or another range of them."""
    for name, changes, found in (
        ("fwd_K2_J1", dict(random_jacobi_iterations=True), dict(refinements=(2, 3))),
        ("neox_K1_J3", dict(random_jacobi_iterations=True), dict(refinements=(2, 4))),
        ("fwd_K2_J1", dict(num_jacobi_iterations=0), dict(method="ponderlm2", refinements=(0, 0))),
        ("fwd_K2_J1", dict(scale_embeds=False), dict(scale=1)),
        ("fwd_K2_J1", dict(recurrent_model=False), dict(method="vanilla", scale=(2.5 * 32) ** 0.5)),
    ):
        official(tmp_path, f"{name}.safetensors", **changes)
        config = read_config(tmp_path)
        assert {key: getattr(config, key) for key in found} == found


# -- What cannot be read -----------------------------------------------------------------------


REFUSED = {  # what is made: what becomes of it, and the words of the refusal
    make_neox: [
        (in_config(hidden_act="gelu_new"), "hidden_act"),
        (in_config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 2.0}), "rotary_pct"),
    ],
    make_llama: [
        (in_config(model_type="qwen2"), "model_type"),
        (in_config(hidden_act="gelu"), "hidden_act"),
        (in_config(attention_bias=True), "attention_bias"),
        (in_config(quantization_config={"bits": 4}), "quantization_config"),
        (in_config(interpolation=True), "interpolation"),
        (in_config(rope_parameters={"rope_type": "yarn"}), "rope_parameters.*'yarn'"),
        (in_config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary"),
        (in_config(recurrent_model=True), "num_latent_thoughts"),
        (in_config(num_hidden_layers=3), "model.layers.2"),
        (lambda d: (d / interop.SINGLE).unlink(), "has no model.safetensors"),
        (in_bytes(lambda _: b"{", "config.json"), "config.json"),
        (in_bytes(lambda b: b[: len(b) // 2]), "cannot be read"),
        (in_bytes(lambda _: LFS_POINTER), "model.safetensors is a Git LFS pointer.*git lfs pull"),
        (in_tensors(lambda t: t.update({"model.norm.weight": torch.ones(5)})), "mismatched.*norm.weight"),
        (in_tensors(lambda t: t.update(odd=torch.ones(2))), "odd"),
    ],
    lambda directory: save(small_model(), directory): [
        (in_config(method=None), "config.json.*method"),
        (in_config(head_dim="x"), "config.json.*head_dim"),
        (in_config(backbone="gpt"), "config.json.*backbone"),
        (in_config(backbone="gpt_neox", backbone_options={"rotary_pct": 2.0}), "config.json.*rotary_pct"),
        (in_config(odd=1), "config.json.*odd"),
        (in_bytes(lambda _: LFS_POINTER), "model.safetensors is a Git LFS pointer.*git lfs pull"),
        (lambda d: write_json(d, {"format": "ponderlm-3", "method": "grid"}), "config.json.*lack"),
    ],
}


@pytest.mark.parametrize(
    "make,damage,words",
    [(make, *row) for make, rows in REFUSED.items() for row in rows],
)
def test_refused(tmp_path, make, damage, words):
    """Catches a model that is read as another one than it is, or with holes, and a stack trace."""
    make(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=words):
        load(tmp_path)


# -- The command -------------------------------------------------------------------------------


def test_tau_without_a_router(tmp_path):
    """Catches a tau that is taken and written nowhere."""
    save(small_model(ponder_steps=0, vocab_size=300), tmp_path / "model")
    make_tokenizer(tmp_path / "model", "llama 3")
    with pytest.raises(UserError, match=r"--tau 0\.5 has no effect on .*model, which has no router"):
        convert(str(tmp_path / "model"), to=tmp_path / "other", transformers=True, tau=0.5)


def test_command_line(tmp_path):
    """Catches an exported Llama that does not know where its texts begin and end."""
    save(small_model(ponder_steps=0, vocab_size=300), tmp_path / "model")
    _, tokenizer = make_tokenizer(tmp_path / "model", "llama 3")
    convert(str(tmp_path / "model"), to=tmp_path / "other")
    written = read_json(tmp_path / "other")
    assert written["eos_token_id"] == tokenizer.end_of_text
    assert written["bos_token_id"] == tokenizer.begin[0]
