"""The benchmarks: answers against the simple decoder and the harness's own model, tasks offline."""

import json
import random
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import small_model
from foreign import byte_level
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from baselines import all_methods
from baselines.cost import cost
from corpus.tokenizers import Tokenizer, load_tokenizer
from evaluation import benchmarks
from evaluation.__main__ import Options, main
from evaluation.benchmarks import COLUMNS, PRINTED
from evaluation.harness import harness_lm
from interop import load, save
from runtime import UserError, command_line
from sample import generate

METHODS = [kind.method for kind in all_methods() if not kind.method.startswith("ablation")]
ANIMALS = dict(Ada="cat", Ben="dog", Cleo="hen", Dan="owl", Eve="fox", Finn="cow", Gus="ant")
WRONG = ("bat", "elk")  # nobody has them

QUIZ = """
task: quiz
output_type: multiple_choice
doc_to_text: "{{name}} has a"
doc_to_choice: "{{choices}}"
doc_to_target: "{{choices.index(animal)}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
CLOZE = """
task: cloze
output_type: loglikelihood
doc_to_text: "{{name}} has a"
doc_to_target: " {{animal}}"
metric_list: [{metric: acc}, {metric: perplexity}]
"""
FINISH = """
task: finish
output_type: generate_until
doc_to_text: "{{name}} has a"
doc_to_target: " {{animal}}"
generation_kwargs: {until: ["."], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
"""
WHOLE = """
task: whole
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{name}} has a {{animal}}. {{name}} has a {{animal}}. That is all."
metric_list: [{metric: bits_per_byte}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with tasks of every kind, whose documents are in a file beside them."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = [
        {"name": name, "animal": animal, "choices": (WRONG[0], animal, WRONG[1])}
        for name, animal in ANIMALS.items()
    ]
    (folder / "documents.json").write_text("\n".join(map(json.dumps, documents)))
    for text in (QUIZ, CLOZE, FINISH, WHOLE):
        name = text.split()[1]
        where = {"test": str(folder / "documents.json")}
        data = {"data_files": where, "cache_dir": str(folder / "cache")}
        text += f"dataset_path: json\ndataset_kwargs: {json.dumps(data)}\n"
        text += "test_split: test\nfewshot_split: test\n"
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def without_environment(monkeypatch):
    """Without the harness's account of the machine, for which it runs pip for half a second."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture
def quick(monkeypatch):
    """Without the harness's own 14,000 tasks, which take 12 s to find."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a model."""
    folder = tmp_path_factory.mktemp("models") / "run"
    save(small_model(seed=2, vocab_size=257, router_scale=12.0).float(), folder)
    Tokenizer.bytes().save(folder / "tokenizer.json")
    return folder


def requests(*pairs):
    return [SimpleNamespace(args=pair) for pair in pairs]


@pytest.fixture
def byte_model(method_model):
    def make(method="ponderlm3", **kwargs):
        model = method_model(method, vocab_size=257, block_size=40)
        return harness_lm(model, Tokenizer.bytes(), 0.3, **kwargs)

    return make


@pytest.mark.parametrize("method", [*METHODS, "ablation-integration"])
def test_loglikelihood_is_what_decoding_has(method, byte_model, decoder_losses):
    """Catches a sum over the wrong tokens, the soft form, and steps of padding: to 1e-4 (latents
    settled to 1e-5), whether greedy and steps exactly; a text without a context; a whole text."""
    lm = byte_model(method)
    end, encode = lm.eot_token_id, lm.tok_encode
    pairs = [("the fox", " naps"), ("", "a fox"), (" ", "it is a"), ("one two  ", "three")]
    answers = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
    read = tokens = 0
    for (context, continuation), (log_p, greedy) in zip(pairs, answers, strict=True):
        ids = ([] if context.strip() else [end]) + encode(context + continuation)
        n = len(continuation) + len(context) - len(context.rstrip())  # spaces go to the right
        losses, steps = decoder_losses(lm.model, ids, 0.3)
        read, tokens = read + sum(steps), tokens + len(ids) - 1
        assert log_p == pytest.approx(-sum(losses[-n:]), abs=1e-4)
        best = generate(lm.model, [ids[:-n]], n, tau=0.3, temperature=0)[0].tokens
        assert greedy == (best == ids[-n:])
    assert lm.count.steps == read and lm.count.tokens == tokens
    (whole,) = lm.loglikelihood_rolling(requests(("a fox naps",)))
    losses, _ = decoder_losses(lm.model, [end, *encode("a fox naps")], 0.3)
    assert whole == pytest.approx(-sum(losses), abs=1e-4)


