"""python -m lab train: any method by the root's loop; a trained model goes on, or learns to ponder."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from foreign import make_llama, make_tokenizer
from lab_helpers import same_weights, small_model

import train as root
from attention import BACKENDS
from checkpoint import load as root_load
from checkpoint import save as root_save
from common import UserError
from data import Windows, pick_tokenizer
from lab.engine.batching import Engine
from lab.engine.simple import generate
from lab.interop.warm_start import follows, start_from
from lab.interop.weights import as_core_model, is_model, load, read_config, save
from lab.methods import all_methods, build, configure
from lab.train import LabConfig, open_text, parse, read_run, train
from train import evaluate


def of_lab(config, **changes):
    return replace(LabConfig(**asdict(config)), **changes)


def as_others(config, shape, name, **changes):
    """Train a model without pondering, and save it as transformers would. -> the directory"""
    shape = configure(shape, "vanilla", **changes)
    run, _ = train(of_lab(config, name="plain"), shape)
    save(load(run), place := Path(config.out).parent / name)
    shutil.copy(run / "tokenizer.json", place)
    return place


@pytest.fixture
def llama(config, shape):
    """A small Llama that is trained, in a directory as transformers writes it."""
    tied = dict(embed_scale=1.0, tie_word_embeddings=True)
    return as_others(replace(config, steps=60), shape, "llama", **tied)


def going_on(config, place, *flags):
    """Settings of a training of 20 steps from the model in `place`, as the command line makes them."""
    flags = ["--data", config.data, "--steps", "20", "--eval-every", "10", "--eval-windows", "8", *flags]
    flags += ["--device", "cpu", "--precision", "float32"]
    return parse(["--preset", "tiny", "--init-from", str(place), *flags])


def corpus_of(config, shape):
    tokenizer = pick_tokenizer(config.preset, config.data, config.tokenizer)
    return open_text(config, config.data, tokenizer, shape.vocab_size)


def fixed_point_loss(model, config):
    val = corpus_of(config, model.config).val
    return evaluate(model, Windows(val, 16, 0), 16)["loss"]


# -- Settings --------------------------------------------------------------------------------------


def test_no_second_loop(config, shape):
    """Catches a training that is another one than that of train.py, or a run of it that sample.py refuses."""
    ours, _ = train(of_lab(config, name="ours", steps=4), shape)
    theirs, _ = root.train(replace(config, name="theirs", steps=4), shape, build)
    assert same_weights(load(ours), load(theirs)) and same_weights(load(ours), root_load(ours))


def test_resume_of_a_method(config, shape):
    """Catches a resumed training that forgets its method, and a change that is not named."""
    shape = configure(shape, "ponderlm1", accumulate=False)
    train(of_lab(config, name="x", steps=2), shape)
    run, _ = train(*parse(["--resume", "--name", "x", "--attention", "eager", "--steps", "3"]))
    found, settings, _ = read_run(run)
    assert (found.attention, settings) == ("eager", shape) and load(run).config == shape
    with pytest.raises(UserError, match=r"--method ouro \(was ponderlm1\); --accumulate True \(was False\)"):
        parse(["--resume", "--name", "x", "--method", "ouro", "--accumulate"])


def test_runs_of_the_root(config):
    """Catches a run of train.py that cannot be read here, or goes on with settings that it lacks."""
    _, shape = root.parse(["--preset", "tiny"])
    run, _ = root.train(replace(config, name="plain", steps=2), replace(shape, num_hidden_layers=1))
    found, settings, corpus = read_run(run)
    assert type(found) is root.TrainConfig and settings.method == "ponderlm3"
    assert corpus["tokenizer"] and load(run).config == settings
    with pytest.raises(UserError, match=r"python train\.py --resume"):
        parse(["--resume"])
    (run / "train.json").write_text('{"config": 2.5}')
    with pytest.raises(UserError, match=r"train\.json cannot be read"):
        read_run(run)


def test_help(capsys):
    """Catches defaults of another preset or method than the chosen ones, and numbers that stay strings."""
    with pytest.raises(SystemExit):
        parse(["--preset", "70m", "--method", "ouro", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "(default: 28610)" in text and "(default: ouro)" in text and "--exit-entropy" in text
    flags = ["--backbone", "gpt_neox", "--head-dim", "None", "--backbone-options", "rotary_pct", "0.25"]
    _, shape = parse(["--preset", "tiny", *flags])
    assert build(shape).config.backbone_options == {"rotary_pct": 0.25}
    with pytest.raises(UserError, match="rotary_pct"):
        parse(["--preset", "tiny", *flags[:-1], "2"])


@pytest.mark.parametrize("name", ["eager", "exact"])
@pytest.mark.parametrize("method", ["ponderlm3", "ponderlm2", "looped", "ouro", "pause", "mor-expert"])
def test_attention(name, method, config, shape, monkeypatch):
    """Catches a form of attention that is asked for and not entered, or another one that is."""
    called = []
    for each, form in list(BACKENDS.items()):
        counted = lambda *x, each=each, form=form: called.append(each) or form(*x)  # noqa: E731
        monkeypatch.setitem(BACKENDS, each, counted)
    train(of_lab(config, name="x", steps=1, attention=name), configure(shape, method))
    assert {*called} == {name}


# -- From a trained model --------------------------------------------------------------------------


@pytest.mark.parametrize("method, tolerance", [("grid", 1e-6), ("ponderlm3", 1e-2)])
def test_step_0_is_the_llama(config, llama, method, tolerance):
    """Catches a start that is not the Llama's: the loss, relative, wherever the router starts."""
    config, shape = going_on(config, llama, "--method", method)
    assert parse(["--preset", "tiny", "--init_from", str(llama)])[1].hidden_size == 32
    assert shape.reread and shape.block_size == 16 and config.learning_rate == 2e-3
    plain = fixed_point_loss(load(llama), config)
    assert plain < 0.5  # it has learned its text, so that there is something to spoil
    for offset in (None, (0.0,) * 4):
        model = start_from(llama, replace(shape, router_offset=offset)).eval()
        assert fixed_point_loss(model, config) == pytest.approx(plain, rel=tolerance)
    model.feedback.weight.data.fill_(1)
    assert fixed_point_loss(model, config) > 1.1 * plain


