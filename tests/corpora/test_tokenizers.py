"""Our own tokenizers, and the tokenizer.json beside a Llama: both kinds that Llamas have, made here
from a small text."""

import json
import sys

import numpy as np
import pytest
from foreign import KINDS, TEXT, byte_level, make_tokenizer
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from lab.corpora.huggingface import save_pretrained
from lab.corpora.preparation import load_tokens, prepare, write_tokens
from lab.corpora.tokenizers import IdTokenizer, Tokenizer, ends_of, load_tokenizer, open_tokenizer
from lab.engine.request import Request, print_tokens
from model import UserError

CODE = "def f(x):\n    return x + 1  # naïve café 😀👩‍👩‍👧\n" * 40
TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": 10 * "a"}
HARD = "the  fox\n\tnaps: é ☃ 日本 \U0001f98a <s> </s> <|endoftext|> \x00!"


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode(tmp_path, kind):
    """Catches other ids than the library's, a text whose "</s>" becomes the end of the text, bytes
    that change on the way back, and settings that a file of ours loses."""
    library, tokenizer = make_tokenizer(tmp_path, kind)
    assert tokenizer.encode(TEXT) == library.encode(TEXT, add_special_tokens=False).ids
    start = " " if kind == "llama 2" else ""  # SentencePiece puts a space before each text
    for text in (TEXT, HARD, "", "é"):
        assert tokenizer.decode(tokenizer.encode(text)).decode() == (start if text else "") + text
    parts = [tokenizer.decode([i]) for i in tokenizer.encode("日")]  # as streaming prints them
    assert b"".join(parts).decode().strip() == "日" and len(parts) >= 3
    assert tokenizer.encode(HARD.encode()) == tokenizer.encode(HARD)
    assert tokenizer.end_of_text == library.token_to_id("</s>")
    assert tokenizer.end_of_text not in tokenizer.encode(HARD)
    assert tokenizer.begin == ([] if kind == "byte-level" else [library.token_to_id("<s>")])
    assert tokenizer.vocab_size == library.get_vocab_size()
    beginning = b"<s>" * len(tokenizer.begin)
    assert tokenizer.decode([*tokenizer.begin, tokenizer.vocab_size]) == beginning
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


