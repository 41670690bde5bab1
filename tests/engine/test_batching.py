"""The engine decodes what the simple decoder does: every logit, every step, every place of the cache."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import LLAMA3, needs_bfloat16, small_model
from placement import TEST_DEVICE

from lab.common import command_line
from lab.engine.batching import REPLACED, Engine, serves
from lab.engine.compiled import Compiled, Pass
from lab.engine.cuda_graphs import rounded
from lab.engine.prefill import settle
from lab.engine.products import FEW
from lab.engine.request import Sample, choose_finite
from lab.engine.simple import generate
from lab.kernels.channels import bias_unit
from lab.methods import all_methods
from model import UserError

ON_GPU = TEST_DEVICE.type != "cpu"
SAMPLING = dict(temperature=0.9, top_k=20, seed=3, ends=[5])


def prompts(n, longest, seed=1):
    """Ragged prompts, one of a single token and one of the longest length among them."""
    g = torch.Generator().manual_seed(seed)
    lengths = [1, longest, *torch.randint(1, longest + 1, (n,), generator=g).tolist()][:n]
    return [torch.randint(31, (length,), generator=g).tolist() for length in lengths]


@pytest.fixture(scope="module")
def model():
    return small_model(seed=2)


@pytest.fixture
def logits(monkeypatch):
    """The logits from which each token was chosen, by its random number: {decoder: {u: logits}}."""
    seen = {"simple": {}, "engine": {}}

    def watch(name):
        def record(logits, u, *args):
            rows = zip(u.reshape(-1).tolist(), logits.view(-1, logits.size(-1)), strict=True)
            seen[name].update(rows)
            return choose_finite(logits, u, *args)

        return record

    monkeypatch.setattr("lab.engine.simple.choose_finite", watch("simple"))
    monkeypatch.setattr("lab.engine.batching.choose_finite", watch("engine"))
    monkeypatch.setattr("lab.engine.rows.choose", watch("engine"))
    return seen


def compare(seen):
    """The same tokens were chosen from the same logits, to 1e-9; then forget the engine's."""
    assert seen["simple"].keys() == seen["engine"].keys() and len(seen["engine"]) > 4
    gap = max((seen["engine"][u] - seen["simple"][u]).abs().max() for u in seen["engine"])
    assert gap < 1e-9
    seen["engine"] = {}


def uncompiled(monkeypatch):
    """The pass that is compiled, as it is. -> what an engine takes for it; a GPU has graphs."""
    monkeypatch.setattr("lab.engine.compiled.shutil.which", bool)

    def compile(self, choice):
        return lambda tensors: Pass(self.rows, choice)(*tensors)

    monkeypatch.setattr(Compiled, "compile", compile)
    return {} if ON_GPU else dict(compile=True)


SHORT = [(0, 0.3), (1, 0.3), (2, 0), (3, 1e-4), (3, 0.3), (3, 1), (4, 0.3)]
ALL = [(K, tau) for K in range(5) for tau in (0, 1e-4, 0.3, 1)]


@pytest.mark.parametrize(
    "K,tau", [pytest.param(*p, marks=[] if p in SHORT else pytest.mark.slow) for p in ALL]
)
@pytest.mark.parametrize("method", ["ponderlm3", "grid"])
def test_equals_the_simple_decoder(method, K, tau, logits):
    """Catches any mistake of the engine: prompts of 1 to 21 tokens in a window of 16 that is
    outgrown, ends at different times, waiting sequences, batches of one and of all."""
    shape = dict(method=method, ponder_steps=K) if K else dict(method="vanilla")
    model, texts = small_model(seed=2, block_size=16, **shape), prompts(5, 21)
    expected = generate(model, texts, 14, tau=tau, **SAMPLING)
    for batch_size, prefill in ((2, "jacobi"), (5, "sequential")):
        engine = Engine(model, batch_size, tau=tau, prefill=prefill, tolerance=0)
        assert engine.generate(texts, 14, **SAMPLING) == expected
        compare(logits)


@pytest.fixture(scope="module")
def many(model):
    """Prompts, more than any batch below, and what the simple decoder makes of them."""
    texts = prompts(21, 9)
    return texts, generate(model, texts, 8, tau=0.3, **SAMPLING)


@pytest.mark.parametrize("batch_size", [1, 21])
def test_many(model, many, batch_size, monkeypatch):
    """Catches rows that take over another's state, and a cache that loses places as it grows."""
    monkeypatch.setattr("lab.engine.cache.BLOCK", 8)
    texts, expected = many
    assert {len(sample.tokens) for sample in expected} > {8}  # some end early
    engine = Engine(model, batch_size, tau=0.3, tolerance=0)
    assert engine.generate(texts, 8, **SAMPLING) == expected


