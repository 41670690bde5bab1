"""HTML pages that need nothing but themselves: the depth map of a text, and the report of a run.

The depth map shades each token by the steps that were executed before it was chosen, at the token
that predicts it (as sample.py --show-steps does), or by its loss there.
"""

import codecs
import html
import json
import re
from dataclasses import replace
from string import Template

import torch

from cost import cost
from measure import decoded, measure
from run import read_lines, read_results
from settings import read_run
from words import show_token

LONGEST = 4096  # tokens of a depth map

# -- The depth map ---------------------------------------------------------------------------------


def overlapping(ids, T, stride):
    """Token ids -> windows (.., T+1), a stride from each other, so that all tokens but the first
    have at least T - stride before them; and for each window the first of its targets that is new.
    """
    last = max(len(ids) - 1 - T, 0)
    starts = sorted({*range(0, last, stride), last})
    rows = torch.stack([ids[start : start + T + 1] for start in starts])
    ends = [0] + [start + rows.size(1) - 1 for start in starts]  # targets up to here are done
    return rows, [end - start for start, end in zip(starts, ends, strict=False)]


def readable(tokenizer, ids):
    """Each token as text. One that ends inside a character leaves it to the token that ends it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(tokenizer.decode([token])) or "·" for token in ids]
    symbols = {i: chr(0x2400 + i) for i in range(32) if chr(i) not in "\n\t"}  # control characters
    return [text.translate(symbols) for text in texts]


def read_text(subject, file=None):
    """Steps, s, w and losses of each token of a text, or of the start of the validation text.

    Returns:
        dict of run, K, tau, and tokens: dicts of text, bytes, steps, loss (hard-stopped), s, w, and
        ce, the losses by depth with all steps run; the first token has no prediction: None.

    Raises:
        FileNotFoundError, ValueError: no such file, or a text of less than two tokens.
    """
    if file is None:
        ids = subject.val.tokens[:1025].tolist()
    else:
        ids = subject.tokenizer.encode(file.read_bytes())
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; it takes 2 to predict one from another")
    if len(ids) > LONGEST:
        print(f"note: of {len(ids):,} tokens the first {LONGEST:,} are shown")
    ids = torch.tensor(ids[:LONGEST], device=subject.rows.device)
    T = subject.model.config.block_size
    stride = T if subject.tokenizer.name == "hops" else max(T // 2, 1)  # its windows are lines
    rows, firsts = overlapping(ids, T, stride)
    part = replace(subject, rows=rows)
    measured, (loss, steps) = measure(part, "depths"), decoded(part, subject.tau, label="losses")
    T, tokens = rows.size(1) - 1, [None]
    for window, first in enumerate(firsts):
        for i in range(window * T + first, (window + 1) * T):
            values = {name: getattr(measured, name)[i].tolist() for name in ("s", "w", "ce")}
            tokens.append({"steps": steps[i].item(), "loss": loss[i].item(), **values})
    ids = ids.tolist()
    for i, (text, token) in enumerate(zip(readable(subject.tokenizer, ids), ids, strict=True)):
        shown = show_token(subject.tokenizer.decode([token]))
        tokens[i] = {"text": text, "bytes": shown, **(tokens[i] or {"steps": None, "loss": None})}
    K = subject.model.config.ponder_steps
    return {"run": str(subject.path), "K": K, "tau": subject.tau, "tokens": tokens}


def save_text(file, fields):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(fields), encoding="utf-8")


STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1a1a1a; --faint: #5c5c5c;
  --line: #cccccc; --steps: #0072B2; --loss: #D55E00; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14161a; --ink: #e8e8e8; --faint: #a8a8a8; --line: #444444; --steps: #3fa9e8; }
}
body { background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  max-width: 60rem; margin: 0 auto; padding: 1rem 1rem 2rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
a { color: var(--steps); } img { max-width: 100%; background: #ffffff; }
.faint, caption { color: var(--faint); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { border-bottom: 1px solid var(--line); padding: .1rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.5 ui-monospace, monospace; }
"""

HEATMAP = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<title>Depth map of $run</title>
<style>$style
body { padding-bottom: 13rem; }
nav a { margin-right: .6rem; } nav a[aria-current] { color: var(--ink); font-weight: bold; }
#text { white-space: pre-wrap; overflow-wrap: anywhere; font: 1.05rem/1.9 ui-monospace, monospace; }
#text span { padding: .15em 0; border-radius: 2px; cursor: default; unicode-bidi: isolate;
  scroll-margin-bottom: 12rem;
  background: color-mix(in srgb, var(--tone) calc(var(--p) * 1%), transparent); }
#text span:hover, #text span.on { outline: 2px solid var(--ink); }
body[data-view=steps] { --tone: var(--steps); } body[data-view=loss] { --tone: var(--loss); }
.legend span { padding: .1em .6em; margin-right: .3em; color: var(--ink);
  background: color-mix(in srgb, var(--tone) calc(var(--p) * 1%), transparent); }
#detail { position: fixed; bottom: 0; left: 0; right: 0; height: 11rem; overflow: auto;
  padding: .5rem 1rem; box-sizing: border-box; background: var(--page);
  border-top: 2px solid var(--line); }
