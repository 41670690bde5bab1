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
from runtime import UserError, write_text
from training.config import read_run
from training.runs import read_lines, read_results

LONGEST = 4096  # tokens of a depth map

PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)

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
    return [decoder.decode(tokenizer.decode([token])) or "·" for token in ids]


def read_text(subject, file=None):
    """Steps, s, w and losses of each token of a text, or of the start of the validation text.

    Returns:
        dict of run, K, tau, and tokens: dicts of text, bytes, steps, loss (hard-stopped), s, w, and
        ce, the losses by depth with all steps run; the first token has no prediction: None. And
        the means of steps and loss.

    Raises:
        UserError: a text of less than two tokens. FileNotFoundError.
    """
    val, tokenizer = subject.val, subject.tokenizer
    ids = tokenizer.encode(file.read_bytes()) if file else val.tokens[:1025].tolist()
    if len(ids) < 2:
        raise UserError(f"the text has {len(ids)} tokens; it takes 2 to predict one from another")
    if len(ids) > LONGEST:
        print(f"note: of {len(ids):,} tokens the first {LONGEST:,} are shown")
    ids = torch.tensor(ids[:LONGEST], device=subject.rows.device)
    T = subject.model.config.block_size
    lines = tokenizer.name == "lookup"  # whose windows are lines
    rows, firsts = overlapping(ids, T, T if lines else max(T // 2, 1))
    part = replace(subject, rows=rows)
    measured, (loss, steps) = measure(part), decoded(part, subject.tau)
    T, tokens = rows.size(1) - 1, [{"steps": None, "loss": None}]
    for window, first in enumerate(firsts):
        for i in range(window * T + first, (window + 1) * T):
            values = {name: getattr(measured, name)[i].tolist() for name in ("s", "w", "ce")}
            tokens.append({"steps": steps[i].item(), "loss": loss[i].item(), **values})
    ids = ids.tolist()
    for token, text, values in zip(ids, readable(tokenizer, ids), tokens, strict=True):
        values |= {"text": text, "bytes": show_token(tokenizer.decode([token]))}
    K = subject.model.config.ponder_steps
    means = {key: fmean(token[key] for token in tokens[1:]) for key in ("steps", "loss")}
    return {"run": str(subject.path), "K": K, "tau": subject.tau, "tokens": tokens, **means}


def write_page(file, template, **values):
    """Fill in a template of templates/."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, PAGES.get_template(template).render(values))
    print(f"written: {file}")


@strict_dataclass
class Heatmap(figures.Study):
    """A text with each token shaded by its steps, or by its loss: an HTML page by itself."""

    text: Path | None = None  # a text file; by default the beginning of the validation text

    def draw(self):
        fields = read_text(self.subject, self.text)
        write_page(self.out / "heatmap.html", "heatmap.html", **fields)


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
    run, config, corpus = read_run(study.path)
    commits = [row["commit"] for row in read_lines(run / "log.jsonl") if row.get("commit")]
    write_page(
        study.out / "index.html",
        "report.html",
        run=study.path,
        config=config,
        corpus=corpus,
        commit=commits[-1] if commits else "not recorded",
        losses=loss_rows(study.path),
        tables=study.tables,
        windows=len(study.subject.rows),
        tau=study.subject.tau,
        settings=json.dumps(asdict(config), indent=2, default=str),
    )


@strict_dataclass
class Report(figures.Shift, figures.Tokens, figures.Tau, Heatmap):
    """All figures and tables of one run, the depth map, config and commit, on one page."""

    def draw(self):
        for figure in (*figures.ALL, Heatmap):
            print(f"\n--- {figure.__name__.lower()}", flush=True)
            figure.draw(self)
        report_page(self)
