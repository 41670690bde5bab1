"""Directories of weights: Hugging Face's Llama and GPT-NeoX, official PonderLM-2, in and out."""

import json
import struct
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from foreign import LLAMA3, make_llama, make_neox, make_tokenizer, official, read_json, write_json
from lab_helpers import NEOX, same_weights, small_model
from safetensors.torch import load_file, save_file

import lab.interop.weights as interop
import model as root
from data import UserError
from lab.engine.batching import Engine
from lab.engine.simple import generate
from lab.interop.__main__ import main as convert
from lab.interop.weights import load, read_config, save
from lab.methods import PonderLM3


def ids(*shape):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(1))


def logits(model, idx):
    with torch.no_grad():
        return model(idx).logits


def check_equal(model, other, idx=None):
    """Logits of transformers, to 1e-5 for a GPT-NeoX and 1e-4 for a Llama; its greedy text, of
    both decoders."""
    idx = ids(2, 100) if idx is None else idx
    atol = 1e-5 if model.config.backbone == "gpt_neox" else 1e-4
    torch.testing.assert_close(logits(model, idx), logits(other, idx), atol=atol, rtol=0)
    prompt = idx[:, :40]
    greedy = other.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    expected = greedy[:, 40:].tolist()
    assert [s.tokens for s in generate(model, prompt, 8, temperature=0)] == expected
    assert [s.tokens for s in Engine(model, 2).generate(prompt, 8, temperature=0)] == expected


LLAMAS = [
    dict(tied=tied, G=G, rope=rope, old=old)
    for tied, G, rope, old in product((False, True), (1, 2, 4), (None, LLAMA3), (False, True))
]
LLAMAS += [dict(head_dim=12), dict(rms_norm_eps=0.1), dict(rope_parameters=LLAMA3 | {"rope_theta": 500.0})]
LLAMAS += [dict(shard="10KB"), dict(shard="10KB", tied=True, dtype="bfloat16")]
NEOXES = [
    dict(tied=tied, use_parallel_residual=parallel, rotary_pct=share, old=old)
    for tied, parallel, share, old in product((False, True), (True, False), (0.25, 0.5, 1.0), (False, True))
]
NEOXES += [dict(shard="10KB", dtype="float16")]


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
    assert sorted(file.name for file in (tmp_path / "b").iterdir()) == ["config.json", interop.SINGLE]
    files = [*(tmp_path / "a").glob("*.safetensors")]
    if "shard" in kwargs:
        assert len(files) > 3
    else:
        a, b = (load_file(tmp_path / x / interop.SINGLE) for x in "ab")
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


LACKING = ["tie_word_embeddings", "max_position_embeddings", "attention_bias"]


@pytest.mark.parametrize(
    "make,kwargs,lacking",
    [
        (make_llama, dict(G=4, rms_norm_eps=1e-6),
         ["head_dim", "num_key_value_heads", "rms_norm_eps", "mlp_bias", "rope_parameters"]),
        (make_neox, dict(layer_norm_eps=1e-5),
         ["layer_norm_eps", "rope_parameters", "use_parallel_residual"]),
    ],
    ids=["llama", "gpt_neox"],
)  # fmt: skip
def test_lacking_fields(tmp_path, make, kwargs, lacking):
    """Catches other defaults than transformers' for what an old config.json leaves out."""
    other = make(tmp_path, **kwargs)
    fields = {k: v for k, v in read_json(tmp_path).items() if k not in LACKING + lacking}
    write_json(tmp_path, fields)
    model = load(tmp_path)
    assert model.config.block_size == 2048
    check_equal(model, type(other).from_pretrained(tmp_path).eval())


