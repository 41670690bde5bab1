"""The tokenizer.json beside a Llama: both kinds that Llamas have, made here from a small text."""

import json

import numpy as np
import pytest
from conftest import small_model
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import weights
from data import open_tokenizer, prepare
from sample import Printer
from tokenizer import DataError, load_tokenizer
from windows import load_tokens

TEXT = "the quick brown fox jumps over the lazy dog, and then it naps.\n" * 20
HARD = "the  fox\n\tnaps: é ☃ 日本 \U0001f98a <s> </s> <|endoftext|> \x00!"


def byte_level(begin=False):
    """As SmolLM2 and (with `begin`) Llama 3."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    if begin:
        t.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", t.token_to_id("<s>"))]
        )
    return t


def sentencepiece():
    """As Llama 2 and TinyLlama: spaces as U+2581, unknown characters as bytes."""
    alphabet = sorted(set(TEXT.replace(" ", "\u2581").replace("\n", "")))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *alphabet]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("o", "x"), ("f", "ox")]
    pieces += [a + b for a, b in merges]
    t = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>",
            fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    t.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    t.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return t


KINDS = {
    "byte-level": byte_level,
    "llama 3": lambda: byte_level(begin=True),
    "llama 2": sentencepiece,
}


def make(directory, kind, config=None, **fields):
    library = KINDS[kind]()
    directory.mkdir(exist_ok=True)
    library.save(str(directory / "tokenizer.json"))
    fields = fields or {"eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    if config:
        (directory / "config.json").write_text(json.dumps(config))
    return library, load_tokenizer(directory / "tokenizer.json")


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode(tmp_path, kind):
    """Catches other ids than the library's, a text whose "</s>" becomes the end of the text, bytes
    that change on the way back, and settings that a file of ours loses."""
    library, tokenizer = make(tmp_path, kind)
    assert tokenizer.encode(TEXT) == library.encode(TEXT, add_special_tokens=False).ids
    start = " " if kind == "llama 2" else ""  # SentencePiece puts a space before each text
    for text in (TEXT, HARD, "", "é"):
        assert tokenizer.decode(tokenizer.encode(text)).decode() == (start if text else "") + text
    assert tokenizer.encode(HARD.encode()) == tokenizer.encode(HARD)
    assert tokenizer.end_of_text == library.token_to_id("</s>")
    assert tokenizer.end_of_text not in tokenizer.encode(HARD)
    assert tokenizer.begin == ([] if kind == "byte-level" else [library.token_to_id("<s>")])
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert tokenizer.decode([*tokenizer.begin, tokenizer.vocab_size]) == b"<s>" * len(
        tokenizer.begin
    )
    tokenizer.save(tmp_path / "ours.json")
    again = load_tokenizer(tmp_path / "ours.json")
    for name in ("tokens", "begin", "end_of_text", "digest"):
        assert getattr(again, name) == getattr(tokenizer, name)


@pytest.mark.parametrize(
    "template,begin",
    [("</s> $A", [1]), ("<s> $A </s>", [0]), ("$A </s>", []), ("<s> </s> $A <s>", [0, 1])],
)
def test_begin(tmp_path, template, begin):
    """Catches a beginning that is taken for the end of text, or the end for a beginning."""
    library = byte_level()
    special = [(name, library.token_to_id(name)) for name in ("<s>", "</s>")]
    library.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    library.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").begin == begin


def test_added_tokens(tmp_path):
    """Catches a token that was added as plain text and is read as characters for bytes."""
    library = byte_level()
    library.add_tokens(["two words \u00e9"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("the two words \u00e9 fox")
    assert library.token_to_id("two words \u00e9") in ids
    assert tokenizer.decode(ids).decode() == "the two words \u00e9 fox"


def test_beginning_is_not_shown(tmp_path, capsys):
    """Catches a "<s>" that is printed before a prompt which has none."""
    _, tokenizer = make(tmp_path, "llama 3")
    ids = tokenizer.begin + tokenizer.encode("the fox")
    printer = Printer(tokenizer, 3, tokenizer.end_of_text)
    printer.prompt("the fox", ids, [0] * len(ids))
    printer.close()
    assert capsys.readouterr().out.replace("\u2080", "") == "the fox\n"


def test_bytes_of_a_character(tmp_path):
    """Catches a character that is lost where it takes several tokens, as streaming prints it."""
    for kind in KINDS:
        _, tokenizer = make(tmp_path, kind)
        parts = [tokenizer.decode([i]) for i in tokenizer.encode("日")]
        assert b"".join(parts).decode().strip() == "日" and len(parts) >= 3


@pytest.mark.parametrize(
    "config,fields",
    [
        (None, {"eos_token": "</s>"}),
        (None, {"eos_token": {"content": "</s>", "lstrip": False}}),
        ({"eos_token_id": 1}, {"model_max_length": 5}),
        ({"eos_token_id": [1, 0]}, {"model_max_length": 5}),
    ],
)
def test_end_of_text(tmp_path, config, fields):
    """Catches an end of text that is looked for in one place only."""
    library, tokenizer = make(tmp_path, "byte-level", config, **fields)
    assert tokenizer.end_of_text == 1 == library.token_to_id("</s>")


def test_settings_of_the_file_are_left_alone(tmp_path):
    """Catches texts cut at the 512 tokens that somebody's tokenizer.json says."""
    library = byte_level()
    library.enable_truncation(4)
    library.enable_padding(length=9)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode(TEXT)).decode() == TEXT
    assert tokenizer.end_of_text is None
    (tmp_path / "text").write_text(TEXT)
    with pytest.raises(DataError, match="no end of text"):
        prepare(str(tmp_path / "text"), str(tmp_path), cache=tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_corpus(tmp_path, kind):
    """Catches a corpus without the tokens around each text, and one that is taken for another's."""
    _, tokenizer = make(tmp_path / "model", kind)
    (tmp_path / "texts").mkdir()
    for name in "ab":  # the end of training text would fall inside the second character
        (tmp_path / "texts" / name).write_text(f"{name} {'日本語' * 99}")
    folder, same = prepare(
        str(tmp_path / "texts"), str(tmp_path / "model"), cache=tmp_path / "data"
    )
    assert same.digest == tokenizer.digest and same.digest in folder.name.split("-")[-2]
    ids = load_tokens(folder, "val", tokenizer.vocab_size, 8)[:].tolist()
    one = [*tokenizer.begin, *tokenizer.encode("日本語" * 10), tokenizer.end_of_text]
    assert ids[: len(one)] == one and len(ids) == 2 * len(one)
    assert (
        prepare(str(tmp_path / "texts"), str(tmp_path / "model"), cache=tmp_path / "data")[1].digest
        == tokenizer.digest
    )
    other, _ = prepare(str(tmp_path / "texts"), "bytes", cache=tmp_path / "data")
    assert other != folder


@pytest.mark.parametrize("kind", KINDS)
def test_export(tmp_path, kind, capsys):
    """Catches a directory whose tokenizer transformers does not load, or loads as another one; and
    one that is overwritten."""
    transformers = pytest.importorskip("transformers")
    library, tokenizer = make(tmp_path / "model", kind)
    small_model(ponder_steps=0, vocab_size=library.get_vocab_size()).save_pretrained(
        tmp_path / "model"
    )
    tokenizer.save(tmp_path / "model" / "tokenizer.json")  # as a run has it
    weights.main(str(tmp_path / "model"), tmp_path / "llama")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "llama")
    assert theirs.eos_token_id == tokenizer.end_of_text
    assert theirs(TEXT)["input_ids"] == tokenizer.begin + tokenizer.encode(TEXT)
    assert load_tokenizer(tmp_path / "llama" / "tokenizer.json").tokens == tokenizer.tokens
    assert "a Hugging Face Llama" in capsys.readouterr().out
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.end_of_text
    assert config["bos_token_id"] == (tokenizer.begin[0] if tokenizer.begin else None)
    assert theirs.bos_token == ("<s>" if tokenizer.begin else None)
    with pytest.raises(FileExistsError, match="exists already"):
        weights.main(str(tmp_path / "model"), tmp_path / "llama")


