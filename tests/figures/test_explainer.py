"""The page that runs two models: their numbers against PyTorch's, and one pass through a browser.

The numbers come from V8, in this process, which runs the page's worker as it stands in the page. Models are
tiny and random, with weights that float16 holds exactly; and the included ones.
"""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch
from lab_helpers import small_model
from py_mini_racer import MiniRacer

from common import UserError
from lab.corpora import lookup
from lab.figures import explainer
from lab.figures.__main__ import main
from lab.figures.puzzle import chain_from, solve
from lab.interop.weights import INCLUDED, PUZZLES, load, save
from sample import stream
from tokenizer import Tokenizer
from train import preset_settings

ROOT = Path(explainer.__file__).parents[2]
TAU = 0.3
SHAPES = {
    "plain": dict(router_offset=(0.0, 0.5, -1.0)),
    # everything that a config may have beside: 2 of 4 heads share keys in both
    "special": dict(ponder_steps=3, tie_word_embeddings=True, reread=True, embed_scale=3.0, head_dim=6)
    | dict(router_offset=(1.0, 0.0, 0.0, 0.0)),
}
WORDS = explainer.BYTES  # the first word of a puzzle
TOKENIZER = lookup.tokenizer()
LEFT, RIGHT = "\ue012", "\ue014"  # keys, as Selenium writes them
PUZZLERS = {"grid": "plain", "puzzles": "included"}  # models of the puzzle: the page that has each
TABLE, SIX = "cl dX bU ei jk gm lf mT ih aS fj kb hd", "c"  # of the page; asked for six lookups


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
    config = replace(preset_settings("tiny")[0], tau=TAU, data="/home/<b>/text")
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
# Logits and steps of all tokens, as the model decodes and by its Jacobi iteration.
ASKED = """
    requests.decode = ({ids, tau, alpha}) => {
      const {tokens} = new Reading(tau, alpha).all(ids);
      return {logits: tokens.map(({logits}) => logits), steps: tokens.map(({steps}) => steps)};
    };
    requests.iterate = ({ids, tau, alpha}) => {
      const passes = [...model.jacobi(ids, tau, alpha)], {h, s, log_w} = passes.at(-1);
      const steps = log_w.map(row => stop_step(row, tau));
      const states = h.map((h_t, t) => model.integrate(h_t.slice(0, steps[t] + 1), s[t]));
      return {logits: states.map(state => model.lm_head(state)), steps, passes: passes.length};
    };
"""


class Worker:
    """A worker of a page: it answers requests as worker.js says."""

    def __init__(self, page, part="text", weights="weights"):
        text = page.read_text("utf-8")
        find = lambda id: re.search(rf'id="{id}">(.*?)</script>', text, re.DOTALL)[1]  # noqa: E731
        self.engine = MiniRacer()
        self.engine.eval(BROWSER + find("worker") + ASKED)
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
    """A worker of the model with this name."""
    place = {name: (pages[page], "puzzle", "puzzle-weights") for name, page in PUZZLERS.items()}
    return lambda name="plain": Worker(*place.get(name, (pages.get(name),)))


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

    def press(self, css, key):
        self.driver.find_element("css selector", css).send_keys(key)

    def click(self, css):
        self.run("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true, cancelable: true}))",
                 self.driver.find_element("css selector", css))  # fmt: skip

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


def decoded(model, ids, tau, alpha=0.0):
    """A text of any length, token by token as sample.py reads it -> the steps of each, logits (T, V)."""
    following, logits = iter([*ids[1:], 0]), []
    choose = lambda found: logits.append(found) or next(following)  # noqa: E731
    with patch("sample.make_sampler", lambda options: choose):
        pairs = list(stream(model, ids[:1], len(ids), tau=tau, alpha=alpha))
    return [steps for _, steps in pairs], torch.stack(logits)