def test_weights_are_copies(tmp_path):
    """Catches a model whose weights stay mapped, and change with the file that they came from."""
    make_llama(tmp_path)
    model, file = load(tmp_path), tmp_path / interop.SINGLE
    before = model.lm_head.weight.clone()
    with open(file, "r+b") as same:
        same.write(bytes(file.stat().st_size))
    assert before.abs().sum() > 0 and torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize("backbone", [{}, NEOX], ids=["llama", "gpt_neox"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_scale_is_folded_in(tmp_path, tied, backbone):
    """Catches an exported model with unscaled embeddings, or with a head that shares the scaled
    ones; and a checkpoint that training could not go on with."""
    model = small_model(ponder_steps=0, tie_word_embeddings=tied, **backbone).float()
    assert model.config.scale != 1
    save(model, tmp_path / "theirs")
    save(model, tmp_path / "exact", exact=True)
    idx = ids(2, 20) % 31
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    for other in (theirs, load(tmp_path / "theirs")):
        torch.testing.assert_close(logits(other, idx), logits(model, idx), atol=1e-5, rtol=0)
    exact = load(tmp_path / "exact")
    assert exact.config == model.config
    assert torch.equal(exact.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_the_roots_form(tmp_path, tied):
    """Catches a model of train.py that is not read, or as another one; one of the lab that the root could
    read, but for fields that it does not know; weights that only their owner may read; and a model that
    transformers takes for a Llama."""
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


@pytest.mark.parametrize(
    "kwargs", [{}, dict(reread=True), NEOX, dict(method="grid"), dict(ponder_steps=0)], ids=str
)
def test_what_the_root_cannot_read(tmp_path, kwargs):
    """Catches settings of the lab that are dropped, and names of a model whose blocks are compiled. That
    nothing is lost in other ways: see test_files of the methods."""
    model = small_model(**kwargs).float()
    model.model.layers[0] = torch.compile(model.model.layers[0])
    save(model, tmp_path, exact=True)
    again = load(tmp_path)
    assert again.config == model.config and ("backbone" in read_json(tmp_path)) == (kwargs != {})
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in interop.tensors_of(model).items())


# -- Official PonderLM-2 -----------------------------------------------------------------------


@pytest.mark.parametrize("name,K,J", [("fwd_K2_J1", 2, 1), ("neox_K1_J3", 1, 3)])
def test_official_ponderlm2(tmp_path, name, K, J):
    """Catches another K, embedding scale, eps or number of passes than the official code's: logits
    to 1e-5, the loss."""
    expected, metadata = official(tmp_path / "official", f"{name}.safetensors")
    model, idx = load(tmp_path / "official"), expected["input_ids"]
    assert (model.config.method, model.config.ponder_steps) == ("ponderlm2", K)
    assert model.config.refinements == (J, J)
    targets = torch.full_like(idx, -100)
    targets[:, :-1] = idx[:, 1:]
    with torch.no_grad():
        out = model(idx, targets, R=J)
    torch.testing.assert_close(out.logits, expected["logits"], atol=1e-5, rtol=0)
    if "loss" in metadata:
        assert out.loss.item() == pytest.approx(float(metadata["loss"]), abs=1e-5)
    one = generate(model, idx[:, :8], 8, temperature=0)
    assert Engine(model, 2).generate(idx[:, :8], 8, temperature=0) == one
    save(model, tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.config == model.config and same_weights(again, model)


def test_official_settings(tmp_path):
    """Catches a setting of the official code that is passed over, a PonderLM-2 of no refinement
    taken for another model, the LLaMA's range of them for the GPT-NeoX (2, 3 and 4)."""
    for name, drawn in (("fwd_K2_J1", (2, 3)), ("neox_K1_J3", (2, 4))):
        official(tmp_path, f"{name}.safetensors", random_jacobi_iterations=True)
        assert read_config(tmp_path).refinements == drawn
    official(tmp_path, "fwd_K2_J1.safetensors", num_jacobi_iterations=0)
    config = read_config(tmp_path)
    assert config.method == "ponderlm2" and config.refinements == (0, 0)
    official(tmp_path, "fwd_K2_J1.safetensors", scale_embeds=False)
    assert read_config(tmp_path).scale == 1
    official(tmp_path, "fwd_K2_J1.safetensors", recurrent_model=False)
    config = read_config(tmp_path)
    assert config.method == "vanilla" and config.scale == (2.5 * 32) ** 0.5


# -- What cannot be read -----------------------------------------------------------------------


def make_ours(directory):
    save(small_model(), directory)


def in_bytes(change):
    """A change of model.safetensors, given as a change of its bytes."""
    return lambda d: (d / interop.SINGLE).write_bytes(change((d / interop.SINGLE).read_bytes()))


def in_tensors(change):
    """The same, as a change of a dict of its tensors."""

    def damage(directory):
        tensors = load_file(directory / interop.SINGLE)
        change(tensors)
        save_file(tensors, directory / interop.SINGLE)

    return damage


def in_index(change):
    """A change of where the index of shards says that tensors are."""

    def damage(directory):
        index = json.loads((directory / interop.INDEX).read_text())
        index["weight_map"] = change(index["weight_map"])
        (directory / interop.INDEX).write_text(json.dumps(index))

    return damage


NORM, TABLE = "model.norm.weight", "model.embed_tokens.weight"
REFUSED = {  # what is made: what becomes of it, and the words of the refusal
    make_neox: [
        (dict(hidden_act="gelu_new"), "hidden_act"),
        (dict(rope_parameters=None, rotary_pct=2.0), "rotary_pct"),
    ],
    make_llama: [
        (dict(model_type="qwen2"), "model_type"),
        (dict(architectures=["LlamaForSequenceClassification"]), "architectures"),
        (dict(hidden_act="gelu"), "hidden_act"),
        (dict(attention_bias=True), "attention_bias"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(interpolation=True), "interpolation"),
        (dict(hidden_size=None), "hidden_size"),
        (dict(rope_parameters={"rope_type": "yarn"}), "rope_parameters.*'yarn'"),
        (dict(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2}), "rope_scaling.*'linear'"),
        (dict(rope_parameters="llama3"), "config.json"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(recurrent_model=True), "num_latent_thoughts"),
        (dict(format="x"), "format 'x'"),
        (dict(num_hidden_layers=3), "Missing key"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings"),
        (lambda d: (d / interop.SINGLE).unlink(), "has no model.safetensors"),
        (lambda d: (d / "config.json").write_text("{"), "config.json"),
        (in_bytes(lambda b: b[: len(b) // 2]), "model.safetensors"),
        (in_bytes(lambda b: struct.pack("<Q", 2**60) + b[8:]), "model.safetensors"),
        (in_bytes(lambda _: b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (in_tensors(lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})), NORM),
        (in_tensors(lambda t: t[NORM].mul_(torch.nan)), NORM),
        (in_tensors(lambda t: t.update({NORM: t[NORM][:5]})), NORM),
        (in_tensors(lambda t: t.update(odd=torch.ones(2))), "odd"),
    ],
    partial(make_llama, tied=True): [
        (in_tensors(lambda t: t.update({"lm_head.weight": t.pop(TABLE)})), TABLE)
    ],
    partial(make_llama, shard="10KB"): [
        (in_index(lambda places: {}), interop.INDEX),
        (in_index(lambda places: places | {NORM: "other.safetensors"}), "other.safetensors"),
        (in_index(lambda places: places | {NORM: "../../model.safetensors"}), f"{interop.INDEX}.*{NORM}"),
    ],
    make_ours: [
        (dict(method=None), "config.json.*method"),
        (dict(head_dim="x"), "config.json.*head_dim"),
        (dict(backbone="gpt"), "config.json.*backbone"),
        (dict(backbone="gpt_neox", backbone_options={"rotary_pct": 2.0}), "config.json.*rotary_pct"),
        (dict(odd=1), "config.json.*odd"),
        (lambda d: write_json(d, {"format": "ponderlm-3", "method": "grid"}), "config.json.*missing"),
    ],
}


@pytest.mark.parametrize(
    "make,damage,words",
    [pytest.param(make, *row, id=row[1]) for make, rows in REFUSED.items() for row in rows],
)
def test_refused(tmp_path, make, damage, words):
    """Catches a model that is read as another one than it is, or with holes; a stack trace, code that is run,
    a shard that is passed over, and a path that leads out of the directory."""
    make(tmp_path)
    if isinstance(damage, dict):
        write_json(tmp_path, read_json(tmp_path) | damage)
    else:
        damage(tmp_path)
    with pytest.raises(UserError, match=words):
        load(tmp_path)


@pytest.mark.parametrize(
    "make,leftovers",
    [
        (make_llama, ["self_attn.rotary_emb.inv_freq"]),
        (make_neox, ["attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"]),
    ],
    ids=["llama", "gpt_neox"],
)
def test_leftovers(tmp_path, make, leftovers):
    """Catches a refusal of what old Llamas and Pythias have in their files and does no harm: the
    frequencies of RoPE, the causal mask, a copy of the table as the tied head."""
    other = make(tmp_path, tied=True)
    file, prefix = tmp_path / interop.SINGLE, other.base_model_prefix
    tensors = load_file(file)
    assert not {"lm_head.weight", "embed_out.weight"} & tensors.keys()
    tensors["lm_head.weight"] = other.get_input_embeddings().weight.detach().clone()
    tensors |= {f"{prefix}.layers.0.{name}": torch.ones(4) for name in leftovers}
    save_file(tensors, file)
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    check_equal(model, other)


# -- The Hub -----------------------------------------------------------------------------------


def test_hub(tmp_path, monkeypatch):
    """Catches a name of the Hub that is not looked up, and a path that is."""
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path / "fetched")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert interop.locate("someone/a-model") == tmp_path / "fetched"
    assert asked == [("someone/a-model", ["*.json", "*.safetensors"])]
    (tmp_path / "out").mkdir()
    for path in ("out/typo", "typo", "a/b/c", "/no/where"):
        with pytest.raises(UserError, match=f"{path} does not exist"):
            interop.locate(path)
    assert interop.locate("out") == Path("out") and len(asked) == 1

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        interop.locate("someone/a-model")


# -- The command -------------------------------------------------------------------------------


def test_command_line(tmp_path):
    """Catches an exported Llama that does not know where its texts begin and end."""
    save(small_model(ponder_steps=0, vocab_size=300), tmp_path / "model")
    _, tokenizer = make_tokenizer(tmp_path / "model", "llama 3")
    convert(str(tmp_path / "model"), to=tmp_path / "other")
    written = read_json(tmp_path / "other")
    assert written["eos_token_id"] == tokenizer.end_of_text
    assert written["bos_token_id"] == tokenizer.begin[0]
