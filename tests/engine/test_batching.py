"""The engine decodes what sample.py's loop does: every logit, every step, every place of the cache."""

import math
import shutil
import timeit
from inspect import getattr_static
from pathlib import Path

import pytest
import torch
from lab_helpers import LLAMA3, NEOX, decode, small_model
from placement import TEST_DEVICE
from torch.utils._pytree import tree_map

from common import UserError, command_line
from lab.engine.batching import BESIDE, FOLLOWED, Engine, serves
from lab.engine.choosing import choose_finite
from lab.engine.compiled import Compiled, Pass
from lab.engine.cuda_graphs import rounded
from lab.engine.simple import generate
from lab.engine.slot_step import BackboneStep, Product
from lab.engine.states import settle
from lab.interop.weights import INCLUDED, load
from lab.kernels import UNIT
from lab.methods import PonderLM3, all_methods
from lab.methods.grid import Grid

ON_GPU = TEST_DEVICE.type != "cpu"
SAMPLING = dict(temperature=0.9, top_k=20, seed=3, ends=[5])
JACOBI, SEQUENTIAL = dict(prefill="jacobi"), dict(prefill="sequential")


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


def check(model, texts, n, ways, logits=None, tau=0.3, alpha=0.0, **choice):
    """Engines of each size and options say what the simple decoder says, by the same logits. -> samples"""
    choice = SAMPLING | choice
    expected = generate(model, texts, n, tau=tau, alpha=alpha, **choice)
    for batch_size, options in ways:
        engine = Engine(model, batch_size, **dict(tau=tau, alpha=alpha, tolerance=0) | options)
        assert engine.generate(texts, n, **choice) == expected, options
        if logits and not engine.static:
            compare(logits)
        elif logits:  # it chooses for rows that nobody is in, too
            logits["engine"] = {}
    return expected


@pytest.fixture
def uncompiled(monkeypatch):
    """The pass that is compiled, as it is: what an engine takes for it; a GPU has graphs."""
    monkeypatch.setattr("lab.engine.compiled.shutil.which", bool)
    monkeypatch.setattr(
        Compiled, "compile", lambda self, choice: lambda tensors: Pass(self.rows, choice)(*tensors)
    )
    return {} if ON_GPU else dict(compile=True)


@pytest.fixture
def blocks(monkeypatch):
    """A cache that grows by 8 places."""
    monkeypatch.setattr("lab.engine.cache.BLOCK", 8)


# -- The matrix ------------------------------------------------------------------------------------

# What is run always; all combinations of method, K and tau with -m slow.
QUICK = [(0, 0.3), (1, 0.3), (2, 0), (3, 1e-4), (3, 0.3), (3, 1), (4, 0.3)]
ALL = [(K, tau) for K in range(5) for tau in (0, 1e-4, 0.3, 1)]
OTHERS = ["ponderlm2", "grid-fixed", "shared", "shared-grid", "lowered", "drawn", "drawn-shared"]
OTHERS += ["warmup", "warmup-jacobi"]
OTHERS += [f"ablation-{part}" for part in ("mask", "integration", "router", "index", "price", "price-grid")]
TURNED = NEOX | dict(backbone_options={"rotary_pct": 0.5})
SETTINGS = [
    dict(method="grid", ponder_steps=7, reread=True),
    NEOX | dict(method="grid"),
    TURNED | dict(router_scale=12.0),
    NEOX | dict(backbone_options={"rotary_pct": 0.5, "parallel_residual": 0.0}),
    dict(reread=True),
    dict(method="ponderlm2", reread=True),
    dict(num_key_value_heads=1, head_dim=10, tie_word_embeddings=True, embed_scale=3.0),
    dict(rms_norm_eps=0.1, rope_theta=100.0, num_key_value_heads=4),
    dict(backbone="llama3", backbone_options=LLAMA3),
    None,  # the included model
]
MATRIX = [
    pytest.param(dict(method=method, ponder_steps=K) if K else dict(method="vanilla"), tau, marks=marks)
    for methods, quick in ((["ponderlm3", "grid"], QUICK), (OTHERS, [(3, 0.3)]))
    for method in methods
    for K, tau in ALL
    for marks in [[] if (K, tau) in quick else pytest.mark.slow]
    if K or method == "ponderlm3"
]
MATRIX += [pytest.param(settings, 0.3) for settings in SETTINGS]


