"""The page that runs two models: their numbers against PyTorch's, and what a reader can do.

The numbers come from V8, in this process, which runs the page's worker as it stands in the page.
What takes a click is tried in Chromium. Models are tiny and random, with weights that float16 holds
exactly; and the included ones.
"""

import io
import json
import re
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from lab_helpers import small_model
from PIL import Image
from py_mini_racer import MiniRacer

from data import Tokenizer, UserError
from lab.corpora import lookup
from lab.figures import explainer
from lab.figures.__main__ import main
from lab.figures.puzzle import chain_from
from lab.interop.weights import INCLUDED, PUZZLES, load, save
from train import PRESETS

ROOT = Path(explainer.__file__).parents[2]
TAU = 0.3
SHAPES = {
    "plain": dict(router_offset=(0.0, 0.5, -1.0)),
    # everything that a config may have beside: 2 of 4 heads share keys in both
    "special": dict(
        ponder_steps=3,
        tie_word_embeddings=True,
        reread=True,
        router_offset=(1.0, 0.0, 0.0, 0.0),
        embed_scale=3.0,
        head_dim=6,
    ),
}
WORDS = explainer.BYTES  # the first word of a puzzle
TOKENIZER = lookup.tokenizer()
LEFT, RIGHT, DOWN, END = "\ue012", "\ue014", "\ue015", "\ue010"  # keys, as Selenium writes them
# models of the puzzle: the page that has each
PUZZLERS = {"grid": "plain", "puzzles": "included"}


def model_of(name):
    """A model in float64 whose weights are those of its page."""
    if name in ("included", "puzzles"):
        model = load(INCLUDED if name == "included" else PUZZLES)
    elif name == "grid":
        shape = {"vocab_size": 532, "block_size": 16, "ponder_steps": 3}
        model = small_model(seed=4, method="grid", tie_word_embeddings=True, **shape)
    else:
        shape = {"vocab_size": 257, "block_size": 16, "ponder_steps": 2} | SHAPES[name]
        model = small_model(seed=3, **shape)
        model.lm_head.weight.data *= 4  # logits as large as those of a trained model
    for parameter in model.parameters():
        parameter.data = parameter.half().double()
    return model.double()


def write_run(folder, model, tokenizer=None):
    """A finished run of a model: what the page reads of one."""
    save(model.float(), folder)
    (tokenizer or Tokenizer.named("bytes")).save(folder / "tokenizer.json")
    config = replace(PRESETS["tiny"][0], tau=TAU, data="/home/<b>/text")
    (folder / "train.json").write_text(json.dumps({"config": asdict(config)}))
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of each model, by name."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explainer, "PUZZLES", write_run(folder / "p", model_of("grid"), TOKENIZER))
        for name in SHAPES:
            run = write_run(folder / name, model_of(name))
            main(["explainer", "--run", str(run)])
            made[name] = run / "report/explainer.html"
    made["included"] = folder / "included.html"
    explainer.Explainer(str(INCLUDED), TAU, made["included"]).draw()
    return made


# What a browser has and V8 alone has not. Messages arrive at once.
BROWSER = """
    const self = {};
    const atob = base64 =>
      Array.from(Uint8Array.fromBase64(base64), byte => String.fromCharCode(byte)).join("");
    class MessageChannel {
      port1 = {};
      port2 = {postMessage: () => this.port1.onmessage()};
    }
    const plain = (_, value) => ArrayBuffer.isView(value) ? Array.from(value) : value;
    let answer;
    async function ask(name, values) {
      const said = [], result = await requests[name](values, event => said.push(event));
      answer = JSON.stringify({result, said}, plain);
    }
"""


class Worker:
    """A worker of a page: it answers requests as worker.js says."""

    def __init__(self, page, part="text", weights="weights"):
        text = page.read_text("utf-8")
        find = lambda id: re.search(rf'id="{id}">(.*?)</script>', text, re.DOTALL)[1]  # noqa: E731
        self.engine = MiniRacer()
        self.engine.eval(BROWSER + find("worker"))
        self.payload = json.loads(find("payload"))[part]
        self.ask("start", **self.payload, weights=find(weights))

    def hear(self, name, **values):
        """What a request is answered, and what is said before."""
        self.engine.eval(f"answer = null; ask({json.dumps(name)}, {json.dumps(values)}); null")
        answer = json.loads(self.engine.eval("answer"))
        return answer.get("result"), answer["said"]

    def ask(self, name, **values):
        return self.hear(name, **values)[0]

    def read(self, text, tau=TAU, alpha=0):
        """Read a text -> the steps of its bytes, the summary, and that of tau = 0."""
        always, said = self.hear("read", ids=list(text.encode()), tau=tau, alpha=alpha)
        steps = [step for event in said for step in event.get("steps", [])]
        return steps, said[-1]["summary"], always


