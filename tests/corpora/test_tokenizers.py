"""The tokenizer.json beside a Llama, of both kinds that Llamas have, made here from a small text; and ours in
that form."""

import json
from pathlib import Path
from random import Random
from unittest.mock import Mock

import numpy as np
import pytest
from foreign import KINDS, TEXT, byte_level, make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from common import UserError
from lab.corpora import lookup, preparation
from lab.corpora.preparation import Options, open_corpus, prepare
from lab.corpora.tokenizers import HuggingFaceTokenizer, definition_of, load_tokenizer, save_pretrained
from tokenizer import Tokenizer

HARD = "the  fox\n\tnaps: é ☃ 日本 \U0001f98a <s> </s> <|endoftext|> \x00!"
ONE_WAY = [bytes([i]) for i in range(256)] + [b"he", b"ef", b"hef"]  # h + ef is never met


def saved(library, **fields):
    """A tokenizer of the library as a directory, model/."""
    Path("model").mkdir(exist_ok=True)
    library.save("model/tokenizer.json")
    Path("model/tokenizer_config.json").write_text(json.dumps(fields))
    return load_tokenizer("model/tokenizer.json")


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode(tmp_path, kind):
    """Catches other ids than the library's, a "</s>" that ends a text, bytes or settings that are lost."""
    library, tokenizer = make_tokenizer(tmp_path, kind)
    assert tokenizer.encode(TEXT) == library.encode(TEXT, add_special_tokens=False).ids
    start = " " if kind == "llama 2" else ""  # SentencePiece puts a space before each text
    for text in (TEXT, HARD, "", "é"):
        assert tokenizer.decode(tokenizer.encode(text)).decode() == (start if text else "") + text
    parts = [tokenizer.decode([i]) for i in tokenizer.encode("日")]  # as a stream prints them
    assert b"".join(parts).decode().strip() == "日" and len(parts) >= 3
    assert tokenizer.encode(HARD.encode()) == tokenizer.encode(HARD)
    assert tokenizer.end_of_text == library.token_to_id("</s>") not in tokenizer.encode(HARD)
    assert tokenizer.begin == ([] if kind == "byte-level" else [library.token_to_id("<s>")])
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert tokenizer.decode([*tokenizer.begin, tokenizer.vocab_size]) == b"<s>" * len(tokenizer.begin)
    tokenizer.save(tmp_path / "ours.json")
    again = load_tokenizer(tmp_path / "ours.json")
    for name in ("tokens", "begin", "end_of_text", "digest"):
        assert getattr(again, name) == getattr(tokenizer, name)


@pytest.mark.parametrize(
    "template,begin",
    [("</s> $A", [1]), ("<s> $A </s>", [0]), ("$A </s>", []), ("<s> </s> $A <s>", [0, 1])],
)
def test_begin(template, begin):
    """Catches a beginning that is taken for the end of text, or the end for a beginning."""
    library = byte_level()
    special = [(name, library.token_to_id(name)) for name in ("<s>", "</s>")]
    library.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    assert saved(library).begin == begin


def test_odd_vocabularies():
    """Catches a token that was added as plain text and is read as characters for bytes, a space that is shown
    as the character by which its tokenizer writes it, and texts cut where somebody's file says so."""
    library = byte_level()
    library.add_tokens(["two words \u00e9"])
    library.enable_truncation(4)
    library.enable_padding(length=9)
    tokenizer = saved(library)
    ids = tokenizer.encode("the two words \u00e9 fox")
    assert library.token_to_id("two words \u00e9") in ids and len(ids) == 4
    assert len(tokenizer.encode("the fox " * 4)) > 4
    assert tokenizer.decode(ids).decode() == "the two words \u00e9 fox"
    library = Library(models.WordLevel({"_the": 0, "_fox": 1, "?": 2}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(replacement="_")
    library.decoder = decoders.Metaspace(replacement="_")
    tokenizer = saved(library)
    assert tokenizer.decode(tokenizer.encode("the fox")) == b" the fox"


def test_end_of_text():
    """Catches an end of text that is read in one of its two forms only, or is no token, or is not there."""
    for end in ("</s>", {"content": "</s>", "lstrip": False}):
        assert saved(byte_level(), eos_token=end).end_of_text == 1
    assert saved(byte_level()).end_of_text is None
    Path("text").write_text(TEXT)
    with pytest.raises(UserError, match="eos_token"):
        open_corpus("text", "model")
    assert not [*Path("data").glob("[!.]*")]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts(tmp_path, kind, monkeypatch):
    """Catches a control token that is cut into characters in a prompt, or taken for one in a corpus, also
    after a prompt that failed; and ids that AutoTokenizer does not have."""
    _, tokenizer = make_tokenizer(tmp_path, kind)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("<s>the fox</s>\nof the ox</s>", "the fox", "</s></s>", "", HARD):
        ids = tokenizer.encode_prompt(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ids.count(tokenizer.end_of_text) == text.count("</s>")
        assert tokenizer.end_of_text not in tokenizer.encode(text)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokenizer, "encode", Mock(side_effect=KeyboardInterrupt))
        tokenizer.encode_prompt("</s>")
    assert tokenizer.end_of_text not in tokenizer.encode("</s>")


# -- Corpora ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_corpus(kind, monkeypatch):
    """Catches a corpus without the tokens around each text, and one that is taken for another's."""
    _, tokenizer = make_tokenizer(Path("model"), kind)
    Path("texts").mkdir()
    text = b"the fox\nof the ox\n the\n\n\xc3\xa9 ox\n" * 3
    for name in "ab":
        Path("texts", name).write_bytes(text)
    corpus = open_corpus("texts", "model")
    assert corpus.tokenizer.digest == tokenizer.digest in corpus.name
    cut = len(text) - len(text) // 10
    for split, part in (("train", text[:cut]), ("val", text[cut:])):
        one = [*tokenizer.begin, *tokenizer.encode(part), tokenizer.end_of_text]
        assert getattr(corpus, split).tolist() == 2 * one
    assert open_corpus(f"data/{corpus.name}").tokenizer.digest == tokenizer.digest  # its own
    monkeypatch.setattr(preparation, "prepare", lambda o: pytest.fail("it was made again"))
    assert open_corpus("texts", "model").fingerprint() == corpus.fingerprint()
    assert open_corpus("texts", "bytes").name != corpus.name


def test_strange_files():
    """Catches bytes that are no UTF-8 and vanish, and a corpus that is written where the name in somebody's
    tokenizer.json says."""
    file = Path("model/tokenizer.json")
    make_tokenizer(file.parent, "byte-level")[1].save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"name": "x/../../../out"}))
    Path("a.txt").write_bytes(b"caf\xe9 ox" * 20)
    corpus = open_corpus("a.txt", "model")
    assert "\ufffd" in corpus.tokenizer.decode(corpus.train).decode()
    assert corpus.name.startswith("a-huggingface-")