#detail > div { max-width: 60rem; margin: auto; }
</style></head>
<body data-view="steps">
<h1>How long the model thinks</h1>
<p>$run: $mean pondering steps a token of at most $K, stopped at &tau; = $tau; $loss nats a token.
A token's shade tells what came <em>before</em> it: the steps that were executed to predict it, or
its loss. Point at a token, or walk with the arrow keys.</p>
<nav aria-label="shade by"><a href="#steps">steps</a><a href="#loss">loss</a></nav>
<p class="legend faint" id="legend"></p>
<div id="text" tabindex="0" role="application" aria-label="the text; arrow keys walk through it"
  aria-describedby="detail"></div>
<div id="detail" aria-live="polite" tabindex="0"><div></div></div>
<script type="application/json" id="data">$data</script>
<script>
"use strict";
const {K, tokens} = JSON.parse(document.getElementById("data").textContent);
const text = document.getElementById("text"), detail = document.querySelector("#detail > div");
const DARKEST = 60, HIGHEST = 6;  // percent of colour; nats
const shade = (t, view) => t.steps === null ? 0
  : DARKEST * (view === "steps" ? t.steps / Math.max(K, 1) : Math.min(t.loss / HIGHEST, 1));
let at = -1;

function element(name, content) {
  const made = document.createElement(name);
  if (content !== undefined) made.textContent = content;
  return made;
}

function point(i) {  // show what is known of token i
  text.children[at]?.classList.remove("on");
  at = i;
  const token = tokens[i];
  text.children[i].classList.add("on");
  detail.replaceChildren(element("strong", "token " + i + ": “" + token.bytes + "”"));
  if (token.steps === null) {
    detail.append(element("p", "the first one: nothing came before it, nothing predicted it"));
    return;
  }
  detail.append(" after “" + tokens[i - 1].bytes + "”: " + token.steps + " of " + K
    + " steps, loss " + token.loss.toFixed(3) + " nats");
  const table = element("table");
  const heads = element("tr");
  heads.append(...["step", "s", "w", "loss up to it"].map(title => element("th", title)));
  table.append(heads);
  token.s.forEach((s, k) => {
    const row = element("tr");
    if (k > token.steps) row.className = "faint";
    const values = [k, s.toFixed(4), token.w[k].toPrecision(3), token.ce[k].toFixed(3)];
    row.append(...values.map(value => element("td", value)));
    table.append(row);
  });
  detail.append(table);
  if (token.steps < K) detail.append(element("p", "pale: not executed in decoding"));
}

function view() {  // shade by what the address says after #
  const chosen = location.hash === "#loss" ? "loss" : "steps";
  document.body.dataset.view = chosen;
  for (const link of document.querySelectorAll("nav a")) {
    link.removeAttribute("aria-current");
    if (link.hash === "#" + chosen) link.setAttribute("aria-current", "true");
  }
  tokens.forEach((t, i) => text.children[i].style.setProperty("--p", shade(t, chosen)));
  const legend = document.getElementById("legend");
  legend.replaceChildren(chosen === "steps" ? "steps: " : "nats: ");
  for (let k = 0; k <= (chosen === "steps" ? K : HIGHEST); k++) {
    const sample = element("span", k === HIGHEST && chosen === "loss" ? "≥ " + k : k);
    sample.style.setProperty("--p", shade({steps: k, loss: k}, chosen));
    legend.append(sample);
  }
}

for (const [i, token] of tokens.entries()) {
  const span = element("span", token.text.replaceAll("\\n", "↵\\n"));
  span.addEventListener("pointerenter", () => point(i));
  text.append(span);
}
text.addEventListener("keydown", event => {
  const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1}[event.key];
  if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  point(Math.min(Math.max(to, 0), tokens.length - 1));
  text.children[at].scrollIntoView({block: "nearest"});
});
text.addEventListener("focus", () => { if (at < 0) point(0); });
window.addEventListener("hashchange", view);
view();
</script></body></html>
""")


def heatmap_page(file):
    """heatmap.json -> heatmap.html beside it.

    Raises:
        FileNotFoundError, ValueError: it was not saved before, or it is damaged.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: draw it once without --redraw")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        known = [token for token in fields["tokens"] if token["steps"] is not None]
        mean = {key: sum(token[key] for token in known) / len(known) for key in ("steps", "loss")}
        shown = {"run": html.escape(fields["run"]), "K": f"{fields['K']:d}"}
        shown |= {"tau": f"{fields['tau']:g}", "style": STYLE}
        data = json.dumps({"K": fields["K"], "tokens": fields["tokens"]}, allow_nan=False)
        if any(len(token[key]) != fields["K"] + 1 for token in known for key in ("s", "w", "ce")):
            raise ValueError("a token has not K + 1 values of s, w and ce")
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{file} is damaged: {error!r:.200}; draw it without --redraw") from None
    shown |= {"mean": f"{mean['steps']:.2f}", "loss": f"{mean['loss']:.3f}"}
    page = HEATMAP.substitute(shown, data=data.replace("<", "\\u003c"))  # no tag ends inside
    page_file = file.with_suffix(".html")
    page_file.write_text(page, encoding="utf-8")
    return page_file