@pytest.fixture
def worker(pages):
    def worker_of(name="plain"):
        if name in PUZZLERS:
            return Worker(pages[PUZZLERS[name]], "puzzle", "puzzle-weights")
        return Worker(pages[name])

    return worker_of


class Page:
    """An open page: what tests do with it."""

    def __init__(self, driver):
        self.driver = driver

    def run(self, expression, *args):
        """The value of an expression, or of the promise that it is."""
        return self.driver.execute_script(f"return {expression}", *args)

    def all(self, css, what="x.innerText"):
        """An expression of each `x` that a selector finds."""
        return self.run(f"[...document.querySelectorAll(arguments[0])].map(x => {what})", css)

    def until(self, condition, *args):
        """Wait until an expression is true."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, 20, 0.02).until(lambda _: self.run(condition, *args))

    def says(self, id, text):
        """Wait until a text stands in an element."""
        self.until("document.getElementById(arguments[0]).innerText.includes(arguments[1])", id, text)

    def ready(self):
        self.until("document.body.dataset.state + document.body.dataset.puzzle === 'readyready'")

    def put(self, id, value):
        """Type into a field, or move a slider, and wait for what follows from it."""
        field = f"document.getElementById('{id}')"
        self.run(f"{field}.value = arguments[0]", value)
        self.run(f"{field}.dispatchEvent(new Event('input', {{bubbles: true}}))")
        self.ready()

    def text(self, id):
        return self.run("document.getElementById(arguments[0]).innerText", id)

    def find(self, css):
        return self.driver.find_element("css selector", css)

    def click(self, css):
        self.run("document.querySelector(arguments[0]).click()", css)

    def go(self, address):
        self.run("location.hash = arguments[0]", address)

    @property
    def state(self):
        return self.run("ponder.state")


@pytest.fixture
def show(chromium, pages):
    """Open the page of a model. At the end nothing complained."""

    def show_page(name="plain", address=""):
        chromium.get_log("browser")
        chromium.get("about:blank")  # another address of one page would not load it again
        chromium.get(pages[name].as_uri() + address)
        page = Page(chromium)
        page.ready()
        return page

    yield show_page
    asked = "return performance.getEntriesByType('resource').map(entry => entry.name)"
    assert all(name.startswith("blob:") for name in chromium.execute_script(asked))
    assert chromium.get_log("browser") == []


def growing(model, ids, tau, alpha):
    """ponder_token on a text that may still grow: yields logits (V) and steps of each token.

    As sample.py: stream: a context that outgrows the window starts anew from its last half.
    """
    context, done = [], 0
    for token in ids:
        context.append(token)
        if len(context) > model.config.block_size:
            context, done = context[-model.config.block_size // 2 :], 0
        if done == 0:
            cache = model.new_cache()
        while done < len(context):
            logits, steps = model.ponder_token(context[done], done, cache, tau, alpha)
            done += 1
        yield logits, steps


def largest_gap(rows, logits):
    return (torch.tensor(rows) - logits).abs().max().item()


# -- The numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SHAPES, "included", *PUZZLERS])
@torch.no_grad()
def test_same_numbers_as_pytorch(name, worker):
    """Catches any difference of the page's model from model.py: weights in another order, RoPE in
    another form, a bias on the wrong slot, heads that look at another's keys, a threshold that is
    missed, a word for another, a step on the grid that sees deeper ones; slot by slot and in
    parallel (logits of size 1 within 1e-4, and 1e-3 where the iteration ends before; K-hat equal)."""
    page, model, first = worker(name), model_of(name), WORDS if name in PUZZLERS else 0
    ids = torch.randint(257, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = list(explainer.TEXT.encode())[:40] if name == "included" else ids
    if name in PUZZLERS:
        text = lookup.line(Random(1))
        ids = [token - WORDS for token in TOKENIZER.encode(text)[:40]]
        assert [page.payload["words"][i] for i in ids] == text.split()[:40]
    start, different = torch.tensor([ids[:14]]) + first, set()
    shift = -8.0 if name in PUZZLERS else {"included": 6}.get(name, 0.5)
    none = -200.0 if name in PUZZLERS else 0.0  # where w rounds to 1, tau = 1 alone is a matter of rounding
    for tau, alpha in ((0.0, 0.0), (0.1, 0.0), (TAU, shift), (1.0, none)):
        words = [token + first for token in ids]
        logits, steps = zip(*growing(model, words, tau, alpha), strict=True)
        found = page.ask("decode", ids=ids, tau=tau, alpha=alpha)
        assert found["steps"] == list(steps), (tau, alpha)
        assert largest_gap(found["logits"], torch.stack(logits)[:, first:]) < 1e-4
        out = model(start, tau=tau, alpha=alpha)
        found = page.ask("iterate", ids=ids[:14], tau=tau, alpha=alpha)
        assert found["steps"] == out.steps[0].tolist()
        assert largest_gap(found["logits"], out.logits[0, :, first:]) < 1e-3
        assert tau or torch.stack(logits).std() > 0.5
        different |= {steps}
    assert len(different) == 4 and len(set(steps)) == 1  # tau = 1: no token takes a step


def test_passes_are_those_of_model_py(worker):
    """Catches an iteration that stops earlier or later than PonderLM.jacobi."""
    page, model, passes, ids = worker(), model_of("plain"), [], list(b"All the world")
    original = model.transform
    model.transform = lambda *args: passes.append(1) or original(*args)
    model.jacobi(torch.tensor([ids]), tau=TAU)
    assert page.ask("iterate", ids=ids, tau=TAU, alpha=0)["passes"] == len(passes) > 3
    steps, _, _ = page.read("All the world")
    ended, said = page.hear("jacobi")
    assert ended is True and len(said) == len(passes) and said[-1]["steps"] == steps
    assert max(map(max, said[-1]["error"])) < 1e-4 < max(map(max, said[2]["error"]))


def test_edits(worker):
    """Catches a cache that keeps what an edit took away or loses what it left, also beyond the window; a loss
    or steps of other bytes, and a tau = 0 that is not always K."""
    page, different = worker(), set()
    for text in ("To be", "To be, or not to be, that", "To be, or not to bee, that", "To be, or",
                 "To be or not to be", "x" * 60, "x" * 59 + "y", ""):  # fmt: skip
        ids = list(text.encode())
        found = page.ask("decode", ids=ids, tau=TAU, alpha=0)
        steps, shown, always = page.read(text)
        assert steps == found["steps"], text
        if text:
            logits = torch.tensor(found["logits"])
            losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
            assert shown["loss"] == pytest.approx(losses.item(), abs=1e-4)
            assert shown["steps"] == sum(steps) <= always["steps"] == 2 * len(ids)
        different |= {*steps}
    assert different == {0, 1, 2}


def test_what_the_page_says_of_its_text(worker, pages):
    """Catches a loss or a share of skipped slots, stated on the page, that the model does not have."""
    _, shown, always = worker("included").read(explainer.TEXT, tau=1e-4)
    said = " ".join(pages["included"].read_text("utf-8").split())
    assert f"where this one has {shown['loss']:.3f};" in said and "skips four slots in ten" in said
    assert round(10 * (1 - (shown["n"] + shown["steps"]) / (shown["n"] + always["steps"]))) == 4
    assert shown["loss"] == pytest.approx(always["loss"], abs=1e-3)


def test_an_opened_byte(worker):
    """Catches a byte whose s, w, predictions or attention are those of another byte or slot."""
    page, model, ids = worker(), model_of("plain"), list(b"What is it")
    page.read("What is it", tau=0)
    found = page.ask("open", t=4)
    with torch.no_grad():
        h, s, log_w = model.jacobi(torch.tensor([ids]), tau=0.0)
        expected = model.lm_head(h)[0, 4].softmax(-1).topk(5)
    assert found["s"] == pytest.approx(s[0, 4].tolist(), abs=1e-4)
    assert found["w"] == pytest.approx(log_w[0, 4].exp().tolist(), abs=1e-4)
    for k in range(3):
        best, p = zip(*found["alone"][k], strict=True)
        assert list(best) == expected.indices[k].tolist()
        assert p == pytest.approx(expected.values[k].tolist(), abs=1e-4)
    # slot k sees the slots of bytes 0..3, and its own up to k
    assert [len(layers[0][0]) for layers in found["seen"]] == [13, 14, 15]
    heads = [head for layers in found["seen"] for heads in layers for head in heads]
    assert len(heads) == 3 * 2 * 4 and all(sum(p) == pytest.approx(1, abs=1e-6) for p in heads)
    slots = [(i, k) for i in range(5) for k in range(3)]
    assert [(key["t"], key["k"]) for key in found["keys"]] == slots
    w = log_w[0, :5].exp().flatten().tolist()
    assert [key["w"] for key in found["keys"]] == pytest.approx(w, abs=1e-4)
    # where a text has outgrown the window (16) it is read anew, and a byte may take other steps
    assert len(set(page.read("It is a tale told by an idiot, full of sound")[0])) > 1
    for t in (20, 33, 43):
        keys = page.ask("open", t=t)["keys"]
        assert [key["t"] for key in keys if key["k"] == 0] == list(range(keys[0]["t"], t + 1))
        assert all((key["w"] == 1) == (key["k"] == 0) for key in keys)  # no other slot has a mask of 1


@torch.no_grad()
def test_continuation(worker):
    """Catches one that its seed does not repeat, that is not the model's, or that stays in the text."""
    page, model, ids = worker(), model_of("plain"), list(b"What is")

    def written(seed, temperature):
        page.read("What is")
        flags = {"ids": ids, "seed": seed, "temperature": temperature, "count": 30}
        ended, said = page.hear("more", **flags)
        assert ended == ("done" if len(said) == 30 else "end")
        return [token["id"] for token in said]

    assert written(1, 1) == written(1, 1) != written(2, 1)
    context = ids.copy()
    for n, (logits, _) in enumerate(growing(model, context, TAU, 0.0), 1):
        if n == len(context) < 37:
            context.append(int(logits.argmax()))
    greedy = context[7 : context.index(256) if 256 in context else None]
    assert len(greedy) > 3 and written(1, 0) == greedy
    assert page.ask("open", t=6)["probability"] is None  # nothing follows it yet


