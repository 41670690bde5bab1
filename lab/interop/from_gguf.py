"""A GGUF, llama.cpp's file of weights of a few bits, as the directory of a Hugging Face Llama.

transformers takes the bits apart and makes the tokenizer. What it passes over in silence, so that
the Llama would be another one, is refused by name.
"""

from importlib.util import find_spec
from pathlib import Path

from lab.interop import write_directory
from model import UserError

PACKAGES = ("gguf", "transformers", "accelerate")
# What a file may say of its Llama, and may hold: experts, biases, other kinds of RoPE are neither.
SAID = {"block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"}
SAID |= {"rope.freq_base", "rope.dimension_count", "attention.key_length", "attention.value_length"}
SAID |= {f"attention.{name}" for name in ("head_count", "head_count_kv", "layer_norm_rms_epsilon")}
NEEDED = {"block_count", "attention.head_count_kv"}  # without which transformers errs
# How it cuts a text into words, for a kind of tokenizer: what transformers does right, but for smollm below.
CUTS = {"gpt2": {"gpt-2", "smollm"}, "llama": {"default", None}}
HELD = {"token_embd", "output_norm"}
OF_LAYER = {"attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"}
OF_LAYER |= {"ffn_norm", "ffn_gate", "ffn_up", "ffn_down"}


def from_gguf(file, directory):
    """Write the Llama in `file` in half precision, its tokenizer and its chat template.

    Raises:
        UserError: a package is missing, the file is damaged, or it holds no plain Llama.
    """
    if missing := [name for name in PACKAGES if not find_spec(name)]:
        raise UserError(f"a GGUF is read by other packages: pip install {' '.join(missing)}")
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, LlamaForCausalLM

    try:
        reader = GGUFReader(file)
        said = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, LookupError) as error:
        raise UserError(f"{file} is damaged or no GGUF: {error}") from None
    check_plain(file, said, {tensor.name for tensor in reader.tensors})
    place = dict(pretrained_model_name_or_path=Path(file).parent, gguf_file=Path(file).name)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    if said.get("tokenizer.ggml.pre") == "smollm":  # which transformers cuts like GPT-2's
        cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    llama = LlamaForCausalLM.from_pretrained(**place)
    tensors = {name: tensor.half() for name, tensor in llama.state_dict().items()}
    config = llama.config.to_dict() | {"dtype": "float16", "_name_or_path": ""}
    del config["quantization_config"]  # nothing is, any more
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    tokenizer.save_pretrained(directory)
    write_directory(directory, config, tensors)


def check_plain(file, said, names):
    """Refuse what is not a Llama as in `SAID` and `HELD`. said: {field: value}."""
    if (kind := said.get("general.architecture")) != "llama":
        raise UserError(f"{file}: general.architecture = {kind!r}: it has to be 'llama'")
    ours = {name.removeprefix("llama.") for name in said if name.startswith("llama.")}
    if odd := ours - SAID | NEEDED - ours:
        raise UserError(f"{file}: unknown or missing fields of a Llama: {sorted(odd)}")
    model, cut = said.get("tokenizer.ggml.model"), said.get("tokenizer.ggml.pre")
    if cut not in CUTS.get(model, ()):
        raise UserError(
            f"{file}: its tokenizer ({model!r}, tokenizer.ggml.pre = {cut!r}) cuts words in a way that is "
            "not known here, so that a text would have other ids: convert the original model's directory"
        )
    width = said.get("llama.attention.key_length")
    width = width or said.get("llama.embedding_length", 0) // max(
        said.get("llama.attention.head_count", 1), 1
    )
    if (turned := said.get("llama.rope.dimension_count", width)) != width:
        raise UserError(
            f"{file}: rope.dimension_count = {turned}, but a head is {width} wide: no plain Llama"
        )
    layers = range(said["llama.block_count"])
    expected = HELD | {f"blk.{i}.{name}" for i in layers for name in OF_LAYER}
    odd = (names - {"output.weight"}) ^ {f"{name}.weight" for name in expected}
    if odd:
        raise UserError(f"{file}: unknown or missing tensors of a Llama: {sorted(odd)[:3]}")