def test_serves():
    """Catches a method that the engine decodes by another rule than its own, without a word."""
    engine = {"ponderlm3", "ponderlm2", "vanilla", "grid", "grid-fixed"}
    engine |= {f"ablation-{part}" for part in ("mask", "integration", "router", "index")}
    model = small_model()
    served = {kind.method for kind in all_methods() if serves(small_model(method=kind.method))}
    assert served & {"looped", "ouro", "pause", "mor-expert", "mor-token"} == set() and engine <= served
    for name in REPLACED:
        model.__class__ = type("Own", (type(model),), {name: lambda self: None})
        assert not serves(model)
        with pytest.raises(UserError, match="the engine does not know"):
            Engine(model)
        model.__class__ = type(model).__bases__[0]
    model.__class__ = type("Own", (type(model),), {"feed_back": lambda self, h, e: h + e})
    assert serves(model)


@pytest.mark.parametrize(
    "settings",
    [
        dict(method="ponderlm2"),
        dict(method="ablation-mask"),
        dict(method="ablation-integration"),
        dict(method="ablation-router"),
        dict(method="ablation-index"),
        dict(method="grid"),
        dict(method="grid", ponder_steps=7, reread=True),
        dict(method="grid", backbone="gpt_neox", num_key_value_heads=None),
        dict(method="grid-fixed"),
        dict(reread=True),
        dict(method="ponderlm2", reread=True),
        dict(num_key_value_heads=1, head_dim=10, tie_word_embeddings=True, embed_scale=3.0),
        dict(rms_norm_eps=0.1, rope_theta=100.0, num_key_value_heads=4),
        dict(backbone="llama3", backbone_options=LLAMA3),
    ],
    ids=lambda settings: "-".join(map(str, (*settings, settings.get("method", "")))),
)
def test_settings(settings, logits, monkeypatch):
    """Catches a setting of the model, or a method's own log w or integration, that the engine's
    form of a block and of a token, or the one that is compiled, does not follow."""
    model, texts = small_model(seed=2, **settings), prompts(3, 7)
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, torch.nn.RMSNorm)):
            norm.weight.uniform_(0.5, 1.5)  # which are 1 at the start of a training
    tau, alpha = 0.3, 1.0 if model.has_router else 0.0
    expected = generate(model, texts, 6, tau=tau, alpha=alpha, **SAMPLING)
    for prefill in ("jacobi", "sequential"):
        engine = Engine(model, 2, tau=tau, alpha=alpha, prefill=prefill, tolerance=0)
        assert engine.generate(texts, 6, **SAMPLING) == expected
        compare(logits)
    if "gpt_neox" not in settings.values():
        engine = Engine(model, 2, tau=tau, alpha=alpha, prefill=prefill, **uncompiled(monkeypatch))
        assert engine.generate(texts, 6, **SAMPLING) == expected


@pytest.mark.parametrize("rows, graphs", [(2, False), (6, True)])
def test_a_row_that_nobody_is_in(rows, graphs, monkeypatch):
    """Catches a row whose text has ended and that writes on, where the next text will read it."""
    monkeypatch.setattr("lab.engine.cache.BLOCK", 8)
    how = dict(graphs=True) if graphs else uncompiled(monkeypatch)
    model, long = small_model(seed=0), torch.arange(25).tolist()
    engine = Engine(model, rows, tau=0.3, tolerance=0, **how)
    (token,) = generate(model, [long], 1, tau=0.3, seed=rows - 1)[0].tokens  # of the last row
    for texts, n, end in (
        ([[1]] * (rows - 1) + [long], 7, token),
        ([[2 + i] for i in range(rows)], 31, None),
    ):
        expected = generate(model, texts, n, tau=0.3, seed=0, ends=[end])
        assert engine.generate(texts, n, seed=0, ends=[end]) == expected