# -- The puzzle ------------------------------------------------------------------------------------


def chains_of(pairs):
    """The chains of a table, as words, the longest first."""
    begins = {a for a, _ in pairs} - {b for _, b in pairs}
    chains = [chain_from(letter, pairs) for letter in sorted(begins)]
    return sorted(chains, key=len, reverse=True)


@torch.no_grad()
def answer_of(model, pairs, letter, tau=1e-4):
    """What a model of the task says after "n letter" -> n, steps, the word, its probability."""
    (n,) = (len(chain) - 1 - chain.index(letter) for chain in chains_of(pairs) if letter in chain)
    ids = TOKENIZER.encode("".join(f" {word}" for word in [*pairs, n, letter]))
    *_, (logits, steps) = growing(model, ids, tau, 0.0)
    p, word = logits[WORDS:].softmax(-1).max(-1)
    return n, steps, TOKENIZER.decode([word.item() + WORDS]).decode().strip(), p.item()


def test_tables_are_those_of_the_task(worker):
    """Catches a table that the model was not trained on, and a seed that does not repeat one."""
    page, tables = worker("grid"), []
    for seed in range(40):
        pairs = json.loads(page.engine.eval(f"JSON.stringify(make_table({seed}))"))
        chains = chains_of(pairs)
        assert len(chains[0]) == 7 and sum(map(len, chains[1:])) == 10
        assert {"".join(pair) for chain in chains for pair in pairwise(chain)} == {*pairs}
        question = [*pairs, *["6", *chains[0][::6], "6"] * 12, "the", "end"]
        ids = [*TOKENIZER.encode("".join(f" {word}" for word in question)), TOKENIZER.end_of_text]
        assert lookup.lookups_asked(torch.tensor([ids]), TOKENIZER)[0, 14] == 6
        read = json.loads(page.engine.eval(f"JSON.stringify(read_table('{' '.join(pairs)}'))"))
        assert read["pairs"] == pairs and sorted(read["chains"]) == sorted(chains)
        tables.append((*pairs, len(chains[-1])))
    assert len({*tables}) == 40 and {lengths for *_, lengths in tables} == {2, 3}


