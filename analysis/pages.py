"""HTML pages that need nothing but themselves: the depth map of a text, and the report of a run.

The depth map shades each token by the steps that were executed before it was chosen, at the token
that predicts it (as sample.py --show-steps does), or by its loss there. What the pages look like,
and what they say, is in templates/.
"""

import codecs
import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import jinja2
import torch

from analysis import figures
from analysis.measuring import decoded, measure
from analysis.words import show_token
from baselines.cost import cost
from model import strict_dataclass
from runtime import UserError, read_json, write_text
from training.config import read_run
from training.runs import read_lines, read_results

LONGEST = 4096  # tokens of a depth map

PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)
PAGES.policies["json.dumps_kwargs"] = {"allow_nan": False}  # which no browser reads

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
        UserError: a text of less than two tokens. FileNotFoundError.
    """
    if file is None:
        ids = subject.val.tokens[:1025].tolist()
    else:
        ids = subject.tokenizer.encode(file.read_bytes())
    if len(ids) < 2:
        raise UserError(f"the text has {len(ids)} tokens; it takes 2 to predict one from another")
    if len(ids) > LONGEST:
        print(f"note: of {len(ids):,} tokens the first {LONGEST:,} are shown")
    ids = torch.tensor(ids[:LONGEST], device=subject.rows.device)
    T = subject.model.config.block_size
    lines = subject.tokenizer.name == "lookup"  # whose windows are lines
    rows, firsts = overlapping(ids, T, T if lines else max(T // 2, 1))
    part = replace(subject, rows=rows)
    measured, (loss, steps) = measure(part, "depths"), decoded(part, subject.tau, label="losses")
    T, tokens = rows.size(1) - 1, [{"steps": None, "loss": None}]
    for window, first in enumerate(firsts):
        for i in range(window * T + first, (window + 1) * T):
            values = {name: getattr(measured, name)[i].tolist() for name in ("s", "w", "ce")}
            tokens.append({"steps": steps[i].item(), "loss": loss[i].item(), **values})
    ids = ids.tolist()
    for token, text, values in zip(ids, readable(subject.tokenizer, ids), tokens, strict=True):
        values |= {"text": text, "bytes": show_token(subject.tokenizer.decode([token]))}
    K = subject.model.config.ponder_steps
    return {"run": str(subject.path), "K": K, "tau": subject.tau, "tokens": tokens}


def heatmap_page(file):
    """heatmap.json, what `read_text` returned -> heatmap.html beside it.

    Raises:
        UserError: it was not saved before.
    """
    if not file.is_file():
        raise UserError(f"{file} does not exist: draw it once without --redraw")
    fields = read_json(file)
    known = [token for token in fields["tokens"] if token["steps"] is not None]
    means = {key: fmean(token[key] for token in known) for key in ("steps", "loss")}
    page = file.with_suffix(".html")
    write_text(page, PAGES.get_template("heatmap.html").render(fields | means))
    return page


@strict_dataclass
class Heatmap(figures.Study):
    """A text with each token shaded by its steps, or by its loss: an HTML page by itself."""

    text: Path | None = None  # a text file; by default the beginning of the validation text

    def draw(self):
        file = self.out / "heatmap.json"
        if not self.redraw:
            write_text(file, json.dumps(read_text(self.subject, self.text)))
        print(f"written: {heatmap_page(file)}")


# -- The report of a run ---------------------------------------------------------------------------


def loss_rows(path):
    """The final evaluation and what a token costs, {what: value}; {} of an unfinished run."""
    if not (path / "results.json").is_file():
        return {}
    results, (_, config, _) = read_results(path), read_run(path)
    steps, rows = results["hard"]["steps"], {}
    keys = {"as trained": "trained", "at the fixed point": "fixed", "hard-stopped": "hard"}
    for what, key in keys.items():
        rows[f"loss {what}, nats a token"] = f"{results[key]['loss']:.4f}"
    rows["unigram entropy, nats a token"] = f"{results['unigram_entropy']:.4f}"
    rows[f"executed steps at tau = {config.tau:g}"] = f"{steps:.3f}"
    spent = vars(cost(config.model, steps)).items()
    return rows | {name.replace("_", " "): f"{value:,.4g}" for name, value in spent}


def report_page(study):
    """The figures of a study, and what the run knows of itself -> <out>/index.html."""

    def about(name):  # what figures.py wrote about a figure, in one line
        file = study.out / f"{name}.json"
        facts = read_json(file).items() if file.is_file() else ()
        return ", ".join(f"{key} {value}" for key, value in facts if value is not None)

    run, config, corpus = read_run(study.path)
    commits = [row["commit"] for row in read_lines(run / "log.jsonl") if row.get("commit")]
    page = PAGES.get_template("report.html").render(
        run=study.path,
        config=config,
        corpus=corpus,
        commit=commits[-1] if commits else "not recorded",
        losses=loss_rows(study.path),
        tables=study.tables,
        about={name: about(name) for name in study.tables},
        settings=json.dumps(asdict(config), indent=2, default=str),
    )
    write_text(study.out / "index.html", page)
    return study.out / "index.html"


@strict_dataclass
class Report(figures.Shift, figures.Tokens, figures.Tau, Heatmap):
    """All figures and tables of one run, the depth map, config and commit, on one page."""

    def draw(self):
        if self.redraw and not self.run:
            raise UserError("report --redraw needs --run, the run that the page is about")
        for figure in (*figures.ALL, Heatmap):
            print(f"\n--- {figure.__name__.lower()}", flush=True)
            figure.draw(self)
        print(f"written: {report_page(self)}")