def test_step_0_is_the_plain_model(config, llama):
    """Catches a plain model of another method than vanilla that is spoilt when it learns to ponder, or that
    cannot become a model of another method."""
    config, shape = going_on(config, llama, "--ponder-steps", "0")
    plain, _ = train(replace(config, name="without-steps"), replace(shape, reread=False))
    assert read_config(plain).method == "ponderlm3" and read_config(plain).ponder_steps == 0
    loss = fixed_point_loss(load(plain), config)
    for method, tolerance in (("ponderlm3", 1e-2), ("grid", 1e-6)):
        _, shape = going_on(config, plain, "--method", method, "--ponder-steps", "2")
        assert shape.reread
        assert fixed_point_loss(start_from(plain, shape).eval(), config) == pytest.approx(loss, rel=tolerance)


def test_from_a_gpt_neox(config, shape):
    """Catches a Pythia that cannot learn to ponder: trained as one, read back, continued, decoded."""
    neox = dict(head_dim=None, backbone="gpt_neox", backbone_options={"rotary_pct": 0.25})
    pythia = as_others(config, shape, "pythia", **neox)
    taught, results = train(*going_on(config, pythia, "--name", "taught"))
    model = load(taught)
    assert (model.config.method, model.config.backbone) == ("ponderlm3", "gpt_neox")
    assert model.config.backbone_options["rotary_pct"] == 0.25 and results["fixed"]["loss"] < 2.5
    prompt = [list(b"the quick")]
    assert Engine(model, 1).generate(prompt, 8, seed=0) == generate(model, prompt, 8, seed=0)


@pytest.mark.parametrize("rate", [1e-9, 1.0])
def test_rate_of_g(config, llama, rate):
    """Catches a g that learns as slowly, or as fast, as old weights, decays, or is not saved."""
    flags = ["--steps", "1", "--learning-rate", str(rate), "--warmup", "0", "--name", "g"]
    config, shape = going_on(config, llama, *flags)
    run, _ = train(config, shape)
    after, before = load(run).state_dict(), start_from(llama, shape).state_dict()
    assert after["feedback.weight"].abs().max().item() == pytest.approx(3e-3, rel=0.01)
    moved = max((after[k] - x).abs().max().item() for k, x in before.items() if k.startswith("model."))
    assert moved < 1e-8 if rate < 1 else moved > 0.5


@pytest.mark.parametrize("at", [3, 13])
def test_killed(config, llama, monkeypatch, at):
    """Catches a run that goes on otherwise: before its first checkpoint from random weights in place of the
    first model's, behind it with that one's once more."""
    (config, shape), usual = going_on(config, llama), root.learning_rate
    whole, results = train(replace(config, name="whole"), shape)
    assert results["fixed"]["loss"] < 2  # of 3.0, the unigram entropy
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(root, "learning_rate", lambda step, config: usual(step, config) / (step != at))
        train(replace(config, name="parts"), shape)
    resumed = parse(["--resume", "--name", "parts"])
    shutil.move(llama, "elsewhere")
    if at == 3:
        with pytest.raises(UserError, match="llama does not exist"):
            train(*resumed)
        shutil.move("elsewhere", llama)
    parts, _ = train(*resumed)
    assert same_weights(load(whole), load(parts))