TABLE, SIX = "cl dX bU ei jk gm lf mT ih aS fj kb hd", "c"  # of the page; asked for six lookups


@pytest.mark.parametrize(
    "change, message",
    [
        (("ei", "eii"), "“eii” is no pair: write a letter a to m"),
        (("ei", "eW"), "“eW” is no pair: .* an end, one of S,T,U,V,X,Y,Z."),
        (("ei ", ""), "^No pair begins with e: add one for each"),
        (("ei", "ei eU"), "ei and eU both begin with e: take one of them away"),
        (("aS", "aU"), "bU and aU both lead to U: lead one elsewhere"),
        (("mT", "mg"), "^g, m: they lead round in a circle. Lead one of them to an end"),
        (("ih", "ii"), "ei and ii both lead to i"),
        (("aS", "ac"), "^aclfjkbU takes 7 lookups, but 6 is the most"),
    ],
)
def test_wrong_tables(change, message, worker):
    """Catches a table that is no puzzle and is asked about, or refused for another reason."""
    text = json.dumps(TABLE.replace(*change))
    code = f"(() => {{ try {{ return !read_table({text}) }} catch (e) {{ return e.message }} }})()"
    assert re.search(message, worker("grid").engine.eval(code))


def test_the_first_puzzle():
    """Catches one that refutes the page: right by thinking, and wrong without from two lookups on."""
    model = model_of("puzzles")
    for letter in "abcdefghijklm":
        (end, n) = next(
            (c[-1], len(c) - 1 - c.index(letter)) for c in chains_of(TABLE.split()) if letter in c
        )
        assert answer_of(model, TABLE.split(), letter)[1:3] == (n - 1, end)
        assert (answer_of(model, TABLE.split(), letter, 1.0)[2] == end) == (n == 1)
    page = (ROOT / "lab/figures/templates/explainer.html").read_text("utf-8")
    assert TABLE.replace(" ", ".") in page and f'"six lookups", "{SIX}"' in page