def test_a_whole_text_begins_once(tmp_path):
    """Catches a beginning that is predicted from a beginning: a whole text is what follows none."""
    library, model = byte_level(begin=True), small_model(vocab_size=300)
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    lm = harness_lm(model, load_tokenizer(tmp_path / "tokenizer.json"))
    (whole,) = lm.loglikelihood_rolling(requests(("the fox naps",)))
    ((after_nothing, _),) = lm.loglikelihood(requests(("", "the fox naps")), disable_tqdm=True)
    assert whole == pytest.approx(after_nothing, abs=1e-9)


def test_greedy(byte_model):
    """Catches a flag that is never set: a continuation that greedy decoding has, and others."""
    lm = byte_model()
    ids = lm.tok_encode("the fox")
    best = generate(lm.model, [ids], 5, tau=0.3, temperature=0)[0].tokens
    for change in range(6):
        continuation = [t + (i == change) for i, t in enumerate(best)]
        ((_, greedy),) = lm._loglikelihood_tokens([(None, ids, continuation)])
        assert greedy == (change == 5)


@pytest.mark.parametrize("method", METHODS)
def test_batches_and_order_do_not_matter(method, byte_model):
    """Catches answers that depend on neighbours or padding, or come back in another order."""
    draw = random.Random(0)
    word = lambda n: "".join(draw.choices("abcdefgh ", k=n)) + "x"  # noqa: E731
    pairs = [(word(draw.randint(0, 30)), word(draw.randint(1, 8))) for _ in range(8)]
    contexts = [(context, {"until": ["x"], "max_gen_toks": 4}) for context, _ in pairs]
    lm = byte_model(method, batch_tokens=1, batch_size=1)
    scores = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
    texts = lm.generate_until(requests(*contexts))
    order = draw.sample(range(8), 8)
    for batch in (50, 10_000):
        lm = byte_model(method, batch_tokens=batch, batch_size=batch // 10)
        found = lm.loglikelihood(requests(*[pairs[i] for i in order]), disable_tqdm=True)
        for i, (log_p, greedy) in zip(order, found, strict=True):
            assert log_p == pytest.approx(scores[i][0], abs=1e-9) and greedy == scores[i][1]
        found = lm.generate_until(requests(*[contexts[i] for i in order]))
        assert found == [texts[i] for i in order]


@pytest.mark.parametrize("method", ["ponderlm3", "looped"])
def test_generate_until(method, byte_model, decoder_losses):
    """Catches a stop text that is kept or overlooked, settings that are not told apart, a limit."""
    lm = byte_model(method)
    free = {"max_gen_toks": 12}
    (text,) = lm.generate_until(requests(("the fox", free)))
    ids = generate(lm.model, [lm.tok_encode("the fox")], 12, tau=0.3, temperature=0)[0].tokens
    raw = lm.vocabulary.decode(ids)
    assert text == raw.decode("utf-8", "replace")
    assert lm.count.tokens == 7 + 11  # the last token is not read
    _, steps = decoder_losses(lm.model, lm.tok_encode("the fox") + ids, 0.3)
    assert lm.count.steps == sum(steps)
    end = text[5:7]  # over two tokens
    cut = text.split(end)[0]
    lm = byte_model(method)
    asked = [dict(free, until=["nowhere", end], num_beams=1, top_k=0), free]
    asked += [dict(free, until=end), {"max_gen_toks": 3}]
    found = lm.generate_until(requests(*[("the fox", one) for one in asked]))
    assert found == [cut, text, cut, raw[:3].decode("utf-8", "replace")]
    lm = byte_model(method)
    lm.generate_until(requests(("the fox", dict(free, until=end))))
    assert lm.count.tokens < 7 + 11  # it went on no further
    lm.vocabulary.end_of_text = ids[4]  # it ends a text, and is no part of it
    (found,) = lm.generate_until(requests(("the fox", free)))
    assert found == lm.vocabulary.decode(ids[: ids.index(ids[4])]).decode("utf-8", "replace")
    with pytest.raises(UserError, match="num_beams"):
        lm.generate_until(requests(("the fox", dict(free, num_beams=4))))


def test_windows(byte_model):
    """Catches what does not fit: the beginning of a context goes, and is counted; a continuation
    that is longer than the window is refused by name."""
    lm = byte_model()
    long = "abcdefgh" * 8
    kept = requests(*[(long[-n:], "xyz") for n in (37, 38, 39, 64)])
    shorter, *fits = (log_p for log_p, _ in lm.loglikelihood(kept, disable_tqdm=True))
    assert fits == pytest.approx([fits[0]] * 3, abs=1e-9) and abs(shorter - fits[0]) > 1e-3
    assert lm.count.cut == 2  # 38 + 3 are the window and the id after it: 39 do not fit
    with pytest.raises(UserError, match=r"asks for 41 tokens at once, .* scores 40"):
        lm.loglikelihood(requests(("a", "b" * 41)), disable_tqdm=True)
    lm = byte_model()
    lm.generate_until(requests((long, {"max_gen_toks": 10}), (long[:30], {"max_gen_toks": 10})))
    assert lm.count.cut == 1 and lm.count.tokens == 2 * (30 + 9)


def test_command(tasks, run, quick, tmp_path, capsys):
    """Catches results that are saved or printed otherwise than the harness found them, and counts
    of tokens, steps and requests that run on from task to task."""
    names, out = ["quiz", "cloze", "finish", "whole"], tmp_path / "scores.json"
    main(Options(str(run), tasks=",".join(names), include_path=tasks, device="cpu", trust=True,
                 limit=5, out=out))  # fmt: skip
    found = json.loads(out.read_text())["tasks"]
    shown = capsys.readouterr().out
    lm = harness_lm(load(run), load_tokenizer(run / "tokenizer.json"))
    manager = TaskManager(include_path=tasks, include_defaults=False)
    expected = simple_evaluate(lm, tasks=names, limit=5, task_manager=manager, bootstrap_iters=0)
    metrics = dict(quiz="acc", cloze="perplexity", finish="exact_match", whole="bits_per_byte")
    for name, metric in metrics.items():
        value = expected["results"][name][f"{metric},none"]
        assert found[name]["results"][name][f"{metric},none"] == pytest.approx(value)
        steps = found[name]["steps"] / found[name]["tokens"]
        assert f"\n{name}: {steps:.2f} steps a token" in shown
        assert found[name]["documents"] == {name: 5}
        assert found[name]["requests"] == (15 if name == "quiz" else 5)
    assert f"{value:.4f}" in shown
    for key in ("tokens", "steps", "cut"):
        assert sum(one[key] for one in found.values()) == getattr(lm.count, key)
    assert 0 < lm.count.steps < 3 * lm.count.tokens


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("num_fewshot", [0, 2])
def test_as_the_harness_has_it(tmp_path, tasks, num_fewshot, begin):
    """Catches another prompt, cut, or sum than lm-evaluation-harness's `hf` has with the same
    Llama: log-likelihoods to 1e-4, generated texts and accuracies exactly. Two solved examples
    do not fit the window."""
    library = byte_level(begin)
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        initializer_range=0.1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(shape).save_pretrained(tmp_path)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="</s>", bos_token="<s>" if begin else None
    ).save_pretrained(tmp_path)
    ours = harness_lm(load(tmp_path), load_tokenizer(tmp_path / "tokenizer.json"))
    theirs = HFLM(
        str(tmp_path), device="cpu", dtype="float32", batch_size=1, max_length=32, truncation=True
    )
    manager = TaskManager(include_path=tasks, include_defaults=False)
    names = ["quiz", "cloze", "finish", *([] if begin else ["whole"])]
    ours_found, theirs_found = (
        simple_evaluate(
            lm, tasks=names, num_fewshot=num_fewshot, task_manager=manager, bootstrap_iters=0
        )
        for lm in (ours, theirs)
    )
    assert (ours.count.cut > 0) == (num_fewshot > 0)
    for name in names:
        pairs = [
            sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
            for found in (ours_found, theirs_found)
        ]
        for mine, other in zip(*pairs, strict=True):
            assert mine["arguments"] == other["arguments"]
            for (a,), (b,) in zip(mine["resps"], other["resps"], strict=True):
                if name == "finish":
                    assert a == b
                else:  # (log p, greedy), or log p
                    a, b = (torch.tensor(x, dtype=torch.float64) for x in (a, b))
                    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
        for key, value in theirs_found["results"][name].items():
            if isinstance(value, float):
                assert ours_found["results"][name][key] == pytest.approx(value, rel=1e-4)