@pytest.mark.parametrize("settings, tau", MATRIX, ids=str)
def test_equals_the_loop(settings, tau, logits, uncompiled, blocks):
    """Catches any mistake of the engine: prompts of 1 to 21 tokens in a window of 16 that is outgrown, ends
    at different times, waiting sequences, batches of one, some and all, a cache that grows; and a routing,
    log w, integration or setting of a model that the engine does not follow, compiled or not."""
    if settings:
        model = small_model(seed=2, block_size=16, **settings)
    else:
        model = load(INCLUDED).double().to(TEST_DEVICE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if settings and "norm" in name and "weight" in name:  # which is 1 at the start of a training
                parameter.uniform_(0.5, 1.5)
            elif settings and name.endswith("bias"):  # 0
                parameter.normal_(std=0.3)
    neox = model.config.backbone == "gpt_neox"  # which is not compiled
    ways = [(2, JACOBI), (3, SEQUENTIAL | (uncompiled if not neox else {}))]
    if model.config.method not in OTHERS or model.feedback:
        ways += [(1, JACOBI), (5, SEQUENTIAL), (4, SEQUENTIAL | dict(graphs=True))]
    alpha = 1.0 if model.has_router and tau == 0.3 else 0.0
    check(model, prompts(5, 21), 14, ways, logits, tau, alpha)


# -- What a method may do otherwise ----------------------------------------------------------------

KINDS = {"ponderlm3": PonderLM3, "grid": Grid}
# All that a model has of ours, and what of torch's one might override, too.
OWN = {name for kind in Grid.__mro__ if not kind.__module__.startswith("torch") for name in vars(kind)}
OWN = {name for name in OWN & set(dir(PonderLM3)) if not name.startswith("__")} | {"__call__", "train", "to"}


@pytest.fixture
def overriding():
    """Give a model's class another form of a name."""

    def override(model, name, form):
        model.__class__ = type("Own", (type(model),), {name: form})

    return override


@pytest.mark.parametrize("name", sorted(FOLLOWED))
@pytest.mark.parametrize("method", KINDS)
def test_overrides_that_are_followed(name, method, overriding, logits):
    """Catches a part of a model that the engine computes by rules of its own, or has once and for all."""
    model, texts = small_model(seed=2, method=method), prompts(3, 9)
    before, original = decode(model, texts[1], tau=0.3)[0], getattr(KINDS[method], name)

    def changed(*args):
        return tree_map(lambda x: 0.8 * x, original(*args))

    static = isinstance(getattr_static(KINDS[method], name), staticmethod)
    overriding(model, name, staticmethod(changed) if static else changed)
    assert (decode(model, texts[1], tau=0.3)[0] - before).abs().max() > 1e-3
    check(model, texts, 6, [(2, JACOBI), (2, SEQUENTIAL)], logits)


@pytest.mark.parametrize("method", KINDS)
def test_overrides_that_are_refused(method, overriding):
    """Catches an override passed by: the engine refuses it, or never calls what is BESIDE decoding."""

    def never(*args, **kwargs):
        raise AssertionError("what is not about decoding was called")

    for name in sorted(OWN - FOLLOWED):
        model = small_model(seed=2, method=method)
        expected = generate(model, [[1, 2]], 4, tau=0.3, seed=0)
        if name not in BESIDE:
            overriding(model, name, never)
            with pytest.raises(UserError, match=f"does not support the method {method}:"):
                Engine(model)
        elif callable(getattr(model, name)):
            overriding(model, name, never)
            assert Engine(model, tau=0.3, tolerance=0).generate([[1, 2]], 4, seed=0) == expected, name
    assert {
        "states",
        "jacobi",
        "transform",
        "forward",
        "ponder_token",
        "new_cache",
    } <= OWN - FOLLOWED - BESIDE


def test_which_methods():
    """Catches a method that is decoded slowly since this day, or by rules that are not its own."""
    served = {kind.method for kind in all_methods() if serves(small_model(method=kind.method))}
    assert served == {"ponderlm3", "vanilla", "grid", *OTHERS}


@pytest.mark.parametrize("name", ["stack", "forward", "Block", "Norm"])
def test_backbones_of_another_form(name, overriding, logits):
    """Catches a transformer that differs from a Llama, decoded as if it were one."""
    model = small_model(seed=2)
    backbone, kind = model.model, type(model.model)
    form = getattr(kind, name)
    own = form if isinstance(form, type) else lambda *args, **kwargs: 0.8 * form(*args, **kwargs)
    overriding(backbone, name, type("Own", (own,), {}) if isinstance(own, type) else own)
    assert isinstance(Engine(model, 2).rows.step, BackboneStep)
    check(model, [[1, 2, 3]], 6, [(2, SEQUENTIAL)], logits)


# -- Rows and the cache ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows, graphs", [(2, False), (6, True)])
def test_a_row_that_nobody_is_in(rows, graphs, blocks, uncompiled):
    """Catches a row whose text has ended and that writes on, where the next text will read it."""
    model, long = small_model(seed=0), torch.arange(25).tolist()
    engine = Engine(model, rows, tau=0.3, tolerance=0, **(dict(graphs=True) if graphs else uncompiled))
    (token,) = generate(model, [long], 1, tau=0.3, seed=rows - 1)[0].tokens  # of the last row
    for texts, n, end in (
        ([[1]] * (rows - 1) + [long], 7, token),
        ([[2 + i] for i in range(rows)], 31, None),
    ):
        expected = generate(model, texts, n, tau=0.3, seed=0, ends=[end])
        assert engine.generate(texts, n, seed=0, ends=[end]) == expected


@pytest.mark.parametrize("method", ["ponderlm3", "grid"])
def test_beginning_and_ends(method):
    """Catches a window that slides and loses the tokens before each text, and a second end passed over."""
    model = small_model(method=method, seed=2)
    T, how = model.config.block_size, dict(begin=[1, 2], temperature=0.0)
    texts = [[1, 2, *(i % 29 for i in range(n))] for n in (T - 4, T + 3)]
    first, _ = check(model, texts, 12, [(2, {})], **how, ends=())
    end = first.tokens[3]
    cut, _ = check(model, texts, 12, [(2, {})], **how, ends=[999, end])
    assert cut.tokens == first.tokens[: first.tokens.index(end) + 1]


def test_a_stream_that_is_not_read_to_its_end(blocks, uncompiled):
    """Catches rows that go on with its texts, beyond what is cleared for the next."""
    model = small_model(seed=1, method="ponderlm2")
    engine = Engine(model, 2, tau=0, tolerance=0, **SEQUENTIAL, **uncompiled)
    stream = engine.stream([[1], [1]], 31, seed=0)
    for _ in range(14):
        next(stream)
    stream.close()
    engine.generate([[2]], 16, seed=0)
    expected = generate(model, [[2], [3]], 31, tau=0, seed=5)
    assert engine.generate([[2], [3]], 31, seed=5) == expected


@pytest.mark.parametrize("prefill", ["jacobi", "sequential"])
def test_cache_holds_executed_slots(model, prefill):
    """Catches keys, values or log w at other places than the simple decoder's, and leftovers."""
    texts, read = prompts(3, 9), [[], [], []]
    engine = Engine(model, 3, tau=0.3, prefill=prefill, tolerance=0)
    stream = engine.stream(texts, 50, temperature=0, read=read)
    tokens = [list(text) for text in texts]
    for _ in range(20):  # then stop in the middle of everything
        i, token, _ = next(stream)
        tokens[i].append(token)
    for row, (text, steps) in enumerate(zip(tokens, read, strict=True)):
        n, d = len(steps) + sum(steps), model.config.head_width
        cache = decode(model, torch.tensor(text[: len(steps)]), tau=0.3)[2]
        for simple, kv in zip(cache, engine.cache.layers, strict=True):
            assert simple.keys.size(2) == n
            both = torch.cat([simple.keys, simple.values], dim=1)[0]
            both[..., d] *= math.sqrt(d) / UNIT  # log w, as the engine's channel has it
            assert (kv[row, :, :n] - both).abs().max() < 1e-9
    expected = generate(model, texts, 5, tau=0.3, temperature=0)
    assert engine.generate(texts, 5, temperature=0) == expected  # nothing is left of the first call


def test_shared_contexts(model, monkeypatch):
    """Catches a context that is read once more for a row that has the same, or copied to another's."""
    rows = []
    counted = lambda model, idx, *rest, **how: rows.append(len(idx)) or settle(model, idx, *rest, **how)  # noqa: E731
    monkeypatch.setattr("lab.engine.batching.settle", counted)
    a, b, c = prompts(3, 9)
    texts = [b, a, b, c, b, a]
    steps, expected = ([[] for _ in texts] for _ in range(2))
    found = Engine(model, 6, tau=0.3, prefill="jacobi").generate(texts, 8, read=steps, **SAMPLING)
    assert found == generate(model, texts, 8, tau=0.3, read=expected, **SAMPLING)
    assert steps == expected and rows[0] == 3


# -- How it runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method, parallel", [("ponderlm3", ON_GPU), ("grid", True), ("vanilla", True)])
def test_how_prompts_are_read(method, parallel):
    """Catches prompts that are read in the slower way."""
    engine = Engine(small_model(method=method), 4)
    for rows in (3, 4):
        engine.running = [None] * rows
        assert engine.reads_in_parallel() == (parallel or rows == 3)


def test_nobody_waits(model):
    """Catches sequences that wait for the slowest token of a batch, or for the longest text."""
    texts = prompts(7, 9)
    for rows in (7, 3):
        engine, read = Engine(model, rows, tau=0.3, prefill="sequential"), [[] for _ in texts]
        engine.generate(texts, 8, read=read, **SAMPLING)
        slots, busy = [len(steps) + sum(steps) for steps in read], [0] * rows
        assert len(set(slots)) > 3
        for n in slots:  # a free row takes the next text
            busy[busy.index(min(busy))] += n
        assert (engine.stats.passes, engine.stats.slots) == (max(busy), sum(slots))


@pytest.mark.parametrize("prefill", ["jacobi", "sequential"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bfloat16(weights, prefill, logits):
    """Agreement in bfloat16, of the products or the whole model: the first token's logits to 3 %."""
    model, texts = small_model(seed=2).float(), prompts(4, 12)
    generate(model, texts, 1, tau=0.3, seed=0)
    exact = torch.stack(list(logits["simple"].values()))
    dtype = torch.bfloat16 if weights == torch.float32 else None  # as the weights are
    engine = Engine(model.to(weights), 4, tau=0.3, dtype=dtype, prefill=prefill)
    engine.generate(texts, 4, seed=0)
    assert engine.cache.layers[0].dtype == torch.bfloat16
    found = torch.stack([logits["engine"][u].float() for u in logits["simple"]])
    assert 0 < (found - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize("inputs, outputs", [(8, 6), (300, 700), (512, 1376)])
@torch.inference_mode()
def test_products(dtype, rows, inputs, outputs):
    """Catches a form of weights that computes another product: to 1e-5 of its size, in bfloat16 to 2 %."""
    g = torch.Generator().manual_seed(0)
    shapes = (outputs, inputs), (rows, inputs), (rows, outputs)
    weight, x, other = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    plain, tolerance = x.double() @ weight.T.double(), 2e-2 if dtype == torch.bfloat16 else 1e-5
    for compiled in (False, True):
        product = Product(weight, dtype, rows, compiled)
        for found, expected in (
            (product(x), plain),
            (product(x, "swish"), torch.nn.functional.silu(plain)),
            (product(x, "add", other), other + plain),
            (product(x, "add", other.double()), other + plain),
            (product(x, "mul", other), other * plain),
        ):
            assert (found.double() - expected).norm() < tolerance * expected.norm()


def test_rounded():
    """Catches sizes that are rounded down, or more kinds of them than two for each power of two."""
    assert [rounded(n) for n in (1, 2, 3, 5, 7, 9, 13, 25, 97)] == [1, 2, 3, 6, 8, 12, 16, 32, 128]


@pytest.mark.parametrize("prefill", ["jacobi", "sequential"])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_static_shapes(ahead, prefill, blocks, monkeypatch):
    """Catches what goes wrong where passes are under way and rows that nobody is in run along, as on CUDA."""
    model, texts = small_model(seed=2, block_size=16), prompts(7, 21)
    expected = generate(model, texts, 14, tau=0.3, **SAMPLING)
    size = 8 if ahead == 1 else 5  # for 7 texts: in one of 8 there is nobody
    engine = Engine(model, size, tau=0.3, graphs=True, prefill=prefill, tolerance=0)
    engine.ahead, ran, advance = max(ahead, engine.ahead), [], engine.rows.advance
    monkeypatch.setattr(engine.rows, "advance", lambda *key: ran.append(key) or advance(*key))
    for _ in range(2):  # the second time nothing is recorded that was before the cache grew
        assert engine.generate(texts, 14, **SAMPLING) == expected
    assert len({A for A, _, _ in ran}) > 2
    _, _, position, length, _, limit = engine.rows.counters.unbind(1)
    assert (position <= limit).all() and (length <= 4 * limit).all()  # nobody runs on into others
    ran.clear()
    engine.generate([[1]], 3, temperature=0.7)
    kept = engine.passes.recorded if ON_GPU else ran  # graphs are kept for one way to choose
    assert {how for _, _, how in kept} == {(0.7, None, None)}


@pytest.mark.skipif(not shutil.which("g++"), reason="to compile takes a C++ compiler: install g++")
@pytest.mark.parametrize("method", [pytest.param("grid", marks=pytest.mark.slow), "ponderlm3"])
def test_compiled(method, blocks):
    """Catches a program for the sizes of its first pass, or that writes elsewhere; weights that stay on the
    disk; and a pass that copies the whole cache to write one place of it (900 times as slow here)."""
    from torch._inductor.codecache import cache_dir  # here, since it takes seconds

    kept = lambda: {*Path(cache_dir()).rglob("*.wrapper.so")}  # noqa: E731
    before, model, texts = kept(), small_model(seed=2, method=method, block_size=16), prompts(7, 21)
    engine = Engine(model, 3, tau=0.3, tolerance=0, compile=True)
    for n in (4, 14):
        expected = generate(model, texts, n, tau=0.3, **SAMPLING)
        assert engine.generate(texts, n, **SAMPLING) == expected
    assert len(engine.passes.programs) == 1 and kept() == before

    def fastest_pass(places):
        """Seconds of a pass over 8 places, with room for `places` in the cache."""
        engine.cache.reserve(places)
        choice = next(iter(engine.passes.programs))
        run = lambda: engine.passes.advance(3, 8, choice)  # noqa: E731
        return min(timeit.repeat(run, number=1, repeat=30))

    small = fastest_pass(16)
    large = fastest_pass(2**16)
    assert large < 10 * small


@pytest.mark.slow
def test_frozen(monkeypatch):
    """Catches weights that the compiler packs, and with them other tokens; and packs where that is slower."""
    model, texts = small_model(seed=2).float(), prompts(7, 21)
    how = SEQUENTIAL | dict(tau=0.3)
    assert not Engine(model, 5, compile=True, **how).passes.frozen
    monkeypatch.setattr("lab.engine.compiled.PACKED_BYTES", 0)
    assert not Engine(model, 3, compile=True, **how).passes.frozen
    compiled, plain = (Engine(model, 5, compile=on, **how) for on in (True, False))
    assert compiled.passes.frozen
    assert compiled.generate(texts, 9, **SAMPLING) == plain.generate(texts, 9, **SAMPLING)


# -- What both decoders refuse, and where they end -------------------------------------------------


def by_engine(model, *args, batch_size=4, tau=1e-4, alpha=0.0, **choice):
    return Engine(model, batch_size, tau=tau, alpha=alpha).generate(*args, **choice)


BOTH = pytest.mark.parametrize("decoder", [generate, by_engine])


@BOTH
def test_ends(decoder, model):
    """Catches a sequence that ends late or early, a crash where nothing is to do, and rounded ids."""
    samples = decoder(model, prompts(8, 5), 20, seed=0, ends=[5])
    ended = [sample for sample in samples if len(sample.tokens) < 20]
    assert ended and all(s.tokens[-1] == 5 and 5 not in s.tokens[:-1] for s in ended)
    assert decoder(model, [], 5) == []
    assert [sample.tokens for sample in decoder(model, [[1], [2]], 0)] == [[], []]
    with pytest.raises(TypeError, match="float"):
        decoder(model, [[1.7]], 1)


@BOTH
@pytest.mark.parametrize(
    "prompts, call, words",
    [
        *(([[1]], call, next(iter(call))) for call in (dict(tau=2.0), dict(alpha=math.nan), dict(top_p=0.0))),
        *(([[1]], call, next(iter(call))) for call in (dict(seed=-1), dict(temprature=1.0))),
        *(([[31]], {}, "prompt"), ([[1], []], {}, "prompt 2 of 2"), ([[1, 2]], {}, "not finite")),
    ],
    ids=str,
)
def test_refusals(decoder, prompts, call, words):
    """Catches settings out of range, a prompt that is refused unnamed, a broken model that speaks."""
    model = small_model()
    if words == "not finite":
        model.lm_head.weight.data[3] = torch.nan
    words = words.replace("_", "-")  # as a flag
    with pytest.raises(SystemExit, match=f"^error: .*{words}"):
        command_line(lambda: decoder(model, prompts, 2, **call))


def test_what_cannot_be(model, monkeypatch):
    """Catches what would fail later: other numbers than float32, no compiler, no router to shift,
    a way to read prompts that is misspelt and would be slot by slot."""
    neox, fixed = small_model(**NEOX), small_model(method="ponderlm2")
    for wrong, how, words in (
        *((model, dict(compile=True, dtype=x), "float32") for x in (torch.bfloat16, torch.float32)),
        *((neox, dict(compile=True), "gpt_neox"), (fixed, dict(alpha=1.0), "--alpha 1.0 has no effect")),
    ):
        with pytest.raises(UserError, match=words):
            Engine(wrong, **how)
    with pytest.raises(ValueError, match="prefill = 'fast' is unknown: use one of jacobi, sequential, auto"):
        Engine(model, prefill="fast")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"C\+\+ compiler"):
        Engine(model, compile=True)