WEIGHTS_OF_A_STEP = {"ablation-router", "mor-token", "mor-expert"}


@pytest.mark.parametrize("method", [kind.method for kind in all_methods()])
def test_every_method(config, llama, method):
    """Catches a method that cannot begin from a Llama, or take more steps; a weight that is left random."""
    settings, shape = going_on(config, llama, "--method", method)
    assert shape.method == method and shape.reread == follows(method, "reread")
    model, plain = start_from(llama, shape), load(llama).state_dict()
    assert all(torch.equal(model.state_dict()[name], plain[name]) for name in plain)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    if method == "vanilla":
        return
    K, first = model.config.ponder_steps, llama.parent / "first"
    for x in model.parameters():
        torch.nn.init.normal_(x.data, std=0.02)
    root_save(as_core_model(model), first)
    shutil.copy(llama / "tokenizer.json", first)
    settings, shape = going_on(config, first, "--ponder-steps", str(K + 1), "--name", "grown", "--steps", "2")
    if method in WEIGHTS_OF_A_STEP:
        with pytest.raises(UserError, match=f"so use --ponder-steps {K}"):
            train(settings, shape)
        assert not (llama.parent / "out/grown").exists()
        return
    before, begun = model.state_dict(), start_from(first, shape).state_dict()
    assert all(torch.equal(begun[k][: len(x)], x) for k, x in before.items())
    trained = load(train(settings, shape)[0]).state_dict()
    assert all(not torch.equal(trained[k], x) for k, x in begun.items()), method


def test_pondering_model_goes_on(config, llama, tmp_path):
    """Catches a model that loses its router, K or settings; a further row that is not the last one's copy."""
    first, _ = train(*going_on(config, llama, "--ponder-steps", "2", "--name", "first"))
    _, shape = going_on(config, first)
    assert shape == read_config(first) and shape.reread and shape.ponder_steps == 2
    assert not going_on(config, llama, "--ponder-steps", "0")[1].reread  # there is nothing to feed back
    save(build(replace(shape, reread=False)), tmp_path / "scratch")
    assert not going_on(config, tmp_path / "scratch")[1].reread
    assert same_weights(load(first), start_from(first, shape))
    with pytest.raises(UserError, match="--method ponderlm3"):
        start_from(first, going_on(config, first, "--method", "looped")[1])
    with pytest.raises(UserError, match=r"--ponder-steps 1 .* use 2 or more"):
        start_from(first, replace(shape, ponder_steps=1))
    config, shape = going_on(config, first, "--ponder-steps", "4")
    before, rows = read_config(first).offset, start_from(first, shape).router.proj.weight
    assert shape.offset == (*before, *2 * before[-1:])
    assert rows[2:].eq(rows[2]).all() and rows[2].ne(0).any()
    assert load(train(config, shape)[0]).config == shape


@pytest.mark.parametrize("kind", all_methods(), ids=lambda kind: kind.method)
def test_price_of_a_preset(kind):
    """Catches one that a method without a price would have, or that one with it would lose."""
    flags = ["--preset", "small", "--method", kind.method]
    assert parse(flags)[0].step_price == (root.preset_settings("small")[0].step_price if kind.priced else 0)
    with nullcontext() if kind.priced else pytest.raises(UserError, match=r"--step-price 0\.2 .*: omit"):
        parse([*flags, "--step-price", "0.2"])


@pytest.mark.parametrize("kind", all_methods(), ids=lambda kind: kind.method)
def test_flags_without_effect(kind):
    """Catches a flag that is taken although the method does not use it, also one that repeats the default;
    and one that is refused although the method uses it."""
    router = getattr(small_model(method=kind.method), "router", None)
    learns_router = kind.has_router and any(p.requires_grad for p in router.parameters())
    for flag, value, is_used in (
        (["--refinements"], ["1", "1"], kind.iterates and kind.method != "vanilla"),
        (["--router-rate"], ["2"], learns_router),
        (["--price-from"], ["0.5"], kind.priced),
        (["--tau"], ["0.1"], kind.has_router),
    ):
        (name,) = flag
        wrong = nullcontext() if is_used else pytest.raises(UserError, match=f"^{name} .* omit {name}$")
        with wrong:
            parse(["--preset", "tiny", "--method", kind.method, *flag, *value])
    parse(["--preset", "tiny", "--method", kind.method, "--router-rate", "3"])  # the default


