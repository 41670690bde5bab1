"""Models and tokenizers as other libraries write them: random Llamas, small vocabularies."""

import json

import torch
import transformers
from lab_helpers import GOLDEN
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lab.corpora.tokenizers import load_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog, and then it naps.\n" * 20
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip


SHAPE = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=128, initializer_range=0.1,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def make_llama(directory, tied=False, G=2, rope=None, old=False, shard="5GB", **kwargs):
    """A random transformers Llama, whose errors show, in a directory."""
    rope = {"rope_type": "default", **(rope or {}), "rope_theta": 500.0}
    kwargs = dict(rope_parameters=rope, num_key_value_heads=G, rms_norm_eps=1e-4) | kwargs
    llama = write_random(transformers.LlamaForCausalLM, directory, tied, shard, kwargs)
    if old:
        fields = read_json(directory)
        rope = fields.pop("rope_parameters")
        fields["rope_theta"] = rope.pop("rope_theta")
        fields["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        write_json(directory, fields)
    return llama


def make_neox(directory, tied=False, rotary_pct=0.25, old=False, shard="5GB", **kwargs):
    """A random transformers GPT-NeoX, as make_llama."""
    rope = {"rope_type": "default", "partial_rotary_factor": rotary_pct, "rope_theta": 500.0}
    kwargs = dict(rope_parameters=rope, layer_norm_eps=1e-4) | kwargs
    neox = write_random(transformers.GPTNeoXForCausalLM, directory, tied, shard, kwargs)
    if old:
        fields = read_json(directory)
        del fields["rope_parameters"]
        write_json(directory, fields | {"rotary_pct": rotary_pct, "rotary_emb_base": 500.0})
    return neox


def write_random(kind, directory, tied, shard, shape):
    torch.manual_seed(0)
    model = kind(kind.config_class(**SHAPE | {"tie_word_embeddings": tied} | shape))
    for name, parameter in model.named_parameters():
        if "bias" in name:  # which transformers starts at 0
            torch.nn.init.normal_(parameter, std=0.1)
        elif "norm" in name:  # at 1
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.eval().save_pretrained(directory, max_shard_size=shard)
    return model


def official(directory, name, **fields):
    """A golden file as a directory of weights that PonderLM-2's code would have written -> its
    other tensors, and its metadata."""
    with safe_open(GOLDEN / name, "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key).contiguous() for key in file.keys()}  # noqa: SIM118
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    directory.mkdir(exist_ok=True)
    write_json(directory, llama | json.loads(metadata["config"]) | fields)
    kept = {key: tensors.pop(key) for key in [*tensors] if key.endswith((".weight", ".bias"))}
    save_file(kept, directory / "model.safetensors")
    return tensors, metadata


def read_json(directory):
    return json.loads((directory / "config.json").read_text())


def write_json(directory, fields):
    (directory / "config.json").write_text(json.dumps(fields))


def byte_level(begin=False):
    """As SmolLM2 and (with `begin`) Llama 3."""
    t = Library(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    how = dict(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    how["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator([TEXT], trainers.BpeTrainer(**how))
    if begin:
        begins = [("<s>", t.token_to_id("<s>"))]
        t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begins)
    return t


def sentencepiece():
    """As Llama 2 and TinyLlama: spaces as U+2581, unknown characters as bytes."""
    alphabet = sorted(set(TEXT.replace(" ", "\u2581").replace("\n", "")))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *alphabet]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("o", "x"), ("f", "ox")]
    pieces += [a + b for a, b in merges]
    how = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    t = Library(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, **how))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    t.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return t


KINDS = {
    "byte-level": byte_level,
    "llama 3": lambda: byte_level(begin=True),
    "llama 2": sentencepiece,
}


def make_tokenizer(directory, kind, **fields):
    library = KINDS[kind]()
    directory.mkdir(exist_ok=True)
    library.save(str(directory / "tokenizer.json"))
    fields = fields or {"eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    return library, load_tokenizer(directory / "tokenizer.json")