def test_table(capsys):
    """Catches rows in other columns than the paper's, and an average of something else."""
    for *row, average in PRINTED.values():  # the printed average is that of the printed columns
        assert sum(row) / len(row) == pytest.approx(average, abs=0.1)
    report, config = {"num_fewshot": 5, "limit": None, "tasks": {}}, small_model().config
    for i, name in enumerate(COLUMNS):
        results = {name: {"acc,none": i / 10}}
        report["tasks"][name] = dict(tokens=100, steps=150, results=results)
    benchmarks.show_table(report, config)
    shown = capsys.readouterr().out
    *_, ours, paper, _, _ = shown.splitlines()
    assert ours.split()[-10:] == [f"{10 * i:.1f}" for i in range(9)] + ["40.0"]
    flops = cost(config, 1.5).paper_flops / 1e9
    assert float(ours.split()[-11]) == pytest.approx(flops, rel=1e-2)
    assert paper.split()[-11:] == ["8.86", *map(str, PRINTED[5])]
    benchmarks.show_table(report | {"tasks": {"race": report["tasks"]["race"]}, "limit": 7}, config)
    shown = capsys.readouterr().out
    assert "5-shot, 7 documents a task" in shown
    assert shown.splitlines()[-4].split()[-10:] == ["-"] * 8 + ["80.0", "-"]


