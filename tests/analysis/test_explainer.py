"""The page that runs a model: its numbers against PyTorch's, and what a reader can do with it.

The numbers come from V8, in this process, which runs the page's worker as it stands in the page.
What takes a click is tried in Chromium. Models are tiny and random, with weights that float16 holds
exactly; and the included one.
"""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from conftest import small_model
from py_mini_racer import MiniRacer

import analyze
from analysis import explainer
from corpus.tokenizers import Tokenizer
from interop import INCLUDED, load, save
from runtime import UserError
from training.config import PRESETS

ROOT = Path(explainer.__file__).parent.parent
TAU = 0.3
SHAPES = {
    "plain": dict(router_offset=(0.0, 0.5, -1.0)),
    # everything that a config may have beside: 2 of 4 heads share keys in both
    "special": dict(
        ponder_steps=3,
        tie_word_embeddings=True,
        feedback_scale=0.75,
        embed_scale=3.0,
        head_dim=6,
    ),
}


def model_of(name):
    """A model in float64 whose weights are those of its page."""
    if name == "included":
        model = load(INCLUDED)
    else:
        shape = {"vocab_size": 257, "block_size": 16, "ponder_steps": 2} | SHAPES[name]
        model = small_model(seed=3, **shape)
        model.lm_head.weight.data *= 4  # logits as large as those of a trained model
    for parameter in model.parameters():
        parameter.data = parameter.half().double()
    return model.double()


def write_run(folder, model, tokenizer=None, **changes):
    """A finished run of a model: what the page reads of one."""
    save(model.float(), folder)
    (tokenizer or Tokenizer.bytes()).save(folder / "tokenizer.json")
    config = replace(PRESETS["tiny"], model=model.config, tau=TAU, data="/home/<b>/text", **changes)
    corpus = {"name": "text", "train_tokens": 1, "val_tokens": 1, "sha256": ""}
    corpus |= {"val_sha256": "", "tokenizer": ""}
    (folder / "train.json").write_text(json.dumps({"config": asdict(config), "corpus": corpus}))
    part = {"loss": 2.25, "steps": 1.5, "truncated": [2.5, 2.25, 2.25]}
    part |= {"weight": [], "alone": [], "stopped": []}
    results = dict.fromkeys(("trained", "fixed", "hard", "permuted"), part)
    results |= {"chosen": None, "R": 2, "unigram_entropy": 3.0}
    (folder / "results.json").write_text(json.dumps(results))
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of each model, by name."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    for name in SHAPES:
        run = write_run(folder / name, model_of(name))
        analyze.main(["explainer", "--run", str(run)])
        made[name] = run / "report/explainer.html"
    made["included"] = folder / "included.html"
    explainer.Explainer(str(INCLUDED), TAU, made["included"]).draw()
    return made


# What a browser has and V8 alone has not. Messages arrive at once.
BROWSER = """
    const self = {}, performance = {now: Date.now};
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
    """The worker of a page: it answers requests as worker.js says."""

    def __init__(self, page):
        text = page.read_text("utf-8")
        find = lambda id: re.search(rf'id="{id}">(.*?)</script>', text, re.DOTALL)[1]  # noqa: E731
        self.engine = MiniRacer()
        self.engine.eval(BROWSER + find("worker"))
        self.ask("start", **json.loads(find("payload")), weights=find("weights"))

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
    return lambda name="plain": Worker(pages[name])


class Page:
    """An open page: what tests do with it."""

    def __init__(self, driver):
        self.driver = driver

    def run(self, script, *args):
        """The value of a script, or of the promise that it returns."""
        return self.driver.execute_script(script, *args)

    def ask(self, name, **values):
        return self.run("return ponder.request(arguments[0], arguments[1])", name, values)

    def until(self, condition, *args):
        """Wait until an expression is true."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, 20, 0.02).until(lambda _: self.run(f"return {condition}", *args))

    def ready(self):
        self.until("document.body.dataset.state === 'ready'")

    def put(self, id, value):
        """Type into a field, or move a slider, and wait for what follows from it."""
        field = f"document.getElementById('{id}')"
        self.run(f"{field}.value = arguments[0]", value)
        self.run(f"{field}.dispatchEvent(new Event('input', {{bubbles: true}}))")
        self.ready()

    def text(self, id):
        return self.run("return document.getElementById(arguments[0]).innerText", id)

    def click(self, id):
        self.run("document.getElementById(arguments[0]).click()", id)

    @property
    def state(self):
        return self.run("return ponder.state")