def test_another_metaspace(tmp_path):
    """Catches a space that is shown as the character by which its tokenizer writes it."""
    library = Library(models.WordLevel({"_the": 0, "_fox": 1, "?": 2}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(replacement="_")
    library.decoder = decoders.Metaspace(replacement="_")
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("the fox")) == b" the fox"


def test_beginning_is_not_shown(tmp_path, capsys):
    """Catches a "<s>" that is printed in a text which has none."""
    _, tokenizer = make_tokenizer(tmp_path, "llama 3")
    ids = tokenizer.begin + tokenizer.encode("the fox")
    print_tokens([(token, 0) for token in ids], tokenizer, 3)
    assert capsys.readouterr().out.replace("\u2080", "") == "the fox\n"


def test_end_of_text(tmp_path):
    """Catches an end of text that is read in one of its two forms only, or is no token."""
    for end in ("</s>", {"content": "</s>", "lstrip": False}):
        assert make_tokenizer(tmp_path, "byte-level", eos_token=end)[1].end_of_text == 1
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert make_tokenizer(tmp_path, "byte-level", eos_token=None)[1].end_of_text == 1
    with pytest.raises(UserError, match="end of text, 'x!y', is not in its vocabulary"):
        make_tokenizer(tmp_path, "byte-level", eos_token="x!y")


@pytest.mark.parametrize("kind", KINDS)
def test_prompts(tmp_path, kind):
    """Catches a control token that is cut into characters in a prompt, or taken for one in a corpus; ids that
    AutoTokenizer does not have; a beginning said twice."""
    transformers = pytest.importorskip("transformers")
    _, tokenizer = make_tokenizer(tmp_path, kind)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("<s>the fox</s>\nof the ox</s>", "the fox", "</s></s>", "", HARD):
        ids = tokenizer.encode_prompt(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ids.count(tokenizer.end_of_text) == text.count("</s>")
        assert tokenizer.end_of_text not in tokenizer.encode(text)
        request = Request.__new__(Request)
        request.tokenizer, request.begin = tokenizer, tokenizer.begin
        said = text.startswith("<s>") or not tokenizer.begin
        expected = ids if said else tokenizer.begin + ids
        assert request.encode(text) == (expected or [tokenizer.end_of_text])  # where a document begins


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_ends_and_chat_template(tmp_path, file):
    """Catches a token that ends a turn and is sampled over, an id that is none, and a chat template that is
    lost on the way through a training and out again."""
    (tmp_path / file).write_text('{"eos_token_id": [1, 7, 9, 99999]}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    _, tokenizer = make_tokenizer(tmp_path, "byte-level")
    assert ends_of(tokenizer) == {1, 7, 9}
    (tmp_path / "run").mkdir()
    tokenizer.save(tmp_path / "run/tokenizer.json")
    again = load_tokenizer(tmp_path / "run/tokenizer.json")
    assert ends_of(again) == {1, 7, 9} and again.digest == tokenizer.digest
    (tmp_path / "out").mkdir()
    save_pretrained(again, tmp_path / "out")
    assert (
        json.loads((tmp_path / "out/tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    )
    (tmp_path / file).write_text('{"eos_token_id": 7}')
    assert ends_of(load_tokenizer(tmp_path / "tokenizer.json")) == {1, 7}
    assert ends_of(Tokenizer.bytes()) == {256} and ends_of(IdTokenizer(9)) == set()


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_long_text(tmp_path, monkeypatch, kind):
    """Catches a space that SentencePiece adds wherever a long text is cut, and a token that is lost there."""
    monkeypatch.setattr("lab.corpora.preparation.pieces_of", lambda text: text.splitlines(keepends=True))
    text = b"the fox\nof the ox\n the\n\n\xc3\xa9 ox"
    _, tokenizer = make_tokenizer(tmp_path, kind)
    write_tokens([text, text], tokenizer, tmp_path / "x.bin")
    whole = [*tokenizer.begin, *tokenizer.encode(text), tokenizer.end_of_text]
    assert np.fromfile(tmp_path / "x.bin", np.uint16).tolist() == 2 * whole


def test_name_is_no_path(tmp_path):
    """Catches a corpus that is written where the name in somebody's tokenizer.json says."""
    file, text = tmp_path / "model" / "tokenizer.json", tmp_path / "text.txt"
    make_tokenizer(file.parent, "byte-level")[1].save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"name": "x/../../../out"}))
    text.write_text(TEXT)
    folder, tokenizer = prepare(str(text), str(file.parent), cache=tmp_path / "data")
    assert folder.parent == tmp_path / "data" and folder.name.startswith("text-huggingface-")
    assert tokenizer.name == "huggingface"


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
    with pytest.raises(UserError, match="no end of text"):
        prepare(str(tmp_path / "text"), str(tmp_path), cache=tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_corpus(tmp_path, kind):
    """Catches a corpus without the tokens around each text, and one that is taken for another's."""
    _, tokenizer = make_tokenizer(tmp_path / "model", kind)
    (tmp_path / "texts").mkdir()
    for name in "ab":  # the end of training text would fall inside the second character
        (tmp_path / "texts" / name).write_text(f"{name} {'日本語' * 99}")
    texts, cache = str(tmp_path / "texts"), tmp_path / "data"
    folder, same = prepare(texts, str(tmp_path / "model"), cache=cache)
    assert same.digest == tokenizer.digest and same.digest in folder.name.split("-")[-2]
    ids = load_tokens(folder, "val", tokenizer.vocab_size)[:].tolist()
    one = [*tokenizer.begin, *tokenizer.encode("日本語" * 10), tokenizer.end_of_text]
    assert ids[: len(one)] == one and len(ids) == 2 * len(one)
    again, same = prepare(texts, str(tmp_path / "model"), cache=cache)
    assert again == folder and same.digest == tokenizer.digest
    assert prepare(texts, "bytes", cache=cache)[0] != folder


@pytest.mark.parametrize("kind", KINDS)
def test_export(tmp_path, kind):
    """Catches a tokenizer that transformers does not load, or loads as another one."""
    transformers = pytest.importorskip("transformers")
    _, tokenizer = make_tokenizer(tmp_path / "model", kind)
    (tmp_path / "llama").mkdir()
    save_pretrained(tokenizer, tmp_path / "llama")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "llama")
    assert theirs.eos_token_id == tokenizer.end_of_text
    assert theirs.bos_token == ("<s>" if tokenizer.begin else None)
    assert theirs.pad_token_id == tokenizer.end_of_text  # batches need one
    assert theirs.padding_side == "left"
    for text in (TEXT, "a</s>b"):
        assert theirs(text)["input_ids"] == tokenizer.begin + tokenizer.encode_prompt(text)
    assert load_tokenizer(tmp_path / "llama" / "tokenizer.json").tokens == tokenizer.tokens


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
    tokens = load_tokens(folder, "train", tokenizer.vocab_size)
    assert tokens[:5].dtype == np.uint32 and int(tokens[:].max()) > 2**16
    assert text.startswith(tokenizer.decode(tokens[:-1]).decode())


@pytest.mark.parametrize(
    "change,message",
    [
        (None, "is missing: a model has its tokenizer"),
        ({"model": {"type": "Odd"}}, "tokenizers cannot read"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decoder.*WordPiece"),
        ({"decoder": None}, "unknown decoder"),
        ({"normalizer": {"type": "Sequence", "normalizers": 9 * [TENFOLD]}}, "1,000,000,000 times as long"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "fails on 'a'"),  # the library panics
        ({"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "?"}}, "fails on 'a'"),
        ({"model": {"type": "WordLevel", "vocab": {"b": 2**20}, "unk_token": "b"}}, "ids is beyond 2"),
        ({}, "pip install tokenizers"),
    ],
)
def test_damaged(tmp_path, change, message, monkeypatch):
    """Catches a stack trace, or a text that is written with other tokens."""
    make_tokenizer(tmp_path, "byte-level")
    if message == "pip install tokenizers":
        monkeypatch.setitem(sys.modules, "tokenizers", None)
    file = tmp_path / "tokenizer.json"
    if change is None:
        file.unlink()
    else:
        theirs = json.loads(file.read_text())
        file.write_text(json.dumps(theirs | change))
    with pytest.raises(UserError, match=message):
        load_tokenizer(file)


def test_hub(tmp_path, monkeypatch):
    """Catches a name of the Hub that is not looked up, and weights that are fetched for a
    tokenizer."""
    make_tokenizer(tmp_path, "byte-level")
    asked = []

    def fetch(name, allow_patterns):
        asked.append(name)
        assert all(pattern.endswith(("json", "jinja")) for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert open_tokenizer("someone/a-model").encode("a") and asked == ["someone/a-model"]