@pytest.mark.parametrize("method", ["ponderlm3", "grid"])
def test_beginning_and_ends(method):
    """Catches a window that slides and loses the tokens before each text, and a second end that is passed
    over."""
    model = small_model(method=method, seed=2)
    T = model.config.block_size
    texts, expected = [[1, 2, *(i % 29 for i in range(n))] for n in (T - 4, T + 3)], []
    for text in texts:
        context, tokens = [*text], []
        for _ in range(12):
            if len(context) > T:
                context = [1, 2, *context[-(T // 2) :]]
            tokens.append(int(model(torch.tensor([context]), tau=0.3).logits[0, -1].argmax()))
            context.append(tokens[-1])
        expected.append(tokens)
    how = dict(begin=[1, 2], temperature=0.0)
    assert [s.tokens for s in generate(model, texts, 12, tau=0.3, **how)] == expected
    engine = Engine(model, 2, tau=0.3, tolerance=0)
    assert [sample.tokens for sample in engine.generate(texts, 12, **how)] == expected
    token = expected[0][3]
    for ends in ([999, token], [token, 998]):
        cut = engine.generate(texts, 12, ends=ends, **how)
        assert cut == generate(model, texts, 12, ends=ends, tau=0.3, **how)
        assert cut[0].tokens == expected[0][: expected[0].index(token) + 1]


def test_a_stream_that_is_not_read_to_its_end(monkeypatch):
    """Catches rows that go on with its texts, beyond what is cleared for the next."""
    monkeypatch.setattr("lab.engine.cache.BLOCK", 8)
    model, how = small_model(seed=1, method="ponderlm2"), uncompiled(monkeypatch)
    engine = Engine(model, 2, tau=0, tolerance=0, prefill="sequential", **how)
    stream = engine.stream([[1], [1]], 31, seed=0)
    for _ in range(14):
        next(stream)
    stream.close()
    engine.generate([[2]], 16, seed=0)
    expected = generate(model, [[2], [3]], 31, tau=0, seed=5)
    assert engine.generate([[2], [3]], 31, seed=5) == expected


@pytest.mark.skipif(not shutil.which("g++"), reason="to compile takes a C++ compiler: install g++")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["grid", "ponderlm3"])
def test_compiled(method, monkeypatch):
    """Catches a program that was made for the sizes of its first pass, or that writes to the places
    of others: texts that end and wait, a window that is outgrown, a cache that grows; and a copy of
    the weights that stays in the compiler's folder."""
    from torch._inductor.codecache import cache_dir  # here, since it takes seconds

    kept = lambda: {*Path(cache_dir()).rglob("*.wrapper.so")}  # noqa: E731
    before = kept()
    monkeypatch.setattr("lab.engine.cache.BLOCK", 8)
    model, texts = small_model(seed=2, method=method, block_size=16), prompts(7, 21)
    engine = Engine(model, 3, tau=0.3, tolerance=0, compile=True)
    for n in (4, 14):
        expected = generate(model, texts, n, tau=0.3, **SAMPLING)
        assert engine.generate(texts, n, **SAMPLING) == expected
    assert len(engine.passes.programs) == 1
    assert kept() == before


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float32", pytest.param("int8", marks=needs_bfloat16)])
def test_frozen(weights, monkeypatch):
    """Catches weights that the compiler packs, and with them other tokens."""
    monkeypatch.setattr("lab.engine.products.CACHED", 0)
    model, texts = small_model(seed=2).float(), prompts(7, 21)
    how = dict(tau=0.3, weights=weights, prefill="sequential")
    compiled, plain = (Engine(model, FEW + 1, compile=on, **how) for on in (True, False))
    assert compiled.passes.frozen
    assert compiled.generate(texts, 9, **SAMPLING) == plain.generate(texts, 9, **SAMPLING)


@pytest.mark.parametrize("prefill", ["jacobi", "sequential"])
def test_cache_holds_executed_slots(model, prefill):
    """Catches keys, values or log w at other places than the simple decoder's, and leftovers."""
    texts = prompts(3, 9)
    engine = Engine(model, 3, tau=0.3, prefill=prefill, tolerance=0)
    read = [[] for _ in texts]
    stream = engine.stream(texts, 50, temperature=0, read=read)
    tokens = [list(text) for text in texts]
    for _ in range(20):  # then stop in the middle of everything
        i, token, _ = next(stream)
        tokens[i].append(token)
    for row, (text, steps) in enumerate(zip(tokens, read, strict=True)):
        cache = model.new_cache()
        for t, token in enumerate(text[: len(steps)]):
            model.ponder_token(token, t, cache, tau=0.3)
        n = len(steps) + sum(steps)
        for simple, kv in zip(cache, engine.cache.layers, strict=True):
            assert simple.keys.size(2) == n
            both, d = torch.cat([simple.keys, simple.values], dim=1)[0], model.config.d
            both[..., d] *= math.sqrt(d) / bias_unit(d)  # log w, as the engine's channel has it
            assert (kv[row, :, :n] - both).abs().max() < 1e-9
    expected = Engine(model, 3, tau=0.3, tolerance=0).generate(texts, 5, temperature=0)
    assert engine.generate(texts, 5, temperature=0) == expected  # nothing is left of the first call


def test_shared_contexts(model, monkeypatch):
    """Catches a context that is read again for every row that has it, or copied to another's."""
    read = []

    def counted(model, idx, *rest, **options):
        read.append(len(idx))
        return settle(model, idx, *rest, **options)

    monkeypatch.setattr("lab.engine.batching.settle", counted)
    a, b, c = prompts(3, 9)
    texts, steps, expected = [b, a, b, c, b, a], [[] for _ in range(6)], []
    engine = Engine(model, 6, tau=0.3, prefill="jacobi")
    found = engine.generate(texts, 8, read=steps, **SAMPLING)
    assert found == generate(model, texts, 8, tau=0.3, read=expected, **SAMPLING)
    assert [k for one in steps for k in one] == expected and read[0] == 3
    read.clear()  # those that wait for a row copy it from one that still runs
    waiting = Engine(model, 2, tau=0.3, prefill="jacobi").generate(6 * [a], 8, **SAMPLING)
    one_by_one = generate(model, 6 * [a], 8, tau=0.3, **SAMPLING)
    assert waiting == one_by_one and len(read) < 3  # again where both have ended at once


@pytest.mark.parametrize(
    "method, rows, parallel",
    [
        ("ponderlm3", 3, True),
        ("ponderlm3", 4, ON_GPU),
        ("grid", 4, True),
        ("vanilla", 4, True),
    ],
)
def test_how_prompts_are_read(method, rows, parallel):
    """Catches prompts that are read in the slower way."""
    engine = Engine(small_model(method=method), 4)
    engine.running = [None] * rows
    assert engine.reads_in_parallel() == parallel
    for name in ("jacobi", "sequential"):
        engine.prefill = name
        assert engine.reads_in_parallel() == (name == "jacobi")


def test_nobody_waits(model):
    """Catches sequences that wait for the slowest token of a batch, or for the longest text."""
    texts = prompts(7, 9)
    read = [[] for _ in texts]
    engine = Engine(model, 7, tau=0.3, prefill="sequential")
    for _ in engine.stream(texts, 8, read=read, **SAMPLING):
        pass
    slots = [len(steps) + sum(steps) for steps in read]
    assert len(set(slots)) > 3
    assert (engine.stats.passes, engine.stats.slots) == (max(slots), sum(slots))
    three = Engine(model, 3, tau=0.3, prefill="sequential")
    three.generate(texts, 8, **SAMPLING)
    busy = [0, 0, 0]  # a free row takes the next text
    for n in slots:
        busy[busy.index(min(busy))] += n
    assert three.stats.passes == max(busy)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bfloat16(weights, logits):
    """Agreement in bfloat16, of the products or of the whole model: the first token's logits to
    3 %, with either way to read a prompt; and passes that fail."""
    model, texts = small_model(seed=2).float(), prompts(4, 12)
    generate(model, texts, 1, tau=0.3, seed=0)
    exact = torch.stack(list(logits["simple"].values()))
    for prefill in ("jacobi", "sequential"):
        dtype = torch.bfloat16 if weights == torch.float32 else None  # as the weights are
        engine = Engine(model.to(weights), 4, tau=0.3, dtype=dtype, prefill=prefill)
        engine.generate(texts, 4, seed=0)
        assert engine.cache.layers[0].dtype == torch.bfloat16
        rounded = torch.stack([logits["engine"][u].float() for u in logits["simple"]])
        assert 0 < (rounded - exact).norm() / exact.norm() < 0.03


def test_rounded():
    """Catches sizes that are rounded down, or more kinds of them than two for each power of two."""
    assert [rounded(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 13, 25, 97)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 16, 32, 128,
    ]  # fmt: skip


@pytest.mark.parametrize("prefill", ["jacobi", "sequential"])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_static_shapes(ahead, prefill, monkeypatch):
    """Catches what only goes wrong where the host looks at a pass when others are under way, and
    where rows that nobody is in run along: as on CUDA, where these passes are graphs."""
    monkeypatch.setattr("lab.engine.cache.BLOCK", 8)
    model, texts = small_model(seed=2, block_size=16), prompts(7, 21)
    expected = generate(model, texts, 14, tau=0.3, **SAMPLING)
    rows = 8 if ahead == 1 else 5  # for 7 texts: in one of 8 there is nobody
    engine = Engine(model, rows, tau=0.3, graphs=True, prefill=prefill, tolerance=0)
    engine.ahead = max(ahead, engine.ahead)
    for _ in range(2):  # the second time nothing is recorded that was before the cache grew
        read = [[] for _ in texts]
        samples = [Sample([], []) for _ in texts]
        for i, token, steps in engine.stream(texts, 14, read=read, **SAMPLING):
            samples[i].tokens.append(token)
            samples[i].steps.append(steps)
        assert samples == expected
    assert len({A for A, _, _ in engine.passes.recorded}) > 2
    _, _, position, length, _, limit = engine.rows.counters.unbind(1)
    assert (position <= limit).all() and (length <= 4 * limit).all()  # nobody runs on into others
    engine.generate([[1]], 3, temperature=0.7)  # graphs are kept for one way to choose
    assert {how for _, _, how in engine.passes.recorded} == {(0.7, None, None)}


def test_nothing_to_do(model):
    """Catches a crash where there is nothing to generate, or nothing to go on from."""
    engine = Engine(model)
    assert engine.generate([], 5) == []
    assert [sample.tokens for sample in engine.generate([[1], [2]], 0)] == [[], []]


# -- What both decoders refuse, and where they end -------------------------------------------------


def by_engine(model, *args, batch_size=4, tau=1e-4, alpha=0.0, **choice):
    return Engine(model, batch_size, tau=tau, alpha=alpha).generate(*args, **choice)


BOTH = pytest.mark.parametrize("decode", [generate, by_engine])


@BOTH
def test_no_ids(decode, model):
    """Catches ids that are rounded without a word."""
    with pytest.raises(TypeError, match="float"):
        decode(model, [[1.7]], 1)


@BOTH
def test_end_token(decode, model):
    """Catches a sequence that goes on behind its end, or ends before it."""
    samples = decode(model, prompts(8, 5), 20, seed=0, ends=[5])
    ended = [sample for sample in samples if len(sample.tokens) < 20]
    assert ended and all(s.tokens[-1] == 5 and 5 not in s.tokens[:-1] for s in ended)


@BOTH
@pytest.mark.parametrize(
    "call,message",
    [
        (dict(tau=-0.1), "tau = -0.1: it should be greater than or equal to 0"),
        (dict(tau=2), "tau = 2: it should be less than or equal to 1"),
        (dict(alpha=float("nan")), "alpha = nan"),
        (dict(alpha=1e40), r"alpha = 1e\+40: it should be less than or equal to 1000000"),
        (dict(temperature=float("nan")), "temperature = nan: it should be a finite number"),
        (dict(seed=-1), "seed = -1"),
        (dict(top_k=0), "top_k = 0"),
        (dict(top_p=0), "top_p = 0: it should be greater than or equal to 0"),
        (dict(temprature=1), "temprature = 1: .*[Uu]nexpected"),
        (dict(prompts=[[31]]), "the prompt has ids outside the vocabulary, 0 to 30"),
        (dict(prompts=[[1], []]), "has no token"),
    ],
)
def test_refusals(decode, model, call, message):
    """Catches settings out of range that would generate something anyway."""
    call = {"prompts": [[1]], **call}
    with pytest.raises(SystemExit, match=message):
        command_line(lambda: decode(model, call.pop("prompts"), 2, **call))


@BOTH
def test_logits_that_are_not_finite(decode):
    """Catches a broken model that goes on to speak, or whose tokens are outside the vocabulary."""
    model = small_model()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(UserError, match="the logits are not finite"):
        decode(model, [[1, 2]], 2)


def test_which_prompt(model):
    """Catches a refusal of one among many prompts that does not say which."""
    for prompt, message in (([31], "has ids outside"), ([], "has no token")):
        with pytest.raises(UserError, match=f"prompt 2 of 2 {message}"):
            by_engine(model, [[1], prompt], 2)


def test_what_cannot_be_compiled(model, monkeypatch):
    """Catches a pass of other numbers than float32, or a missing compiler, that fails later."""
    for dtype in (torch.bfloat16, torch.float32):  # of a model in float64
        with pytest.raises(UserError, match="compile is for float32 on a CPU: leave it out"):
            Engine(model, compile=True, dtype=dtype)
    with pytest.raises(UserError, match="compile is for llama, not gpt_neox"):
        Engine(small_model(backbone="gpt_neox", num_key_value_heads=None), compile=True)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"takes a C\+\+ compiler: install \w"):
        Engine(model, compile=True)


def test_other_methods_are_refused():
    """Catches a model whose cache is of another kind, decoded as if it were a PonderLM."""
    for method in ("looped", "ouro"):
        with pytest.raises(UserError, match=rf"{method} .* decode it with lab\.engine\.simple"):
            Engine(small_model(method=method))