def test_large_vocabulary():
    """Catches ids above 65,535 that wrap around: Llama 3 has 128,256."""
    library = byte_level()
    library.add_tokens([f"token{i}" for i in range(70_000)])
    saved(library, eos_token="</s>")
    text = "".join(f"token{i} " for i in range(69_999, 0, -7))
    Path("text").write_text(text)
    prepare(Options("text", Path("out"), "model"))
    corpus = open_corpus("out")
    assert corpus.train.dtype == np.uint32 and int(corpus.train.max()) > 2**16
    assert text.startswith(corpus.tokenizer.decode(corpus.train[:-1]).decode())


# -- In transformers -------------------------------------------------------------------------------


def test_export_of_the_puzzles():
    """Catches words that are tokens, but that no merges lead to, and that transformers therefore cuts."""
    tokenizer = lookup.tokenizer(6)
    Path("exported").mkdir()
    save_pretrained(tokenizer, "exported")
    theirs = AutoTokenizer.from_pretrained("exported")
    assert len(tokenizer.encode(" the")) == 1
    for text in (" the end", "the fox and the ox", *(lookup.line(Random(i), (), 6) for i in range(20))):
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_export(tmp_path, kind):
    """Catches a tokenizer that transformers does not load, or loads as another one."""
    _, tokenizer = make_tokenizer(tmp_path / "model", kind)
    Path("llama").mkdir()
    save_pretrained(tokenizer, "llama")
    theirs = AutoTokenizer.from_pretrained("llama")
    assert theirs.eos_token_id == theirs.pad_token_id == tokenizer.end_of_text  # batches need one
    assert theirs.bos_token == ("<s>" if tokenizer.begin else "</s>")
    assert theirs.padding_side == "left"
    for text in (TEXT, "a</s>b"):
        assert theirs(text)["input_ids"] == tokenizer.begin + tokenizer.encode_prompt(text)
    assert load_tokenizer("llama/tokenizer.json").tokens == tokenizer.tokens


OURS = {
    "bytes": lambda: Tokenizer.named("bytes"),
    "bpe": lambda: Tokenizer.train([(TEXT[:189] + "日本 naïve\r\n").encode()], 300),
    "two ways": lambda: Tokenizer("bpe", ONE_WAY),
    "lookup": lookup.tokenizer,
}


@pytest.mark.parametrize("name", OURS)
def test_export_of_ours(name):
    """Catches other ids than ours, a special token that a text can spell, and one not known again."""
    ours = OURS[name]()
    save_pretrained(ours, ".")
    theirs, again = AutoTokenizer.from_pretrained("."), load_tokenizer("tokenizer.json")
    assert again.digest == ours.digest and type(again) is Tokenizer
    foreign = HuggingFaceTokenizer(definition_of(ours), "<|endoftext|>")
    assert len(theirs) == ours.vocab_size == foreign.vocab_size
    assert theirs.eos_token_id == theirs.pad_token_id == ours.end_of_text == foreign.end_of_text
    assert theirs.bos_token_id == ours.end_of_text  # which CTranslate2 asks for

    @given(st.text() | st.text("the fox's\n\t \u00a0\u3000\u0085é日<|endoftext|>0'lLv"))
    def check(text):
        ids = ours.encode(text)
        assert theirs.encode(text) == ids == foreign.encode(text)
        assert theirs.decode(ids) == text and foreign.decode(ids).decode() == text

    check()
    for text in ("<|endoftext|>", "the hefty chef"):
        check.hypothesis.inner_test(text)


# -- What is refused -------------------------------------------------------------------------------

DAMAGES = [{"model": {"type": "Odd"}}, {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}]
DAMAGES += [{"decoder": None}]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged(tmp_path, damage):
    """Catches a stack trace, or a text that is written with other tokens."""
    make_tokenizer(tmp_path, "byte-level")
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(file)