@pytest.mark.parametrize(
    "kwargs,message",
    [
        (dict(tasks="quizz"), "no such task; lm_eval ls tasks"),
        (dict(tasks="quiz", trust=False), "runs what Python .* --trust"),
        (dict(tasks="remote"), "texts of remote cannot be read"),
        (
            dict(tasks="quiz", out=Path("nowhere/scores.json")),
            "--out nowhere/scores.json .* in no folder",
        ),
    ],
)
def test_wrong_options(tmp_path, tasks, run, quick, monkeypatch, kwargs, message):
    """Catches a stack trace, or an hour of work before an error that was there from the start."""
    (tmp_path / "remote.yaml").write_text(
        QUIZ.replace("task: quiz", "task: remote") + "dataset_path: nobody/nothing\n"
        "test_split: test\n"
    )
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path if kwargs["tasks"] == "remote" else tasks
    options = dict(run=str(run), device="cpu", include_path=folder, trust=True)
    options |= kwargs
    with pytest.raises(SystemExit, match=message):
        command_line(lambda: main(Options(**options)))


def test_without_the_package(run, monkeypatch):
    """Catches a stack trace without lm-evaluation-harness, which is optional."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match="pip install lm_eval"):
        main(Options(str(run), tasks="quiz", device="cpu"))
