"""Directories of weights: Hugging Face Llama and official PonderLM-2, in and out."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import GOLDEN, ROOT, small_model
from foreign import LLAMA3, make_llama, make_tokenizer, read_json, write_json
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import interop
from engine.batching import Engine
from interop import load, read_config, save
from interop.__main__ import main as interop_main
from runtime import UserError
from sample import generate


def ids(*shape):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(1))


def logits(model, idx):
    with torch.no_grad():
        return model(idx).logits


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("rope", [None, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_llama(tmp_path, tied, G, rope, old):
    """Catches a field that is not read, RoPE that is scaled wrongly, a head that is not tied, and
    another order of heads: logits of transformers to 1e-4, its greedy text token by token."""
    llama = make_llama(tmp_path, tied, G, rope, old)
    model, idx = load(tmp_path), ids(2, 100)
    assert model.config.method == "vanilla" and model.config.tie_word_embeddings == tied
    torch.testing.assert_close(logits(model, idx), logits(llama, idx), atol=1e-4, rtol=0)
    prompt = idx[:, :40]
    greedy = llama.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
    )
    expected = greedy[:, 40:].tolist()
    assert [s.tokens for s in generate(model, prompt, 8, temperature=0)] == expected
    assert [s.tokens for s in Engine(model, 2).generate(prompt, 8, temperature=0)] == expected


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(head_dim=12),
        dict(rms_norm_eps=0.1),
        dict(shard="10KB"),
        dict(shard="10KB", tied=True, dtype="bfloat16"),
    ],
    ids=str,
)
def test_unusual_llamas(tmp_path, kwargs):
    """Catches head_dim taken for D/H, an eps that is not read, and a shard that is left out."""
    llama = make_llama(tmp_path, **kwargs)
    files = sorted(f.name for f in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 if "shard" in kwargs else files == ["model.safetensors"]
    model, idx = load(tmp_path), ids(2, 60)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(logits(model, idx), logits(llama.float(), idx), atol=1e-4, rtol=0)


def test_lacking_fields(tmp_path):
    """Catches other defaults than transformers' for what an old config.json leaves out."""
    llama = make_llama(tmp_path, G=4, rms_norm_eps=1e-6)
    fields = read_json(tmp_path)
    for name in ("head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings",
                 "max_position_embeddings", "attention_bias", "mlp_bias"):  # fmt: skip
        del fields[name]
    write_json(tmp_path, fields)
    model = load(tmp_path)
    assert model.config.block_size == 2048
    torch.testing.assert_close(
        logits(model, ids(1, 50)), logits(llama, ids(1, 50)), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("rope", [None, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_round_trip(tmp_path, tied, rope):
    """Catches a bit or a setting that is lost on the way from transformers to here and back."""
    llama = make_llama(tmp_path / "a", tied, rope=rope, head_dim=12)
    model = load(tmp_path / "a")
    save(model, tmp_path / "b")
    a, b = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert torch.equal(logits(back, ids(2, 100)), logits(llama, ids(2, 100)))
    assert load(tmp_path / "b").config == model.config
    assert back.config.eos_token_id is None and back.config.bos_token_id is None  # no tokenizer
    assert not [f for f in (tmp_path / "b").iterdir() if f.suffix in (".bin", ".pt", ".pkl")]


def test_weights_are_copies(tmp_path):
    """Catches a model whose weights stay mapped, and change with the file that they came from."""
    make_llama(tmp_path)
    model, file = load(tmp_path), tmp_path / interop.SINGLE
    before = model.lm_head.weight.clone()
    with open(file, "r+b") as same:
        same.write(bytes(file.stat().st_size))
    assert before.abs().sum() > 0 and torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize(
    "fields",
    [
        dict(rope_parameters=None, rope_scaling={"rope_type": "default", "rope_theta": 50.0}),
        dict(
            rope_parameters=None, rope_theta=7.0,
            rope_scaling={"rope_type": "default", "rope_theta": 50.0},
        ),
        dict(rope_scaling=LLAMA3 | {"rope_theta": 50.0}),
        dict(rope_parameters={"rope_type": "default"}, rope_theta=50.0),
        dict(rope_parameters=None, rope_scaling=None, rope_theta=None),
        dict(hidden_act="swish"),
    ],
    ids=str,
)  # fmt: skip
def test_what_counts(tmp_path, fields):
    """Catches another choice than transformers' where a config.json says something twice."""
    make_llama(tmp_path)
    fields = {k: v for k, v in (read_json(tmp_path) | fields).items() if v is not None}
    write_json(tmp_path, fields)
    llama = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    idx = ids(1, 60)
    torch.testing.assert_close(logits(load(tmp_path), idx), logits(llama, idx), atol=1e-4, rtol=0)


def test_files_can_be_read_by_others(tmp_path):
    """Catches weights that only their owner may read."""
    save(small_model(), tmp_path)
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_scale_is_folded_in(tmp_path, tied):
    """Catches an exported Llama with unscaled embeddings, or with a head that shares the scaled
    ones; and a checkpoint that training could not go on with."""
    model = small_model(ponder_steps=0, method="vanilla", tie_word_embeddings=tied).float()
    assert model.config.scale != 1
    save(model, tmp_path / "llama")
    save(model, tmp_path / "exact", exact=True)
    idx = ids(2, 20) % 31
    llama = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    for other in (llama, load(tmp_path / "llama")):
        torch.testing.assert_close(logits(other, idx), logits(model, idx), atol=1e-5, rtol=0)
    exact = load(tmp_path / "exact")
    assert exact.config == model.config
    assert torch.equal(exact.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_pondering_is_no_llama(tmp_path):
    """Catches a pondering model that transformers takes for a Llama, and answers with another's
    words."""
    save(small_model(), tmp_path)
    assert read_json(tmp_path)["ponder_steps"] == 3
    with pytest.raises(ValueError, match="model_type"):
        transformers.AutoConfig.from_pretrained(tmp_path)


# -- Official PonderLM-2 -----------------------------------------------------------------------


def official(directory, name, **fields):
    """A golden file as a directory that the official code would have written."""
    with safe_open(GOLDEN / name, "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    directory.mkdir(exist_ok=True)
    write_json(directory, llama | config | fields)
    kept = {key: x.contiguous() for key, x in tensors.items() if key.endswith(".weight")}
    save_file(kept, directory / "model.safetensors")
    return {key: x for key, x in tensors.items() if key not in kept}


def test_official_ponderlm2(tmp_path):
    """Catches another K, embedding scale, eps or number of passes than the official code's."""
    expected = official(tmp_path / "fwd", "fwd_K2_J1.safetensors")
    model = load(tmp_path / "fwd")
    assert model.config.method == "ponderlm2" and model.config.refinements == (1, 1)
    with torch.no_grad():
        actual = model(expected["input_ids"], R=model.config.refinements[0]).logits
    torch.testing.assert_close(actual, expected["logits"], atol=1e-5, rtol=0)

    expected = official(tmp_path / "decode", "decode_K2_J12.safetensors")
    model, prompt = load(tmp_path / "decode"), expected["prompt"]
    n = expected["sequences"].size(1) - prompt.size(1)
    samples = generate(model, prompt, n, temperature=0)
    assert [s.tokens for s in samples] == expected["sequences"][:, prompt.size(1) :].tolist()

    save(model, tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.config == model.config
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("J", [0, 3])
def test_official_loop(tmp_path, capsys, J):
    """Catches the looped model of the same code that cannot be read, with the number of iterations
    that the released script writes, or with none."""
    expected = official(tmp_path / "loop", "loop_K2.safetensors", num_jacobi_iterations=J)
    interop_main(str(tmp_path / "loop"), to=tmp_path / "ours", method="looped")
    assert "note" not in capsys.readouterr().out
    model = load(tmp_path / "ours")
    assert (model.config.method, model.config.ponder_steps) == ("looped", 2)
    actual = logits(model, expected["input_ids"])
    torch.testing.assert_close(actual, expected["logits"], atol=1e-5, rtol=0)


def test_no_refinement(tmp_path, capsys):
    """Catches a PonderLM-2 of zero refinements taken for the looped model, without a word: its
    logits are those of the official code's pass before the refinement."""
    expected = official(tmp_path, "fwd_K2_J1.safetensors", num_jacobi_iterations=0)
    model = load(tmp_path)
    assert "note: num_jacobi_iterations = 0 is read as a PonderLM-2" in capsys.readouterr().out
    assert model.config.method == "ponderlm2" and model.config.refinements == (0, 0)
    with torch.no_grad():
        actual = model(expected["input_ids"], R=model.config.refinements[0]).logits
        h = expected["pass_out.2"].view(*expected["input_ids"].shape, 3, -1)[:, :, 2]
        torch.testing.assert_close(actual, model.lm_head(h), atol=1e-5, rtol=0)
    make_llama(tmp_path / "llama")
    with pytest.raises(UserError, match="it is a vanilla, not a looped"):
        load(tmp_path / "llama", "looped")


def test_official_settings(tmp_path):
    """Catches a setting of the official code that is passed over."""
    official(tmp_path, "fwd_K2_J1.safetensors", random_jacobi_iterations=True)
    assert read_config(tmp_path).refinements == (2, 3)
    official(tmp_path, "fwd_K2_J1.safetensors", scale_embeds=False)
    assert read_config(tmp_path).scale == 1
    official(tmp_path, "fwd_K2_J1.safetensors", recurrent_model=False)
    config = read_config(tmp_path)
    assert config.method == "vanilla" and config.scale == (2.5 * 32) ** 0.5


# -- What cannot be read -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(model_type="mistral"), "model_type = 'mistral'"),
        (dict(model_type=None), "model_type = None"),
        (dict(architectures=["LlamaForSequenceClassification"]), "architectures = "),
        (dict(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (dict(attention_bias=True), "attention_bias = True"),
        (dict(mlp_bias=True), "mlp_bias = True"),
        (dict(sliding_window=4096), "sliding_window = 4096"),
        (dict(quantization_config={"bits": 4}), "quantization_config = "),
        (dict(interpolation=True), "interpolation = True"),
        (dict(hidden_size=None), "hidden_size = None: it should be a valid integer"),
        (dict(hidden_size="32"), "hidden_size = '32': it should be a valid integer"),
        (dict(intermediate_size=48.0), "intermediate_size = 48.0: it should be a valid integer"),
        (dict(num_hidden_layers=True), "num_hidden_layers = True"),
        (dict(head_dim=0), "head_dim = 0"),
        (dict(max_position_embeddings=64.0), "block_size = 64.0"),
        (dict(num_key_value_heads=-1), "num_key_value_heads = -1"),
        (dict(rms_norm_eps=None), "rms_norm_eps = None"),
        (dict(rms_norm_eps=float("nan")), "rms_norm_eps = nan"),
        (dict(rope_parameters={"rope_theta": -1}), "rope_theta = -1"),
        (dict(scale_embeds="x"), "scale_embeds = 'x'"),
        (dict(num_key_value_heads=3), "4 heads cannot share 3"),
        (dict(rope_parameters={"rope_type": "yarn"}), "rope_parameters is of type 'yarn'"),
        (
            dict(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2}),
            "rope_scaling is of type 'linear'",
        ),
        (dict(rope_parameters=LLAMA3 | {"factor": None}), "rope_scaling.0 = None: it should be"),
        (dict(rope_parameters=LLAMA3 | {"factor": -1}), "rope_scaling.0 = -1:"),
        (dict(rope_parameters="llama3"), "wrong type"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        (dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor = 0.5"),
        (dict(recurrent_model=True), "num_latent_thoughts"),
        (dict(format="x"), "format 'x'"),
        (dict(vocab_size=62), "do not fit"),
        (dict(num_hidden_layers=1), "do not fit"),
        (dict(num_hidden_layers=3), r"fit config.json: 9 missing: \S+, \S+, \S+, ..$"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings, but lm_head.weight differs"),
    ],
    ids=str,
)  # fmt: skip
def test_refused(tmp_path, fields, message):
    """Catches a model that is read as another one than it is."""
    make_llama(tmp_path)
    write_json(tmp_path, read_json(tmp_path) | fields)
    with pytest.raises(UserError, match=message):
        load(tmp_path)


def test_damaged_config(tmp_path):
    """Catches a damaged config.json without a way out, or a wrong one, where the model is whole."""
    make_llama(tmp_path)
    save(small_model(), tmp_path)
    whole = read_json(tmp_path)
    for content in ({"format": interop.FORMAT}, whole | {"head_dim": "x"}):
        write_json(tmp_path, content)
        with pytest.raises(UserError, match=r"config\.json.*; copy it anew from where it came$"):
            read_config(tmp_path)
    (tmp_path / "step-00000004").mkdir()
    with pytest.raises(UserError, match=r"config\.json.*; train\.py --resume takes it from"):
        read_config(tmp_path)


def tensor_file(edit):
    """A change of model.safetensors, given as a change of its bytes."""
    return lambda d: (d / interop.SINGLE).write_bytes(edit((d / interop.SINGLE).read_bytes()))


def change_tensor(name, change):
    def damage(directory):
        tensors = load_file(directory / interop.SINGLE)
        tensors[name] = change(tensors.get(name))
        save_file(tensors, directory / interop.SINGLE)

    return damage


def only_pickle(directory):
    (directory / interop.SINGLE).rename(directory / "pytorch_model.bin")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "damage,message",
    [
        (only_pickle, "pickle"),
        (lambda d: (d / interop.SINGLE).unlink(), "has no model.safetensors"),
        (tensor_file(lambda b: b[: len(b) // 2]), "damaged or no safetensors file"),
        (tensor_file(lambda b: b[:100]), "damaged or no safetensors file"),
        (tensor_file(lambda b: b[:4]), "damaged or no safetensors file"),
        (tensor_file(lambda b: b""), "damaged or no safetensors file"),
        (tensor_file(lambda b: b[:8] + b"#" + b[9:]), "damaged or no safetensors file"),
        (tensor_file(lambda b: struct.pack("<Q", 2**60) + b[8:]), "damaged or no safetensors file"),
        (tensor_file(lambda b: b"\x80\x02pickle"), "damaged or no safetensors file"),
        (tensor_file(lambda b: b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (change_tensor(NORM, lambda x: x.to(torch.int8)), "norm.weight is of type torch.int8"),
        (change_tensor(NORM, lambda x: x.to(torch.float8_e4m3fn)), "quantized"),
        (change_tensor(NORM, lambda x: x * float("nan")), "norm.weight has numbers that are not"),
        (
            change_tensor(NORM, lambda x: x[:5]),
            r"fit config.json: 1 of another shape: model.norm.weight is \(5,\), not \(32,\)$",
        ),
        (change_tensor("odd", lambda _: torch.ones(2)), "do not fit config.json: 1 unknown: odd$"),
    ],
)  # fmt: skip
def test_damaged_tensors(tmp_path, damage, message):
    """Catches a stack trace, code that is run, or a model with holes."""
    make_llama(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        load(tmp_path)


def edit_index(change):
    def damage(directory):
        index = json.loads((directory / interop.INDEX).read_text())
        change(index["weight_map"])
        (directory / interop.INDEX).write_text(json.dumps(index))

    return damage


def shard_of(directory, name=NORM):
    return directory / json.loads((directory / interop.INDEX).read_text())["weight_map"][name]


@pytest.mark.parametrize(
    "damage,message",
    [
        (lambda d: shard_of(d).unlink(), "is missing, a shard"),
        (lambda d: shard_of(d).write_bytes(b"0"), "damaged"),
        (lambda d: (d / interop.INDEX).write_text("[1]"), "not a JSON object"),
        (lambda d: (d / interop.INDEX).write_text("{}"), "has no weight_map"),
        (edit_index(lambda m: m.update({NORM: "../../model.safetensors"})), "is not a safetensors"),
        (edit_index(lambda m: m.update({NORM: "pytorch_model.bin"})), "is not a safetensors"),
        (edit_index(lambda m: m.update({"odd": m[NORM]})), "damaged.*odd"),
        (edit_index(lambda m: m.pop(NORM)), "do not fit"),
    ],
)  # fmt: skip
def test_damaged_shards(tmp_path, damage, message):
    """Catches a shard that is passed over, and a path that leads out of the directory."""
    make_llama(tmp_path, shard="10KB")
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        load(tmp_path)


def test_table_is_missing(tmp_path):
    """Catches a stack trace from a tied head whose table is not there."""
    make_llama(tmp_path, tied=True)
    tensors = load_file(tmp_path / interop.SINGLE)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / interop.SINGLE)
    with pytest.raises(UserError, match=r"1 missing: model\.embed_tokens\.weight$"):
        load(tmp_path)


def test_old_leftovers(tmp_path):
    """Catches a refusal of what old Llamas have in their files and does no harm: the frequencies of
    RoPE as a tensor, a copy of the table as the tied head."""
    llama = make_llama(tmp_path, tied=True)
    file = tmp_path / interop.SINGLE
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, file)
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(
        logits(model, ids(1, 9)), logits(llama, ids(1, 9)), atol=1e-4, rtol=0
    )


MEMORY = """
import re, sys
from interop import load
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
load(sys.argv[1])  # which imports what loading needs
before = peak()
model = load(sys.argv[2])
print((peak() - before) / sum(p.numel() * 4 for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory as Linux tells it")
def test_memory(tmp_path):
    """Catches weights that are in memory twice while they are read: peak over size."""
    make_llama(tmp_path / "small")
    make_llama(tmp_path / "large", vocab_size=20_000, hidden_size=512)
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) < 1.6  # half of it is one tensor, which is there twice


# -- The Hub -----------------------------------------------------------------------------------


def test_hub(tmp_path, monkeypatch):
    """Catches a name of the Hub that is not looked up, a path that is, and a failed download that
    is not explained."""
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path / "fetched")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert interop.locate("someone/a-model") == tmp_path / "fetched"
    assert asked[0][0] == "someone/a-model" and not any("bin" in p for p in asked[0][1])
    (tmp_path / "out").mkdir()
    for path in ("out/typo", "typo", "a/b/c", "/no/where"):
        with pytest.raises(UserError, match=f"{path} does not exist"):
            interop.locate(path)
    assert interop.locate("out") == Path("out") and len(asked) == 1

    def fail(name, allow_patterns):
        raise OSError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"cannot be fetched \(no route to host\): check"):
        interop.locate("someone/a-model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        interop.locate("someone/a-model")


# -- The command -------------------------------------------------------------------------------


def test_command_line(tmp_path, capsys):
    """Catches an exported Llama that does not know where its texts end, or one that is
    overwritten."""
    save(small_model(ponder_steps=0, vocab_size=300), tmp_path / "model")
    make_tokenizer(tmp_path / "model", "llama 3")
    save_config = read_json(tmp_path / "model")
    interop_main(str(tmp_path / "model"), to=tmp_path / "other")
    out = capsys.readouterr().out
    assert "vanilla, K = 0" in out and "a Hugging Face Llama" in out and save_config
    written = read_json(tmp_path / "other")
    _, tokenizer = make_tokenizer(tmp_path / "again", "llama 3")
    assert written["eos_token_id"] == tokenizer.end_of_text
    assert written["bos_token_id"] == tokenizer.begin[0]
    with pytest.raises(UserError, match="exists already"):
        interop_main(str(tmp_path / "model"), to=tmp_path / "other")