# -- The numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SHAPES, "included", *PUZZLERS])
@torch.no_grad()
def test_same_numbers_as_pytorch(name, worker):
    """Catches any difference of the page's model from model.py, slot by slot and in parallel: logits of size
    1 within 1e-4, and 1e-3 where the iteration ends before; K-hat and the number of passes equal."""
    page, model, first = worker(name), model_of(name), WORDS if name in PUZZLERS else 0
    ids = torch.randint(257, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = list(explainer.TEXT.encode())[:40] if name == "included" else ids
    if name in PUZZLERS:
        text = lookup.line(Random(1))
        ids = [token - WORDS for token in TOKENIZER.encode(text)[:40]]
        assert [page.payload["words"][i] for i in ids] == text.split()[:40]
    start, different, passes = torch.tensor([ids[:14]]) + first, set(), []
    model.model.norm.register_forward_hook(lambda *_: passes.append(1))
    shift = -8.0 if name in PUZZLERS else {"included": 6}.get(name, 0.5)
    none = -200.0 if name in PUZZLERS else 0.0  # where w rounds to 1, tau = 1 alone is a matter of rounding
    for tau, alpha in ((0.0, 0.0), (0.1, 0.0), (TAU, shift), (1.0, none)):
        steps, logits = decoded(model, [token + first for token in ids], tau, alpha)
        found = page.ask("decode", ids=ids, tau=tau, alpha=alpha)
        assert found["steps"] == steps, (tau, alpha)
        assert (torch.tensor(found["logits"]) - logits[:, first:]).abs().max() < 1e-4
        passes.clear()
        out = model(start, tau=tau, alpha=alpha)
        found = page.ask("iterate", ids=ids[:14], tau=tau, alpha=alpha)
        assert found["steps"] == out.steps[0].tolist()
        assert name in PUZZLERS or found["passes"] == len(passes)
        assert (torch.tensor(found["logits"]) - out.logits[0, :, first:]).abs().max() < 1e-3
        assert tau or logits.std() > 0.5
        different |= {(*steps,)}
    assert len(different) == 4 and len(set(steps)) == 1  # tau = 1: no token takes a step


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
    assert f"and the model with steps {shown['loss']:.3f}." in said and "skips four slots in ten" in said
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
    slots = [(i, k) for i in range(5) for k in range(3)]
    assert [(key["t"], key["k"]) for key in found["keys"]] == slots
    w = log_w[0, :5].exp().flatten().tolist()
    assert [key["w"] for key in found["keys"]] == pytest.approx(w, abs=1e-4)
    # where a text has outgrown the window (16) it is read anew, and a byte may take other steps
    page.read("It is a tale told by an idiot, full of sound")
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
    greedy = [token for token, _ in stream(model, ids, 30, temperature=0, tau=TAU, ends={256})]
    assert len(greedy) > 3 and written(1, 0) == [token for token in greedy if token != 256]
    assert page.ask("open", t=6)["probability"] is None  # nothing follows it yet


# -- The puzzle ------------------------------------------------------------------------------------


@torch.no_grad()
def answer_of(model, pairs, letter, tau=1e-4):
    """What a model of the task says of a letter -> the words that it reads, steps, its word, and how sure."""
    words = [*pairs, str(len(chain_from(letter, pairs)) - 1), letter]
    ids = TOKENIZER.encode("".join(f" {word}" for word in words))
    steps, logits = decoded(model, ids, tau)
    p, word = logits[-1, WORDS:].softmax(-1).max(-1)
    return words, steps[-1], TOKENIZER.decode([word.item() + WORDS]).decode().strip(), p.item()


def test_tables(worker):
    """Catches a table that the model was not trained on, a seed that does not repeat one, and one that is no
    puzzle and is asked about."""
    read = """text => {
        try { return JSON.stringify(read_table(text)); } catch (error) { return error.message; }
    }"""
    engine, tables = worker("grid").engine, set()
    read_table = lambda text: engine.eval(f"({read})({json.dumps(text)})")  # noqa: E731
    for seed in range(40):
        pairs = json.loads(engine.eval(f"JSON.stringify(make_table({seed}))"))
        found = json.loads(read_table(" ".join(pairs)))
        begins = {a for a, _ in pairs} - {b for _, b in pairs}
        chains = sorted(chain_from(letter, pairs) for letter in begins)
        assert len(pairs) == 13 and len(chains) == 4 and max(map(len, chains)) == 7
        assert found["pairs"] == pairs and sorted(found["chains"]) == chains and found["usual"]
        tables.add((*pairs,))
    assert len(tables) == 40
    for old, new, named in (
        ("ei", "eii", "eii"),
        ("ei", "eW", "eW"),
        ("ei ", "", "begins with e"),
        ("ei", "ei eU", "ei and eU"),
        ("aS", "aU", "bU and aU"),
        ("mT", "mg", "g, m"),  # in a circle
        ("aS", "ac", "aclfjkbU"),  # too long
    ):
        assert named in read_table(TABLE.replace(old, new))


# -- What a reader can do --------------------------------------------------------------------------


def test_asking(show):
    """Catches a first puzzle that refutes the page: right by thinking, wrong without; a click, key or switch
    that asks something else, steps, attention or an answer that are not the model's, and a count of other
    questions or thresholds."""
    page, model = show("included"), model_of("puzzles")

    def expect(letter, tau=1e-4, pairs=TABLE):
        """Wait until the page says of a question what the model does."""
        done = "document.body.dataset.puzzle === 'ready' && ponder.puzzle.at > ponder.puzzle.thought.steps"
        page.until(f"{done} && ponder.puzzle.ask + ponder.puzzle.tau === arguments[0] + arguments[1]",
                   letter, tau)  # fmt: skip
        words, steps, answer, p = answer_of(model, pairs.split(), letter, tau)
        page.says("said", f" says {answer} ({p:.2f})")
        assert ("That is right." in page.text("said")) == (answer == chain_from(letter, pairs.split())[-1])
        assert page.run("ponder.puzzle.table.pairs.join(' ')") == pairs
        assert page.text("read").split() == [*words, answer]
        looked_up = solve(model, TOKENIZER, pairs.split(), letter, tau).looked_up()
        shown = [f"{pair} {share:.2f}" for pair, share in looked_up] + ["not run"] * (5 - steps)
        assert page.all("#thoughts td:nth-child(2)") == shown

    expect(SIX)
    assert page.text("said").endswith("That is right.")
    page.click("[data-letter=b]")
    expect("b")
    page.press("[data-letter=b]", RIGHT)
    expect("e")
    for letter in "ji":  # the next one that is three lookups away
        page.click('#numbers [value="3"]')
        expect(letter)
    page.click("#asked a")
    expect(SIX)
    page.click("#think-not")
    expect(SIX, 1)
    assert "That is wrong" in page.text("said")
    page.click("#many")
    at_tau = "[...ponder.puzzle.asked.get(ponder.puzzle.tau)?.values() ?? []]"
    page.until(f"{at_tau}.length === 31")
    right = sum(page.run(f"{at_tau}.map(one => one.right)"))
    assert 0 < right < 31
    page.put("puzzle-tau", 30)
    expect(SIX, 0)
    counted = [line.split(" right")[0] for line in page.text("tally").splitlines()]
    assert counted[0] == "τ = 0: 1 of 1" and counted[2] == f"Not thinking: {right} of 31"
    page.click("#think")
    expect(SIX)
    table = "ab bc cd de ef fS gh hi iU jk kl lV mX"
    page.run("location.hash = arguments[0]", f"puzzle={table.replace(' ', '.')}&ask=k&tau=0.5")
    expect("k", 0.5, table)
    for wrong in ("puzzle=a%&ask=%E0%A4%A&tau=x", "ask=W", "tau=-1", "tau=2"):
        page.run("location.hash = arguments[0]", wrong)
        page.run("new Promise(done => setTimeout(done, 50))")
    page.put("own", TABLE.replace("ei", "eb"))
    page.says("own-note", "lead to b")
    expect("k", 0.5, table)
    page.put("own", TABLE)
    expect(SIX, 0.5)
    assert page.text("own-note") == ""


def test_a_text(show):
    """Catches shades, costs or attention that are not the model's, a slider, click or key that does something
    else, an address that does not bring all back, and a text that is run or torn."""
    page, ids = show(), list(b"What is the city")
    steps, _ = decoded(model_of("plain"), ids, TAU)
    page.put("input", "What is the city")
    before = page.state
    assert before["steps"] == steps and before["always"]["steps"] == 32
    assert page.all("#text span", "+x.style.getPropertyValue('--p')") == [30 * k for k in steps]
    assert page.text("cost-shown").split("\t")[2] == str(16 + sum(steps))
    page.put("pass", 16 + sum(steps))  # both iterations end at the same states
    page.says("parallel-state", "there after")
    for way in ("#parallel", "#sequential"):
        assert len(page.all(f"{way} .settled")) == 16 + sum(steps)
    assert "wrong at 0 bytes" in page.text("parallel-state")
    page.put("alpha", 3)
    assert page.state["shown"]["steps"] > sum(steps)
    page.click("#reset")
    page.ready()
    assert page.state["shown"] == before["shown"]
    page.put("tau", 0)
    assert page.state["shown"] == page.state["always"] == before["always"]
    page.click("#text span:nth-of-type(5)")
    page.says("opened", "Byte 4: ␣")
    page.press("#text", LEFT)
    page.says("opened", "Byte 3: t")
    page.put("slot", 0)
    shown = [float(re.search("attention ([^,]*)", x)[1]) for x in page.all("#keys .attended", "x.title")]
    assert len(shown) == 3 * 3 + 1 and sum(shown) == pytest.approx(1, abs=0.02)
    page.put("tau", 40)
    page.until("location.hash.includes(`text-tau=${ponder.state.tau}`)")
    address, before = page.run("location.hash"), page.state
    page = show(address=address)
    page.says("opened", "Byte 3: t")
    assert all(page.state[name] == before[name] for name in ("ids", "steps", "tau", "alpha"))
    page.driver.execute_script("""
        const input = document.getElementById("input"), write = document.getElementById("write");
        const type = text => { input.value = text; input.dispatchEvent(new Event("input")); };
        type("Another text, which takes a while to read".repeat(3));
        write.click();
        type("What is the city");
    """)  # requests that overtake others
    page.ready()
    assert page.text("continuation") == ""
    assert all(page.state[name] == before[name] for name in ("steps", "shown", "always"))
    page.put("input", "<b>bold</b></script>&amp;\n\x00 é € 😀 \u202eabc")
    assert page.all("#text *:not(span)") == []
    seen = page.run("document.getElementById('text').textContent")
    assert seen.startswith("<b>bold</b></script>&amp;↵\n␀ ·é ··€ ···😀 ")
    page.put("input", "")
    page.click("#write")  # from the beginning of a document
    page.until("document.getElementById('continuation').children.length > 3")
    page.all("[data-example]", "x.click()")
    page.ready()


def test_a_browser_that_cannot(chromium, pages):
    """Catches a page that says nothing where its model does not run."""
    before = {"source": "delete window.Worker"}
    script = chromium.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", before)
    chromium.get(pages["plain"].as_uri())
    Page(chromium).says("loading", "The model does not run here (")
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


@pytest.mark.parametrize("shape, named", [(dict(ponder_steps=0), "vanilla"), (dict(vocab_size=300), "300")])
def test_refusals(shape, named, tmp_path):
    """Catches a page of a model that it cannot run: another method, other tokens."""
    run = write_run(tmp_path / "run", small_model(**dict(vocab_size=257) | shape))
    with pytest.raises(UserError, match=named):
        explainer.Explainer(str(run), out=tmp_path / "page.html").draw()