@pytest.mark.parametrize("name", PUZZLERS)
def test_a_solved_puzzle(name, worker):
    """Catches an answer that is not the model's, and a look at slots that the grid hides."""
    page, model, pairs = worker(name), model_of(name), TABLE.split()
    for letter in "cilg":
        n, steps, word, p = answer_of(model, pairs, letter)
        ids = [page.payload["words"].index(word) for word in [*pairs, str(n), letter]]
        found = page.ask("solve", ids=ids, tau=1e-4)
        assert found["steps"] == steps and page.payload["words"][found["integrated"][0][0]] == word
        assert found["integrated"][0][1] == pytest.approx(p, abs=1e-3)
        assert name != "grid" or any(key["t"] < 13 and key["k"] for key in found["keys"])
        for k, layers in enumerate(found["seen"]):
            for head in (head for heads in layers for head in heads):
                pairs_seen = zip(head, found["keys"], strict=False)
                assert all((p > 0) == (key["k"] <= k) for p, key in pairs_seen)


class Puzzle(Page):
    """The puzzle of an open page, by the included model."""

    def __init__(self, page):
        super().__init__(page.driver)
        self.model = model_of("puzzles")

    def expect(self, pairs, letter, tau=1e-4):
        """Wait until this is what the page asks and says, as the model would. -> the steps"""
        n, steps, word, p = answer_of(self.model, pairs.split(), letter, tau)
        there = "document.body.dataset.puzzle === 'ready' && ponder.puzzle.ask === arguments[0]"
        self.until(there + " && ponder.puzzle.at > ponder.puzzle.thought.steps", letter)
        self.says("said", f" says {word} ({p:.2f})")
        thought, shown = self.run("ponder.puzzle.thought"), self.run("ponder.puzzle.tau")
        assert [self.table, shown] == [pairs, tau]
        assert [thought[name] for name in ("n", "steps", "answer")] == [n, steps, word]
        if (pairs, letter, tau) != (TABLE, SIX, 1e-4):  # what it begins with
            address = f"#puzzle={pairs.replace(' ', '.')}&ask={letter}&tau={tau:g}"
            self.until("location.hash === arguments[0]", address)
        assert self.text("read").split() == [*pairs.split(), str(n), letter, word]
        done = self.all("#thoughts td:nth-child(2)")
        assert done[steps + 1 :] == ["not run"] * (5 - steps) and "not run" not in done[: steps + 1]
        end = next(chain[-1] for chain in chains_of(pairs.split()) if letter in chain)
        assert ("That is right." in self.text("said")) == (word == end)
        return steps

    @property
    def table(self):
        return self.run("ponder.puzzle.table.pairs.join(' ')")

    @property
    def best(self):
        """The pair that each step looks at most."""
        looks = self.run("ponder.puzzle.thought.looks")
        return [TABLE.split()[look.index(max(look))] for look in looks]

    def counts(self, n):
        """Wait for a count of n questions -> (lookups, steps, right) of each, as shown."""
        at_tau = "[...ponder.puzzle.asked.get(ponder.puzzle.tau)?.values() ?? []]"
        self.until(f"{at_tau}.length === {n}")
        asked = self.run(f"{at_tau}.map(({{n, steps, right}}) => [n, steps, right])")
        *rows, _ = [row.split("\t")[1:] for row in self.text("staircase").split("\n")]
        for steps, row in zip(range(5, -1, -1), rows, strict=True):
            for n, cell in enumerate(row, 1):
                here = [right for *place, right in asked if place == [n, steps]]
                whole = str(sum(here)) if all(here) else f"{sum(here)}/{len(here)}"
                assert cell == (whole if here else "·"), (n, steps)
        right, steps = sum(one[2] for one in asked), sum(one[1] for one in asked) / len(asked)
        assert f": {right} of {len(asked)} right, {steps:.1f} steps each." in self.text("tally")
        return asked


MOTION, STILL = (
    ("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-reduced-motion", "value": value}]})
    for value in ("", "reduce")
)


@pytest.fixture
def puzzle(chromium, show):
    """Open the puzzle, for a reader who wants no motion."""
    chromium.execute_cdp_cmd(*STILL)
    yield lambda address="": Puzzle(show("included", address))
    chromium.execute_cdp_cmd(*MOTION)


