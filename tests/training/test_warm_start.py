"""train.py --init-from: a trained model goes on, or learns to ponder."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
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
from training.config import TrainConfig, open_corpus, parse, validation_windows
from training.runs import checkpoints
from training.validation import evaluate
from training.warm_start import can_warm_up, offset_at, start_from, with_feedback


@pytest.fixture
def llama(config, monkeypatch, tmp_path):
    """A small Llama that is trained, in a directory as transformers writes it."""
    monkeypatch.chdir(tmp_path)
    shape = dict(method="vanilla", ponder_steps=0, embed_scale=1.0, tie_word_embeddings=True)
    run, _ = train(replace(config, name="plain", steps=60, model=replace(config.model, **shape)))
    save(load(run), tmp_path / "llama")
    shutil.copy(run / "tokenizer.json", tmp_path / "llama")
    return tmp_path / "llama"


def going_on(config, llama, *flags):
    """A TrainConfig as the command line makes it."""
    flags = ["--data", config.data, "--steps", "20", *flags]
    config = parse(["--preset", "tiny", "--init-from", str(llama), *flags])
    return replace(config, eval_every=10, eval_windows=8, device="cpu", precision="float32")


def assert_same(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def fixed_point_loss(model, config):
    _, _, _, val = open_corpus(config)
    return evaluate(model, Windows(val, 16, 0), 16, torch.device("cpu"))["loss"]


def test_step_0_is_the_llama(config, llama):
    """Catches a router that ponders before the weights know of it: the loss within 1 %."""
    config = going_on(config, llama)
    assert config.ponder_warmup == 6 and config.model.method == "ponderlm3"
    assert config.model.block_size == 16 and config.learning_rate == 2e-3
    _, _, tokens, _ = open_corpus(config)
    config = with_feedback(config, Windows(tokens, 16, 0))
    plain = fixed_point_loss(load(llama), config)
    model = start_from(llama, config.model).eval()
    ponders_at_once = fixed_point_loss(model, config)
    model.set_offset(offset_at(0, config))
    assert plain < 0.5  # it has learned its text, so that there is something to spoil
    assert abs(fixed_point_loss(model, config) - plain) < 0.01 * plain
    assert ponders_at_once > 1.1 * plain


def test_from_a_gpt_neox(config, tmp_path, monkeypatch):
    """Catches a Pythia that cannot learn to ponder, by its shape or by its names: trained as one,
    read back, continued as PonderLM-3, decoded."""
    monkeypatch.chdir(tmp_path)
    shape = dict(method="vanilla", ponder_steps=0, head_dim=None, backbone="gpt_neox")
    model = replace(config.model, backbone_options={"rotary_pct": 0.25}, **shape)
    run, _ = train(replace(config, name="plain", model=model))
    save(load(run), tmp_path / "pythia")
    shutil.copy(run / "tokenizer.json", tmp_path / "pythia")
    taught, results = train(replace(going_on(config, tmp_path / "pythia"), name="taught"))
    model = load(taught)
    assert (model.config.method, model.config.backbone) == ("ponderlm3", "gpt_neox")
    assert model.config.backbone_options["rotary_pct"] == 0.25 and results["fixed"]["loss"] < 2.5
    prompt = [list(b"the quick")]
    assert Engine(model, 1).generate(prompt, 8, seed=0) == generate(model, prompt, 8, seed=0)


def test_feedback_scale(config, llama):
    """Catches another scale than that of the residual stream; h^(1) alone then predicts better
    than where states are fed back at the length of embeddings."""
    config = going_on(config, llama)
    _, _, tokens, val = open_corpus(config)
    windows, alone = Windows(val, 16, 0), {}
    measured = with_feedback(config, Windows(tokens, 16, 0)).model.feedback_scale
    model = load(llama)
    x = Windows(tokens, 16, 0).rows(0, 32)[:, :-1]
    with torch.no_grad():
        stream = model.model.stack(model.embed(x), torch.arange(16), None)
        state, e = model.model.norm(stream), model.embed(x)
    lengths = [y.norm(dim=-1).median() for y in (stream, state, e)]
    assert measured == pytest.approx(float(lengths[0] / lengths[1]), rel=0.05)
    for scale in (measured, float(lengths[2] / lengths[1])):
        model = start_from(llama, replace(config.model, feedback_scale=scale))
        model.set_offset(offset_at(0, config))
        alone[scale] = evaluate(model, windows, 16, torch.device("cpu"))["alone"]
    a, b = alone.values()
    assert a[1] < 0.8 * b[1] and a[0] == pytest.approx(b[0], rel=0.05)


def test_router_waits(config, llama):
    """Catches a router that closes before the weights have followed its offset."""
    config = replace(going_on(config, llama), steps=4, eval_every=2, log_every=1)
    run, _ = train(replace(config, name="waits", ponder_warmup=3))
    two, four = (load(path).router.proj.weight for path in checkpoints(run))
    assert two.eq(0).all() and four.ne(0).any()


def test_offset():
    """Catches a warm-up that jumps, or does not end where a model from scratch starts."""
    config = TrainConfig(ponder_warmup=10)
    s = torch.tensor([offset_at(step, config) for step in range(10)]).softmax(-1)
    target = torch.tensor(config.model.offset).softmax(-1)
    assert s[0, 0] > 0.99 and torch.allclose(s[5], (s[0] + target) / 2)
    assert (s.diff(dim=0)[:, -1] - s.diff(dim=0)[0, -1]).abs().max() < 1e-6
    assert offset_at(10, config) is offset_at(10**6, config) is None
    config.model = replace(config.model, router_offset=(0.0, 1.0, 2.0, 3.0))
    assert offset_at(10, config) == config.model.router_offset
    assert offset_at(0, replace(config, ponder_warmup=0)) == config.model.router_offset


def test_training_and_resume(config, llama, capsys):
    """Catches a warm-up that a resumed training begins anew, a checkpoint that is not the model as
    it was then, and a resume that needs the first model again."""
    config = going_on(config, llama)
    whole, results = train(replace(config, name="whole", ponder_warmup=15))
    assert results["fixed"]["loss"] < 2  # of 3.0, the unigram entropy
    half = read_config(checkpoints(whole)[0])
    assert half.router_offset == offset_at(10, replace(config, ponder_warmup=15))
    assert read_config(whole).router_offset is None
    assert read_config(whole).feedback_scale == half.feedback_scale != 1
    parts, _ = train(replace(config, name="parts", ponder_warmup=15))
    shutil.rmtree(checkpoints(parts)[1])
    shutil.rmtree(llama)
    train(parse(["--resume", "--name", "parts"]))
    assert validation_windows("out/whole")[2].count > 0
    assert_same(load(whole), load(parts))
    assert "resumed at step 10" in capsys.readouterr().out


@pytest.mark.parametrize("method", [kind.method for kind in all_methods()])
def test_every_method(config, llama, method):
    """Catches a weight that is left random, or a method that cannot begin from a Llama."""
    config = going_on(config, llama, "--method", method)
    assert config.model.method == method and bool(config.ponder_warmup) == can_warm_up(method)
    model, plain = start_from(llama, config.model), load(llama).state_dict()
    assert all(torch.equal(model.state_dict()[name], plain[name]) for name in plain)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    if method == "vanilla":
        assert fixed_point_loss(model, config) == fixed_point_loss(load(llama), config)


def test_pondering_model_goes_on(config, llama):
    """Catches a pondering model that loses its router, its K or its settings, or is warmed up."""
    first, _ = train(replace(going_on(config, llama, "--ponder-steps", "2"), name="first"))
    second = going_on(config, first)
    assert second.model == read_config(first) and second.model.feedback_scale
    assert with_feedback(second, None) is second
    from_scratch = PonderLM(replace(second.model, feedback_scale=None))
    save(from_scratch, llama.parent / "scratch")
    third = going_on(config, llama.parent / "scratch")
    assert with_feedback(third, None) is third and third.model.feedback_scale is None
    assert second.ponder_warmup == 0 and second.model.ponder_steps == 2
    assert_same(load(first), start_from(first, second.model))
    with pytest.raises(UserError, match="is a ponderlm3 and can only go on as that"):
        start_from(first, going_on(config, first, "--method", "looped").model)
    with pytest.raises(UserError, match="ponder_steps = 1: out/first takes 2, which"):
        start_from(first, replace(second.model, ponder_steps=1))


def test_more_steps(config, llama):
    """Catches a model that forgets what it knew when it may take more steps: a router that uses
    them at once, another offset for the steps that it has, a row that is not the last one's copy;
    and a resume in the middle that is another training."""
    first, _ = train(replace(going_on(config, llama, "--ponder-steps", "2"), name="first"))
    grown = going_on(config, first, "--ponder-steps", "4")
    assert (grown.model.ponder_steps, grown.ponder_from, grown.ponder_warmup) == (4, 2, 6)
    before, model = load(first), start_from(first, grown.model)
    assert grown.model.offset == (*before.config.offset, *2 * before.config.offset[-1:])
    for name, x in before.state_dict().items():
        assert torch.equal(model.state_dict()[name][: len(x)], x), name
    rows = model.router.proj.weight
    assert rows[2:].eq(rows[2]).all() and rows[2].ne(0).any()
    expected = fixed_point_loss(before, config)
    model.set_offset(offset_at(0, grown))
    assert fixed_point_loss(model, config) == pytest.approx(expected, rel=0.01)
    assert model.config.offset[3] - model.config.offset[2] == pytest.approx(-5)
    whole, _ = train(replace(grown, name="whole", ponder_warmup=15))
    parts, _ = train(replace(grown, name="parts", ponder_warmup=15))
    shutil.rmtree(checkpoints(parts)[1])
    shutil.rmtree(first)
    train(parse(["--resume", "--name", "parts"]))
    assert_same(load(whole), load(parts))


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
    trained = load(train(replace(grown, ponder_warmup=0))[0]).state_dict()
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
    assert_same(load(whole), load(parts))


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--hidden-size", "64"], "hidden_size = 64: .* has 32"),
        (["--rope-theta", "5"], "rope_theta = 5.0: .* has 10000.0"),
        (["--embed-scale", "2"], "embed_scale = 2.0: .* has 1.0"),
        (["--block-size", "32"], "block_size = 32: .* windows of 16"),
        (["--ponder-warmup", "-1"], "ponder_warmup"),
        (["--ponder-warmup", "20"], "ponder_warmup = 20: it has to end before"),
        (["--method", "looped", "--ponder-warmup", "5"], "looped has no router"),
        (["--tokenizer", "nowhere"], "nowhere does not exist"),
    ],
)
def test_refused(config, llama, flags, message):
    """Catches a setting that the weights do not follow."""
    with pytest.raises((UserError, ValidationError), match=message):
        train(going_on(config, llama, *flags))
    assert not any(is_model(run) for run in (llama.parent / "out").iterdir() if run.name != "plain")


def test_hugging_face_model(config, monkeypatch, tmp_path, capsys):
    """Catches a Llama with a tokenizer of its own whose texts are cut into other tokens, or that
    cannot go on once its directory is gone."""
    monkeypatch.chdir(tmp_path)
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


def test_without_a_tokenizer(config, monkeypatch, tmp_path):
    """Catches a Llama without tokenizer.json that is trained on tokens it never saw, and a corpus
    of another tokenizer."""
    monkeypatch.chdir(tmp_path)
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


def test_folder_of_ids(config, monkeypatch, tmp_path, capsys):
    """Catches ready ids that need an end of text, or are taken for the model's without a word."""
    monkeypatch.chdir(tmp_path)
    library, _ = make_tokenizer(tmp_path / "llama", "byte-level", model_max_length=5)
    make_llama(tmp_path / "llama", vocab_size=library.get_vocab_size())
    (tmp_path / "ids").mkdir()
    for name in ("train.bin", "val.bin"):
        (np.arange(5000, dtype=np.uint16) % 250).tofile(tmp_path / "ids" / name)
    config = replace(going_on(config, "llama"), data="ids")
    assert open_corpus(config)[1].end_of_text is None
    assert (
        "ids has no tokenizer.json; its ids are taken for those of llama" in capsys.readouterr().out
    )


def test_underscores(llama):
    """Catches a spelling that the command line takes and the defaults do not see."""
    flags = ["--preset", "tiny", "--init_from", str(llama)]
    assert parse(flags).model.hidden_size == 32