# -- The report of a run ---------------------------------------------------------------------------

SECTIONS = {
    "converge": (
        "The Jacobi iteration approaches its fixed point",
        "Training runs all positions in parallel and refines the latents a few times; decoding "
        "computes the fixed point. RMSE within a token, mean over tokens, float64.",
    ),
    "buckets": (
        "Where more computation helps",
        "Tokens in three equal parts by difficulty; what each step gains them (integration "
        "truncated after the step and renormalised); and how difficult the tokens are that stop "
        "after each step. Bucketed by the loss of h(0), which enters the first gain, too, a token "
        "that was wrong by chance seems to gain by chance; by another model's loss it does not.",
    ),
    "difficulty": ("", ""),
    "shift": (
        "Fewer and more steps",
        "The router's logits are shifted by alpha times the step index; the model decodes with "
        "hard stopping.",
    ),
    "tokens": (
        "Tokens and words",
        "Steps executed after reading a token; of a word, after its last token.",
    ),
    "compound": ("", "Words of several tokens: how the tokens inside and the last ones stop."),
    "tau": (
        "Where to stop",
        "Hard-stopped at tau. The last row is bfloat16 against float32 at the same tau.",
    ),
    "penalty": (
        "The penalty's ratio by both readings",
        "rho of each batch of a training step, at each depth, and how many w it penalises.",
    ),
}

PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<title>Report of $run</title><style>$style</style></head>
<body>$body</body></html>
""")


def as_table(markdown):
    """A table of tables.markdown -> HTML."""
    lines = [re.split(r" \| ", line[2:-2]) for line in markdown.strip().splitlines()]
    del lines[1]
    rows = []
    for i, line in enumerate(lines):
        tag = "td" if i else "th"
        cells = (html.escape(cell.replace("\\|", "|")) for cell in line)
        rows.append("<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>")
    return '<div class="wide"><table>' + "".join(rows) + "</table></div>"


def loss_rows(path):
    """The final evaluation and what a token costs, [(what, value)]; [] of an unfinished run."""
    if not (path / "results.json").is_file():
        return []
    results = read_results(path)
    _, config, _ = read_run(path)
    hard, spent = results["hard"], cost(config.model, results["hard"]["steps"])
    losses = {"as trained": "trained", "at the fixed point": "fixed", "hard-stopped": "hard"}
    rows = [
        (f"loss {what}, nats a token", f"{results[k]['loss']:.4f}") for what, k in losses.items()
    ]
    rows += [("unigram entropy, nats a token", f"{results['unigram_entropy']:.4f}")]
    rows += [(f"executed steps at tau = {config.tau:g}", f"{hard['steps']:.3f}")]
    return rows + [(name.replace("_", " "), f"{value:,.4g}") for name, value in vars(spent).items()]


def settings(out, name):
    """What a figure was measured on, as figures.py saved it."""
    file = out / f"{name}.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found = {key: value for key, value in found.items() if value is not None}
    return html.escape(", ".join(f"{key} {value}" for key, value in found.items()))


def report_page(path, out):
    """What figures.py left in `out`, and what the run knows of itself -> out/index.html."""
    run, config, corpus = read_run(path)
    started = [row for row in read_lines(run / "log.jsonl") if "torch" in row]
    commit = (started[-1].get("commit") if started else None) or "not recorded"
    rows = loss_rows(path) or [
        ("final evaluation", "none: a checkpoint, or not trained to the end")
    ]
    what = f"{config.model.label}, K = {config.model.ponder_steps}; commit {commit}; corpus "
    what += f"{corpus['name']}, {corpus['train_tokens']:,} training tokens."
    body = [f"<h1>{html.escape(str(path))}</h1><p>{html.escape(what)}</p>"]
    body += ["<h2>Losses and costs</h2>"]
    body += ["<table>", *(f"<tr><td>{a}</td><td>{b}</td></tr>" for a, b in rows), "</table>"]
    if (out / "heatmap.html").is_file():
        body += ['<h2>A text</h2><p><a href="heatmap.html">Each token by its steps or loss</a></p>']
    for name, (title, text) in SECTIONS.items():
        if not (out / f"{name}.md").is_file():
            continue
        body += [f"<h2>{title}</h2>"] if title else []
        body += [f"<p>{text}</p>"] if text else []
        if (out / f"{name}.png").is_file():
            body += [f'<img src="{name}.png" alt="{title}; the numbers are in the table">']
        body += [as_table((out / f"{name}.md").read_text(encoding="utf-8"))]
        body += [f'<p class="faint"><a href="{name}.csv">{name}.csv</a>, {settings(out, name)}</p>']
    all_settings = json.dumps(vars(config) | {"model": vars(config.model)}, indent=2, default=str)
    body += ["<h2>Settings</h2>", f"<pre>{html.escape(all_settings)}</pre>"]
    page = PAGE.substitute(run=html.escape(str(path)), style=STYLE, body="\n".join(body))
    (out / "index.html").write_text(page, encoding="utf-8")
    return out / "index.html"