def test_asking(puzzle):
    """Catches a page that waits for its reader, or moves although he wants none; a click, key or number
    that asks something else, and a step whose arrow or pair is not the one with the most attention."""
    page = puzzle()
    page.driver.execute_cdp_cmd(*MOTION)
    page.click("#asked a")
    page.until("0 < ponder.puzzle.at && ponder.puzzle.at <= ponder.puzzle.thought.steps")
    steps = page.expect(TABLE, SIX)
    page.driver.execute_cdp_cmd(*STILL)
    assert page.all("#thoughts td:nth-child(2)", "x.innerText.split(' ')[0]")[: steps + 1] == page.best
    widths = page.all(".arrow", "+x.style.getPropertyValue('--a')")
    assert TABLE.split()[widths.index(max(widths))] == page.best[-1]
    page.find("[data-letter=b]").click()
    page.expect(TABLE, "b")
    page.find("[data-letter=b]").send_keys(RIGHT)
    page.expect(TABLE, "e")
    assert page.run("document.activeElement.dataset.letter") == "e"
    for letter in "ji":  # the next one that is three lookups away
        page.click('#numbers [value="3"]')
        page.expect(TABLE, letter)
    page.click("#walk-again")
    page.says("said", "The model has read")
    page.click("#walk-step")
    assert page.text("said") == f"Lookup 1: {page.best[0]}."
    assert page.text("why").startswith("It goes on: w of step 1 is ")
    assert page.text("asks").startswith("Then “3 i” asks: start at i, follow three pairs")
    page.find("[data-letter=i]").send_keys(DOWN)  # to another chain, in its column if it is as long
    page.expect(TABLE, "g")
    page.click("#asked a")
    page.expect(TABLE, SIX)
    page.until("location.hash.includes(arguments[0])", f"ask={SIX}")
    page.run("history.back()")
    page.expect(TABLE, "g")


def test_tau_of_the_puzzle(puzzle):
    """Catches a threshold or switch that stops nothing or everything, and a count of other thresholds."""
    page = puzzle()
    pressed = lambda: page.all("#think, #think-not", "x.ariaPressed")  # noqa: E731
    page.expect(TABLE, SIX)
    assert pressed() == ["true", "false"] and page.run("loading.hidden")
    page.click("#think-not")
    assert page.expect(TABLE, SIX, 1) == 0
    assert pressed() == ["false", "true"] and "That is wrong" in page.text("said")
    page.click("#many")
    assert {right for *_, right in page.counts(31)} == {True, False}
    page.put("puzzle-tau", 30)
    assert page.expect(TABLE, SIX, 0) == 5
    lines = page.text("tally").splitlines()
    assert [line.split(":")[0] for line in lines] == ["τ = 0", "Thinking", "Not thinking"]
    assert lines[0].startswith("τ = 0: 1 of 1 right, 5.0 steps")
    page.click("#think")
    assert page.expect(TABLE, SIX) == 5


@pytest.mark.slow
def test_other_tables(puzzle):
    """Catches an address or a table of one's own that is taken although it is wrong, or not when mended."""
    page = puzzle("#puzzle=ab.bc&ask=b")
    assert page.table == TABLE and page.text("own-note").startswith("No pair begins with c, d, e")
    page = puzzle("#puzzle=ab.bc.cd.de.ef.fS.gh.hi.iU.jk.kl.lV.mX&ask=k&tau=0.5")
    page.expect(table := "ab bc cd de ef fS gh hi iU jk kl lV mX", "k", 0.5)
    page.go("puzzle=a%&ask=%E0%A4%A&tau=x")
    page.says("own-note", "“a” is no pair")
    for wrong in ("ask=W", "ask=", "tau=-1", "tau=2", "tau=", "&&=%", "ask=ab"):
        page.go(wrong)
        page.run("new Promise(done => setTimeout(done, 50))")
    page.put("own", TABLE.replace("ei", "eb"))
    assert "bh" not in page.text("own-note") and "lead to b" in page.text("own-note")
    assert [page.table, *page.run("[ponder.puzzle.ask, ponder.puzzle.tau]")] == [table, "k", 0.5]
    page.driver.find_element("link text", "one lookup, thinking on for nothing").click()
    page.expect(TABLE, "a", 0)
    page.click("#think")
    page.put("own", other := "ab bc cS de ef fT gh hi iU jk kl lm mV")  # of another form than the task's
    page.expect(other, "j")
    assert "was not trained on such tables" in page.text("own-note")
    page.put("own", TABLE)
    page.expect(TABLE, SIX)
    assert page.text("own-note") == ""
    page.click("#new")
    page.until("ponder.puzzle.table.pairs.join(' ') !== arguments[0]", TABLE)
    page.ready()
    page.expect(page.table, page.run("ponder.puzzle.ask"))


