"""Directories of GPT-NeoX: Pythia's form and the official PonderLM-2's, in and out."""

import json

import pytest
import torch
import transformers
from conftest import GOLDEN, small_model
from foreign import LLAMA3, make_neox, read_json, write_json
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import interop
from engine.batching import Engine
from interop import load, save
from runtime import UserError
from sample import generate


def ids(*shape):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(1))


def logits(model, idx):
    with torch.no_grad():
        return model(idx).logits


def check_equal(model, neox):
    """Logits of transformers to 1e-5, and its greedy text, of both decoders."""
    idx = ids(2, 100)
    torch.testing.assert_close(logits(model, idx), logits(neox, idx), atol=1e-5, rtol=0)
    prompt = idx[:, :40]
    greedy = neox.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
    )
    expected = greedy[:, 40:].tolist()
    assert [s.tokens for s in generate(model, prompt, 8, temperature=0)] == expected
    assert [s.tokens for s in Engine(model, 2).generate(prompt, 8, temperature=0)] == expected


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("rotary_pct", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "sequential"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_pythia(tmp_path, tied, parallel, rotary_pct, old):
    """Catches a field that is not read, another share of a head that is turned, the order of q, k
    and v, a residual that is added elsewhere; and a bit lost on the way back."""
    neox = make_neox(tmp_path / "a", tied, rotary_pct, old, use_parallel_residual=parallel)
    model = load(tmp_path / "a")
    assert (model.config.method, model.config.backbone) == ("vanilla", "gpt_neox")
    check_equal(model, neox)
    save(model, tmp_path / "b")
    a, b = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    back = transformers.GPTNeoXForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert torch.equal(logits(back, ids(2, 100)), logits(neox, ids(2, 100)))
    assert load(tmp_path / "b").config == model.config


def test_unusual(tmp_path):
    """Catches a shard that is left out, half precision that stays, RoPE scaled wrongly, and a
    refusal of the buffers that Pythia's files have."""
    rope = LLAMA3 | {"partial_rotary_factor": 0.5, "rope_theta": 500.0}
    neox = make_neox(tmp_path, shard="10KB", dtype="float16", rope_parameters=rope)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model = load(tmp_path)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert model.config.rope_scaling
    check_equal(model, neox.float())

    neox = make_neox(tmp_path / "old")
    tensors = load_file(tmp_path / "old" / interop.SINGLE)
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "old" / interop.SINGLE)
    check_equal(load(tmp_path / "old"), neox)


def test_lacking_fields(tmp_path):
    """Catches other defaults than transformers' for what config.json leaves out."""
    make_neox(tmp_path, layer_norm_eps=1e-5)
    fields = read_json(tmp_path)
    for name in ("layer_norm_eps", "tie_word_embeddings", "attention_bias", "rope_parameters",
                 "use_parallel_residual"):  # fmt: skip
        del fields[name]
    write_json(tmp_path, fields)
    neox = transformers.GPTNeoXForCausalLM.from_pretrained(tmp_path)
    assert load(tmp_path).config.rotary_pct == 0.25
    check_equal(load(tmp_path), neox)


def test_two_heads(tmp_path):
    """Catches one of two tensors that is chosen without a word."""
    make_neox(tmp_path)
    tensors = load_file(tmp_path / interop.SINGLE)
    tensors["lm_head.weight"] = torch.ones_like(tensors["embed_out.weight"])
    save_file(tensors, tmp_path / interop.SINGLE)
    with pytest.raises(UserError, match=r"has two tensors for lm_head\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_scale_is_folded_in(tmp_path, tied):
    """Catches an exported GPT-NeoX with unscaled embeddings."""
    shape = dict(backbone="gpt_neox", num_key_value_heads=None, tie_word_embeddings=tied)
    model = small_model(ponder_steps=0, **shape).float()
    save(model, tmp_path)
    neox = transformers.GPTNeoXForCausalLM.from_pretrained(tmp_path)
    idx = ids(2, 20) % 31
    torch.testing.assert_close(logits(neox, idx), logits(model, idx), atol=1e-5, rtol=0)


def test_our_own_form(tmp_path):
    """Catches a backbone that our own config.json forgets."""
    model = small_model(backbone="gpt_neox", num_key_value_heads=None, rotary_pct=0.5).float()
    save(model, tmp_path)
    assert load(tmp_path).config == model.config
    idx = ids(1, 9) % 31
    assert torch.equal(logits(load(tmp_path), idx), logits(model, idx))


# -- Official PonderLM-2 ---------------------------------------------------------------------------


def official(directory, **fields):
    """The golden file as a directory that the official code would have written."""
    with safe_open(GOLDEN / "neox_K1_J3.safetensors", "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    write_json(directory, json.loads(metadata["config"]) | fields)
    kept = {key: x for key, x in tensors.items() if key not in ("input_ids", "logits")}
    save_file(kept, directory / "model.safetensors")
    return tensors["input_ids"], tensors["logits"], float(metadata["loss"])


def test_official_ponderlm2(tmp_path):
    """Catches any other number than the official code's: logits to 1e-5, the loss."""
    idx, expected, loss = official(tmp_path)
    model = load(tmp_path)
    assert (model.config.method, model.config.ponder_steps) == ("ponderlm2", 1)
    targets = torch.full_like(idx, -100)
    targets[:, :-1] = idx[:, 1:]
    with torch.no_grad():
        out = model(idx, targets, R=model.config.refinements[1])
    torch.testing.assert_close(out.logits, expected, atol=1e-5, rtol=0)
    assert out.loss.item() == pytest.approx(loss, abs=1e-5)
    expected = generate(model, idx[:, :8], 8, temperature=0)
    assert Engine(model, 2).generate(idx[:, :8], 8, temperature=0) == expected
    save(model, tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again"), idx), logits(model, idx))


def test_official_settings(tmp_path):
    """Catches the LLaMA's range of refinements for the GPT-NeoX, which draws from 2, 3 and 4."""
    official(tmp_path, random_jacobi_iterations=True)
    assert load(tmp_path).config.refinements == (2, 4)
    official(tmp_path, recurrent_model=None)
    with pytest.raises(UserError, match="it is a vanilla, not a looped"):
        load(tmp_path, "looped")


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(model_type="qwen2"), "model_type = 'qwen2': it has to be 'llama' or 'gpt_neox'"),
        (dict(architectures=["GPTNeoXForTokenClassification"]), "architectures = "),
        (dict(hidden_act="gelu_new"), "hidden_act = 'gelu_new'"),
        (dict(attention_bias=False), "attention_bias = False"),
        (dict(use_parallel_residual="yes"), "parallel_residual = 'yes'"),
        (dict(layer_norm_eps=None), "rms_norm_eps = None"),
        (dict(rope_parameters=None, rotary_pct=2.0), "rotary_pct = 2.0"),
        (dict(rope_parameters=None, rotary_emb_base=-1), "rope_theta = -1"),
        (dict(rope_parameters={"rope_type": "yarn"}), "rope_parameters is of type 'yarn'"),
        (dict(num_attention_heads=3), "hidden_size = 32 is not divisible by 3 heads"),
        (dict(intermediate_size=50), "6 of another shape"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings, but lm_head.weight differs"),
    ],
    ids=str,
)
def test_refused(tmp_path, fields, message):
    """Catches a model that is read as another one than it is."""
    make_neox(tmp_path)
    write_json(tmp_path, read_json(tmp_path) | fields)
    with pytest.raises(UserError, match=message):
        load(tmp_path)
