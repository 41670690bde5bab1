"""train.py --init-from: a trained model goes on, or learns to ponder."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import same_weights
from foreign import make_llama, make_tokenizer
from pydantic import ValidationError

from baselines import all_methods
from corpus.preparation import Windows
from engine.batching import Engine
from interop import is_model, load, read_config, save
from model import PonderLM
from runtime import UserError
from sample import generate
from train import train
from training.config import open_corpus, parse, validation_windows
from training.runs import checkpoints
from training.validation import evaluate
from training.warm_start import follows, start_from


@pytest.fixture
def llama(config):
    """A small Llama that is trained, in a directory as transformers writes it."""
    return as_others(replace(config, steps=60), "llama", embed_scale=1.0, tie_word_embeddings=True)


def as_others(config, name, **shape):
    """Train a model without pondering, and save it as transformers would. -> the directory"""
    model = replace(config.model, method="vanilla", ponder_steps=0, **shape)
    run, _ = train(replace(config, name="plain", model=model))
    save(load(run), place := Path(config.out).parent / name)
    shutil.copy(run / "tokenizer.json", place)
    return place


def going_on(config, llama, *flags):
    """A TrainConfig as the command line makes it."""
    flags = ["--data", config.data, "--steps", "20", *flags]
    config = parse(["--preset", "tiny", "--init-from", str(llama), *flags])
    return replace(config, eval_every=10, eval_windows=8, device="cpu", precision="float32")


def check_resume(config, first, capsys):
    """A training from `first`, cut short at its first checkpoint, goes on without `first` and is
    the same bit for bit. -> the run that was not cut, and its results"""
    whole, results = train(replace(config, name="whole"))
    parts, _ = train(replace(config, name="parts"))
    shutil.rmtree(checkpoints(parts)[1])
    shutil.rmtree(first)
    train(parse(["--resume", "--name", "parts"]))
    assert "resumed at step 10" in capsys.readouterr().out
    assert same_weights(load(whole), load(parts))
    return whole, results


def fixed_point_loss(model, config):
    _, _, _, val = open_corpus(config)
    return evaluate(model, Windows(val, 16, 0), 16, torch.device("cpu"))["loss"]


@pytest.mark.parametrize("method, tolerance", [("grid", 1e-6), ("ponderlm3", 1e-2)])
def test_step_0_is_the_llama(config, llama, method, tolerance):
    """Catches a start that is not the Llama's: the loss, relative, wherever the router starts. By
    Jacobi the first slot of a token sees four keys of each earlier token, and one of its own. And a
    spelling that the command line takes and the defaults do not see."""
    config = going_on(config, llama, "--method", method)
    assert parse(["--preset", "tiny", "--init_from", str(llama)]).model.hidden_size == 32
    assert config.model.reread and config.model.block_size == 16 and config.learning_rate == 2e-3
    plain = fixed_point_loss(load(llama), config)
    assert plain < 0.5  # it has learned its text, so that there is something to spoil
    for offset in (None, (0.0,) * 4):
        model = start_from(llama, replace(config.model, router_offset=offset)).eval()
        assert fixed_point_loss(model, config) == pytest.approx(plain, rel=tolerance)
    model.feedback.weight.data.fill_(1)
    assert fixed_point_loss(model, config) > 1.1 * plain


def test_from_a_gpt_neox(config):
    """Catches a Pythia that cannot learn to ponder, by its shape or by its names: trained as one,
    read back, continued as PonderLM-3, decoded."""
    shape = dict(head_dim=None, backbone="gpt_neox", backbone_options={"rotary_pct": 0.25})
    pythia = as_others(config, "pythia", **shape)
    taught, results = train(replace(going_on(config, pythia), name="taught"))
    model = load(taught)
    assert (model.config.method, model.config.backbone) == ("ponderlm3", "gpt_neox")
    assert model.config.backbone_options["rotary_pct"] == 0.25 and results["fixed"]["loss"] < 2.5
    prompt = [list(b"the quick")]
    assert Engine(model, 1).generate(prompt, 8, seed=0) == generate(model, prompt, 8, seed=0)


def test_rate_of_g(config, llama):
    """Catches a g that learns as slowly as old weights, decays, or is not saved."""
    config = replace(going_on(config, llama), steps=1, learning_rate=0.0, warmup=0.0)
    run, _ = train(replace(config, name="g"))
    model, before = load(run), start_from(llama, config.model)
    assert float(model.feedback.weight.detach().abs().max()) == pytest.approx(3e-3, rel=0.01)
    model.feedback.weight.data.zero_()
    assert same_weights(model, before)


def test_training_and_resume(config, llama, capsys):
    """Catches a checkpoint that is not the model as it was then, and a resume that needs the first
    model again."""
    whole, results = check_resume(going_on(config, llama), llama, capsys)
    assert results["fixed"]["loss"] < 2  # of 3.0, the unigram entropy
    half, whole_model = load(checkpoints(whole)[0]), load(whole)
    assert half.config == whole_model.config
    assert not torch.equal(half.feedback.weight, whole_model.feedback.weight)
    assert validation_windows("out/whole")[2].count > 0


@pytest.mark.parametrize("method", [kind.method for kind in all_methods()])
def test_every_method(config, llama, method):
    """Catches a weight that is left random, or a method that cannot begin from a Llama."""
    config = going_on(config, llama, "--method", method)
    assert config.model.method == method and config.model.reread == follows(method, "reread")
    model, plain = start_from(llama, config.model), load(llama).state_dict()
    assert all(torch.equal(model.state_dict()[name], plain[name]) for name in plain)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    if method == "vanilla":
        assert fixed_point_loss(model, config) == fixed_point_loss(load(llama), config)


def test_pondering_model_goes_on(config, llama):
    """Catches a pondering model that loses its router, its K or its settings."""
    first, _ = train(replace(going_on(config, llama, "--ponder-steps", "2"), name="first"))
    second = going_on(config, first)
    assert second.model == read_config(first) and second.model.reread
    save(PonderLM(replace(second.model, reread=False)), llama.parent / "scratch")
    assert not going_on(config, llama.parent / "scratch").model.reread
    assert second.model.ponder_steps == 2
    assert same_weights(load(first), start_from(first, second.model))
    with pytest.raises(UserError, match="is a ponderlm3 and can only go on as that"):
        start_from(first, going_on(config, first, "--method", "looped").model)
    with pytest.raises(UserError, match="ponder_steps = 1: out/first takes 2, which"):
        start_from(first, replace(second.model, ponder_steps=1))


def test_more_steps(config, llama, capsys):
    """Catches another offset for the steps that a model has, a row that is not the last one's copy;
    and a resume that is another training."""
    first, _ = train(replace(going_on(config, llama, "--ponder-steps", "2"), name="first"))
    grown = going_on(config, first, "--ponder-steps", "4")
    before, model = load(first), start_from(first, grown.model)
    assert grown.model.offset == (*before.config.offset, *2 * before.config.offset[-1:])
    for name, x in before.state_dict().items():
        assert torch.equal(model.state_dict()[name][: len(x)], x), name
    rows = model.router.proj.weight
    assert rows[2:].eq(rows[2]).all() and rows[2].ne(0).any()
    check_resume(grown, first, capsys)


WEIGHTS_OF_A_STEP = {"ablation-router", "adaponder", "mor-token", "mor-expert"}
OTHERS = [kind.method for kind in all_methods() if kind.method not in ("ponderlm3", "vanilla")]


@pytest.mark.parametrize("method", OTHERS)
def test_more_steps_of_other_methods(config, llama, method):
    """Catches a gate that does not take part in the training of more steps, or is another one; and
    a run for a model that cannot take more."""
    model = start_from(llama, going_on(config, llama, "--method", method).model)
    K, first = model.config.ponder_steps, llama.parent / "first"
    for x in model.parameters():
        torch.nn.init.normal_(x.data, std=0.02)
    save(model, first, exact=True)
    shutil.copy(llama / "tokenizer.json", first)
    grown = replace(going_on(config, first, "--ponder-steps", str(K + 1)), steps=2, name="grown")
    if method in WEIGHTS_OF_A_STEP:
        with pytest.raises(UserError, match=f"{method} has .*leave --ponder-steps at {K}"):
            train(grown)
        assert not (llama.parent / "out/grown").exists()
        return
    before, begun = model.state_dict(), start_from(first, grown.model).state_dict()
    assert all(torch.equal(begun[k][: len(x)], x) for k, x in before.items())
    trained = load(train(grown)[0]).state_dict()
    assert all(not torch.equal(trained[k], x) for k, x in begun.items()), method


def test_killed_before_the_first_checkpoint(config, llama, monkeypatch):
    """Catches a run that needs the first model again, or goes on otherwise, from its beginning."""
    config = going_on(config, llama)
    whole, _ = train(replace(config, name="whole"))
    with monkeypatch.context() as patch:
        patch.setattr("train.draw_refinements", lambda step, _: 1 / 0 if step == 3 else 1)
        with pytest.raises(ZeroDivisionError):
            train(replace(config, name="parts"))
    shutil.rmtree(llama)
    parts, _ = train(parse(["--resume", "--name", "parts"]))
    assert same_weights(load(whole), load(parts))


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--hidden-size", "64"], "hidden_size = 64: .* has 32"),
        (["--rope-theta", "5"], "rope_theta = 5.0: .* has 10000.0"),
        (["--embed-scale", "2"], "embed_scale = 2.0: .* has 1.0"),
        (["--block-size", "32"], "block_size = 32: .* windows of 16"),
        (["--method", "looped", "--reread"], "reread = True: looped does not follow it"),
        (["--tokenizer", "nowhere"], "nowhere does not exist"),
    ],
)
def test_refused(config, llama, flags, message):
    """Catches a setting that the weights do not follow."""
    with pytest.raises((UserError, ValidationError), match=message):
        train(going_on(config, llama, *flags))
    assert not any(is_model(run) for run in (llama.parent / "out").iterdir() if run.name != "plain")


def test_hugging_face_model(config, tmp_path, capsys):
    """Catches a Llama with a tokenizer of its own whose texts are cut into other tokens, or that
    cannot go on once its directory is gone."""
    library, tokenizer = make_tokenizer(tmp_path / "llama", "llama 3")
    make_llama(tmp_path / "llama", vocab_size=library.get_vocab_size() + 20)  # a padded table
    config = going_on(config, "llama", "--block-size", "8", "--steps", "2")
    run, _ = train(replace(config, name="mine"))
    saved = json.loads((run / "tokenizer.json").read_text())
    assert saved["name"] == "huggingface" and saved["end"] == "</s>"
    _, again, tokens, _ = open_corpus(config)
    assert again.digest == tokenizer.digest and tokens[0:1].tolist() == tokenizer.begin
    shutil.rmtree(tmp_path / "llama")
    train(parse(["--resume", "--name", "mine", "--steps", "4"]))
    assert "resumed at step 2" in capsys.readouterr().out


def test_without_a_tokenizer(config, tmp_path):
    """Catches a Llama without tokenizer.json that is trained on tokens it never saw, and a corpus
    of another tokenizer."""
    make_llama(tmp_path / "llama", vocab_size=300)
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        train(going_on(config, "llama"))
    assert open_corpus(going_on(config, "llama", "--tokenizer", "bytes"))[1].name == "bytes"
    make_tokenizer(tmp_path / "llama", "byte-level")
    folder, _, _, _ = open_corpus(going_on(config, "llama"))
    make_tokenizer(tmp_path / "llama", "llama 2")
    config = going_on(config, "llama")
    with pytest.raises(UserError, match="ids of another tokenizer"):
        open_corpus(replace(config, data=str(folder)))
    few = replace(config, model=replace(config.model, vocab_size=200))
    with pytest.raises(UserError, match="beyond the vocabulary of 200"):
        open_corpus(few)
    with pytest.raises(UserError, match="only 200"):
        open_corpus(replace(few, tokenizer="bytes"))


def test_folder_of_ids(config, tmp_path, capsys):
    """Catches ready ids that need an end of text, or are taken for the model's without a word."""
    library, _ = make_tokenizer(tmp_path / "llama", "byte-level", model_max_length=5)
    make_llama(tmp_path / "llama", vocab_size=library.get_vocab_size())
    (tmp_path / "ids").mkdir()
    for name in ("train.bin", "val.bin"):
        (np.arange(5000, dtype=np.uint16) % 250).tofile(tmp_path / "ids" / name)
    config = replace(going_on(config, "llama"), data="ids")
    assert open_corpus(config)[1].end_of_text is None
    taken = "ids has no tokenizer.json; its ids are taken for those of llama"
    assert taken in capsys.readouterr().out