# -- What a reader can do --------------------------------------------------------------------------


def test_a_text(show):
    """Catches a slider that changes nothing or too much, shades, table and legend that do not follow; a click
    or key that opens another byte, and attention of another slot."""
    page = show()
    page.put("input", "What is the city")
    before, n, K = page.state, 16, 2
    assert before["tau"] == TAU and before["always"]["steps"] == n * K
    assert page.all("#text span", "+x.style.getPropertyValue('--p')") == [30 * k for k in before["steps"]]
    assert page.text("cost-shown").split("\t")[2] == str(n + before["shown"]["steps"])
    page.put("alpha", 3)
    more = page.state["shown"]["steps"]
    page.put("alpha", -3)
    assert page.state["shown"]["steps"] < before["shown"]["steps"] < more
    page.click("#reset")
    page.ready()
    assert page.state["shown"] == before["shown"]
    page.put("tau", 0)
    zero = page.state
    assert zero["tau"] == 0 and zero["shown"] == zero["always"] == before["always"]
    assert "0 0 bytes 1 0 bytes 2 16 bytes" in page.text("legend")
    page.click("#text span:nth-of-type(5)")
    page.says("opened", "Byte 4: ␣")
    page.find("#text").send_keys(LEFT)
    page.says("opened", "Byte 3: t")
    page.find("#text").send_keys(END)
    page.says("opened", "Nothing follows")
    page.put("slot", 0)
    shown = [float(re.search("attention ([^,]*)", x)[1]) for x in page.all("#keys .attended", "x.title")]
    assert len(shown) == 15 * 3 + 1 and sum(shown) == pytest.approx(1, abs=0.02)


def test_both_iterations(show):
    """Catches grids that do not end at the same states, and a count of passes that is not of the slots."""
    page = show()
    page.put("input", "What is it")
    slots = page.state["shown"]["steps"] + 10
    settled = lambda grid: page.run(f"document.querySelectorAll('#{grid} .settled').length")  # noqa: E731
    assert page.run("+document.getElementById('pass').max") == slots
    page.click("#passes-step")
    page.says("parallel-state", "pass 1;")
    assert settled("sequential") == 1
    page.put("pass", slots)
    found = {"ids": list(b"What is it"), "tau": TAU, "alpha": 0}
    passes = page.run("ponder.request('iterate', arguments[0])", found)["passes"]
    page.says("parallel-state", f"pass {passes}: there after {passes};")
    assert settled("parallel") == settled("sequential") == slots
    assert "K̂ wrong at 0 bytes" in page.text("parallel-state")


def test_link(show):
    """Catches a text, tau or byte that the address leaves out or does not bring back."""
    page = show()
    page.driver.execute_script(
        "window.written = 0; const to = history.replaceState.bind(history);"
        "history.replaceState = (...x) => { written++; to(...x); }"
    )
    for n in range(20):
        page.put("input", "To be, or no"[: n % 12 + 1])
    page.put("tau", 40)
    page.put("alpha", 3)
    page.click("#text span:nth-of-type(4)")
    page.until("location.hash.includes('byte=3')")
    address, before = page.run("location.hash"), page.state
    assert page.run("written") < 20 and f"text-tau={before['tau']:g}" in address and "alpha=3" in address
    page = show(address=address)
    page.says("opened", "Byte 3: ")
    assert all(page.state[name] == before[name] for name in ("ids", "tau", "alpha"))
    page.go(f"puzzle={TABLE.replace(' ', '.')}&ask={SIX}&tau=0.1")
    page.until("ponder.state.alpha === 0")
    page.ready()
    assert page.run("input.value === input.defaultValue && !ponder.state.chosen")
    page.run("document.getElementById('alpha').value = 2")
    page.run("document.getElementById('alpha').dispatchEvent(new Event('input'))")
    page.click("#copy")
    assert "alpha=2" in page.run("location.hash")  # at once, since it is this that is copied
    page.until("document.getElementById('copy').innerText !== 'Copy link'")


def test_requests_that_overtake(show):
    """Catches a continuation that begins before the text has been read, of a text that has gone since."""
    page = show()
    page.put("input", "What is the city")
    expected = page.state
    page.driver.execute_script("""
        const input = document.getElementById("input"), write = document.getElementById("write");
        const type = text => { input.value = text; input.dispatchEvent(new Event("input")); };
        type("Another text, which takes a while to read".repeat(3));
        write.click();
        type("What is the city");
    """)
    page.ready()
    assert page.text("write") == "Continue the text" and page.text("continuation") == ""
    assert all(page.state[name] == expected[name] for name in ("steps", "shown", "always"))


