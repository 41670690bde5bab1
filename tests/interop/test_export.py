"""Models that ponder, in transformers: the directory that interop.export writes."""

import ast
import json
import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from lab_helpers import LLAMA3, NEOX, decode, same_weights, save_for_bytes, small_model
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from common import UserError
from lab.engine.simple import generate
from lab.engine.states import stopped_states
from lab.interop.__main__ import convert
from lab.interop.export import export, modelling_file
from lab.interop.weights import INCLUDED, load
from lab.methods import all_methods
from tokenizer import Tokenizer

METHODS = [kind.method for kind in all_methods() if kind.method != "vanilla"]
GREEDY = dict(do_sample=False, eos_token_id=None, return_dict_in_generate=True)
NEOX = NEOX | dict(backbone_options={"rotary_pct": 0.5})


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Where transformers puts modelling files, and what it says."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.syspath_prepend(str(tmp_path / "hf"))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def ponders(method="ponderlm3", **kwargs):
    return small_model(method=method, **{"router_scale": 12.0} | kwargs).float()


def from_pretrained(directory, **kwargs):
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, **kwargs)


def exported(model, directory, tau=0.1):
    export(model, directory, tau, end=30)
    return from_pretrained(directory)


def padded(rows, side):
    """Rows of ids -> input_ids and attention_mask, as a tokenizer pads them."""
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    pad = partial(pad_sequence, batch_first=True, padding_side=side)
    return dict(input_ids=pad(ids), attention_mask=pad([torch.ones_like(row) for row in ids]))


def prompts(*lengths):
    g = torch.Generator().manual_seed(1)
    return [torch.randint(30, (n,), generator=g).tolist() for n in lengths]


def scores(model, row, tau):
    """Logits (T, V) and steps of one row by the project itself."""
    h, s, steps = stopped_states(model, torch.tensor([row]), tau)
    return model.lm_head(model.integrate(h, s, steps))[0], steps[0]


def check_equal(model, theirs, tau=0.1, sides=("left", "right")):
    """Scores and greedy texts, with padding; one text outgrows the window. -> steps of the texts"""
    rows = prompts(3, 9, 28)
    expected = generate(model, rows, 8, tau=tau, temperature=0)
    for side in sides:
        batch = padded(rows, side)
        with torch.no_grad():
            out = theirs(**batch)
            for i, row in enumerate(rows):
                real = batch["attention_mask"][i].bool()
                logits, steps = scores(model, row, tau)
                torch.testing.assert_close(out.logits[i, real], logits, atol=1e-5, rtol=0)
                assert out.steps[i, real].equal(steps) and not out.logits[i, ~real].any()
        found = theirs.generate(**batch, max_new_tokens=8, **GREEDY)
        for i, sample in enumerate(expected):
            assert found.sequences[i, 28:].tolist() == sample.tokens
            assert found.past_key_values.steps[i][-8:] == sample.steps
    return {step for sample in expected for step in sample.steps}


