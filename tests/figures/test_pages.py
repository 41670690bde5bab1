"""The HTML pages."""

from dataclasses import replace

import pytest
import torch
from conftest import small_model

from data import Tokenizer
from lab.figures import pages
from lab.figures.subject import decoded, measure


@pytest.mark.parametrize("n, T", [(2, 8), (9, 8), (10, 8), (13, 8), (50, 8), (50, 7), (5, 1)])
def test_overlapping(n, T):
    """Catches tokens that are predicted twice or never, in another order, or with less than half a
    window before them."""
    rows, firsts = pages.overlapping(torch.arange(n), T, max(T // 2, 1))
    new = [row[first + 1 :].tolist() for row, first in zip(rows, firsts, strict=True)]
    assert [i for part in new for i in part] == list(range(1, n))
    assert all(first >= T // 2 for first in firsts[1:])
    assert rows.shape[1] == min(n, T + 1)
    rows, firsts = pages.overlapping(torch.arange(3 * T + 1), T, T)
    assert rows[:, 0].tolist() == [0, T, 2 * T] and firsts == [0, 0, 0]


def test_readable():
    """Catches a character of several tokens that is lost or torn."""
    tokenizer = Tokenizer.bytes()
    shown = pages.readable(tokenizer, tokenizer.encode("aé€\n"))
    assert shown == ["a", "·", "é", "·", "·", "€", "\n"]


@torch.no_grad()
def test_read_text(tmp_path, subject):
    """Catches values of the token before or after, or of a window in which a token has less
    context."""
    one = subject(small_model(seed=2, vocab_size=257, block_size=8), V=257)
    text = tmp_path / "text.txt"
    text.write_bytes(b"a text of 21 letters.")
    fields = pages.read_text(one, text)
    tokens = fields["tokens"]
    ids = torch.tensor(list(text.read_bytes()))
    assert len(tokens) == 21 and tokens[0]["steps"] is None
    for i in range(1, 21):
        start = 0 if i <= 8 else 4 if i <= 12 else 8 if i <= 16 else 12
        row = replace(one, windows=ids[None, start : start + 9])
        place, (_, w, ce), (loss, steps) = i - start - 1, measure(row), decoded(row)
        assert tokens[i]["steps"] == steps[place]
        assert tokens[i]["loss"] == pytest.approx(loss[place].item(), abs=1e-3)
        assert tokens[i]["ce"] == pytest.approx(ce[place].tolist(), abs=1e-3)
        assert tokens[i]["w"] == pytest.approx(w[place].tolist(), abs=1e-3)


def token(text, steps, loss):
    values = {"s": [0.5, 0.25, 0.25], "w": [1.0, 0.5, 0.25], "ce": [3.0, 2.0, 1.0]}
    return {"text": text, "bytes": text, "steps": steps, "loss": loss, **values}


@pytest.fixture
def page(tmp_path):
    """A depth map of a few tokens, one of which looks like the end of a script."""
    tokens = [{"text": "<", "bytes": "<", "steps": None, "loss": None}]
    tokens += [token("</script>", 0, 0.5), token("\n", 1, 3.0), token("&amp;", 2, 9.0)]
    fields = {"run": "out/<i>", "K": 2, "tau": 0.1, "tokens": tokens, "steps": 1.0, "loss": 4.167}
    pages.write_page(tmp_path / "heatmap.html", "heatmap.html", **fields)
    return tmp_path / "heatmap.html"


def test_page_is_self_contained(page):
    """Catches a page that asks the network for anything, or a token that ends its script."""
    text = page.read_text(encoding="utf-8")
    assert "http" not in text and text.count("</script>") == 2
    assert "out/&lt;i&gt;: 1.00 pondering steps" in text and "4.167 nats" in text


def test_page_in_a_browser(page, chromium):
    """Catches shades that do not follow steps or loss, a pointer or key that shows another token,
    a link that does not switch, and errors in the console."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    chromium.get(page.as_uri())
    find = lambda css: chromium.find_elements(By.CSS_SELECTOR, css)  # noqa: E731
    spans = find("#text span")
    assert [span.text for span in spans] == ["<", "</script>", "↵", "&amp;"]
    values = "return [...arguments].map(span => +span.style.getPropertyValue('--p'))"
    shades = lambda: chromium.execute_script(values, *spans)  # noqa: E731
    by_steps = shades()
    assert by_steps == [0, 0, 30, 60]
    (detail,) = find("#detail")
    ActionChains(chromium).move_to_element(spans[3]).perform()
    assert "token 3: “&amp;” after “" in detail.text and "2 of 2 steps, loss 9.000" in detail.text
    assert [row.text for row in find("#detail tr")] == [
        "step s w loss up to it",
        "0 0.5000 1.00 3.000",
        "1 0.2500 0.500 2.000",
        "2 0.2500 0.250 1.000",
    ]
    (text,) = find("#text")
    text.send_keys(Keys.ARROW_LEFT)
    assert "token 2: " in detail.text and "pale: not executed" in detail.text
    assert [row.text for row in find("#detail tr.faint")] == ["2 0.2500 0.250 1.000"]
    text.send_keys(Keys.HOME)
    assert "nothing came before it" in detail.text

    def shade_by(view):  # the page follows its address when it is told, which takes a moment
        chromium.find_element(By.LINK_TEXT, view).send_keys(Keys.ENTER)
        WebDriverWait(chromium, 10).until(lambda _: find(f"body[data-view={view}]"))

    shade_by("loss")
    assert shades() == [0, 5, 30, 60]
    shade_by("steps")
    assert shades() == by_steps
    assert chromium.get_log("browser") == []