def test_examples(show):
    """Catches an example that does nothing, or is of a field that is not there: an error of the page."""
    page = show()
    assert len(page.all("[data-example]")) >= 15
    page.click("[data-example]")
    page.ready()
    assert bytes(page.state["ids"]).startswith(b"Return the number of elements")
    page.all("[data-example]", "x.click()")
    page.ready()


def test_strange_texts(show):
    """Catches markup that is run, a character that is lost or torn, an empty text that stops the page; and
    links to code that a page on GitHub cannot follow, or that leave a clone."""
    page = show()
    page.put("input", "<b>bold</b></script>&amp;\n\x00 é € 😀 \u202eabc")
    assert page.all("#text *:not(span)") == []
    seen = page.run("document.getElementById('text').textContent")
    assert seen.startswith("<b>bold</b></script>&amp;↵\n␀ ·é ··€ ···😀 ")
    page.put("input", "")
    assert page.state["at"] == -1 and page.text("opened") == ""
    page.click("#write")  # from the beginning of a document
    page.until("document.getElementById('continuation').children.length > 3")
    link = "on_github(arguments[0], '/repo/explainer.html', 'docs/lookup.md')"
    assert page.run(link, "me.github.io") == "//github.com/me/repo/blob/main/docs/lookup.md"
    assert page.run(link, "example.org") is None
    assert page.run("document.querySelector('a.code').protocol") == "file:"


def test_width_of_a_telephone(puzzle, width=320):
    """Catches a page that scrolls sideways, and a first puzzle that a telephone shows half of."""
    page = puzzle()
    size = {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert page.run("document.documentElement.scrollWidth") <= width
        assert 0 < max(page.all(".letter", "x.getBoundingClientRect().right")) <= width
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


LOOKS = {  # what a reader's system asks for: media of the page
    "forced colours": {"features": [{"name": "forced-colors", "value": "active"}]},
    "printed from dark": {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]},
}


@pytest.mark.parametrize("look", LOOKS)
def test_looks(show, look):
    """Catches shading that forced colours take away, and a page printed in the colours of a screen."""
    page = show("included")
    style = lambda css, name: page.run(f"getComputedStyle(document.querySelector('{css}'))['{name}']")  # noqa: E731
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", LOOKS[look])
    try:
        by_steps = {}  # a pixel of the page, since a style does not tell what is forced
        for byte in page.driver.find_elements("css selector", "#text span"):
            if (steps := byte.get_dom_attribute("style")) not in by_steps:
                drawn = Image.open(io.BytesIO(byte.screenshot_as_png)).convert("RGB")
                by_steps[steps] = drawn.getpixel((drawn.width // 2, 1))
        assert len(by_steps) > 1 and len({*by_steps.values()}) == len(by_steps)
        if look == "printed from dark":
            assert style("body", "color") == "rgb(26, 26, 26)" and style("#strip", "position") == "static"
        assert style("#think", "background-color") != style("#think-not", "background-color")
    finally:
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


@pytest.mark.parametrize("lacks", ["Array.prototype.findLastIndex", "window.Worker"])
def test_a_browser_that_cannot(chromium, pages, lacks):
    """Catches a page that says nothing where its model does not run."""
    before = {"source": f"delete {lacks}"}
    script = chromium.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", before)
    try:
        chromium.get("about:blank")
        chromium.get(pages["plain"].as_uri())
        page = Page(chromium)
        page.says("loading", "The model does not run here (")
        assert page.find("#loading").is_displayed()
    finally:
        chromium.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
        chromium.get_log("browser")


# -- The file --------------------------------------------------------------------------------------


def test_page_is_self_contained(pages):
    """Catches a page that names another place or a path of its maker, or links to nothing."""
    text = pages["plain"].read_text(encoding="utf-8")
    assert "http" not in text and "/home/" not in text and text.count("</script>") == 5
    links = re.findall(r'class="code" href="([^"]*)">([^:]*): (\w*)</a>', text)
    assert len(links) > 10
    for href, file, name in links:
        assert (pages["plain"].parent / href).resolve() == ROOT / file
        assert re.search(rf"(def|class) {name}\b", (ROOT / file).read_text("utf-8")), (file, name)


def test_refusals(tmp_path):
    """Catches a page of a model that it cannot run: another method, other tokens."""
    page = tmp_path / "page.html"
    assert 'url=explainer.html"' in (ROOT / "docs/index.html").read_text("utf-8")
    for what, shape, only in (
        ("method vanilla", dict(vocab_size=257, ponder_steps=0), "ponderlm3"),
        ("vocabulary 300", dict(vocab_size=300), "257"),
    ):
        run = write_run(tmp_path / what, small_model(**shape))
        with pytest.raises(UserError, match=f"has the {what}; the page runs {only} alone"):
            explainer.Explainer(str(run), out=page).draw()