@pytest.mark.parametrize("method", METHODS)
def test_every_method(tmp_path, method):
    """Catches code that the file lacks, a tensor that transformers does not know or loses, and any difference
    to the project: logits to 1e-5, ids, steps."""
    model = ponders(method)
    export(model, tmp_path / "a", 0.1, end=30)
    theirs, report = from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(report.values()), report
    theirs.save_pretrained(tmp_path / "again")
    assert same_weights(load(tmp_path / "again"), model)
    steps = check_equal(model, theirs, sides=("left",))
    assert len(steps) > 2 or method != "ponderlm3"
    tree = ast.parse((tmp_path / "a/modeling_ponderlm.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or node.names[0].name for node in imports]
    packages = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert packages == {"torch", "transformers"}  # it runs where the project is not
    for run in (theirs, theirs.generate):
        with pytest.raises(ValueError, match="tau = 2"):
            run(**padded(prompts(3), "left"), tau=2)


@pytest.mark.parametrize(
    "kwargs",
    [
        NEOX,
        NEOX | dict(method="ponderlm2", backbone_options={"parallel_residual": 0.0}),
        dict(tie_word_embeddings=True, reread=True),
        dict(backbone="llama3", backbone_options=LLAMA3, router_offset=(1.0, 0.0, 0.5, 0.2)),
        NEOX | dict(ponder_steps=5, reread=True),
        dict(ponder_steps=1),
        None,  # the included model
    ],
    ids=str,
)
def test_every_setting(tmp_path, kwargs):
    """Catches a setting or backbone that the file forgets, and a head that is not tied; both paddings."""
    model = ponders(**kwargs) if kwargs else load(INCLUDED)
    theirs = exported(model, tmp_path / "a")
    check_equal(model, theirs)
    again = load(tmp_path / "a")  # by the project itself
    assert again.config == model.config
    theirs.save_pretrained(tmp_path / "b")
    assert load(tmp_path / "b").config == model.config
    check_equal(load(tmp_path / "b"), from_pretrained(tmp_path / "b"), sides=("left",))


def test_tau(tmp_path):
    """Catches a tau that is not read from the generation config, or not followed."""
    model = ponders(seed=2)
    theirs, row = exported(model, tmp_path), prompts(10)
    batch, length = padded(row, "left"), dict(max_new_tokens=6, do_sample=False)
    expected = {tau: generate(model, row, 6, tau=tau, temperature=0)[0].steps for tau in (0, 0.1, 0.9)}
    assert len({*map(tuple, expected.values())}) == 3
    for tau, how in (
        *((0.1, length), (0, length | dict(tau=0))),
        (0.9, dict(generation_config=GenerationConfig(tau=0.9, **length))),
    ):
        out = theirs.generate(**batch, **how, return_dict_in_generate=True, eos_token_id=None)
        assert out.past_key_values.steps[0][-6:] == expected[tau]
    theirs.generation_config.tau = 0.9
    with torch.no_grad():
        assert theirs(batch["input_ids"]).steps[0].equal(scores(model, row[0], 0.9)[1])
        assert theirs(batch["input_ids"], tau=0).steps[0].tolist() == [3] * 10


@pytest.mark.parametrize("begin", [None, 1])
def test_beyond_the_window(tmp_path, begin):
    """Catches a sliding window that loses a text's first token, and steps that are counted twice."""
    model = ponders()
    export(model, tmp_path, 0.1, begin=begin, end=30)
    rows = [([] if begin is None else [begin]) + row for row in prompts(3, 20, 40)]
    window, longest = model.config.block_size, len(rows[-1])
    assert 40 > window > 21
    found = from_pretrained(tmp_path).generate(**padded(rows, "left"), max_new_tokens=16, **GREEDY)
    expected = generate(model, rows, 16, tau=0.1, temperature=0, begin=rows[0][: longest - 40])
    assert [row[longest:].tolist() for row in found.sequences] == [sample.tokens for sample in expected]
    steps = found.past_key_values.steps
    assert [row[-16:] for row in steps] == [sample.steps for sample in expected]
    assert [len(row) for row in steps] == [len(rows[0]) + 15, len(rows[1]) + 15, window // 2 + 15]


@pytest.mark.parametrize("how", ["config", "keyword", "list"])
def test_rows_that_end(tmp_path, how):
    """Catches steps of padding behind an end, an end in the prompt, and a row that goes on otherwise."""
    model, rows = ponders(), prompts(3, 9, 28)
    end = generate(model, rows, 8, tau=0.1, temperature=0)[1].tokens[2]
    rows[0][1] = end  # no end: it is given
    expected = generate(model, rows, 8, tau=0.1, temperature=0, ends=[end])
    assert len({len(sample.tokens) for sample in expected}) > 1
    export(model, tmp_path, 0.1, end=end if how == "config" else 30)
    flags = {"config": {}, "keyword": {"eos_token_id": end}, "list": {"eos_token_id": [end, 30]}}[how]
    flags |= dict(do_sample=False, return_dict_in_generate=True, max_new_tokens=8)
    theirs = from_pretrained(tmp_path)
    out = theirs.generate(**padded(rows, "left"), **flags)
    steps = out.past_key_values.steps
    for row, ids, sample, found in zip(rows, out.sequences, expected, steps, strict=True):
        n = len(sample.tokens)
        assert ids[28 : 28 + n].tolist() == sample.tokens
        assert len(found) == len(row) - 1 + n and found[len(row) - 1 :] == sample.steps
    texts = [row + sample.tokens for row, sample in zip(rows, expected, strict=True)]
    more = theirs.generate(**padded(texts, "left"), past_key_values=out.past_key_values, **flags)
    (one,) = generate(model, texts[1:2], 8, tau=0.1, temperature=0, ends=[end])
    assert more.past_key_values.steps[1][len(texts[1]) - 1 :] == one.steps


def test_going_on_from_a_cache(tmp_path):
    """Catches a text that goes on from another one's cache, a tau passed over, logits of nothing."""
    model = ponders()
    theirs, (row,) = exported(model, tmp_path), prompts(10)

    def go_on(text, **kwargs):
        return theirs.generate(**padded([text], "left"), max_new_tokens=4, **GREEDY, **kwargs)

    (expected,) = generate(model, [row], 8, tau=0.1, temperature=0)
    first = go_on(row)
    text, cache = first.sequences[0].tolist(), first.past_key_values
    assert go_on(text, past_key_values=cache).sequences[0, 10:].tolist() == expected.tokens
    assert cache.steps[0][-8:] == expected.steps
    for other in (text[-1:], text[1:] * 2):
        with pytest.raises(ValueError, match="the cache is of another text: give it whole"):
            go_on(other, past_key_values=cache)
    first = go_on(row)
    assert go_on(text, past_key_values=first.past_key_values, tau=0)
    assert first.past_key_values.steps[0][-4:] == [3] * 4 != expected.steps[-4:]
    with pytest.raises(ValueError, match="a text has no token"):
        theirs.generate(**padded([row, []], "left"), max_new_tokens=2)


@pytest.mark.parametrize("side", ["left", "right"])
def test_loss(tmp_path, side):
    """Catches labels shifted twice, padding that is scored, another order of outputs, an idle training."""
    model, rows = ponders(), prompts(3, 9, 28)
    theirs, batch = exported(model, tmp_path), padded(rows, side)
    with torch.no_grad():
        log_p = [scores(model, row, 0.1)[0].log_softmax(-1) for row in rows]
    alone = [x[range(len(row) - 1), row[1:]] for x, row in zip(log_p, rows, strict=True)]
    ids = batch["input_ids"]
    for labels in (ids, ids.masked_fill(batch["attention_mask"] == 0, -100)):
        out = theirs(**batch, labels=labels)
        torch.testing.assert_close(out.loss, -torch.cat(alone).mean(), atol=1e-5, rtol=0)
        assert torch.equal(theirs(**batch, labels=labels, return_dict=False)[0], out.loss)
    assert torch.equal(theirs(**batch, return_dict=False)[0], out.logits)
    cache = theirs.generate(**batch, max_new_tokens=1, **GREEDY).past_key_values
    for name, more in (
        *(("labels", dict(past_key_values=cache, labels=ids)), ("position_ids", dict(position_ids=ids))),
        ("output_hidden_states", dict(output_hidden_states=True)),
    ):
        with pytest.raises(ValueError, match=name):
            theirs(**batch, **more)
    with pytest.raises(RuntimeError, match="train"):
        theirs.train()(ids, labels=ids)


def test_beams_and_sampling(tmp_path):
    """Catches a cache that beams share, rows that sampling mixes up."""
    model = ponders()
    theirs, batch = exported(model, tmp_path), padded(prompts(12, 12), "left")
    how = dict(max_new_tokens=5, num_beams=3, num_return_sequences=3, output_scores=True)
    beams = theirs.generate(**batch, **how, **GREEDY)
    for text, score in zip(beams.sequences, beams.sequences_scores, strict=True):
        with torch.no_grad():
            log_p = scores(model, text.tolist(), 0.1)[0].log_softmax(-1)[11:-1]
        chosen = log_p.gather(1, text[12:, None]).sum()
        torch.testing.assert_close(score * 5, chosen, atol=1e-4, rtol=0)
    out = theirs.generate(**batch, max_new_tokens=5, do_sample=True, num_return_sequences=2)
    assert out.shape[0] == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["ponderlm3", "mor-expert", "mor-token"])
def test_half(tmp_path, method, dtype):
    """Catches a part that needs float32, and an iteration that waits for more than the type can tell."""
    exported(ponders(method), tmp_path)
    batch, passes = padded(prompts(5, 30), "left"), []
    for kind in (torch.float32, dtype):
        model, seen = from_pretrained(tmp_path, dtype=kind), []
        model.model.norm.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        assert model(**batch).logits.isfinite().all()
        passes.append(len(seen))
    assert passes[1] <= passes[0] < 40
    out = model(**batch, labels=batch["input_ids"])
    assert out.logits.dtype == dtype and math.isfinite(out.loss)
    assert model.generate(**batch, max_new_tokens=4, eos_token_id=None).shape == (2, 34)


@pytest.mark.parametrize("method", ["ponderlm3", "looped"])
def test_lm_evaluation_harness(tmp_path, method, monkeypatch):
    """Catches answers that are not those of decoding at tau: log-likelihoods to 1e-4, texts exactly."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # runs pip
    model, tokenizer = ponders(method, vocab_size=257, block_size=40), Tokenizer.named("bytes")
    run = save_for_bytes(model, tmp_path / "run")
    tau = 0.3 if model.has_router else None  # without a router, convert refuses one
    convert(str(run), tmp_path / "out", transformers=True, tau=tau)
    documents = [{"name": name, "animal": animal} for name, animal in (("fox", "hen"), ("ox", "a"))]
    (tmp_path / "documents.json").write_text("\n".join(map(json.dumps, documents)))
    files = {"data_files": {"test": str(tmp_path / "documents.json")}, "cache_dir": str(tmp_path / "cache")}
    task = dict(dataset_path="json", dataset_kwargs=files, test_split="test")
    task |= dict(doc_to_text="the {{name}} has a", doc_to_target=" {{animal}}")
    stop = dict(until=["."], max_gen_toks=5)
    tasks = [
        task | dict(task="cloze", output_type="loglikelihood", metric_list=[{"metric": "acc"}]),
        task | dict(task="finish", output_type="generate_until", generation_kwargs=stop),
    ]
    lm = HFLM(str(tmp_path / "out"), trust_remote_code=True, device="cpu", dtype="float32")
    manager = TaskManager(include_defaults=False)  # of thousands
    found = simple_evaluate(lm, tasks=tasks, task_manager=manager, bootstrap_iters=0)["samples"]
    for document, cloze, finish in zip(documents, found["cloze"], found["finish"], strict=True):
        asked = tokenizer.encode(f"the {document['name']} has a")
        answer = tokenizer.encode(f" {document['animal']}")
        log_p = decode(model, asked + answer[:-1], 0.3)[0].log_softmax(-1)[-len(answer) :]
        expected = sum(row[token] for row, token in zip(log_p, answer, strict=True))
        assert cloze["resps"][0][0][0] == pytest.approx(float(expected), abs=1e-4)
        (text,) = generate(model, [asked], 5, tau=0.3, temperature=0)
        text = tokenizer.decode(text.tokens).decode("utf-8", "replace").split(".")[0]
        assert finish["resps"][0][0] == text


# -- The command -----------------------------------------------------------------------------------


def test_command(tmp_path):
    """Catches a tau that is lost, a directory overwritten, flags that are ignored, infinity in float16."""
    to, run = tmp_path / "to", save_for_bytes(small_model(vocab_size=257), tmp_path / "run")
    large = load(run)
    large.lm_head.weight.data[0, 0] = 1e5
    save_for_bytes(large, tmp_path / "large")

    def written(source, name, file="generation_config.json", **flags):
        convert(str(source), to=tmp_path / name, transformers=True, **flags)
        return json.loads((tmp_path / name / file).read_text())

    config = written(run, "exported", tau=0.1)
    assert config["tau"] == 0.1 and config["eos_token_id"] == config["pad_token_id"] == 256
    assert written(tmp_path / "exported", "again")["tau"] == 0.1
    (run / "train.json").write_text('{"config": {"tau": 0.25}}')
    assert written(run, "scored")["tau"] == 0.25
    assert written(run, "half", "config.json", half=True)["dtype"] == "float16"
    for source, flags, words in (
        (run, dict(to=tmp_path / "exported", transformers=True), "exported already exists"),
        *((run, dict(half=True), "--half"), (run, dict(transformers=True), "--transformers")),
        *((run, dict(tau=0.5, to=to), "--tau"), (tmp_path / "large", dict(to=to, half=True), "float16")),
    ):
        with pytest.raises(UserError, match=words):
            convert(str(source), **flags)
    assert not to.exists()


@pytest.mark.parametrize("for_transformers", [True, False])
def test_llama_for_others(tmp_path, for_transformers):
    """Catches a Llama that others refuse: a tokenizer in our form, or without a beginning of texts."""
    run = save_for_bytes(small_model(vocab_size=257, ponder_steps=0), tmp_path / "run")
    convert(str(run), to=tmp_path / "llama", transformers=for_transformers)
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    assert llama.generation_config.eos_token_id == llama.config.eos_token_id == 256
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "llama")
    assert tokenizer.encode("ab") == [97, 98]
    assert tokenizer.bos_token == tokenizer.eos_token == "<|endoftext|>"


@pytest.mark.parametrize("tau", [2.0, -1.0, float("nan")])
def test_a_tau_that_is_none(tau):
    """Catches an exported model that fails in every `generate`, since nobody checked its tau."""
    with pytest.raises(UserError, match=rf"--tau {tau} must lie between 0 and 1"):
        convert("nowhere", Path("new"), transformers=True, tau=tau)


def test_two_definitions_of_one_name(monkeypatch):
    """Catches a modelling file in which the first of two different things of one name stands for both."""
    config = small_model(method="grid").config
    assert modelling_file(config).count("def augment(") == 1
    monkeypatch.setattr("lab.interop.export.INTERCHANGEABLE", set())
    with pytest.raises(RuntimeError, match="both define augment"):
        modelling_file(config)