@pytest.fixture
def show(chromium, pages):
    """Open the page of a model. At the end nothing complained."""

    def show_page(name="plain"):
        chromium.get_log("browser")
        chromium.get(pages[name].as_uri())
        page = Page(chromium)
        page.ready()
        return page

    yield show_page
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


@pytest.mark.parametrize("name", [*SHAPES, "included"])
@torch.no_grad()
def test_same_numbers_as_pytorch(name, worker):
    """Catches any difference of the page's model from model.py: weights in another order, RoPE in
    another form, a bias on the wrong slot, heads that look at another's keys, a threshold that is
    missed; slot by slot and in parallel (logits of size 1 within 1e-3; K-hat equal)."""
    page, model = worker(name), model_of(name)
    ids = torch.randint(257, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = list(explainer.TEXT.encode())[:40] if name == "included" else ids
    start, different = torch.tensor([ids[:14]]), set()
    for tau, alpha in ((0.0, 0.0), (0.1, 0.0), (TAU, 0.5), (1.0, 0.0)):
        logits, steps = zip(*growing(model, ids, tau, alpha), strict=True)
        found = page.ask("decode", ids=ids, tau=tau, alpha=alpha)
        assert found["steps"] == list(steps), (tau, alpha)
        assert largest_gap(found["logits"], torch.stack(logits)) < 1e-3
        out = model(start, tau=tau, alpha=alpha)
        found = page.ask("iterate", ids=ids[:14], tau=tau, alpha=alpha)
        assert found["steps"] == out.steps[0].tolist()
        assert largest_gap(found["logits"], out.logits[0]) < 1e-3
        assert tau or torch.stack(logits).std() > 0.5
        different |= {steps}
    assert len(different) == 4 and len(set(steps)) == 1  # tau = 1: no token takes a step


def test_passes_are_those_of_model_py(worker):
    """Catches an iteration that stops earlier or later than PonderLM.fixed_point."""
    page, model, passes, ids = worker(), model_of("plain"), [], list(b"All the world")
    original = model.jacobi_pass
    model.jacobi_pass = lambda *args: passes.append(1) or original(*args)
    model.fixed_point(torch.tensor([ids]), TAU)
    assert page.ask("iterate", ids=ids, tau=TAU, alpha=0)["passes"] == len(passes) > 3
    steps, _, _ = page.read("All the world")
    ended, said = page.hear("jacobi")
    assert ended is True and len(said) == len(passes) and said[-1]["steps"] == steps
    assert max(map(max, said[-1]["error"])) < 1e-4 < max(map(max, said[2]["error"]))


def test_edits(worker):
    """Catches a cache that keeps what an edit took away, or loses what it left: at the end, in the
    middle, before and behind the place where the text outgrows the window (16)."""
    page = worker()
    for text in ("To be", "To be, or not to be, that", "To be, or not to bee, that", "To be, or",
                 "To be or not to be", "x" * 60, "x" * 59 + "y", ""):  # fmt: skip
        ids = list(text.encode())
        expected = page.ask("decode", ids=ids, tau=TAU, alpha=0)["steps"]
        assert page.read(text)[0] == expected, text


def test_summary(worker):
    """Catches steps or a loss of other bytes, and a tau = 0 that is not always K."""
    page, ids = worker(), list(b"What is the city")
    steps, shown, always = page.read("What is the city")
    logits = torch.tensor(page.ask("decode", ids=ids, tau=TAU, alpha=0)["logits"])
    losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    assert shown["loss"] == pytest.approx(losses.item(), abs=1e-4)
    assert 0 < shown["steps"] == sum(steps) < always["steps"] == 2 * len(ids)


def test_an_opened_byte(worker):
    """Catches a byte whose s, w, predictions or attention are those of another byte or slot."""
    page, model, ids = worker(), model_of("plain"), list(b"What is it")
    page.read("What is it", tau=0)
    found = page.ask("open", t=4)
    with torch.no_grad():
        h, s, log_w = model.fixed_point(torch.tensor([ids]), 0.0)
        expected = model.lm_head(h)[0, 4].softmax(-1).topk(5)
    assert found["s"] == pytest.approx(s[0, 4].tolist(), abs=1e-4)
    assert found["w"] == pytest.approx(log_w[0, 4].exp().tolist(), abs=1e-4)
    for k in range(3):
        best, p = zip(*found["alone"][k], strict=True)
        assert list(best) == expected.indices[k].tolist()
        assert p == pytest.approx(expected.values[k].tolist(), abs=1e-4)
    # slot k sees the slots of bytes 0..3, and its own up to k
    assert [len(layers[0]) for layers in found["seen"]] == [13, 14, 15]
    assert all(sum(layer) == pytest.approx(1, abs=1e-6) for row in found["seen"] for layer in row)
    slots = [(i, k) for i in range(5) for k in range(3)]
    assert [(key["t"], key["k"]) for key in found["keys"]] == slots
    w = log_w[0, :5].exp().flatten().tolist()
    assert [key["w"] for key in found["keys"]] == pytest.approx(w, abs=1e-4)


def test_keys_of_a_later_segment(worker):
    """Catches keys of a text that has outgrown the window (16) under the names of other slots:
    read anew, a byte may take other steps. Slot 0 alone has a mask score of 1."""
    page = worker()
    assert len(set(page.read("It is a tale told by an idiot, full of sound")[0])) > 1
    for t in (20, 33, 43):
        keys = page.ask("open", t=t)["keys"]
        assert [key["t"] for key in keys if key["k"] == 0] == list(range(keys[0]["t"], t + 1))
        assert all((key["w"] > 0.9999) == (key["k"] == 0) for key in keys)


@torch.no_grad()
def test_continuation(worker):
    """Catches a continuation that its seed does not repeat, one that is not the model's (at
    temperature 0), or that stays in the text."""
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


# -- What a reader can do --------------------------------------------------------------------------


def test_sliders(show):
    """Catches a slider that changes nothing or too much: always-K must stay, tau = 0 must equal it,
    and alpha must move the steps up and down; and shades, table and legend that do not follow."""
    page = show()
    page.put("input", "What is the city")
    before = page.state
    n, K = 16, 2
    assert before["tau"] == TAU and before["always"]["steps"] == n * K
    assert 0 < before["shown"]["steps"] == sum(before["steps"]) < n * K
    spans = "[...document.querySelectorAll('#text span')]"
    assert page.run(f"return {spans}.map(span => +span.style.getPropertyValue('--p'))") == [
        30 * steps for steps in before["steps"]
    ]
    assert page.text("cost-shown").split("\t")[2] == str(n + before["shown"]["steps"])
    page.put("tau", 0)
    zero = page.state
    assert zero["tau"] == 0 and zero["shown"] == zero["always"] == before["always"]
    assert "0 0 bytes 1 0 bytes 2 16 bytes" in page.text("legend")
    page.click("reset")
    page.ready()
    assert page.state["shown"] == before["shown"]
    page.put("alpha", 3)
    more = page.state["shown"]["steps"]
    page.put("alpha", -3)
    assert page.state["shown"]["steps"] < before["shown"]["steps"] < more


def test_walking_through_the_bytes(show):
    """Catches a click or key that opens another byte, and attention of another slot."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page = show()
    page.put("tau", 0)
    page.put("input", "What is it")
    page.run("document.querySelectorAll('#text span')[4].click()")
    page.until("document.getElementById('opened').innerText.startsWith('Byte 4: ␣')")
    text = page.driver.find_element(By.ID, "text")
    text.send_keys(Keys.ARROW_LEFT)
    page.until("document.getElementById('opened').innerText.startsWith('Byte 3: t')")
    text.send_keys(Keys.END)
    page.until("document.getElementById('opened').innerText.includes('Nothing follows')")
    page.put("slot", 0)
    assert page.run("return document.querySelectorAll('#keys .attended').length") == 9 * 3 + 1


def test_requests_that_overtake(show):
    """Catches a continuation that begins before the text has been read, of a text that has gone
    since."""
    page = show()
    page.put("input", "What is the city")
    expected = page.state
    change = """
        const input = document.getElementById("input"), write = document.getElementById("write");
        const type = text => { input.value = text; input.dispatchEvent(new Event("input")); };
        type("Another text, which takes a while to read".repeat(3));
        write.click();
        type("What is the city");
    """
    page.run(change)
    page.ready()
    assert page.text("write") == "Continue the text" and page.text("continuation") == ""
    for name in ("steps", "shown", "always"):
        assert page.state[name] == expected[name], name


def test_both_iterations(show):
    """Catches grids that do not end at the same states, and a count of passes that is not that of
    the slots."""
    page = show()
    page.put("input", "What is it")
    slots = page.state["shown"]["steps"] + 10
    assert page.run("return +document.getElementById('pass').max") == slots
    settled = "document.querySelectorAll('#{} .settled').length"
    page.click("step")
    page.until("document.getElementById('parallel-state').innerText.startsWith('pass 1;')")
    assert page.run("return " + settled.format("sequential")) == 1
    page.put("pass", slots)
    page.until(settled.format("parallel") + f" === {slots}")
    assert page.run("return " + settled.format("sequential")) == slots
    last = page.text("parallel-state")
    passes = page.ask("iterate", ids=list(b"What is it"), tau=TAU, alpha=0)["passes"]
    assert f"pass {passes}: there after {passes};" in last and "K̂ wrong at 0 bytes" in last


def test_strange_texts(show):
    """Catches markup that is run, a character that is lost or torn, and an empty text that stops
    the page."""
    page = show()
    page.put("input", "<b>bold</b></script>&amp;\n\x00 é € 😀 \u202eabc")
    seen = page.run("return document.getElementById('text').textContent")
    assert page.run("return document.querySelectorAll('#text *:not(span)').length") == 0
    assert seen.startswith("<b>bold</b></script>&amp;↵\n␀ ·é ··€ ···😀 ")
    page.put("input", "")
    assert page.state["at"] == -1 and page.text("opened") == ""
    page.click("write")  # from the beginning of a document
    page.until("document.getElementById('continuation').children.length > 3")


# -- The file --------------------------------------------------------------------------------------


def test_page_is_self_contained(pages):
    """Catches a page that names another place, shows a path of its maker, or links to a function
    that is not there."""
    text = pages["plain"].read_text(encoding="utf-8")
    assert "http" not in text and "/home/" not in text and text.count("</script>") == 4
    links = re.findall(r'class="code" href="([^"]*)">([^:]*): (\w*)</a>', text)
    assert len(links) > 10
    for href, file, name in links:
        assert (pages["plain"].parent / href).resolve() == ROOT / file
        assert re.search(rf"(def|class) {name}\b", (ROOT / file).read_text("utf-8")), (file, name)


def test_refusals(tmp_path):
    """Catches a page of a model that it cannot run: another method, other tokens."""
    page = tmp_path / "page.html"
    vanilla = write_run(tmp_path / "vanilla", small_model(vocab_size=257, ponder_steps=0))
    odd = write_run(tmp_path / "odd", small_model(vocab_size=300))
    for run, message in (
        (vanilla, "has the method vanilla; the page runs ponderlm3 alone"),
        (odd, "has the vocabulary 300; the page runs 257 alone"),
    ):
        with pytest.raises(UserError, match=message):
            explainer.Explainer(str(run), out=page).draw()