@pytest.mark.parametrize("flags", [["--vocab-size", "300"], ["--ponder-steps", "0", "--step-price", "0.1"]])
def test_flags_without_effect_at_the_root(flags):
    """Catches a flag that train.py refuses, and the lab takes without using it."""
    with pytest.raises(UserError, match=flags[-2]):
        parse(["--preset", "tiny", *flags])


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--hidden-size", "64"], "--hidden-size 64 .* omit --hidden-size"),
        (["--embed-scale", "2"], "--embed-scale 2.0 .* omit --embed-scale"),
        (["--ponder-steps", "0", "--step-price", "0.1"], "--step-price 0.1 has no effect"),
        (["--block-size", "32"], "--block-size 32 .* or less"),
        (["--method", "looped", "--reread"], "reread"),
        (["--method", "grid", "--attention", "sdpa"], "attention"),
        (["--tokenizer", "nowhere"], "nowhere"),
    ],
)
def test_refused(config, llama, flags, message):
    """Catches a setting that the weights, or the method, do not follow, or that is refused late."""
    opened = train if "--tokenizer" in flags else lambda *_: None
    with pytest.raises(UserError, match=message):
        opened(*going_on(config, llama, *flags))
    assert not any(is_model(run) for run in (llama.parent / "out").iterdir() if run.name != "plain")


# -- The tokenizer of a trained model --------------------------------------------------------------


def test_hugging_face_model(config, tmp_path):
    """Catches texts cut into other tokens than the Llama's, and a run that needs its directory again."""
    library, tokenizer = make_tokenizer(tmp_path / "llama", "llama 3")
    make_llama(tmp_path / "llama", vocab_size=library.get_vocab_size() + 20)  # a padded table
    config, shape = going_on(config, "llama", "--block-size", "8", "--steps", "2", "--name", "mine")
    run, _ = train(config, shape)
    saved = json.loads((run / "tokenizer.json").read_text())
    assert saved["name"] == "huggingface" and saved["end"] == "</s>"
    corpus = corpus_of(config, shape)
    assert corpus.tokenizer.digest == tokenizer.digest
    assert corpus.train[0:1].tolist() == tokenizer.begin
    shutil.rmtree(tmp_path / "llama")
    train(*parse(["--resume", "--name", "mine", "--steps", "4"]))
    assert load(run).config == shape


def test_without_a_tokenizer(config, tmp_path, capsys):
    """Catches a Llama trained on tokens it never saw, a corpus of another tokenizer, ids taken silently."""
    make_llama(tmp_path / "llama", vocab_size=300)
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        train(*going_on(config, "llama"))
    with pytest.raises(UserError, match=r"add its tokenizer\.json to llama$"):  # it has none to go back to
        config, shape = going_on(config, "llama", "--tokenizer", "bytes")
        corpus_of(config, replace(shape, vocab_size=100))
    with pytest.raises(UserError, match=r"--tokenizer bpe .* use --tokenizer bytes"):
        corpus_of(replace(config, tokenizer="bpe"), replace(shape, vocab_size=257))
    for name in ("byte", "llama"):
        with pytest.raises(UserError, match=f"^--tokenizer {name} .* bytes, bpe, gpt2"):
            corpus_of(replace(config, tokenizer=name), shape)
    assert corpus_of(*going_on(config, "llama", "--tokenizer", "bytes")).tokenizer.name == "bytes"
    make_tokenizer(tmp_path / "llama", "byte-level")
    corpus_of(*going_on(config, "llama"))
    (folder,) = (path for path in Path("data").glob("[!.]*") if "bytes" not in path.name)
    make_tokenizer(tmp_path / "llama", "llama 2")
    config, shape = going_on(config, "llama")
    with pytest.raises(UserError, match="corpus prepare TEXT --to FOLDER --tokenizer llama"):
        corpus_of(replace(config, data=str(folder)), shape)
    make_tokenizer(tmp_path / "llama", "byte-level")
    (folder / "tokenizer.json").unlink()
    corpus_of(replace(config, data=str(folder)), shape)
    assert "its ids are assumed to be those of llama" in capsys.readouterr().out
    with pytest.raises(UserError, match="omit --tokenizer"):
        corpus_of(replace(config, tokenizer="bytes"), replace(shape, vocab_size=100))