def test_large_vocabulary(tmp_path):
    """Catches ids above 65,535 that wrap around: Llama 3 has 128,256."""
    library = byte_level()
    library.add_tokens([f"token{i}" for i in range(70_000)])
    (tmp_path / "model").mkdir()
    library.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    text = "".join(f"token{i} " for i in range(69_999, 0, -7))
    (tmp_path / "text").write_text(text)
    folder, tokenizer = prepare(str(tmp_path / "text"), str(tmp_path / "model"), cache=tmp_path)
    tokens = load_tokens(folder, "train", tokenizer.vocab_size, 8)
    assert tokens[:5].dtype == np.uint32 and int(tokens[:].max()) > 2**16
    assert text.startswith(tokenizer.decode(tokens[:-1]).decode())


def damage(change):
    def edit(directory):
        definition = json.loads((directory / "tokenizer.json").read_text())
        change(definition)
        (directory / "tokenizer.json").write_text(json.dumps(definition))

    return edit


@pytest.mark.parametrize(
    "edit,message",
    [
        (lambda d: (d / "tokenizer.json").unlink(), "cannot read"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "not a JSON object"),
        (lambda d: (d / "tokenizer.json").write_text("[]"), "not a JSON object"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "no tokenizer that is known"),
        (damage(lambda t: t.update(model={"type": "Odd"})), "tokenizers cannot read"),
        (damage(lambda t: t.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})),
         "unknown decoder, .*WordPiece"),
        (damage(lambda t: t.update(decoder=None)), "unknown decoder"),
        (lambda d: (d / "tokenizer_config.json").write_text("{"), "tokenizer_config.json is not"),
        (lambda d: (d / "tokenizer_config.json").write_text('{"eos_token": "x!y"}'),
         "end of text, 'x!y', is not in its vocabulary"),
    ],
)  # fmt: skip
def test_damaged(tmp_path, edit, message):
    """Catches a stack trace, or a text that is written with other tokens."""
    make(tmp_path, "byte-level")
    edit(tmp_path)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "change,message",
    [
        ({"vocab_size": "abc", "name": "ids"}, "no tokenizer that is known"),
        ({"tokens": ["YQ==", "YQ=="]}, "a token is there twice"),
        ({"tokens": ["YQ=="]}, "a byte has no token"),
    ],
)
def test_damaged_own(tmp_path, change, message):
    """Catches a vocabulary with which the library ends the process, or that says something else."""
    fields = open_tokenizer("bytes").fields() | {"name": "bpe"} | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_without_the_library(tmp_path, monkeypatch):
    make(tmp_path, "byte-level")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(DataError, match="pip install tokenizers"):
        load_tokenizer(tmp_path / "tokenizer.json")
